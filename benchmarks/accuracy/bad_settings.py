"""Settings and posteriors at which a run is easily wrong, each with its true moments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import pyro_scale as ps

#: (mean, sd) by element, as `judge` takes them.
Truth = dict[str, dict[str, float]]
SIZE = 5


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        name: what is wrong with it.
        model: of the posterior.
        truth: the data -> moments.
        method: the sampler's class.
        data: seed -> the model's tensors; None where it takes none.
        sites: that are compared.
        settings: (data, seed) -> the constructor's arguments.
        how: arguments of `run`.
    """

    name: str
    model: Callable[..., Any]
    truth: Callable[[Any], Truth]
    sites: tuple[str, ...]
    method: type[Any] = ps.BAOA
    data: Callable[[int], Any] = lambda seed: None
    settings: Callable[[Any, int], dict[str, Any]] = lambda data, seed: {}
    how: dict[str, Any] = field(default_factory=dict)


def moments(site: str, mean: Tensor, sd: Tensor) -> Truth:
    """Of one site's elements."""
    if mean.ndim == 0:
        return {site: {"exact_mean": float(mean), "exact_sd": float(sd), "mean": 0, "sd": 0}}
    each = [moments(f"{site}[{i}]", m, s) for i, (m, s) in enumerate(zip(mean, sd, strict=True))]
    return {name: entry for part in each for name, entry in part.items()}


# ---------------------------------------------------------------- a Gaussian posterior


def line(x: Tensor, y: Tensor) -> None:
    """A regression whose noise has an sd of 1."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros(x.shape[-1]), 10.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)


def line_data(
    seed: int, size: int = SIZE, rows: int = 400, correlation: float = 0.7
) -> tuple[Tensor, Tensor]:
    """Correlated columns."""
    source = torch.Generator().manual_seed(seed)
    common, own = (torch.randn(rows, n, generator=source) for n in (1, size))
    x = correlation**0.5 * common + (1 - correlation) ** 0.5 * own
    beta = torch.randn(size, generator=source)
    return x, x @ beta + torch.randn(rows, generator=source)


def line_moments(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(Mean, covariance) of beta."""
    x, y = data
    covariance = torch.linalg.inv(x.mT @ x + torch.eye(x.shape[-1]) / 100)
    return covariance @ (x.mT @ y), covariance


def line_truth(data: tuple[Tensor, Tensor]) -> Truth:
    """Of each element."""
    mean, covariance = line_moments(data)
    return moments("beta", mean, covariance.diagonal().sqrt())


def far(data: tuple[Tensor, Tensor], seed: int) -> dict[str, Any]:
    """Chains start 100 sds off, all on one side."""
    mean, covariance = line_moments(data)
    source = torch.Generator().manual_seed(seed)
    noise = torch.randn(4, len(mean), generator=source)
    start = mean + 100 * covariance.diagonal().sqrt() * (1 + 0.01 * noise)
    return {"init_strategy": {"beta": start}}


def wrong_fit(data: tuple[Tensor, Tensor], seed: int) -> dict[str, Any]:
    """The geometry of other data: 30 sds off and ten times too narrow."""
    other = line_data(seed + 1000, rows=100 * len(data[0]))
    fit = ps.Laplace(line, structure="dense").run(other, progress=False, seed=seed)
    return {"precondition": fit}


BY_LINE = partial(Case, model=line, truth=line_truth, sites=("beta",), data=line_data)
NARROW = partial(line_data, correlation=0.9999)
HAND = {"warmup_steps": 200, "thinning": 1, "num_samples": 500}
CASES = [
    BY_LINE(
        "lr too large for batches of 10, by hand",
        settings=lambda d, s: {"lr": 0.3, "control_variates": False},
        how={"batch_size": 10},
    ),
    BY_LINE(
        "the same, all by hand",
        settings=lambda d, s: {"lr": 0.3, "control_variates": False},
        how={"batch_size": 10, **HAND},
    ),
    BY_LINE(
        "the same, whitened",
        settings=lambda d, s: {"lr": 0.5, "control_variates": False, "precondition": "dense"},
        how={"batch_size": 10},
    ),
    BY_LINE(
        "batches of 1 without control variates",
        settings=lambda d, s: {"control_variates": False},
        how={"batch_size": 1, "max_rows": 2_000_000},
    ),
    BY_LINE(
        "lr of 1e-4, every state kept",
        settings=lambda d, s: {"lr": 1e-4},
        how={"thinning": 1, "num_samples": 500},
    ),
    BY_LINE("50 draws, every state kept", how={"thinning": 1, "num_samples": 50}),
    BY_LINE("every state kept", how={"thinning": 1}),
    BY_LINE("10 draws", how={"num_samples": 10}),
    BY_LINE("one chain of 100 draws", how={"num_samples": 100, "num_chains": 1}),
    BY_LINE("no warm-up from 100 sds off", settings=far, how={"warmup_steps": 0}),
    BY_LINE(
        "no warm-up from 100 sds off, lr by hand",
        settings=lambda d, s: {"lr": 0.05, **far(d, s)},
        how={"warmup_steps": 0, "thinning": 2},
    ),
    BY_LINE(
        "no warm-up from 100 sds off, not whitened",
        settings=lambda d, s: {"precondition": None, **far(d, s)},
        how={"warmup_steps": 0, "thinning": 2},
    ),
    BY_LINE("friction of 100", settings=lambda d, s: {"friction": 100.0}),
    BY_LINE("friction of 0.001", settings=lambda d, s: {"friction": 0.001}),
    BY_LINE("the geometry of other data", settings=wrong_fit),
    BY_LINE(
        "the geometry of other data, in batches of 20", settings=wrong_fit, how={"batch_size": 20}
    ),
    BY_LINE(
        "elementwise geometry, correlations of 0.9999",
        data=NARROW,
        settings=lambda d, s: {"precondition": "diag"},
    ),
    BY_LINE(
        "no geometry, correlations of 0.9999",
        data=NARROW,
        settings=lambda d, s: {"precondition": None},
    ),
    BY_LINE("max_rows that are just enough to begin", how={"max_rows": 5_000_000}),
]


# ---------------------------------------------------------------- skewed, heavy, narrow


def gamma(shape: float) -> Callable[[], None]:
    """Of three scales: in their logarithms skewed the more the smaller the shape is."""

    def model() -> None:
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("x", dist.Gamma(torch.full((3,), shape), 1.0).to_event(1))

    return model


def gamma_truth(data: None, shape: float) -> Truth:
    """Mean and variance are the shape."""
    return moments("x", torch.full((3,), shape), torch.full((3,), shape**0.5))


def by_gamma(name: str, shape: float, **others: Any) -> Case:
    """A case of that."""
    truth = partial(gamma_truth, shape=shape)
    return Case(name, gamma(shape), truth, ("x",), **others)


def funnel() -> None:
    """Neal's."""
    pyro.factor("no data", torch.zeros(()))
    v = pyro.sample("v", dist.Normal(0.0, 3.0))
    pyro.sample("x", dist.Normal(torch.zeros(9), (v / 2).exp()).to_event(1))


def banana() -> None:
    """A parabola's neighborhood."""
    pyro.factor("no data", torch.zeros(()))
    x = pyro.sample("x", dist.Normal(1.0, 2.0))
    pyro.sample("y", dist.Normal(x.square(), 0.2))


def banana_truth(data: None) -> Truth:
    """Of a normal x of mean 1 and sd 2, and its square."""
    y_sd = torch.tensor(0.04 + 2 * 16 + 4 * 4.0).sqrt()
    one, two, five = (torch.tensor(float(n)) for n in (1, 2, 5))
    return moments("x", one, two) | moments("y", five, y_sd)


def half() -> None:
    """A wall: a standard normal's positive half, by a factor that is -inf."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("wall", torch.where(x > 0, 0.0, -torch.inf))


def half_truth(data: None) -> Truth:
    """Of a half normal."""
    mean = torch.tensor((2 / math.pi) ** 0.5)
    return moments("x", mean, (1 - mean.square()).sqrt())


def heavy() -> None:
    """Student's t with 2.5 degrees of freedom: a variance, but no fourth moment."""
    pyro.factor("no data", torch.zeros(()))
    pyro.sample("x", dist.StudentT(2.5, torch.zeros(3), 1.0).to_event(1))


def heavy_truth(data: None) -> Truth:
    """Its variance is df / (df - 2)."""
    return moments("x", torch.zeros(3), torch.full((3,), 5.0**0.5))


# ---------------------------------------------------------------- several modes


def mixture(
    weights: tuple[float, ...], places: tuple[float, ...], sds: tuple[float, ...], size: int = 2
) -> tuple[Callable[[], None], Callable[[Any], Truth]]:
    """(Normals along the diagonal, its truth)."""
    w, m, s = (torch.tensor(v, dtype=torch.float64) for v in (weights, places, sds))

    def model() -> None:
        x = pyro.sample("x", dist.Uniform(-100 * torch.ones(size), 100.0).to_event(1))
        parts = -((x - m[:, None]) / s[:, None]).square().sum(-1) / 2 - size * s.log()
        pyro.factor("parts", torch.logsumexp(parts + w.log(), 0))

    def truth(data: Any) -> Truth:
        mean = w @ m
        sd = (w @ (s.square() + m.square()) - mean.square()).sqrt()
        return moments("x", mean.expand(size), sd.expand(size))

    return model, truth


def by_mixture(name: str, *parts: Any, size: int = 2, **others: Any) -> Case:
    """A case of that."""
    model, truth = mixture(*parts, size=size)
    return Case(name, model, truth, ("x",), **others)


# ---------------------------------------------------------------- minibatches of unequal rows


def logistic(x: Tensor, y: Tensor) -> None:
    """A slope and an intercept."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 5.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=beta[0] + beta[1] * x), obs=y)


def leverage(seed: int) -> tuple[Tensor, Tensor]:
    """One row in a hundred is 50 times further out."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(1000, generator=source)
    x[::100] *= 50
    y = torch.bernoulli(torch.sigmoid(0.1 * x), generator=source)
    return x, y


def logistic_truth(data: tuple[Tensor, Tensor]) -> Truth:
    """On a grid."""
    x, y = data
    a, b = torch.meshgrid(torch.linspace(-1, 1, 401), torch.linspace(-0.6, 0.9, 401), indexing="ij")
    a, b = a.flatten(), b.flatten()
    log = -(a.square() + b.square()) / 50
    for row, label in zip(x, y, strict=True):
        log = log + torch.nn.functional.logsigmoid((2 * label - 1) * (a + b * row))
    weight = torch.softmax(log, 0)
    mean = torch.stack([weight @ a, weight @ b])
    square = torch.stack([weight @ a.square(), weight @ b.square()])
    return moments("beta", mean, (square - mean.square()).sqrt())


BY_LOGISTIC = partial(Case, model=logistic, truth=logistic_truth, sites=("beta",), data=leverage)
WHITENED = {"precondition": "dense", "lr": 1.5}
CASES += [
    by_gamma("skewed, a long step by hand", 1.0, settings=lambda d, s: WHITENED),
    by_gamma(
        "skewed, a step of first order by hand",
        1.0,
        method=ps.SGLD,
        settings=lambda d, s: {"lr": 0.5, "precondition": "dense"},
    ),
    by_gamma("much skewed", 0.1),
    Case("a funnel", funnel, lambda d: moments("v", torch.zeros(()), torch.tensor(3.0)), ("v",)),
    Case("a banana", banana, banana_truth, ("x", "y")),
    Case("a wall", half, half_truth, ("x",)),
    Case("tails without a fourth moment", heavy, heavy_truth, ("x",)),
    by_mixture("two modes, far apart", (0.5, 0.5), (-5.0, 5.0), (0.5, 0.5)),
    by_mixture("two modes of unequal weight", (0.8, 0.2), (-4.0, 4.0), (0.5, 0.5)),
    by_mixture("ten modes", (0.1,) * 10, tuple(4.0 * k - 18 for k in range(10)), (0.5,) * 10),
    by_mixture("a spike in a slab", (0.5, 0.5), (0.0, 0.0), (1.0, 0.02)),
    BY_LOGISTIC("rows of much leverage, in batches of 10", how={"batch_size": 10}),
    BY_LOGISTIC(
        "the same without control variates",
        settings=lambda d, s: {"control_variates": False},
        how={"batch_size": 10, "max_rows": 20_000_000},
    ),
]
#: What no search and no chain comes upon: a narrow mode, to which no start leads.
UNSEEN = [
    by_mixture("a narrow mode beside a wide one", (0.8, 0.2), (-1.5, 1.5), (0.3, 0.1)),
    by_mixture("a needle beside the bulk", (0.7, 0.3), (0.0, 3.0), (1.0, 0.02), size=3),
]
