"""Whether an approximation fits: Pareto-smoothed importance weights of its draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.gaussian import matrix_or_diagonal
from pyro_scale.curvature.chunks import Chunk, chunks_of, chunks_with, is_row_wise
from pyro_scale.data.sources import Data
from pyro_scale.diagnostics.policy import WEIGHTS
from pyro_scale.distributed.shares import Share
from pyro_scale.distributed.sums import HERE, Sums
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.posterior import arviz_api
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.gaussians import Fit

#: Sd of the log weights that is rounding, in nats.
_ROUNDING_NATS = 0.01
#: Evaluations of a row's log density that a call of `psis()` may take.
_MOST_EVALUATIONS = 2**28


class Psis(NamedTuple):
    """Importance weights of a fit's draws against the log joint.

    Attributes:
        pareto_k: shape of the weights' tail.  Up to 0.7, means under the weights, and the fit
            itself, can be trusted; 0 if the fit is exact up to rounding; NaN if it is not known.
        log_weights: smoothed log weights, whose exponentials sum to one, `[draws]`.
        error: error of the log weights due to the choice of rows, in nats; 0 if all were evaluated.
        num_rows: number of rows that were evaluated.
        shift: how far the weights move the mean of the draws, at the element that they move most,
            in the draws' sds; 0 within four standard errors.  If k is small, it is the distance of
            the fit's mean from the posterior's.
        spread: (sd of the posterior) / (sd of the fit), at the element where this is largest, if
            the posterior is Gaussian.  It shows fits that are too narrow, whose draws do not reach
            where their weights would be large.  Infinite if the log ratios grow faster than the
            fit's density falls; NaN if it is not known (several starts, too many dimensions).
    """

    pareto_k: float
    log_weights: Tensor
    error: float
    num_rows: int
    shift: float
    spread: float

    @property
    def words(self) -> str:
        """A phrase for reports on what the weights were computed from, such as "1,000 draws, 500
        rows, error 0.1 nats": the number of draws, the number of rows that were evaluated at each,
        and, unless all rows were, the error of the log weights. It begins with "not known" if
        Pareto k is NaN."""
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
    """Importance weights of a fit's draws against the log joint, at the fit's temperature.

    Args:
        fit: the approximation; with several starts, the mixture of their Gaussians.
        drawn: draws of the fit.
        num_rows: rows to evaluate; by default all, or as many as an error of 0.2 nats requires if
            all are too expensive.
        evaluations: most evaluations of a row at a draw.
        sums: the sums over the rows (`sums_at`), if other processes compute terms of them.

    Raises:
        ArgumentError: the fit has no density, or is not meant to be the posterior; the data are
            gone; the evaluations are too many; the log joint is not finite at some draws.
        DataError: the data do not have N rows.
    """
    log_posterior = fit.log_posterior
    _check_density(fit)
    if fit.data is None:
        raise ArgumentError("psis: single steps and files keep no data: run() again")
    draws = drawn.positions.shape[:2].numel()
    rows = num_rows or rows_for(log_posterior, len(fit.places), draws, evaluations)
    if rows is None:
        raise ArgumentError(
            f"psis: {draws:,} draws at {log_posterior.num_data:,} rows are too many; pass num_rows="
        )
    positions, sums = torch.cat(list(drawn.blocks())), sums or sums_at(fit, drawn, HERE)
    if rows >= log_posterior.num_data or not is_row_wise(log_posterior):
        log_joint, count = sums.ask("log_joint")
        if int(count) != log_posterior.num_data:
            raise DataError(f"the data hold {int(count)} rows, not N = {log_posterior.num_data}")
        error, rows = 0.0, log_posterior.num_data
    else:
        log_joint, error = _estimate_log_joint(fit, drawn, fit.data, rows, sums)
        error /= fit.temperature
    log_ratios = log_joint / fit.temperature - _log_density(fit, positions)
    if bool((log_ratios.isnan() | (log_ratios == torch.inf)).any()):
        raise ArgumentError("psis: the log joint is NaN or infinite at some of the draws")
    log_weights, pareto_k = _smooth(log_ratios - log_ratios.max())
    pareto_k = pareto_k if error <= WEIGHTS.error else math.nan
    elements = positions[:, fit.places].double().cpu()
    moved = log_weights.exp() @ elements - elements.mean(0)
    shift = float((moved.abs() / elements.std(0)).max())
    if shift < 4 * float(log_weights.exp().square().sum().sqrt()):  # 1 / sqrt(effective draws)
        shift = 0.0
    return Psis(pareto_k, log_weights, error, rows, shift, _spread(fit, positions, log_ratios))


def rows_for(log_posterior: LogPosterior, size: int, draws: int, evaluations: int) -> int | None:
    """The number of rows whose log likelihood is to be evaluated at each of `draws` draws; None if
    enough rows would take too many evaluations.

    Rows differ in the curvature that linearizations leave out. It adds up to about D nats, so m
    rows estimate it to within D / sqrt(m).

    Args:
        log_posterior: the model.
        size: dimensions of the Gaussian, D.
        draws: number of draws.
        evaluations: most evaluations of a row at a draw.
    """
    total = log_posterior.num_data
    if total * draws <= evaluations:
        return total
    needed = math.ceil((size / WEIGHTS.error) ** 2)
    if is_row_wise(log_posterior) and needed < total and needed * draws <= evaluations:
        return max(needed, min(evaluations // draws, total // 2))
    return None


def _check_density(fit: Fit) -> None:
    """Raises unless a fit has a density that importance weights can compare with the model's.

    Raises:
        ArgumentError: the fit has no such density; the message says why.
    """
    if fit.other_target:
        raise ArgumentError(f"psis: {fit.other_target}")
    if not fit.gaussians:
        raise ArgumentError("psis: a mode has no density: fit Laplace, VI or EKF")
    if fit.temperature == 0:
        raise ArgumentError("psis: at temperature 0 there is no density")
    fixed = fit.centers.clone()
    fixed[:, fit.places] = 0
    if bool((fixed != fixed[0]).any()):
        raise ArgumentError(
            "psis: the starts have different values of sites without a Gaussian or of pyro.param, "
            "so they have no common density: pass num_chains=1"
        )


def _log_density(fit: Fit, positions: Tensor) -> Tensor:
    """The log density of a fit, the mixture of its Gaussians, at each draw, `[draws]`, in nats.

    Args:
        fit: the approximation.
        positions: draws as unconstrained params, `[draws, D]`.
    """
    elements = positions[:, fit.places].double()
    parts = torch.stack([gaussian.double().log_probs(elements) for gaussian in fit.gaussians])
    return (torch.logsumexp(parts, 0) - math.log(len(parts))).cpu()


def _smooth(log_ratios: Tensor) -> tuple[Tensor, float]:
    """(Pareto-smoothed log weights of the draws, whose exponentials sum to one, `[draws]`; Pareto
    k, the shape of their tail). Pareto k is 0 if all ratios are equal up to rounding.

    Args:
        log_ratios: log joint minus the fit's log density at each draw, `[draws]`, in nats.
    """
    if not bool(log_ratios.std() > _ROUNDING_NATS):
        return log_ratios - torch.logsumexp(log_ratios, 0), 0.0
    log_weights, pareto_k = arviz_api.psis(log_ratios[None], 1.0)
    return log_weights[0], float(pareto_k[0])


def _spread(fit: Fit, positions: Tensor, log_ratios: Tensor) -> float:
    """The ratio (posterior's sd) / (fit's sd) of the element where it is largest, if the posterior
    is Gaussian: from the quadratic function of the draws that is closest to the log ratios. NaN
    with several starts or too few draws; infinite if the result is no Gaussian.

    Args:
        fit: the approximation.
        positions: draws as unconstrained params, `[draws, D]`.
        log_ratios: log joint minus the fit's log density at each draw, `[draws]`, in nats.
    """
    size = len(fit.places)
    row, column = torch.triu_indices(size, size)
    if fit.num_starts > 1 or 1 + size + len(row) > len(positions) // 2:
        return math.nan
    gaussian = fit.gaussians[0]
    sds = gaussian.variance.double().cpu().sqrt()
    z = (positions[:, fit.places] - gaussian.mean).double().cpu() / sds
    terms = torch.cat([torch.ones_like(z[:, :1]), z, z[:, row] * z[:, column]], 1)
    finite = log_ratios.isfinite()
    coefficients = torch.linalg.lstsq(terms[finite], log_ratios[finite, None]).solution[:, 0]
    bend = z.new_zeros(size, size)
    bend[row, column] = coefficients[1 + size :]
    precision = matrix_or_diagonal(gaussian.precision, dense=True).double().cpu()
    precision = precision * sds * sds[:, None] - bend - bend.T
    if not bool((torch.linalg.eigvalsh(precision) > 0).all()):
        return math.inf
    return float(torch.linalg.inv(precision).diagonal().max().sqrt())


# ------------------------------------------------------------------ sums over rows


def sums_at(fit: Fit, drawn: PosteriorDraws, sums: Sums) -> Sums:
    """An object that computes the sums over rows that `psis` needs at a fit's draws (of log joints,
    of their gradient), to be passed to `psis`; processes that share the rows compute parts of the
    sums.

    Args:
        fit: the approximation, with its data.
        drawn: draws of the fit.
        sums: object that adds up the parts of all processes.
    """
    assert fit.data is not None
    terms = _Terms(drawn, fit.data, sums.share)
    return sums.with_terms({"log_joint": terms.log_joint, "gap": terms.gap, "slope": terms.slope})


@dataclass(frozen=True)
class _Terms:
    """The parts of sums over rows that one process computes, in double precision.

    Attributes:
        drawn: draws of the fit.
        data: data of the fit.
        share: which chunks of rows belong to this process.
    """

    drawn: PosteriorDraws
    data: Data
    share: Share

    def log_joint(self) -> tuple[Tensor, Tensor]:
        """The log joint of this process's rows at every draw, `[draws]`, in nats, with their
        fraction of the log prior; and the number of these rows, 0-d."""
        log_posterior = self.drawn.log_posterior
        total = torch.zeros(len(self._positions), dtype=torch.float64)
        count = torch.zeros((), dtype=torch.float64)
        for chunk in chunks_of(log_posterior, self.data, share=self.share):
            share = chunk.num_new / log_posterior.num_data

            def log_joint(params: Params, chunk: Chunk = chunk, share: float = share) -> Tensor:
                evaluation = log_posterior(params, chunk.arguments, chunk.indices)
                log_prior = share * evaluation.log_prior.double()
                return evaluation.log_lik[chunk.keep].double().sum() + log_prior

            total = total + self._at_draws(log_joint)
            count += chunk.num_new
        return total, count

    def gap(self, chosen: Tensor) -> Tensor:
        """The summed log likelihood of some rows at every draw minus its linearization at the mean
        of the draws, `[draws]`, in nats.

        Args:
            chosen: numbers of the rows among all N.
        """
        total = torch.zeros(len(self._positions), dtype=torch.float64)
        away = (self._positions - self._center).double().cpu()
        for chunk, places in chunks_with(self.drawn.log_posterior, self.data, chosen, self.share):
            log_lik = self._log_lik(chunk, places)
            total += self._at_draws(log_lik) - away @ self._gradient(log_lik)
        return total

    def slope(self) -> Tensor:
        """The gradient, with respect to all D unconstrained params, of the summed log likelihood of
        this process's rows at the mean of the draws, `[D]`, in nats."""
        total = torch.zeros(len(self._center), dtype=torch.float64)
        for chunk in chunks_of(self.drawn.log_posterior, self.data, share=self.share):
            every = torch.arange(chunk.num_rows)[chunk.keep]
            total += self._gradient(self._log_lik(chunk, every))
        return total

    @cached_property
    def _positions(self) -> Tensor:
        return torch.cat(list(self.drawn.blocks()))

    @cached_property
    def _center(self) -> Tensor:
        return self._positions.mean(0)

    def _log_lik(self, chunk: Chunk, places: Tensor) -> Callable[[Params], Tensor]:
        """A function from params to the total log likelihood of some rows, in nats.

        Args:
            chunk: rows in memory.
            places: numbers of the rows that count, within the chunk.
        """

        def log_lik(params: Params) -> Tensor:
            of_rows = self.drawn.log_posterior(params, chunk.arguments, chunk.indices).log_lik
            return of_rows[places.to(of_rows.device)].double().sum()

        return log_lik

    def _at_draws(self, function: Callable[[Params], Tensor]) -> Tensor:
        """The values at all draws of a function from params by site to a scalar, `[draws]`, on the
        CPU."""
        return torch.cat(list(self.drawn.chunks(function))).cpu()

    def _gradient(self, function: Callable[[Params], Tensor]) -> Tensor:
        """The gradient of a scalar function of params at the draws' mean, `[D]`, in float64."""
        position = self._center.detach().clone().requires_grad_()
        with torch.enable_grad():
            # a function that depends on no param has the gradient 0
            value = function(self.drawn.layout.unflatten(position)) + 0 * position.sum()
            (gradient,) = torch.autograd.grad(value, position)
        return gradient.double().cpu()


def _estimate_log_joint(
    fit: Fit, drawn: PosteriorDraws, data: Data, num_rows: int, sums: Sums
) -> tuple[Tensor, float]:
    """(The log joint of all rows at every draw, up to a constant, in nats, `[draws]`, estimated
    from some rows; the error of the estimate in nats).

    Estimated from the differences of some rows to their linearizations at the draws' mean, and the
    linearization of all rows, which takes one pass. The error is that between two halves of the
    rows.

    Args:
        fit: the approximation.
        drawn: draws of the fit.
        data: all rows.
        num_rows: number of rows to evaluate, drawn at random.
        sums: the sums over the rows, from `sums_at`.
    """
    log_posterior, positions = fit.log_posterior, torch.cat(list(drawn.blocks()))
    away = (positions - positions.mean(0)).double().cpu()
    source = torch.Generator().manual_seed(fit.seed)
    chosen = torch.randperm(log_posterior.num_data, generator=source)[:num_rows]
    one, other = (
        sums.ask("gap", half.sort().values) * (log_posterior.num_data / len(half))
        for half in chosen.tensor_split(2)
    )
    linear = sums.ask("slope")
    first = next(chunks_of(log_posterior, data, 1))

    def log_prior(params: Params) -> Tensor:
        return log_posterior(params, first.arguments, first.indices).log_prior.double()

    prior = torch.cat(list(drawn.chunks(log_prior))).cpu()
    return prior + away @ linear + (one + other) / 2, float((one - other).std()) / 2
