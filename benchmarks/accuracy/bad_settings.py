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


# ---------------------------------------------------------------- other samplers, and settings


def raw_units(seed: int) -> tuple[Tensor, Tensor]:
    """Columns whose units differ by 12 orders of magnitude."""
    x, y = line_data(seed)
    return x * 10 ** torch.linspace(-6, 6, SIZE), y


def raw_truth(data: tuple[Tensor, Tensor]) -> Truth:
    """In units of each element, in which the precision can be inverted."""
    x, y = data
    unit = (x.square().sum(0) + 0.01).rsqrt()
    scaled = x * unit
    covariance = torch.linalg.inv(scaled.mT @ scaled + (unit.square() / 100).diag())
    return moments(
        "beta", unit * (covariance @ (scaled.mT @ y)), unit * covariance.diagonal().sqrt()
    )


def rare_column(seed: int) -> tuple[Tensor, Tensor]:
    """The first column is 0, but for five rows of 2,000."""
    x, y = line_data(seed, rows=2000)
    x[5:, 0] = 0
    return x, y


def unequal_rows(seed: int) -> tuple[Tensor, Tensor]:
    """Rows are multiplied by Pareto factors of index 2, so that their leverages have no mean."""
    x, y = line_data(seed)
    source = torch.Generator().manual_seed(seed)
    return x * torch.rand(len(x), 1, generator=source).rsqrt(), y


def by_hand(lr: float, **others: Any) -> Callable[[Any, int], dict[str, Any]]:
    """A step size in batches without control variates."""
    return lambda data, seed: {"lr": lr, "control_variates": False, **others}


IN_TENS = {"batch_size": 10}
FUNNEL_TRUTH = moments("v", torch.zeros(()), torch.tensor(3.0))
CASES += [
    BY_LINE("SGLD, lr too large for batches", method=ps.SGLD, settings=by_hand(0.01), how=IN_TENS),
    BY_LINE("SGHMC, lr too large", method=ps.SGHMC, settings=by_hand(0.02), how=IN_TENS),
    BY_LINE(
        "SGNHT, rows of unequal leverage",
        method=ps.SGNHT,
        data=unequal_rows,
        settings=by_hand(0.03),
        how=IN_TENS,
    ),
    BY_LINE(
        "NUTS of three steps, correlations of 0.9999",
        method=ps.NUTS,
        data=NARROW,
        settings=lambda d, s: {"max_depth": 2},
    ),
    Case("NUTS, a funnel", funnel, lambda d: FUNNEL_TRUTH, ("v",), method=ps.NUTS),
    Case("GHMC, a funnel", funnel, lambda d: FUNNEL_TRUTH, ("v",), method=ps.GHMC),
    by_mixture("NUTS, two modes", (0.8, 0.2), (-4.0, 4.0), (0.5, 0.5), method=ps.NUTS),
    BY_LINE("a temperature of 1.5", settings=lambda d, s: {"temperature": 1.5}),
    BY_LINE("units that differ by 10^12", data=raw_units, truth=raw_truth),
    BY_LINE("five equal columns", data=partial(line_data, correlation=1.0)),
    BY_LINE(
        "four rows, in batches of 1 without control variates",
        data=partial(line_data, rows=4),
        settings=lambda d, s: {"control_variates": False},
        how={"batch_size": 1},
    ),
    BY_LINE(
        "a column of five rows in 2,000, in batches of 20",
        data=rare_column,
        settings=lambda d, s: {"control_variates": False},
        how={"batch_size": 20, "max_rows": 20_000_000},
    ),
    by_mixture(
        "all chains start at one of two modes",
        (0.5, 0.5),
        (-5.0, 5.0),
        (0.5, 0.5),
        settings=lambda d, s: {"init_strategy": {"x": 5 + torch.randn(4, 2)}},
    ),
    by_mixture("two modes of unequal width", (0.6, 0.4), (-3.0, 3.0), (0.2, 1.5)),
]


# ---------------------------------------------------------------- heavy tails, edges, ridges


def on_grid(site: str, grid: Tensor, log_density: Tensor) -> Truth:
    """Moments of a number, or of the elements along the axes of a grid `[n, ..., n, elements]`."""
    weight = torch.softmax(log_density.flatten(), 0)
    values = grid.reshape(len(weight), -1)
    mean = weight @ values
    sd = (weight @ (values - mean).square()).sqrt()
    shape = grid.shape[-1:] if grid.ndim > 1 else ()
    return moments(site, mean.reshape(shape), sd.reshape(shape))


def axes(low: float, high: float, count: int, size: int) -> Tensor:
    """A grid in `size` dimensions, `[count, ..., count, size]`."""
    return torch.stack(torch.meshgrid([torch.linspace(low, high, count)] * size, indexing="ij"), -1)


def random_scale() -> None:
    """A normal whose scale is log-normal."""
    pyro.factor("no data", torch.zeros(()))
    s = pyro.sample("s", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(0.0, s.exp()))


def random_scale_truth(data: None) -> Truth:
    """The variance of x is E exp(2 s)."""
    zero, one = torch.zeros(()), torch.ones(())
    return moments("s", zero, one) | moments("x", zero, one.exp())


def log_normal() -> None:
    """Three log-normals: normal in the coordinates in which chains move."""
    pyro.factor("no data", torch.zeros(()))
    pyro.sample("x", dist.LogNormal(torch.zeros(3), 1.5).to_event(1))


def log_normal_truth(data: None) -> Truth:
    """Of a log-normal."""
    mean = torch.tensor(1.5**2 / 2).exp()
    return moments("x", mean.expand(3), (mean * (torch.tensor(1.5**2).exp() - 1).sqrt()).expand(3))


SCHOOLS = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=torch.float64)
SCHOOLS_SD = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=torch.float64)


def schools() -> None:
    """The eight schools, centered."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(10.0))
    theta = pyro.sample("theta", dist.Normal(mu.expand(8), tau).to_event(1))
    pyro.factor("y", dist.Normal(theta, SCHOOLS_SD).log_prob(SCHOOLS).sum())


def schools_truth(data: None) -> Truth:
    """Given tau, mu is normal."""
    tau = torch.linspace(0, 80, 8001)
    variance = SCHOOLS_SD.square() + tau[:, None].square()
    precision = 1 / 25 + (1 / variance).sum(1)
    mu = (SCHOOLS / variance).sum(1) / precision
    log = -(variance.log() + SCHOOLS.square() / variance).sum(1) / 2 - tau.square() / 200
    log = log + (mu.square() * precision - precision.log()) / 2
    weight = torch.softmax(log, 0)
    mean = weight @ mu
    sd = (weight @ (mu.square() + 1 / precision) - mean.square()).sqrt()
    return moments("mu", mean, sd) | on_grid("tau", tau, log)


def ramp() -> None:
    """A standard normal that falls by a factor of e at each 0.001 below 0."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("ramp", 1000 * x.clamp(max=0))


def ramp_truth(data: None) -> Truth:
    """On a grid."""
    x = torch.linspace(-0.1, 10, 1_010_001)
    return on_grid("x", x, 1000 * x.clamp(max=0) - x.square() / 2)


def stair() -> None:
    """A standard normal whose density above 0 is threefold: the gradient does not show it."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("stair", torch.where(x > 0, math.log(3), 0.0))


def stair_truth(data: None) -> Truth:
    """Three quarters are above 0."""
    mean = torch.tensor((2 / math.pi) ** 0.5 / 2)
    return moments("x", mean, (1 - mean.square()).sqrt())


def change_point(y: Tensor) -> None:
    """The time at which a mean changes from 0 to 1: a row's density is a step function of it."""
    time = pyro.sample("time", dist.Uniform(0.0, 40.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal((torch.arange(len(y)) > time).to(y), 1.0), obs=y)


def change_data(seed: int) -> tuple[Tensor]:
    """The mean changes at 25."""
    noise = torch.randn(40, generator=torch.Generator().manual_seed(seed))
    return (noise + (torch.arange(40) > 25),)


def change_truth(data: tuple[Tensor]) -> Truth:
    """On a grid of midpoints."""
    time = (torch.arange(40_000) + 0.5) / 1000
    mean = (torch.arange(40) > time[:, None]).to(time)
    return on_grid("time", time, -(data[0] - mean).square().sum(1) / 2)


def cusp() -> None:
    """exp(-sqrt(|x|)), whose gradient at 0 is infinite."""
    x = pyro.sample("x", dist.Uniform(-1000 * torch.ones(2), 1000.0).to_event(1))
    pyro.factor("cusp", -x.abs().sqrt().sum())


def cusp_truth(data: None) -> Truth:
    """The roots of |x| are gamma: E x^2 = 5! (but for 10^-9 beyond the bounds)."""
    return moments("x", torch.zeros(2), torch.full((2,), 120.0**0.5))


def half_cut(y: Tensor) -> None:
    """Half of the gradient of a mean is cut off, so that the likelihood seems half as steep."""
    x = pyro.sample("x", dist.Normal(0.0, 10.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x + x.detach(), 1.0), obs=y)


def one_column(seed: int, rows: int = 50, mean: float = 2.0) -> tuple[Tensor]:
    """Normals of an sd of 1."""
    return (mean + torch.randn(rows, generator=torch.Generator().manual_seed(seed)),)


def half_cut_truth(data: tuple[Tensor]) -> Truth:
    """Of a normal of mean 2 x."""
    precision = torch.tensor(4.0 * len(data[0]) + 0.01)
    return moments("x", 2 * data[0].sum() / precision, precision.rsqrt())


def product() -> None:
    """Only the product of two factors is known: two ridges along hyperbolas."""
    factors = pyro.sample("factors", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.factor("y", dist.Normal(factors.prod(-1), 0.1).log_prob(torch.ones(())))


def product_truth(data: None) -> Truth:
    """On a grid."""
    grid = axes(-6, 6, 2401, 2)
    log = -grid.square().sum(-1) / 2 - ((grid.prod(-1) - 1) / 0.1).square() / 2
    return on_grid("factors", grid, log)


def labels(y: Tensor, size: int) -> None:
    """A mixture of normals, whose means can be exchanged."""
    mean = pyro.sample("mean", dist.Normal(torch.zeros(size), 5.0).to_event(1))
    with pyro.plate("rows", len(y)):
        parts = dist.Normal(mean, 1.0), dist.Categorical(logits=torch.zeros(size))
        pyro.sample("y", dist.MixtureSameFamily(parts[1], parts[0]), obs=y)


def labels_data(seed: int, size: int) -> tuple[Tensor]:
    """Means are 4 apart, with 20 rows each."""
    places = 4 * (torch.arange(size) - (size - 1) / 2)
    noise = torch.randn(20, size, generator=torch.Generator().manual_seed(seed))
    return ((places + noise).flatten(),)


def labels_truth(data: tuple[Tensor], size: int) -> Truth:
    """On a grid of steps of 0.15, where means have sds of at least 0.2."""
    grid = axes(-6, 6, 81, size)
    log = -grid.square().sum(-1) / 50
    for row in data[0]:
        log = log + torch.logsumexp(-(row - grid).square() / 2, -1)
    return on_grid("mean", grid, log)


def by_labels(name: str, size: int, **others: Any) -> Case:
    """A case of that."""
    truth, data = partial(labels_truth, size=size), partial(labels_data, size=size)
    return Case(name, partial(labels, size=size), truth, ("mean",), data=data, **others)


def ring() -> None:
    """A circle of radius 5 and width 0.1."""
    x = pyro.sample("x", dist.Uniform(-10 * torch.ones(2), 10.0).to_event(1))
    pyro.factor("ring", -50 * (x.square().sum(-1).sqrt() - 5).square())


def ring_truth(data: None) -> Truth:
    """By the radius, whose density is r exp(-50 (r - 5)^2)."""
    r = torch.linspace(3, 7, 4001)
    weight = torch.softmax(r.log() - 50 * (r - 5).square(), 0)
    sd = (weight @ r.square() / 2).sqrt()
    return moments("x", torch.zeros(2), sd.expand(2))


#: With it, each of two modes has some of the mass.
PRIOR_SD = 2.35


def robust(y: Tensor) -> None:
    """A prior far from the data, both with mass: tails of rows are heavy."""
    mean = pyro.sample("mean", dist.Normal(20.0, PRIOR_SD))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.StudentT(2.0, mean, 1.0), obs=y)


def robust_truth(data: tuple[Tensor]) -> Truth:
    """On a grid."""
    mean = torch.linspace(-15, 45, 60_001)
    log = -((mean - 20) / PRIOR_SD).square() / 2
    log = log - 1.5 * (1 + (data[0] - mean[:, None]).square() / 2).log().sum(1)
    return on_grid("mean", mean, log)


def wave(time: Tensor, y: Tensor, most: float) -> None:
    """The frequency of a sine: a row's density is periodic in it."""
    frequency = pyro.sample("frequency", dist.Uniform(0.0, most))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal((frequency * time).sin(), 0.5), obs=y)


def wave_data(seed: int, most: float) -> tuple[Tensor, Tensor]:
    """30 times within 10 units; the frequency is half of what may be."""
    source = torch.Generator().manual_seed(seed)
    time = 10 * torch.rand(30, generator=source)
    return time, (most / 2 * time).sin() + 0.5 * torch.randn(30, generator=source)


def wave_truth(data: tuple[Tensor, Tensor], most: float) -> Truth:
    """On a grid of steps of at most 0.003, where the frequency has an sd of at least 0.01."""
    time, y = data
    frequency = torch.linspace(0, most, 1_000_001)
    log = torch.zeros(len(frequency))
    for t, row in zip(time, y, strict=True):
        log = log - 2 * (row - (frequency * t).sin()).square()
    return on_grid("frequency", frequency, log)


def by_wave(name: str, most: float) -> Case:
    """A case of that."""
    truth, data = partial(wave_truth, most=most), partial(wave_data, most=most)
    return Case(name, partial(wave, most=most), truth, ("frequency",), data=data)


CASES += [
    Case("a random scale", random_scale, random_scale_truth, ("s", "x")),
    Case("log-normals", log_normal, log_normal_truth, ("x",)),
    Case("a centered hierarchy", schools, schools_truth, ("mu", "tau")),
    Case("a steep ramp", ramp, ramp_truth, ("x",)),
    Case("a stair", stair, stair_truth, ("x",)),
    Case("a change point", change_point, change_truth, ("time",), data=change_data),
    Case("a cusp", cusp, cusp_truth, ("x",)),
    Case("half of a gradient cut off", half_cut, half_cut_truth, ("x",), data=one_column),
    Case("two ridges", product, product_truth, ("factors",)),
    by_labels("two labels that can be exchanged", 2),
    by_labels("three labels that can be exchanged", 3),
    Case("a ring", ring, ring_truth, ("x",)),
    Case(
        "a prior far from the data",
        robust,
        robust_truth,
        ("mean",),
        data=partial(one_column, rows=5, mean=0.0),
    ),
    by_wave("a frequency", 6.0),
]
#: Unseen: a mode with mass to which, in a hundred starts from the prior, no search leads.
UNSEEN = [
    by_mixture("a narrow mode beside a wide one", (0.8, 0.2), (-1.5, 1.5), (0.3, 0.1)),
    by_mixture("a needle beside the bulk", (0.7, 0.3), (0.0, 3.0), (1.0, 0.02), size=3),
    by_mixture("a small ball in ten dimensions", (0.6, 0.4), (0.0, 2.0), (1.0, 0.1), size=10),
    by_wave("a frequency of 1,500", 3000.0),
]
