"""What a finished run gives: draws, tables, predictions and ArviZ's groups, against known values.

Statistical tests have fixed seeds; were those drawn anew, a z beyond 4.4 would come once in
90,000 comparisons.
"""

import html
import json
import math
import warnings

import arviz
import matplotlib as mpl
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import stored
import torch
from both_arviz import IS_1, compared, dataset_of, elpd_of, groups_of, identical
from densities import normal_mean
from models import normal, of_rows
from pyro import poutine
from reference import close_to_largest, double, normals, z_of_variance
from repetitions import long_but
from row_datasets import RowByName
from stored import mixture, own_subsamples, regression
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, ModelError, PlateError, PyroScaleError
from pyro_scale.posterior import export

mpl.use("Agg")
QUIET = {"progress": False}


def close_arrays(actual, expected, rtol=1e-12):
    assert np.shape(actual) == np.shape(expected)
    close_to_largest(torch.as_tensor(np.array(actual)), np.array(expected), rtol)


SIZE = 12
X = normals(SIZE, 2, seed=1)
Y = X @ double(1.0, -0.5) + 0.7 * normals(SIZE, seed=2)


def fitted(model=regression, data=(X, Y), **kwargs):
    short = {"num_samples": 10, "batch_size": None, "seed": 0, "lr": 0.1}
    return stored.fitted(model, data, **{**short, **kwargs})


@pytest.mark.parametrize("bare", [True, False])
def test_draws_are_constrained_positions_in_memory_of_their_own(bare):
    """Where all supports are all reals, the model is not run for them."""
    calls = []

    def model(x, y):
        calls.append(len(x))
        a = pyro.sample("a", dist.Normal(torch.zeros(2, 3).double(), 1.0).to_event(2))
        family = dist.Normal if bare else dist.LogNormal
        b = pyro.sample("b", family(torch.zeros(()).double(), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ a.sum(1)[:2] + b, 1.0), obs=y)

    fit = fitted(model, lr=0.01)
    positions, before = fit.posterior.draws.positions.clone(), len(calls)
    expected = {"a": positions[..., :6].unflatten(-1, (2, 3)), "b": positions[..., 6]}
    expected["b"] = expected["b"] if bare else expected["b"].exp()
    for _ in range(2):
        for name, value in fit.get_samples().items():
            assert torch.equal(value, expected[name].flatten(0, 1))
            value.zero_()  # which is the caller's
        for name, value in fit.get_samples(group_by_chain=True).items():
            assert torch.equal(value, expected[name])
    fit.posterior.draws.samples["a"].zero_()
    assert torch.equal(fit.posterior.draws.positions, positions)
    assert not bare or len(calls) == before


class LargeTensors(TorchDispatchMode):
    """Lists the shapes of new storages of at least so many bytes."""

    def __init__(self, least):
        super().__init__()
        self.least, self.shapes = least, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {t.untyped_storage().data_ptr() for t in leaves_of((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in leaves_of(out):
            storage = tensor.untyped_storage()
            if storage.nbytes() >= self.least and storage.data_ptr() not in inputs:
                self.shapes.append(list(tensor.shape))
        return out


def leaves_of(tree):
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def test_draws_are_in_memory_once():
    """Draws are written into one tensor, and neither measurements nor `get_samples` need another
    one of this size, besides what `get_samples` returns."""
    size, draws, chains = 50_000, 120, 2

    model = of_rows(lambda w: dist.Normal(w[0], 1.0), w=normal(size))
    run = {"num_samples": draws // chains, "warmup_steps": 1, "thinning": 1, "seed": 0, **QUIET}
    with LargeTensors(4 * draws * size) as large:
        sgld = ps.SGLD(model, lr=1e-3, compile=False)
        fit = sgld.run(torch.zeros(10), num_chains=chains, **run)
    assert large.shapes == [[chains, draws // chains, size]]
    with LargeTensors(4 * draws * size) as large:
        samples = fit.get_samples()["w"]
    assert large.shapes == [list(samples.shape)]


def log_density(samples, x=X, y=Y):
    """The log likelihood of each row at each draw, by hand."""
    mean, s = samples["w"] @ x.T, samples["s"][..., None]
    return -0.5 * ((y - mean) / s) ** 2 - s.log() - 0.5 * math.log(2 * math.pi)


# ------------------------------------------------------------------ get_samples


def test_draws_are_the_same_with_and_without_chains():
    fit = fitted()
    flat, grouped = fit.get_samples(), fit.get_samples(group_by_chain=True)
    assert list(flat) == list(grouped) == ["w", "s", "twice"]
    for name, value in grouped.items():
        assert value.shape[:2] == (3, 10)
        assert torch.equal(value.flatten(0, 1), flat[name])
    close_arrays(flat["twice"], 2 * flat["w"])
    assert "mean" not in flat  # in the data's plate: it belongs to predict


@pytest.mark.parametrize(
    ("wanted", "index"),
    [(1, [0]), (4, [0, 3, 6, 9]), (3, [0, 4, 9]), (10, list(range(10)))],
)
def test_fewer_draws_are_evenly_spaced(wanted, index):
    fit = fitted()
    close_arrays(
        fit.get_samples(wanted, group_by_chain=True)["w"],
        fit.get_samples(group_by_chain=True)["w"][:, index],
    )
    one = fitted(num_chains=1)
    close_arrays(one.get_samples(wanted)["s"], one.get_samples()["s"][index])


@pytest.mark.parametrize("wanted", [0, 31, 2.0, -1, True])
def test_more_draws_than_there_are_or_none_are_refused(wanted):
    with pytest.raises(ArgumentError, match=rf"num_samples={wanted}: pass an int from 1 to 30"):
        fitted().get_samples(wanted)


def test_get_samples_gives_a_dict_of_ones_own():
    fit = fitted()
    fit.get_samples().clear()
    assert fit.get_samples()


@pytest.mark.long
def test_constrained_sites_are_in_their_own_terms():
    """In unconstrained space a LogNormal is Gaussian, which BAOA samples exactly: a Jacobian
    left out, or counted twice, would move the mean by the variance."""

    def model():
        pyro.factor("no data", torch.zeros(()))
        one = torch.ones(3000, dtype=torch.float64)
        pyro.sample("s", dist.LogNormal(one, 0.5).to_event(1))
        pyro.sample("p", dist.Dirichlet(one[:3]))
        pyro.sample("u", dist.Uniform(2 * one[0], 5.0))
        pyro.sample("L", dist.LKJCholesky(3, torch.ones((), dtype=torch.float64)))

    fit = ps.BAOA(model, lr=0.3)
    fit.run(None, num_samples=8, warmup_steps=60, thinning=25, num_chains=2, seed=3, **QUIET)
    samples = fit.get_samples()
    logs = samples["s"].log()
    assert abs(z_of_variance(logs - 1, 0.25)) < 4.4
    assert abs(logs.mean() - 1) < 4.4 * 0.5 / logs.numel() ** 0.5
    close_arrays(samples["p"].sum(-1), torch.ones(16))
    assert ((samples["u"] > 2) & (samples["u"] < 5)).all()
    close_arrays(samples["L"].square().sum(-1), torch.ones(16, 3))
    assert torch.equal(samples["L"], samples["L"].tril())


# ------------------------------------------------------------------ summary, diagnostics


def of_one_site(*shape):
    def model(x):
        big = pyro.sample("big", dist.Normal(torch.zeros(shape).double(), 1.0).to_event(2))
        pyro.sample("small", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(big.mean(), 1.0), obs=x[:, 0])

    return model


wide = of_one_site(11, 10)


@pytest.mark.slow
def test_summary_has_large_sites_in_one_row():
    fit = fitted(wide, X, num_samples=50)
    table, whole = fit.summary(), fit.summary(["big"])
    assert len(whole) == 110
    assert list(table.index) == ["big [11x10], worst", "small[0]", "small[1]"]
    worst = table.loc["big [11x10], worst"]
    assert worst["r_hat"] == whole["r_hat"].max() > whole["r_hat"].min()
    for column in ("ess_bulk", "ess_tail"):
        assert worst[column] == whole[column].min() < whole[column].max()
    assert math.isnan(worst["mean"])
    small = fit.get_samples()["small"]
    assert table.loc["small[1]", "mean"] == pytest.approx(float(small[:, 1].mean()), abs=6e-4)
    assert table.loc["small[1]", "sd"] == pytest.approx(float(small[:, 1].std()), abs=6e-4)
    assert list(fit.summary(var_names=["small"]).index) == ["small[0]", "small[1]"]


def test_summary_refuses_unknown_names():
    with pytest.raises(ArgumentError, match=r"no site 'nothing'.*'w'"):
        fitted().summary(["nothing"])
    for names in ("w", 5, {"w"}):
        with pytest.raises(ArgumentError, match=r"var_names=.*pass a list"):
            fitted().summary(names)


@pytest.mark.slow
def test_diagnostics_has_the_worst_of_each_latent_site():
    fit = fitted(wide, X, num_samples=50)
    table = fit.diagnostics()
    posterior = dataset_of(fit.to_arviz().posterior)[["big", "small"]]
    assert list(table.index) == ["big", "small"]
    for name in table.index:
        r_hat = float(arviz.rhat(posterior)[name].max())
        assert table.loc[name, "r_hat"] == pytest.approx(r_hat, rel=1e-12)
        for kind in ("bulk", "tail"):
            least = float(arviz.ess(posterior, method=kind)[name].min())
            assert table.loc[name, f"ess_{kind}"] == pytest.approx(least, rel=1e-12)
    assert "chain_correlation" not in table
    assert table.attrs["num_data"] == SIZE


@pytest.mark.slow
@pytest.mark.parametrize("stored", long_but([False, True], True))
def test_of_very_large_sites_some_elements_are_looked_at(stored, tmp_path):
    """200 of them, the first and the last among them."""
    store = tmp_path / "draws.zarr" if stored else None
    fit = fitted(of_one_site(21, 20), X, num_samples=50, store=store)
    draws = fit.get_samples(group_by_chain=True)["big"].flatten(2)
    places = [round(419 * i / 199) for i in range(200)]
    posterior = arviz.convert_to_dataset({"big": draws[..., places].numpy()})
    table, summary = fit.diagnostics(), fit.summary()
    r_hat = float(arviz.rhat(posterior).big.max())
    assert table.loc["big", "r_hat"] == pytest.approx(r_hat, rel=1e-12)
    for kind in ("bulk", "tail"):
        least = float(arviz.ess(posterior, method=kind).big.min())
        assert table.loc["big", f"ess_{kind}"] == pytest.approx(least, rel=1e-12)
        assert round(summary.loc["big [21x20], worst", f"ess_{kind}"]) == round(least)


def of_shared_batches(temperature, share=True):
    """Three chains from one start."""
    start = {"w": torch.ones(3, 2).double(), "s": torch.ones(3).double()}
    fit = ps.SGLD(regression, lr=0.01, temperature=temperature, init_strategy=start)
    how = {**stored.HOW, "batch_size": 3, "num_samples": 60, "seed": 0, **QUIET}
    fit.run((X, Y), share_batches=share, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the noise of batches
        return fit.diagnostics(), fit.get_samples(group_by_chain=True)


@pytest.mark.slow
def test_chains_that_share_batches_are_found_out():
    """By the largest mean correlation of a pair of chains; without noise of their own, 1."""
    table, draws = of_shared_batches(temperature=1.0)
    assert table.attrs["share_batches"] == 1
    for name, value in draws.items():
        elements = value.reshape(3, 60, -1).unbind(-1)
        pairs = [(np.corrcoef(chains).sum() - 3) / 6 for chains in elements]
        if name in table.index:
            assert table.loc[name, "chain_correlation"] == pytest.approx(max(pairs), rel=1e-9)
    close_arrays(of_shared_batches(temperature=0.0)[0]["chain_correlation"], [1.0, 1.0])
    assert "chain_correlation" not in of_shared_batches(temperature=1.0, share=False)[0]


# ------------------------------------------------------------------ log likelihood


def parameters():
    w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
    return w, pyro.sample("s", dist.LogNormal(torch.zeros(()).double(), 0.5))


def pre_scaled(x, y):
    w, s = parameters()
    with pyro.plate("data", SIZE, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ w, s), obs=y)


def event_rows(x, y):
    w, s = parameters()
    pyro.sample("y", dist.Normal(x @ w, s).to_event(1), obs=y)


class AnyOrder:
    """A batch sampler that nobody knows, with a ragged tail and randomness of its own."""

    source = np.random.default_rng(0)

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([part.tolist() for part in np.array_split(self.source.permutation(SIZE), 3)])


DATASET = TensorDataset(X, Y)
NAMED = RowByName(x=X, y=Y)
FITS = {
    "whole": lambda: fitted(),
    "minibatch": lambda: fitted(batch_size=5),
    "by name": lambda: fitted(data={"y": Y, "x": X}, batch_size=5),
    "loader": lambda: fitted(data=DataLoader(DATASET, 5, shuffle=True, drop_last=True)),
    "by index": lambda: fitted(data=DataLoader(NAMED, 5, shuffle=True)),
    "stream": lambda: fitted(data=DataLoader(NAMED, batch_sampler=[range(7), range(7, 12)])),
    "own order": lambda: fitted(data=DataLoader(NAMED, batch_sampler=AnyOrder())),
    "own subsamples": lambda: fitted(own_subsamples),
    "scaled plate": lambda: fitted(pre_scaled, batch_size=5),
    "to_event": lambda: fitted(event_rows, batch_size=5),
}


@pytest.mark.parametrize("kind", FITS)
def test_log_likelihood_is_a_value_a_row_in_the_data_sets_order(kind):
    """Unscaled, whoever multiplied by N/B; and so is observed_data."""
    fit = FITS[kind]()
    values = fit.log_likelihood()
    assert list(values) == ["y"]
    close_arrays(values["y"], log_density(fit.get_samples()))
    idata = fit.to_arviz()
    close_arrays(idata.log_likelihood.y.values.reshape(30, SIZE), values["y"])
    close_arrays(idata.observed_data.y.values, Y)


@pytest.mark.parametrize(
    "data",
    [
        (X[:4], Y[:4]),
        {"y": Y[:4], "x": X[:4]},
        DataLoader(TensorDataset(X[:4], Y[:4]), 3, shuffle=True),
    ],
    ids=["tensors", "dict", "loader"],
)
def test_log_likelihood_of_other_data(data):
    fit = fitted(batch_size=5)
    close_arrays(fit.log_likelihood(data)["y"], log_density(fit.get_samples(), X[:4], Y[:4]))
    idata = fit.to_arviz(data=data)
    close_arrays(idata.observed_data.y.values, Y[:4])
    assert idata.log_likelihood.sizes["data"] == 4


WEIGHTS = torch.linspace(0.5, 2.0, SIZE).double()
MASK = torch.arange(SIZE) % 3 > 0


def test_log_likelihood_keeps_the_users_scale_and_mask_by_site():
    def model(x, y, weights, mask):
        w, s = parameters()
        with pyro.plate("data", len(x)):
            with poutine.scale(scale=weights), poutine.mask(mask=mask):
                pyro.sample("y", dist.Normal(x @ w, s), obs=y)
            pyro.sample("z", dist.Normal(x, s).to_event(1), obs=x)
            pyro.factor("soft", 0.1 * (x @ w))
        pyro.sample("known", dist.Normal(s, 1.0), obs=double(1.0)[0])

    fit = fitted(model, (X, Y, WEIGHTS, MASK), batch_size=5)
    samples, values = fit.get_samples(), fit.log_likelihood()
    close_arrays(values["y"], log_density(samples) * WEIGHTS * MASK)
    s = samples["s"][:, None]
    close_arrays(values["z"], (-2 * s.log() - math.log(2 * math.pi)).expand(30, SIZE))
    close_arrays(values["soft"], 0.1 * samples["w"] @ X.T)
    assert "known" not in values


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 5])
def test_enumerated_mixtures_are_summed_out(batch_size):
    fit = fitted(mixture, Y, batch_size=batch_size, num_samples=400, lr=0.05)
    samples, values = fit.get_samples(), fit.log_likelihood()
    weights = torch.stack([1 - samples["p"], samples["p"]], 1).log()
    parts = dist.Normal(samples["m"][:, :, None], 0.5).log_prob(Y) + weights[:, :, None]
    assert set(samples) == {"p", "m"}
    close_arrays(values["y"], parts.logsumexp(1), rtol=1e-11)
    drawn = fit.predict(Y)  # the second moment and the weight: E z = p, E y^2 = 1/4 + E m_z^2
    assert set(drawn) == {"y", "z"} or set(drawn) == {"y"}
    p, m = samples["p"], samples["m"]
    expected = 0.25 + (1 - p) * m[:, 0] ** 2 + p * m[:, 1] ** 2
    error = drawn["y"].square().mean(1) - expected
    assert abs(error.mean()) < 4.4 * error.std() / len(error) ** 0.5
    assert fit.to_arviz().log_likelihood.y.dims == ("chain", "draw", "data")


# ------------------------------------------------------------------ predict


def test_predictions_have_the_exact_predictive_moments():
    """Three rows and precision 1 + 3 * 4 = 13: mean 12/13 of the data's, variance 1/13 + 1/4;
    two new rows share their draw of w, so that they covary by 1/13."""
    y = normals(3, 2000, seed=4)
    fit = ps.BAOA(normal_mean(sd=1.0, noise=0.5), lr=0.3)
    fit.run(y, num_samples=8, num_chains=1, warmup_steps=80, thinning=25, seed=1, **QUIET)
    torch.manual_seed(0)
    drawn = fit.predict(torch.zeros(2, 2000).double())["y"]
    assert drawn.shape == (8, 2, 2000)
    centered = drawn - 12 / 13 * y.mean(0)
    variance = 1 / 13 + 1 / 4
    for row in (0, 1):
        assert abs(z_of_variance(centered[:, row], variance)) < 4.4
        assert abs(centered[:, row].mean()) < 4.4 * (variance / 16000) ** 0.5
    product = (centered[:, 0] * centered[:, 1]).flatten()
    assert abs(product.mean() - 1 / 13) < 4.4 * product.std() / 16000**0.5
    within = drawn - fit.get_samples()["w"][:, None]
    assert abs(z_of_variance(within, 0.25)) < 4.4


def test_predict_returns_what_follows_the_rows():
    fit = fitted(batch_size=5)
    w = fit.get_samples()["w"]
    drawn = fit.predict(X[:4])
    assert set(drawn) == {"y", "mean"}
    close_arrays(drawn["mean"], w @ X[:4].T)
    assert drawn["y"].shape == (30, 4)
    assert not torch.equal(fit.predict(X[:4])["y"], drawn["y"])  # drawn anew
    with_y = fit.predict(X[:4], Y[:4])["y"]
    assert not torch.equal(with_y, Y[:4].expand(30, 4))
    close_arrays(fit.predict(x=X[:4])["mean"], drawn["mean"])
    close_arrays(fit.predict(X[:4], y=None)["mean"], drawn["mean"])


def test_predict_is_ruled_by_torchs_generator():
    fit = fitted()
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(fit.predict(X)["y"])
    assert torch.equal(*draws)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, SIZE, 100])
def test_predict_in_batches_is_predict(batch_size):
    """Batches of 2 hold as many rows as w has elements, which must not be taken for rows."""
    fit = fitted()
    names = ["mean", "w", "twice", "y"]
    whole = fit.predict(X, return_sites=names)
    parts = fit.predict(X, batch_size=batch_size, return_sites=names)
    for name in names[:3]:
        close_arrays(parts[name], whole[name])
    assert parts["y"].shape == (30, SIZE)


def test_predict_thins_and_chooses_sites():
    fit = fitted()
    drawn = fit.predict(X, num_samples=3, return_sites=["w"])
    assert list(drawn) == ["w"]
    close_arrays(drawn["w"], fit.get_samples()["w"][[0, 14, 29]], rtol=1e-12)
    with pytest.raises(ArgumentError, match=r"no site 'q'; the model has .*'y'"):
        fit.predict(X, return_sites=["q"])
    with pytest.raises(ArgumentError, match="return_sites='y': pass a list of sites' names"):
        fit.predict(X, return_sites="y")
    for wanted in (0, 31):
        with pytest.raises(ArgumentError, match="from 1 to 30"):
            fit.predict(X, num_samples=wanted)


def test_pyros_predictive_takes_the_samples():
    fit = fitted()
    samples = fit.get_samples()
    drawn = pyro.infer.Predictive(regression, samples)(X)
    close_arrays(drawn["mean"], samples["w"] @ X.T)
    z = (drawn["y"] - samples["w"] @ X.T) / samples["s"][:, None]
    assert abs(z_of_variance(z, 1.0)) < 4.4


# ------------------------------------------------------------------ ArviZ


def grouped_model(x, group, y=None):
    m = pyro.sample("m", dist.Normal(torch.zeros(()).double(), 1.0))
    with pyro.plate("groups", 4):
        a = pyro.sample("a", dist.Normal(m, 1.0))
        b = pyro.sample("b", dist.Normal(torch.zeros(4, 3).double(), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        mean = a[group] + b[group, 0] * x[:, 0]
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        pyro.sample("v", dist.Normal(mean[:, None], 1.0).expand([len(x), 2]).to_event(1), obs=x)


def test_groups_dims_coords_and_attrs():
    fit = ps.SGHMC(grouped_model, lr=0.05, friction=2.0, temperature=0.5)
    data = (X, torch.arange(SIZE) % 4, Y)
    settings = {"num_samples": 6, "warmup_steps": 4, "thinning": 2, "num_chains": 3, "seed": 9}
    fit.run(data, batch_size=5, sampling="replacement", **settings, **QUIET)
    idata = fit.to_arviz(posterior_predictive=True)
    assert groups_of(idata) == {
        "posterior",
        "sample_stats",
        "observed_data",
        "log_likelihood",
        "posterior_predictive",
    }
    lead = ("chain", "draw")
    assert idata.posterior.m.dims == lead
    assert idata.posterior.a.dims == (*lead, "groups")
    assert idata.posterior.b.dims == (*lead, "groups", "b_dim_1")
    for group in (idata.log_likelihood, idata.posterior_predictive):
        assert group.y.dims == (*lead, "data")
    assert idata.observed_data.y.dims == ("data",)
    assert idata.observed_data.v.dims == ("data", "v_dim_1")
    assert idata.log_likelihood.v.dims == (*lead, "data")
    for name, size in {"chain": 3, "draw": 6, "groups": 4}.items():
        assert idata.posterior[name].values.tolist() == list(range(size))
    assert idata.observed_data["data"].values.tolist() == list(range(SIZE))
    close_arrays(idata.posterior.b.values, fit.get_samples(group_by_chain=True)["b"])
    assert set(idata.sample_stats) == {"lp", "lr", "friction", "mass", "temperature", "step"}
    assert np.all(idata.sample_stats.friction.values == 2.0)
    assert np.all(idata.sample_stats.temperature.values == 0.5)
    assert idata.sample_stats.step.values.tolist() == [[5, 7, 9, 11, 13, 15]] * 3
    for attrs in (idata.attrs, idata.posterior.attrs):
        known = {
            "method": "SGHMC",
            "lr": 0.05,
            "friction": 2.0,
            "temperature": 0.5,
            "num_data": SIZE,
            "batch_size": 5,
            "seed": 9,
            "num_samples": 6,
            "warmup_steps": 4,
            "thinning": 2,
            "num_chains": 3,
            "sampling": "replacement",
            "torch_version": torch.__version__,
            "pyro_version": pyro.__version__,
            "inference_library": "pyro_scale",
        }
        assert {key: attrs[key] for key in known} == known
        assert attrs["sampling_time"] > 0


def test_lp_is_the_log_joint_in_unconstrained_space_at_the_state_before():
    """On the whole data, so exactly: the estimate at step k + 1 is of draw k."""
    fit = fitted()
    samples = fit.get_samples(group_by_chain=True)
    log_s = samples["s"].log()
    prior = dist.Normal(0.0, 1.0).log_prob(samples["w"]).sum(-1)
    prior = prior + dist.Normal(double(0.0)[0], 0.5).log_prob(log_s)  # LogNormal and Jacobian
    expected = prior + log_density(samples).sum(-1)
    lp = torch.as_tensor(fit.to_arviz().sample_stats.lp.values)
    close_arrays(lp[:, 1:], expected[:, :-1], rtol=1e-7)


def test_lp_of_a_minibatch_is_a_total_over_the_data():
    """Where chains stand still, its mean over an epoch of three batches is the whole's."""
    still = {"method": ps.SGLD, "lr": 1e-12, "temperature": 0}
    means = fitted(**still, batch_size=4, num_samples=3).to_arviz().sample_stats.lp.values
    whole = fitted(**still, num_samples=1).to_arviz().sample_stats.lp.values
    close_arrays(means.mean(1), whole[:, 0], rtol=1e-9)
    assert np.ptp(means, axis=1).min() > 0.1


def test_log_likelihood_is_left_out_when_it_is_large_or_unwanted(monkeypatch):
    fit = fitted()
    assert "log_likelihood" not in groups_of(fit.to_arviz(log_likelihood=False))
    assert export.log_likelihood_bytes(fit.posterior.draws, 1) == 30 * SIZE * 8
    monkeypatch.setattr(export, "log_likelihood_bytes", lambda *args: 2**30 + 1)
    with pytest.warns(UserWarning, match=r"log likelihood would take.*log_likelihood=True"):
        assert "log_likelihood" not in groups_of(fit.to_arviz())
    assert "log_likelihood" in groups_of(fit.to_arviz(log_likelihood=True))


def mean_of(sd):
    return of_rows(lambda w: dist.Normal(w, sd), w=normal(dtype=torch.float64))


@pytest.fixture(scope="module")
def conjugate():
    """Two conjugate models of 30 rows, 4000 nearly independent draws each."""
    y = normals(30, seed=6)
    settings = {"num_samples": 20, "warmup_steps": 60, "thinning": 12, "num_chains": 200}
    return y, {
        name: ps.BAOA(mean_of(sd), lr=0.6).run(y, seed=2, **settings, **QUIET)
        for name, sd in {"one_mean": 1.0, "one_wide_mean": 3.0}.items()
    }


def exact_loo(y, sd):
    """Sum over rows of log p(y_i | the others), for w ~ N(0, 1), y ~ N(w, sd^2)."""
    precision = 1 + (len(y) - 1) / sd**2
    mean = (y.sum() - y) / sd**2 / precision
    return float(dist.Normal(mean, (1 / precision + sd**2) ** 0.5).log_prob(y).sum())


@pytest.mark.slow
def test_loo_is_the_exact_leave_one_out(conjugate):
    """A log likelihood with N/B, or summed otherwise, would be off by nats."""
    y, fits = conjugate
    idatas = {name: fit.to_arviz() for name, fit in fits.items()}
    for sd, name in ((1.0, "one_mean"), (3.0, "one_wide_mean")):
        loo = arviz.loo(idatas[name], pointwise=True)
        assert elpd_of(loo) == pytest.approx(exact_loo(y, sd), abs=0.03)
        assert float(loo.pareto_k.max()) < 0.7
    table = compared(idatas)
    assert list(table.index) == ["one_mean", "one_wide_mean"]
    gap = exact_loo(y, 1.0) - exact_loo(y, 3.0)
    assert abs(table.loc["one_wide_mean", "elpd_diff"]) == pytest.approx(gap, abs=0.05)


def test_loo_names_one_of_two_sites():
    fit = fitted(grouped_model, (X, torch.arange(SIZE) % 4, Y), num_samples=50, lr=0.05)
    idata = fit.to_arviz()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a short chain's Pareto k
        assert np.isfinite(elpd_of(arviz.loo(idata, var_name="v")))


def test_arviz_reads_writes_and_plots(tmp_path):
    fit = fitted(batch_size=5, num_samples=20)
    idata = fit.to_arviz(posterior_predictive=True)
    table = arviz.summary(idata, var_names=["w"], round_to=12)
    assert table.loc["w[1]", "mean"] == pytest.approx(float(fit.get_samples()["w"][:, 1].mean()))
    arviz.plot_trace(idata, var_names=["w", "s"])
    if IS_1:
        arviz.plot_ppc_dist(idata, num_samples=5)
    else:
        arviz.plot_ppc(idata, num_pp_samples=5)
    mpl.pyplot.close("all")
    path = str(tmp_path / "posterior.nc")
    idata.to_netcdf(path)
    again = arviz.from_netcdf(path)
    assert groups_of(again) == groups_of(idata)
    for group in groups_of(idata):
        assert identical(again[group], idata[group])
        for key, value in idata[group].attrs.items():
            assert again[group].attrs[key] == value
    assert again.posterior.attrs["method"] == "BAOA"


def test_attrs_of_a_schedule_go_through_netcdf(tmp_path):
    decaying = {"method": ps.SGLD, "lr": lambda step: 0.01 / (1 + step)}
    idata = fitted(mean_of(1.0), Y, num_samples=4, num_chains=1, **decaying).to_arviz()
    assert idata.attrs["lr"] == "schedule"
    idata.to_netcdf(str(tmp_path / "schedule.nc"))
    close_arrays(idata.sample_stats.lr.values[0], double(*(0.01 / (1 + k) for k in range(4))))
    assert json.dumps(dict(idata.attrs))


def test_a_model_without_data_has_posterior_and_stats_alone():
    def model():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))

    idata = fitted(model, None, num_samples=3, num_chains=1).to_arviz()
    assert groups_of(idata) == {"posterior", "sample_stats"}


def test_a_model_that_subsamples_by_itself_gives_all_rows():
    fit = fitted(own_subsamples)
    idata = fit.to_arviz(posterior_predictive=True)
    assert idata.attrs["num_data"] == SIZE
    assert idata.attrs["batch_size"] == 5
    assert idata.posterior_predictive.y.sizes == {"chain": 3, "draw": 10, "data": SIZE}
    residual = torch.as_tensor(idata.posterior_predictive.y.values).reshape(30, SIZE)
    samples = fit.get_samples()
    z = (residual - samples["w"] @ X.T) / samples["s"][:, None]
    assert abs(z_of_variance(z, 1.0)) < 4.4


@pytest.mark.parametrize("name", ["chain", "draw"])
def test_sites_and_plates_with_the_names_of_arvizs_dims_are_not_lost_silently(name):
    def site(x):
        w = pyro.sample(name, dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=x[:, 0])

    def plate(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
        with pyro.plate(name, len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=x[:, 0])

    for model in (site, plate):
        with pytest.raises(PyroScaleError, match=f"'{name}'"):
            fitted(model, X).to_arviz()


def test_results_of_step_are_one_draw():
    fit = ps.BAOA(regression, lr=0.1, num_data=SIZE)
    fit.step(X, Y)
    fit.step(X, Y)
    samples = fit.get_samples()
    assert samples["w"].shape == (1, 2)
    close_arrays(fit.log_likelihood((X, Y))["y"], log_density(samples))
    with pytest.raises(
        ArgumentError, match=r"of step.. or from a file, which keep no data: .*data="
    ):  # not the batch's
        fit.log_likelihood()
    assert groups_of(fit.to_arviz()) == {"posterior", "sample_stats"}
    assert fit.to_arviz().posterior.sizes["draw"] == 1


@pytest.mark.slow
def test_summaries_of_single_draws_say_nothing_of_them(recwarn, capfd):
    """On which nobody can act."""
    fit = ps.BAOA(regression, lr=0.1, num_data=SIZE)
    fit.step(X, Y)
    mode = ps.MAP(regression).run((X, Y), num_steps=300, seed=0, **QUIET)
    for each in (fit, mode):
        recwarn.clear()
        summary = each.summary()
        draw = float(each.get_samples()["w"][0, 0])
        assert summary["mean"]["w[0]"] == pytest.approx(draw, abs=6e-4)  # of three digits
        assert summary["sd"].isna().all()
        assert not recwarn
    assert "WARNING" not in capfd.readouterr().err


# ------------------------------------------------------------------ explain


def site_rows(explanation):
    return {row["site"]: row for row in explanation.rows}


def test_explain_says_who_scales_what():
    def model(x, y, weights):
        scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), scale).to_event(1))
        s = pyro.sample("s", dist.LogNormal(torch.zeros(()).double(), 0.5))
        p = pyro.sample("p", dist.Dirichlet(torch.ones(3).double()))
        pyro.factor("soft", -w.square().sum())
        with pyro.plate("data", len(x)):
            mean = pyro.deterministic("mean", x @ w)
            with poutine.scale(scale=weights):
                pyro.sample("y", dist.Normal(mean * p[0], s), obs=y)

    pyro.clear_param_store()
    explanation = ps.explain(model, (X, Y, WEIGHTS), batch_size=5)
    assert (explanation.num_data, explanation.batch_size) == (SIZE, 5)
    assert explanation.num_dimensions == 2 + 1 + 2
    assert explanation.partition_error < 1e-12
    assert explanation.warnings == ()
    assert not list(pyro.get_param_store())
    rows = site_rows(explanation)
    assert {name: row["kind"] for name, row in rows.items()} == {
        "w": "latent",
        "s": "latent",
        "p": "latent",
        "soft": "factor",
        "mean": "deterministic",
        "y": "observed",
        "scale": "param",
    }
    assert rows["y"]["ours"] == "N/B = 2.4"
    assert {name: rows[name]["ours"] for name in ("w", "s", "p", "soft")} == dict.fromkeys(
        ("w", "s", "p", "soft"), "1"
    )
    assert rows["y"]["plate"] == "data [5]"
    assert (rows["w"]["shape"], rows["p"]["shape"]) == ("[2]", "[3]")
    assert rows["w"]["transform"] == "identity"
    assert "Exp" in rows["s"]["transform"]
    assert "StickBreaking" in rows["p"]["transform"]
    assert rows["p"]["support"] == "Simplex"
    assert "temperature 0" in rows["scale"]["why"]


def test_explain_says_when_pyro_scales():
    rows = site_rows(ps.explain(pre_scaled, (X, Y), batch_size=4))
    assert (rows["y"]["Pyro"], rows["y"]["ours"]) == ("N/B = 3", "1")
    rows = site_rows(ps.explain(own_subsamples, (X, Y)))
    assert (rows["y"]["Pyro"], rows["y"]["ours"]) == ("N/B = 2.4", "1")
    assert rows["y"]["plate"] == "data [5 of 12]"

    def by_hand(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
        with poutine.scale(scale=SIZE / len(x)), pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    explanation = ps.explain(by_hand, (X, Y), batch_size=4)
    assert site_rows(explanation)["y"]["Pyro"] == "N/B = 3"
    assert "by hand" in explanation.warnings[0]


def test_explain_prints_all_of_it_as_text_and_as_html():
    explanation = ps.explain(regression, DataLoader(DATASET, 5))
    text = str(explanation)
    assert repr(explanation) == text
    for line in (
        "N = 12 rows, B = 5 a batch, N/B = 2.4",
        "3 unconstrained dimensions",
        "partition check",
    ):
        assert line in text
        assert line in explanation._repr_html_()
    lines = text.splitlines()
    starts = [lines[0].index(column) for column in ("site", "kind", "shape", "support")]
    y = next(line for line in lines if line.startswith("y "))
    assert y[starts[1] :].startswith("observed")
    assert y[starts[2] :].startswith("[5]")
    page = explanation._repr_html_()
    assert page.count("<tr>") == 1 + len(explanation.rows)
    for row in explanation.rows:
        for cell in row.values():
            assert f">{html.escape(cell)}</td>" in page


def test_explain_escapes_html_in_names():
    def model(x):
        w = pyro.sample("<b>&w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=x[:, 0])

    page = ps.explain(model, X)._repr_html_()
    assert "&lt;b&gt;&amp;w" in page
    assert "<b>" not in page


def test_explain_warns_of_what_may_be_a_mistake():
    def no_rows(x):
        pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))

    def joint(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))
        covariance = torch.eye(len(x)).double() + 0.5
        pyro.sample("y", dist.MultivariateNormal(w.expand(len(x)), covariance), obs=x[:, 0])

    def closed_over(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(X @ w, 1.0).to_event(1), obs=Y)

    with pytest.raises(ModelError, match="no observed site and no factor"):
        ps.explain(no_rows, X)
    assert any("nothing is scaled" in w for w in ps.explain(closed_over, X).warnings)
    assert any("whole data only" in w for w in ps.explain(joint, X).warnings)
    with pytest.raises(PlateError, match="site 'y'"):
        ps.explain(joint, X, batch_size=4)
    with pytest.raises(ModelError, match=r"no observed site .*site 'y' .*is None"):
        ps.explain(regression, X)  # its observations were forgotten
