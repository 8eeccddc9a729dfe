"""Linear regressions with known noise, whose posteriors are known exactly."""

import pyro
import pyro.distributions as dist
import torch
from models import normal, of_rows
from reference import double, normals

D, SD = 3, 0.5
PRIOR_MEAN = double(0.4, -0.3, 0.8)


def linear_data(count):
    """Rows whose columns are correlated and of different size, and what is observed of them."""
    x = normals(count, D, seed=1) @ double([1.0, 0.6, 0.0], [0.0, 0.8, 0.5], [0.0, 0.0, 1.2])
    return x, x @ double(0.7, -1.2, 0.3) + SD * normals(count, seed=2)


def rows(x):
    return pyro.plate("data", len(x))


def regression(variance=1.0):
    """w ~ N(PRIOR_MEAN, variance I), y ~ N(x w, SD^2)."""
    prior = dist.Normal(PRIOR_MEAN, variance**0.5).to_event(1)
    return of_rows(lambda x, w: dist.Normal(x @ w, SD), w=lambda: prior)


def linear_posterior(variance, x, y, power=1.0):
    """The exact mean and precision of `regression`, for a power of its likelihood."""
    precision = torch.eye(D, dtype=x.dtype) / variance + power * x.T @ x / SD**2
    shift = PRIOR_MEAN / variance + power * x.T @ y / SD**2
    return torch.linalg.solve(precision, shift), precision


def standardized(count):
    """Observations for `location`: a row's gradient has variance 1."""
    y = normals(count)
    return (y - y.mean()) / y.std(correction=0)


#: The mean of a Gaussian: precision over N about 1.
location = of_rows(lambda mu: dist.Normal(mu, 1.0), mu=normal(sd=100.0))
