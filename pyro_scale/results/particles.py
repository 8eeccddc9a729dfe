"""The posterior of SVGD: particles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor

from pyro_scale.core.online_moments import Moments
from pyro_scale.core.rows import Arguments, DataLike
from pyro_scale.core.validation import as_count
from pyro_scale.diagnostics.report import Finding, Report
from pyro_scale.errors import ArgumentError
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.results.call_checks import check_calls
from pyro_scale.results.posterior import Posterior, starts_at
from pyro_scale.tuning.early_stopping import has_converged

if TYPE_CHECKING:
    import pandas

#: Message where R-hat or ESS is requested.
_COUPLED = (
    "SVGD has no R-hat and no ESS, because its particles are coupled and deterministic, not draws "
    "of chains: ksd() is their distance from the posterior, and converged tells whether their log "
    "joint has settled"
)


class ParticlePosterior(Posterior):
    """The posterior of `SVGD`: particles, as draws of one chain.

    Args:
        draws: the particles, with the model, the data and the run's facts.
        trace: mean log joint of the particles at every step, in nats, `[steps]`.
        batch: a batch of the data, as the model's arguments, if `draws` has no data; otherwise
            None.
    """

    def __init__(self, draws: PosteriorDraws, trace: Tensor, batch: Arguments | None = None):
        super().__init__(draws, batch)
        self._trace = trace

    @property
    def trace(self) -> Tensor:
        """Mean of the particles' log joints at every step, estimated from the step's batch, in
        nats, as a total over all rows: `[steps]`; after single steps, that of the latest one."""
        return self._trace

    @property
    def converged(self) -> bool:
        """Whether the particles have converged: their mean log joint changes, from the third
        quarter of the steps to the last, by significantly less than 0.1 nats times the square root
        of the number of dimensions."""
        return bool(has_converged(self.trace, self.draws.layout.size).all())

    @check_calls
    def starts(self, num_chains: int, seed: int) -> dict[str, Tensor]:
        """Starting points for `num_chains` chains: particles, one after another and again from the
        first if there are too few. Returns constrained values `[num_chains, ...]` by site, of the
        latent sites and of `params`; `seed` is not used."""
        count = as_count("num_chains", num_chains)
        particles = torch.arange(count) % self.draws.positions.shape[1]
        return starts_at(self.draws, torch.zeros_like(particles), particles)

    @check_calls
    def summary(self, var_names: list[str] | None = None) -> pandas.DataFrame:
        """Summary of the particles: a DataFrame with a row for each element, as for samplers, but
        without R-hat, ESS and Monte Carlo errors, which are about chains.

        Args:
            var_names: names of the sites to list; all by default.
        """
        table = super().summary(var_names)
        of_chains = [name for name in table.columns if name.startswith(("mcse", "ess", "r_hat"))]
        return table.drop(columns=of_chains)

    @check_calls
    def moments(self, levels: Sequence[float] = (0.05, 0.5, 0.95)) -> dict[str, Moments]:
        """Mean, sd and quantiles of the particles by site, as for samplers, with NaN for R-hat and
        ESS, which are about chains.

        Args:
            levels: levels of the quantiles, from 0 to 1.
        """

        def without_mixing(moments: Moments) -> Moments:
            unknown = torch.full_like(moments.mean, torch.nan)
            return moments._replace(r_hat=unknown, ess=unknown)

        return {name: without_mixing(of_site) for name, of_site in super().moments(levels).items()}

    @check_calls
    def diagnostics(self, predict_at: DataLike = None) -> Never:
        """Always raises an error: R-hat and ESS are about chains, and particles are not chains.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(_COUPLED)

    @check_calls
    def report(self) -> Report:
        """How far to trust the particles: not known, as they have no density, and so no importance
        weights that could show a bias; an ensemble at temperature 0.

        `.verdict` is `"unknown"` or `"ensemble"`, `str(report)` is the text."""
        text = f"{self.attrs['num_particles']} particles at temperature 0"
        finding = Finding("", "temperature", "ensemble", text)
        if self.attrs["temperature"] > 0:
            text = "particles have no density, so no importance weights"
            advice = "ksd(), their distance from the posterior; or a sampler such as BAOA"
            finding = Finding("", "weights", "unknown", text, advice)
        return Report.from_findings([finding], {"method": self.attrs["method"]})

    def contents(self) -> dict[str, Any]:
        """What `save` writes to a file, tensors and plain values by name: the particles, the run's
        facts, and the mean log joint at every step."""
        return {**super().contents(), "trace": self.trace}
