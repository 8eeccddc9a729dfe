"""Ordinal answers, choices and tests: cutpoints by country, raters, conjoint, item response."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from entry import Tensors
from pyro.distributions import constraints
from sklearn.datasets import load_wine
from torch import Tensor

from jobs.job import groups, job


def answers(predictor: Tensor, cutpoints: Tensor) -> Tensor:
    """Simulated categories of a cumulative logit."""
    latent = predictor + torch.distributions.Uniform(1e-6, 1 - 1e-6).sample(predictor.shape).logit()
    return (latent[:, None] > cutpoints).sum(-1)


def ordinal(x: Tensor, y: Tensor) -> None:
    """Satisfaction on five levels."""
    b = pyro.sample("b", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    base = dist.Normal(torch.zeros(4), 2.0).to_event(1)
    cut = pyro.sample("cut", dist.TransformedDistribution(base, dist.transforms.OrderedTransform()))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.OrderedLogistic(x @ b, cut), obs=y)


def ordinal_data() -> Tensors:
    """400 answers."""
    x = torch.randn(400, 3)
    return x, answers(x @ torch.tensor([0.8, -0.5, 0.1]), torch.tensor([-1.5, -0.5, 0.6, 2.0]))


def countries(x: Tensor, country: Tensor, y: Tensor) -> None:
    """Trust on five levels; each of eight countries has cutpoints of its own."""
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    first = pyro.sample("first", dist.Normal(-1.0, 1.0))
    gap = pyro.sample("gap", dist.Normal(torch.ones(3), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    with pyro.plate("countries", 8):
        z = pyro.sample("z", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    free = torch.cat([first[None], gap]) + tau * z
    gaps = torch.nn.functional.softplus(free[:, 1:])
    cut = torch.cat([free[:, :1], free[:, :1] + gaps.cumsum(-1)], -1)
    cut = pyro.deterministic("cut", cut)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.OrderedLogistic(x @ b, cut[country]), obs=y)


def countries_data() -> Tensors:
    """600 answers."""
    x, country = torch.randn(600, 2), groups(8, 600)
    cut = torch.tensor([-1.5, -0.5, 0.6, 2.0]) + 0.4 * torch.randn(8, 1)
    return x, country, answers(x @ torch.tensor([0.6, -0.3]), cut[country])


def raters(rater: Tensor, essay: Tensor, y: Tensor) -> None:
    """Marks of 40 essays by 12 raters, some of them severe."""
    sd_rater = pyro.sample("sd_rater", dist.HalfNormal(1.0))
    sd_essay = pyro.sample("sd_essay", dist.HalfNormal(2.0))
    cut = pyro.sample("cut", dist.ImproperUniform(constraints.ordered_vector, (), (3,)))
    pyro.sample("cut_prior", dist.Normal(torch.zeros(3), 3.0).to_event(1), obs=cut)
    with pyro.plate("raters", 12):
        severity = pyro.sample("severity", dist.Normal(0.0, sd_rater))
    with pyro.plate("essays", 40):
        quality = pyro.sample("quality", dist.Normal(0.0, sd_essay))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.OrderedLogistic(quality[essay] - severity[rater], cut), obs=y)


def raters_data() -> Tensors:
    """Every rater marks every essay."""
    rater, essay = torch.arange(12).repeat(40), torch.arange(40).repeat_interleave(12)
    value = 1.5 * torch.randn(40)[essay] - 0.7 * torch.randn(12)[rater]
    return rater, essay, answers(value, torch.tensor([-1.5, 0.2, 1.8]))


def conjoint(person: Tensor, x: Tensor, y: Tensor) -> None:
    """Choices between three products of four attributes; tastes of 50 persons are correlated."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(torch.ones(4)).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(4, 2.0))
    with pyro.plate("persons", 50):
        z = pyro.sample("z", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    taste = mu + z @ (tau[:, None] * corr).T
    with pyro.plate("data", len(y)):
        utility = (x * taste[person][:, None, :]).sum(-1)
        pyro.sample("y", dist.Categorical(logits=utility), obs=y)


def conjoint_data() -> Tensors:
    """Ten choices a person."""
    person, x = torch.arange(50).repeat_interleave(10), torch.randn(500, 3, 4)
    z = torch.randn(50, 4)
    z[:, 1] = 0.6 * z[:, 0] + 0.8 * z[:, 1]
    taste = torch.tensor([1.0, -0.5, 0.3, 0.0]) + 0.8 * z
    utility = (x * taste[person][:, None, :]).sum(-1)
    return person, x, torch.distributions.Categorical(logits=utility).sample()


def item_response(person: Tensor, item: Tensor, y: Tensor) -> None:
    """60 persons on 15 questions: abilities, difficulties, discriminations."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    sd = pyro.sample("sd", dist.HalfNormal(torch.tensor([1.0, 0.5])).to_event(1))
    with pyro.plate("persons", 60):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
    with pyro.plate("items", 15):
        difficulty = pyro.sample("difficulty", dist.Normal(mu, sd[0]))
        slope = pyro.sample("slope", dist.LogNormal(0.0, sd[1]))
    with pyro.plate("data", len(y)):
        logits = slope[item] * (ability[person] - difficulty[item])
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def item_response_data() -> Tensors:
    """Everybody answers everything."""
    person, item = torch.arange(60).repeat_interleave(15), torch.arange(15).repeat(60)
    ability, difficulty = torch.randn(60), torch.randn(15)
    slope = torch.exp(0.4 * torch.randn(15))
    logits = slope[item] * (ability[person] - difficulty[item])
    return person, item, torch.bernoulli(torch.sigmoid(logits))


def wine(x: Tensor, y: Tensor) -> None:
    """Three cultivars by 13 measures, the first as the reference."""
    a = pyro.sample("a", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    b = pyro.sample("b", dist.Normal(torch.zeros(13, 2), 1.0).to_event(2))
    with pyro.plate("data", len(y)):
        logits = torch.nn.functional.pad(a + x @ b, (1, 0))
        pyro.sample("y", dist.Categorical(logits=logits), obs=y)


def wine_data() -> Tensors:
    """178 wines, measures standardized."""
    x, y = load_wine(return_X_y=True)
    x = torch.as_tensor(x)
    return (x - x.mean(0)) / x.std(0), torch.as_tensor(y)


CHOICES = (
    job("ordinal", "five levels", ordinal, ordinal_data, ("b", "cut"), True),
    job(
        "countries",
        "cutpoints by country",
        countries,
        countries_data,
        ("b", "first", "gap", "tau", "cut"),
        True,
    ),
    job(
        "raters",
        "marks of essays",
        raters,
        raters_data,
        ("sd_rater", "sd_essay", "cut", "severity", "quality"),
        True,
    ),
    job("conjoint", "50 tastes, LKJ", conjoint, conjoint_data, ("mu", "tau", "corr", "z"), True),
    job(
        "item_response",
        "two parameters an item",
        item_response,
        item_response_data,
        ("mu", "sd", "ability", "difficulty", "slope"),
        True,
    ),
    job("wine", "a multinomial logit", wine, wine_data, ("a", "b"), True),
)
