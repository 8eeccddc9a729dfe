"""Runs whose draws are in a store next to the same ones in memory."""

import numpy as np
import pandas
import pyro
import pyro.distributions as dist
import pytest
import torch
from both_arviz import groups_of
from reference import double, normals
from warned import quiet

import pyro_scale as ps

SIZE = 13
X = normals(SIZE, 2, seed=1)
Y = X @ torch.tensor([1.0, -0.5], dtype=torch.float64) + 0.7 * normals(SIZE, seed=2)
QUIET = {"progress": False, "seed": 3}


#: Every state is a draw, from the first.
HOW = {"num_samples": 31, "warmup_steps": 0, "thinning": 1, "num_chains": 3, "batch_size": 5}


def regression(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2).to(x), 1.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(torch.zeros(()).to(x), 0.5))
    pyro.deterministic("twice", 2 * w)
    with pyro.plate("data", len(x)):
        mean = pyro.deterministic("mean", x @ w)
        return pyro.sample("y", dist.Normal(mean, s), obs=y)


def of_two_params(x, y):
    scale = pyro.param("scale", double(0.7)[0], constraint=dist.constraints.positive)
    shift = pyro.param("shift", double(0.3, 0.1))
    w = pyro.sample("w", dist.Normal(shift, 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, scale), obs=y)


def own_subsamples(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(double(0.0)[0], 0.5))
    with pyro.plate("data", len(x), subsample_size=5) as i:
        pyro.sample("y", dist.Normal(x[i] @ w, s), obs=y[i])


def mixture(y):
    """An enumerated site."""
    p = pyro.sample("p", dist.Beta(double(2.0)[0], 2.0))
    m = pyro.sample("m", dist.Normal(double(-1.0, 1.0), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(p), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(m[z.long()], 0.5), obs=y)


def fitted(model=regression, data=(X, Y), method=ps.BAOA, lr=0.05, **kwargs):
    names = ("compile", "precondition", "control_variates", "temperature")
    options = {name: kwargs.pop(name) for name in names if name in kwargs}
    return method(model, lr=lr, **{"compile": False, **options}).run(
        data, **{**HOW, **QUIET, **kwargs}
    )


def ended_by(error, match, model=regression, data=(X, Y), **kwargs):
    """(A sampler whose run raises such an error, the error)."""
    sampler = ps.BAOA(model, lr=0.05, compile=False)
    with pytest.raises(error, match=match) as raised:
        sampler.run(data, **{**HOW, **QUIET, **kwargs})
    return sampler, raised.value


def draws_of(fit, **kwargs):
    return fit.get_samples(**{"group_by_chain": True, **kwargs})


def same(actual, expected):
    """Dicts of tensors, equal bit for bit."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert actual[name].shape == value.shape, name
        assert torch.equal(actual[name].nan_to_num(7.5), value.nan_to_num(7.5)), name


def held_of(fit, whole):
    """The number of draws of a chain in a fit, which are the first ones of a whole run."""
    held = draws_of(fit)
    count = held["w"].shape[1]
    near(held, {name: value[:, :count] for name, value in draws_of(whole).items()})
    assert count > 0
    return count


def near(actual, expected):
    """Equal to rounding: what is computed of other draws at once may round otherwise."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        rtol = 1e-11 if value.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(actual[name], value, rtol=rtol, atol=rtol, equal_nan=True)


def unconstrained(fit):
    """Unconstrained draws by site, `[chains, draws, ...]`, wherever they are."""
    result = fit.posterior.draws
    chains, draws = result.positions.shape[:2]
    found = result.positions[torch.arange(chains)[:, None], torch.arange(draws)]
    assert found.dtype == result.layout.dtype
    return result.layout.unflatten(found)


def predicted(fit, arguments, **kwargs):
    pyro.set_rng_seed(0)
    return fit.predict(*arguments, **kwargs)


def same_draws(stored, inside):
    """In all the ways that they are asked for."""
    draws = inside.posterior.draws.positions.shape[1]
    for how in ({}, {"num_samples": 1}, {"num_samples": draws // 2}, {"num_samples": draws}):
        near(draws_of(stored, **how), draws_of(inside, **how))
        near(stored.get_samples(**how), inside.get_samples(**how))
    same(unconstrained(stored), unconstrained(inside))
    same(stored.params, inside.params)


def same_tables(stored, inside):
    for table in ("summary", "diagnostics"):
        pandas.testing.assert_frame_equal(*(quiet(getattr(f, table)) for f in (stored, inside)))


def same_predictions(stored, inside, arguments):
    near(*(predicted(fit, arguments) for fit in (stored, inside)))
    near(*(predicted(fit, arguments, num_samples=7, batch_size=2) for fit in (stored, inside)))


def same_likelihoods(stored, inside):
    near(stored.log_likelihood(), inside.log_likelihood())
    if inside.posterior.draws.positions.shape[:2].numel() >= 20:
        one, other = (quiet(fit.loo) for fit in (stored, inside))
        assert str(one) == str(other)
        torch.testing.assert_close(
            one.pareto_k, other.pareto_k, rtol=1e-6, atol=1e-6, equal_nan=True
        )


def same_moments(stored, inside):
    one, other = stored.moments(), inside.moments()
    assert list(one) == list(other)
    for name, expected in other.items():
        for part, value in zip(one[name], expected, strict=True):
            torch.testing.assert_close(part, value, rtol=1e-11, atol=1e-11, equal_nan=True)


def same_trees(actual, expected):
    """ArviZ's groups: names, dims, coords and values; the log likelihood's to rounding."""
    assert groups_of(actual) == groups_of(expected)
    for group in groups_of(expected):
        one, other = actual[group].load(), expected[group]
        assert set(one.data_vars) == set(other.data_vars), group
        for name, array in other.variables.items():
            rtol = 1e-5 if array.dtype == np.float32 else 1e-11
            np.testing.assert_allclose(one[name], array, rtol=rtol, atol=rtol)
            assert one[name].dims == array.dims, name
            assert one[name].dtype == array.dtype, name
        assert without_times(one) == without_times(other), group


def without_times(dataset):
    return {key: value for key, value in dataset.attrs.items() if not key.endswith("_time")}


def outcome(fit):
    """What a run leaves behind, as tensors."""
    if fit.posterior.draws.online is None:
        return dict(draws_of(fit))
    return {
        f"{name} {part}": value
        for name, moments in fit.moments().items()
        for part, value in moments._asdict().items()
    }


def same_outcome(fit, whole):
    """Bit for bit, but for what is added up: its rounding is that of blocks as they came."""
    near(outcome(fit), outcome(whole))
    same(fit.posterior.draws.sample_stats, whole.posterior.draws.sample_stats)
    same(fit.params, whole.params)
    if fit.posterior.draws.online is None:
        same(unconstrained(fit), unconstrained(whole))
