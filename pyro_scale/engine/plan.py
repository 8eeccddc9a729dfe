"""What a run of steps consists of, before the first step is taken."""

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
    """Chains and the steps that they are to take.

    Attributes:
        engine: says what a step is.
        positions: where chains start, `[chains, D]`.
        batches: of the chains.
        values: every hyperparameter's values, `[all steps]`.
        steps: how many steps, and after which of them a draw is kept.
        seed: the run's seed, or one for each chain.
        compile: whether to compile the step; "auto" does so if the run is long enough.
        earlier: programs that the same object compiled in earlier runs.
        noise: of the steps; that of the seed by default.
        numbers: numbers of these chains, which with the seed determine their random numbers;
            0, 1, ... by default.
        num_chains: number of chains of the whole run, those of other processes included; that of
            `positions` by default.  Programs of one chain and of several round differently.
        agree: where processes take steps together: whether a condition holds on all of them.
            They then have blocks of the same lengths, and all of them compile or none.
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
        """Every hyperparameter's value at a step."""
        return {name: column[step] for name, column in self.values.items()}

    @property
    def count(self) -> int:
        """Number of chains of the whole run."""
        return self.num_chains or len(self.positions)
