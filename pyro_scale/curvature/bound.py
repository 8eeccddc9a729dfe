"""The optimum of the evidence lower bound near a Gaussian, by linear regression (Salimans and
Knowles, Fixed-form variational posterior approximation through stochastic linear regression, 2013).

Where q = N(m, L L') is best, L' grad log p + eps is 0 on average, and does not go along with the
draw's eps.  Regressed on eps it gives the mean and the precision that the bound wants instead, of a
Gaussian posterior exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal
from pyro_scale.curvature.density import FullDataDensity

#: Improvements at most, and the change of means in sds and of log sds that ends them.
_MOST_STEPS, _SMALL = 8, 1e-3
#: Parts of an improvement that are tried, one after another.
_PARTS = 1.0, 0.5, 0.25, 0.1
#: By how many sds a mean, and by what part an sd, may be off at the optimum; and standard errors
#: that no element's estimate goes beyond by chance, but for one fit in a thousand.
MOST_MEAN, MOST_SD, _ERRORS = 0.1, 0.03, 4.5


class Offset(NamedTuple):
    """How far a Gaussian is from the bound's optimum, by its worst elements.

    Attributes:
        mean: of a mean, in sds; infinite where that is not known.
        sd: of an sd, as a part of it.
        error: the standard error of both.
    """

    mean: float
    sd: float
    error: float

    @property
    def is_small(self) -> bool:
        """Whether it is no more than may be, but for chance."""
        chance = _ERRORS * self.error
        return self.mean <= MOST_MEAN + chance and self.sd <= MOST_SD + chance


class _Look(NamedTuple):
    """A Gaussian's bound in units of the temperature, but for a constant; the regression's constant
    [d] and P [d, d], the precision in units of the factor; and its standard error."""

    bound: float
    along: Tensor
    precision: Tensor
    error: float


class Bound(NamedTuple):
    """The bound of Gaussians over some elements of a position.

    Attributes:
        density: the log joint of all rows.
        center: a position, [D], for the other elements.
        places: of the d elements.
        temperature: of the posterior.
    """

    density: FullDataDensity
    center: Tensor
    places: Tensor
    temperature: float

    def improved(self, gaussian: Dense | Diagonal, eps: Tensor) -> Dense | Diagonal:
        """The Gaussian of the same structure that is best by some draws, or as it is.

        Args:
            gaussian: where to begin.
            eps: standard normals, `[draws, d]`.
        """
        here = self._look(gaussian, eps)
        for _ in range(_MOST_STEPS):
            if here is None or not _is_positive(here.precision):
                break
            for part in _PARTS:
                other = _moved(gaussian, here, part)
                there = self._look(other, eps)
                if there is not None and there.bound > here.bound:
                    break
            else:
                break
            change = _offset(gaussian, here)
            gaussian, here = other, there
            if max(change.mean, change.sd) < _SMALL:
                break
        return gaussian

    def offset(self, gaussian: Dense | Diagonal, eps: Tensor) -> Offset:
        """How far a Gaussian is from the best one; arguments as for `improved`."""
        look = self._look(gaussian, eps)
        if look is None or not _is_positive(look.precision):
            return Offset(torch.inf, torch.inf, 0.0)
        return _offset(gaussian, look)

    def _look(self, gaussian: Dense | Diagonal, eps: Tensor) -> _Look | None:
        """The bound and its slope at draws; None where the log joint is not finite."""
        factor = _factor(gaussian)
        draws = self.center.double().repeat(len(eps), 1)
        draws[:, self.places] = gaussian.mean.double() + eps @ factor.mT
        values, slopes = self.density.grads(draws.to(self.center))
        if not bool(torch.isfinite(values).all() and torch.isfinite(slopes).all()):
            return None
        nats = self.density.log_posterior.num_data / self.temperature
        scores = nats * slopes[:, self.places].double() @ factor + eps
        terms = torch.cat([torch.ones_like(eps[:, :1]), eps], 1)
        # not lstsq, whose last digit depends on where its workspace lies
        found = torch.linalg.solve(terms.mT @ terms, terms.mT @ scores)
        left = (scores - terms @ found).square().sum(0) / (len(eps) - terms.shape[1])
        precision = torch.eye(len(factor)).to(found) - found[1:]
        bound = nats * float(values.double().mean()) + float(factor.diagonal().log().sum())
        error = float(left.max().sqrt()) / len(eps) ** 0.5
        return _Look(bound, found[0], (precision + precision.mT) / 2, error)


def _factor(gaussian: Dense | Diagonal) -> Tensor:
    """L, in float64."""
    if isinstance(gaussian, Dense):
        return gaussian.scale_tril.double()
    return gaussian.variance.double().sqrt().diag()


def _is_positive(precision: Tensor) -> bool:
    return not bool(torch.linalg.cholesky_ex(precision).info)


def _moved(gaussian: Dense | Diagonal, look: _Look, part: float) -> Dense | Diagonal:
    """A part of the way to what the regression says is best."""
    factor, identity = _factor(gaussian), torch.eye(len(look.along)).to(look.along)
    step = factor @ torch.linalg.solve(look.precision, look.along)
    mean = gaussian.mean + part * step.to(gaussian.mean)
    precision = (1 - part) * identity + part * look.precision
    if isinstance(gaussian, Dense):
        covariance = factor @ torch.linalg.inv(precision) @ factor.mT
        return Dense(mean, torch.linalg.cholesky(covariance).to(mean))
    return Diagonal(mean, (factor.diagonal() * precision.diagonal().rsqrt()).to(mean))


def _offset(gaussian: Dense | Diagonal, look: _Look) -> Offset:
    factor, sds = _factor(gaussian), gaussian.variance.double().sqrt()
    step = factor @ torch.linalg.solve(look.precision, look.along)
    if isinstance(gaussian, Dense):
        best = (factor @ torch.linalg.inv(look.precision) @ factor.mT).diagonal().sqrt()
    else:
        best = factor.diagonal() * look.precision.diagonal().rsqrt()
    return Offset(float((step / best).abs().max()), float((sds / best - 1).abs().max()), look.error)
