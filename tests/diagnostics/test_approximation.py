"""What `report()` says of approximations, against posteriors that are known exactly."""

import math
import re
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torchopt
from linear import linear_data, linear_posterior, regression
from models import normal, of_rows
from runs import QUIET
from test_psis import EFFECTS, ERRORS, eight_schools

import pyro_scale as ps
from pyro_scale.diagnostics import approximation
from pyro_scale.diagnostics.psis import psis
from pyro_scale.errors import ApproximationWarning

pytestmark = pytest.mark.usefixtures("float64")

X, Y = linear_data(37)
logistic = of_rows(lambda x, w: dist.Bernoulli(logits=x @ w), w=normal(2))


def counts(columns):
    """A model of rows of counts, whose rates have a Gamma(2, 1) prior."""

    def model(y):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0).expand([columns]).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)

    return model


def worst_bias(fit, y):
    """How many times over its tolerance the bias of a fit of `counts` is: the draws are those of
    log-normal distributions, the posterior is Gamma(2 + sum of y, 1 + N)."""
    gaussian, shape, rate = fit.fit.gaussians[0], 2 + y.sum(0), 1.0 + len(y)
    mean = (gaussian.mean + gaussian.variance / 2).exp()
    sd = mean * gaussian.variance.expm1().sqrt()
    of_mean = (mean - shape / rate).abs() / (shape.sqrt() / rate) / 0.1
    of_sd = (sd / (shape.sqrt() / rate)).log().abs() / 0.05
    return float(torch.maximum(of_mean, of_sd).max())


def logistic_data(num_rows):
    x = torch.randn(num_rows, 2, generator=torch.Generator().manual_seed(0))
    return x, (x @ torch.tensor([1.0, -0.5]) > 0).double()


def test_a_gaussian_posterior_is_a_yes_in_files_too(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ApproximationWarning)
        fit = ps.Laplace(regression()).run((X, Y), **QUIET)
    report = fit.report()
    assert report.verdict == "yes"
    assert report.choices["mode"].startswith("at most 0.001 posterior sds")
    assert [each.check for each in report.findings if each.site == "w"] == ["bias"]
    assert list(fit.summary()["verdict"]) == ["yes"] * 3
    fit.save(tmp_path / "fit.ps")
    assert str(ps.load(tmp_path / "fit.ps", regression()).report()) == str(report)
    again = ps.Laplace(regression()).run((X, Y), **QUIET)
    assert str(again.report()) == str(report)


def test_a_diagonal_of_correlated_elements_is_a_no():
    with pytest.warns(ApproximationWarning) as told:
        fit = ps.Laplace(regression(), structure="diag").run((X, Y), **QUIET)
    report = fit.report()
    assert report.verdict == "no"
    assert str(report.findings[0]) in str(told[0].message)
    assert "structure='dense'" in report.headline


@pytest.mark.slow
def test_words_are_those_of_exact_biases():
    """Skewed posteriors, from those far off to those well inside, by their shapes."""
    verdicts = []
    for seed, (num_rows, columns) in enumerate([(1, 1), (10, 1), (30, 1), (30, 5), (300, 1)] * 10):
        torch.manual_seed(seed)
        rates = torch.distributions.Gamma(2.0, 1.0).sample((columns,))
        y = torch.poisson(rates.expand(num_rows, columns))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit = ps.Laplace(counts(columns)).run((y,), seed=seed, progress=False)
        verdict, worst = fit.report().verdict, worst_bias(fit, y)
        assert verdict in ("unknown", "yes" if worst < 1 else "no"), (seed, worst)
        is_heavy = fit.fit.attrs["pareto_k"] > 0.7
        is_told = any(each.category is ApproximationWarning for each in told)
        assert is_told == (verdict == "no" or is_heavy)
        verdicts.append(verdict)
    assert min(verdicts.count("yes"), verdicts.count("no")) > 15
    assert verdicts.count("unknown") < 5


def test_draws_are_made_where_their_number_decides():
    torch.manual_seed(2)
    y = torch.poisson(torch.tensor([3.0]).expand(15, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApproximationWarning)
        fit = ps.Laplace(counts(1)).run((y,), **QUIET)
    assert "8,000 draws" in fit.fit.attrs["psis"]
    assert 0.7 < worst_bias(fit, y) < 1.5  # by 1,000 draws it would not be known


def test_eight_schools_are_no_yes():
    with pytest.warns(ApproximationWarning):
        fit = ps.Laplace(eight_schools).run((EFFECTS, ERRORS), **QUIET)
    assert fit.report().verdict != "yes"


def test_weights_without_a_mean_are_no_evidence():
    """Of a t distribution, whose sd a Gaussian at its mode has too small."""
    heavy = of_rows(lambda w: dist.StudentT(4.0, w, 1.0), w=lambda: dist.Normal(0.0, 30.0))
    with pytest.warns(ApproximationWarning, match="Pareto k"):
        fit = ps.Laplace(heavy).run((torch.zeros(1),), **QUIET)
    assert fit.fit.attrs["pareto_k"] > 1
    assert fit.report().verdict == "unknown"
    assert "Pareto k" in fit.report().headline


def test_an_error_of_the_weights_is_one_of_the_bias():
    """With fewer rows than all, whose choice matters more than the number of draws."""
    fit = ps.Laplace(logistic).run(logistic_data(50_000), **QUIET)
    error = float(re.search(r"error (\S+) nats", fit.fit.attrs["psis"])[1])
    told = next(each.told for each in fit.report().findings if each.check == "bias")
    of_sd = float(re.search(r"\+- (\S+)%", told)[1])
    assert of_sd > 0.9 * 100 * error / 2**0.5 > 0


def judged(monkeypatch, shift=0.0, log_sd=0.0, **facts):
    """Findings by check on a fit whose weights are those of a posterior of other moments: the first
    element's mean is `shift` sds away, or its log sd `log_sd` below that of the fit; and of which
    the given facts are told."""

    def weights(fit, drawn, *rest, **how):
        gaussian, draws = fit.gaussians[0], torch.cat(list(drawn.blocks()))
        z = ((draws - gaussian.mean) / gaussian.variance.sqrt())[:, 0]
        log_ratios = shift * z - math.expm1(2 * log_sd) * z.square() / 2
        table = psis(fit, drawn, *rest, **how)
        return table._replace(log_weights=log_ratios.log_softmax(0), **facts)

    monkeypatch.setattr(approximation, "psis", weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApproximationWarning)
        report = ps.Laplace(regression()).run((X, Y), **QUIET).report()
    return {finding.check: finding.verdict for finding in report.findings}


@pytest.mark.parametrize(
    ("facts", "verdicts"),
    [
        ({"pareto_k": 0.69}, {"weights": "yes", "bias": "yes"}),
        ({"pareto_k": 0.71}, {"weights": "unknown"}),
        ({"pareto_k": 0.69, "shift": 0.5}, {"weights": "yes", "bias": "no"}),
        ({"pareto_k": 0.99, "shift": 0.5}, {"weights": "unknown", "bias": "no"}),
        ({"pareto_k": 1.01, "shift": 0.5}, {"weights": "unknown"}),
        ({"spread": 1.4}, {"weights": "yes", "bias": "yes"}),
        ({"spread": 1.6}, {"weights": "yes", "bias": "yes", "width": "no"}),
    ],
)
def test_weights_are_judged_by_their_tail_and_width(monkeypatch, facts, verdicts):
    """Above 1 they have no mean. A heavy tail hides a bias, and does not make one up."""
    assert judged(monkeypatch, **facts) == verdicts


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"shift": 0.06}, "yes"),
        ({"shift": 0.17}, "no"),
        ({"log_sd": 0.03}, "yes"),
        ({"log_sd": 0.085}, "no"),
        ({"error": 0.022}, "yes"),
        ({"error": 0.026}, "unknown"),
        ({"error": 0.018, "shift": 0.07}, "unknown"),
    ],
)
def test_a_bias_of_a_fit_is_that_of_the_weights(monkeypatch, facts, verdict):
    """Exponential tilts of a Gaussian. Of 0, by weights of an error e, it is a yes if z(.005 / 3) e
    is within .1 for means, and z(.005 / 3) e / 2^0.5 within .05 for sds: the latter up to .024."""
    assert judged(monkeypatch, **facts)["bias"] == verdict


def test_points_are_an_ensemble():
    mode = ps.MAP(regression(), compile=False).run((X, Y), num_steps=2, **QUIET)
    cold = ps.Laplace(regression(), temperature=0.0).run((X, Y), **QUIET)
    assert mode.report().verdict == cold.report().verdict == "ensemble"
    assert "temperature 0" in mode.report().headline


def test_reasons_why_it_is_not_known():
    def told(fit):
        report = fit.report()
        assert report.verdict == "unknown"
        return report.headline

    fit = ps.Laplace(regression()).run((X, Y), **QUIET)
    assert "run()" in told(fit.posterior.at_temperature(0.5))
    assert "run()" in told(fit.at_temperature(0.5))
    stepped = ps.VI(regression(), compile=False, num_data=len(X))
    stepped.step(X, Y)
    assert "run()" in told(stepped)
    many = of_rows(lambda w: dist.Normal(w.sum(), 1.0), w=normal(101))
    assert "101 dimensions" in told(ps.Laplace(many).run((Y,), **QUIET))
    powered = ps.EKF(regression(), structure="dense", lr=0.5).run((X, Y), **QUIET)
    assert "not meant to be the model's posterior" in told(powered)
    two = of_rows(lambda a, b: dist.Normal(a + b, 1.0), a=normal(), b=normal())
    assert "stay at one value: b" in told(ps.Laplace(two, sites=["a"]).run((Y,), **QUIET))
    particles = ps.SVGD(regression(), optimizer=torchopt.adam(0.1), num_particles=3, compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "no density" in told(particles.run((X, Y), num_steps=2, **QUIET))


def test_a_given_mode_that_is_far_off_is_a_no():
    with pytest.warns(ApproximationWarning, match="given mode"):
        fit = ps.Laplace(regression()).run((X, Y), mode={"w": torch.ones(3) * 3}, **QUIET)
    assert fit.report().verdict == "no"
    assert "given mode" in fit.report().headline
    mean, precision = linear_posterior(1.0, X, Y)
    away = 3 - mean
    assert f"{float(away @ precision @ away) ** 0.5:.2g} posterior sds" in str(fit.report())
