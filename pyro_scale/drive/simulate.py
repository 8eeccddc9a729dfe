"""Runs chains: warm-up, thinning, collection, and what happens when one becomes non-finite."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.randomness import NoiseTape, Purpose, generator
from pyro_scale.drive.batches import Batches
from pyro_scale.drive.engine import Engine
from pyro_scale.drive.programs import Program, eager, program_for
from pyro_scale.drive.progress import Progress
from pyro_scale.drive.tape import Inputs, Tape, steps_within_budget

#: From when on a run should show its progress and can be interrupted.
_NOTICED_SECONDS = 0.05


@dataclass(frozen=True)
class Failure:
    """Where a chain stopped: its state became NaN or infinite.

    Attributes:
        chain: which chain.
        step: the step after which it was so.
        site: the first site whose value is not finite.
        bad_batch: whether the step's batch itself held NaN or infinite numbers.
    """

    chain: int
    step: int
    site: str
    bad_batch: bool


@dataclass(frozen=True)
class Steps:
    """How many steps there are and which of them are kept.

    Attributes:
        num_samples: draws to keep.
        warmup_steps: steps before the first that may be kept.
        thinning: from one draw to the next, of the steps that may be kept.
        keeps: whether a step may be kept once warm-up is over; None if all may.
        positions: whether positions are kept, or log joints alone.
    """

    num_samples: int
    warmup_steps: int = 0
    thinning: int = 1
    keeps: Callable[[int], bool] | None = None
    positions: bool = True

    @cached_property
    def kept(self) -> Tensor:
        """The numbers of the steps after which a draw is kept, `[num_samples]`."""
        if self.keeps is None:
            return self.warmup_steps - 1 + self.thinning * torch.arange(1, self.num_samples + 1)
        may_be = filter(self.keeps, itertools.count(self.warmup_steps))
        wanted = self.num_samples * self.thinning
        kept = itertools.islice(may_be, self.thinning - 1, wanted, self.thinning)
        return torch.tensor(list(kept))

    @property
    def total(self) -> int:
        """All steps, warm-up included."""
        return int(self.kept[-1]) + 1

    def kept_before(self, step: int) -> int:
        """How many draws are kept before a step."""
        return int(torch.searchsorted(self.kept, step))

    def left(self, step: int) -> int:
        """How many steps there are from a step, with it, to the next draw that is kept."""
        return int(self.kept[self.kept_before(step)]) + 1 - step

    def even_until(self, start: int, stop: int) -> int:
        """Up to which step, at most `stop`, every `thinning`-th is kept, from the first on."""
        kept = self.kept[self.kept_before(start) : self.kept_before(stop)].tolist()
        if self.keeps is None or not kept:
            return stop
        evenly = range(kept[0], stop, self.thinning)
        same = sum(itertools.takewhile(bool, map(int.__eq__, kept, evenly)))
        return stop if same == len(evenly) else kept[same - 1] + 1


@dataclass
class Draws:
    """What a run kept.

    Attributes:
        positions: unconstrained, `[chains, draws, D]`; a stopped chain's are NaN from there on;
            `[chains, draws, 0]` where they are not kept.
        log_joint: the estimate from the batch of the step that led to each draw, at the state
            that the step began from, `[chains, draws]`.
        kept_steps: the number of the step that led to each draw, `[draws]`.
        failures: the chains that stopped.
        program: how the steps were run, in words.
        compile_seconds: the time until the first step.
        seconds: the time that the steps took.
        state: of all chains, after the last step.
        num_steps: how many there were.
    """

    positions: Tensor
    log_joint: Tensor
    kept_steps: Tensor
    failures: list[Failure] = field(default_factory=list)
    program: str = "eager"
    compile_seconds: float = 0.0
    seconds: float = 0.0
    state: Any = None
    num_steps: int = 0

    @classmethod
    def of(cls, positions: Tensor, steps: Steps) -> Draws:
        """Room for the draws of chains at positions `[chains, D]`, in the processor's memory."""
        (num_chains, size), num_draws = positions.shape, steps.num_samples
        size = size if steps.positions else 0
        return cls(
            torch.full((num_chains, num_draws, size), torch.nan, dtype=positions.dtype),
            torch.full((num_chains, num_draws), torch.nan, dtype=torch.float64),
            steps.kept,
        )

    @property
    def finished(self) -> list[int]:
        """The chains that reached the end."""
        stopped = {failure.chain for failure in self.failures}
        return [chain for chain in range(len(self.positions)) if chain not in stopped]


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
) -> Draws:
    """Runs every chain from its position `[chains, D]` to the end, or until it is non-finite.

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
    """
    draws = Draws.of(positions, steps)
    at_first = {name: column[0] for name, column in values.items()}
    chains = Chains(engine, positions, at_first, seed)
    inputs = Inputs(values, chains.noise, batches)

    begun = time.perf_counter()
    first = inputs.tape(0, min(2, steps.total))
    program = program_for(engine, batches, chains.state, first, compile, steps.total, progress.say)
    progress.say(program.name)
    started = time.perf_counter()
    draws.failures = chains.failures
    kept_bytes = positions.numel() * positions.element_size() // steps.thinning
    most = steps_within_budget(first, kept_bytes)
    pace = _Pace(len(first), steps.total, most, check_every)
    for tape in itertools.chain([first], inputs.tapes(pace.spans())):
        with pace:
            chains.move(program, batches, tape, steps, draws)
        progress.update(len(tape), chains.log_joint)
        draws.num_steps = tape.stop
        due = check_every is None or tape.stop % check_every == 0
        if not chains.alive.any() or (stop is not None and due and stop(draws)):
            break
    draws.state = chains.state
    draws.program, draws.compile_seconds = program.name, started - begun
    draws.seconds = time.perf_counter() - started
    return draws


class _Pace:
    """Lets tapes grow twice as long each time, until one takes long enough to be noticed; one
    ends at every multiple of `end_at` steps.

    What is drawn does not depend on it.
    """

    def __init__(self, start: int, num_steps: int, most: int, end_at: int | None = None):
        self._start, self._num_steps, self._most, self._quick = start, num_steps, most, True
        self._end_at = end_at or num_steps

    def spans(self) -> Iterator[tuple[int, int]]:
        """Steps from `start` on."""
        start, size = self._start, min(self._start, self._most)
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


def _first_noise(engine: Engine, positions: Tensor, seed: int) -> Tensor:
    """What momenta are drawn from, `[chains, latents]`."""
    size, device, dtype = engine.num_latents, positions.device, positions.dtype
    sources = [
        generator(seed, chain, Purpose.MOMENTUM, device=device) for chain in range(len(positions))
    ]
    return torch.stack(
        [torch.randn(size, generator=s, dtype=dtype, device=device) for s in sources]
    )
