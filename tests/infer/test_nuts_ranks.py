"""NUTS on data sets simulated from the prior: among the draws, the true value has a uniform rank.

Seeds are fixed; were they drawn anew, all tests of ranks here together would fail by chance once in
1,000 times.  References: Talts et al., Validating Bayesian inference algorithms with
simulation-based calibration, 2018; Modrák et al., Simulation-based calibration checking for
Bayesian computation, 2023, from whom the log likelihood is, as a quantity that depends on the data.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy.stats import chi2, norm

import pyro_scale as ps
from pyro_scale.errors import ConvergenceWarning

pytest.importorskip("nutpie")
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("float64")]

#: Data sets, of the model as it is and of a wrong one.
DATA_SETS, OF_WRONG = 250, 150
#: Draws kept of each run; draws from one that is kept to the next; warm-up.
RANKED, EVERY, WARMUP = 63, 16, 500
BINS = 16


class Case(NamedTuple):
    """
    Attributes:
        model: (its design, y=None, power of the likelihood) -> None.
        design: what the model is given besides y.
        quantities: (values of sites `[draws, ...]`, design, y) -> quantities `[draws]`.
        names: theirs.
    """

    model: Callable[..., None]
    design: torch.Tensor
    quantities: Callable[..., dict[str, torch.Tensor]]
    names: tuple[str, ...]


def hierarchy(group, y=None, power=1.0):
    """Normal effects of five groups, non-centered."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", 5):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with poutine.scale(scale=power), pyro.plate("data", len(group)):
        pyro.sample("y", dist.Normal(mu + tau * z[group], 1.5), obs=y)


def of_hierarchy(sites, group, y):
    mu, tau, z = sites["mu"], sites["tau"], sites["z"]
    effects = mu[:, None] + tau[:, None] * z
    log_lik = dist.Normal(effects[:, group], 1.5).log_prob(y).sum(-1)
    return {"mu": mu, "tau": tau, "z": z[:, 0], "effect": effects[:, 0], "log_lik": log_lik}


def grouped_counts(group, y=None, power=1.0):
    """Poisson counts: a Gamma rate, shared out by a simplex."""
    rate = pyro.sample("rate", dist.Gamma(3.0, 0.3))
    share = pyro.sample("share", dist.Dirichlet(torch.full((3,), 2.0)))
    with poutine.scale(scale=power), pyro.plate("data", len(group)):
        pyro.sample("y", dist.Poisson(rate * share[group]), obs=y)


def of_counts(sites, group, y):
    rate, share = sites["rate"], sites["share"]
    log_lik = dist.Poisson(rate[:, None] * share[:, group]).log_prob(y).sum(-1)
    return {"rate": rate, "first": share[:, 0], "last": share[:, 2], "log_lik": log_lik}


def mixture(zeros, y=None, power=1.0):
    """Two Gaussians; the component of a row is enumerated."""
    weight = pyro.sample("weight", dist.Beta(2.0, 3.0))
    loc = pyro.sample("loc", dist.Normal(torch.tensor([-1.5, 1.5]), 0.7).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(-0.3, 0.3))
    with poutine.scale(scale=power), pyro.plate("data", len(zeros)):
        k = pyro.sample("k", dist.Bernoulli(weight), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(loc[k.long()] + zeros, scale), obs=y)


def of_mixture(sites, zeros, y):
    weight, loc, scale = sites["weight"], sites["loc"], sites["scale"]
    parts = dist.Normal(loc[:, None], scale[:, None, None]).log_prob(y[:, None])
    log_weights = torch.stack([(-weight).log1p(), weight.log()], -1)[:, None]
    log_lik = (parts + log_weights).logsumexp(-1).sum(-1)
    columns = {"left": loc[:, 0], "right": loc[:, 1]}
    return {"weight": weight, **columns, "scale": scale, "log_lik": log_lik}


CASES = {
    "hierarchy": Case(
        hierarchy, torch.arange(20) % 5, of_hierarchy, ("mu", "tau", "z", "effect", "log_lik")
    ),
    "counts": Case(
        grouped_counts, torch.arange(9) % 3, of_counts, ("rate", "first", "last", "log_lik")
    ),
    "mixture": Case(
        mixture,
        torch.zeros(25, dtype=torch.float64),
        of_mixture,
        ("weight", "left", "right", "scale", "log_lik"),
    ),
}
#: Of each p-value: three tests of every quantity.
FALSE_ALARMS = 1e-3 / (3 * sum(len(case.names) for case in CASES.values()))


def rank(case, number, power):
    """Of the true values among the draws given one data set, 0 to RANKED."""
    pyro.set_rng_seed(number)
    nodes = poutine.trace(case.model).get_trace(case.design).nodes
    y = nodes["y"]["value"]
    nuts = ps.NUTS(partial(case.model, power=power))
    nuts.run(
        (case.design, y),
        num_samples=RANKED * EVERY,
        warmup_steps=WARMUP,
        num_chains=1,
        seed=number,
        progress=False,
    )
    assert nuts.posterior.draws.attrs["program"] == "compiled log density"
    draws = {name: values[EVERY - 1 :: EVERY] for name, values in nuts.get_samples().items()}
    truth = {name: nodes[name]["value"][None] for name in draws}
    true_values = case.quantities(truth, case.design, y)
    ranked = case.quantities(draws, case.design, y)
    return torch.stack([(ranked[name] < true_values[name]).sum() for name in case.names])


def ranks_of(name, data_sets, power=1.0):
    """`[data sets, quantities]`."""
    with warnings.catch_warnings():  # a divergence here and there; what it does to ranks counts
        warnings.simplefilter("ignore", ConvergenceWarning)
        return torch.stack([rank(CASES[name], number, power) for number in range(data_sets)])


def p_values(ranks):
    """Of one quantity's ranks, each uniform on 0 to RANKED: by their shape, in bins; by their
    place, and by their spread, of normal scores."""
    count = len(ranks)
    binned = torch.bincount(ranks * BINS // (RANKED + 1), minlength=BINS).double()
    expected = count / BINS
    shape = chi2.sf(float(((binned - expected) ** 2 / expected).sum()), BINS - 1)
    all_scores = torch.special.ndtri((torch.arange(RANKED + 1).double() + 0.5) / (RANKED + 1))
    variance = float(all_scores.square().mean())
    scores = all_scores[ranks]
    place = 2 * norm.sf(abs(float(scores.sum())) / math.sqrt(count * variance))
    squares = float(scores.square().sum()) / variance
    spread = 2 * min(chi2.cdf(squares, count), chi2.sf(squares, count))
    return {"shape": float(shape), "place": place, "spread": float(min(spread, 1.0))}


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_uniform(name):
    for quantity, ranks in zip(CASES[name].names, ranks_of(name, DATA_SETS).T, strict=True):
        values = p_values(ranks)
        assert min(values.values()) > FALSE_ALARMS, (quantity, values)


@pytest.mark.parametrize("name", CASES)
def test_a_likelihood_that_counts_too_much_is_noticed(name):
    """To the power of 1.5 when sampled, though not when simulated."""
    ranks = ranks_of(name, OF_WRONG, power=1.5)
    assert min(min(p_values(column).values()) for column in ranks.T) < FALSE_ALARMS


def test_false_alarms_are_as_rare_as_that():
    """Uniform ranks, at a rate of 1 % that can be counted."""
    source = torch.Generator().manual_seed(1)
    ranks = torch.randint(RANKED + 1, (2000, DATA_SETS), generator=source)
    found = [p_values(each) for each in ranks]
    for kind in ("shape", "place", "spread"):
        alarms = sum(values[kind] < 0.01 for values in found)
        assert alarms < 20 + 4.4 * math.sqrt(20), kind
