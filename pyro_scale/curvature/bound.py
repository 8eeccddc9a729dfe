"""The Gaussian of largest evidence lower bound, by linear regression (Salimans and Knowles,
Fixed-form variational posterior approximation through stochastic linear regression, 2013).

At the optimum q = N(m, L L'), L' grad log p + eps has mean 0 and is uncorrelated with the draw's
standard normals eps.  Elsewhere, its regression on eps gives the mean and the precision of a better
Gaussian: of the best one, where the posterior is Gaussian.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal
from pyro_scale.curvature.density import FullDataDensity

#: Most improvements.
_MOST_STEPS = 8
#: Change of means in sds, and of log sds, below which improvements end.
_CHANGE_TOL = 1e-3
#: Fractions of an improvement that are tried, one after another.
_FRACTIONS = 1.0, 0.5, 0.25, 0.1
#: Largest error at the optimum of a mean, in sds, and of an sd, relative to itself.
MOST_MEAN, MOST_SD = 0.1, 0.03
#: Standard errors that the worst element of one fit in a thousand exceeds by chance.
_NUM_ERRORS = 4.5


class Offset(NamedTuple):
    """Estimated distance of a Gaussian from the one of largest evidence lower bound: the largest
    errors among its elements.

    Attributes:
        mean: the largest error of an element's mean, in sds; infinite if unknown.
        sd: the largest error of an element's sd, relative to the sd; infinite if unknown.
        error: standard error of both numbers.
    """

    mean: float
    sd: float
    error: float

    @property
    def is_small(self) -> bool:
        """Whether the Gaussian is good enough: both errors are at most their tolerances
        (`MOST_MEAN`, `MOST_SD`) plus 4.5 standard errors.
        """
        chance = _NUM_ERRORS * self.error
        return self.mean <= MOST_MEAN + chance and self.sd <= MOST_SD + chance


class _Regression(NamedTuple):
    """The bound at a Gaussian, and the regression of L' grad log p + eps on eps.

    Attributes:
        bound: the evidence lower bound of the tempered posterior, in nats, up to a constant.
        constant: the regression's constant term, [d].
        precision: the precision of the better Gaussian in the coordinates in which the present
            Gaussian, with covariance L L', is standard normal, [d, d].
        error: largest standard error of the regression's coefficients.
    """

    bound: float
    constant: Tensor
    precision: Tensor
    error: float

    @property
    def is_positive(self) -> bool:
        """Whether `precision` is positive definite. Only then does the regression give a Gaussian
        with a larger bound.
        """
        return not bool(torch.linalg.cholesky_ex(self.precision).info)


class Bound(NamedTuple):
    """The evidence lower bound of Gaussians over d of a model's D unconstrained params; the other
    params are constants.

    Attributes:
        density: the log joint density of all rows.
        center: a vector [D] with the values of the params that the Gaussians are not over.
        places: indices, in `center`, of the d params that the Gaussians are over.
        temperature: temperature of the posterior that is approximated.
    """

    density: FullDataDensity
    center: Tensor
    places: Tensor
    temperature: float

    def improved(self, gaussian: Dense | Diagonal, eps: Tensor) -> Dense | Diagonal:
        """The Gaussian with the largest evidence lower bound that a search from `gaussian` reaches,
        of the same structure (diagonal or dense). Expectations are means over fixed standard normal
        numbers.

        Args:
            gaussian: the Gaussian where the search begins; returned if no better one is found.
            eps: standard normal numbers, `[draws, d]`.
        """
        current = self._regress(gaussian, eps)
        for _ in range(_MOST_STEPS):
            if current is None or not current.is_positive:
                break
            for fraction in _FRACTIONS:
                other = _move(gaussian, current, fraction)
                ahead = self._regress(other, eps)
                if ahead is not None and ahead.bound > current.bound:
                    break
            else:
                break
            change = _offset(gaussian, current)
            gaussian, current = other, ahead
            if max(change.mean, change.sd) < _CHANGE_TOL:
                break
        return gaussian

    def offset(self, gaussian: Dense | Diagonal, eps: Tensor) -> Offset:
        """An estimate of how far a Gaussian is from the one of largest evidence lower bound: the
        largest errors of its means and sds. Both are infinite if they cannot be estimated. `eps`
        has the standard normal numbers `[draws, d]` from which expectations are computed.
        """
        regression = self._regress(gaussian, eps)
        if regression is None or not regression.is_positive:
            return Offset(torch.inf, torch.inf, 0.0)
        return _offset(gaussian, regression)

    def _regress(self, gaussian: Dense | Diagonal, eps: Tensor) -> _Regression | None:
        """The evidence lower bound at a Gaussian, and the linear regression of its draws' gradients
        on their standard normal numbers; None if the log joint or its gradient is not finite at
        some draw. `eps` has these numbers, `[draws, d]`.
        """
        factor = _factor(gaussian)
        draws = self.center.double().repeat(len(eps), 1)
        draws[:, self.places] = gaussian.mean.double() + eps @ factor.mT
        values, slopes = self.density.grads(draws.to(self.center))
        if not bool(torch.isfinite(values).all() and torch.isfinite(slopes).all()):
            return None
        nats = self.density.log_posterior.num_data / self.temperature
        scores = nats * slopes[:, self.places].double() @ factor + eps
        terms = torch.cat([torch.ones_like(eps[:, :1]), eps], 1)
        # not lstsq, whose last digit depends on where its workspace is in memory
        coefficients = torch.linalg.solve(terms.mT @ terms, terms.mT @ scores)
        residuals = scores - terms @ coefficients
        variance = residuals.square().sum(0) / (len(eps) - terms.shape[1])
        precision = torch.eye(len(factor)).to(coefficients) - coefficients[1:]
        bound = nats * float(values.double().mean()) + float(factor.diagonal().log().sum())
        error = float(variance.max().sqrt()) / len(eps) ** 0.5
        return _Regression(bound, coefficients[0], (precision + precision.mT) / 2, error)


def _factor(gaussian: Dense | Diagonal) -> Tensor:
    """A factor L [d, d] of a Gaussian's covariance L L', in float64: lower triangular, or
    diagonal."""
    if isinstance(gaussian, Dense):
        return gaussian.scale_tril.double()
    return gaussian.variance.double().sqrt().diag()


def _move(gaussian: Dense | Diagonal, target: _Regression, fraction: float) -> Dense | Diagonal:
    """A Gaussian between `gaussian` (at fraction 0) and the better one that the regression gives
    (at fraction 1): a step towards the largest bound.
    """
    factor, identity = _factor(gaussian), torch.eye(len(target.constant)).to(target.constant)
    step = factor @ torch.linalg.solve(target.precision, target.constant)
    mean = gaussian.mean + fraction * step.to(gaussian.mean)
    precision = (1 - fraction) * identity + fraction * target.precision
    if isinstance(gaussian, Dense):
        covariance = factor @ torch.linalg.inv(precision) @ factor.mT
        return Dense(mean, torch.linalg.cholesky(covariance).to(mean))
    return Diagonal(mean, (factor.diagonal() * precision.diagonal().rsqrt()).to(mean))


def _offset(gaussian: Dense | Diagonal, target: _Regression) -> Offset:
    factor, sds = _factor(gaussian), gaussian.variance.double().sqrt()
    step = factor @ torch.linalg.solve(target.precision, target.constant)
    if isinstance(gaussian, Dense):
        best = (factor @ torch.linalg.inv(target.precision) @ factor.mT).diagonal().sqrt()
    else:
        best = factor.diagonal() * target.precision.diagonal().rsqrt()
    mean, sd = float((step / best).abs().max()), float((sds / best - 1).abs().max())
    return Offset(mean, sd, target.error)
