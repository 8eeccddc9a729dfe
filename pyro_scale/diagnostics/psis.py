"""Whether an approximation fits: Pareto-smoothed importance weights of its draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.gaussian import matrix_or_diagonal
from pyro_scale.core.layout import Layout
from pyro_scale.curvature.chunks import Chunk, chunks_of, chunks_with, is_row_wise
from pyro_scale.diagnostics.policy import WEIGHTS
from pyro_scale.distributed.ranks import ALONE, Ranks
from pyro_scale.distributed.shares import Share
from pyro_scale.distributed.sums import Sums, Terms
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.posterior import arviz_api
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.gaussians import Fit

#: The weights' sd in nats that is rounding.
_ROUNDING_NATS = 0.01
#: Evaluations of a row's log density that anybody who asks for weights is ready to wait for.
_MOST_EVALUATIONS = 2**28


class Psis(NamedTuple):
    """The importance weights of a fit's draws against the log joint.

    Attributes:
        pareto_k: the shape of the weights' tail: up to 0.7, means under the weights, and the fit
            itself, can be trusted; 0 where the fit is exact to rounding; NaN where it is not known.
        log_weights: smoothed, of weights that sum to one, `[draws]`.
        error: of the log weights, in nats, by the choice of rows; 0 for all of them.
        num_rows: how many were evaluated.
        shift: how far the weights move the draws' mean, at the element that they move most, in
            the draws' sds: how far the fit's mean is from the posterior's, where k is small; 0
            where that is within four of its standard errors.
        spread: how many times as wide as the fit the posterior is, by the element where that is
            most, if it is Gaussian: the weights of a fit that is too narrow are of draws that
            have not been where they would show it.  Infinite where the log ratios grow faster
            than the fit's density falls; NaN where it is not known (several starts, too many
            dimensions).
    """

    pareto_k: float
    log_weights: Tensor
    error: float
    num_rows: int
    shift: float
    spread: float

    @property
    def words(self) -> str:
        """What the estimate rests on."""
        what = f"{len(self.log_weights):,} draws, {self.num_rows:,} rows"
        if math.isnan(self.pareto_k):
            return f"not known: {what} leave an error of {self.error:.2g} nats"
        return what if self.error == 0 else f"{what}, error {self.error:.2g} nats"


def psis(
    fit: Fit,
    drawn: PosteriorDraws,
    num_rows: int | None = None,
    evaluations: int = _MOST_EVALUATIONS,
    sums: Sums | None = None,
) -> Psis:
    """Importance weights of draws of a fit, at its temperature.

    Args:
        fit: the approximation: where it has several starts, the mixture of their Gaussians.
        drawn: from it.
        num_rows: how many rows are evaluated; by default all of them, or, where that is too dear,
            as many as an error of 0.2 nats takes.
        evaluations: of a row at a draw; more are too dear.
        sums: over the rows, of `sums_at` the draws, where ranks share them out.

    Raises:
        ArgumentError: the fit has no density, or none of the model's; the data are gone; it is
            too dear.
    """
    data, log_posterior = fit.data, fit.log_posterior
    check_has_density(fit)
    if data is None:
        raise ArgumentError("psis: the data are not there (single steps, or a file): run() again")
    draws = drawn.positions.shape[:2].numel()
    rows = num_rows or rows_for(log_posterior, len(fit.places), draws, evaluations)
    if rows is None:
        raise ArgumentError(
            f"psis: {draws:,} draws at {log_posterior.num_data:,} rows are too dear; pass num_rows="
        )
    positions, sums = torch.cat(list(drawn.blocks())), sums or sums_at(fit, drawn, ALONE)
    if rows >= log_posterior.num_data or not is_row_wise(log_posterior):
        log_joint, seen = sums.ask("log_joint")
        if int(seen) != log_posterior.num_data:
            raise DataError(f"the data hold {int(seen)} rows, not N = {log_posterior.num_data}")
        error, rows = 0.0, log_posterior.num_data
    else:
        log_joint, error = _from_some(fit, drawn, positions, rows, sums)
        error /= fit.temperature
    log_ratios = log_joint / fit.temperature - log_density(fit, positions)
    if bool((log_ratios.isnan() | (log_ratios == torch.inf)).any()):
        raise ArgumentError("psis: the log joint is NaN or infinite at some of the draws")
    log_weights, pareto_k = smooth(log_ratios - log_ratios.max())
    pareto_k = pareto_k if error <= WEIGHTS.error else math.nan
    drawn_at = positions[:, fit.places].double().cpu()
    moved = log_weights.exp() @ drawn_at - drawn_at.mean(0)
    shift = float((moved.abs() / drawn_at.std(0)).max())
    if shift < 4 * float(log_weights.exp().square().sum().sqrt()):  # of the effective draws
        shift = 0.0
    return Psis(pareto_k, log_weights, error, rows, shift, _spread(fit, positions, log_ratios))


def rows_for(log_posterior: LogPosterior, size: int, draws: int, evaluations: int) -> int | None:
    """How many rows to evaluate; None where those that are needed are too dear.

    Rows differ in the curvature that linearizations leave out, whose sum is about D nats: m of
    them estimate it to within D/sqrt(m).
    """
    if log_posterior.num_data * draws <= evaluations:
        return log_posterior.num_data
    needed = math.ceil((size / WEIGHTS.error) ** 2)
    if (
        is_row_wise(log_posterior)
        and needed < log_posterior.num_data
        and needed * draws <= evaluations
    ):
        return max(needed, min(evaluations // draws, log_posterior.num_data // 2))
    return None


def smooth(log_ratios: Tensor) -> tuple[Tensor, float]:
    """(Pareto-smoothed log weights of weights that sum to one, `[draws]`, their tail's shape)."""
    if not bool(log_ratios.std() > _ROUNDING_NATS):
        return log_ratios - torch.logsumexp(log_ratios, 0), 0.0
    log_weights, pareto_k = arviz_api.psis(log_ratios[None], 1.0)
    return log_weights[0], float(pareto_k[0])


def _spread(fit: Fit, positions: Tensor, log_ratios: Tensor) -> float:
    """See `Psis`: of the Gaussian whose log density is the fit's and a quadratic function that
    is as near to the log ratios as possible."""
    size = len(fit.places)
    row, column = torch.triu_indices(size, size)
    if fit.num_starts > 1 or 1 + size + len(row) > len(positions) // 2:
        return math.nan
    gaussian = fit.gaussians[0]
    sds = gaussian.variance.double().cpu().sqrt()
    away = (positions[:, fit.places] - gaussian.mean).double().cpu() / sds
    terms = [torch.ones_like(away[:, :1]), away, away[:, row] * away[:, column]]
    finite = log_ratios.isfinite()
    solution = torch.linalg.lstsq(torch.cat(terms, 1)[finite], log_ratios[finite, None]).solution[
        :, 0
    ]
    bend = away.new_zeros(size, size)
    bend[row, column] = solution[1 + size :]
    own = matrix_or_diagonal(gaussian.precision, dense=True).double().cpu() * sds * sds[:, None]
    precision = own - bend - bend.T
    if not bool((torch.linalg.eigvalsh(precision) > 0).all()):
        return math.inf
    return float(torch.linalg.inv(precision).diagonal().max().sqrt())


def check_has_density(fit: Fit) -> None:
    """Refuses fits that have no density to compare with the model's.

    Raises:
        ArgumentError: why.
    """
    if not fit.gaussians:
        raise ArgumentError("psis: a mode has no density: fit Laplace, VI or EKF")
    if fit.temperature == 0:
        raise ArgumentError("psis: at temperature 0 there is no density")
    held = fit.centers.clone()
    held[:, fit.places] = 0
    if bool((held != held[0]).any()):
        raise ArgumentError(
            "psis: starts with other values of what has no Gaussian (sites, pyro.param) are of no "
            "one density: pass num_chains=1"
        )


def log_density(fit: Fit, positions: Tensor) -> Tensor:
    """The fit's own, a mixture over its starts, `[n]`, in nats."""
    elements = positions[:, fit.places].double()
    parts = torch.stack(
        [torch.vmap(gaussian.double().log_prob)(elements) for gaussian in fit.gaussians]
    )
    return (torch.logsumexp(parts, 0) - math.log(len(parts))).cpu()


def sums_at(fit: Fit, drawn: PosteriorDraws, ranks: Ranks) -> Sums:
    """Sums over the rows at draws of a fit, as `psis` needs them, each rank its share."""
    terms = _Terms(fit, drawn, ranks.share)
    named: dict[str, Terms] = {
        "log_joint": terms.log_joint,
        "gap": terms.gap,
        "slope": terms.slope,
    }
    return Sums(ranks, named, fit.centers.device)


@dataclass(frozen=True)
class _Terms:
    """Terms of sums over rows.

    Attributes:
        fit: the approximation.
        drawn: from it, n draws.
        share: whose rows.
    """

    fit: Fit
    drawn: PosteriorDraws
    share: Share

    def log_joint(self) -> tuple[Tensor, Tensor]:
        """(That of all rows at every draw, `[n]`, in nats, how many rows they are)."""
        log_posterior, total = self.fit.log_posterior, self._nothing
        seen = torch.zeros((), dtype=torch.float64)
        assert self.fit.data is not None
        for chunk in chunks_of(log_posterior, self.fit.data, share=self.share):
            own = partial(_share, log_posterior, chunk)
            total = total + torch.cat(list(self.drawn.chunks(own))).cpu()
            seen += chunk.num_new
        return total, seen

    def gap(self, chosen: Tensor) -> Tensor:
        """What is left of chosen rows' log likelihoods at every draw but for their linearizations
        at the draws' center, `[n]`."""
        log_posterior, data, layout = self.fit.log_posterior, self.fit.data, self.fit.layout
        assert data is not None
        total = self._nothing
        for chunk, places in chunks_with(log_posterior, data, chosen, self.share):
            rows = partial(_rows, log_posterior, chunk, places)
            values = torch.cat(list(self.drawn.chunks(rows)))
            total += values.cpu() - self._away @ _slope(rows, layout, self._center)
        return total

    def slope(self) -> Tensor:
        """The gradient of all rows' log likelihood at the draws' center, [D]."""
        log_posterior, data, layout = self.fit.log_posterior, self.fit.data, self.fit.layout
        assert data is not None
        total = torch.zeros_like(self._center, dtype=torch.float64, device="cpu")
        for chunk in chunks_of(log_posterior, data, share=self.share):
            every = torch.arange(chunk.num_rows)[chunk.keep]
            total += _slope(partial(_rows, log_posterior, chunk, every), layout, self._center)
        return total

    @cached_property
    def _positions(self) -> Tensor:
        return torch.cat(list(self.drawn.blocks()))

    @property
    def _nothing(self) -> Tensor:
        return torch.zeros(len(self._positions), dtype=torch.float64)

    @cached_property
    def _center(self) -> Tensor:
        return self._positions.mean(0)

    @cached_property
    def _away(self) -> Tensor:
        return (self._positions - self._center).double().cpu()


def _from_some(
    fit: Fit, drawn: PosteriorDraws, positions: Tensor, num_rows: int, sums: Sums
) -> tuple[Tensor, float]:
    """(The log joint of all rows at every draw up to a constant, `[n]`, its error in nats), from
    differences of some rows to their linearizations at the center of the draws.

    All rows' linearization takes one pass.  The error is that of two halves of the rows, which say
    the same but for the choice of rows.
    """
    log_posterior, data = fit.log_posterior, fit.data
    assert data is not None
    away = (positions - positions.mean(0)).double().cpu()
    source = torch.Generator().manual_seed(fit.seed)
    chosen = torch.randperm(log_posterior.num_data, generator=source)[:num_rows]
    halves = []
    for half in chosen.tensor_split(2):
        rest = sums.ask("gap", half.sort().values)
        halves.append(rest * (log_posterior.num_data / len(half)))
    linear = sums.ask("slope")
    first = next(chunks_of(log_posterior, data, 1))

    def prior(params: Params) -> Tensor:
        return log_posterior(params, first.arguments, first.indices).log_prior.double()

    log_prior = torch.cat(list(drawn.chunks(prior))).cpu()
    error = float((halves[0] - halves[1]).std()) / 2
    return log_prior + away @ linear + (halves[0] + halves[1]) / 2, error


def _share(log_posterior: LogPosterior, chunk: Chunk, params: Params) -> Tensor:
    """A chunk's part of the log joint, in double precision."""
    evaluation = log_posterior(params, chunk.arguments, chunk.indices)
    share = chunk.num_new / log_posterior.num_data
    return evaluation.log_lik[chunk.keep].double().sum() + share * evaluation.log_prior.double()


def _rows(log_posterior: LogPosterior, chunk: Chunk, places: Tensor, params: Params) -> Tensor:
    """The log likelihood of some rows, in double precision."""
    evaluation = log_posterior(params, chunk.arguments, chunk.indices)
    return evaluation.log_lik[places.to(evaluation.log_lik.device)].double().sum()


def _slope(function: Callable[[Params], Tensor], layout: Layout, position: Tensor) -> Tensor:
    """The gradient at a position, [D], in double precision."""
    here = position.detach().clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(function(layout.unflatten(here)) + 0 * here.sum(), here)
    return slope.double().cpu()
