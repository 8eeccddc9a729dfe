"""Runs chains from their starts, or from a checkpoint, to the last step: warm-up, thinning,
collection of draws, checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_scale.data.batches import Batch
from pyro_scale.engine.chains import Chains
from pyro_scale.engine.checkpoint import Checkpoint, Checkpoints
from pyro_scale.engine.compile_step import choose_program
from pyro_scale.engine.draws import Draws, Sink
from pyro_scale.engine.executors import Example, Program
from pyro_scale.engine.inputs import Inputs, StepInputs, steps_within_budget
from pyro_scale.engine.observers import (
    Chunking,
    Ending,
    Inspection,
    KineticLooks,
    Observer,
    ProgressBar,
    Saver,
    SinkFeed,
)
from pyro_scale.engine.plan import StepPlan
from pyro_scale.engine.progress import Progress


def simulate(
    plan: StepPlan,
    progress: Progress,
    stop: Callable[[Draws], bool] | None = None,
    check_every: int | None = None,
    last: Checkpoint | None = None,
    checkpoints: Checkpoints | None = None,
    sink: Sink | None = None,
    inspect: Callable[[Tensor, Batch], None] | None = None,
) -> Draws:
    """Runs every chain to the last step, or until its state is non-finite, and returns the draws.

    An error or interrupt is not raised: it is in `Draws.error`, with the draws kept until then.

    Args:
        plan: the chains and the steps that they are to take.
        progress: bar that shows the steps taken.
        stop: function of the draws so far, which ends the run when it returns True; None to run to
            the end.
        check_every: `stop` is called at steps that are multiples of this; None to call it after
            every block of steps.
        last: checkpoint to continue from; None for a new run.
        checkpoints: writer of the run's checkpoints; None to write none.
        sink: storage for the draws in place of memory; None to keep them in memory.
        inspect: function of all D unconstrained parameters `[chains, D]` and a minibatch, called
            after the first block and then ever more rarely, which may raise an error; None to call
            nothing.
    """
    steps = plan.steps
    kept = dataclasses.replace(steps, positions=False) if sink else steps
    draws = Draws.allocate(plan.positions, kept)
    chains = Chains(plan.engine, plan.positions, plan.values_at(0), plan.seed, plan.numbers)
    looks = KineticLooks(plan, chains, draws)
    if sink is not None:
        sink.go_on_from(None if last is None else last.sink)
    if last is not None:
        _restore(last, plan, chains, draws)
        progress.update(chains.count)
    saver = Saver(plan, chains, draws, checkpoints, sink)
    ending = Ending(chains, draws, stop, check_every)
    observers: list[Observer] = [] if sink is None else [SinkFeed(draws, sink)]
    if inspect is not None:
        observers.append(Inspection(plan, chains, inspect))
    observers += [looks, saver, ProgressBar(progress, chains), ending]
    ends = range(check_every, steps.total, check_every) if check_every else looks.ends
    begun = time.perf_counter()
    try:
        if last is None:
            saver.write()
        if chains.count < steps.total and bool(chains.alive.any()):
            inputs = Inputs(plan.values, plan.noise or chains.noise, plan.batches)
            first = inputs.block(chains.count, min(chains.count + 2, steps.total))
            program = _program(plan, chains, first, last, progress)
            draws.program, draws.compile_seconds = program.name, time.perf_counter() - begun
            chunking = _chunking(plan, first, ends)

            def move(block: StepInputs) -> None:
                chains.move(program, plan.batches, block, steps, draws)

            _take_blocks(inputs, chunking, move, observers, ending)
            saver.write()
        saver.close_sink()
    except (Exception, KeyboardInterrupt) as error:
        draws = saver.rescue()
        draws.error = error
    draws.state, draws.last_steps = saver.run_state.state, chains.last_steps
    draws.seconds = time.perf_counter() - begun - draws.compile_seconds
    return draws


def _take_blocks(
    inputs: Inputs,
    chunking: Chunking,
    move: Callable[[StepInputs], None],
    observers: Sequence[Observer],
    ending: Ending,
) -> None:
    """Takes the steps of a run, block by block, until the last step or an early ending.

    Args:
        inputs: makes the inputs of the steps of a block.
        chunking: chooses the lengths of blocks.
        move: moves the chains by the steps of a block.
        observers: act before and after each block, in this order, after `chunking`.
        ending: the observer that decides whether the run ends early.
    """
    with contextlib.closing(inputs.blocks(chunking.spans())) as others:
        for block in itertools.chain(chunking.opening(), others):
            for observer in (chunking, *observers):
                observer.before(block)
            move(block)
            for observer in (chunking, *observers):
                observer.after(block)
            if ending.is_over:
                break


def _program(
    plan: StepPlan, chains: Chains, first: StepInputs, last: Checkpoint | None, progress: Progress
) -> Program:
    """Chooses the program (compiled loop, compiled step or Python code) that runs the steps, and
    returns it. Its name is then shown in the progress bar.

    Args:
        plan: the chains and the steps that they are to take.
        chains: the chains before the first step of this run.
        first: the first block of steps, on which a program is traced.
        last: checkpoint that the run continues from; None for a new run.
        progress: bar that shows that the step is being compiled.
    """
    example = Example(plan.engine, plan.batches, chains.state, first)
    program = choose_program(plan, example, None if last is None else last.program, progress.say)
    progress.say(program.name)
    return program


def _chunking(plan: StepPlan, first: StepInputs, ends: Sequence[int]) -> Chunking:
    """The observer that chooses the lengths of a run's blocks of steps, after the first.

    Args:
        plan: the chains and the steps that they are to take.
        first: the first block of steps, whose inputs are prepared already.
        ends: step numbers at which a block must end.
    """
    kept_bytes = plan.positions.numel() * plan.positions.element_size() // plan.steps.thinning
    most = steps_within_budget(first, kept_bytes)
    return Chunking(first, plan.steps.total, most, ends, by_clock=plan.agree is None)


def _restore(last: Checkpoint, plan: StepPlan, chains: Chains, draws: Draws) -> None:
    """Sets chains, minibatches and draws to the state of a checkpoint, so that the run continues
    there. Measured kinetic temperatures are kept where this run measures at the same draws.
    """
    chains.go_on_from(last.run_state._replace(state=last.state_like(chains.state)))
    plan.batches.seek(last.run_state.step, last.batches)
    kept = last.positions.shape[1]
    draws.positions[:, :kept], draws.log_joint[:, :kept] = last.positions, last.log_joint
    draws.program = last.program or draws.program
    if draws.kinetic is not None and last.kinetic is not None:
        look_draws = plan.steps.look_every * torch.arange(1, draws.kinetic.shape[1] + 1)
        places = look_draws // last.look_every - 1
        is_in = (look_draws % last.look_every == 0) & (places < last.kinetic.shape[1])
        draws.kinetic[:, is_in] = last.kinetic[:, places[is_in]]
