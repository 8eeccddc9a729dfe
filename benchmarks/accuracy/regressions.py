"""Normal linear regressions, whose moments are known without Monte Carlo error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from entry import Posterior, Tensors
from exact import Moments, regression
from pyro.distributions import constraints
from torch import Tensor


def flat_scale() -> Any:
    """An improper prior on a scale: flat in it, not in its logarithm."""
    return dist.ImproperUniform(constraints.positive, (), ())


def half_cauchy(scale: float) -> Callable[[], Any]:
    """A prior on the residuals' scale."""
    return lambda: dist.HalfCauchy(torch.tensor(scale))


def half_normal(scale: float) -> Callable[[], Any]:
    """Another."""
    return lambda: dist.HalfNormal(torch.tensor(scale))


def linear(
    name: str,
    about: str,
    read: Callable[[dict[str, Any]], Tensors],
    batch_size: int | None,
    sigma_prior: Callable[[], Any] = flat_scale,
    beta_sd: float | None = None,
) -> Posterior:
    """y ~ Normal(x @ beta, sigma); beta's prior is Normal(0, beta_sd), or flat."""

    def model(x: Tensor, y: Tensor) -> None:
        size = x.shape[-1]
        if beta_sd is None:
            prior = dist.ImproperUniform(constraints.real, (), (size,))
        else:
            prior = dist.Normal(torch.zeros(size), beta_sd).to_event(1)
        beta = pyro.sample("beta", prior)
        sigma = pyro.sample("sigma", sigma_prior())
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    def exact(data: Tensors) -> Moments:
        x, y = data
        size = x.shape[-1]
        precision = torch.eye(size) * (0.0 if beta_sd is None else beta_sd**-2)
        return regression(x, y, sigma_prior().log_prob, torch.zeros(size), precision)

    return Posterior(name, about, model, read, batch_size, start=least_squares, exact=exact)


def least_squares(data: Tensors) -> dict[str, Tensor]:
    """Where chains start: with the error of random starts only the way from there is measured.

    In raw units that is thousands of steps: kid_score's intercept is 77, a random start within 2,
    and sigma, while it fits badly, 80, which makes the slope to climb 1 / 80^2.
    """
    x, y = data
    beta = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    return {"beta": beta, "sigma": (y - x @ beta).std()}


def design(*columns: Tensor) -> Tensor:
    """With a leading column of ones."""
    return torch.stack([torch.ones_like(columns[0]), *columns], -1)


def standard(x: Tensor, sds: float = 1.0) -> Tensor:
    """Mean 0; 1 is `sds` standard deviations."""
    return (x - x.mean()) / (sds * x.std())


# ---------------------------------------------------------------- designs


def kidscore_momhs(d: dict[str, Any]) -> Tensors:
    """A child's test score by whether the mother finished high school."""
    return design(d["mom_hs"]), d["kid_score"]


def kidscore_momiq(d: dict[str, Any]) -> Tensors:
    """... by the mother's IQ, as it is."""
    return design(d["mom_iq"]), d["kid_score"]


def kidscore_momiq_scaled(d: dict[str, Any]) -> Tensors:
    """The same; IQ is standardized, and 1 is 20 points of the score."""
    return design(standard(d["mom_iq"])), d["kid_score"] / 20


def kidscore_interaction_z(d: dict[str, Any]) -> Tensors:
    """... by both, centered and in units of two standard deviations."""
    hs, iq = standard(d["mom_hs"], 2), standard(d["mom_iq"], 2)
    return design(hs, iq, hs * iq), d["kid_score"]


def earn_height(d: dict[str, Any]) -> Tensors:
    """Earnings by height, both standardized: 1 is 3.8 inches and 20,000 dollars."""
    return design(standard(d["height"])), standard(d["earn"])


def logearn_interaction_z(d: dict[str, Any]) -> Tensors:
    """Log earnings by standardized height, sex and their product."""
    height = standard(d["height"])
    return design(height, d["male"], height * d["male"]), d["earn"].log()


def logmesquite_logvolume(d: dict[str, Any]) -> Tensors:
    """A bush's weight by the volume of its canopy."""
    volume = d["diam1"] * d["diam2"] * d["canopy_height"]
    return design(volume.log()), d["weight"].log()


def nes(d: dict[str, Any]) -> Tensors:
    """Party identification by ideology, race, age (in four bands), education, sex, income."""
    ages = [(d["age_discrete"] == band).double() for band in (2, 3, 4)]
    x = design(d["real_ideo"], d["race_adj"], *ages, d["educ1"], d["gender"], d["income"])
    return x, d["partyid7"]


def simulated(d: dict[str, Any]) -> Tensors:
    """Five columns of standard deviation 100, without an intercept."""
    return d["X"], d["y"]


def simulated_scaled(d: dict[str, Any]) -> Tensors:
    """The same, of standard deviation 1: beta is 100 times what is published."""
    return d["X"] / 100, d["y"]


def autoregression(d: dict[str, Any]) -> Tensors:
    """A row is a value and those before it; beta[0] is the published alpha."""
    y, lags = d["y"], d["K"]
    return design(*(y[lags - k : len(y) - k] for k in range(1, lags + 1))), y[lags:]


# ---------------------------------------------------------------- kilpisjarvi

#: The published priors: Normal (mean, sd) of the intercept at year 0 and of the slope a year.
ALPHA, BETA = (9.31290322580645, 100.0), (0.0, 0.0333333333333333)
MIDDLE = 3982.5  # the mean of the years as they are numbered


def kilpisjarvi_model(x: Tensor, y: Tensor) -> None:
    """A line, by its height in the middle year; `alpha` is that at year 0, as published."""
    beta = pyro.sample("beta", dist.Normal(*BETA))
    level = pyro.sample("level", dist.Normal(ALPHA[0] + MIDDLE * beta, ALPHA[1]))
    sigma = pyro.sample("sigma", flat_scale())
    pyro.deterministic("alpha", level - MIDDLE * beta)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(level + beta * (x - MIDDLE), sigma), obs=y)


def kilpisjarvi_exact(data: Tensors) -> Moments:
    """In the published parameters."""
    x, y = data
    mean = torch.tensor([ALPHA[0], BETA[0]])
    precision = torch.diag(torch.tensor([ALPHA[1], BETA[1]]) ** -2)
    found = regression(design(x), y, torch.zeros_like, mean, precision)
    (alpha, beta), (alpha_sd, beta_sd) = found["beta"]
    return {"alpha": (alpha, alpha_sd), "beta": (beta, beta_sd), "sigma": found["sigma"]}


def kilpisjarvi_start(data: Tensors) -> dict[str, Tensor]:
    """No trend."""
    y = data[1]
    return {"level": y.mean(), "beta": torch.zeros(()), "sigma": y.std()}


KILPISJARVI = Posterior(
    "kilpisjarvi_mod-kilpisjarvi-scaled",
    "summer temperatures over 62 years; years centered, since at 4000 intercept and slope are one",
    kilpisjarvi_model,
    lambda d: (d["x"], d["y"]),
    sites=("alpha", "beta", "sigma"),
    start=kilpisjarvi_start,
    exact=kilpisjarvi_exact,
)
