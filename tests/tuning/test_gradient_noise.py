"""Gradients of rows one by one: those of rows in their batches, wherever rows are taken alone."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import of_network
from reference import close, normals
from runs import EVERY_STEP, QUIET
from torch import nn
from torch.utils import _pytree as pytree

import pyro_scale as ps
from pyro_scale.curvature.ggn import row_moments
from pyro_scale.tuning import gradient_noise
from pyro_scale.tuning.gradient_noise import row_gradients, takes_single_rows

pytestmark = pytest.mark.usefixtures("float64")

N, B = 160, 80
X = normals(N, 3, seed=1)
Y = (X.sum(1) > 0).long()
HOW = {**EVERY_STEP, **QUIET, "batch_size": B, "num_samples": 12, "num_chains": 2}


def network_model():
    torch.manual_seed(0)
    net = ps.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())

    return of_network(net, lambda f: dist.Categorical(logits=f))


def another_alone(x, y):
    """As where `squeeze` or `std` makes something else of one row."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        logits = x @ w if len(x) > 1 else x @ w + 1.0
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y.double())


def squares_of_rows(x, y):
    """By hand: a row's log likelihood is normal, so that its gradient is (y - mu)."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=x[:, 0])


def used_twice(x, y):
    """`v` has no operation that each row has a part of its own in, and `w` has."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    v = pyro.sample("v", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)), pyro.poutine.scale(scale=0.5):
        logits = (x @ w) * (x @ v).exp() + x.square() @ v
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y.double())


def noise_run(model, batch_size=B, **others):
    how = {**HOW, "batch_size": batch_size}
    return ps.SGLD(model, lr=1e-14, compile=False, **others).run((X, Y), **how)


@pytest.mark.parametrize("others", [{}, {"control_variates": True}])
def test_alone_they_are_what_they_are_in_a_batch(others):
    problem = noise_run(network_model(), **others)._last.plan.problem
    at, batches = problem.positions, [[((X[:B], Y[:B]), None)], [((X[B:], Y[B:]), None)]]
    density = problem.engine.density
    alone, together = (
        row_gradients(problem, density, at, batches, singly) for singly in (True, False)
    )
    assert takes_single_rows(problem, at[0], (X[:B], Y[:B]))
    assert alone.shape == (2, B, 26)
    close(alone, together, 1e-10)
    a, batch = problem.engine.layout.unflatten(at[1]), batches[1][0][0]
    if not others:
        summed = problem.log_posterior.grad(a, batch)[0]
        prior = {name: -value for name, value in a.items()}  # of standard normals
        whole = {name: (summed[name] - prior[name]) * B / N for name in a}
        close(alone[1].sum(0), problem.engine.layout.flatten(whole), 1e-9)


def test_rows_that_are_others_alone_are_taken_in_batches():
    sampler = noise_run(another_alone)
    problem = sampler._last.plan.problem
    assert not takes_single_rows(problem, problem.positions[0], (X[:B], Y[:B]))
    w = problem.positions[0]
    mine = (Y.double() - torch.sigmoid(X @ w))[:, None] * X
    found = row_gradients(problem, problem.engine.density, w[None], [[((X[:B], Y[:B]), None)]])
    close(found[0], mine[:B], 1e-10)


def test_the_variance_is_that_of_some_rows_of_a_batch():
    """With all rows of one batch in place of 64 of them, it would be another number."""
    sampler = noise_run(squares_of_rows)
    batches = sampler._last.plan.problem.batches(2, "shuffle")
    rows = batches.take(12, 24)  # after the 12 steps of the run
    indices = pytree.tree_leaves(rows)[0]
    seen = X[:, 0][indices[:, :, :64]]  # [chains, steps, 64]
    expected = seen.var(-1).mean() / B * (1 - B / N)
    close(sampler.posterior.draws.measurements.gradient_noise.variance, expected[None], 1e-9)


@pytest.mark.parametrize("model", [network_model(), used_twice])
def test_moments_are_those_of_rows(model):
    problem = noise_run(model)._last.plan.problem
    params = problem.engine.layout.unflatten(problem.positions[1])
    rows = problem.log_posterior.row_gradients(params, (X[:B], Y[:B]))
    sums, squares = row_moments(problem.log_posterior, params, (X[:B], Y[:B]))
    for name, each in rows.items():
        close(sums[name], each.sum(0), 1e-11)
        close(squares[name], each.square().sum(0), 1e-11)


@pytest.mark.parametrize("size", [B, 24])
@pytest.mark.parametrize("model", [network_model(), used_twice])
def test_a_large_models_noise_is_that_of_rows_one_by_one(model, size, monkeypatch):
    """Where a draw's rows fill a block of memory, their own gradients are not formed; smaller
    batches are put together."""
    noise = noise_run(model, batch_size=size).posterior.draws.measurements.gradient_noise
    monkeypatch.setattr(gradient_noise, "NUMBERS_AT_ONCE", 1)
    formed = []
    monkeypatch.setattr(gradient_noise, "row_gradients", lambda *args: formed.append(args))
    found = noise_run(model, batch_size=size).posterior.draws.measurements.gradient_noise
    assert not formed
    close(found.variance / noise.variance, torch.ones_like(noise.variance), 1e-10)
    close(found.inflation / noise.inflation, torch.ones_like(noise.variance), 1e-10)
