"""The table of `summary()` against ArviZ's."""

import dataclasses
import math
import subprocess
import sys

import arviz
import numpy as np
import pandas
import pyro
import pyro.distributions as dist
import pytest
import torch
from both_arviz import IS_1
from reference import normals

import pyro_scale as ps
from pyro_scale.posterior.predictive import in_proportion

needs_0 = pytest.mark.skipif(IS_1, reason="ArviZ 1.x has other columns")
UNKNOWN = ["ess_bulk", "ess_tail", "r_hat", "mcse_sd"]


def of_many_kinds(y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 2).double(), 1.0).to_event(2))
    pyro.deterministic("scalar", (w[0, 0] / 9).sinh())
    pyro.deterministic("ties", (2 * w).round())
    pyro.deterministic("counts", (3 * w[0]).round().long())
    pyro.deterministic("flags", w[1] > 0.7)
    pyro.deterministic("constant", torch.tensor([0.5, 4.0]).double())
    pyro.deterministic("nothing", torch.zeros(0).double())
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y)


def posterior_of(w, weights=None):
    """The posterior of given draws `[chains, draws, 3, 2]`."""
    steps = {"num_samples": 4, "warmup_steps": 0, "thinning": 1, "num_chains": len(w)}
    sampler = ps.BAOA(of_many_kinds, lr=0.1, friction=1.0, compile=False)
    result = sampler.run(torch.zeros(3).double(), seed=0, progress=False, **steps).posterior.draws
    stats = {} if weights is None else {"weight": weights}
    return ps.Posterior(dataclasses.replace(result, positions=w.flatten(2), sample_stats=stats))


def by_arviz(samples):
    """ArviZ's table of draws by site, whose constants have no R-hat and no ESS."""
    arrays = {
        k: v.byte().numpy() if v.dtype == torch.bool else v.numpy() for k, v in samples.items()
    }
    data = arviz.convert_to_dataset(arrays)
    table = arviz.summary(data)
    shape = data["w"].shape[:2]
    flat = np.concatenate([array.reshape(*shape, -1) for array in arrays.values()], -1)
    if shape[1] % 2 and shape[1] > 4 and shape[0] > 1:
        # arviz.summary takes the middle draw into the median of folded draws, arviz.rhat does not
        folded = arviz.rhat(data)
        table["r_hat"] = np.concatenate([folded[name].values.ravel() for name in arrays]).round(2)
    table.loc[(flat == flat[:1, :1]).all((0, 1)), UNKNOWN] = math.nan
    return table


@needs_0
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chains", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 3, 4, 33, 200])
def test_every_column_is_arvizs(chains, count):
    """Exactly, after rounding: numbers, ties, integers, truth values, constants."""
    posterior = posterior_of(normals(chains, count, 3, 2, seed=count).double().cumsum(1) + 2)
    expected = by_arviz(posterior.get_samples(group_by_chain=True))
    assert set(UNKNOWN) < set(expected.columns)
    pandas.testing.assert_frame_equal(posterior.summary(), expected, check_exact=True)
    one = posterior.summary(["ties"])
    pandas.testing.assert_frame_equal(one, expected.filter(like="ties", axis=0), check_exact=True)


@needs_0
@pytest.mark.filterwarnings("ignore")
def test_draws_that_are_not_numbers():
    w = normals(4, 100, 3, 2, seed=1).double()
    w[0, 3, 0, 0], w[1, 7, 1, 1] = math.nan, math.inf
    posterior = posterior_of(w)
    expected = by_arviz({"w": posterior.get_samples(group_by_chain=True)["w"]})
    pandas.testing.assert_frame_equal(posterior.summary(["w"]), expected, check_exact=True)


@needs_0
@pytest.mark.filterwarnings("ignore")
def test_weighted_draws_are_repeated_in_proportion():
    w, weights = normals(2, 100, 3, 2, seed=2).double(), torch.linspace(0.1, 1, 100).double()
    chosen = by_arviz({"w": w[:, in_proportion(weights, 100)]})
    flat, share = w.flatten(0, 1).flatten(1).numpy(), weights.repeat(2).numpy()
    chosen["mean"] = np.average(flat, axis=0, weights=share).round(3)
    variance = np.average((flat - np.average(flat, axis=0, weights=share)) ** 2, 0, share)
    chosen["sd"] = (variance**0.5).round(3)
    table = posterior_of(w, weights.expand(2, -1)).summary(["w"])
    pandas.testing.assert_frame_equal(table, chosen, check_exact=True)


@pytest.mark.slow
def test_summary_imports_no_arviz():
    heavy = "arviz", "xarray", "matplotlib", "scipy.stats"
    code = (
        "import sys, torch, pyro, pyro.distributions as dist, pyro_scale as ps\n"
        "def model(y):\n"
        "    m = pyro.sample('m', dist.Cauchy(0., 1.))\n"
        "    pyro.sample('y', dist.Normal(m, 1.), obs=y)\n"
        "few = dict(num_samples=9, warmup_steps=0, thinning=1, seed=0, progress=False)\n"
        "ps.SGLD(model, lr=.1, compile=False).run(torch.zeros(5), **few).summary()\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
