"""Runs chains: warm-up, thinning, collection, and what happens when one becomes non-finite."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.randomness import NoiseTape, Purpose, generator
from pyro_scale.drive.batches import Batch
from pyro_scale.drive.engine import Engine
from pyro_scale.drive.progress import Progress


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
    """How many steps there are and which of them are kept."""

    num_samples: int
    warmup_steps: int
    thinning: int

    @property
    def total(self) -> int:
        """All steps, warm-up included."""
        return self.warmup_steps + self.num_samples * self.thinning

    def draw_of(self, step: int) -> int | None:
        """Which draw the state after a step is, if it is kept."""
        done = step + 1 - self.warmup_steps
        if done <= 0 or done % self.thinning:
            return None
        return done // self.thinning - 1


@dataclass
class Draws:
    """What a run kept.

    Attributes:
        positions: unconstrained, `[chains, draws, D]`; a stopped chain's are NaN from there on.
        log_joint: the estimate from the batch of the step that led to each draw, at the state
            that the step began from, `[chains, draws]`.
        kept_steps: the number of the step that led to each draw, `[draws]`.
        failures: the chains that stopped.
        seconds: the time that the steps took.
    """

    positions: Tensor
    log_joint: Tensor
    kept_steps: Tensor
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def empty(cls, num_chains: int, num_draws: int, size: int, dtype: torch.dtype) -> Draws:
        """Room for the draws, in the processor's memory."""
        return cls(
            torch.full((num_chains, num_draws, size), torch.nan, dtype=dtype),
            torch.full((num_chains, num_draws), torch.nan, dtype=torch.float64),
            torch.zeros(num_draws, dtype=torch.long),
        )

    @property
    def finished(self) -> list[int]:
        """The chains that reached the end."""
        stopped = {failure.chain for failure in self.failures}
        return [chain for chain in range(len(self.positions)) if chain not in stopped]


class Chains:
    """The state of all chains; those that become non-finite are taken out, the others go on.

    Args:
        engine: moves them.
        positions: where they start, `[chains, D]`.
        values: the hyperparameters' values at step 0, which momenta are drawn by.
        seed: of the run.
    """

    def __init__(self, engine: Engine, positions: Tensor, values: Mapping[str, Tensor], seed: int):
        self._engine = engine
        shape = (engine.kernel.normals, engine.num_latents)
        num_chains = len(positions)
        self._noise = NoiseTape(seed, num_chains, shape, positions.dtype, positions.device)
        self._state: Any = engine.init(positions, _first_noise(engine, positions, seed), values)
        self._num_chains = num_chains
        self.alive = torch.arange(num_chains)
        self.failures: list[Failure] = []
        self.count = 0

    def step(self, batch: Batch, values: Mapping[str, Tensor]) -> Any:
        """Moves the living chains by one step; their evaluations at the state before it."""
        noise = self._noise.at(self.count)
        if len(self.alive) < self._num_chains:
            batch, noise = batch.of(self.alive), noise[self.alive]
        self._state, evaluation = self._engine.step(self._state, batch, noise, values)
        self.count += 1
        finite = torch.isfinite(self._state.position).all(dim=-1)
        if bool(finite.all()):
            return evaluation
        self._take_out(~finite, batch)
        self._state, evaluation = pytree.tree_map(lambda x: x[finite], (self._state, evaluation))
        return evaluation

    def keep(self, draws: Draws, draw: int, evaluation: Any) -> None:
        """Writes the living chains' state into the draws."""
        draws.positions[self.alive, draw] = self._state.position.cpu()
        draws.log_joint[self.alive, draw] = evaluation.log_joint.double().cpu()
        draws.kept_steps[draw] = self.count - 1

    def _take_out(self, broken: Tensor, batch: Batch) -> None:
        for place in torch.nonzero(broken)[:, 0].tolist():
            position = self._state.position[place]
            first = int(torch.nonzero(~torch.isfinite(position))[0])
            site = self._engine.layout.site_at(first)
            bad_batch = not rows.are_finite(batch.of_chain(place)[0])
            chain = int(self.alive[place])
            self.failures.append(Failure(chain, self.count - 1, site, bad_batch))
        self.alive = self.alive[~broken.cpu()]


def simulate(
    engine: Engine,
    positions: Tensor,
    batches: Iterator[Batch],
    tape: Mapping[str, Tensor],
    steps: Steps,
    seed: int,
    progress: Progress,
) -> Draws:
    """Runs every chain from its position `[chains, D]` to the end, or until it is non-finite."""
    draws = Draws.empty(len(positions), steps.num_samples, positions.shape[1], positions.dtype)
    chains = Chains(engine, positions, _at(tape, 0), seed)
    start = time.perf_counter()
    for step in range(steps.total):
        evaluation = chains.step(next(batches), _at(tape, step))
        if len(chains.alive) == 0:
            break
        draw = steps.draw_of(step)
        if draw is not None:
            chains.keep(draws, draw, evaluation)
        progress.update(evaluation.log_joint)
    draws.failures = chains.failures
    draws.seconds = time.perf_counter() - start
    return draws


def _at(tape: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    return {name: column[step] for name, column in tape.items()}


def _first_noise(engine: Engine, positions: Tensor, seed: int) -> Tensor:
    """What momenta are drawn from, `[chains, latents]`."""
    size, device, dtype = engine.num_latents, positions.device, positions.dtype
    sources = [
        generator(seed, chain, Purpose.MOMENTUM, device=device) for chain in range(len(positions))
    ]
    return torch.stack(
        [torch.randn(size, generator=s, dtype=dtype, device=device) for s in sources]
    )
