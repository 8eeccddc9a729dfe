"""Sums over rows of data that ranks share out, for an algorithm (such as an optimizer) that runs on
rank 0.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from pyro_scale.distributed.shares import Share
from pyro_scale.distributed.workers import ALONE, RankFailure, Workers

T = TypeVar("T")

#: Computes a rank's terms of one or several sums.
Terms: TypeAlias = Callable[..., Tensor | Sequence[Tensor]]

#: The activity of ranks that wait for the next sum, in error messages.
_PLACE = "a sum over rows"


@dataclass(frozen=True)
class Sums:
    """Named functions whose results are sums over ranks, each of which computes the terms of its
    own rows.

    Only rank 0 runs the algorithm that needs the sums, such as an optimizer; the others compute
    their terms on request. So ranks make the same decisions even if their processors round
    differently, and an error that the algorithm catches leaves no rank waiting.

    Attributes:
        workers: the processes.
        device: device of the tensors on this process.
        terms: dict from a name to a function that computes this process's terms of one sum.
    """

    workers: Workers = ALONE
    device: torch.device | str = "cpu"
    terms: Mapping[str, Terms] = field(default_factory=dict)

    @property
    def are_here(self) -> bool:
        """Whether this is the only process, so that all terms of the sums are computed here."""
        return self.workers.is_alone

    @property
    def share(self) -> Share:
        """The chunks of rows for which this process computes terms: every n-th one, with n
        processes.
        """
        return self.workers.share

    def with_terms(self, terms: Mapping[str, Terms]) -> Sums:
        """A copy that computes other sums, by the same processes.

        Args:
            terms: dict from a name to a function that computes this process's terms of one sum.
        """
        return replace(self, terms=terms)

    def run(self, algorithm: Callable[[], T]) -> T:
        """Runs an algorithm on rank 0, and returns its result on every rank. All ranks must call
        this; the other ranks compute their terms whenever the algorithm calls `ask` or `ask_each`.
        """
        if self.workers.is_alone:
            return algorithm()
        packed = None
        if self.workers.is_first:
            try:
                packed = self._pack(algorithm())
            finally:  # if it has failed, the others learn why from the next message
                if not self.workers.is_over:
                    self.workers.broadcast_unchecked(None, _PLACE)
        else:
            while (request := self.workers.broadcast_unchecked(None, _PLACE)) is not None:
                self._answer(*self._unpack(request))
        packed = self.workers.broadcast(packed, "what sums over rows have led to")
        result: T = self._unpack(packed)
        return result

    def ask(self, name: str, *arguments: Any) -> Any:
        """The sum over ranks of one function's results: a tensor, or a tuple of tensors. Only for
        the algorithm that `run` runs on rank 0.

        Args:
            name: name of the function in `terms`.
            *arguments: arguments of the function, which are sent to all ranks.

        Raises:
            PyroScaleError, LinAlgError: as a rank has raised it.
            RankError: a rank has raised another error, or has died.
        """
        if self.workers.is_alone:
            return self.terms[name](*arguments)
        return self._request("sum", name, arguments)

    def ask_each(self, name: str, *arguments: Any) -> list[Any]:
        """The results of one function on every rank, in the order of ranks, not added up. Only for
        the algorithm that `run` runs on rank 0.

        Args:
            name: name of the function in `terms`.
            *arguments: arguments of the function, which are sent to all ranks.

        Raises:
            PyroScaleError, LinAlgError, RankError: as for `ask`.
        """
        if self.workers.is_alone:
            return [self.terms[name](*arguments)]
        terms: list[Any] = self._request("list", name, arguments)
        return terms

    def _request(self, what: Literal["sum", "list"], name: str, arguments: Sequence[Any]) -> Any:
        self.workers.broadcast_unchecked(self._pack((what, name, arguments)), _PLACE)
        return self._answer(what, name, arguments)

    def _answer(self, what: Literal["sum", "list"], name: str, arguments: Sequence[Any]) -> Any:
        """Computes this rank's terms and sends them to the others. Returns the sum or the list of
        all ranks' terms on rank 0; other ranks ignore what is returned.

        Args:
            what: "sum" to add the ranks' terms up, "list" to list them.
            name: name of the function in `terms`.
            arguments: arguments of the function.
        """
        terms: Any = ()
        error: BaseException | None = None
        try:
            terms = self.terms[name](*arguments)
        except BaseException as raised:  # the others wait for this rank's terms
            error = raised
        failed = self.workers.sum(torch.tensor([float(error is not None)]), _PLACE)
        if bool(failed):
            self._raise(error)
            return None  # rank 0 decides what follows
        if what == "list":
            by_rank = self.workers.gather_at_first(self._pack(terms), _PLACE)
            return None if by_rank is None else [self._unpack(packed) for packed in by_rank]
        parts = [terms] if isinstance(terms, Tensor) else list(terms)
        vector = torch.cat([part.detach().cpu().double().flatten() for part in parts])
        sums = self.workers.sum(vector, _PLACE).split([part.numel() for part in parts])
        shaped = [
            total.reshape(part.shape).to(part) for total, part in zip(sums, parts, strict=True)
        ]
        return shaped[0] if isinstance(terms, Tensor) else tuple(shaped)

    def _raise(self, error: BaseException | None) -> None:
        """Exchanges errors among ranks after one of them has failed, and raises one. Rank 0 raises
        its own error or else the first of another rank; the other ranks raise only an interrupt of
        their own.
        """
        failure = None if error is None else RankFailure.from_error(error)
        failures = self.workers.gather(failure, "what was raised in a sum over rows")
        if error is not None and (self.workers.is_first or not isinstance(error, Exception)):
            raise error
        if self.workers.is_first:
            rank, first = next((r, of_rank) for r, of_rank in enumerate(failures) if of_rank)
            raise _as_error(first, rank)

    def _pack(self, value: Any) -> bytes:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()

    def _unpack(self, value: Any) -> Any:
        """The object that `_pack` turned into bytes on another rank, with its tensors on this
        process's device.
        """
        return torch.load(io.BytesIO(value), map_location=self.device, weights_only=False)


#: Sums of which this process computes all terms.
HERE = Sums()


def _as_error(failure: RankFailure, rank: int) -> BaseException:
    """The error to raise on rank 0 for an error on another rank: a LinAlgError of torch stays one,
    as algorithms catch it; other errors as `RankFailure.as_error` makes them."""
    if issubclass(failure.kind, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return failure.kind(f"rank {rank}: {failure.message}")
    return failure.as_error(rank)
