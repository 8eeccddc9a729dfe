"""After which steps of a run a draw is kept, and the draws that were kept."""

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
    """A record of why a chain stopped: its state or log joint became NaN or infinite, or the model
    raised an error.

    Attributes:
        chain: index of the chain.
        step: number of the step at which the failure was detected.
        site: name of the first site with an element that is not finite; for other causes, the first
            of all sites.
        bad_batch: whether the step's minibatch contains NaN or infinite numbers.
        error: text of the error that the model raised at that step; None if it raised none.
        in_density: whether only the log joint is not finite, with a state that is finite and not
            extremely large.
    """

    chain: int
    step: int
    site: str
    bad_batch: bool
    error: str | None = None
    in_density: bool = False


@dataclass(frozen=True)
class Steps:
    """The schedule of a run: how many steps it has, and after which of them a draw is kept.

    Attributes:
        num_samples: number of draws to keep from each chain.
        warmup_steps: number of steps before the first after which a draw may be kept.
        thinning: number of steps from one draw to the next, of the steps after which a draw may be
            kept.
        keeps: function from a step's number to whether a draw may be kept after that step; None if
            one may be kept after any step after warm-up.
        positions: whether the draws themselves are kept; if False, only their log joints are.
    """

    num_samples: int
    warmup_steps: int = 0
    thinning: int = 1
    keeps: Callable[[int], bool] | None = None
    positions: bool = True

    @cached_property
    def kept(self) -> Tensor:
        """The numbers of the steps after which a draw is kept, ascending, int64 `[num_samples]`."""
        if self.keeps is None:
            return self.warmup_steps - 1 + self.thinning * torch.arange(1, self.num_samples + 1)
        candidates = filter(self.keeps, itertools.count(self.warmup_steps))
        stop = self.num_samples * self.thinning
        kept = itertools.islice(candidates, self.thinning - 1, stop, self.thinning)
        return torch.tensor(list(kept))

    @property
    def total(self) -> int:
        """The number of all steps of the run, warm-up included: one more than the number of the
        last step after which a draw is kept.
        """
        return int(self.kept[-1]) + 1

    @cached_property
    def look_every(self) -> int:
        """Number of draws from one measurement of the kinetic temperature to the next. A power of
        two, so that a longer run also measures at the draws at which a shorter one does.
        """
        return 1 << max(0, math.ceil(math.log2(self.num_samples / _MOST_LOOKS)))

    @cached_property
    def looks(self) -> Tensor:
        """Numbers of the steps after which the kinetic temperature is measured, one for each
        measurement ("look"), `[looks]`.
        """
        return self.kept[self.look_every - 1 :: self.look_every]

    def kept_before(self, step: int) -> int:
        """Number of draws of each chain that are kept before step number `step` is taken: the index
        at which the next draw is stored.
        """
        return int(torch.searchsorted(self.kept, step))

    def left(self, step: int) -> int:
        """Number of steps from step number `step` to the next one after which a draw is kept, both
        included: at least 1.
        """
        return int(self.kept[self.kept_before(step)]) + 1 - step

    def even_until(self, start: int, stop: int) -> int:
        """The largest step number n <= `stop` such that the draws kept by steps start, ..., n - 1
        are exactly `thinning` steps apart. Compiled loops need evenly spaced draws.
        """
        kept = self.kept[self.kept_before(start) : self.kept_before(stop)].tolist()
        if self.keeps is None or not kept:
            return stop
        evenly = range(kept[0], stop, self.thinning)
        same = sum(itertools.takewhile(bool, map(int.__eq__, kept, evenly)))
        return stop if same == len(evenly) else kept[same - 1] + 1


class Sink(Protocol):
    """Protocol of a storage for draws, such as files or running moments, of a run that does not
    keep its draws in memory.
    """

    @property
    def count(self) -> int:
        """Number of draws of each chain that were added."""
        ...

    def add(self, positions: Tensor) -> None:
        """Adds the next draws, unconstrained `[chains, n, D]`; those of stopped chains are NaN."""
        ...

    def close(self) -> None:
        """Stores draws that are still held back, such as an incomplete file's; called once, after
        the last draw.
        """
        ...

    def state(self) -> dict[str, Any]:
        """The sink's state, to be passed to `go_on_from` later: a dict of tensors `[chains, ...]`,
        and of objects common to all chains. Checkpoints store this dict.
        """
        ...

    def go_on_from(self, state: Mapping[str, Any] | None) -> None:
        """Continues from an earlier state, when a run is resumed: draws that were added later are
        discarded.

        Args:
            state: what `state` returned, of this or another sink; None to discard all draws and
                begin anew.
        """
        ...


@dataclass
class Draws:
    """The draws of a run, and a record of how the run went.

    Attributes:
        positions: unconstrained draws, `[chains, draws, D]`, NaN after a chain stopped; `[chains,
            draws, 0]` if they are not kept, or stored in a sink.
        log_joint: minibatch estimate of the log joint for each draw, in nats, `[chains, draws]`: at
            the position from which the step that led to the draw started.
        kept_steps: number of the step that led to each draw, `[draws]`.
        failures: one failure for every chain that stopped.
        last_steps: dict from the index of a chain to its last recorded steps, for the first chains
            that stopped.
        program: name of the program that ran the steps, such as "compiled loop".
        compile_seconds: seconds before the first step.
        seconds: seconds that the steps took.
        state: the state of the sampler's kernel after the last step, for all chains.
        num_steps: number of steps taken.
        error: error or interrupt that ended the run early; None if there was none.
        latest: draws that are not in the sink yet, tensors `[chains, n, D]`; None without a sink.
        kinetic: kinetic temperature divided by the temperature set, `[chains, measurements, latent
            sites]`, NaN where it was not measured; None for samplers without a momentum.
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
        """Draws in main memory that are filled with NaN, with room for all draws of a run.

        Args:
            positions: unconstrained parameters at which chains start, `[chains, D]`.
            steps: the schedule of the run.
        """
        (num_chains, size), num_draws = positions.shape, steps.num_samples
        size = size if steps.positions else 0
        return cls(
            torch.full((num_chains, num_draws, size), torch.nan, dtype=positions.dtype),
            torch.full((num_chains, num_draws), torch.nan, dtype=torch.float64),
            steps.kept,
        )

    @property
    def finished(self) -> list[int]:
        """The indices of the chains that ran to the end, and did not stop because of NaN, infinite
        numbers or an error.
        """
        stopped = {failure.chain for failure in self.failures}
        return [chain for chain in range(len(self.positions)) if chain not in stopped]

    def first(self, count: int) -> Draws:
        """A copy with the first `count` draws of each chain alone, for a run that ended early; its
        tensors are views.
        """
        return dataclasses.replace(
            self,
            positions=self.positions[:, :count],
            log_joint=self.log_joint[:, :count],
            kept_steps=self.kept_steps[:count],
        )
