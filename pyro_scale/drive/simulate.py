"""Runs chains: warm-up, thinning, collection, checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from pyro_scale.drive.batches import Batches
from pyro_scale.drive.chains import Chains
from pyro_scale.drive.checkpoint import Checkpoint, Checkpoints
from pyro_scale.drive.draws import Draws, Sink, Steps
from pyro_scale.drive.engine import Engine
from pyro_scale.drive.programs import program_for
from pyro_scale.drive.progress import Progress
from pyro_scale.drive.tape import Inputs, Tape, steps_within_budget
from pyro_scale.errors import FileError

#: From when on a run should show its progress and can be interrupted.
_NOTICED_SECONDS = 0.05


def simulate(
    engine: Engine,
    positions: Tensor,
    batches: Batches,
    values: Mapping[str, Tensor],
    steps: Steps,
    seed: int,
    compile: bool | Literal["auto"],
    progress: Progress,
    stop: Callable[[Draws], bool] | None = None,
    check_every: int | None = None,
    last: Checkpoint | None = None,
    checkpoints: Checkpoints | None = None,
    sink: Sink | None = None,
) -> Draws:
    """Runs every chain from its position `[chains, D]` to the end, or until it is non-finite.

    What ends the run before its time, an interrupt or an error, is in the draws, with those kept
    until then.

    Args:
        engine: says what a step is.
        positions: where chains start, `[chains, D]`.
        batches: the chains' batches.
        values: the hyperparameters' tape.
        steps: how many, and which are kept.
        seed: of the run.
        compile: whether steps become one program.
        progress: is told how far it is.
        stop: whether the run is over before its time, by what is there until now.
        check_every: steps from one time that `stop` is asked to the next; whenever a tape ends,
            by default.
        last: what to go on from.
        checkpoints: where the run is written down.
        sink: where draws go instead of memory.
    """
    draws = Draws.of(positions, dataclasses.replace(steps, positions=False) if sink else steps)
    at_first = {name: column[0] for name, column in values.items()}
    chains = Chains(engine, positions, at_first, seed)
    if sink is not None:
        sink.go_on_from(None if last is None else last.sink)
        draws.latest = []
    if last is not None:
        _go_on(last, chains, batches, draws)
        progress.update(chains.count, torch.nan)
    inputs = Inputs(values, chains.noise, batches)
    moment = chains.moment

    def write() -> None:
        if checkpoints is not None:
            kept = steps.kept_before(moment.step)
            state = None if sink is None else sink.state()
            checkpoints.write(moment, batches.position(moment.step), draws.first(kept), state)

    begun = started = time.perf_counter()
    try:
        if last is None:
            write()
        if chains.count < steps.total and bool(chains.alive.any()):
            first = inputs.tape(chains.count, min(chains.count + 2, steps.total))
            program = program_for(
                engine, batches, chains.state, first, compile, steps.total, progress.say
            )
            progress.say(program.name)
            draws.program, started = program.name, time.perf_counter()
            kept_bytes = positions.numel() * positions.element_size() // steps.thinning
            most = steps_within_budget(first, kept_bytes)
            pace = _Pace(first, steps.total, most, check_every)
            for tape in itertools.chain([first], inputs.tapes(pace.spans())):
                with pace:
                    chains.move(program, batches, tape, steps, draws)
                    if sink is not None:
                        _pass_on(draws, sink)
                moment = chains.moment
                progress.update(len(tape), chains.log_joint)
                draws.num_steps, draws.failures = moment.step, list(moment.failures)
                if checkpoints is not None and checkpoints.due:
                    write()
                due = check_every is None or tape.stop % check_every == 0
                if not chains.alive.any() or (stop is not None and due and stop(draws)):
                    break
            if sink is not None:
                sink.close()
            write()
    except (Exception, KeyboardInterrupt) as error:
        if sink is not None and sink.count == steps.kept_before(chains.count):
            moment = chains.moment  # that of the last draws that it has got
        if sink is None or sink.count == steps.kept_before(moment.step):
            with contextlib.suppress(FileError):  # it may be what ended the run
                write()
        draws = draws.first(steps.kept_before(moment.step))
        draws.error = error
    draws.num_steps, draws.failures = moment.step, list(moment.failures)
    draws.state, draws.last_steps = moment.state, chains.last_steps
    draws.compile_seconds, draws.seconds = started - begun, time.perf_counter() - started
    return draws


def _go_on(last: Checkpoint, chains: Chains, batches: Batches, draws: Draws) -> None:
    """Takes up where a run was."""
    chains.go_on_from(last.moment._replace(state=last.state_like(chains.state)))
    batches.seek(last.moment.step, last.batches)
    kept = last.positions.shape[1]
    draws.positions[:, :kept], draws.log_joint[:, :kept] = last.positions, last.log_joint


def _pass_on(draws: Draws, sink: Sink) -> None:
    """Gives the latest draws to a sink."""
    for positions in draws.latest or ():
        if positions.shape[1]:
            sink.add(positions)
    draws.latest = []


class _Pace:
    """Lets tapes grow twice as long each time, until one takes long enough to be noticed; one
    ends at every multiple of `end_at` steps.

    What is drawn does not depend on it.
    """

    def __init__(self, first: Tape, num_steps: int, most: int, end_at: int | None = None):
        self._first, self._num_steps, self._most, self._quick = first, num_steps, most, True
        self._end_at = end_at or num_steps

    def spans(self) -> Iterator[tuple[int, int]]:
        """Steps after the first tape's."""
        start, size = self._first.stop, min(len(self._first), self._most)
        while start < self._num_steps:
            next_end = start - start % self._end_at + self._end_at
            stop = min(start + size, self._num_steps, next_end)
            yield start, stop
            start = stop
            if self._quick and 2 * size <= self._most:
                size *= 2

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._quick = time.perf_counter() - self._begun < _NOTICED_SECONDS
