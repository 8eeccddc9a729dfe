"""The posterior as particles left it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

import torch
from torch import Tensor

from pyro_scale.core.online_moments import Moments
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count
from pyro_scale.errors import ArgumentError
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.results.call_checks import check_calls
from pyro_scale.results.posterior import Posterior, starts_at
from pyro_scale.tuning.early_stopping import has_converged

#: Why there is no R-hat and no ESS.
_COUPLED = (
    "SVGD has no R-hat and no ESS: its particles are coupled and deterministic, so they are no "
    "draws of chains: ksd() says how far they are from the posterior, and converged whether their "
    "log joint has come to rest"
)


class ParticlePosterior(Posterior):
    """Particles that stand for the posterior, as draws of one chain.

    Args:
        draws: the particles, with the model, the data and the run's facts.
        trace: the mean of the particles' log joints at every step, in nats, `[steps]`.
        batch: the batch that the model was understood on, where the particles come without data.
    """

    def __init__(self, draws: PosteriorDraws, trace: Tensor, batch: Arguments | None = None):
        super().__init__(draws, batch)
        self._trace = trace

    @property
    def trace(self) -> Tensor:
        """The mean of the particles' log joints at every step, estimated from its batch, in nats,
        a total: `[steps]`; after single steps, of the latest one."""
        return self._trace

    @property
    def converged(self) -> bool:
        """Whether the particles' mean log joint is known neither to rise nor to fall from the third
        quarter of the steps to the last, by 0.1 nats times the root of the dimensions."""
        return bool(has_converged(self.trace, self.draws.layout.size).all())

    @check_calls
    def starts(self, num_chains: int, seed: int) -> dict[str, Tensor]:
        """Where chains begin that start from particles, from each in turn, and `params`,
        `[num_chains, ...]`."""
        count = as_count("num_chains", num_chains)
        particles = torch.arange(count) % self.draws.positions.shape[1]
        return starts_at(self.draws, torch.zeros_like(particles), particles)

    @check_calls
    def summary(self, var_names: list[str] | None = None) -> Any:
        """As for samplers, of the particles; without R-hat, ESS and Monte Carlo errors, which are
        of draws of chains."""
        table = super().summary(var_names)
        of_chains = [name for name in table.columns if name.startswith(("mcse", "ess", "r_hat"))]
        return table.drop(columns=of_chains)

    @check_calls
    def moments(self, levels: Sequence[float] = (0.05, 0.5, 0.95)) -> dict[str, Moments]:
        """As for samplers, of the particles; R-hat and ESS, which are of draws of chains, are
        NaN."""
        moments = super().moments(levels)
        nothing = {name: torch.full_like(each.mean, torch.nan) for name, each in moments.items()}
        return {
            name: each._replace(r_hat=nothing[name], ess=nothing[name])
            for name, each in moments.items()
        }

    @check_calls
    def diagnostics(self, predict_at: Any = None) -> Never:
        """Refuses: R-hat and ESS are of draws of chains.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(_COUPLED)

    def contents(self) -> dict[str, Any]:
        """What `save` writes: tensors and plain values by name."""
        return {**super().contents(), "trace": self.trace}
