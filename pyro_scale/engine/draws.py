"""Which steps of a run are kept, and the draws that were kept."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_scale.engine.step_recorder import RecordedStep

#: Looks at the whole state, at most; each ends a block, which takes about half a millisecond.
_MOST_LOOKS = 32


@dataclass(frozen=True)
class Failure:
    """Where a chain stopped: its state became NaN or infinite, or the log joint of a step that led
    to a draw was so, or the model raised an error.

    Attributes:
        chain: which chain.
        step: the step after which it was so.
        site: the first site whose value is not finite; the first of all where it is another cause.
        bad_batch: whether the step's batch itself held NaN or infinite numbers.
        error: what the model raised at that step; None where it raised nothing.
        in_density: whether the log joint is not finite, and the state is, nor far out.
    """

    chain: int
    step: int
    site: str
    bad_batch: bool
    error: str | None = None
    in_density: bool = False


@dataclass(frozen=True)
class Steps:
    """How many steps there are and which of them are kept.

    Attributes:
        num_samples: draws to keep.
        warmup_steps: steps before the first that may be kept.
        thinning: from one draw to the next, of the steps that may be kept.
        keeps: whether a step may be kept once warm-up is over; None if all may.
        positions: whether positions are kept, or log joints alone.
    """

    num_samples: int
    warmup_steps: int = 0
    thinning: int = 1
    keeps: Callable[[int], bool] | None = None
    positions: bool = True

    @cached_property
    def kept(self) -> Tensor:
        """The numbers of the steps after which a draw is kept, `[num_samples]`."""
        if self.keeps is None:
            return self.warmup_steps - 1 + self.thinning * torch.arange(1, self.num_samples + 1)
        may_be = filter(self.keeps, itertools.count(self.warmup_steps))
        wanted = self.num_samples * self.thinning
        kept = itertools.islice(may_be, self.thinning - 1, wanted, self.thinning)
        return torch.tensor(list(kept))

    @property
    def total(self) -> int:
        """All steps, warm-up included."""
        return int(self.kept[-1]) + 1

    @cached_property
    def look_every(self) -> int:
        """From how many draws to the next the whole state is looked at: a power of two, so that
        a longer run looks at none that a shorter one does not."""
        return 1 << max(0, math.ceil(math.log2(self.num_samples / _MOST_LOOKS)))

    @cached_property
    def looks(self) -> Tensor:
        """The numbers of the steps after which the whole state is looked at, `[looks]`."""
        return self.kept[self.look_every - 1 :: self.look_every]

    def kept_before(self, step: int) -> int:
        """How many draws are kept before a step."""
        return int(torch.searchsorted(self.kept, step))

    def left(self, step: int) -> int:
        """How many steps there are from a step, with it, to the next draw that is kept."""
        return int(self.kept[self.kept_before(step)]) + 1 - step

    def even_until(self, start: int, stop: int) -> int:
        """Up to which step, at most `stop`, every `thinning`-th is kept, from the first on."""
        kept = self.kept[self.kept_before(start) : self.kept_before(stop)].tolist()
        if self.keeps is None or not kept:
            return stop
        evenly = range(kept[0], stop, self.thinning)
        same = sum(itertools.takewhile(bool, map(int.__eq__, kept, evenly)))
        return stop if same == len(evenly) else kept[same - 1] + 1


class Sink(Protocol):
    """Takes draws as they come, where they do not stay in memory."""

    @property
    def count(self) -> int:
        """Draws of each chain that it has got."""
        ...

    def add(self, positions: Tensor) -> None:
        """Takes the next draws, `[chains, n, D]`; those of chains that broke are NaN."""
        ...

    def close(self) -> None:
        """Brings all to its place: there are no more."""
        ...

    def state(self) -> dict[str, Any]:
        """What `go_on_from` needs: tensors, of chains first, and plain values that are of all."""
        ...

    def go_on_from(self, state: Mapping[str, Any] | None) -> None:
        """Takes up where another one was; None begins anew."""
        ...


@dataclass
class Draws:
    """What a run kept.

    Attributes:
        positions: unconstrained, `[chains, draws, D]`; a stopped chain's are NaN from there on;
            `[chains, draws, 0]` where they are not kept, or elsewhere.
        log_joint: the estimate from the batch of the step that led to each draw, at the state
            that the step began from, `[chains, draws]`.
        kept_steps: the number of the step that led to each draw, `[draws]`.
        failures: the chains that stopped.
        last_steps: of the first chains that stopped.
        program: how the steps were run, in words.
        compile_seconds: the time until the first step.
        seconds: the time that the steps took.
        state: of all chains, after the last step.
        num_steps: how many there were.
        error: what ended the run before its time, if that is not a chain.
        latest: the latest positions, which are on their way to a sink, `[chains, some, D]` each.
        kinetic: the kinetic temperature over the one asked for, `[chains, looks, latent sites]`,
            NaN where the state was not looked at; None where there is none.
    """

    positions: Tensor
    log_joint: Tensor
    kept_steps: Tensor
    failures: list[Failure] = field(default_factory=list)
    last_steps: dict[int, tuple[RecordedStep, ...]] = field(default_factory=dict)
    program: str = "eager"
    compile_seconds: float = 0.0
    seconds: float = 0.0
    state: Any = None
    num_steps: int = 0
    error: BaseException | None = None
    latest: list[Tensor] | None = None
    kinetic: Tensor | None = None

    @classmethod
    def of(cls, positions: Tensor, steps: Steps) -> Draws:
        """Room for the draws of chains at positions `[chains, D]`, in the processor's memory."""
        (num_chains, size), num_draws = positions.shape, steps.num_samples
        size = size if steps.positions else 0
        return cls(
            torch.full((num_chains, num_draws, size), torch.nan, dtype=positions.dtype),
            torch.full((num_chains, num_draws), torch.nan, dtype=torch.float64),
            steps.kept,
        )

    @property
    def finished(self) -> list[int]:
        """The chains that reached the end."""
        stopped = {failure.chain for failure in self.failures}
        return [chain for chain in range(len(self.positions)) if chain not in stopped]

    def first(self, count: int) -> Draws:
        """The first of them alone."""
        return dataclasses.replace(
            self,
            positions=self.positions[:, :count],
            log_joint=self.log_joint[:, :count],
            kept_steps=self.kept_steps[:count],
        )
