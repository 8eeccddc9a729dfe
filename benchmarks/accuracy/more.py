"""More of posteriordb's posteriors, for runs with nothing set: what the others leave out."""

from __future__ import annotations

from typing import Any

import others
import pyro
import pyro.distributions as dist
import torch
from entry import Posterior, Tensors
from jobs import JOBS
from posteriors import POSTERIORS
from pyro.distributions import constraints
from raw_units import RAW_UNITS
from torch import Tensor


def eight_schools_centered(y: Tensor, sigma: Tensor) -> None:
    """Effects of coaching in eight schools, centered: a funnel."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(torch.tensor(5.0)))
    with pyro.plate("data", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def gp_regr(x: Tensor, y: Tensor) -> None:
    """Noisy values of a Gaussian process with a squared exponential kernel; sigma is a variance."""
    rho = pyro.sample("rho", dist.Gamma(torch.tensor(25.0), torch.tensor(4.0)))
    alpha = pyro.sample("alpha", dist.HalfNormal(torch.tensor(2.0)))
    sigma = pyro.sample("sigma", dist.HalfNormal(torch.tensor(1.0)))
    distances = (x[:, None] - x).square()
    covariance = alpha.square() * torch.exp(-distances / (2 * rho.square()))
    factor, failed = torch.linalg.cholesky_ex(covariance + sigma * torch.eye(len(x)))
    factor = torch.where(failed == 0, factor, torch.nan)  # where Stan rejects
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), scale_tril=factor), obs=y)


def _states(support: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(Log transitions `[from, to]`, phi, lambda), each of two states in order."""
    concentration = torch.tensor([[4.0, 2.0], [2.0, 4.0]])
    rows = [
        pyro.sample(f"theta{i + 1}", dist.Dirichlet(row)) for i, row in enumerate(concentration)
    ]
    prior = dist.Normal(torch.tensor([0.0, 3.0]), 1.0).to_event(1)
    values = []
    for name in ("phi", "lambda"):
        values.append(pyro.sample(name, dist.ImproperUniform(support, (), (2,))))
        pyro.sample(f"{name}_prior", prior, obs=values[-1])
    return torch.stack(rows).log(), *values


def _paths(transitions: Tensor, emission: Tensor) -> None:
    """The likelihood of all paths together: in the first place, any state has weight 1."""
    steps = transitions + emission[1:, None, :]  # [time, from, to]
    pyro.factor("paths", torch.logsumexp(emission[0, :, None] + others.chained(steps), (0, 1)))


def hmm_drive_0(u: Tensor, v: Tensor) -> None:
    """A basketball player's inverse speed and distance to the hoop: exponential in each state."""
    transitions, phi, lambda_ = _states(constraints.positive_ordered_vector)
    emission = dist.Exponential(phi).log_prob(u[:, None])
    _paths(transitions, emission + dist.Exponential(lambda_).log_prob(v[:, None]))


def hmm_drive_1(u: Tensor, v: Tensor) -> None:
    """The same in logarithms: normal in each state, of sd 0.1."""
    transitions, phi, lambda_ = _states(constraints.ordered_vector)
    emission = dist.Normal(phi, 0.1).log_prob(u[:, None])
    _paths(transitions, emission + dist.Normal(lambda_, 0.1).log_prob(v[:, None]))


def at_means(data: Tensors) -> dict[str, Tensor]:
    """Where references start: states at the quartiles."""
    quartiles = torch.tensor([0.25, 0.75])
    return {"phi": data[0].quantile(quartiles), "lambda": data[1].quantile(quartiles)}


def at_rates(data: Tensors) -> dict[str, Tensor]:
    """The same, of rates."""
    return {name: 1 / value.flip(0) for name, value in at_means(data).items()}


_STATES = ("theta1", "theta2", "phi", "lambda")

MORE = (
    Posterior(
        "eight_schools-eight_schools_centered",
        "8 schools, 10 dimensions: a funnel, centered",
        eight_schools_centered,
        lambda d: (d["y"], d["sigma"]),
        sites=("theta", "mu", "tau"),
        same_as="eight_schools-eight_schools_noncentered",
    ),
    Posterior(
        "gp_pois_regr-gp_regr",
        "11 values of a Gaussian process, which is integrated out",
        gp_regr,
        lambda d: (d["x"], d["y"]),
        sites=("rho", "alpha", "sigma"),
    ),
    Posterior(
        "bball_drive_event_0-hmm_drive_0",
        "416 pairs of a hidden Markov chain, exponential in each state",
        hmm_drive_0,
        lambda d: (d["u"], d["v"]),
        sites=_STATES,
        start=at_rates,
    ),
    Posterior(
        "bball_drive_event_1-hmm_drive_1",
        "416 pairs of a hidden Markov chain, normal in each state",
        hmm_drive_1,
        lambda d: (d["u"], d["v"]),
        sites=_STATES,
        start=at_means,
    ),
)

#: All that runs with nothing set are measured on.
EVERYTHING = (*POSTERIORS, *RAW_UNITS, *MORE, *JOBS)
