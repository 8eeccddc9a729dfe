"""Draws that are added up, by chain, and forgotten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.online_moments import Totals
from pyro_scale.core.validation import evenly
from pyro_scale.engine.draws import Draws
from pyro_scale.posterior.draws import PosteriorDraws, samples_of
from pyro_scale.posterior.online import OnlineSamples, SampleTotals
from pyro_scale.run.parts import Part
from pyro_scale.run.problem import Problem

#: Draws of all chains that are kept to be looked at, and their bytes.
_SEEN, _HELD_BYTES = 1000, 2**25


class ToMoments:
    """Adds draws up and forgets all but some, from which temperatures are found out.

    Args:
        starts: a result whose draws are the chains' starts.
        first: those, `[chains, 1, D]`.
        problem: of the run.
        num_draws: draws of each chain that are to come.
        chunk: draws that are added at a time.

    Attributes:
        totals: what the draws of all processes' finished chains have come to; None where there is
            no such chain.
    """

    totals: SampleTotals | None

    def __init__(
        self, starts: PosteriorDraws, first: Tensor, problem: Problem, num_draws: int, chunk: int
    ):
        self._starts, self._none, self._problem = starts, first[:, :0], problem
        self._num_draws, self._chunk = num_draws, chunk
        width = first.numel() * first.element_size()
        self._seen_draws = evenly(num_draws, max(1, min(_SEEN // len(first), _HELD_BYTES // width)))
        self._parts: list[PartToMoments] = []
        self._seen: dict[int, Tensor] = {}

    def begin(self, parts: Sequence[Part]) -> list[PartToMoments]:
        """What adds up the draws of some parts."""
        self._parts = [self._part(list(part.chains)) for part in parts]
        return self._parts

    def end(self, finished: Sequence[Sequence[int]]) -> None:
        """Has what the draws of all processes have come to, on each.

        Args:
            finished: the places of the chains of each part that have reached the end.
        """
        ranks, own = self._problem.ranks, zip(self._parts, finished, strict=True)
        told = ranks.at_first(
            [(part.chains, part.moments, part.seen, places) for part, places in own],
            "what draws come to",
        )
        ended = None
        if told is not None:
            chains: dict[int, tuple[int, int]] = {}
            parts = [part for of_rank in told for part in of_rank]
            for i, (numbers, _, _, places) in enumerate(parts):
                chains |= {numbers[place]: (i, place) for place in places}
            seen = {n: parts[i][2][place] for n, (i, place) in chains.items()}
            sums = [moments.online for _, moments, _, _ in parts]
            ordered, layout = [chains[n] for n in sorted(chains)], parts[0][1].layout
            totals = SampleTotals(Totals.from_parts(sums, ordered), layout) if chains else None
            ended = totals, seen
        ended = ranks.of_first(ended, "what all draws come to")
        assert ended is not None  # it is rank 0's
        self.totals, self._seen = ended

    def positions(self, draws: Draws) -> Tensor:
        """Some draws of the finished chains, evenly over the run, and where they are now."""
        numbers = self._problem.numbers(len(draws.log_joint))
        seen = [self._seen[numbers[chain]] for chain in draws.finished]
        some = torch.stack([each[: min(map(len, seen))] for each in seen])
        return torch.cat([some, draws.state.position[draws.finished, None].cpu()], 1)

    def _part(self, chains: list[int]) -> PartToMoments:
        like = {name: value[chains] for name, value in self._starts.samples.items()}
        moments = OnlineSamples.of(like, self._num_draws)
        none, seen = self._none[chains], self._seen_draws
        return PartToMoments(self._starts, chains, none, moments, self._chunk, seen)


class PartToMoments:
    """Adds the draws of some chains up, always as many at a time, so that sums are rounded alike.

    Args:
        starts: a result whose draws are the chains' starts.
        chains: their numbers.
        none: of their draws, `[chains, 0, D]`.
        moments: of none of them.
        chunk: draws that are added at a time.
        seen_draws: the numbers of those that are kept to be looked at.

    Attributes:
        moments: of all but those that wait.
        seen: the draws that are kept.
    """

    def __init__(
        self,
        starts: PosteriorDraws,
        chains: Sequence[int],
        none: Tensor,
        moments: OnlineSamples,
        chunk: int,
        seen_draws: Tensor,
    ):
        self._starts, self.chains, self._begun = starts, chains, (moments.online.state(), none)
        self._chunk, self._seen_draws, self.moments = chunk, seen_draws, moments
        self._waiting = self.seen = none

    @property
    def count(self) -> int:
        """Draws of each chain that it has got."""
        return self.moments.online.count + self._waiting.shape[1]

    def add(self, positions: Tensor) -> None:
        """Takes the next draws."""
        places = self._seen_draws - self.count
        here = places[(places >= 0) & (places < positions.shape[1])]
        self.seen = torch.cat([self.seen, positions[:, here]], 1)
        self._waiting = torch.cat([self._waiting, positions], 1)
        while self._waiting.shape[1] >= self._chunk:
            self._sum_up(self._chunk)

    def close(self) -> None:
        """Adds up what it holds."""
        if self._waiting.shape[1]:
            self._sum_up(self._waiting.shape[1])

    def state(self) -> dict[str, Any]:
        """What another one needs to go on."""
        return {"sums": self.moments.online.state(), "waiting": self._waiting, "seen": self.seen}

    def go_on_from(self, state: Mapping[str, Any] | None) -> None:
        """Takes up where another one was; None begins anew."""
        sums, none = self._begun
        state = state or {"sums": sums, "waiting": none, "seen": none}
        self._waiting, self.seen = state["waiting"], state["seen"]
        self.moments.online.go_on_from(state["sums"])

    def _sum_up(self, count: int) -> None:
        block, self._waiting = self._waiting[:, :count], self._waiting[:, count:].clone()
        self.moments.add(samples_of(self._starts, block))
