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

#: Most measurements of the whole state in a run; each ends a block, which costs about 0.5 ms.
_MOST_LOOKS = 32


@dataclass(frozen=True)
class Failure:
    """Why a chain stopped: its state became NaN or infinite, or so did the log joint of a step that
    led to a draw, or the model raised an error.

    Attributes:
        chain: number of the chain.
        step: number of the step at which this was detected.
        site: the first site whose value is not finite; the first of all sites for other causes.
        bad_batch: whether the step's batch contains NaN or infinite numbers.
        error: what the model raised at that step; None if nothing.
        in_density: whether only the log joint is not finite: the state is, and is not far out.
    """

    chain: int
    step: int
    site: str
    bad_batch: bool
    error: str | None = None
    in_density: bool = False


@dataclass(frozen=True)
class Steps:
    """How many steps a run has, and after which of them a draw is kept.

    Attributes:
        num_samples: draws to keep.
        warmup_steps: steps before the first that may be kept.
        thinning: steps from one draw to the next, counting those that may be kept.
        keeps: function of a step's number, whether it may be kept after warm-up; None if all may.
        positions: whether positions are kept, or log joints alone.
    """

    num_samples: int
    warmup_steps: int = 0
    thinning: int = 1
    keeps: Callable[[int], bool] | None = None
    positions: bool = True

    @cached_property
    def kept(self) -> Tensor:
        """Numbers of the steps after which a draw is kept, `[num_samples]`."""
        if self.keeps is None:
            return self.warmup_steps - 1 + self.thinning * torch.arange(1, self.num_samples + 1)
        candidates = filter(self.keeps, itertools.count(self.warmup_steps))
        stop = self.num_samples * self.thinning
        kept = itertools.islice(candidates, self.thinning - 1, stop, self.thinning)
        return torch.tensor(list(kept))

    @property
    def total(self) -> int:
        """Number of all steps, warm-up included."""
        return int(self.kept[-1]) + 1

    @cached_property
    def look_every(self) -> int:
        """Draws from one measurement of the whole state to the next: a power of two, so that a
        longer run measures at a part of the draws at which a shorter one does."""
        return 1 << max(0, math.ceil(math.log2(self.num_samples / _MOST_LOOKS)))

    @cached_property
    def looks(self) -> Tensor:
        """Numbers of the steps after which the whole state is measured, `[looks]`."""
        return self.kept[self.look_every - 1 :: self.look_every]

    def kept_before(self, step: int) -> int:
        """Number of draws kept before a step."""
        return int(torch.searchsorted(self.kept, step))

    def left(self, step: int) -> int:
        """Number of steps from a step, included, to the next draw that is kept."""
        return int(self.kept[self.kept_before(step)]) + 1 - step

    def even_until(self, start: int, stop: int) -> int:
        """The last step, at most `stop`, until which the kept draws are `thinning` steps apart."""
        kept = self.kept[self.kept_before(start) : self.kept_before(stop)].tolist()
        if self.keeps is None or not kept:
            return stop
        evenly = range(kept[0], stop, self.thinning)
        same = sum(itertools.takewhile(bool, map(int.__eq__, kept, evenly)))
        return stop if same == len(evenly) else kept[same - 1] + 1


class Sink(Protocol):
    """Takes the draws of a run that does not keep them in memory."""

    @property
    def count(self) -> int:
        """Number of draws of each chain that were added."""
        ...

    def add(self, positions: Tensor) -> None:
        """Adds the next draws, `[chains, n, D]`; those of stopped chains are NaN."""
        ...

    def close(self) -> None:
        """Stores what is pending, after the last draw."""
        ...

    def state(self) -> dict[str, Any]:
        """What `go_on_from` needs: tensors `[chains, ...]`, and values common to all chains."""
        ...

    def go_on_from(self, state: Mapping[str, Any] | None) -> None:
        """Continues from another sink's state; begins anew if None."""
        ...


@dataclass
class Draws:
    """What a run kept.

    Attributes:
        positions: unconstrained, `[chains, draws, D]`, NaN after a chain stopped;
            `[chains, draws, 0]` if they are not kept, or go to a sink.
        log_joint: estimate of the batch of the step that led to each draw, at the position from
            which the step started, `[chains, draws]`.
        kept_steps: number of the step that led to each draw, `[draws]`.
        failures: one for every chain that stopped.
        last_steps: recorded steps of the first chains that stopped, by chain.
        program: how the steps were run, in words.
        compile_seconds: time before the first step.
        seconds: time of the steps.
        state: of all chains, after the last step.
        num_steps: number of steps taken.
        error: error or interrupt that ended the run early.
        latest: positions on their way to a sink, `[chains, n, D]` each; None without a sink.
        kinetic: kinetic temperature relative to the temperature set, `[chains, looks, latent
            sites]`, NaN where it was not measured; None for kernels without a momentum.
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
    def allocate(cls, positions: Tensor, steps: Steps) -> Draws:
        """Empty draws of chains that start at positions `[chains, D]`, in main memory."""
        (num_chains, size), num_draws = positions.shape, steps.num_samples
        size = size if steps.positions else 0
        return cls(
            torch.full((num_chains, num_draws, size), torch.nan, dtype=positions.dtype),
            torch.full((num_chains, num_draws), torch.nan, dtype=torch.float64),
            steps.kept,
        )

    @property
    def finished(self) -> list[int]:
        """Numbers of the chains that reached the end."""
        stopped = {failure.chain for failure in self.failures}
        return [chain for chain in range(len(self.positions)) if chain not in stopped]

    def first(self, count: int) -> Draws:
        """The first `count` draws alone."""
        return dataclasses.replace(
            self,
            positions=self.positions[:, :count],
            log_joint=self.log_joint[:, :count],
            kept_steps=self.kept_steps[:count],
        )
