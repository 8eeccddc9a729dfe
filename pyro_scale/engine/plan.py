"""The plan of a run: the chains, and all that determines the steps that they are to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pyro_scale.data.batches import Batches
from pyro_scale.engine.draws import Steps
from pyro_scale.engine.reuse import Earlier
from pyro_scale.engine.step import Engine
from pyro_scale.rng.streams import NoiseStream


@dataclass(frozen=True)
class StepPlan:
    """The chains of a run and the steps that they are to take.

    Attributes:
        engine: the engine, which defines a step.
        positions: unconstrained parameters at which chains start, `[chains, D]`.
        batches: the minibatches of the chains.
        values: dict from the name of a hyperparameter to its value at every step, `[all steps,
            ...]`.
        steps: the number of steps, and the steps after which a draw is kept.
        seed: the run's seed, or one seed for each chain.
        compile: whether to compile the step; "auto" compiles it if the run is long enough.
        earlier: cache of the programs that the same object compiled in earlier runs.
        noise: stream of the steps' standard normal numbers; None for that of the seed.
        numbers: the chains' numbers, which with the seed determine their random numbers; None for
            0, 1, ...
        num_chains: number of chains of the whole run, those of other processes included; None if
            all are in `positions`. Programs of one chain and of several round differently.
        agree: function that says whether a condition holds on all processes, where processes take
            steps together. They then have blocks of the same lengths, and all of them compile or
            none. None for a single process.
    """

    engine: Engine
    positions: Tensor
    batches: Batches
    values: Mapping[str, Tensor]
    steps: Steps
    seed: int | Sequence[int]
    compile: bool | Literal["auto"]
    earlier: Earlier
    noise: NoiseStream | None = None
    numbers: Sequence[int] | None = None
    num_chains: int | None = None
    agree: Callable[[bool], bool] | None = None

    def values_at(self, step: int) -> dict[str, Tensor]:
        """The hyperparameters at step number `step`, by name."""
        return {name: column[step] for name, column in self.values.items()}

    @property
    def count(self) -> int:
        """Number of chains of the whole run, those that other processes move included."""
        return self.num_chains or len(self.positions)
