"""A loop of `step`: the heat of minibatches is measured, and warned of."""

import warnings

import pyro.distributions as dist
import pytest
import torch
from models import normal, of_rows
from reference import normals

import pyro_scale as ps
from pyro_scale.errors import BiasWarning

N, B = 480, 60
X = normals(N, 2, seed=0).float() * torch.tensor([1.0, 2.0])
Y = X @ torch.tensor([1.0, -2.0]) + 0.5 * normals(N, seed=1).float()

line = of_rows(lambda x, w: dist.Normal(x @ w, 0.5), w=normal(2))


def loop(sampler, steps, size=B):
    """Takes steps on shuffled batches; returns the messages of its warnings of bias."""
    generator = torch.Generator().manual_seed(3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        order = torch.arange(0)
        for _ in range(steps):
            if len(order) < size:
                order = torch.randperm(N, generator=generator)
            rows, order = order[:size], order[size:]
            sampler.step(X[rows], Y[rows])
    return [str(w.message) for w in told if issubclass(w.category, BiasWarning)]


def heating(sampler):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sampler.diagnostics()["minibatch_heating"]["w"]


def test_heat_is_that_of_rows_gradients():
    """SGLD's momentum-free step x + lr g + sqrt(2 lr / N) xi: noise of variance V in g, the
    gradient divided by N, adds lr V N / 2 to the temperature; V by hand."""
    sampler, lr = ps.SGLD(line, lr=1e-3, num_data=N), 1e-3
    for _ in range(63):
        sampler.step(X[:B], Y[:B])
    before = sampler.get_samples()["w"][-1]
    sampler.step(X[:B], Y[:B])
    after = sampler.get_samples()["w"][-1]
    assert not torch.equal(before, after)
    gradients = X[:B] * ((Y[:B] - X[:B] @ after) / 0.25)[:, None]
    variance = gradients.var(0) * (1 - B / N) / B
    factor = 1 + lr * N * variance.max() / 2
    assert heating(sampler) == pytest.approx(float(factor), rel=1e-4)


@pytest.mark.slow
def test_heat_is_told_once():
    sampler = ps.BAOA(line, lr=0.1, num_data=N)
    assert loop(sampler, 1000) == []
    told = loop(sampler, 1100)
    assert len(told) == 1
    assert "BAOA: minibatches raise the temperature of site 'w' to" in told[0]
    assert heating(sampler) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["small steps", "all rows", "temperature 0"])
def test_where_there_is_no_heat_nothing_is_told(case):
    sampler = ps.BAOA(
        line,
        lr=1e-4 if case == "small steps" else 0.05,
        temperature=0.0 if case == "temperature 0" else 1.0,
        num_data=N,
        init_strategy={"w": torch.tensor([[1.0, -2.0]])},
    )
    assert loop(sampler, 1030, N if case == "all rows" else B) == []
