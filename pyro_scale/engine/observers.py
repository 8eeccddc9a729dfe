"""Actions before and after a run's blocks of steps, besides moving the chains.

The lengths of blocks are chosen, draws go to a sink, the kinetic temperature is measured, the model
is inspected, checkpoints are written, the progress bar moves on, and the run ends early.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_scale.data.batches import Batch
from pyro_scale.engine.chains import Chains
from pyro_scale.engine.checkpoint import Checkpoints
from pyro_scale.engine.draws import Draws, Sink
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.engine.plan import StepPlan
from pyro_scale.engine.progress import Progress
from pyro_scale.errors import FileError

#: A block that takes longer than this delays the progress bar and Ctrl-C noticeably.
_NOTICED_SECONDS = 0.05
#: Largest number of steps of a block whose length may not depend on a clock.
_STEADY_STEPS = 64
#: Factor between the steps of two inspections.
_RARER = 8


class Observer:
    """Acts before and after every block of steps."""

    def before(self, block: StepInputs) -> None:
        """Called before the chains are moved."""

    def after(self, block: StepInputs) -> None:
        """Called after the chains were moved."""


class Chunking(Observer):
    """Chooses the lengths of a run's blocks.

    Each block is twice as long as the one before, until one takes long enough to be noticed.  A
    block also ends at each of `ends`.  Lengths do not change what is drawn.

    Args:
        first: the first block, already drawn.
        num_steps: number of the step after the run's last.
        most: largest number of steps of a block.
        ends: steps at which a block ends, ascending.
        by_clock: False makes lengths the same on every machine.
    """

    def __init__(
        self,
        first: StepInputs,
        num_steps: int,
        most: int,
        ends: Sequence[int] = (),
        by_clock: bool = True,
    ):
        self._most = most if by_clock else min(most, _STEADY_STEPS)
        self._first, self._num_steps, self._is_quick = first, num_steps, True
        self._ends, self._by_clock = ends, by_clock

    def opening(self) -> Iterator[StepInputs]:
        """The first block, in parts that end at `ends`."""
        first, start = self._first, self._first.start
        while start < first.stop:
            stop = min(first.stop, self._next_end(start))
            yield first.part(start - first.start, stop - first.start)
            start = stop

    def spans(self) -> Iterator[tuple[int, int]]:
        """(Start, stop) of every block after the first."""
        start, size = self._first.stop, min(len(self._first), self._most)
        while start < self._num_steps:
            stop = min(start + size, self._next_end(start))
            yield start, stop
            start = stop
            if self._is_quick and 2 * size <= self._most:
                size *= 2

    def before(self, block: StepInputs) -> None:
        self._begun = time.perf_counter()

    def after(self, block: StepInputs) -> None:
        is_quick = time.perf_counter() - self._begun < _NOTICED_SECONDS
        self._is_quick = is_quick or not self._by_clock

    def _next_end(self, start: int) -> int:
        place = bisect.bisect_right(self._ends, start)
        return self._ends[place] if place < len(self._ends) else self._num_steps


class SinkFeed(Observer):
    """Passes each block's draws on to a sink, in place of `Draws`, which keeps none."""

    def __init__(self, draws: Draws, sink: Sink):
        self._draws, self._sink = draws, sink
        draws.latest = []

    def after(self, block: StepInputs) -> None:
        parts = [positions for positions in self._draws.latest or () if positions.shape[1]]
        if parts:
            self._sink.add(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
        self._draws.latest = []


class KineticLooks(Observer):
    """Measures the kinetic temperature after the steps `Steps.looks`, if chains have a momentum.

    Attributes:
        places: number of a step plus 1 -> place in `Draws.kinetic`; empty if nothing is measured.
    """

    def __init__(self, plan: StepPlan, chains: Chains, draws: Draws):
        self._plan, self._chains, self._draws = plan, chains, draws
        self.places: dict[int, int] = {}
        steps, engine = plan.steps, plan.engine
        has_momentum = hasattr(chains.state, "momentum") and hasattr(engine.kernel, "mass")
        if steps.positions and has_momentum:
            is_warm = (plan.values["temperature"][steps.looks] > 0).tolist()
            looks = enumerate(steps.looks.tolist())
            self.places = {step + 1: place for place, step in looks if is_warm[place]}
        if self.places:
            shape = len(plan.positions), len(steps.looks), engine.num_latent_sites
            draws.kinetic = torch.full(shape, torch.nan, dtype=torch.float64)

    @property
    def ends(self) -> list[int]:
        """Steps at which a block has to end."""
        return sorted(self.places)

    def after(self, block: StepInputs) -> None:
        place = self.places.get(block.stop)
        if place is None or self._draws.kinetic is None:
            return
        alive, values = self._chains.alive, self._plan.values_at(block.stop - 1)
        kinetic = self._plan.engine.kinetic(self._chains.state, values)
        self._draws.kinetic[alive, place] = kinetic[alive]


class Inspection(Observer):
    """Calls a function of the chains' params and a step's batch, ever more rarely."""

    def __init__(self, plan: StepPlan, chains: Chains, inspect: Callable[[Tensor, Batch], None]):
        self._plan, self._chains, self._inspect = plan, chains, inspect
        self._next = chains.count + 1

    def after(self, block: StepInputs) -> None:
        if block.stop < self._next:
            return
        self._next = _RARER * block.stop
        _, _, changing = block.at(len(block) - 1)
        params = self._plan.engine.to_params(self._chains.state.position)
        self._inspect(params, self._plan.batches.batch(self._plan.batches.fixed, changing))


class Saver(Observer):
    """Holds the run's state after the latest whole block, and writes checkpoints of it.

    An error or an interrupt within a block leaves this state as it is, so that the chains, the
    draws in memory, the sink and the last checkpoint stay at the same step.
    """

    def __init__(
        self,
        plan: StepPlan,
        chains: Chains,
        draws: Draws,
        checkpoints: Checkpoints | None,
        sink: Sink | None,
    ):
        self._plan, self._chains, self._draws = plan, chains, draws
        self._checkpoints, self._sink = checkpoints, sink
        self._sink_state: dict[str, Any] | None = None
        self._hold()

    def after(self, block: StepInputs) -> None:
        self._hold()
        if self._checkpoints is not None and self._checkpoints.due:
            self.write()

    def write(self) -> None:
        """Writes a checkpoint, if the run has a directory for them."""
        if self._checkpoints is not None:
            step, steps = self.run_state.step, self._plan.steps
            self._checkpoints.write(
                self.run_state,
                self._plan.batches.position(step),
                self._draws.first(steps.kept_before(step)),
                steps.look_every,
                self._sink_state,
            )

    def close_sink(self) -> None:
        """Closes the sink after the last draw, and writes its last state."""
        if self._sink is not None:
            self._sink.close()
            self._sink_state = self._sink.state()
            self.write()

    def rescue(self) -> Draws:
        """Puts sink and checkpoint at the same step after an error.  Returns the draws until then.

        Files that cannot be written are not reported: they may be what ended the run.
        """
        steps, sink = self._plan.steps, self._sink
        kept, moved = (steps.kept_before(n) for n in (self.run_state.step, self._chains.count))
        if sink is not None and kept < sink.count == moved:
            self._hold()  # the sink has all draws of the chains
        with contextlib.suppress(FileError):
            self.write()
        if sink is not None:
            with contextlib.suppress(FileError):
                sink.go_on_from(self._sink_state)
                sink.close()
        return self._draws.first(steps.kept_before(self.run_state.step))

    def _hold(self) -> None:
        self.run_state = self._chains.run_state
        self._sink_state = None if self._sink is None else self._sink.state()
        self._draws.num_steps = self.run_state.step
        self._draws.failures = list(self.run_state.failures)


class ProgressBar(Observer):
    """Moves a progress bar on, and shows the chains' mean log joint."""

    def __init__(self, progress: Progress, chains: Chains):
        self._progress, self._chains = progress, chains

    def after(self, block: StepInputs) -> None:
        self._progress.update(len(block), self._chains.log_joint)


class Ending(Observer):
    """Says whether the run is over before its last step.

    Attributes:
        is_over: whether no chain is left, or `stop` of the draws is true.
    """

    def __init__(
        self,
        chains: Chains,
        draws: Draws,
        stop: Callable[[Draws], bool] | None,
        check_every: int | None,
    ):
        self._chains, self._draws, self._stop = chains, draws, stop
        self._check_every, self.is_over = check_every or 1, False

    def after(self, block: StepInputs) -> None:
        self.is_over = not bool(self._chains.alive.any()) or (
            self._stop is not None
            and block.stop % self._check_every == 0
            and self._stop(self._draws)
        )
