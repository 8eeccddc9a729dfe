"""Actions before and after a run's blocks of steps, besides moving the chains.

They choose the lengths of blocks, pass draws to a sink, measure the kinetic temperature, inspect
the model, write checkpoints, advance the progress bar, and end the run early.
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
from pyro_scale.engine.checkpoint import Checkpoints, RunState
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
    """Base class of actions before and after every block of steps, such as writing checkpoints.
    Both methods do nothing by default."""

    def before(self, block: StepInputs) -> None:
        """Acts before the chains take the steps of a block."""

    def after(self, block: StepInputs) -> None:
        """Acts after the chains took the steps of a block."""


class Chunking(Observer):
    """Chooses the lengths of a run's blocks of steps.

    Each block is twice as long as the one before, until a block takes 0.05 seconds. A block also
    ends at each of `ends`. Lengths do not change what is drawn.

    Args:
        first: the first block of steps, whose inputs are prepared already.
        num_steps: number of the step after the run's last.
        most: largest number of steps of a block.
        ends: step numbers at which a block must end, ascending.
        by_clock: False to ignore the time that blocks take, which makes lengths the same on every
            machine.
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
        """Yields the inputs of the run's first steps, which are drawn already, in parts that end at
        the step numbers `ends`. Later blocks have the lengths of `spans`."""
        first, start = self._first, self._first.start
        while start < first.stop:
            stop = min(first.stop, self._next_end(start))
            yield first.part(start - first.start, stop - first.start)
            start = stop

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yields (start, stop) of every block after the first, as step numbers; `stop` is excluded.
        The length depends on how long the blocks before took."""
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
    """Passes the draws of each block on to the run's sink, and empties the list in `Draws.latest`
    that held them.
    """

    def __init__(self, draws: Draws, sink: Sink):
        self._draws, self._sink = draws, sink
        draws.latest = []

    def after(self, block: StepInputs) -> None:
        parts = [positions for positions in self._draws.latest or () if positions.shape[1]]
        if parts:
            self._sink.add(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
        self._draws.latest = []


class KineticLooks(Observer):
    """Measures the kinetic temperature of every latent site after the steps `Steps.looks`, if the
    sampler has a momentum, into `Draws.kinetic`.

    Attributes:
        places: dict from a step's number plus 1 to the index, in the second dimension of
            `Draws.kinetic`, of the measurement made after that step; empty if nothing is measured.
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
        """The step numbers, ascending, at which a block of steps has to end because the kinetic
        temperature is measured there.
        """
        return sorted(self.places)

    def after(self, block: StepInputs) -> None:
        place = self.places.get(block.stop)
        if place is None or self._draws.kinetic is None:
            return
        alive, values = self._chains.alive, self._plan.values_at(block.stop - 1)
        kinetic = self._plan.engine.kinetic(self._chains.state, values)
        self._draws.kinetic[alive, place] = kinetic[alive]


class Inspection(Observer):
    """Calls the function `inspect` with the chains' params `[chains, D]` and the latest step's
    minibatch, after the first block and again whenever the number of steps has grown eightfold. The
    function may raise an error.
    """

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
    """Remembers the run's state after the latest whole block, and writes checkpoints of that state.

    An error or an interrupt within a block leaves the remembered state as it is, so that the
    chains, the draws in memory, the sink and the last checkpoint stay at the same step.
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
        self._held: tuple[RunState, dict[str, Any] | None]
        self._hold()

    @property
    def run_state(self) -> RunState:
        """State of the run after the latest whole block."""
        return self._held[0]

    def after(self, block: StepInputs) -> None:
        self._hold()
        if self._checkpoints is not None and self._checkpoints.due:
            self.write()

    def write(self) -> None:
        """Writes a checkpoint of the remembered state; does nothing if the run has no directory for
        checkpoints."""
        if self._checkpoints is not None:
            step, steps = self.run_state.step, self._plan.steps
            self._checkpoints.write(
                self.run_state,
                self._plan.batches.position(step),
                self._draws.first(steps.kept_before(step)),
                steps.look_every,
                self._held[1],
            )

    def close_sink(self) -> None:
        """Closes the sink after the last draw, and writes a checkpoint with the sink's final state;
        does nothing without a sink."""
        if self._sink is not None:
            self._sink.close()
            self._held = self.run_state, self._sink.state()
            self.write()

    def rescue(self) -> Draws:
        """Brings sink and checkpoint to the same step after an error. Returns the draws up to that
        step.

        Errors in writing files are ignored: they may be what ended the run.
        """
        steps, sink = self._plan.steps, self._sink
        kept, moved = (steps.kept_before(n) for n in (self.run_state.step, self._chains.count))
        if sink is not None and kept < sink.count == moved:
            self._hold()  # the sink has all draws of the chains
        else:
            self._set_draws()
        with contextlib.suppress(FileError):
            self.write()
        if sink is not None:
            with contextlib.suppress(FileError):
                sink.go_on_from(self._held[1])
                sink.close()
        return self._draws.first(steps.kept_before(self.run_state.step))

    def _hold(self) -> None:
        # in one assignment: an interrupt must not leave one of the two behind
        self._held = self._chains.run_state, None if self._sink is None else self._sink.state()
        self._set_draws()

    def _set_draws(self) -> None:
        self._draws.num_steps = self.run_state.step
        self._draws.failures = list(self.run_state.failures)


class ProgressBar(Observer):
    """Advances a progress bar after each block, and shows the log joint, averaged over running
    chains."""

    def __init__(self, progress: Progress, chains: Chains):
        self._progress, self._chains = progress, chains

    def after(self, block: StepInputs) -> None:
        self._progress.update(len(block), self._chains.log_joint)


class Ending(Observer):
    """Decides after each block whether the run ends before its last step.

    Attributes:
        is_over: True if the run is to end now: no chain is running, or the function `stop` returned
            True for the draws so far.
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
