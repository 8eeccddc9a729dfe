"""The models, written once for Pyro and NumPyro, and their data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Problem:
    """A model with its data.

    Attributes:
        model: of a library (`sample`, `plate`, `dist`, and `math`: torch or jax.numpy) and the
            data.
        data: arrays by name.
        num_data: rows.
        draws: warm-up's, and as many kept, of each of the chains.
        chains: how many.
    """

    model: Callable[..., None]
    data: Mapping[str, Any]
    num_data: int
    draws: int = 1000
    chains: int = 4


def logistic(lib: Any, x: Any, y: Any) -> None:
    """Logistic regression."""
    w = lib.sample("w", lib.dist.Normal(lib.math.zeros(x.shape[-1]), 1.0).to_event(1))
    b = lib.sample("b", lib.dist.Normal(0.0, 2.0))
    with lib.plate("data", len(x)):
        lib.sample("y", lib.dist.Bernoulli(logits=x @ w + b), obs=y)


def logistic_by_column(lib: Any, columns: Any, y: Any) -> None:
    """The same, of a table that is given by column."""
    w = lib.sample("w", lib.dist.Normal(lib.math.zeros(columns.shape[0]), 1.0).to_event(1))
    b = lib.sample("b", lib.dist.Normal(0.0, 2.0))
    with lib.plate("data", len(y)):
        lib.sample("y", lib.dist.Bernoulli(logits=w @ columns + b), obs=y)


def schools(lib: Any, sigma: Any, y: Any) -> None:
    """Eight schools, non-centered."""
    mu = lib.sample("mu", lib.dist.Normal(0.0, 5.0))
    tau = lib.sample("tau", lib.dist.HalfCauchy(5.0))
    with lib.plate("data", len(y)):
        t = lib.sample("t", lib.dist.Normal(0.0, 1.0))
        lib.sample("y", lib.dist.Normal(mu + tau * t, sigma), obs=y)


def radon(lib: Any, county: Any, floor: Any, y: Any) -> None:
    """Intercepts and slopes of 85 groups, non-centered."""
    mean_a = lib.sample("mean_a", lib.dist.Normal(0.0, 2.0))
    sd_a = lib.sample("sd_a", lib.dist.HalfNormal(1.0))
    mean_b = lib.sample("mean_b", lib.dist.Normal(0.0, 2.0))
    sd_b = lib.sample("sd_b", lib.dist.HalfNormal(1.0))
    sd = lib.sample("sd", lib.dist.HalfNormal(1.0))
    a = lib.sample("a", lib.dist.Normal(lib.math.zeros(85), 1.0).to_event(1))
    b = lib.sample("b", lib.dist.Normal(lib.math.zeros(85), 1.0).to_event(1))
    with lib.plate("data", len(y)):
        mean = mean_a + sd_a * a[county] + (mean_b + sd_b * b[county]) * floor
        lib.sample("y", lib.dist.Normal(mean, sd), obs=y)


def gaussian_process(lib: Any, x: Any, y: Any) -> None:
    """Regression with a squared exponential kernel."""
    scale = lib.sample("scale", lib.dist.LogNormal(0.0, 1.0))
    sd = lib.sample("sd", lib.dist.HalfNormal(2.0))
    noise = lib.sample("noise", lib.dist.HalfNormal(1.0))
    squares = ((x[:, None] - x[None]) / scale) ** 2
    covariance = sd**2 * lib.math.exp(-squares / 2)
    covariance = covariance + (noise**2 + 1e-6) * lib.math.eye(len(x))
    joint = lib.dist.MultivariateNormal(lib.math.zeros(len(x)), covariance_matrix=covariance)
    lib.sample("y", joint, obs=y)


def saasbo(lib: Any, x: Any, y: Any) -> None:
    """A Gaussian process of many dimensions, of which few matter (Eriksson and Jankowiak, 2021):
    inverse squared lengthscales under half-Cauchy distributions, Matern 5/2."""
    variance = lib.sample("variance", lib.dist.Gamma(2.0, 0.15))
    noise = lib.sample("noise", lib.dist.Gamma(0.9, 10.0))
    tau = lib.sample("tau", lib.dist.HalfCauchy(0.1))
    ones = lib.math.ones(x.shape[-1])
    inverse = lib.sample("inverse", lib.dist.HalfCauchy(ones).to_event(1))
    scaled = x * lib.math.sqrt(tau * inverse)
    squares = ((scaled[:, None] - scaled[None]) ** 2).sum(-1)
    r = lib.math.sqrt(5.0 * squares + 1e-12)
    covariance = variance * (1.0 + r + r**2 / 3.0) * lib.math.exp(-r)
    covariance = covariance + (noise + 1e-6) * lib.math.eye(len(x))
    joint = lib.dist.MultivariateNormal(lib.math.zeros(len(x)), covariance_matrix=covariance)
    lib.sample("y", joint, obs=y)


def problems() -> dict[str, Callable[[], Problem]]:
    """By name."""
    return {
        "logistic 768 x 8": lambda: Problem(logistic, _table(768, 8), 768),
        "eight schools": lambda: Problem(schools, _SCHOOLS, 8),
        "radon": lambda: Problem(radon, _radon(), 919),
        "logistic 100,000 x 20": lambda: Problem(
            logistic, _table(100_000, 20), 100_000, draws=300, chains=1
        ),
        "GP, 200 points": lambda: Problem(gaussian_process, _curve(200), 200, draws=500, chains=2),
        "SAASBO, 50 x 30": lambda: Problem(saasbo, _sparse(50, 30), 50, draws=200, chains=2),
    }


_SCHOOLS = {
    "sigma": np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]),
    "y": np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]),
}


def _table(rows: int, columns: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(rows, columns)), rng.normal(size=columns) / 2
    chance = 1 / (1 + np.exp(-(x @ w - 0.5)))
    return {"x": x, "y": (rng.uniform(size=rows) < chance).astype(float)}


def _radon() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    groups, rows = 85, 919
    sizes = rng.dirichlet(np.full(groups, 0.6))
    county = np.concatenate([np.arange(groups), rng.choice(groups, rows - groups, p=sizes)])
    floor = (rng.uniform(size=rows) < 0.17).astype(float)
    a, b = 1.5 + 0.35 * rng.normal(size=groups), -0.7 + 0.3 * rng.normal(size=groups)
    y = a[county] + b[county] * floor + 0.75 * rng.normal(size=rows)
    return {"county": county.astype(np.int64), "floor": floor, "y": y}


def _curve(points: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = np.linspace(0, 10, points)
    return {"x": x, "y": np.sin(x) + 0.2 * rng.normal(size=points)}


def _sparse(points: int, columns: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(points, columns))
    y = np.sin(6 * x[:, 0]) + 2 * (x[:, 1] - 0.5) ** 2 + 0.1 * rng.normal(size=points)
    return {"x": x, "y": (y - y.mean()) / y.std()}


def least_ess(draws: Mapping[str, Any]) -> float:
    """The least bulk effective sample size of draws `[chains, draws, ...]` by site."""
    import arviz

    return min(
        float(arviz.ess(column))
        for values in draws.values()
        for column in np.moveaxis(values.reshape(*values.shape[:2], -1), -1, 0)
    )
