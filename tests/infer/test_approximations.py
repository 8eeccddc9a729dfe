"""What all approximations offer once they have run, whatever they are: one table of methods, and
one model with sites of every kind.

Statistical tests have fixed seeds; were those drawn anew, a z beyond 4.4 would come once in
90,000 comparisons.
"""

import functools
import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import pandas
import pyro
import pyro.distributions as dist
import pytest
import torch
import torchopt
from both_arviz import groups_of
from models import normal, of_rows
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.nn import PyroModule, PyroParam, PyroSample
from reference import close, double, log_jacobian, normals
from repetitions import long_but
from runs import EVERY_STEP, ONE_CHAIN
from stored import same
from torch.distributions import MultivariateNormal, biject_to, constraints

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, NotRunError

pytestmark = pytest.mark.usefixtures("float64", "store")

QUIET = {"progress": False}
SIZE, DRAWS = 12, 1000
X = normals(SIZE, 2, seed=1)
GROUP = torch.arange(SIZE) % 3
Y = X @ double(1.0, -0.5) + 0.5 * GROUP + 0.7 * normals(SIZE, seed=2)
DATA = (X, GROUP, Y)


def mean_of(x, group, a):
    """The rows' means at a draw, or at draws `[n, ...]`."""
    level = (a["level"] * a["rate"] + a["share"][..., 0])[..., group]
    by_matrix = (x @ a["m"]).sum(-1) * (a["p"][..., 0] * a["L"][..., 2, 1])[..., None]
    return a["w"] @ x.T + level + by_matrix + a["p"][..., 2:]


def mixed(x, group, y=None):
    shift = pyro.param("shift", double(0.3, 0.1))
    a = {"a": pyro.sample("a", dist.Normal(double(0.0)[0], 1.0))}
    a["w"] = pyro.sample("w", dist.Normal(shift, 1.0).to_event(1))
    a["m"] = pyro.sample("m", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    a["s"] = pyro.sample("s", dist.Gamma(double(3.0)[0], 2.0))
    a["p"] = pyro.sample("p", dist.Dirichlet(double(2.0, 3.0, 4.0)))
    a["L"] = pyro.sample("L", dist.LKJCholesky(3, double(2.0)[0]))
    with pyro.plate("groups", 3):
        a["level"] = pyro.sample("level", dist.Normal(a["a"], 1.0))
        a["rate"] = pyro.sample("rate", dist.LogNormal(double(0.0)[0], 0.5))
        a["share"] = pyro.sample("share", dist.Dirichlet(double(2.0, 3.0)))
    pyro.deterministic("twice", 2 * a["a"])
    with pyro.plate("data", len(x)):
        mean = pyro.deterministic("mean", mean_of(x, group, a))
        return pyro.sample("y", dist.Normal(mean, a["s"]), obs=y)


SUPPORTS = {
    "a": constraints.real,
    "w": constraints.real_vector,
    "m": constraints.independent(constraints.real, 2),
    "s": constraints.positive,
    "p": constraints.simplex,
    "L": constraints.corr_cholesky,
    "level": constraints.real,
    "rate": constraints.positive,
    "share": constraints.simplex,
}
SHAPES = {"a": (), "w": (2,), "m": (2, 2), "s": (), "p": (3,), "L": (3, 3), "level": (3,)}
SHAPES |= {"rate": (3,), "share": (3, 2)}
FREE = 1 + 2 + 4 + 1 + 2 + 3 + 3 + 3 + 3


class Row(NamedTuple):
    """What tests need to know of a method."""

    method: Any
    structure: str
    arguments: dict[str, Any]
    run: dict[str, Any]
    temperature: float = 1.0

    @property
    def name(self):
        return f"{self.method.__name__} {self.structure}"

    @property
    def starts(self):
        return self.run.get("num_chains", 1)

    @property
    def has_gaussian(self):
        return self.method is not ps.MAP

    def of(self, model=mixed, **arguments):
        if self.method is not ps.IVON:
            arguments = {"structure": self.structure, **arguments}
        if self.method is ps.EKF and model is mixed:  # its prior's moments take 10,000 runs
            arguments = {"init_strategy": fit_of("Laplace diag"), **arguments}
        return self.method(model, **{**self.arguments, **arguments})

    def fitted(self, model=mixed, data=DATA, **kwargs):
        settings = {"seed": 3, **QUIET, **self.run, **kwargs}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of few steps
            return self.of(model).run(data, **settings)


ADAM, STEPS = {"optimizer": torchopt.adam(0.05)}, {"num_steps": 40, "num_chains": 2}
SLOW = {"optimizer": torchopt.adam(0.01)}  # so that factors stay well conditioned
COLD = {"temperature": 0.5}
TABLE = [
    Row(ps.MAP, "diag", ADAM, STEPS),
    Row(ps.MAP, "dense", ADAM, STEPS),
    Row(ps.Laplace, "diag", COLD, {"num_chains": 2}, 0.5),
    Row(ps.Laplace, "dense", {}, {}),
    Row(ps.VI, "diag", {**SLOW, **COLD}, {**STEPS, "batch_size": 5}, 0.5),
    Row(ps.VI, "dense", SLOW, STEPS),
    Row(ps.IVON, "diag", {"lr": 0.05, "first_curvature": 20.0}, STEPS),
    Row(ps.EKF, "diag", {}, {"batch_size": 4}),
    Row(ps.EKF, "dense", {}, {"batch_size": 5}),
]
GAUSSIANS = [row for row in TABLE if row.has_gaussian]
every = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
every_gaussian = pytest.mark.parametrize("row", GAUSSIANS, ids=lambda row: row.name)
ROWS = {row.name: row for row in TABLE}
FEW = [ROWS[name] for name in ("MAP dense", "Laplace diag", "VI diag", "EKF dense")]
#: Of what takes long, one of each kind.
some = pytest.mark.parametrize("row", long_but(TABLE, *FEW), ids=lambda row: row.name)


@functools.cache
def fit_of(name):
    """One fit of each method, which tests do not change."""
    return ROWS[name].fitted()


def unconstrained(samples, supports=SUPPORTS):
    """Draws `[n, D]` in unconstrained space, by torch's own bijections."""
    parts = [biject_to(supports[name]).inv(samples[name]) for name in supports]
    return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)


def whitened(fit, start, positions):
    """Draws `[n, D]` as standard normals, if they are of the start's Gaussian."""
    gaussian = fit.fit.gaussians[start]
    away = (positions - gaussian.mean).T
    if hasattr(gaussian, "sd"):
        return (away / gaussian.sd[:, None]).T
    return torch.linalg.solve_triangular(gaussian.scale_tril, away, upper=False).T


def check_standard(z):
    """Means and second moments of draws `[n, D]` that should be standard normals."""
    count = len(z)
    assert (z.mean(0) * count**0.5).abs().max() < 4.4
    moments = z.T @ z / count
    variance = 2 / (9 * count)  # of a chi square's cube root
    errors = (moments.diagonal() ** (1 / 3) - 1 + variance) / variance**0.5
    assert errors.abs().max() < 4.4
    assert ((moments - moments.diag().diag()) * count**0.5).abs().max() < 4.8


# ------------------------------------------------------------------ draws


@pytest.mark.slow
@some
def test_draws_are_the_same_at_each_call(row):
    fit = fit_of(row.name)
    draws = DRAWS if row.has_gaussian else 1
    flat, grouped = fit.get_samples(), fit.get_samples(group_by_chain=True)
    same(flat, fit.get_samples())
    assert list(flat) == [*SHAPES, "twice"]
    for name, value in grouped.items():
        assert value.shape == (row.starts, draws, *SHAPES.get(name, ()))
        assert torch.equal(value.flatten(0, 1), flat[name])
    close(flat["twice"], 2 * flat["a"])
    flat["a"].zero_()
    assert fit.get_samples()["a"].any()
    assert fit.params["shift"].shape == (2,)


@pytest.mark.slow
@every_gaussian
def test_fewer_draws_are_evenly_spaced(row):
    fit = fit_of(row.name)
    index = [0, 333, 666, 999]
    expected = fit.get_samples(group_by_chain=True)
    for name, value in fit.get_samples(4, group_by_chain=True).items():
        assert torch.equal(value, expected[name][:, index])
    total = DRAWS * row.starts
    ends = fit.get_samples(2)
    assert torch.equal(ends["w"], fit.get_samples()["w"][[0, total - 1]])
    with pytest.raises(ArgumentError, match=f"from 1 to {total}"):
        fit.get_samples(total + 1)


@pytest.mark.parametrize("row", long_but(GAUSSIANS, *FEW[1:]), ids=lambda row: row.name)
@pytest.mark.slow
def test_draws_are_of_each_starts_gaussian(row):
    fit = fit_of(row.name)
    assert len(fit.fit.gaussians) == row.starts
    samples = fit.get_samples(group_by_chain=True)
    for start, gaussian in enumerate(fit.fit.gaussians):
        assert gaussian.mean.shape == (FREE,)
        assert hasattr(gaussian, "sd") == (row.structure == "diag")
        own = unconstrained({name: value[start] for name, value in samples.items()})
        check_standard(whitened(fit, start, own))
        close(fit.fit.centers[start, :FREE], gaussian.mean)
    noises = [
        whitened(fit, start, unconstrained({name: value[start] for name, value in samples.items()}))
        for start in range(row.starts)
    ]
    if row.starts > 1:  # of their own
        check_standard((noises[0] + noises[1]) / 2**0.5)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diag", "dense"])
def test_a_maps_draws_are_its_modes(structure):
    fit = fit_of(f"MAP {structure}")
    close(unconstrained(fit.get_samples()), fit.fit.centers[:, :FREE])
    assert fit.fit.gaussians == ()
    same(fit.sample(1), {name: value[:1] for name, value in fit.get_samples().items()})
    twice = fit.sample(4)
    assert torch.equal(twice["w"][:2], twice["w"][2:])  # from each start in turn
    close(twice["w"][:2], fit.get_samples()["w"])


@some
def test_a_start_is_the_same_whatever_others_there_are(row):
    """Draws too: their seeds are by start."""
    if row.method is ps.EKF:
        with pytest.raises(ArgumentError, match="num_chains=2: a filter has one start"):
            row.fitted(conjugate, (X, Y), num_chains=2)
        return
    one, three = (row.fitted(conjugate, (X, Y), num_chains=n) for n in (1, 3))
    close(three.get_samples(group_by_chain=True)["w"][0], one.get_samples()["w"], 1e-8)


@some
@pytest.mark.slow
def test_fresh_draws_come_from_torchs_generator_or_a_seed(row):
    fit = fit_of(row.name)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = fit.sample(6, seed=1)
    same(first, fit.sample(6, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    one = fit.sample(6)
    assert torch.equal(torch.get_rng_state(), state) != row.has_gaussian
    torch.manual_seed(5)
    same(one, fit.sample(6))
    assert list(first) == [*SHAPES, "twice"]
    for name, value in first.items():
        assert value.shape == (6, *SHAPES.get(name, ()))
    if row.has_gaussian:
        assert not torch.isclose(first["w"], fit.sample(6, seed=2)["w"]).any()
        assert not torch.isclose(first["w"], one["w"]).any()
    for wrong in (0, 2.5, -1):
        with pytest.raises(ArgumentError, match=f"num_samples={wrong}"):
            fit.sample(wrong)


@every_gaussian
def test_fresh_draws_are_of_each_gaussian_in_turn(row):
    fit = fit_of(row.name)
    positions = unconstrained(fit.sample(2000, seed=4))
    for start in range(row.starts):
        check_standard(whitened(fit, start, positions[start :: row.starts]))


# ------------------------------------------------------------------ predictions


@some
def test_predictions_are_drawn_at_each_draw(row):
    fit = fit_of(row.name)
    torch.manual_seed(0)
    wanted = 40 if row.has_gaussian else 2
    drawn = fit.predict(X, GROUP, num_samples=wanted)
    assert {name: value.shape for name, value in drawn.items()} == {
        "mean": (wanted, SIZE),
        "y": (wanted, SIZE),
    }
    samples = fit.get_samples(wanted)
    close(drawn["mean"], mean_of(X, GROUP, samples))
    z = (drawn["y"] - drawn["mean"]) / samples["s"][:, None]
    assert abs(float(z.mean())) < 4.4 / z.numel() ** 0.5
    assert abs(float(z.square().mean() - 1)) < 4.4 * (2 / z.numel()) ** 0.5
    some = fit.predict(X[:5], GROUP[:5], num_samples=2, batch_size=2, return_sites=["y"])
    assert {name: value.shape for name, value in some.items()} == {"y": (2, 5)}


def curved(x, sd, y=None):
    w = pyro.sample("w", dist.Normal(double(0.5)[0], 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal((x * w).exp(), sd), obs=y)


@pytest.mark.parametrize("name", ["Laplace diag", "VI dense", "EKF dense"])
def test_linearized_predictions_are_linear_around_the_mean(name):
    x, row = X[:, 0], ROWS[name]
    fit = row.fitted(curved, (x, 3.0, x.exp()), num_chains=1)
    drawn = fit.predict(x, 1e-9, num_samples=50, linearized=True)["y"]
    w, center = fit.get_samples(50)["w"][:, None], fit.fit.gaussians[0].mean[0]
    close(drawn, (x * center).exp() * (1 + x * (w - center)), 1e-7)
    assert (drawn - fit.predict(x, 1e-9, num_samples=50)["y"]).abs().max() > 1e-2


def test_linearized_predictions_need_a_gaussian():
    with pytest.raises(ArgumentError, match="needs a Gaussian"):
        fit_of("MAP diag").predict(X, GROUP, linearized=True)
    with pytest.raises(ArgumentError, match="not 'mean'"):
        fit_of("VI diag").predict(X, GROUP, linearized=True, return_sites=["mean"])


def pointwise(samples):
    """The log likelihood of each row at each draw, by hand."""
    s = samples["s"][..., None]
    z = (Y - mean_of(X, GROUP, samples)) / s
    return -0.5 * z.square() - s.log() - 0.5 * math.log(2 * math.pi)


@some
def test_log_likelihood_is_a_value_a_row_without_scaling(row):
    fit = fit_of(row.name)
    values = fit.log_likelihood()
    assert list(values) == ["y"]
    close(values["y"], pointwise(fit.get_samples()))
    part = fit.log_likelihood(tuple(each[:4] for each in DATA))["y"]
    close(part, values["y"][:, :4])


# ------------------------------------------------------------------ tables


@some
def test_arviz_has_what_a_sampler_gives_but_statistics(row):
    fit = fit_of(row.name)
    idata = fit.to_arviz()
    assert groups_of(idata) == {"posterior", "observed_data", "log_likelihood"}
    draws = DRAWS if row.has_gaussian else 1
    assert idata.posterior.sizes["chain"] == row.starts
    assert idata.posterior.sizes["draw"] == draws
    assert idata.posterior.share.dims == ("chain", "draw", "groups", "share_dim_1")
    samples = fit.get_samples(group_by_chain=True)
    for name, value in samples.items():
        assert np.array_equal(idata.posterior[name].values, value.numpy())
    by_row = torch.as_tensor(idata.log_likelihood.y.values)
    close(by_row, pointwise(samples))
    close(torch.as_tensor(idata.observed_data.y.values), Y)
    attrs = {"method": row.method.__name__, "structure": row.structure, "num_data": SIZE}
    attrs |= {"seed": 3, "batch_size": row.run.get("batch_size", SIZE)}
    assert {name: idata.posterior.attrs[name] for name in attrs} == attrs
    assert idata.attrs.get("temperature", 1.0) == row.temperature


def test_arvizs_posterior_predictive_is_drawn_when_asked_for(tmp_path):
    fit = fit_of("MAP diag")
    idata = fit.to_arviz(posterior_predictive=True)
    assert idata.posterior_predictive.y.shape == (2, 1, SIZE)
    idata.to_netcdf(str(tmp_path / "posterior.nc"))


@pytest.mark.slow
@every_gaussian
def test_summary_is_of_the_draws(row):
    fit = fit_of(row.name)
    table = fit.summary()
    assert {"w[0]", "m[1, 1]", "share[2, 1]", "twice"} <= set(table.index)
    w = fit.get_samples()["w"][:, 1]
    assert table.loc["w[1]", "mean"] == pytest.approx(float(w.mean()), abs=6e-4)
    assert table.loc["w[1]", "sd"] == pytest.approx(float(w.std()), abs=6e-4)


@every
def test_diagnostics_are_a_row_a_start(row):
    table = fit_of(row.name).diagnostics()
    assert len(table) == row.starts
    assert table.attrs["method"] == row.method.__name__
    columns = {
        ps.MAP: ["log joint", "steps", "converged"],
        ps.VI: ["ELBO", "steps", "converged", "pareto_k"],
        ps.IVON: ["ELBO", "steps", "converged", "pareto_k"],
        ps.Laplace: ["log_evidence", "distance", "pareto_k"],
        ps.EKF: ["steps", "log_lik", "pareto_k"],
    }
    assert list(table.columns) == columns[row.method]
    known = table.drop(columns="pareto_k", errors="ignore")  # which may be unknown
    assert np.isfinite(known.select_dtypes("number").to_numpy()).all()


# ------------------------------------------------------------------ before, again


CALLS = {
    "fit": lambda fit: fit.fit,
    "get_samples": lambda fit: fit.get_samples(),
    "sample": lambda fit: fit.sample(2),
    "predict": lambda fit: fit.predict(X, GROUP),
    "linearized": lambda fit: fit.predict(X, GROUP, linearized=True),
    "log_likelihood": lambda fit: fit.log_likelihood(),
    "to_arviz": lambda fit: fit.to_arviz(),
    "summary": lambda fit: fit.summary(),
    "diagnostics": lambda fit: fit.diagnostics(),
    "params": lambda fit: fit.params,
    "save": lambda fit: fit.save("nowhere.ps"),
    "guide": lambda fit: fit.guide(),
    "mass": lambda fit: fit.mass(),
    "as_prior": lambda fit: fit.as_prior(),
    "as a start": lambda fit: ps.BAOA(mixed, lr=0.1, init_strategy=fit).run(
        DATA, num_samples=1, **ONE_CHAIN, **QUIET
    ),
}


@every
def test_what_needs_a_run_says_so(row):
    predicts = ("predict", "linearized") if row.method is ps.EKF else ()  # from its prior
    for call in (call for name, call in CALLS.items() if name not in predicts):
        with pytest.raises(NotRunError, match=rf"{row.method.__name__} has no fit yet: call run"):
            call(row.of())


def with_param(x, y=None):
    scale = pyro.param("scale", double(0.7)[0], constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, scale), obs=y)


@some
@pytest.mark.slow
def test_a_second_run_starts_afresh(row):
    first = row.fitted(with_param, (X, Y))
    again = row.of(with_param)
    settings = {"seed": 3, **QUIET, **row.run}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        again.run((X[:8], Y[:8]), **settings)
        assert again.fit.log_posterior.num_data == 8
        assert not torch.isclose(again.fit.centers[:, :2], first.fit.centers[:, :2]).any()
        again.run((X, Y), **settings)
    same(again.get_samples(), first.get_samples())
    same(again.params, first.params)
    assert torch.equal(again.fit.centers, first.fit.centers)


@some
def test_pyros_param_store_is_as_it_was(row):
    pyro.param("other", double(1.0, 2.0))
    pyro.param("scale", double(5.0)[0], constraint=constraints.positive)
    fit = row.fitted(with_param, (X, Y))
    fit.get_samples()
    fit.predict(X, num_samples=1)
    store = pyro.get_param_store()
    assert {name: value.tolist() for name, value in store.items()} == {
        "other": [1.0, 2.0],
        "scale": pytest.approx(5.0),
    }
    fit.write_params()
    close(store["scale"].detach(), fit.params["scale"])


# ------------------------------------------------------------------ files


def tensors_of(gaussian):
    return dict(vars(gaussian))


@some
def test_a_fit_comes_back_from_a_file_bit_for_bit(row, tmp_path):
    fit = fit_of(row.name)
    fit.save(tmp_path / "fit.ps")
    after = row.method.load(tmp_path / "fit.ps", mixed)
    assert isinstance(after, row.method)
    assert after.structure == row.structure
    same(after.get_samples(), fit.get_samples())
    same(after.sample(7, seed=2), fit.sample(7, seed=2))
    same(after.params, fit.params)
    assert after.fit.attrs == fit.fit.attrs
    assert after.fit.sites == fit.fit.sites
    assert after.fit.temperature == row.temperature
    assert torch.equal(after.fit.centers, fit.fit.centers)
    assert len(after.fit.gaussians) == len(fit.fit.gaussians)
    for mine, theirs in zip(after.fit.gaussians, fit.fit.gaussians, strict=True):
        assert type(mine) is type(theirs)
        same(tensors_of(mine), tensors_of(theirs))
    if fit.fit.trace is not None:
        assert torch.equal(after.fit.trace, fit.fit.trace)
    pandas.testing.assert_frame_equal(after.diagnostics(), fit.diagnostics())
    same(after.log_likelihood(DATA), fit.log_likelihood())
    assert groups_of(after.to_arviz()) == {"posterior"}
    drawn = []
    for each in (fit, after):
        torch.manual_seed(1)
        drawn.append(each.predict(X, GROUP, num_samples=2))
        if row.has_gaussian:
            of_line = each.predict(X, GROUP, num_samples=3, linearized=True)["y"]
            drawn[-1] = {**drawn[-1], "linear": of_line, **each.mass()}
        pyro.clear_param_store()
        drawn[-1] |= each.guide()(X, GROUP)
    same(*drawn)
    after.save(tmp_path / "again.ps")
    assert (tmp_path / "again.ps").read_bytes() == (tmp_path / "fit.ps").read_bytes()
    with pytest.raises(NotRunError, match="was loaded from a file"):
        after.run(DATA)


def test_what_a_file_does_not_hold_is_an_error_of_ours(tmp_path):
    fit_of("EKF dense").save(tmp_path / "fit.ps")
    after = ps.EKF.load(tmp_path / "fit.ps", mixed)
    with pytest.raises(ArgumentError, match="or comes from a file"):
        after.filtered  # noqa: B018
    with pytest.raises(NotRunError, match="was loaded from a file"):
        after.step(*DATA)


def test_a_laplace_from_a_file_cannot_go_on(tmp_path):
    """Its curvature and settings are not in it; what it knows may be a prior."""
    fit = fit_of("Laplace dense")
    fit.save(tmp_path / "fit.ps")
    after = ps.Laplace.load(tmp_path / "fit.ps", mixed)
    close(after.log_marginal_likelihood(), fit.log_marginal_likelihood())
    with pytest.raises(NotRunError, match="was loaded from a file"):
        after.update(DATA, **QUIET)


# ------------------------------------------------------------------ what others start from


@every_gaussian
def test_mass_is_the_precision_over_n_at_temperature_one(row):
    """The starts' mean diagonal of it; in unconstrained space, by site."""
    fit = fit_of(row.name)
    precisions = [
        1 / g.sd**2 if row.structure == "diag" else torch.cholesky_inverse(g.scale_tril)
        for g in fit.fit.gaussians
    ]
    diagonals = [p if p.dim() == 1 else p.diagonal() for p in precisions]
    expected = row.temperature * sum(diagonals) / len(diagonals) / SIZE
    mass = fit.mass()
    assert list(mass) == list(SUPPORTS)
    shapes = {**SHAPES, "p": (2,), "L": (3,), "share": (3, 1)}
    assert {name: tuple(value.shape) for name, value in mass.items()} == shapes
    close(torch.cat([value.reshape(-1) for value in mass.values()]), expected)
    ps.BAOA(mixed, lr=0.01, mass=mass).run(DATA, num_samples=1, seed=0, **ONE_CHAIN, **QUIET)


def test_what_needs_a_density_is_refused_at_temperature_zero():
    """Where the Gaussian has none."""
    fit = ps.Laplace(conjugate, temperature=0.0).run((X, Y), seed=0, **QUIET)
    assert not fit.fit.gaussians[0].variance.any()
    for call in (fit.mass, fit.as_prior, fit.guide):
        with pytest.raises(ArgumentError, match="temperature"):
            call()


def test_a_mode_has_no_mass():
    with pytest.raises(ArgumentError, match="MAP has no Gaussian"):
        fit_of("MAP diag").mass()


def still(method, fit, num_chains, seed=8, **arguments):
    """Where a method's chains start from a fit, in unconstrained space."""
    method = method(mixed, init_strategy=fit, **arguments)
    settings = {"num_chains": num_chains, "seed": seed, **QUIET}
    if issubclass(method.__class__, ps.Sampler):
        method.run(DATA, num_samples=1, **EVERY_STEP, **settings)
        return unconstrained(method.get_samples())
    method.run(DATA, num_steps=1, **settings)
    return method.fit.centers[:, :FREE]


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(["Laplace diag", "VI diag", "EKF dense"], "Laplace diag"))
def test_samplers_start_at_draws_of_a_fit(name):
    row, fit = ROWS[name], fit_of(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        begun = still(ps.SGLD, fit, 200, lr=1e-12, temperature=0.0)
    for start in range(row.starts):
        check_standard(whitened(fit, start, begun[start :: row.starts]))


@pytest.mark.parametrize(
    "name", long_but(["MAP dense", "VI dense", "EKF diag", "Laplace diag"], "VI dense")
)
def test_everything_starts_at_the_same_draws_of_a_fit(name):
    fit = fit_of(name)
    optimizer = torchopt.sgd(1e-12)
    begun = still(ps.SGLD, fit, 3, lr=1e-12, temperature=0.0)
    close(still(ps.VI, fit, 3, optimizer=optimizer), begun, 1e-7)
    close(still(ps.MAP, fit, 3, optimizer=optimizer), begun, 1e-7)
    close(still(ps.IVON, fit, 3, lr=1e-12), begun, 1e-7)
    if name.startswith("MAP"):
        close(begun, fit.fit.centers[[0, 1, 0], :FREE], 1e-6)
    else:
        assert not torch.isclose(begun, still(ps.SGLD, fit, 3, seed=9, lr=1e-12)).any()


def test_a_chain_starts_at_the_same_draw_whatever_others_there_are():
    fit = fit_of("VI dense")
    few, many = (still(ps.SGLD, fit, n, lr=1e-12, temperature=0.0) for n in (1, 30))
    close(many[:1], few)


@pytest.mark.slow
def test_a_laplace_starts_its_search_at_a_fit():
    """And ends where it always does: at the mode."""
    expected = fit_of("Laplace dense")
    fit = ps.Laplace(mixed, structure="dense", init_strategy=fit_of("VI dense"))
    fit.run(DATA, seed=1, **QUIET)
    assert fit.diagnostics()["distance"].max() < 1e-3
    gap = fit.fit.attrs["log_evidence"][0] - expected.fit.attrs["log_evidence"][0]
    assert abs(gap) < 3.0


# ------------------------------------------------------------------ guides


@every_gaussian
def test_a_guides_density_is_the_gaussians_in_the_sites_own_terms(row):
    """At a draw, by autograd's Jacobian of the whole map; simplexes and Cholesky factors by
    their free elements."""
    fit = fit_of(row.name)
    torch.manual_seed(2)
    trace = poutine.trace(fit.guide()).get_trace(*DATA)
    values = {name: trace.nodes[name]["value"] for name in SUPPORTS}
    position = unconstrained({name: value[None] for name, value in values.items()})[0]
    close(trace.nodes["_position"]["value"], position)
    gaussian = fit.fit.gaussians[0]
    if row.structure == "diag":
        density = dist.Normal(gaussian.mean, gaussian.sd).log_prob(position).sum()
    else:
        density = MultivariateNormal(gaussian.mean, scale_tril=gaussian.scale_tril)
        density = density.log_prob(position)

    def constrain(params):
        return {name: biject_to(SUPPORTS[name])(value) for name, value in params.items()}

    def free(name, value):
        if name in ("p", "share"):
            return value[..., :-1]
        return value[..., *torch.tril_indices(3, 3, -1)] if name == "L" else value

    params = {name: biject_to(SUPPORTS[name]).inv(value) for name, value in values.items()}
    expected = density - log_jacobian(constrain, params, free)
    close(trace.log_prob_sum(), expected, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("row", long_but(GAUSSIANS, *FEW[1:]), ids=lambda row: row.name)
def test_pyros_predictive_takes_the_guide(row):
    fit = fit_of(row.name)
    fit.write_params()
    torch.manual_seed(3)
    sites = [*SUPPORTS, "mean", "y"]
    predictive = Predictive(mixed, guide=fit.guide(), num_samples=120, return_sites=sites)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = predictive(X[:5], GROUP[:5])
    samples = {name: drawn[name].reshape(120, *SHAPES[name]) for name in SUPPORTS}
    check_standard(whitened(fit, 0, unconstrained(samples)))
    close(drawn["mean"].reshape(120, 5), mean_of(X[:5], GROUP[:5], samples))
    assert drawn["y"].reshape(120, 5).std() > 0


def crossed(x, y=None):
    rows, columns = pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 2, dim=-1)
    with rows:
        r = pyro.sample("r", dist.Normal(torch.zeros(3, 1), 1.0))
    with columns:
        c = pyro.sample("c", dist.LogNormal(torch.zeros(2), 0.5))
    with rows, columns:
        rc = pyro.sample("rc", dist.Dirichlet(torch.ones(3, 2, 2)))
    with pyro.plate("data", len(x), dim=-3):
        mean = x[:, :1, None] + r + c + rc[..., 0]
        return pyro.sample("y", dist.Normal(mean.sum((-1, -2), keepdim=True), 1.0), obs=y)


@pytest.mark.parametrize("structure", ["diag", "dense"])
def test_a_guide_has_the_models_plates_in_their_places(structure):
    arguments = (X, Y[:, None, None])
    fit = ps.Laplace(crossed, structure=structure).run(arguments, seed=0, **QUIET)
    model, guide = (poutine.trace(f).get_trace(*arguments) for f in (crossed, fit.guide()))
    for name in ("r", "c", "rc"):
        mine, theirs = guide.nodes[name], model.nodes[name]
        assert mine["value"].shape == theirs["value"].shape
        assert mine["fn"].batch_shape == theirs["fn"].batch_shape
        plates = [{(f.name, f.dim, f.size) for f in s["cond_indep_stack"]} for s in (mine, theirs)]
        assert plates[0] == plates[1]


def test_a_maps_guide_is_its_first_mode():
    fit = fit_of("MAP dense")
    first = {name: value[0] for name, value in fit.get_samples().items() if name in SUPPORTS}
    for name, value in fit.guide()(*DATA).items():
        close(value.detach(), first[name])


def test_svi_leaves_a_maps_guide_at_the_mode():
    """Of the density of the sites' own values, as AutoDelta has it."""

    model = of_rows(lambda s: dist.Normal(0.0, s), s=lambda: dist.LogNormal(double(0.3)[0], 0.5))
    fit = ps.MAP(model, structure="dense", optimizer=torchopt.adam(0.05))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        guide = fit.run((Y,), num_steps=150, seed=0, **QUIET).guide()
    loss = Trace_ELBO().differentiable_loss(model, guide, Y)
    (slope,) = torch.autograd.grad(loss, list(guide.parameters()))
    assert slope.abs().max() < 1e-6


conjugate = of_rows(lambda x, w: dist.Normal(x @ w, 0.7), w=normal(2))


EVIDENCE = float(MultivariateNormal(0 * Y, 0.49 * torch.eye(SIZE).double() + X @ X.T).log_prob(Y))


def test_svis_loss_at_the_posterior_is_the_evidence():
    """At every draw: log joint - log q is the same everywhere."""
    guide = ps.Laplace(conjugate, structure="dense").run((X, Y), seed=0, **QUIET).guide()
    svi = SVI(conjugate, guide, pyro.optim.Adam({"lr": 1e-6}), Trace_ELBO())
    for _ in range(5):
        assert svi.evaluate_loss(X, Y) == pytest.approx(-EVIDENCE, abs=1e-8)
    for _ in range(3):
        assert svi.step(X, Y) == pytest.approx(-EVIDENCE, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("structure", long_but(["diag", "dense"], "dense"))
def test_svi_goes_on_from_a_fit(structure):
    """From a cold one, whose sds are half of what they should be."""
    fit = ps.Laplace(conjugate, structure=structure, temperature=0.25)
    guide = fit.run((X, Y), seed=0, **QUIET).guide()
    loss = Trace_ELBO(num_particles=100, vectorize_particles=False)
    svi = SVI(conjugate, guide, pyro.optim.Adam({"lr": 0.03}), Trace_ELBO(num_particles=5))
    torch.manual_seed(0)
    before = loss.loss(conjugate, guide, X, Y)
    cold = 2 * (math.log(2.0) - 0.375)  # KL of halved sds, of a posterior of two elements
    apart = 0.0
    precision = torch.eye(2) + X.T @ X / 0.49
    if structure == "diag":
        apart = float(precision.diagonal().log().sum() - torch.logdet(precision)) / 2
    assert before == pytest.approx(cold + apart - EVIDENCE, abs=0.35)
    for _ in range(80):
        svi.step(X, Y)
    after = loss.loss(conjugate, guide, X, Y)
    assert after == pytest.approx(apart - EVIDENCE, abs=0.2)
    assert float(fit.fit.gaussians[0].variance[0]) < 0.3 / float(precision[0, 0])  # left alone


def test_two_guides_do_not_share_their_params():
    """Pyro's param store knows them by name."""
    near = ps.Laplace(conjugate).run((X, Y), seed=0, **QUIET)
    far = ps.Laplace(conjugate).run((X, Y + 10 * X[:, 0]), seed=0, **QUIET)
    for fit in (near, far):
        torch.manual_seed(0)
        drawn = Predictive(conjugate, guide=fit.guide(), num_samples=200, return_sites=["w"])(X)
        check_standard(whitened(fit, 0, drawn["w"].reshape(200, 2)))


def test_a_models_params_may_have_any_name():
    def model(x, y=None):
        loc = pyro.param("loc", double(0.5, 0.2))
        scale = pyro.param("scale", double(0.7)[0], constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(loc, 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x @ w, scale), obs=y)

    fit = ps.Laplace(model, structure="dense").run((X, Y), seed=0, **QUIET)
    fit.write_params()
    drawn = Predictive(model, guide=fit.guide(), num_samples=200, return_sites=["w", "y"])(X)
    check_standard(whitened(fit, 0, drawn["w"].reshape(200, 2)))
    assert torch.equal(pyro.param("scale").detach(), fit.params["scale"])


def test_a_support_that_hangs_on_another_site_goes_with_it():
    def model(x, y=None):
        top = pyro.sample("top", dist.LogNormal(double(0.0)[0], 1.0))
        below = pyro.sample("below", dist.Uniform(double(0.0)[0], top))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(below, 2.0), obs=y)

    fit = ps.Laplace(model).run((X, Y), seed=0, **QUIET)
    guide = fit.guide()
    for seed in range(20):
        torch.manual_seed(seed)
        drawn = guide(X, Y)
        parts = (drawn["top"].log(), torch.logit(drawn["below"] / drawn["top"]))
        trace = poutine.trace(poutine.condition(guide, {"_position": torch.stack(parts)}))
        again = trace.get_trace(X, Y)
        close(again.nodes["below"]["value"].detach(), drawn["below"].detach())
        jacobian = drawn["top"].log() + drawn["below"].log()
        jacobian = jacobian + torch.log1p(-drawn["below"] / drawn["top"])
        density = again.log_prob_sum()
        gaussian = fit.fit.gaussians[0]
        expected = gaussian.log_prob(torch.stack(parts)) - jacobian
        close(density.detach(), expected.detach())


# ------------------------------------------------------------------ modules


class Regression(PyroModule):
    """A site, a param and an ordinary weight."""

    def __init__(self):
        super().__init__()
        self.w = PyroSample(dist.Normal(torch.zeros(2), 1.0).to_event(1))
        self.noise = PyroParam(double(0.7)[0], constraints.positive)
        self.slope = torch.nn.Parameter(double(0.1)[0])

    def forward(self, x, y=None):
        mean = x @ self.w + self.slope * x[:, 0]
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(mean, self.noise), obs=y)


@some
@pytest.mark.slow
def test_modules_are_models(row, tmp_path):
    model = Regression()
    fit = row.fitted(model, (X, Y))
    samples = fit.get_samples()
    assert list(samples) == ["w"]
    assert set(fit.params) == {"noise", "slope"}
    assert float(model.slope.detach()) == 0.1  # until write_params
    fit.save(tmp_path / "fit.ps")
    same(row.method.load(tmp_path / "fit.ps", model).get_samples(), samples)
    assert fit.predict(X, num_samples=2)["y"].shape == (2, SIZE)
    fit.write_params()
    close(model.slope.detach(), fit.params["slope"])
    if row.has_gaussian:
        drawn = Predictive(model, guide=fit.guide(), num_samples=200, return_sites=["w"])(X)
        check_standard(whitened(fit, 0, drawn["w"].reshape(200, 2)))
