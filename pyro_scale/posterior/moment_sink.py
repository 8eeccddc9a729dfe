"""A sink that accumulates moments of draws, and does not keep the draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.online_moments import Totals
from pyro_scale.core.validation import evenly
from pyro_scale.engine.draws import Draws
from pyro_scale.posterior.draws import (
    OnlineSamples,
    PosteriorDraws,
    SampleTotals,
    finite_samples,
)
from pyro_scale.run.parts import Part
from pyro_scale.run.problem import Problem

#: (Numbers of a part's chains, the moments of their draws, the draws that are kept, indices of the
#: chains that reached the end.)
_OfPart: TypeAlias = tuple[list[int], OnlineSamples, Tensor, Sequence[int]]

#: Most draws of all chains that are kept to measure temperatures, and most bytes of these.
_KEPT_DRAWS, _KEPT_BYTES = 1000, 2**25


class ToMoments:
    """Takes the draws of a run when they are not to be kept (`store=False`): adds them up to
    moments. A few of the draws are kept, from which temperatures are measured.

    Args:
        starts: model and facts of the run, with the chains' starts as draws.
        first: unconstrained values at these starts, `[chains, 1, D]`.
        problem: model, data and chains of the run.
        num_draws: number of draws of each chain that will be added.
        chunk: number of draws of each chain that are accumulated in one call.

    Attributes:
        none: an empty tensor of draws, `[chains, 0, D]`.
        kept_places: numbers of the draws that are kept, evenly spaced over the run.
        totals: moments of the finished chains of all processes, once `end` was called; None if no
            chain finished.
    """

    totals: SampleTotals | None

    def __init__(
        self, starts: PosteriorDraws, first: Tensor, problem: Problem, num_draws: int, chunk: int
    ):
        self.starts, self.none, self._problem = starts, first[:, :0], problem
        self.num_draws, self.chunk = num_draws, chunk
        width = first.numel() * first.element_size()
        affordable = max(1, min(_KEPT_DRAWS // len(first), _KEPT_BYTES // width))
        self.kept_places = evenly(num_draws, affordable)
        self._parts: list[PartToMoments] = []
        self._kept: dict[int, Tensor] = {}

    def begin(self, parts: Sequence[Part]) -> list[PartToMoments]:
        """A new sink for each of this process's groups of chains (`Part`), in the order of `parts`,
        to which the run adds the group's draws."""
        self._parts = [PartToMoments(self, list(part.chains)) for part in parts]
        return self._parts

    def end(self, finished: Sequence[Sequence[int]]) -> None:
        """Merges the moments of all processes after the last step, on every process; sets `totals`.

        Args:
            finished: for each part, the indices of its chains that reached the end.
        """
        parts = zip(self._parts, finished, strict=True)
        moments = [(part.chains, part.moments, part.kept, places) for part, places in parts]
        self.totals, self._kept = self._problem.reduce(_merge, moments, "the moments of draws")

    def positions(self, draws: Draws) -> Tensor:
        """Unconstrained draws of the finished chains, `[chains, n, D]`: the kept ones, evenly
        spaced, and each chain's last state."""
        numbers = self._problem.numbers(len(draws.log_joint))
        kept = [self._kept[numbers[chain]] for chain in draws.finished]
        common = torch.stack([of_chain[: min(map(len, kept))] for of_chain in kept])
        return torch.cat([common, draws.state.position[draws.finished, None].cpu()], 1)


class PartToMoments:
    """Accumulates moments of the draws of some chains (those that move together), in blocks of
    `chunk` draws, so that rounding does not depend on when draws came.

    Args:
        run: sink of all chains of the run.
        chains: numbers of the chains.

    Attributes:
        moments: moments of all draws except those that are pending until a block is full.
        kept: the draws that are kept, `[chains, n, D]`.
    """

    def __init__(self, run: ToMoments, chains: list[int]):
        self._run, self.chains = run, chains
        like = {name: value[chains] for name, value in run.starts.samples.items()}
        self.moments = OnlineSamples.empty(like, run.num_draws)
        self._waiting = self.kept = run.none[chains]
        self._begun = self.state()

    @property
    def count(self) -> int:
        """The number of draws of each chain that were passed to `add` so far, those that wait for a
        full block included."""
        return self.moments.online.count + self._waiting.shape[1]

    def add(self, positions: Tensor) -> None:
        """Adds the next n draws of these chains to the moments, or to the draws that wait for a
        full block.

        Args:
            positions: unconstrained draws, `[chains, n, D]`.
        """
        places = self._run.kept_places - self.count
        in_block = places[(places >= 0) & (places < positions.shape[1])]
        self.kept = torch.cat([self.kept, positions[:, in_block]], 1)
        self._waiting = torch.cat([self._waiting, positions], 1)
        while self._waiting.shape[1] >= self._run.chunk:
            self._accumulate(self._run.chunk)

    def close(self) -> None:
        """Adds the draws that wait for a full block to the moments; called after the last draw."""
        if self._waiting.shape[1]:
            self._accumulate(self._waiting.shape[1])

    def state(self) -> dict[str, Any]:
        """All that another sink needs to continue after a checkpoint, tensors and plain values by
        name: the sums, the pending draws and the draws that are kept."""
        return {"sums": self.moments.online.state(), "waiting": self._waiting, "seen": self.kept}

    def go_on_from(self, state: Mapping[str, Any] | None) -> None:
        """Sets this sink to the state that another sink's `state` returned, when a run resumes from
        a checkpoint; None sets it back to no draws."""
        state = state or self._begun
        self._waiting, self.kept = state["waiting"], state["seen"]
        self.moments.online.go_on_from(state["sums"])

    def _accumulate(self, count: int) -> None:
        """Adds the first `count` pending draws to the moments."""
        block, self._waiting = self._waiting[:, :count], self._waiting[:, count:].clone()
        self.moments.add(finite_samples(self._run.starts, block))


def _merge(by_process: list[list[_OfPart]]) -> tuple[SampleTotals | None, dict[int, Tensor]]:
    """(Moments of the finished chains of all processes, None if no chain finished; a dict from each
    finished chain's number to its kept draws, `[n, D]`).

    Args:
        by_process: for every process, its groups of chains as (numbers of the chains, their
            moments, their kept draws, indices in the group of the chains that finished).
    """
    parts = [part for of_process in by_process for part in of_process]
    chains: dict[int, tuple[int, int]] = {}  # number -> (part, index in it)
    for i, (numbers, _, _, places) in enumerate(parts):
        chains |= {numbers[place]: (i, place) for place in places}
    kept = {n: parts[i][2][place] for n, (i, place) in chains.items()}
    if not chains:
        return None, kept
    sums = [moments.online for _, moments, _, _ in parts]
    ordered = [chains[number] for number in sorted(chains)]
    return SampleTotals(Totals.from_parts(sums, ordered), parts[0][1].layout), kept
