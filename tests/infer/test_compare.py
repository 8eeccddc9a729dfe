"""Methods side by side, against closed forms; and ArviZ's own comparison of two models.

Seeds are fixed; were they drawn anew, a z beyond 4 would come once in 16,000 comparisons.
"""

import dataclasses
import functools
import math
import warnings

import arviz
import numpy
import pandas
import pyro
import pyro.distributions as dist
import pytest
from both_arviz import IS_1
from both_arviz import compared as compared_by_arviz
from linear import PRIOR_MEAN, SD, linear_data, linear_posterior, regression
from matplotlib import pyplot
from matplotlib.figure import Figure
from models import normal, of_rows
from reference import close, double
from runs import EVERY_STEP, ONE_CHAIN, QUIET
from warned import quiet_runs

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, NotRunError
from pyro_scale.infer.method import Finished

pytestmark = pytest.mark.usefixtures("float64", "compiled_early")

X, Y = linear_data(60)
NEW_X, NEW_Y = linear_data(90)
NEW_X, NEW_Y = NEW_X[60:], NEW_Y[60:]


run = quiet_runs((X, Y), **QUIET)


@functools.cache
def fitted(name):
    long = {"num_samples": 1000, "warmup_steps": 500, "thinning": 5, "num_chains": 2}
    return {
        "BAOA": lambda: run(ps.BAOA(regression(), lr=0.3), **long),
        "short": lambda: run(ps.BAOA(regression(), lr=0.3), **{**long, "num_samples": 300}),
        "hot": lambda: run(ps.BAOA(regression(), lr=0.3, temperature=1.5), **long),
        "brief": lambda: run(
            ps.BAOA(regression(), lr=0.3),
            num_samples=30,
            warmup_steps=500,
            thinning=1,
            num_chains=1,
        ),
        "stuck": lambda: run(
            ps.SGLD(regression(), lr=1e-5), num_samples=50, num_chains=2, **EVERY_STEP
        ),
        "dense": lambda: run(ps.Laplace(regression(), structure="dense")),
        "diagonal": lambda: run(ps.Laplace(regression(), structure="diag")),
        "MAP": lambda: run(ps.MAP(regression()), num_steps=2000),
    }[name]()


def compared(*names, data=None, **how):
    return ps.compare({name: fitted(name) for name in names}, data, **how)


# ------------------------------------------------------------------ distances


def moved(fit, shift=0.0, scale=1.0):
    """The fit whose draws are moved and stretched about their mean."""
    other, result = ps.Laplace(regression(), structure="dense"), fit.posterior.draws
    positions = result.positions
    mean = positions.mean((0, 1))
    positions = mean + scale * (positions - mean) + shift
    moved = dataclasses.replace(fit.fit)
    moved.__dict__["result"] = dataclasses.replace(result, positions=positions)
    other._last = Finished(ps.GaussianPosterior(moved))
    return other


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_distances_are_the_worst_elements(scale):
    sd = fitted("dense").get_samples()["w"].std(0)
    shift = double(0.1, -0.6, 0.3) * sd
    change = double(1.0, 1.0, scale)
    table = ps.compare({"a": fitted("dense"), "b": moved(fitted("dense"), shift, change)}).table
    close(double(*table.loc["b", ["mean_distance", "sd_distance"]]), [0.6, math.log(2)])
    close(double(*table.loc["a", ["mean_distance", "sd_distance"]]), [0.0, 0.0])


@pytest.mark.slow
def test_of_a_diagonal_gaussian_it_is_known():
    """A diagonal Laplace has the conditional sds: 1 over the root of the precision's diagonal."""
    _, precision = linear_posterior(1.0, X, Y)
    expected = (precision.diagonal() * precision.inverse().diagonal()).sqrt().log().max()
    found = compared("BAOA", "diagonal").table.sd_distance["diagonal"]
    assert found == pytest.approx(float(expected), abs=4 * (2 * 1000) ** -0.5 * 2)


def test_what_does_not_vary_in_the_reference_is_left_out():
    fit = run(ps.Laplace(two, sites=["a"]))
    other = run(ps.Laplace(two))
    table = ps.compare({"part": fit, "all": other}, reference="part").table
    assert numpy.isfinite(table.to_numpy()[:, -2:]).all()


def two(x, y=None):
    a, b = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "ab")
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a * x[:, 0] + b * x[:, 1], SD), obs=y)


# ------------------------------------------------------------------ the other columns


@pytest.mark.slow
def test_a_point_a_sampler_and_a_gaussian_in_one_table():
    found = compared("MAP", "BAOA", "dense", data=(NEW_X, NEW_Y))
    table = found.table
    assert found.reference == "BAOA"
    assert list(table.columns) == [
        *("seconds", "ess", "ess_per_second", "r_hat", "mean_distance", "sd_distance"),
        *("lpd", "lpd_se"),
    ]
    assert table.ess.isna().tolist() == table.r_hat.isna().tolist() == [True, False, True]
    sampler = fitted("BAOA").diagnostics()
    assert table.ess["BAOA"] == sampler.ess_bulk["w"]
    assert table.r_hat["BAOA"] == sampler.r_hat["w"]
    times = ("tuning_time", "compile_time", "sampling_time")
    seconds = sum(sampler.attrs[name] for name in times)
    assert table.seconds["BAOA"] == pytest.approx(seconds)
    assert table.ess_per_second["BAOA"] == pytest.approx(sampler.ess_bulk["w"] / seconds)
    assert (table.seconds > 0).all()
    assert table.sd_distance["MAP"] == math.inf
    assert table.mean_distance["MAP"] < 0.2
    (point,) = fitted("MAP").get_samples()["w"]
    at_the_point = dist.Normal(NEW_X @ point, SD).log_prob(NEW_Y).mean()
    assert table.lpd["MAP"] == pytest.approx(float(at_the_point), rel=1e-9)


def test_lpd_is_the_posterior_predictive_density():
    """Of 1,000 exact draws; the error of a mean of likelihoods over draws is known from them."""
    mean, precision = linear_posterior(1.0, X, Y)
    variance = SD**2 + (NEW_X @ precision.inverse() * NEW_X).sum(1)
    exact = dist.Normal(NEW_X @ mean, variance.sqrt()).log_prob(NEW_Y)
    table = compared("dense", data=(NEW_X, NEW_Y)).table
    likelihood = fitted("dense").log_likelihood((NEW_X, NEW_Y))["y"].exp()
    of_draws = (likelihood / likelihood.mean(0)).mean(1)  # to first order, a draw's part
    error = float(of_draws.std()) / len(of_draws) ** 0.5
    assert abs(table.lpd["dense"] - float(exact.mean())) < 4 * error
    assert error < 0.01
    expected = float(exact.std()) / len(exact) ** 0.5
    assert table.lpd_se["dense"] == pytest.approx(expected, rel=0.05)


def test_sites_of_a_row_belong_together(monkeypatch):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)
            pyro.sample("z", dist.Normal(w * x[:, 0], 2.0), obs=x[:, 1])

    fit = run(ps.Laplace(model))
    of_sites = fit.log_likelihood((NEW_X, NEW_Y))
    total = of_sites["y"] + of_sites["z"]
    expected = total.exp().mean(0).log().mean()
    monkeypatch.setattr("pyro_scale.curvature.chunks.CHUNK_ROWS", 7)
    found = ps.compare({"fit": fit}, data=(NEW_X, NEW_Y)).table.lpd["fit"]
    assert found == pytest.approx(float(expected), rel=1e-9)


def test_draws_with_weights_count_as_much():
    fit = run(ps.SGLD(regression(), lr=lambda step: 0.5 / (1 + step)), num_samples=300, **ONE_CHAIN)
    table = ps.compare({"SGLD": fit, "dense": fitted("dense")}, reference="dense").table
    weights, w = fit.posterior.draws.weights[0], fit.get_samples()["w"]
    mean = (weights[:, None] * w).sum(0) / weights.sum()
    reference = fitted("dense").get_samples()["w"]
    gap = ((mean - reference.mean(0)) / reference.std(0)).abs().max()
    assert table.mean_distance["SGLD"] == pytest.approx(float(gap), rel=1e-3)


def test_without_data_there_is_no_lpd():
    assert "lpd" not in compared("dense").table


# ------------------------------------------------------------------ the reference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["short", "hot", "BAOA", "dense"], "BAOA"),
        (["brief", "hot", "dense"], "brief"),
        (["hot", "dense"], "dense"),
        (["dense", "stuck"], "dense"),  # it is far too cold, and known to be
        (["MAP", "diagonal", "dense"], "dense"),
        (["MAP", "diagonal"], "diagonal"),
        (["MAP"], "MAP"),
    ],
)
def test_the_most_trusted(names, expected):
    assert compared(*names).reference == expected


@pytest.mark.slow
def test_another_reference():
    found = compared("BAOA", "dense", reference="dense")
    assert found.reference == "dense"
    assert found.table.mean_distance["dense"] == 0 < found.table.mean_distance["BAOA"]


renamed = of_rows(
    lambda x, v: dist.Normal(x @ v, SD), v=lambda: dist.Normal(PRIOR_MEAN, 1.0).to_event(1)
)


shorter = of_rows(lambda x, w: dist.Normal(x[:, :2] @ w, SD), w=normal(2))


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (dict, "pass fitted methods by name"),
        (lambda: [fitted("dense")], "pass fitted methods by name"),
        (lambda: {"a": 3}, r"methods\['a'\] is a int"),
        (
            lambda: {"a": fitted("dense"), "b": run(ps.Laplace(renamed))},
            r"'w' is \[3\] in 'a', not there in 'b'",
        ),
        (
            lambda: {"a": fitted("dense"), "b": run(ps.Laplace(shorter))},
            r"'w' is \[3\] in 'a', \[2\] in 'b'",
        ),
        (
            lambda: {"a": fitted("dense"), "b": run(ps.Laplace(regression()), (X[:9], Y[:9]))},
            "'a' was run on N = 60 rows, 'b' on 9",
        ),
    ],
)
def test_what_it_refuses(methods, message):
    with pytest.raises(ArgumentError, match=message):
        ps.compare(methods())


def test_it_refuses_an_unknown_reference_and_what_has_not_run():
    with pytest.raises(ArgumentError, match=r"reference='b': pass one of \['dense'\]"):
        compared("dense", reference="b")
    with pytest.raises(NotRunError, match=r"methods\['b'\]: SGLD has no draws yet"):
        ps.compare({"a": fitted("dense"), "b": ps.SGLD(regression(), lr=0.1)})


def test_it_names_the_run_that_kept_no_draws():
    kept = ps.BAOA(regression(), lr=0.3).run(
        (X, Y), num_samples=9, store=False, progress=False, **ONE_CHAIN
    )
    with pytest.raises(ArgumentError, match=r"methods\['b'\]: the run kept no draws"):
        ps.compare({"a": fitted("dense"), "b": kept})


# ------------------------------------------------------------------ how it looks


def test_it_shows_its_table():
    found = compared("BAOA", "dense")
    for shown in (str(found), found._repr_html_()):
        assert "mean_distance" in shown
        assert "distances from BAOA" in shown
    assert isinstance(found.table, pandas.DataFrame)


@pytest.mark.slow
@pytest.mark.parametrize("data", [None, (NEW_X, NEW_Y)])
def test_its_picture(data):
    figure = compared("MAP", "BAOA", "dense", data=data).plot()
    assert isinstance(figure, Figure)
    assert len(figure.axes) == (1 if data is None else 2)
    last = figure.axes[-1]
    assert last.get_xscale() == last.get_yscale() == "log"
    if data is not None:
        ticks = [text.get_text() for text in figure.axes[0].get_yticklabels()]
        assert ticks == ["MAP", "BAOA", "dense"]
    figure.canvas.draw()
    pyplot.close(figure)


# ------------------------------------------------------------------ ArviZ's own


def test_arviz_compares_models():
    """WAIC (Watanabe 2010): log mean likelihood less the variance of its log, over draws."""
    fits = {"all": fitted("dense"), "two": run(ps.Laplace(shorter, structure="dense"))}
    idata = {name: fit.to_arviz(log_likelihood=True) for name, fit in fits.items()}
    for name, fit in fits.items():
        log_lik = fit.log_likelihood()["y"]
        expected = (log_lik.exp().mean(0).log() - log_lik.var(0, correction=0)).sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rows that weigh much
            if not IS_1:  # which has no WAIC
                found = arviz.waic(idata[name]).elpd_waic
                assert found == pytest.approx(float(expected), rel=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = compared_by_arviz(idata)
        loo = {name: fit.loo() for name, fit in fits.items()}
    assert list(table.index) == sorted(fits, key=lambda name: -loo[name].elpd)
    for name, each in loo.items():
        assert table["elpd" if IS_1 else "elpd_loo"][name] == pytest.approx(each.elpd, rel=1e-4)
        count = len(each.pointwise)  # ArviZ 1 divides a sum of squares by one less
        assert table.se[name] * ((count - IS_1) / count) ** 0.5 == pytest.approx(each.se, rel=1e-3)
