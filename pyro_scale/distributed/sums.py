"""Sums whose terms ranks share out, for algorithms that decide by them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from pyro_scale.distributed.ranks import Ranks, code_of
from pyro_scale.errors import PyroScaleError, RankError

T = TypeVar("T")

#: A rank's terms of a sum, or of some.
Terms: TypeAlias = Callable[..., Tensor | Sequence[Tensor]]

#: What rank 0 raises as what another one has raised.
_KNOWN = PyroScaleError, torch.linalg.LinAlgError  # type: ignore[attr-defined]
#: Where ranks are that wait for the next sum.
_PLACE = "a sum over rows"


class Sums:
    """Functions whose values are sums over ranks, each of which computes its own terms.

    Rank 0 alone runs the algorithm that needs them.  So a step that processors round in different
    ways cannot lead ranks apart, and an error that the algorithm can stand leaves no rank waiting.

    Args:
        ranks: the processes.
        terms: what computes this rank's, by name.
        device: where tensors are on this rank.
    """

    def __init__(
        self,
        ranks: Ranks,
        terms: Mapping[str, Terms],
        device: torch.device,
    ):
        self._ranks, self._terms, self._device = ranks, terms, device

    def run(self, algorithm: Callable[[], T]) -> T:
        """What an algorithm comes to, on every rank; it calls `ask`, on rank 0."""
        if self._ranks.is_alone:
            return algorithm()
        found = None
        if self._ranks.is_first:
            try:
                found = self._packed(algorithm())
            finally:  # the others learn from rank 0 what it was, if it failed
                if not self._ranks.is_over:
                    self._ranks.tell(None, _PLACE)
        else:
            while (asked := self._ranks.tell(None, _PLACE)) is not None:
                self._answer(*self._unpacked(asked))
        found = self._ranks.of_first(found, "what sums over rows have led to")
        result: T = self._unpacked(found)
        return result

    def ask(self, name: str, *arguments: Any) -> Any:
        """The sum over ranks of the named terms: a tensor, or a tuple of them; on rank 0.

        Raises:
            PyroScaleError, LinAlgError: what a rank has raised.
            RankError: a rank has raised something else, or has died.
        """
        if self._ranks.is_alone:
            return self._terms[name](*arguments)
        return self._ask("all", name, arguments)

    def ask_each(self, name: str, *arguments: Any) -> list[Any]:
        """Every rank's named terms by themselves, whatever they are, by rank; on rank 0.

        Raises:
            PyroScaleError, LinAlgError, RankError: as for `ask`.
        """
        if self._ranks.is_alone:
            return [self._terms[name](*arguments)]
        found: list[Any] = self._ask("each", name, arguments)
        return found

    def _ask(self, whose: str, name: str, arguments: Sequence[Any]) -> Any:
        self._ranks.tell(self._packed((whose, name, arguments)), _PLACE)
        return self._answer(whose, name, arguments)

    def _answer(self, whose: str, name: str, arguments: Sequence[Any]) -> Any:
        terms: Any = ()
        error: BaseException | None = None
        try:
            terms = self._terms[name](*arguments)
        except BaseException as raised:  # the others wait for this rank's terms
            error = raised
        failed = self._ranks.add_up(torch.tensor([float(error is not None)]), _PLACE)
        if bool(failed):
            self._raise(error)
            return None  # rank 0 decides what follows
        if whose == "each":
            every = self._ranks.at_first(self._packed(terms), _PLACE)
            return None if every is None else [self._unpacked(each) for each in every]
        parts = [terms] if isinstance(terms, Tensor) else list(terms)
        vector = torch.cat([part.detach().cpu().double().flatten() for part in parts])
        sums = self._ranks.add_up(vector, _PLACE).split([part.numel() for part in parts])
        whole = [each.reshape(part.shape).to(part) for each, part in zip(sums, parts, strict=True)]
        return whole[0] if isinstance(terms, Tensor) else tuple(whole)

    def _raise(self, error: BaseException | None) -> None:
        """Tells what was raised, and raises it on rank 0; an interrupt where it is one, too."""
        mine = None if error is None else (_kind(error), _text(error), code_of(error))
        told = self._ranks.of_all(mine, "what was raised in a sum over rows")
        if error is not None and (self._ranks.is_first or not isinstance(error, Exception)):
            raise error
        if self._ranks.is_first:
            rank, failed = next((r, each) for r, each in enumerate(told) if each is not None)
            kind, why, code = failed
            again = kind(f"rank {rank}: {why}")
            if isinstance(again, PyroScaleError) and code is not None:
                again.code = code
            raise again

    def _packed(self, value: Any) -> bytes:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()

    def _unpacked(self, value: Any) -> Any:
        """On this rank's device, wherever it was on rank 0."""
        return torch.load(io.BytesIO(value), map_location=self._device, weights_only=False)


def _kind(error: BaseException) -> type[Exception]:
    return next((type(error) for kind in _KNOWN if isinstance(error, kind)), RankError)


def _text(error: BaseException) -> str:
    return format(error) if isinstance(error, _KNOWN) else f"{type(error).__name__}: {error}"
