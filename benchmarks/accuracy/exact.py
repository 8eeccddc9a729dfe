"""Moments of a normal linear regression's posterior by quadrature: no Monte Carlo error."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: (mean, standard deviation) of each element, site by site.
Moments = dict[str, tuple[Tensor, Tensor]]

#: Points of the grid in log sigma, and its half width in standard deviations of log sigma.
POINTS, WIDTH = 4001, 12.0


def regression(
    x: Tensor,
    y: Tensor,
    log_prior: Callable[[Tensor], Tensor],
    prior_mean: Tensor,
    prior_precision: Tensor,
) -> Moments:
    """Of `beta` and `sigma`, where y ~ Normal(x @ beta, sigma).

    Given sigma, beta is normal and can be integrated out; what is left is one dimension, done on
    a grid in log sigma.

    Args:
        x: the design, `[N, D]`.
        y: the responses, `[N]`.
        log_prior: of sigma, up to a constant.
        prior_mean: of beta, `[D]`.
        prior_precision: of beta, `[D, D]`; zero is a flat prior.
    """
    # Coordinates in which x'x is the identity, because raw units are badly conditioned.
    _, triangle = torch.linalg.qr(x)
    back = torch.linalg.inv(triangle)
    z = x @ back
    center = triangle @ prior_mean
    precision = back.T @ prior_precision @ back
    eigenvalues, axes = torch.linalg.eigh(precision)
    z, center = z @ axes, axes.T @ center  # now the prior is diagonal, and z'z still the identity
    projected = z.T @ y
    residual = (y - z @ projected).square().sum()

    guess = (residual / len(y)).sqrt().log()
    spread = WIDTH / (2 * len(y)) ** 0.5
    log_sigma = guess + torch.linspace(-spread, spread, POINTS)
    sigma2 = (2 * log_sigma).exp()[:, None]
    variance = 1 / (1 / sigma2 + eigenvalues)  # of beta in these coordinates, given sigma
    mean = variance * (projected / sigma2 + eigenvalues * center)
    # log p(y | sigma) at beta = mean, times what integrating beta out adds
    misfit = residual + (projected - mean).square().sum(-1)
    log_weight = (
        -len(y) * log_sigma
        - misfit / (2 * sigma2[:, 0])
        - (eigenvalues * (mean - center).square()).sum(-1) / 2
        + variance.log().sum(-1) / 2
        + log_prior(log_sigma.exp())
        + log_sigma  # the Jacobian of the grid
    )
    weight = torch.softmax(log_weight, 0)

    total = weight @ mean
    covariance = torch.diag(weight @ variance)
    covariance = covariance + (weight[:, None] * (mean - total)).T @ (mean - total)
    to_beta = back @ axes
    sigma = log_sigma.exp()
    sigma_mean = weight @ sigma
    return {
        "beta": (to_beta @ total, (to_beta @ covariance @ to_beta.T).diagonal().sqrt()),
        "sigma": (sigma_mean, (weight @ (sigma - sigma_mean).square()).sqrt()),
    }
