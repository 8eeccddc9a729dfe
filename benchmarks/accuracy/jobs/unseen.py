"""What is not seen, or seldom: zeros, sparse effects, components, errors, gaps, factors."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from entry import Tensors
from sklearn.datasets import load_breast_cancer, load_diabetes
from torch import Tensor

from jobs.job import groups, job


def zero_inflated(x: Tensor, y: Tensor) -> None:
    """Counts, with zeros of two kinds."""
    a = pyro.sample("a", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    g = pyro.sample("g", dist.Normal(torch.zeros(2), 1.5).to_event(1))
    with pyro.plate("data", len(y)):
        rate = torch.exp(a[0] + x @ a[1:])
        counts = dist.ZeroInflatedPoisson(rate, gate_logits=g[0] + g[1] * x[:, 0])
        pyro.sample("y", counts, obs=y)


def zero_inflated_data() -> Tensors:
    """300 visits."""
    x = torch.randn(300, 2)
    counts = torch.poisson(torch.exp(0.8 + x @ torch.tensor([0.4, -0.3])))
    return x, torch.where(torch.bernoulli(torch.sigmoid(-0.7 + 0.6 * x[:, 0])) > 0, 0.0, counts)


def overdispersed(site: Tensor, x: Tensor, y: Tensor) -> None:
    """Counts at 20 sites: negative binomial, with more zeros."""
    a, b = pyro.sample("a", dist.Normal(1.0, 1.0)), pyro.sample("b", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    phi = pyro.sample("phi", dist.HalfNormal(1.0))
    gate = pyro.sample("gate", dist.Beta(1.0, 4.0))
    with pyro.plate("sites", 20):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    total = 1 / phi.square()
    with pyro.plate("data", len(y)):
        logits = a + b * x + tau * z[site] - total.log()
        counts = dist.ZeroInflatedNegativeBinomial(total, logits=logits, gate=gate)
        pyro.sample("y", counts, obs=y)


def overdispersed_data() -> Tensors:
    """500 traps."""
    site, x = groups(20, 500), torch.randn(500)
    rate = torch.exp(1.5 + 0.4 * x + 0.5 * torch.randn(20)[site])
    counts = torch.poisson(rate * torch.distributions.Gamma(3.0, 3.0).sample((500,)))
    return site, x, counts * (torch.rand(500) > 0.15)


def horseshoe(x: Tensor, y: Tensor) -> None:
    """Which of 30 measures tell tumors apart: a regularized horseshoe."""
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfCauchy(0.05))
    slab = pyro.sample("slab", dist.InverseGamma(2.0, 8.0))
    with pyro.plate("columns", x.shape[-1]):
        local = pyro.sample("local", dist.HalfCauchy(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    scale = local * (slab / (slab + (tau * local).square())).sqrt()
    b = pyro.deterministic("b", tau * scale * z)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=a + x @ b), obs=y)


def horseshoe_data() -> Tensors:
    """569 tumors, measures standardized."""
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.as_tensor(x)
    return (x - x.mean(0)) / x.std(0), torch.as_tensor(y).double()


def mixture(y: Tensor) -> None:
    """Three normal components, in order of their means."""
    base = dist.Normal(torch.zeros(3), 3.0).to_event(1)
    mu = pyro.sample("mu", dist.TransformedDistribution(base, dist.transforms.OrderedTransform()))
    sigma = pyro.sample("sigma", dist.LogNormal(torch.zeros(3), 0.5).to_event(1))
    weights = pyro.sample("weights", dist.Dirichlet(torch.full((3,), 5.0)))
    parts = dist.Normal(mu, sigma)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), parts), obs=y)


def mixture_data() -> Tensors:
    """500 rows."""
    part = torch.distributions.Categorical(torch.tensor([0.3, 0.4, 0.3])).sample((500,))
    mu, sigma = torch.tensor([-4.0, 0.0, 3.5]), torch.tensor([1.0, 0.7, 1.2])
    return (mu[part] + sigma[part] * torch.randn(500),)


def at_quantiles(data: Tensors) -> dict[str, Tensor]:
    """A mean for each third: chains that start in one component's place stay there."""
    return {"mu": data[0].quantile(torch.tensor([0.15, 0.5, 0.85], dtype=data[0].dtype))}


def regimes(x: Tensor, y: Tensor) -> None:
    """Two lines, the lower one first; which is a row's is not known."""
    low = pyro.sample("low", dist.Normal(0.0, 2.0))
    gap = pyro.sample("gap", dist.Gamma(2.0, 1.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    weight = pyro.sample("weight", dist.Beta(2.0, 2.0))
    level = torch.stack([low, low + gap])
    parts = dist.Normal(level + slope * x[:, None], sigma)
    with pyro.plate("data", len(y)):
        chosen = dist.Categorical(torch.stack([weight, 1 - weight]).expand(len(y), 2))
        pyro.sample("y", dist.MixtureSameFamily(chosen, parts), obs=y)


def regimes_data() -> Tensors:
    """300 customers."""
    x, high = torch.randn(300), torch.rand(300) < 0.6
    mean = torch.where(high, 2 - 0.5 * x, -0.5 + 0.8 * x)
    return x, mean + 0.5 * torch.randn(300)


def measurement(x: Tensor, y: Tensor) -> None:
    """A line through 100 points with errors in both directions."""
    mu, a = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", len(y)):
        true = pyro.sample("true", dist.Normal(mu, tau))
        pyro.sample("x", dist.Normal(true, 0.5), obs=x)
        pyro.sample("y", dist.Normal(a + b * true, sigma), obs=y)


def measurement_data() -> Tensors:
    """The errors of x are known to have an sd of .5."""
    true = 1 + 1.2 * torch.randn(100)
    x = true + 0.5 * torch.randn(100)
    return x, 0.3 + 0.8 * true + 0.6 * torch.randn(100)


def missing(x: Tensor, z: Tensor, gap: Tensor, y: Tensor) -> None:
    """A regression whose predictor is missing in a fifth of the rows, depending on another."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    b = pyro.sample("b", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    gaps = pyro.sample("gaps", dist.Normal(torch.zeros(40), 10.0).to_event(1))
    filled = torch.where(gap < 0, x, gaps[gap.clamp(min=0)])
    with pyro.plate("data", len(y)):
        pyro.sample("x", dist.Normal(mu[0] + mu[1] * z, tau), obs=filled)
        pyro.sample("y", dist.Normal(b[0] + b[1] * filled + b[2] * z, sigma), obs=y)


def missing_data() -> Tensors:
    """200 rows, of which 40 have a gap."""
    z = torch.randn(200)
    x = 0.5 + 0.6 * z + torch.randn(200)
    y = 1 + 0.8 * x - 0.5 * z + 0.7 * torch.randn(200)
    gap = torch.full((200,), -1)
    gap[(z + torch.randn(200)).topk(40).indices] = torch.arange(40)
    return torch.where(gap < 0, x, 0.0), z, gap, y


def robust(x: Tensor, y: Tensor) -> None:
    """Progress of diabetes, with noise of unknown tails."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(torch.zeros(10), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.StudentT(nu, a + x @ b, sigma), obs=y)


def robust_data() -> Tensors:
    """442 patients, all standardized; two of the ten measures are nearly the same."""
    x, y = (torch.as_tensor(each) for each in load_diabetes(return_X_y=True))
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def factors(y: Tensor) -> None:
    """Six questions, one factor: loadings, with the factor's values integrated out."""
    mean = pyro.sample("mean", dist.Normal(torch.zeros(6), 2.0).to_event(1))
    first = pyro.sample("first", dist.HalfNormal(1.0))
    rest = pyro.sample("rest", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    unique = pyro.sample("unique", dist.HalfNormal(torch.ones(6)).to_event(1))
    loading = torch.cat([first[None], rest])
    with pyro.plate("data", len(y)):
        answers = dist.LowRankMultivariateNormal(mean, loading[:, None], unique.square())
        pyro.sample("y", answers, obs=y)


def factors_data() -> Tensors:
    """150 persons."""
    loading = torch.tensor([1.0, 0.8, 0.7, -0.5, 0.4, 0.9])
    return (torch.randn(150, 1) * loading + 0.7 * torch.randn(150, 6),)


def at_covariances(data: Tensors) -> dict[str, Tensor]:
    """Loadings of the right signs: the mirrored factor has no first loading, and no mass."""
    return {"first": torch.ones(()), "rest": data[0].T.cov()[0, 1:]}


UNSEEN = (
    job("zero_inflated", "two kinds of zeros", zero_inflated, zero_inflated_data, ("a", "g"), True),
    job(
        "overdispersed",
        "negative binomial, more zeros, 20 sites",
        overdispersed,
        overdispersed_data,
        ("a", "b", "tau", "phi", "gate", "z"),
        True,
    ),
    job("horseshoe", "30 measures", horseshoe, horseshoe_data, ("a", "tau", "b"), True),
    job(
        "mixture",
        "three components",
        mixture,
        mixture_data,
        ("mu", "sigma", "weights"),
        True,
        at_quantiles,
    ),
    job(
        "regimes",
        "two lines",
        regimes,
        regimes_data,
        ("low", "gap", "slope", "sigma", "weight"),
        True,
    ),
    job(
        "measurement",
        "errors in both variables",
        measurement,
        measurement_data,
        ("mu", "a", "b", "tau", "sigma", "true"),
    ),
    job("missing", "40 gaps", missing, missing_data, ("mu", "tau", "b", "sigma", "gaps")),
    job("robust", "unknown tails", robust, robust_data, ("a", "b", "sigma", "nu"), True),
    job(
        "factors",
        "six questions",
        factors,
        factors_data,
        ("mean", "first", "rest", "unique"),
        True,
        at_covariances,
    ),
)
