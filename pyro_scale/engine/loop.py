"""Runs chains: warm-up, thinning, collection, checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_scale.data.batches import Batch, Batches
from pyro_scale.engine.chains import Chains
from pyro_scale.engine.checkpoint import Checkpoint, Checkpoints
from pyro_scale.engine.choose_executor import program_for
from pyro_scale.engine.chunking import Pace
from pyro_scale.engine.draws import Draws, Sink, Steps
from pyro_scale.engine.inputs import Inputs, steps_within_budget
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.engine.step import Engine
from pyro_scale.errors import FileError
from pyro_scale.rng.streams import NoiseStream

#: By how much later a run is looked at again each time.
_RARER = 8


def simulate(
    engine: Engine,
    positions: Tensor,
    batches: Batches,
    values: Mapping[str, Tensor],
    steps: Steps,
    seed: int | Sequence[int],
    compile: bool | Literal["auto"],
    progress: Progress,
    earlier: Earlier,
    stop: Callable[[Draws], bool] | None = None,
    check_every: int | None = None,
    last: Checkpoint | None = None,
    checkpoints: Checkpoints | None = None,
    sink: Sink | None = None,
    noise: NoiseStream | None = None,
    inspect: Callable[[Tensor, Batch], None] | None = None,
    numbers: Sequence[int] | None = None,
    num_chains: int | None = None,
    agree: Callable[[bool], bool] | None = None,
) -> Draws:
    """Runs every chain from its position `[chains, D]` to the end, or until it is non-finite.

    What ends the run before its time, an interrupt or an error, is in the draws, with those kept
    until then.

    Args:
        engine: says what a step is.
        positions: where chains start, `[chains, D]`.
        batches: the chains' batches.
        values: the hyperparameters' block.
        steps: how many, and which are kept.
        seed: of the run, or of each chain.
        compile: whether steps become one program.
        progress: is told how far it is.
        earlier: what the same object has compiled before.
        stop: whether the run is over before its time, by what is there until now.
        check_every: steps from one time that `stop` is asked to the next; whenever a block ends,
            by default.
        last: what to go on from.
        checkpoints: where the run is written down.
        sink: where draws go instead of memory.
        noise: of the steps; the seed's, by default.
        inspect: is given the positions and the batch of a step now and then, ever more rarely.
        numbers: of these chains, by which they draw; 0, 1, ... by default.
        num_chains: how many there are in all, with those of other processes: programs round
            otherwise where chains are alone.
        agree: whether something holds on all processes, where they take steps together: in blocks
            of the same lengths, by programs that all of them have.
    """
    draws = Draws.of(positions, dataclasses.replace(steps, positions=False) if sink else steps)
    at_first = {name: column[0] for name, column in values.items()}
    chains = Chains(engine, positions, at_first, seed, numbers)
    if sink is not None:
        sink.go_on_from(None if last is None else last.sink)
        draws.latest = []
    looks = _looks(engine, chains.state, values, steps)
    if looks:
        shape = len(positions), len(steps.looks), engine.num_latent_sites
        draws.kinetic = torch.full(shape, torch.nan, dtype=torch.float64)
    ends = range(check_every, steps.total, check_every) if check_every else sorted(looks)
    if last is not None:
        _go_on(last, chains, batches, draws, steps)
        progress.update(chains.count)
    inputs = Inputs(values, noise or chains.noise, batches)
    run_state, taken = chains.run_state, None if sink is None else sink.state()

    def write() -> None:
        if checkpoints is not None:
            kept = steps.kept_before(run_state.step)
            position = batches.position(run_state.step)
            checkpoints.write(run_state, position, draws.first(kept), steps.look_every, taken)

    begun = started = time.perf_counter()
    next_inspected = chains.count + 1
    ended = contextlib.ExitStack()
    try:
        if last is None:
            write()
        if chains.count < steps.total and bool(chains.alive.any()):
            first = inputs.block(chains.count, min(chains.count + 2, steps.total))
            before = None if last is None else last.program
            say = progress.say
            program = program_for(
                engine,
                batches,
                chains.state,
                first,
                compile,
                steps.total,
                say,
                before,
                earlier,
                num_chains or len(positions),
                agree,
            )
            progress.say(program.name)
            draws.program, started = program.name, time.perf_counter()
            kept_bytes = positions.numel() * positions.element_size() // steps.thinning
            most = steps_within_budget(first, kept_bytes)
            pace = Pace(first, steps.total, most, ends, by_clock=agree is None)
            opening = (first.part(a - first.start, b - first.start) for a, b in pace.opening())
            # its thread ends with the run, not when it is collected
            rest = ended.enter_context(contextlib.closing(inputs.blocks(pace.spans())))
            for block in itertools.chain(opening, rest):
                with pace:
                    chains.move(program, batches, block, steps, draws)
                    if sink is not None:
                        _pass_on(draws, sink)
                if inspect is not None and block.stop >= next_inspected:
                    next_inspected = _RARER * block.stop
                    _, _, changing = block.at(len(block) - 1)
                    params = engine.to_params(chains.state.position)
                    inspect(params, batches.batch(batches.fixed, changing))
                if draws.kinetic is not None and block.stop in looks:
                    now = {name: column[block.stop - 1] for name, column in values.items()}
                    energy = engine.kinetic(chains.state, now)
                    draws.kinetic[chains.alive, looks[block.stop]] = energy[chains.alive]
                run_state, taken = chains.run_state, None if sink is None else sink.state()
                progress.update(len(block), chains.log_joint)
                draws.num_steps, draws.failures = run_state.step, list(run_state.failures)
                if checkpoints is not None and checkpoints.due:
                    write()
                due = check_every is None or block.stop % check_every == 0
                if not chains.alive.any() or (stop is not None and due and stop(draws)):
                    break
            write()
        if sink is not None:
            sink.close()
            taken = sink.state()
            write()
    except (Exception, KeyboardInterrupt) as error:
        kept, there = steps.kept_before(run_state.step), steps.kept_before(chains.count)
        if sink is not None and kept < sink.count == there:
            run_state, taken = chains.run_state, sink.state()  # of the last draws that it has got
        with contextlib.suppress(FileError):  # it may be what ended the run
            write()
        if sink is not None:
            with contextlib.suppress(FileError):
                sink.go_on_from(taken)
                sink.close()
        draws = draws.first(steps.kept_before(run_state.step))
        draws.error = error
    finally:
        ended.close()
    draws.num_steps, draws.failures = run_state.step, list(run_state.failures)
    draws.state, draws.last_steps = run_state.state, chains.last_steps
    draws.compile_seconds, draws.seconds = started - begun, time.perf_counter() - started
    return draws


def _looks(
    engine: Engine, state: Any, values: Mapping[str, Tensor], steps: Steps
) -> dict[int, int]:
    """Which look at the whole state comes after so many steps; none where nothing is to be seen
    but positions."""
    has_momentum = hasattr(state, "momentum") and hasattr(engine.kernel, "mass")
    if not steps.positions or not has_momentum:
        return {}
    warm = (values["temperature"][steps.looks] > 0).tolist()
    return {step + 1: i for i, step in enumerate(steps.looks.tolist()) if warm[i]}


def _go_on(last: Checkpoint, chains: Chains, batches: Batches, draws: Draws, steps: Steps) -> None:
    """Takes up where a run was."""
    chains.go_on_from(last.run_state._replace(state=last.state_like(chains.state)))
    batches.seek(last.run_state.step, last.batches)
    kept = last.positions.shape[1]
    draws.positions[:, :kept], draws.log_joint[:, :kept] = last.positions, last.log_joint
    draws.program = last.program or draws.program
    if draws.kinetic is not None and last.kinetic is not None:
        of_draws = steps.look_every * torch.arange(1, draws.kinetic.shape[1] + 1)
        places = of_draws // last.look_every - 1
        seen = (of_draws % last.look_every == 0) & (places < last.kinetic.shape[1])
        draws.kinetic[:, seen] = last.kinetic[:, places[seen]]


def _pass_on(draws: Draws, sink: Sink) -> None:
    """Gives the latest draws to a sink."""
    latest = [positions for positions in draws.latest or () if positions.shape[1]]
    if latest:
        sink.add(latest[0] if len(latest) == 1 else torch.cat(latest, 1))
    draws.latest = []
