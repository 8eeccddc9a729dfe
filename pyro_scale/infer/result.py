"""What a run leaves behind: draws in the sites' own terms, and the facts of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.layout import Layout
from pyro_scale.drive.sources import Data
from pyro_scale.infer.gradients import GradientNoise
from pyro_scale.model.log_posterior import LogPosterior

#: Numbers that one vmapped call over draws may hold for its params and rows.
_CHUNK_NUMBERS = 2**22


@dataclass(frozen=True)
class Result:
    """The finished chains of a run.

    Attributes:
        log_posterior: what was sampled.
        data: what it was run on; None for single steps.
        layout: of a position.
        positions: unconstrained draws, `[chains, draws, D]`.
        sample_stats: by name, `[chains, draws]`.
        attrs: strings and numbers: method, hyperparameters, N, B, seed, versions, seconds, ...
        gradient_noise: what minibatches did; None where that is not known.
    """

    log_posterior: LogPosterior
    data: Data | None
    layout: Layout
    positions: Tensor
    sample_stats: dict[str, Tensor]
    attrs: dict[str, Any] = field(default_factory=dict)
    gradient_noise: GradientNoise | None = None

    @property
    def num_chains(self) -> int:
        """Chains that finished."""
        return self.positions.shape[0]

    @property
    def weights(self) -> Tensor | None:
        """How much each draw counts, `[chains, draws]`, where they do not count alike."""
        return self.sample_stats.get("weight")

    @cached_property
    def samples(self) -> dict[str, Tensor]:
        """Constrained latents and deterministic sites outside the data's plate,
        `[chains, draws, ...]`."""

        def values(params: dict[str, Tensor]) -> dict[str, Tensor]:
            constrained = self.log_posterior.constrain(params)
            latents = {name: constrained[name] for name in self.log_posterior.latents}
            return latents | self.log_posterior.deterministics(params)

        chains, draws = self.positions.shape[:2]
        flat = self.over_draws(values)
        return {k: v.reshape(chains, draws, *v.shape[1:]) for k, v in flat.items()}

    @property
    def params(self) -> dict[str, Tensor]:
        """Points' constrained values: `pyro.param` sites and unfrozen weights."""
        last = self.layout.unflatten(self.positions[0, -1])
        constrained = self.log_posterior.constrain(last)
        return {name: constrained[name] for name in self.log_posterior.points}

    def over_draws(
        self, function: Callable[[dict[str, Tensor]], dict[str, Tensor]], num_rows: int = 1
    ) -> dict[str, Tensor]:
        """A function of one draw's unconstrained params, vmapped: `[chains * draws, ...]`.

        Args:
            function: of params, to a dict of tensors.
            num_rows: rows that it touches; more rows, fewer draws at a time.
        """
        chunk = max(1, _CHUNK_NUMBERS // (self.layout.size + 16 * num_rows))
        try:
            with torch.no_grad():
                parts = [
                    torch.vmap(function)(self.layout.unflatten(positions))
                    for positions in self.positions.flatten(0, 1).split(chunk)
                ]
        except (RuntimeError, NotImplementedError):  # a model that vmap refuses
            return self.draw_by_draw(function)
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def draw_by_draw(
        self, function: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The same in a loop, for functions that draw at random, which few samplers do vmapped."""
        with torch.no_grad():
            values = [
                function(self.layout.unflatten(position))
                for position in self.positions.flatten(0, 1)
            ]
        return {name: torch.stack([value[name] for value in values]) for name in values[0]}
