"""Posteriors that are no linear regressions: hierarchies, time series, a mixture, a process."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from regressions import flat_scale
from torch import Tensor


def discounted(values: Tensor, factor: Tensor) -> Tensor:
    """s[..., t] = values[..., t] + factor s[..., t - 1], in log2(T) vector operations, not T."""
    shift = 1
    while shift < values.shape[-1]:
        values = values + factor * torch.nn.functional.pad(values[..., :-shift], (shift, 0))
        factor, shift = factor * factor, 2 * shift
    return values


def chained(steps: Tensor) -> Tensor:
    """The product in order of matrices `[T, n, n]` of logarithms, in log2(T) operations."""
    while len(steps) > 1:
        pairs, rest = steps[: len(steps) // 2 * 2], steps[len(steps) // 2 * 2 :]
        products = torch.logsumexp(pairs[::2, :, :, None] + pairs[1::2, None, :, :], 2)
        steps = torch.cat([products, rest])
    return steps[0]


def eight_schools(y: Tensor, sigma: Tensor) -> None:
    """Effects of coaching in eight schools, non-centered."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(torch.tensor(5.0)))
    unit = pyro.sample("theta_trans", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    theta = pyro.deterministic("theta", mu + tau * unit)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def arma11(y: Tensor) -> None:
    """y[t] = mu + phi y[t-1] + theta err[t-1] + err[t]; before the first, y is mu and err 0."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    phi = pyro.sample("phi", dist.Normal(0.0, 2.0))
    theta = pyro.sample("theta", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(torch.tensor(2.5)))
    before = torch.cat([mu[None], y[:-1]])
    errors = discounted(y - mu - phi * before, -theta)
    pyro.sample("y", dist.Normal(y - errors, sigma).to_event(1), obs=y)


def stable(data: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """No autocorrelation; from a random start with |theta| > 1 errors grow like theta^200."""
    return {"phi": torch.zeros(()), "theta": torch.zeros(())}


def garch11(y: Tensor) -> None:
    """variance[t] = alpha0 + alpha1 (y[t-1] - mu)^2 + beta1 variance[t-1], the first is 0.25.

    Flat on alpha1 + beta1 < 1, which is alpha1 ~ Beta(1, 2) and beta1's share of the rest uniform.
    """
    mu = pyro.sample("mu", dist.ImproperUniform(constraints.real, (), ()))
    alpha0 = pyro.sample("alpha0", flat_scale())
    alpha1 = pyro.sample("alpha1", dist.Beta(torch.tensor(1.0), torch.tensor(2.0)))
    share = pyro.sample("share", dist.Uniform(0.0, 1.0))
    beta1 = pyro.deterministic("beta1", (1 - alpha1) * share)
    later = alpha0 + alpha1 * (y[:-1] - mu).square()
    variance = discounted(torch.cat([torch.full((1,), 0.25), later]), beta1)
    pyro.sample("y", dist.Normal(mu, variance.sqrt()).to_event(1), obs=y)


def low_dim_gauss_mix(y: Tensor) -> None:
    """Two normal components in order of their means."""
    mu = pyro.sample("mu", dist.ImproperUniform(constraints.ordered_vector, (), (2,)))
    pyro.sample("mu_prior", dist.Normal(torch.zeros(2), 2.0).to_event(1), obs=mu)
    sigma = pyro.sample("sigma", dist.HalfNormal(2 * torch.ones(2)).to_event(1))
    theta = pyro.sample("theta", dist.Beta(torch.tensor(5.0), torch.tensor(5.0)))
    weights = dist.Categorical(torch.stack([theta, 1 - theta]))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(mu, sigma)), obs=y)


def apart(data: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The mixture's means start at the quartiles: from one place they part too slowly."""
    return {"mu": data[0].quantile(torch.tensor([0.25, 0.75]))}


def calm(data: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """A rate of 1 everywhere, the prior's length; random starts have rates of exp(20)."""
    unit = torch.zeros_like(data[0])
    return {"rho": torch.tensor(6.0), "alpha": torch.tensor(1.0), "f_tilde": unit}


def gp_pois_regr(x: Tensor, k: Tensor) -> None:
    """Counts whose log rate is a Gaussian process with a squared exponential kernel."""
    rho = pyro.sample("rho", dist.Gamma(torch.tensor(25.0), torch.tensor(4.0)))
    alpha = pyro.sample("alpha", dist.HalfNormal(torch.tensor(2.0)))
    unit = pyro.sample("f_tilde", dist.Normal(torch.zeros(11), 1.0).to_event(1))
    distances = (x[:, None] - x).square()
    covariance = alpha.square() * torch.exp(-distances / (2 * rho.square()))
    factor, failed = torch.linalg.cholesky_ex(covariance + 1e-10 * torch.eye(11))
    factor = torch.where(failed == 0, factor, torch.nan)  # where Stan rejects
    f = pyro.deterministic("f", factor @ unit)
    with pyro.plate("data", len(x)):
        pyro.sample("k", dist.Poisson(f.exp()), obs=k)


def hmm_example(y: Tensor) -> None:
    """Two hidden states, normal observations of sd 1; the first state has no prior."""
    rows = [pyro.sample(f"theta{i}", dist.Dirichlet(torch.ones(2))) for i in (1, 2)]
    support = constraints.positive_ordered_vector
    mu = pyro.sample("mu", dist.ImproperUniform(support, (), (2,)))
    prior = dist.Normal(torch.tensor([3.0, 10.0]), 1.0).to_event(1)
    pyro.sample("mu_prior", prior, obs=mu)
    emission = dist.Normal(mu, 1.0).log_prob(y[:, None])
    steps = torch.stack(rows).log() + emission[1:, None, :]  # [time, from, to]
    paths = torch.logsumexp(emission[0, :, None] + chained(steps), (0, 1))
    pyro.factor("y", paths)


def at_prior_means(data: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The states' means; from random starts one state explains everything for long."""
    return {"mu": torch.tensor([3.0, 10.0])}
