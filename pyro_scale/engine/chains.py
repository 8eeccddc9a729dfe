"""The state of all chains, moved by blocks of many steps, and what happens when the state of a
chain becomes NaN or infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.data.batches import Batches
from pyro_scale.engine.checkpoint import RunState
from pyro_scale.engine.draws import Draws, Failure, Steps
from pyro_scale.engine.executors import Kept, Program, eager
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.engine.step import Engine, State
from pyro_scale.engine.step_recorder import (
    MOST_CHAINS,
    MOST_STEPS,
    PastStep,
    RecentSteps,
    RecordedStep,
    record,
)
from pyro_scale.rng.seeds import Purpose
from pyro_scale.rng.streams import NoiseStream


class Chains:
    """The state of all chains, and which of them are still running.

    A chain stops when its state becomes NaN or infinite. It also stops when it has left the model's
    support, which its gradient need not show: then the log joint of a step that leads to a draw is
    NaN or infinite. That log joint is evaluated where the step started, so an earlier step left the
    support.

    The state of a running chain replaces the state of a stopped chain, so that shapes do not
    change; draws of these copies are not kept.

    Args:
        engine: the engine, which defines a step.
        positions: unconstrained parameters at which chains start, `[chains, D]`.
        values: hyperparameters at step 0, tensors by name, with which momenta are drawn.
        seed: the run's seed, or one seed for each chain.
        numbers: the chains' numbers, which with the seed determine their random numbers; None for
            0, 1, ...

    Attributes:
        state: the state of the sampler's kernel, for all chains.
        noise: stream of the standard normal numbers that the steps of these chains use.
        alive: whether each chain is running, booleans `[chains]`.
        count: number of steps that each chain has taken.
        failures: one failure for every chain that stopped.
        recent: the latest blocks of steps, for replay, if they are small.
        last_steps: dict from the index of a chain to its last recorded steps, for the first chains
            that stopped.
        log_joint: log joint at the latest step, in nats, averaged over running chains.
    """

    def __init__(
        self,
        engine: Engine,
        positions: Tensor,
        values: Mapping[str, Tensor],
        seed: int | Sequence[int],
        numbers: Sequence[int] | None = None,
    ):
        self._engine = engine
        numbers = range(len(positions)) if numbers is None else numbers
        dtype, device, size = positions.dtype, positions.device, engine.num_latents
        first = NoiseStream(seed, numbers, (size,), dtype, device, Purpose.MOMENTUM).at(0)
        self.state: State = engine.init(positions, first, values)
        shape = engine.kernel.normals, size
        self.noise = NoiseStream(seed, numbers, shape, dtype, device)
        self.alive = torch.ones(len(positions), dtype=torch.bool)
        self.count = 0
        self.failures: list[Failure] = []
        self.recent = RecentSteps()
        self.last_steps: dict[int, tuple[RecordedStep, ...]] = {}
        self.log_joint = torch.nan

    @property
    def run_state(self) -> RunState:
        """The number of steps taken, the state of all chains, which of them are running, and the
        failures: what a checkpoint stores so that the run can continue from here.
        """
        return RunState(self.count, self.state, self.alive, tuple(self.failures))

    def go_on_from(self, run_state: RunState) -> None:
        """Continues an earlier run: replaces the number of steps, the chains' state and the
        failures by those of that run.
        """
        self.count, self.state, self.alive = run_state.step, run_state.state, run_state.alive
        self.failures = list(run_state.failures)

    def move(
        self, program: Program, batches: Batches, block: StepInputs, steps: Steps, draws: Draws
    ) -> None:
        """Takes the steps of a block with all chains, and writes the block's draws into `draws`.

        If a chain becomes non-finite in the block, the block is halved until few steps remain.
        These are taken one by one, to find the step at which the chain stops.

        Args:
            program: the program that runs the steps, compiled or not.
            batches: the minibatches of the chains.
            block: the steps' minibatches, random numbers and hyperparameters.
            steps: the schedule that says after which steps a draw is kept.
            draws: the draws of the run, which are written into.
        """
        if not self.alive.any():
            self.count = block.stop
            return
        even = steps.even_until(block.start, block.stop) - block.start
        if even < len(block):
            for part in (block.part(0, even), block.part(even, len(block))):
                self.move(program, batches, part, steps, draws)
            return
        result = self._run_unbroken(program, block, steps)
        if result is not None:
            self._keep(*result, block, steps, draws)
        elif len(block) > MOST_STEPS:
            for half in block.parts(-(-len(block) // 2)):
                self.move(program, batches, half, steps, draws)
        else:
            for single in block.parts(1):
                self._step(program, batches, single, steps, draws)

    def _run_unbroken(
        self, program: Program, block: StepInputs, steps: Steps
    ) -> tuple[State, Kept] | None:
        """(The state of the sampler's kernel after a block of steps, the draws and log joints kept
        in it), if all running chains remain finite. None if one of them becomes NaN or infinite in
        the block, or the model raises a RuntimeError: the block then has to be taken in smaller
        parts.
        """
        try:
            moved, kept = self._run(program, block, steps)
        except RuntimeError:  # a matrix that cannot be factorized, in some chain
            return None
        return None if self._find_broken(moved, kept).any() else (moved, kept)

    def _run(self, program: Program, block: StepInputs, steps: Steps) -> tuple[State, Kept]:
        return program.run(self.state, block, steps.left(block.start), steps.thinning)

    def _find_broken(self, moved: State, kept: Kept) -> Tensor:
        """Mask of the chains that break in these steps: booleans `[chains]`, True for a chain that
        was running until now and has a non-finite position or log joint after these steps.

        Args:
            moved: the kernel's state after the steps.
            kept: draws and log joints of these steps.
        """
        is_sound = _are_finite(moved.position) & _are_finite(kept.log_joint)
        return self.alive & ~is_sound.cpu()

    def _step(
        self, program: Program, batches: Batches, block: StepInputs, steps: Steps, draws: Draws
    ) -> None:
        """Takes the one step of a block, and stops the chains whose state is not finite afterwards,
        or whose step raises an error."""
        if not self.alive.any():
            self.count = block.stop
            return
        try:
            moved, kept = self._run(program, block, steps)
        except RuntimeError:
            if not self._stop_those_that_raise(program, batches, block):
                raise
            self._step(program, batches, block, steps, draws)
            return
        broken = self._find_broken(moved, kept)
        # of chains that move together, the one that broke the others is first
        order = torch.isfinite(kept.last).cpu().int().argsort(stable=True)
        for chain in order[broken[order]].tolist():
            element = _broken_element(self._engine.to_params(moved.position[chain]))
            self._fail(chain, element, program, batches, PastStep(block, self.state, kept.last))
        self.alive = self.alive & ~broken
        self._keep(moved, kept, block, steps, draws)

    def _keep(
        self, moved: State, kept: Kept, block: StepInputs, steps: Steps, draws: Draws
    ) -> None:
        """Makes the state after a block the current one, and writes the block's draws into `draws`.

        Args:
            moved: the kernel's state after the block.
            kept: the block's draws and log joints.
            block: the block of steps.
            steps: the schedule of kept draws.
            draws: the draws of the run.
        """
        self.recent.add(block, self.state)
        self.state = self._replace_stopped(moved)
        first, last = steps.kept_before(block.start), steps.kept_before(block.stop)
        if draws.latest is not None:
            new = self._engine.to_params(kept.positions).cpu()
            if not bool(self.alive.all()):
                new = new.where(self.alive[:, None, None], torch.nan)
            draws.latest.append(new)
        elif steps.positions:
            # a copy of the draws would be large
            alive = slice(None) if bool(self.alive.all()) else self.alive
            params = self._engine.to_params(kept.positions).cpu()
            draws.positions[alive, first:last] = params[alive]
        draws.log_joint[self.alive, first:last] = kept.log_joint.double().cpu()[self.alive]
        self.count = block.stop
        self.log_joint = float(kept.last.cpu()[self.alive].mean())

    def _stop_those_that_raise(self, program: Program, batches: Batches, block: StepInputs) -> bool:
        """Runs the block's step chain by chain, and stops each chain whose step raises a
        LinAlgError. Returns True if there are such chains.
        """
        step, raising = eager(self._engine, batches), torch.zeros_like(self.alive)
        for chain in torch.nonzero(self.alive)[:, 0].tolist():
            place = slice(chain, chain + 1)
            state = pytree.tree_map(lambda leaf, place=place: leaf[place], self.state)
            try:
                step.run(state, block.of_chains(place), 1, 1)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                raising[chain] = True
                message = f"LinAlgError: {' '.join(str(error).split())}"
                self._fail(chain, None, program, batches, PastStep(block, self.state), message)
        self.alive = self.alive & ~raising
        self.state = self._replace_stopped(self.state)
        return bool(raising.any())

    def _fail(
        self,
        chain: int,
        element: int | None,
        program: Program,
        batches: Batches,
        step: PastStep,
        error: str | None = None,
    ) -> None:
        """Adds a failure of a chain to `failures`, and records the chain's last steps, if it is
        among the first that stopped.

        Args:
            chain: index of the chain that stops.
            element: index of the position's first element that is not finite; None if the model
                raised an error, or only the log joint is not finite.
            program: the program that took the earlier steps.
            batches: the minibatches of the chains.
            step: the step at which the chain stops.
            error: text of the error that the model raised; None if there was none.
        """
        _, _, changing = step.block.of_chains(slice(chain, chain + 1)).at(0)
        batch = batches.batch(batches.fixed, changing)
        self.failures.append(
            Failure(
                chain=chain,
                step=step.block.start,
                site=self._engine.layout.site_at(element or 0),
                bad_batch=not rows.are_finite(batch.of_chain(0)[0]),
                error=error,
                in_density=element is None and error is None,
            )
        )
        if len(self.last_steps) < MOST_CHAINS:
            past = [*self.recent.replay(program), step]
            self.last_steps[chain] = record(self._engine, batches, past, chain)

    def _replace_stopped(self, state: State) -> State:
        """The state of all chains, in which stopped chains have a copy of the first running chain's
        state, as their own could fail again. Unchanged if all chains run, or none does.
        """
        if not bool(self.alive.any()) or bool(self.alive.all()):
            return state
        stand_in = int(torch.nonzero(self.alive)[0])
        places = torch.arange(len(self.alive)).where(self.alive, stand_in)
        return pytree.tree_map(lambda leaf: leaf[places.to(leaf.device)], state)


def _are_finite(values: Tensor) -> Tensor:
    """Mask of the chains whose numbers are all finite: booleans `[chains]`, from a tensor `[chains,
    ...]`.
    """
    finite = torch.isfinite(values.sum(dim=-1))  # if a sum is finite, no term is infinite or NaN
    return finite if bool(finite.all()) else torch.isfinite(values).all(dim=-1)


def _broken_element(position: Tensor) -> int | None:
    """The index of the first element of a position [D] that is not finite. If all are finite: the
    index of the largest element if its square would overflow in a log joint, otherwise None."""
    broken = torch.nonzero(~torch.isfinite(position))
    if len(broken):
        return int(broken[0])
    farthest = int(position.abs().argmax())
    is_far = float(position[farthest].abs()) > torch.finfo(position.dtype).max ** (1 / 3)
    return farthest if is_far else None
