"""Models with structure, and data simulated from fixed seeds: what Pyro's NUTS and ours both
sample.

Data are float64, and so are a model's literals as long as torch's default dtype is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import arviz
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor


class Posterior(NamedTuple):
    """A model and its data.

    Attributes:
        model: a Pyro model.
        data: its arguments; none where the model holds its data itself.
    """

    model: Any
    data: tuple[Tensor, ...] = ()


def _double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _normals(seed: int, *shape: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=source)


def _uniforms(seed: int, *shape: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, dtype=torch.float64, generator=source)


def logistic() -> Posterior:
    """Logistic regression with a heavy-tailed prior of the intercept."""
    x = _normals(1, 60, 3)
    y = (_uniforms(2, 60) < (x @ _double(1.5, -1.0, 0.0) + 0.5).sigmoid()).double()

    def model(x: Tensor, y: Tensor | None = None) -> None:
        intercept = pyro.sample("intercept", dist.StudentT(4.0, 0.0, 2.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=intercept + x @ w), obs=y)

    return Posterior(model, (x, y))


def counts() -> Posterior:
    """Poisson counts: a Gamma rate, shared out among groups by a simplex."""
    group = torch.arange(24) % 4
    exposure = 0.5 + _uniforms(3, 24)
    source = torch.Generator().manual_seed(4)
    y = torch.poisson(9 * _double(0.1, 0.2, 0.3, 0.4)[group] * exposure, generator=source)

    def model(group: Tensor, exposure: Tensor, y: Tensor | None = None) -> None:
        rate = pyro.sample("rate", dist.Gamma(2.0, 0.2))
        share = pyro.sample("share", dist.Dirichlet(torch.full((4,), 1.5)))
        with pyro.plate("data", len(group)):
            pyro.sample("y", dist.Poisson(rate * share[group] * exposure), obs=y)

    return Posterior(model, (group, exposure, y))


def hierarchy() -> Posterior:
    """Groups' effects, non-centered, with a HalfNormal scale."""
    group = torch.arange(40) % 8
    y = 1.0 + (0.8 * _normals(5, 8))[group] + 0.7 * _normals(6, 40)

    def model(group: Tensor, y: Tensor | None = None) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.5))
        sigma = pyro.sample("sigma", dist.Exponential(1.0))
        with pyro.plate("groups", 8):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(group)):
            pyro.sample("y", dist.Normal(mu + tau * z[group], sigma), obs=y)

    return Posterior(model, (group, y))


def dose_response() -> Posterior:
    """A curve from a Beta background, with a Uniform midpoint and a LogNormal slope."""
    x = 6 * _uniforms(7, 80) - 3
    chance = 0.15 + 0.85 * (2 * (x - 0.4)).sigmoid()
    y = (_uniforms(8, 80) < chance).double()

    def model(x: Tensor, y: Tensor | None = None) -> None:
        background = pyro.sample("background", dist.Beta(1.5, 6.0))
        midpoint = pyro.sample("midpoint", dist.Uniform(-2.0, 3.0))
        slope = pyro.sample("slope", dist.LogNormal(0.5, 0.5))
        chance = background + (1 - background) * (slope * (x - midpoint)).sigmoid()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(chance), obs=y)

    return Posterior(model, (x, y))


def ordinal() -> Posterior:
    """Ratings: ordered cutpoints."""
    x = _normals(9, 80)
    uniforms = _uniforms(10, 80)
    noisy = 1.2 * x + uniforms.log() - (-uniforms).log1p()  # logistic noise
    y = torch.bucketize(noisy, _double(-1.5, 0.0, 1.5))

    def model(x: Tensor, y: Tensor | None = None) -> None:
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0))
        base = dist.Normal(torch.zeros(3), 2.0).to_event(1)
        ordered = dist.TransformedDistribution(base, [dist.transforms.OrderedTransform()])
        cutpoints = pyro.sample("cutpoints", ordered)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.OrderedLogistic(beta * x, cutpoints), obs=y)

    return Posterior(model, (x, y))


def covariance() -> Posterior:
    """Three correlated measurements: scales, and an LKJ prior of the correlations."""
    factor = torch.tensor([[1.0, 0, 0], [0.6, 1.2, 0], [0, -0.4, 0.5]], dtype=torch.float64)
    y = _double(0.5, 0.0, -1.0) + _normals(11, 40, 3) @ factor.T

    def model(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        scale = pyro.sample("scale", dist.HalfNormal(torch.full((3,), 2.0)).to_event(1))
        correlation = pyro.sample("correlation", dist.LKJCholesky(3, 2.0))
        scale_tril = scale[:, None] * correlation
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.MultivariateNormal(mean, scale_tril=scale_tril), obs=y)

    return Posterior(model, (y,))


def mixture() -> Posterior:
    """Three Gaussians, told apart by their priors; the component of a row is enumerated."""
    component = torch.bucketize(_uniforms(12, 60), _double(0.3, 0.8))
    y = _double(-3.0, 0.0, 2.5)[component] + 0.8 * _normals(13, 60)

    def model(y: Tensor) -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.full((3,), 3.0)))
        loc = pyro.sample("loc", dist.Normal(_double(-3.0, 0.0, 3.0), 0.7).to_event(1))
        scale = pyro.sample("scale", dist.LogNormal(-0.3, 0.4))
        with pyro.plate("data", len(y)):
            k = pyro.sample("k", dist.Categorical(weights), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(loc[k], scale), obs=y)

    return Posterior(model, (y,))


def local_level() -> Posterior:
    """A level that walks at random, all of it one site, seen in noise."""
    y = (0.6 * _normals(14, 30)).cumsum(0) + 0.4 * _normals(15, 30)

    def model() -> None:
        drift = pyro.sample("drift", dist.LogNormal(-0.5, 0.5))
        noise = pyro.sample("noise", dist.LogNormal(-0.5, 0.5))
        sums = torch.ones(30, 30).tril()
        walk = dist.MultivariateNormal(torch.zeros(30), scale_tril=drift * sums)
        level = pyro.sample("level", walk)
        pyro.sample("y", dist.Normal(level, noise).to_event(1), obs=y)

    return Posterior(model)


def gaussian_hmm() -> Posterior:
    """A decaying state summed out by Pyro's own `GaussianHMM`."""
    state, states = torch.zeros((), dtype=torch.float64), []
    for step in 0.5 * _normals(16, 30):
        state = 0.8 * state + step
        states.append(state)
    y = (torch.stack(states) + 0.3 * _normals(17, 30))[:, None]

    def model() -> None:
        decay = pyro.sample("decay", dist.Beta(6.0, 2.0))
        drive = pyro.sample("drive", dist.LogNormal(-0.7, 0.4))
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.4))
        zero = torch.zeros(1)
        hmm = dist.GaussianHMM(
            dist.Normal(zero, 1.0).to_event(1),
            decay.reshape(1, 1),
            dist.Normal(zero, drive).to_event(1),
            torch.eye(1),
            dist.Normal(zero, noise).to_event(1),
            duration=30,
        )
        pyro.sample("y", hmm, obs=y)

    return Posterior(model)


def gaussian_process() -> Posterior:
    """Fifteen points of a smooth function, with a mean and three kernel parameters."""
    x = 6 * _uniforms(18, 15) - 3
    y = 1.0 + x.sin() + 0.2 * _normals(19, 15)

    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        length = pyro.sample("length", dist.InverseGamma(5.0, 5.0))
        amplitude = pyro.sample("amplitude", dist.HalfNormal(2.0))
        noise = pyro.sample("noise", dist.LogNormal(-1.5, 0.5))
        squares = ((x[:, None] - x) / length).square()
        cov = amplitude.square() * (-squares / 2).exp() + noise.square() * torch.eye(15)
        pyro.sample("y", dist.MultivariateNormal(mean.expand(15), cov), obs=y)

    return Posterior(model)


class RobustRegression(PyroModule):
    """Student's t around a line in two features, its weights `PyroSample`s."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = PyroModule[torch.nn.Linear](2, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 2.0).expand([1, 2]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 2.0).expand([1]).to_event(1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        """The model."""
        freedom = pyro.sample("freedom", dist.Gamma(4.0, 0.5))
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
        line = self.linear(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.StudentT(freedom, line, scale), obs=y)


def module() -> Posterior:
    """A `PyroModule`."""
    x = _normals(20, 50, 2)
    noise = _normals(21, 50) / _normals(22, 50, 4).square().mean(-1).sqrt()
    y = x @ _double(1.0, -0.5) + 0.3 + 0.5 * noise
    return Posterior(RobustRegression(), (x, y))


POSTERIORS: dict[str, Callable[[], Posterior]] = {
    make.__name__: make
    for make in (
        logistic,
        counts,
        hierarchy,
        dose_response,
        ordinal,
        covariance,
        mixture,
        local_level,
        gaussian_hmm,
        gaussian_process,
        module,
    )
}


def elements(draws: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Sites `[chains, draws, ...]` -> each element that varies, "site" or "site[1,0]",
    `[chains, draws]`."""
    columns = {}
    for site, values in sorted(draws.items()):
        array = values.double().numpy()
        for index in np.ndindex(array.shape[2:]):
            column = array[(slice(None), slice(None), *index)]
            if column.std() > 1e-10:  # unlike the zeros of a triangular matrix
                columns[f"{site}[{','.join(map(str, index))}]" if index else site] = column
    return columns


def mean_and_error(column: np.ndarray) -> tuple[float, float]:
    """The mean of draws `[chains, draws]` and its Monte Carlo standard error."""
    return float(column.mean()), float(arviz.mcse(column))
