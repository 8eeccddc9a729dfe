"""Time series: autoregressions, trend and seasonality, states that walk, media mix."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch
from entry import Tensors
from others import discounted
from torch import Tensor

from jobs.job import job


def autoregression(y: Tensor) -> None:
    """Order 2, with noise of heavy tails."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    phi = pyro.sample("phi", dist.Normal(torch.zeros(2), 0.5).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    mean = a + phi[0] * y[1:-1] + phi[1] * y[:-2]
    pyro.sample("y", dist.StudentT(nu, mean, sigma).to_event(1), obs=y[2:])


def autoregression_data() -> Tensors:
    """200 values."""
    values, noise = [0.0, 0.0], torch.distributions.StudentT(5.0).sample((300,))
    for each in noise.tolist():
        values.append(0.3 + 0.6 * values[-1] - 0.2 * values[-2] + 0.5 * each)
    return (torch.tensor(values[-200:]),)


def forecast(t: Tensor, y: Tensor) -> None:
    """A trend with ten changepoints, and yearly seasonality in Fourier terms."""
    k, m = pyro.sample("k", dist.Normal(0.0, 5.0)), pyro.sample("m", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    delta = pyro.sample("delta", dist.Laplace(torch.zeros(10), tau).to_event(1))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(6), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
    bends = torch.relu(t[:, None] - torch.linspace(0.05, 0.8, 10, dtype=t.dtype))
    angle = 2 * math.pi * 3 * t[:, None] * torch.arange(1, 4, dtype=t.dtype)
    waves = torch.cat([angle.sin(), angle.cos()], -1)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(m + k * t + bends @ delta + waves @ beta, sigma), obs=y)


def forecast_data() -> Tensors:
    """Three years of weeks."""
    t = torch.arange(156) / 156
    trend = t - 2 * torch.relu(t - 0.4) + 3 * torch.relu(t - 0.7)
    return t, trend + 0.3 * torch.sin(6 * math.pi * t + 0.5) + 0.15 * torch.randn(156)


def local_level(y: Tensor) -> None:
    """A level that walks, measured with noise."""
    start = pyro.sample("start", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    z = pyro.sample("z", dist.Normal(torch.zeros(len(y) - 1), 1.0).to_event(1))
    level = torch.cat([start[None], start + (tau * z).cumsum(0)])
    level = pyro.deterministic("level", level)
    pyro.sample("y", dist.Normal(level, sigma).to_event(1), obs=y)


def local_level_data() -> Tensors:
    """100 years."""
    return ((0.4 * torch.randn(100)).cumsum(0) + 1 + 0.8 * torch.randn(100),)


def volatility(y: Tensor) -> None:
    """Returns whose log variance is an autoregression."""
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    phi = pyro.sample("phi", dist.Beta(20.0, 1.5))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    z = pyro.sample("z", dist.Normal(torch.zeros(len(y)), 1.0).to_event(1))
    first = z[:1] / (1 - phi.square()).sqrt()
    h = pyro.deterministic("h", mu + tau * discounted(torch.cat([first, z[1:]]), phi))
    pyro.sample("y", dist.Normal(0.0, torch.exp(h / 2)).to_event(1), obs=y)


def volatility_data() -> Tensors:
    """200 days."""
    h, values = 0.0, []
    for z in torch.randn(200).tolist():
        h = 0.95 * h + 0.3 * z
        values.append(h)
    return (torch.exp(torch.tensor(values) / 2 - 0.5) * torch.randn(200),)


def epidemic(y: Tensor) -> None:
    """Cases of nine weeks, overdispersed; the growth rate walks from week to week."""
    first = pyro.sample("first", dist.Normal(2.0, 1.0))
    growth = pyro.sample("growth", dist.Normal(0.0, 0.2))
    tau = pyro.sample("tau", dist.HalfNormal(0.1))
    phi = pyro.sample("phi", dist.HalfNormal(0.5))
    z = pyro.sample("z", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    rates = torch.cat([growth[None], growth + (tau * z).cumsum(0)])
    rates = pyro.deterministic("rates", rates)
    log_cases = first + rates.repeat_interleave(7).cumsum(0)
    total = 1 / phi.square()
    counts = dist.NegativeBinomial(total, logits=log_cases - total.log())
    pyro.sample("y", counts.to_event(1), obs=y)


def epidemic_data() -> Tensors:
    """A wave."""
    day = torch.arange(63.0)
    rate = torch.exp(2 + 3 * torch.exp(-(((day - 32) / 14) ** 2)))
    return (torch.poisson(rate * torch.distributions.Gamma(20.0, 20.0).sample((63,))),)


def media_mix(spend: Tensor, y: Tensor) -> None:
    """Sales by spend on three channels, which lasts for weeks and saturates."""
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    trend = pyro.sample("trend", dist.Normal(0.0, 1.0))
    season = pyro.sample("season", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    beta = pyro.sample("beta", dist.HalfNormal(torch.ones(3)).to_event(1))
    decay = pyro.sample("decay", dist.Beta(torch.full((3,), 3.0), 3.0).to_event(1))
    half = pyro.sample("half", dist.Gamma(torch.full((3,), 3.0), 3.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    stock = discounted(spend.T, decay[:, None]).T * (1 - decay)
    time = torch.arange(len(y), dtype=spend.dtype)
    mean = a + trend * time / len(y) + (stock / (stock + half)) @ beta
    mean = (
        mean
        + season[0] * torch.sin(time * math.pi / 26)
        + season[1] * torch.cos(time * math.pi / 26)
    )
    pyro.sample("y", dist.Normal(mean, sigma).to_event(1), obs=y)


def media_mix_data() -> Tensors:
    """Two years of weeks."""
    spend = torch.distributions.Gamma(0.7, 0.7).sample((104, 3))
    stock = torch.zeros(3)
    effects = []
    for week in spend:
        stock = week + torch.tensor([0.7, 0.4, 0.5]) * stock
        kept = stock * torch.tensor([0.3, 0.6, 0.5])
        effects.append(float((kept / (kept + 1)) @ torch.tensor([1.5, 1.0, 0.3])))
    time = torch.arange(104.0)
    season = 0.3 * torch.sin(time * math.pi / 26)
    return spend, 2 + 0.5 * time / 104 + season + torch.tensor(effects) + 0.2 * torch.randn(104)


def vector(y: Tensor) -> None:
    """Three series that lead one another, with correlated shocks."""
    a = pyro.sample("a", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    phi = pyro.sample("phi", dist.Normal(torch.zeros(3, 3), 0.5).to_event(2))
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(3)).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(3, 2.0))
    mean = a + y[:-1] @ phi.T
    shocks = dist.MultivariateNormal(mean, scale_tril=scale[:, None] * corr)
    pyro.sample("y", shocks.to_event(1), obs=y[1:])


def vector_data() -> Tensors:
    """120 quarters."""
    phi = torch.tensor([[0.5, 0.2, 0.0], [0.0, 0.4, 0.1], [0.1, 0.0, 0.6]])
    mix = torch.tensor([[0.5, 0.0, 0.0], [0.3, 0.4, 0.0], [0.0, -0.2, 0.3]])
    values = [torch.zeros(3)]
    for z in torch.randn(120, 3):
        values.append(0.1 + phi @ values[-1] + mix @ z)
    return (torch.stack(values[1:]),)


SERIES = (
    job(
        "autoregression",
        "heavy tails",
        autoregression,
        autoregression_data,
        ("a", "phi", "sigma", "nu"),
    ),
    job(
        "forecast",
        "trend with changepoints, seasonality",
        forecast,
        forecast_data,
        ("k", "m", "tau", "delta", "beta", "sigma"),
        True,
    ),
    job(
        "local_level",
        "100 years",
        local_level,
        local_level_data,
        ("start", "tau", "sigma", "level"),
    ),
    job("volatility", "200 days", volatility, volatility_data, ("mu", "phi", "tau", "h")),
    job(
        "epidemic",
        "nine weeks",
        epidemic,
        epidemic_data,
        ("first", "growth", "tau", "phi", "rates"),
    ),
    job(
        "media_mix",
        "three channels",
        media_mix,
        media_mix_data,
        ("a", "trend", "season", "beta", "decay", "half", "sigma"),
    ),
    job("vector", "three series, LKJ", vector, vector_data, ("a", "phi", "scale", "corr")),
)
