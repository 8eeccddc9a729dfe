"""The state of all chains, moved block by block, and what happens when one is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.data.batches import Batches
from pyro_scale.engine.checkpoint import RunState
from pyro_scale.engine.draws import Draws, Failure, Steps
from pyro_scale.engine.executors import Kept, Program, eager
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.engine.step import Engine
from pyro_scale.engine.step_recorder import FEW, MOST_CHAINS, Past, Recent, RecordedStep, recorded
from pyro_scale.rng.seeds import Purpose
from pyro_scale.rng.streams import NoiseStream


class Chains:
    """The state of all chains, and which of them are sound.

    A chain whose state becomes NaN or infinite is stopped: another one's state takes its place,
    so that shapes stay as they are, and what becomes of it is not kept.  So is one that has left
    the model's support, which its gradient may not tell: the log joint of a step that leads to a
    draw is NaN or infinite.  It is that of the position at which the step took its gradient, so
    it is the step before that left, or an earlier one.

    Args:
        engine: says what a step is.
        positions: where they start, `[chains, D]`.
        values: the hyperparameters' values at step 0, which momenta are drawn by.
        seed: of the run, or of each chain.
        numbers: the chains', by which they draw; 0, 1, ... by default.
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
        noise = _first_noise(engine, positions, seed, numbers)
        self.state: Any = engine.init(positions, noise, values)
        shape = (engine.kernel.normals, engine.num_latents)
        self.noise = NoiseStream(seed, numbers, shape, positions.dtype, positions.device)
        self.alive = torch.ones(len(positions), dtype=torch.bool)
        self.count = 0
        self.failures: list[Failure] = []
        self.recent = Recent()
        self.last_steps: dict[int, tuple[RecordedStep, ...]] = {}
        self.log_joint = torch.nan

    @property
    def run_state(self) -> RunState:
        """Where they are."""
        return RunState(self.count, self.state, self.alive, tuple(self.failures))

    def go_on_from(self, run_state: RunState) -> None:
        """Takes up where a run was."""
        self.count, self.state, self.alive = run_state.step, run_state.state, run_state.alive
        self.failures = list(run_state.failures)

    def move(
        self, program: Program, batches: Batches, block: StepInputs, steps: Steps, draws: Draws
    ) -> None:
        """Runs a block and writes what is kept; where a chain breaks, it is halved, and what is
        left of it taken step by step."""
        if not self.alive.any():
            self.count = block.stop
            return
        even = steps.even_until(block.start, block.stop) - block.start
        if even < len(block):
            for part in (block.part(0, even), block.part(even, len(block))):
                self.move(program, batches, part, steps, draws)
            return
        ran = self._ran(program, block, steps)
        if ran is not None:
            self._keep(*ran, block, steps, draws)
        elif len(block) > FEW:
            for half in block.parts(-(-len(block) // 2)):
                self.move(program, batches, half, steps, draws)
        else:
            for single in block.parts(1):
                self._step(program, batches, single, steps, draws)

    def _ran(self, program: Program, block: StepInputs, steps: Steps) -> tuple[Any, Kept] | None:
        """(The state after a block, what is kept); None where it breaks a chain."""
        try:
            moved, kept = self._run(program, block, steps)
        except RuntimeError:  # a matrix that cannot be factorized, in some chain
            return None
        return None if self._find_broken(moved, kept).any() else (moved, kept)

    def _run(self, program: Program, block: StepInputs, steps: Steps) -> tuple[Any, Kept]:
        return program.run(self.state, block, steps.left(block.start), steps.thinning)

    def _find_broken(self, moved: Any, kept: Kept) -> Tensor:
        """Which chains were alive and are no longer."""
        is_sound = _are_finite(moved.position) & _are_finite(kept.log_joint)
        return self.alive & ~is_sound.cpu()

    def _step(
        self, program: Program, batches: Batches, block: StepInputs, steps: Steps, draws: Draws
    ) -> None:
        """Takes one step, and stops the chains that it breaks."""
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
        # of chains that see each other, the one that broke the others first
        order = torch.isfinite(kept.last).cpu().int().argsort(stable=True)
        for chain in order[broken[order]].tolist():
            element = _gone(self._engine.to_params(moved.position[chain]))
            self._fail(chain, element, program, batches, Past(block, self.state, kept.last))
        self.alive = self.alive & ~broken
        self._keep(moved, kept, block, steps, draws)

    def _keep(self, moved: Any, kept: Kept, block: StepInputs, steps: Steps, draws: Draws) -> None:
        """Takes the state after a block over, and writes what is kept of it."""
        self.recent.add(block, self.state)
        self.state = self._with_stand_ins(moved)
        first, last = steps.kept_before(block.start), steps.kept_before(block.stop)
        if draws.latest is not None:
            new = self._engine.to_params(kept.positions).cpu()
            if not bool(self.alive.all()):
                new = new.where(self.alive[:, None, None], torch.nan)
            draws.latest.append(new)
        elif steps.positions:
            params = self._engine.to_params(kept.positions).cpu()
            draws.positions[self.alive, first:last] = params[self.alive]
        draws.log_joint[self.alive, first:last] = kept.log_joint.double().cpu()[self.alive]
        self.count = block.stop
        self.log_joint = float(kept.last.cpu()[self.alive].mean())

    def _stop_those_that_raise(self, program: Program, batches: Batches, block: StepInputs) -> bool:
        """Stops the chains whose own step cannot be computed; whether there are any."""
        step, raising = eager(self._engine, batches), torch.zeros_like(self.alive)
        for chain in torch.nonzero(self.alive)[:, 0].tolist():
            own = slice(chain, chain + 1)
            state = pytree.tree_map(lambda leaf, own=own: leaf[own], self.state)
            try:
                step.run(state, block.of(own), 1, 1)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                raising[chain] = True
                message = f"LinAlgError: {' '.join(str(error).split())}"
                self._fail(chain, None, program, batches, Past(block, self.state), message)
        self.alive = self.alive & ~raising
        self.state = self._with_stand_ins(self.state)
        return bool(raising.any())

    def _fail(
        self,
        chain: int,
        element: int | None,
        program: Program,
        batches: Batches,
        step: Past,
        error: str | None = None,
    ) -> None:
        """Writes down that a step breaks a chain, and what led to it: an element of the state that
        is not finite, or else what the model raised, or else the log joint."""
        _, _, changing = step.block.of(slice(chain, chain + 1)).at(0)
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
            self.last_steps[chain] = recorded(
                self._engine, batches, [*self.recent.steps(program), step], chain
            )

    def _with_stand_ins(self, state: Any) -> Any:
        """The state with that of a chain that is alive in place of those of chains that are not,
        which could break again."""
        if not bool(self.alive.any()) or bool(self.alive.all()):
            return state
        stand_in = int(torch.nonzero(self.alive)[0])
        places = torch.arange(len(self.alive)).where(self.alive, stand_in)
        return pytree.tree_map(lambda leaf: leaf[places.to(leaf.device)], state)


def _are_finite(values: Tensor) -> Tensor:
    """Whether all of each chain's values `[chains, ...]` are finite."""
    finite = torch.isfinite(values.sum(dim=-1))  # no term is infinite or NaN where a sum is finite
    return finite if bool(finite.all()) else torch.isfinite(values).all(dim=-1)


def _gone(position: Tensor) -> int | None:
    """The first element of a position [D] that is not finite, or the farthest one where squares of
    it overflow in a log joint, on its way there; None where there is none."""
    broken = torch.nonzero(~torch.isfinite(position))
    if len(broken):
        return int(broken[0])
    farthest = int(position.abs().argmax())
    is_far = float(position[farthest].abs()) > torch.finfo(position.dtype).max ** (1 / 3)
    return farthest if is_far else None


def _first_noise(
    engine: Engine, positions: Tensor, seed: int | Sequence[int], numbers: Sequence[int]
) -> Tensor:
    """What momenta are drawn from, `[chains, latents]`."""
    dtype, device = positions.dtype, positions.device
    return NoiseStream(seed, numbers, (engine.num_latents,), dtype, device, Purpose.MOMENTUM).at(0)
