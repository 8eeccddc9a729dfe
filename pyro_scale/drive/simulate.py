"""Runs chains: warm-up, thinning, collection, and what happens when one becomes non-finite."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.randomness import NoiseTape, Purpose, generator
from pyro_scale.drive.batches import Batches
from pyro_scale.drive.checkpoint import Checkpoint, Checkpoints, Moment
from pyro_scale.drive.draws import Draws, Failure, Steps
from pyro_scale.drive.engine import Engine
from pyro_scale.drive.pace import Pace
from pyro_scale.drive.programs import Program, eager, program_for
from pyro_scale.drive.progress import Progress
from pyro_scale.drive.tape import Inputs, Tape, steps_within_budget
from pyro_scale.errors import FileError


class Chains:
    """The state of all chains, and which of them are sound.

    A chain whose state becomes NaN or infinite is stopped: another one's state takes its place,
    so that shapes stay as they are, and what becomes of it is not kept.

    Args:
        engine: says what a step is.
        positions: where they start, `[chains, D]`.
        values: the hyperparameters' values at step 0, which momenta are drawn by.
        seed: of the run.
    """

    def __init__(self, engine: Engine, positions: Tensor, values: Mapping[str, Tensor], seed: int):
        self._engine = engine
        self.state: Any = engine.init(positions, _first_noise(engine, positions, seed), values)
        shape = (engine.kernel.normals, engine.num_latents)
        self.noise = NoiseTape(seed, len(positions), shape, positions.dtype, positions.device)
        self.alive = torch.ones(len(positions), dtype=torch.bool)
        self.count = 0
        self.failures: list[Failure] = []
        self.log_joint = torch.nan

    @property
    def moment(self) -> Moment:
        """Where they are."""
        return Moment(self.count, self.state, self.alive, tuple(self.failures))

    def go_on_from(self, moment: Moment) -> None:
        """Takes up where a run was."""
        self.count, self.state, self.alive = moment.step, moment.state, moment.alive
        self.failures = list(moment.failures)

    def move(
        self, program: Program, batches: Batches, tape: Tape, steps: Steps, draws: Draws
    ) -> None:
        """Runs a tape and writes what is kept; where a chain breaks, it is halved until the
        step is found."""
        even = steps.even_until(tape.start, tape.stop) - tape.start
        if even < len(tape):
            for part in (tape.part(0, even), tape.part(even, len(tape))):
                self.move(program, batches, part, steps, draws)
            return
        try:
            left = steps.left(tape.start)
            moved, kept = program.run(self.state, tape, left, steps.thinning)
            sound = torch.isfinite(moved.position).all(dim=-1).cpu()
        except RuntimeError:  # a matrix that cannot be factorised, in some chain
            if len(tape) > 1:
                sound = ~self.alive
            elif not self._stop_those_that_raise(batches, tape):
                raise
            elif self.alive.any():
                self.move(program, batches, tape, steps, draws)
                return
            else:
                return
        broken = self.alive & ~sound
        if broken.any() and len(tape) > 1:
            for half in tape.parts(-(-len(tape) // 2)):
                self.move(program, batches, half, steps, draws)
            return
        self._stop(broken, moved, batches, tape)
        first, last = steps.kept_before(tape.start), steps.kept_before(tape.stop)
        if steps.positions:
            draws.positions[self.alive, first:last] = kept.positions.cpu()[self.alive]
        draws.log_joint[self.alive, first:last] = kept.log_joint.double().cpu()[self.alive]
        self.count = tape.stop
        self.log_joint = float(kept.last.cpu()[self.alive].mean())

    def _stop_those_that_raise(self, batches: Batches, tape: Tape) -> bool:
        """Stops the chains whose own step cannot be computed; whether there are any."""
        step, raising = eager(self._engine, batches), torch.zeros_like(self.alive)
        for chain in torch.nonzero(self.alive)[:, 0].tolist():
            own = slice(chain, chain + 1)
            state = pytree.tree_map(lambda leaf, own=own: leaf[own], self.state)
            try:
                step.run(state, tape.of(own), 1, 1)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                raising[chain] = True
                self._fail(chain, 0, batches, tape)
        self.alive = self.alive & ~raising
        self.state = self._with_stand_ins(self.state, ~raising)
        return bool(raising.any())

    def _stop(self, broken: Tensor, moved: Any, batches: Batches, tape: Tape) -> None:
        """Takes the state over, but for chains that this step broke."""
        for chain in torch.nonzero(broken)[:, 0].tolist():
            first = int(torch.nonzero(~torch.isfinite(moved.position[chain]))[0])
            self._fail(chain, first, batches, tape)
        self.alive = self.alive & ~broken
        sound = torch.isfinite(moved.position).all(dim=-1)
        self.state = self._with_stand_ins(moved, sound)

    def _fail(self, chain: int, element: int, batches: Batches, tape: Tape) -> None:
        batch = batches.batch(batches.fixed, tape.at(0)[2])
        self.failures.append(
            Failure(
                chain=chain,
                step=tape.start,
                site=self._engine.layout.site_at(element),
                bad_batch=not rows.are_finite(batch.of_chain(chain)[0]),
            )
        )

    def _with_stand_ins(self, state: Any, sound: Tensor) -> Any:
        """The state with that of a chain that is alive in place of those that are not sound."""
        if not bool(self.alive.any()) or bool(sound.all()):
            return state
        stand_in = int(torch.nonzero(self.alive)[0])
        places = torch.arange(len(sound), device=sound.device).where(sound, stand_in)
        return pytree.tree_map(lambda leaf: leaf[places], state)


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
    noise: NoiseTape | None = None,
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
        noise: of the steps; the seed's, by default.
    """
    draws = Draws.of(positions, steps)
    at_first = {name: column[0] for name, column in values.items()}
    chains = Chains(engine, positions, at_first, seed)
    looks = _looks(engine, chains.state, values, steps)
    if looks:
        shape = len(positions), len(steps.looks), engine.num_latent_sites
        draws.kinetic = torch.full(shape, torch.nan, dtype=torch.float64)
    ends = range(check_every, steps.total, check_every) if check_every else sorted(looks)
    if last is not None:
        _go_on(last, chains, batches, draws, steps)
        progress.update(chains.count, torch.nan)
    inputs = Inputs(values, noise or chains.noise, batches)
    moment = chains.moment

    def write() -> None:
        if checkpoints is not None:
            kept = steps.kept_before(moment.step)
            position = batches.position(moment.step)
            checkpoints.write(moment, position, draws.first(kept), steps.look_every)

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
            pace = Pace(first, steps.total, most, ends)
            opening = (first.part(a - first.start, b - first.start) for a, b in pace.opening())
            for tape in itertools.chain(opening, inputs.tapes(pace.spans())):
                with pace:
                    chains.move(program, batches, tape, steps, draws)
                if draws.kinetic is not None and tape.stop in looks:
                    now = {name: column[tape.stop - 1] for name, column in values.items()}
                    found = engine.kinetic(chains.state, now)
                    draws.kinetic[chains.alive, looks[tape.stop]] = found[chains.alive]
                moment = chains.moment
                progress.update(len(tape), chains.log_joint)
                draws.num_steps, draws.failures = moment.step, list(moment.failures)
                if checkpoints is not None and checkpoints.due:
                    write()
                due = check_every is None or tape.stop % check_every == 0
                if not chains.alive.any() or (stop is not None and due and stop(draws)):
                    break
            write()
    except (Exception, KeyboardInterrupt) as error:
        with contextlib.suppress(FileError):  # it may be what ended the run
            write()
        draws = draws.first(steps.kept_before(moment.step))
        draws.error = error
    draws.num_steps, draws.failures = moment.step, list(moment.failures)
    draws.state = moment.state
    draws.compile_seconds, draws.seconds = started - begun, time.perf_counter() - started
    return draws


def _looks(
    engine: Engine, state: Any, values: Mapping[str, Tensor], steps: Steps
) -> dict[int, int]:
    """Which look at the whole state comes after so many steps; none where nothing is to be seen
    but positions."""
    if not steps.positions or not hasattr(state, "momentum"):
        return {}
    warm = (values["temperature"][steps.looks] > 0).tolist()
    return {step + 1: i for i, step in enumerate(steps.looks.tolist()) if warm[i]}


def _go_on(last: Checkpoint, chains: Chains, batches: Batches, draws: Draws, steps: Steps) -> None:
    """Takes up where a run was."""
    chains.go_on_from(last.moment._replace(state=last.state_like(chains.state)))
    batches.seek(last.moment.step, last.batches)
    kept = last.positions.shape[1]
    draws.positions[:, :kept], draws.log_joint[:, :kept] = last.positions, last.log_joint
    if draws.kinetic is not None and last.kinetic is not None:
        of_draws = steps.look_every * torch.arange(1, draws.kinetic.shape[1] + 1)
        places = of_draws // last.look_every - 1
        seen = (of_draws % last.look_every == 0) & (places < last.kinetic.shape[1])
        draws.kinetic[:, seen] = last.kinetic[:, places[seen]]


def _first_noise(engine: Engine, positions: Tensor, seed: int) -> Tensor:
    """What momenta are drawn from, `[chains, latents]`."""
    size, device, dtype = engine.num_latents, positions.device, positions.dtype
    sources = [
        generator(seed, chain, Purpose.MOMENTUM, device=device) for chain in range(len(positions))
    ]
    return torch.stack(
        [torch.randn(size, generator=s, dtype=dtype, device=device) for s in sources]
    )
