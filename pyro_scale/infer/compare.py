"""Several methods on one model, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pyro_scale.core.rows import DataLike
from pyro_scale.curvature.chunks import chunks_of
from pyro_scale.diagnostics.convergence import mixing, select_elements
from pyro_scale.diagnostics.policy import MIXING
from pyro_scale.diagnostics.summary import weighted_moments
from pyro_scale.diagnostics.table import has_wrong_temperature
from pyro_scale.errors import ArgumentError, NotRunError
from pyro_scale.infer.method import Method
from pyro_scale.metrics.regression import log_predictive_density
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.predictive import resample_equally, row_log_likelihood
from pyro_scale.posterior.row_batches import data_sites
from pyro_scale.results.call_checks import check_calls
from pyro_scale.results.gaussian import GaussianPosterior
from pyro_scale.results.particles import ParticlePosterior
from pyro_scale.results.posterior import Posterior

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Sd, relative to the mean, below which draws count as constant.
_ROUNDING = 1e-12
#: Width of a panel, height of a figure without methods, and of each method, in inches.
_WIDTH, _HEIGHT, _METHOD_HEIGHT = 5.2, 2.4, 0.28


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `ps.compare`: methods side by side.

    Attributes:
        table: a pandas DataFrame, one row a method; see `compare` for the columns.
        reference: name of the method that distances are measured from.
    """

    table: pandas.DataFrame
    reference: str

    def plot(self) -> Figure:
        """A matplotlib figure of the table: distances from the reference against seconds, one color
        a method; left of them, if the table has them, held-out log predictive densities with their
        standard errors."""
        import matplotlib.pyplot as plt

        table, panels = self.table, 1 + ("lpd" in self.table)
        size = _WIDTH * panels, _HEIGHT + _METHOD_HEIGHT * len(table)
        figure, axes = plt.subplots(1, panels, figsize=size, squeeze=False, layout="constrained")
        colors = [plt.get_cmap("tab10")(i % 10) for i in range(len(table))]
        if "lpd" in table:
            _plot_densities(axes[0, 0], table, colors)
        _plot_distances(figure, axes[0, -1], table, self.reference, colors)
        return figure

    def __str__(self) -> str:
        return f"{self.table.to_string(float_format=_in_short)}\n{self._caption}"

    def _repr_html_(self) -> str:
        return f"{self.table.to_html(float_format=_in_short)}<p>{self._caption}</p>"

    @property
    def _caption(self) -> str:
        return f"distances from {self.reference}, in its sds"


@check_calls
def compare(
    methods: Mapping[str, Method | Posterior], data: DataLike = None, reference: str | None = None
) -> Comparison:
    """Compares fitted methods on one model: their costs, and their distances from one of them.

    The table has one row a method and these columns:

    - `seconds`: warm-up, compilation and steps together.
    - `ess`, `ess_per_second`, `r_hat`: of samplers, the least bulk ESS and the worst R-hat over the
      latent sites' elements.
    - `mean_distance`: |mean - reference mean| / reference sd, the worst over elements of all
      latent sites.
    - `sd_distance`: |log(sd / reference sd)|, the worst likewise.  It is infinite for a MAP, and
      about 1/sqrt(ESS) or more between draws of the same distribution.
    - `lpd`, `lpd_se`: with data, the log predictive density of a row in nats, all data sites
      together: its mean over rows, and the standard error of that mean.  All methods have the
      same rows, so differences between methods are more precise.

    Args:
        methods: fitted methods, or their posteriors, by name, on models with the same latent
            sites.
        data: held-out rows, in any form that `run` takes; without, there is no `lpd`.
        reference: name of the method to measure distances from.  By default the first of these
            that there is: a NUTS at temperature 1 with an R-hat below 1.01 and no divergences; of
            other samplers at temperature 1 that pass the virial test of temperature, the one with
            the largest ESS among those with an R-hat below 1.05, otherwise the one with the lowest
            R-hat; the first approximation, a dense one before others; any method.

    Raises:
        ArgumentError: there are no methods; their latent sites, shapes or N differ; the reference
            is unknown; there are data for models without data sites; a run kept no draws.
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
    """The posterior of a method (or the posterior itself), checked to have kept draws.

    Args:
        name: the method's name in the comparison, for error messages.
        method: a method that has been run, or a posterior.

    Raises:
        ArgumentError: the run kept no draws.
        NotRunError: the method has not been run.
    """
    try:
        posterior = method.posterior if isinstance(method, Method) else method
        posterior.kept_draws  # noqa: B018  (which raises)
    except (ArgumentError, NotRunError) as error:
        raise type(error)(f"methods[{name!r}]: {error}", code=error.code) from None
    return posterior


def _check_posteriors(results: Mapping[str, PosteriorDraws]) -> None:
    """Raises unless all results, by method's name, have the same N (rows of data) and the same
    latent sites of the same shapes.

    Raises:
        ArgumentError: two results differ.
    """
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
    """Costs of one run, by column of the comparison's table: `seconds` (tuning, compilation and
    steps together); the smallest bulk `ess` and the largest `r_hat` among up to 200 elements of
    each latent site; and `ess_per_second`. ESS and R-hat are NaN for Gaussian fits and particles.
    """
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
    """The name of the method that is the reference by default, in the order of preference that
    `compare` documents.

    Args:
        posteriors: posteriors of the methods, by method's name.
        rows: columns of `_costs`, by method's name.
    """

    def distrust(name: str) -> tuple[float, ...]:
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

    return min(posteriors, key=distrust)


def _is_at_temperature_1(result: PosteriorDraws) -> bool:
    column = result.sample_stats.get("temperature")
    return column is not None and bool((column == 1).all())


def _moments(result: PosteriorDraws) -> tuple[Tensor, Tensor]:
    """(Posterior means, posterior sds) of all elements of all latent sites, each `[elements]`, in
    constrained space, with the draws' weights if they have any. An sd that is only rounding, or of
    a single draw, is 0."""
    latents = result.log_posterior.latents
    if result.weights is None:  # in one pass, as draws may be more than memory holds
        moments = result.moments([0.5])
        mean = torch.cat([moments[name].mean.reshape(-1) for name in latents])
        sd = torch.cat([moments[name].sd.reshape(-1) for name in latents])
        sd = sd.nan_to_num(0.0)  # if there is one draw
    else:
        parts = [weighted_moments(result.samples[name], result.weights) for name in latents]
        mean, sd = (torch.cat(values) for values in zip(*parts, strict=True))
    return mean, torch.where(sd > _ROUNDING * mean.abs(), sd, 0.0)


def _distances(
    mean: Tensor, sd: Tensor, reference_mean: Tensor, reference_sd: Tensor
) -> dict[str, float]:
    """The columns `mean_distance` (in reference sds) and `sd_distance` (of log sds) of one method:
    the largest over the elements that vary in the reference; NaN if none varies.

    Args:
        mean, sd: moments of the method, `[elements]`.
        reference_mean, reference_sd: moments of the reference, `[elements]`.
    """
    varies = reference_sd > 0
    if not bool(varies.any()):
        return {"mean_distance": math.nan, "sd_distance": math.nan}
    gaps = (mean - reference_mean)[varies].abs() / reference_sd[varies]
    ratios = (sd[varies] / reference_sd[varies]).log().abs()
    return {"mean_distance": float(gaps.max()), "sd_distance": float(ratios.max())}


def _held_out(name: str, posterior: Posterior, data: DataLike) -> dict[str, float]:
    """The columns `lpd`, the log predictive density of a held-out row in nats, averaged over rows,
    and `lpd_se`, the standard error of that average (NaN for one row).

    Args:
        name: the method's name, for the error message.
        posterior: the method's posterior.
        data: held-out rows, in any form that `run` takes.

    Raises:
        ArgumentError: the model has no data site with one value per row.
    """
    drawn = resample_equally(posterior.draws, None)
    if not data_sites(drawn):
        raise ArgumentError(f"data: the model of '{name}' has no data site with one value per row")
    parts = []
    for chunk in chunks_of(drawn.log_posterior, posterior.open_data(data)):
        log_lik = row_log_likelihood(drawn, chunk)
        parts.append(log_predictive_density(log_lik.double()))
    density = torch.cat(parts)
    error = float(density.std()) / len(density) ** 0.5 if len(density) > 1 else math.nan
    return {"lpd": float(density.mean()), "lpd_se": error}


def _in_short(value: float) -> str:
    return f"{value:.3g}"


def _plot_densities(ax: Axes, table: pandas.DataFrame, colors: Sequence[tuple[float, ...]]) -> None:
    """Draws the left panel of a comparison's plot: each method's held-out log predictive density in
    nats a row, with its standard error, on a line of its own; the first method is on top.

    Args:
        ax: axes to draw into.
        table: DataFrame of the comparison, one row a method.
        colors: a color for each method.
    """
    for place, (name, color) in enumerate(zip(table.index, colors, strict=True)):
        row = table.loc[name]
        ax.errorbar(row.lpd, place, xerr=row.lpd_se, fmt="o", color=color, capsize=3)
    ax.set_yticks(range(len(table)), list(table.index))
    ax.invert_yaxis()
    ax.margins(y=0.1)
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)
    ax.locator_params(axis="x", nbins=5)
    ax.set(xlabel="held-out log predictive density (nats a row)")


def _plot_distances(
    figure: Figure,
    ax: Axes,
    table: pandas.DataFrame,
    reference: str,
    colors: Sequence[tuple[float, ...]],
) -> None:
    """Draws the panel of distances of a comparison's plot: for every method, at the seconds that it
    took, its distances from the reference in mean (filled) and in log sd (open). The reference is a
    vertical line. Zero and infinite distances are left out.

    Args:
        figure: the figure, for the legend.
        ax: axes to draw into.
        table: DataFrame of the comparison, one row a method.
        reference: name of the reference.
        colors: a color for each method.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    for name, color in zip(table.index, colors, strict=True):
        row = table.loc[name]
        distances = np.array([row.mean_distance, row.sd_distance])
        shown = np.where(np.isfinite(distances) & (distances > 0), distances, np.nan)
        if name == reference:
            ax.axvline(row.seconds, color=color, ls="--", label=f"{name} (reference)")
            continue
        seconds = [row.seconds] * 2
        ax.plot(seconds, shown, color=color, lw=1, alpha=0.6)
        ax.plot(seconds[:1], shown[:1], "o", color=color, label=name)
        ax.plot(seconds[1:], shown[1:], "s", color=color, mfc="white")
    ax.set(xscale="log", yscale="log", xlabel="seconds", ylabel="distance from the reference")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    ax.grid(color="0.9")
    ax.set_axisbelow(True)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize="small")
    shapes = [
        ax.plot([], [], "o", color="black", label="mean, in sds")[0],
        ax.plot([], [], "s", color="black", mfc="white", label="log sd")[0],
    ]
    ax.legend(handles=shapes, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
