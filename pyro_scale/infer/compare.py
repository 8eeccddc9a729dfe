"""Several methods on one model, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_scale.diagnostics.convergence import mixing, select_elements
from pyro_scale.diagnostics.policy import MIXING
from pyro_scale.diagnostics.summary import weighted_moments
from pyro_scale.diagnostics.table import has_wrong_temperature
from pyro_scale.errors import ArgumentError, NotRunError
from pyro_scale.fullbatch.chunks import chunks_of
from pyro_scale.infer.comparison_plot import plot
from pyro_scale.infer.method import Method
from pyro_scale.metrics.regression import log_predictive_density
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.predictive import resample_equally, row_log_likelihood
from pyro_scale.posterior.site_rows import data_sites
from pyro_scale.results.call_checks import check_calls
from pyro_scale.results.gaussian import GaussianPosterior
from pyro_scale.results.particles import ParticlePosterior
from pyro_scale.results.posterior import Posterior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Of a mean, the sd below which draws are all the same.
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods side by side, as `ps.compare` finds them.

    Attributes:
        table: a DataFrame, one row a method.
        reference: the method that distances are taken from.
    """

    table: Any
    reference: str

    def plot(self) -> Figure:
        """A figure: log predictive densities with their standard errors, where there are any, and
        distances from the reference against seconds."""
        return plot(self.table, self.reference)

    def __str__(self) -> str:
        return f"{self.table.to_string(float_format=_in_short)}\n{self._caption}"

    def _repr_html_(self) -> str:
        return f"{self.table.to_html(float_format=_in_short)}<p>{self._caption}</p>"

    @property
    def _caption(self) -> str:
        return f"distances from {self.reference}, in its sds"


@check_calls
def compare(
    methods: Mapping[str, Method | Posterior], data: Any = None, reference: str | None = None
) -> Comparison:
    """What each of several fitted methods cost, and what came out.

    The table's columns: `seconds`, warm-up, compilation and steps together; of samplers the least
    bulk `ess` of the latent sites' elements, `ess_per_second`, and the worst `r_hat`; from the
    reference, the worst over elements of all latent sites of `mean_distance`, |mean - reference
    mean| / reference sd, and `sd_distance`, |log(sd / reference sd)| (infinite for a MAP, and at
    least about 1/sqrt(ESS) for draws of the same distribution); with data, `lpd`, the log
    predictive density of a row in nats, all data sites together, its mean over rows, and `lpd_se`,
    the standard error of that mean (rows are the same for all methods, so differences between them
    are known better).

    Args:
        methods: fitted methods, or their posteriors, by name, on models with the same latent
            sites.
        data: held-out rows, in any form that `run` takes; without, there is no `lpd`.
        reference: the name of the method to measure from.  By default the one to be trusted most:
            a NUTS at temperature 1 with an R-hat below 1.01 and no divergences; else, of other
            samplers at temperature 1, with an R-hat below 1.05, and not known to be too hot or
            cold by the virial theorem, the one with the largest ESS; else that of them with the
            lowest R-hat; else the first approximation, a dense one before others; else any.

    Raises:
        ArgumentError: no methods, other latent sites, shapes or N, an unknown reference, data for
            models without data sites, a run that kept no draws.
        NotRunError: a method has not been run.

    Examples:
        >>> import pyro, pyro.distributions as dist, torch, pyro_scale as ps
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> y, quiet = torch.linspace(-1, 2, 30), {"seed": 0, "progress": False}
        >>> sampler = ps.BAOA(model, lr=0.3).run(
        ...     y, num_samples=500, warmup_steps=100, thinning=1, num_chains=2, **quiet)
        >>> fits = {"BAOA": sampler, "Laplace": ps.Laplace(model).run(y, **quiet)}
        >>> compared = ps.compare(fits, data=torch.tensor([0.0, 0.5, 1.0]))
        >>> compared.reference
        'BAOA'
        >>> compared.table.lpd.round(1).tolist()
        [-1.0, -1.0]
    """
    if not isinstance(methods, Mapping) or not methods:
        raise ArgumentError("methods: pass fitted methods by name, {'SGLD': sampler, ...}")
    for name, method in methods.items():
        if not isinstance(method, Method | Posterior):
            raise ArgumentError(
                f"methods[{name!r}] is a {type(method).__name__}: pass a method, or its posterior"
            )
    if reference is not None and reference not in methods:
        raise ArgumentError(f"reference={reference!r}: pass one of {list(methods)}")
    import pandas

    posteriors = {name: _posterior_of(name, method) for name, method in methods.items()}
    _check_posteriors({name: posterior.draws for name, posterior in posteriors.items()})
    rows = {name: _costs(posterior) for name, posterior in posteriors.items()}
    reference = reference or _most_trusted(posteriors, rows)
    moments = {name: _moments(posterior.draws) for name, posterior in posteriors.items()}
    for name, posterior in posteriors.items():
        rows[name] |= _distances(*moments[name], *moments[reference])
        if data is not None:
            rows[name] |= _held_out(name, posterior, data)
    table = pandas.DataFrame.from_dict(rows, orient="index")
    table.index.name = "method"
    return Comparison(table, reference)


def _posterior_of(name: str, method: Method | Posterior) -> Posterior:
    """A method's posterior, where there are draws; an error names the method."""
    try:
        posterior = method.posterior if isinstance(method, Method) else method
        posterior.kept_draws  # noqa: B018  (which raises)
    except (ArgumentError, NotRunError) as error:
        raise type(error)(f"methods[{name!r}]: {error}", code=error.code) from None
    return posterior


def _check_posteriors(results: Mapping[str, PosteriorDraws]) -> None:
    first, *others = results
    expected, size = _shapes(results[first]), results[first].log_posterior.num_data
    for name in others:
        if results[name].log_posterior.num_data != size:
            raise ArgumentError(
                f"methods: '{first}' was run on N = {size} rows, '{name}' on "
                f"{results[name].log_posterior.num_data}: compare methods on the same data"
            )
        shapes = _shapes(results[name])
        for site in dict.fromkeys([*expected, *shapes]):
            if expected.get(site) != shapes.get(site):
                raise ArgumentError(
                    f"methods: latent site '{site}' is {expected.get(site, 'not there')} in "
                    f"'{first}', {shapes.get(site, 'not there')} in '{name}': compare methods on "
                    "models with the same latent sites"
                )


def _shapes(result: PosteriorDraws) -> dict[str, list[int]]:
    return {name: list(result.shapes[name]) for name in result.log_posterior.latents}


def _costs(posterior: Posterior) -> dict[str, float]:
    """What a run took, and how its chains mixed."""
    result = posterior.draws
    times = ("tuning_time", "compile_time", "sampling_time", "fitting_time")
    seconds = math.fsum(result.attrs.get(name, 0.0) for name in times)
    ess = r_hat = math.nan
    if not isinstance(posterior, GaussianPosterior | ParticlePosterior):
        latents = result.log_posterior.latents
        table = mixing({name: select_elements(result, name) for name in latents})
        ess, r_hat = float(table.ess_bulk.min()), float(table.r_hat.max())
    return {
        "seconds": seconds,
        "ess": ess,
        "ess_per_second": ess / (seconds or math.nan),
        "r_hat": r_hat,
    }


def _most_trusted(
    posteriors: Mapping[str, Posterior], rows: Mapping[str, Mapping[str, float]]
) -> str:
    """The name of the default reference."""

    def find_untrusted(name: str) -> tuple[float, ...]:
        posterior, row = posteriors[name], rows[name]
        if isinstance(posterior, GaussianPosterior):
            return 2, not posterior.fit.gaussians, posterior.attrs["structure"] != "dense"
        if isinstance(posterior, ParticlePosterior):
            return 2, False, True
        result, r_hat = posterior.draws, row["r_hat"]
        r_hat = math.inf if math.isnan(r_hat) else r_hat
        if "diverging" in result.sample_stats:
            is_exact = result.attrs["temperature"] == 1 and not bool(
                result.sample_stats["diverging"].any()
            )
            return (-1, -row["ess"]) if is_exact and r_hat < MIXING.agree else (4, r_hat)
        if not _is_at_temperature_1(result) or has_wrong_temperature(result):
            return 3, r_hat
        return (0, -row["ess"]) if r_hat < MIXING.disagree else (1, r_hat)

    return min(posteriors, key=find_untrusted)


def _is_at_temperature_1(result: PosteriorDraws) -> bool:
    column = result.sample_stats.get("temperature")
    return column is not None and bool((column == 1).all())


def _moments(result: PosteriorDraws) -> tuple[Tensor, Tensor]:
    """(Means, sds) of all elements of the latent sites, over draws as they count."""
    latents = result.log_posterior.latents
    if result.weights is None:  # in one pass, as draws may be more than memory holds
        moments = result.moments([0.5])
        mean = torch.cat([moments[name].mean.reshape(-1) for name in latents])
        sd = torch.cat([moments[name].sd.reshape(-1) for name in latents]).nan_to_num(0.0)  # of one
    else:
        parts = [weighted_moments(result.samples[name], result.weights) for name in latents]
        mean, sd = (torch.cat(of) for of in zip(*parts, strict=True))
    return mean, torch.where(sd > _ROUNDING * mean.abs(), sd, 0.0)


def _distances(
    mean: Tensor, sd: Tensor, reference_mean: Tensor, reference_sd: Tensor
) -> dict[str, float]:
    """The worst over elements that vary."""
    varies = reference_sd > 0
    if not bool(varies.any()):
        return {"mean_distance": math.nan, "sd_distance": math.nan}
    gaps = (mean - reference_mean)[varies].abs() / reference_sd[varies]
    ratios = (sd[varies] / reference_sd[varies]).log().abs()
    return {"mean_distance": float(gaps.max()), "sd_distance": float(ratios.max())}


def _held_out(name: str, posterior: Posterior, data: Any) -> dict[str, float]:
    """The log predictive density of rows, its mean and standard error."""
    drawn = resample_equally(posterior.draws, None)
    if not data_sites(drawn):
        raise ArgumentError(f"data: the model of '{name}' has no data site with a value a row")
    parts = []
    for chunk in chunks_of(drawn.log_posterior, posterior.open_data(data)):
        log_lik = row_log_likelihood(drawn, chunk)
        parts.append(log_predictive_density(log_lik.double()))
    density = torch.cat(parts)
    error = float(density.std()) / len(density) ** 0.5 if len(density) > 1 else math.nan
    return {"lpd": float(density.mean()), "lpd_se": error}


def _in_short(value: float) -> str:
    return f"{value:.3g}"
