"""Where several causes end in one symptom, the message names the one that holds."""

import dataclasses
import itertools
import math
import random

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from runs import ONE_CHAIN, QUIET
from torch.utils.data import DataLoader, IterableDataset

import pyro_scale as ps
from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.data.sources import TensorData
from pyro_scale.diagnostics.convergence import are_apart
from pyro_scale.diagnostics.divergence import explosion
from pyro_scale.errors import (
    ArgumentError,
    ConvergenceWarning,
    DataError,
    ModelError,
    NonFiniteError,
    PlateError,
    SiteError,
)
from pyro_scale.run.measurements import Measurements

N, B = 40, 20
X = torch.randn(N, 2, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([1.0, -1.0]) + 0.3 * torch.randn(N, generator=torch.Generator().manual_seed(1))
SHORT = {**ONE_CHAIN, **QUIET, "num_samples": 1}


def unusual_regression(mean=lambda x, w: x @ w, likelihood=lambda mean: dist.Normal(mean, 0.3)):
    """A regression whose mean, or likelihood, has something about it."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", likelihood(mean(x, w)), obs=y)

    return model


def run_baoa(model, data=(X, Y), lr=0.01, init_strategy=None, **how):
    start = {} if init_strategy is None else {"init_strategy": init_strategy}
    sampler = ps.BAOA(model, lr=lr, compile=False, **start)
    return sampler.run(data, **(SHORT | how))


def with_nan(values, row):
    values = values.clone()
    values[row] = math.nan
    return values


def needs_fifteen(x, w):
    if len(x) < 15:
        raise ValueError("a spline needs 15 rows")
    return x @ w


def needs_others(x, w):
    if len({round(float(value), 3) for value in x[:, 0]}) < B:
        raise ValueError("some knots are missing")
    return x @ w


ROWS = {
    "a fixed size": (lambda x, w: (x @ w).reshape(4, 5).reshape(-1), "Take sizes from the batch"),
    "at least so many": (needs_fifteen, "It runs on 40: write it for any number of rows"),
    "a multiple": (lambda x, w: (x @ w).reshape(-1, 4).reshape(-1), "It runs on 40"),
    "their values": (needs_others, "It also fails on 20 copies of those rows"),
}


@pytest.mark.parametrize("cause", ROWS)
def test_why_a_model_does_not_run_on_half_of_its_batch(cause):
    mean, told = ROWS[cause]
    with pytest.raises(PlateError, match=rf"runs on 20 rows but not on 10 .*{told}"):
        run_baoa(unusual_regression(mean), batch_size=B)


def changing(draw):
    return unusual_regression(lambda x, w: x @ w + draw())


CHANGES = {
    "a counter": lambda: float(next(COUNTER)),
    "NumPy": lambda: float(np.random.randn()),
    "random": random.random,
}
COUNTER = itertools.count()


@pytest.mark.parametrize("cause", CHANGES)
def test_what_changes_without_torch_is_not_called_dropout(cause):
    with pytest.raises(ModelError, match=r"torch's generator has not moved: .*counter.*NumPy"):
        run_baoa(changing(CHANGES[cause]))


def test_what_draws_by_torch_is_told_so():
    with pytest.raises(ModelError, match=r"differ, so something in the model draws at random"):
        run_baoa(changing(lambda: torch.randn(())))


def off_its_domain(x, w):
    return (w[0] - 50).log() + 0 * x[:, 0]


@pytest.mark.parametrize("batch_size", [None, B])
def test_nan_of_the_data_and_nan_of_the_start(batch_size):
    with pytest.raises(SiteError, match=r"NaN .*argument 0 is NaN in row 3 of the batch"):
        run_baoa(unusual_regression(), (with_nan(X, 3), Y), batch_size=batch_size)
    with pytest.raises(SiteError, match=r"NaN .*no argument .* is NaN or infinite there: start"):
        run_baoa(unusual_regression(off_its_domain), batch_size=batch_size)


def test_nan_of_a_chain_s_own_start():
    start = {"w": torch.tensor([[60.0, 0.0], [40.0, 0.0]])}
    model = unusual_regression(off_its_domain)
    with pytest.raises(SiteError, match=r"chain 1 starts; no argument of the model is NaN"):
        run_baoa(model, init_strategy=start, num_chains=2)


@pytest.mark.parametrize(
    ("method", "error"),
    [
        (
            lambda data: ps.Laplace(unusual_regression()).run(data, batch_size=B, progress=False),
            DataError,
        ),
        (
            lambda data: ps.BAOA(unusual_regression(), compile=False).run(
                data, batch_size=B, num_samples=9, progress=False
            ),
            ArgumentError,
        ),
        (
            lambda data: ps.EKF(unusual_regression()).run(data, batch_size=B, progress=False),
            NonFiniteError,
        ),
    ],
)
def test_nan_beyond_the_first_batch_is_found(method, error):
    with pytest.raises(error, match=r"argument 0 is NaN in row (33|13 of the batch)"):
        method((with_nan(X, 33), Y))


def test_rows_of_some_are_not_numbered_as_rows_of_the_data():
    log_posterior = ps.LogPosterior(unusual_regression(), N)
    start = log_posterior.init(0, X, Y)
    engine = {
        "data": TensorData((with_nan(X, range(33, N)), Y), N),
        "layout": Layout.from_tensors(start),
    }
    whole = FullDataDensity(log_posterior, **engine)
    assert "is NaN in row 33: leave" in whole.to_clean()
    assert "of those looked at: leave" in whole.of_some_rows(30, seed=0).to_clean()


def test_what_to_clean():
    assert rows.to_clean((X, {"y": Y, "group": torch.zeros(N, dtype=torch.long)})) == ""
    infinite = Y.clone()
    infinite[2] = -math.inf
    assert "argument 1['y'] is infinite in row 2 of" in rows.to_clean((X, {"y": infinite}))
    assert "argument 0 is NaN in row 105:" in rows.to_clean((with_nan(X, 5), infinite), 100, "")


def test_masked_nan_is_not_blamed_for_a_long_step():
    seen = torch.arange(N) % 7 > 0

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with (
            pyro.plate("data", N, subsample_size=len(x)),
            pyro.poutine.mask(mask=~torch.isnan(y)),
        ):
            pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y.nan_to_num())

    data = X, Y.where(seen, math.nan)
    for batch_size in (None, B):
        with pytest.raises(NonFiniteError, match=r"step size above the stable range"):
            run_baoa(model, data, lr=100.0, num_samples=50, batch_size=batch_size)
    unmasked = unusual_regression()
    with pytest.raises(NonFiniteError, match=r"batch of that step holds NaN"):
        run_baoa(unmasked, (with_nan(X, 33), Y), num_samples=50, batch_size=B)


def test_observed_nan_and_observed_values_off_the_support():
    with pytest.raises(SiteError, match=r"value is NaN; leave such rows out") as raised:
        run_baoa(unusual_regression(), (X, with_nan(Y, 3)))
    assert "-100" not in str(raised.value)
    counts = unusual_regression(likelihood=lambda mean: dist.Poisson(mean.exp()))
    with pytest.raises(SiteError, match=r"outside the support of its Poisson .*data, or choose"):
        run_baoa(counts, (X, -Y.abs().round() - 1))


def test_labels_that_are_out_of_range_are_not_called_a_dtype():
    labels = torch.where(torch.arange(N) % 5 == 0, -100, 1)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
        with pyro.plate("data", N, subsample_size=len(x)), pyro.poutine.mask(mask=y >= 0):
            pyro.sample("y", dist.Categorical(logits=x @ w), obs=y)

    with pytest.raises(SiteError, match=r"clamp labels of -100 to 0"):
        run_baoa(model, (X, labels))


def test_a_density_of_straight_pieces_is_not_called_improper():
    def model(x, y):
        w = pyro.sample("w", dist.Laplace(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Laplace(x @ w, 0.3), obs=y)

    sampler = ps.BAOA(model, lr="auto", precondition=None, compile=False)
    with pytest.raises(ArgumentError, match=r"straight pieces") as raised:
        sampler.run((X, Y), batch_size=B, **SHORT)
    assert "proper" not in str(raised.value)


def test_a_data_set_that_cannot_begin_anew():
    def batches():
        yield from ((X[i : i + B], Y[i : i + B]) for i in (0, B))

    class Once(IterableDataset):
        def __init__(self):
            self.rows = iter(zip(X, Y, strict=True))

        def __iter__(self):
            return self.rows

    for loader, told in [
        (batches(), "pass a DataLoader"),
        (DataLoader(Once(), batch_size=B), "__iter__ has to begin anew"),
    ]:
        sampler = ps.BAOA(unusual_regression(), lr=0.01, num_data=N, compile=False)
        with pytest.raises(DataError, match=told):
            sampler.run(loader, **SHORT | {"num_samples": 9})


def test_predict_names_columns_that_the_model_was_not_run_on():
    method = run_baoa(unusual_regression(), num_samples=4)
    told = r"argument 0 has rows of shape \[3\], and those that the model was run on have \[2\]"
    with pytest.raises(ArgumentError, match=told):
        method.predict(torch.ones(5, 3))


def test_frozen_chains_of_rejected_proposals():
    sampler = ps.GHMC(unusual_regression(), lr=1e3, compile=False)
    how = {"num_samples": 20, "warmup_steps": 1, "thinning": 1, "num_chains": 2, "seed": 0}
    sampler.run((X, Y), progress=False, **how)
    with pytest.warns(ConvergenceWarning, match=r"of the proposals were accepted: lower lr"):
        sampler.diagnostics()


def result_of(positions):
    """A run's result with other draws, `[chains, draws, 2]`."""
    chains, draws = positions.shape[:2]
    result = run_baoa(unusual_regression(), num_samples=draws, num_chains=chains).posterior.draws
    return dataclasses.replace(result, positions=positions)


def test_chains_apart_and_chains_on_their_way():
    noise = torch.randn(4, 400, 2, generator=torch.Generator().manual_seed(3)).double()
    places = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.double)[:, None, None]
    stay, walk = result_of(places * 5 + noise), noise.cumsum(1)
    assert are_apart(stay, "w", 2.0)
    assert not are_apart(stay, "w", 1.2)
    assert not are_apart(dataclasses.replace(stay, positions=walk), "w", 2.0)
    slow = places * 5 * torch.linspace(1.0, 0.5, 400, dtype=torch.double)[:, None] + noise
    assert not are_apart(dataclasses.replace(stay, positions=slow), "w", 2.0)


@pytest.mark.slow  # the loop of nutpie is compiled
def test_chains_in_modes_of_their_own_are_told_so():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 3.0))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(w.abs() * x[:, 0], 0.3), obs=2 * x[:, 0])

    start = {"w": torch.tensor([2.0, -2.0, 2.0, -2.0])}
    sampler = ps.NUTS(model, init_strategy=start)
    sampler.run((X, Y), num_samples=200, num_chains=4, seed=0, progress=False)
    with pytest.warns(ConvergenceWarning, match=r"R-hat .*agrees with itself.*modes"):
        sampler.diagnostics()


@pytest.mark.slow  # as above
def test_divergences_at_a_boundary_are_not_told_to_take_shorter_steps():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 3.0))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal((w + 0.1).log(), 3.0), obs=y)

    sampler = ps.NUTS(model, init_strategy={"w": torch.tensor([2.0, 2.0])})
    with pytest.warns(ConvergenceWarning, match=r"'y' is NaN there: give the latents") as told:
        sampler.run((X, Y), num_samples=200, num_chains=2, seed=1, progress=False)
    assert not any("target_accept" in str(each.message) for each in told)
    advice = {finding.check: finding.advice for finding in sampler.report().findings}
    assert "supports end there" in advice["divergences"]
    assert "num_samples=" in advice["mixing"]


def test_chains_that_run_away_uphill_are_not_told_to_take_shorter_steps():
    result = result_of(torch.full((2, 8, 2), 1e16, dtype=torch.double))
    log_joint = torch.zeros(2, 8, dtype=torch.double)
    stats = dict(result.sample_stats)
    uphill = dataclasses.replace(result, sample_stats=stats | {"lp": log_joint})
    told = explosion(uphill)
    assert "site 'w' a proper prior" in told
    assert "smaller lr" not in told
    for fallen in (-1e9, -math.inf, math.nan):
        log_joint = torch.tensor([[0.0] * 7 + [fallen]] * 2, dtype=torch.double)
        downhill = dataclasses.replace(result, sample_stats=stats | {"lp": log_joint})
        assert "pass a smaller lr" in explosion(downhill)
    of_approximation = dataclasses.replace(result, sample_stats={}, measurements=Measurements())
    assert "pass a smaller lr" in explosion(of_approximation)
