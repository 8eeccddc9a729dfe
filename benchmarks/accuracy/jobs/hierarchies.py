"""Hierarchies: crossed, nested, with correlated slopes, of proportions, counts and studies."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from entry import Tensors
from torch import Tensor

from jobs.job import groups, job


def crossed(subject: Tensor, item: Tensor, x: Tensor, y: Tensor) -> None:
    """Log reaction times of 30 subjects on 20 items."""
    mu, b = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("b", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    sd_subject = pyro.sample("sd_subject", dist.HalfNormal(1.0))
    sd_item = pyro.sample("sd_item", dist.HalfNormal(1.0))
    with pyro.plate("subjects", 30):
        u = pyro.sample("u", dist.Normal(0.0, 1.0))
    with pyro.plate("items", 20):
        v = pyro.sample("v", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        mean = mu + b * x + sd_subject * u[subject] + sd_item * v[item]
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def crossed_data() -> Tensors:
    """Every subject sees every item."""
    subject, item = torch.arange(30).repeat_interleave(20), torch.arange(20).repeat(30)
    x = (torch.rand(600) < 0.5).double()
    effects = 0.3 * torch.randn(30)[subject] + 0.15 * torch.randn(20)[item]
    return subject, item, x, 6 + 0.1 * x + effects + 0.4 * torch.randn(600)


SCHOOL = torch.arange(48) // 4


def nested(room: Tensor, x: Tensor, y: Tensor) -> None:
    """Pupils in 48 classes of 12 schools, classes centered."""
    mu, b = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("b", dist.Normal(0.0, 2.0))
    sd_school = pyro.sample("sd_school", dist.HalfNormal(1.0))
    sd_class = pyro.sample("sd_class", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("schools", 12):
        school = pyro.sample("school", dist.Normal(mu, sd_school))
    with pyro.plate("classes", 48):
        level = pyro.sample("level", dist.Normal(school[SCHOOL], sd_class))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(level[room] + b * x, sigma), obs=y)


def nested_data() -> Tensors:
    """Some 15 pupils a class."""
    room, x = groups(48, 720), torch.randn(720)
    level = (0.6 * torch.randn(12))[SCHOOL] + 0.5 * torch.randn(48)
    return room, x, 0.5 + level[room] + 0.3 * x + torch.randn(720)


def slopes(group: Tensor, x: Tensor, y: Tensor) -> None:
    """Correlated intercepts and slopes of 25 groups."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2)).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(2, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("groups", 25):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    ab = mu + z @ (scale[:, None] * corr).T
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(ab[group, 0] + ab[group, 1] * x, sigma), obs=y)


def slopes_data() -> Tensors:
    """Some 16 rows a group; the correlation is -.5."""
    group, x = groups(25, 400), torch.randn(400)
    z = torch.randn(25, 2)
    a, b = 1 + 0.7 * z[:, 0], 0.5 + 0.4 * (-0.5 * z[:, 0] + 0.75**0.5 * z[:, 1])
    return group, x, a[group] + b[group] * x + 0.8 * torch.randn(400)


URANIUM = torch.sin(torch.arange(85, dtype=torch.float64) * 1.7)


def counties(county: Tensor, floor: Tensor, y: Tensor) -> None:
    """Log radon in 85 counties, many of them with few houses; a predictor of counties."""
    gamma = pyro.sample("gamma", dist.Normal(torch.zeros(2), 5.0).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.0))
    with pyro.plate("counties", 85):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    alpha = pyro.deterministic("alpha", gamma[0] + gamma[1] * URANIUM + tau * z)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(alpha[county] + b * floor, sigma), obs=y)


def counties_data() -> Tensors:
    """A few counties have most houses."""
    size = torch.distributions.Categorical(1 / torch.arange(1.0, 86.0))
    county = torch.cat([torch.arange(85), size.sample((615,))])
    floor = (torch.rand(700) < 0.2).double()
    alpha = 1.4 + 0.6 * URANIUM + 0.25 * torch.randn(85)
    return county, floor, alpha[county] - 0.7 * floor + 0.75 * torch.randn(700)


def poststratification(
    state: Tensor, age: Tensor, school: Tensor, female: Tensor, y: Tensor
) -> None:
    """A vote by state, age and education, for poststratification."""
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    logit = b[0] + b[1] * female
    for name, index, size in (("state", state, 20), ("age", age, 5), ("school", school, 4)):
        sd = pyro.sample(f"sd_{name}", dist.HalfNormal(1.0))
        with pyro.plate(f"{name}s", size):
            z = pyro.sample(f"z_{name}", dist.Normal(0.0, 1.0))
        logit = logit + sd * z[index]
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=logit), obs=y)


def poststratification_data() -> Tensors:
    """1,000 respondents."""
    state, age, school = groups(20, 1000), groups(5, 1000), groups(4, 1000)
    female = (torch.rand(1000) < 0.5).double()
    effects = (
        0.5 * torch.randn(20)[state] + 0.4 * torch.randn(5)[age] + 0.3 * torch.randn(4)[school]
    )
    return state, age, school, female, torch.bernoulli(torch.sigmoid(0.3 * female - 0.2 + effects))


def meta_analysis(y: Tensor, se: Tensor) -> None:
    """Log odds ratios of 15 trials with a heavy-tailed prior on their heterogeneity."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfCauchy(0.5))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * z, se), obs=y)


def meta_analysis_data() -> Tensors:
    """Standard errors between .1 and .5."""
    se = 0.1 + 0.4 * torch.rand(15)
    return -0.3 + 0.2 * torch.randn(15) + se * torch.randn(15), se


def proportions(trials: Tensor, y: Tensor) -> None:
    """Successes in 40 groups, centered: proportions are Beta with unknown concentration."""
    phi = pyro.sample("phi", dist.Beta(2.0, 2.0))
    log_kappa = pyro.sample("log_kappa", dist.Normal(3.0, 1.0))
    kappa = log_kappa.exp()
    with pyro.plate("data", len(y)):
        p = pyro.sample("p", dist.Beta(phi * kappa, (1 - phi) * kappa))
        pyro.sample("y", dist.Binomial(trials, p), obs=y)


def proportions_data() -> Tensors:
    """30 to 60 trials each."""
    trials = torch.randint(30, 60, (40,)).double()
    p = torch.distributions.Beta(6.0, 14.0).sample((40,))
    return trials, torch.distributions.Binomial(trials, p).sample()


def stores(store: Tensor, price: Tensor, y: Tensor) -> None:
    """Sales of 1,990 stores, centered: many latents, each with few rows."""
    mu, b = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("b", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("stores", 1990):
        level = pyro.sample("level", dist.Normal(mu, tau))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(level[store] + b * price, sigma), obs=y)


def stores_data() -> Tensors:
    """Four weeks a store."""
    store, price = torch.arange(1990).repeat(4), torch.randn(7960)
    level = 3 + 0.8 * torch.randn(1990)
    return store, price, level[store] - 0.4 * price + 0.5 * torch.randn(7960)


def tests(variant: Tensor, test: Tensor, visitors: Tensor, y: Tensor) -> None:
    """Conversions in 20 A/B tests: rates and lifts differ between them."""
    mu = pyro.sample("mu", dist.Normal(-2.0, 1.0))
    lift = pyro.sample("lift", dist.Normal(0.0, 0.5))
    sd = pyro.sample("sd", dist.HalfNormal(torch.tensor([1.0, 0.3])).to_event(1))
    with pyro.plate("tests", 20):
        base = pyro.sample("base", dist.Normal(mu, sd[0]))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    effect = pyro.deterministic("effect", lift + sd[1] * z)
    with pyro.plate("data", len(y)):
        logits = base[test] + variant * effect[test]
        pyro.sample("y", dist.Binomial(visitors, logits=logits), obs=y)


def tests_data() -> Tensors:
    """Two arms of 500 to 1,500 visitors."""
    test, variant = torch.arange(20).repeat(2), torch.arange(40).div(20, rounding_mode="floor")
    visitors = torch.randint(500, 1500, (40,)).double()
    base, effect = -2 + 0.5 * torch.randn(20), 0.1 + 0.15 * torch.randn(20)
    rate = torch.sigmoid(base[test] + variant * effect[test])
    return variant, test, visitors, torch.distributions.Binomial(visitors, rate).sample()


_SCALES = ("sigma", "sd_subject", "sd_item")
HIERARCHIES = (
    job(
        "crossed",
        "30 subjects by 20 items",
        crossed,
        crossed_data,
        ("mu", "b", *_SCALES, "u", "v"),
        True,
    ),
    job(
        "nested",
        "pupils in classes in schools, centered",
        nested,
        nested_data,
        ("mu", "b", "sd_school", "sd_class", "sigma", "school", "level"),
        True,
    ),
    job(
        "slopes",
        "intercepts and slopes, LKJ",
        slopes,
        slopes_data,
        ("mu", "scale", "corr", "sigma", "z"),
        True,
    ),
    job(
        "counties",
        "85 counties",
        counties,
        counties_data,
        ("gamma", "b", "tau", "sigma", "alpha"),
        True,
    ),
    job(
        "poststratification",
        "a vote by state, age and education",
        poststratification,
        poststratification_data,
        ("b", "sd_state", "sd_age", "sd_school", "z_state", "z_age", "z_school"),
        True,
    ),
    job("meta_analysis", "15 trials", meta_analysis, meta_analysis_data, ("mu", "tau", "z")),
    job(
        "proportions",
        "40 Beta proportions",
        proportions,
        proportions_data,
        ("phi", "log_kappa", "p"),
    ),
    job(
        "stores",
        "1,990 stores, centered",
        stores,
        stores_data,
        ("mu", "b", "tau", "sigma", "level"),
        True,
    ),
    job("tests", "20 A/B tests", tests, tests_data, ("mu", "lift", "sd", "base", "effect")),
)
