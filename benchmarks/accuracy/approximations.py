"""How often `report()` is wrong about approximations of posteriors that are known exactly.

Prints a row of the table in `docs/accuracy.md` for each posterior and method.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import pyro_scale as ps

#: Draws of a fit from which its mean and sd are computed: they know sds to 0.2%.
DRAWS = 200_000


class Case(NamedTuple):
    """A data set, with the posterior's mean and sd by site."""

    model: Callable[..., Any]
    data: tuple[Tensor, ...]
    exact: dict[str, tuple[Tensor, Tensor]]


def counts(num_rows: int, size: int) -> Case:
    """Rates of counts, whose posteriors are gamma distributions."""
    rates = torch.distributions.Gamma(2.0, 1.0).sample((size,))
    y = torch.poisson(rates.expand(num_rows, size))

    def model(y: Tensor) -> None:
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0).expand([size]).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)

    shape, rate = 2 + y.sum(0), 1.0 + num_rows
    return Case(model, (y,), {"rate": (shape / rate, shape.sqrt() / rate)})


def regression(size: int, common: float) -> Case:
    """A linear regression whose columns share a part of this size."""
    x = torch.randn(50, size) + common * torch.randn(50, 1)
    y = x @ torch.randn(size) + torch.randn(50)

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(size), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    covariance = torch.linalg.inv(x.T @ x + torch.eye(size))
    return Case(model, (x, y), {"w": (covariance @ (x.T @ y), covariance.diagonal().sqrt())})


def logistic(num_rows: int) -> Case:
    """A logistic regression of two weights, by quadrature."""
    x = torch.randn(num_rows, 2)
    y = torch.bernoulli(torch.sigmoid(x @ torch.tensor([1.0, -0.5])))

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 3.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    def log_joint(w: Tensor) -> Tensor:
        signs = 2 * y - 1
        log_lik = sum(
            torch.nn.functional.logsigmoid(s * (w @ r)) for s, r in zip(signs, x, strict=True)
        )
        return log_lik - w.square().sum(1) / 18

    mean, sd = by_quadrature(log_joint, torch.zeros(2), torch.full((2,), 15.0), 301)
    return Case(model, (x, y), {"w": by_quadrature(log_joint, mean, 9 * sd, 301)})


def funnel(num_rows: int) -> Case:
    """A scale and a site of that scale, by quadrature."""
    y = torch.randn(()) * torch.randn(()).div(2).exp() + torch.randn(num_rows)

    def model(y: Tensor) -> None:
        v = pyro.sample("v", dist.Normal(0.0, 1.5))
        w = pyro.sample("w", dist.Normal(0.0, (v / 2).exp()))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    def log_joint(x: Tensor) -> Tensor:
        v, w = x.T
        prior = -v.square() / 4.5 - w.square() / v.exp() / 2 - v / 2
        return prior - num_rows * (w - y.mean()) ** 2 / 2

    mean, sd = by_quadrature(log_joint, torch.zeros(2), torch.tensor([10.0, 12.0]), 1501)
    return Case(model, (y,), {"v": (mean[:1], sd[:1]), "w": (mean[1:], sd[1:])})


def by_quadrature(
    log_joint: Callable[[Tensor], Tensor], center: Tensor, reach: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The mean and sd of a density, from a grid of `count` points an axis."""
    axes = [
        torch.linspace(float(c - r), float(c + r), count)
        for c, r in zip(center, reach, strict=True)
    ]
    x = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
    p = log_joint(x).softmax(0)[:, None]
    mean = (p * x).sum(0)
    return mean, (p * (x - mean) ** 2).sum(0).sqrt()


def laplace(model: Callable[..., Any], data: Any, seed: int, structure: str) -> Any:
    """Laplace's approximation."""
    return ps.Laplace(model, structure=structure).run(data, seed=seed, progress=False)


def vi(model: Callable[..., Any], data: Any, seed: int, structure: str) -> Any:
    """Variational inference."""
    method = ps.VI(model, structure=structure, compile=False)
    return method.run(data, num_steps=300, seed=seed, progress=False)


def times_over(fit: Any, case: Case) -> float:
    """How many times over its tolerance the largest bias of a fit is."""
    source = torch.Generator().manual_seed(0)
    drawn = fit.fit.draws(fit.fit.noise(DRAWS, source)).samples
    worst = 0.0
    for name, (mean, sd) in case.exact.items():
        draws = drawn[name].reshape(DRAWS, -1)
        of_mean, of_sd = (draws.mean(0) - mean) / sd / 0.1, (draws.std(0) / sd).log() / 0.05
        worst = max(worst, float(torch.stack([of_mean, of_sd]).abs().max()))
    return worst


CASES: dict[str, tuple[Callable[[], Case], str]] = {
    **{
        f"{size} rate(s), {n} rows": (lambda n=n, size=size: counts(n, size), "dense")
        for n in (10, 30, 100)
        for size in (1, 5)
    },
    "regression on 5 columns": (lambda: regression(5, 1.0), "dense"),
    **{
        f"regression on {size} columns, common part {part}, diagonal": (
            lambda size=size, part=part: regression(size, part),
            "diag",
        )
        for size in (2, 5)
        for part in (0.0, 0.5, 1.0)
    },
    "logistic regression, 50 rows": (lambda: logistic(50), "dense"),
    "logistic regression, 200 rows": (lambda: logistic(200), "dense"),
    "funnel, 5 rows": (lambda: funnel(5), "dense"),
}

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    fit_by, count = {"Laplace": laplace, "VI": vi}[sys.argv[1]], int(sys.argv[2])
    print("| posterior | within tolerance | yes | not known | no | wrong yes | wrong no |")
    print("|---|---|---|---|---|---|---|")
    for name, (draw, structure) in CASES.items():
        told: Counter[tuple[str, bool]] = Counter()
        for seed in range(count):
            torch.manual_seed(seed)
            case = draw()
            fit = fit_by(case.model, case.data, seed, structure)
            told[fit.report().verdict, times_over(fit, case) < 1] += 1
        within = sum(n for (_, is_within), n in told.items() if is_within)
        words = [
            sum(told[word, each] for each in (True, False)) for word in ("yes", "unknown", "no")
        ]
        row = [within, *words, told["yes", False], told["no", True]]
        print(f"| {name} | {' | '.join(map(str, row))} |", flush=True)
