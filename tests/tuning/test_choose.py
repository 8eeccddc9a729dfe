"""Runs with nothing set, on posteriors that are known."""

import dataclasses
import itertools
import re

import choices
import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import linear_regression, prior_only
from models import of_rows
from reference import double, normals
from repetitions import long_but
from runs import QUIET

import pyro_scale as ps
from pyro_scale.diagnostics.verdict import report as verdict_on
from pyro_scale.errors import ArgumentError, BiasWarning, NonFiniteError, VerdictWarning
from pyro_scale.run import budget, extend
from pyro_scale.tuning import choice, choose, plan
from pyro_scale.tuning.policy import PILOTS

pytestmark = pytest.mark.usefixtures("float64")

#: A Gaussian of three correlated elements in units from 1e-4 to 1e4.
SCALES = double(1e-4, 1.0, 1e4)
CORRELATION = double([1.0, 0.95, 0.5], [0.95, 1.0, 0.6], [0.5, 0.6, 1.0])
MEAN = 5 * SCALES
ROOT = SCALES[:, None] * torch.linalg.cholesky(CORRELATION)
gaussian = prior_only(lambda: dist.MultivariateNormal(MEAN, scale_tril=ROOT))
line = linear_regression(sd=10.0, name="beta")


X = torch.stack([torch.ones(200), 20 + normals(200, seed=0)], 1)
Y = X @ double(1.0, 2.0) + normals(200, seed=1)


def exact_line():
    """(Mean, sds) of beta."""
    precision = X.T @ X + torch.eye(2) / 100
    return torch.linalg.solve(precision, X.T @ Y), precision.inverse().diagonal().sqrt()


def check_moments(draws, mean, sd, ess):
    """Of so many effective draws: 4.5 standard errors, which chance exceeds once in 10^5."""
    z = (draws.mean(0) - mean) / sd * ess**0.5
    log_sd = (draws.std(0) / sd).log() * (2 * ess) ** 0.5
    assert float(z.abs().max()) < 4.5
    assert float(log_sd.abs().max()) < 4.5 + 0.02 * (2 * ess) ** 0.5  # the step's own, at most


@pytest.mark.parametrize(
    "method",
    long_but([ps.BAOA, ps.GHMC, ps.SGHMC, ps.UBU, ps.SGNHT, ps.SGLD], ps.BAOA, ps.GHMC, ps.SGLD),
)
def test_every_sampler_is_right_with_nothing_set(method):
    run = method(gaussian).run(None, **QUIET)
    report = run.report()
    ess = float(run.diagnostics()["ess_bulk"].min())
    check_moments(run.get_samples()["x"], MEAN, SCALES, ess)
    assert report.verdict == "yes", str(report)
    assert 800 < ess < 2500  # a quarter of 4,000 is aimed at
    assert set(run.summary()["verdict"]) == {"yes"}


def test_minibatches_are_right_with_nothing_set():
    run = ps.BAOA(line).run((X, Y), batch_size=20, **QUIET)
    ess = float(run.diagnostics()["ess_bulk"].min())
    check_moments(run.get_samples()["beta"], *exact_line(), ess)
    assert run.report().verdict == "yes", str(run.report())
    assert "variance_reduction" in run.diagnostics()  # by control variates
    told = run.report().choices["minibatches"]
    assert told == f"20 of {len(X)} rows a step, with control variates of first order"
    result = run.posterior.draws
    noise = result.measurements.gradient_noise
    hot = dataclasses.replace(noise, inflation=torch.full((len(X[0]),), 2.0))
    measurements = dataclasses.replace(result.measurements, gradient_noise=hot)
    advice = verdict_on(dataclasses.replace(result, measurements=measurements), None, 1000).headline
    assert advice.endswith("try: larger batches (batch_size=), or a smaller lr")  # they are on


@pytest.mark.slow
def test_choices_do_not_depend_on_the_number_of_draws():
    def run(num_samples):
        sampler = ps.BAOA(line)
        return sampler.run((X, Y), num_samples=num_samples, **QUIET)

    few, many = run(100), run(150)
    assert few.posterior.attrs["lr"] == many.posterior.attrs["lr"]
    few, many = (each.get_samples(group_by_chain=True)["beta"] for each in (few, many))
    assert torch.equal(few, many[:, :100])


@pytest.mark.slow
def test_what_is_set_is_not_changed():
    run = ps.BAOA(line, lr=0.2, friction=2.0, precondition="dense")
    run.run((X, Y), num_samples=50, warmup_steps=10, thinning=3, **QUIET)
    assert (run.posterior.attrs["lr"], run.posterior.attrs["friction"]) == (0.2, 2.0)
    steps = run.posterior.draws.sample_stats["step"][0]
    assert steps.tolist() == list(range(12, 12 + 150, 3))
    alone = ps.BAOA(line, friction=2.0).run((X, Y), num_samples=50, **QUIET)
    assert alone.posterior.attrs["friction"] == 2.0


def test_a_number_for_lr_moves_the_parameters_themselves():
    """As ever: without a geometry of its own, bit for bit."""
    how = {"num_samples": 20, "warmup_steps": 5, "thinning": 2, **QUIET}
    one = ps.BAOA(line, lr=0.01).run((X, Y), **how)
    other = ps.BAOA(line, lr=0.01, friction=1.0, precondition=None).run((X, Y), **how)
    assert torch.equal(one.get_samples()["beta"], other.get_samples()["beta"])


@pytest.mark.slow
def test_a_fit_gives_its_geometry():
    fit = ps.Laplace(line, structure="dense").run((X, Y), progress=False)
    run = ps.BAOA(line, precondition=fit).run((X, Y), **QUIET)
    check_moments(
        run.get_samples()["beta"], *exact_line(), float(run.diagnostics()["ess_bulk"].min())
    )


@pytest.mark.slow
def test_a_run_that_is_not_right_says_so_and_why():
    """Of a funnel, a centered hierarchy: no, with the site and what to do about it."""

    def centered():
        pyro.factor("no data", torch.zeros(()))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        pyro.sample("theta", dist.Normal(torch.zeros(4), tau).to_event(1))

    with pytest.warns(VerdictWarning, match=r"LocScaleReparam") as told:
        run = ps.BAOA(centered).run(None, max_rows=400_000, **QUIET)
    assert any("'theta'" in str(each.message) for each in told)
    assert run.report().verdict != "yes"
    assert str(run.report()).startswith(("NO", "NOT KNOWN"))


@pytest.mark.slow
def test_two_modes_are_seen():
    def two():
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 10.0).to_event(1))
        far = torch.stack([-(x - 5).square().sum(), -(x + 5).square().sum()])
        pyro.factor("two", torch.logsumexp(10 * far, 0))

    with pytest.warns(VerdictWarning, match="R-hat"):
        run = ps.BAOA(two).run(None, max_rows=400_000, **QUIET)
    assert run.report().verdict == "no"
    assert "2 modes" in str(run.report())


@pytest.mark.slow
def test_the_report_is_saved(tmp_path):
    run = ps.BAOA(line).run((X, Y), num_samples=100, **QUIET)
    run.save(tmp_path / "run")
    again = ps.BAOA.load(tmp_path / "run", line)
    assert again.report() == run.report()
    frame = again.report().to_frame()
    assert list(frame.columns) == ["site", "check", "verdict", "told", "advice"]


@pytest.mark.slow
def test_work_is_bounded(monkeypatch):
    with pytest.raises(ArgumentError, match=r"max_rows=1,000 is 1 steps a chain.*pass max_rows="):
        ps.BAOA(line).run((X, Y), max_rows=1000, **QUIET)
    run = ps.BAOA(line).run((X, Y), max_rows=2_400_000, **QUIET)
    attrs = run.posterior.draws.attrs
    passes = {key: value for key, value in attrs.items() if key.startswith("passes_")}
    steps = attrs["warmup_steps"] + 1000 * attrs["thinning"]
    chains = passes["passes_windows"] + passes["passes_pilots"] + passes["passes_draws"]
    assert chains == pytest.approx(4 * steps)
    assert sum(passes.values()) * 200 <= 2_400_000
    never = property(lambda budget: True)
    monkeypatch.setattr(budget.Budget, "is_over", never)
    short = ps.BAOA(line).run((X, Y), max_seconds=1e9, **QUIET)
    assert 400 <= len(short.get_samples()["beta"]) < 4000
    assert short.report().verdict != "yes"
    looks = itertools.count()
    over = property(lambda budget: next(looks) > 10)  # windows and pilots look first
    monkeypatch.setattr(budget.Budget, "is_over", over)
    begun = ps.BAOA(line).run((X, Y), max_seconds=1e9, **QUIET)
    assert 400 <= len(begun.get_samples()["beta"]) < 4000
    assert begun.report().verdict != "yes"


def test_a_run_of_few_seconds_does_not_compile():
    how = {"num_samples": 100, "num_chains": 2, **QUIET}
    short = ps.BAOA(line).run((X, Y), max_seconds=9, **how)
    assert short.posterior.attrs["program"] == "eager"
    asked = ps.BAOA(line, compile=True).run((X, Y), max_seconds=9, **how)
    assert asked.posterior.attrs["program"] == "compiled loop"


def test_a_run_is_told_before_it_starts_that_its_seconds_cannot_do(monkeypatch):
    monkeypatch.setattr(plan, "share_of_calls", lambda step: -1e9)
    assert 4 * choice.FEWEST_STEPS + extend.FEWEST_DRAWS == 356
    told = r"max_seconds=300: a warm-up and 100 draws a chain take about \d+ s at least"
    with pytest.raises(ArgumentError, match=told):
        ps.BAOA(line).run((X, Y), max_seconds=300, **QUIET)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"lr": lambda step: 0.1}, "lr is a schedule, which needs the length of the run"),
        ({"mass": 2.0, "precondition": "dense"}, "mass has no meaning"),
        ({"precondition": "full"}, "precondition='full'"),
        ({"precondition": ps.Laplace(line)}, "a fit of all sites that has been run"),
        ({"lr": "automatic"}, "pass a number or 'auto'"),
        ({"control_variates": "yes"}, "control_variates='yes'"),
    ],
)
def test_bad_arguments(arguments, match):
    with pytest.raises(ArgumentError, match=match):
        ps.BAOA(line, **arguments).run((X, Y), **QUIET)


def test_a_step_size_that_was_set_is_named_where_chains_break():
    with pytest.raises(ArgumentError, match=r"that was set \(lr=50\): pass a smaller lr"):
        ps.BAOA(line, lr=50.0, compile=False).run((X, Y), **QUIET)


def test_a_temperature_that_changes_has_no_step_size_of_its_own():
    """Not even where it is 0 at first, as an optimizer's is."""
    how = {"warmup_steps": 10, "thinning": 1, "num_samples": 5, **QUIET}
    with pytest.raises(ArgumentError, match="temperature is a schedule, but lr='auto'"):
        ps.BAOA(line, temperature=lambda step: step / 15).run((X, Y), **how)
    with pytest.raises(ArgumentError, match=r"temperature=0 is an optimizer.*leave precondition"):
        ps.BAOA(line, lr=0.1, temperature=0, precondition="dense").run((X, Y), **how)


def test_steps_need_numbers():
    with pytest.raises(ArgumentError, match="lr='auto' is chosen from all rows"):
        ps.BAOA(line, num_data=200).step(X, Y)


def test_a_model_that_breaks_everywhere_says_what_to_do():
    def narrow():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("walls", torch.where(x.abs() < 1e-3, 0.0, -torch.inf))

    with pytest.raises((ArgumentError, NonFiniteError, ps.errors.SiteError)):
        ps.BAOA(narrow, compile=False).run(None, num_samples=50, **QUIET)


@pytest.mark.slow
def test_modes_that_some_rows_show_are_polished_and_kept():
    mirrored = of_rows(lambda a: dist.Normal(a.abs(), 1.0), a=lambda: dist.Normal(0.0, 3.0))

    y = 3 + normals(25_000, seed=0)
    with pytest.warns(VerdictWarning):
        run = ps.BAOA(mirrored).run(y, num_samples=50, max_rows=2 * 10**7, **QUIET)
    assert run.report().verdict == "no"
    assert "2 modes, at" in str(run.report())


@pytest.mark.slow
def test_few_draws_are_no_reason_for_a_no():
    run = ps.BAOA(line).run((X, Y), num_samples=9, **QUIET)
    assert run.report().verdict != "no"


@pytest.mark.slow
@pytest.mark.long
def test_searches_without_end_are_bounded_too():
    """Where the log density rises for ever."""

    def endless():
        x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (20,), (1,)))
        pyro.factor("up", torch.nn.functional.softplus(x).log1p().sum())

    with pytest.raises(ArgumentError, match=r"after [\d,]+ for the search for modes") as raised:
        ps.BAOA(endless, compile=False).run(None, max_rows=13_000, **QUIET)
    spent = re.search(r"after ([\d,]+) for", str(raised.value))[1].replace(",", "")
    hessians = 56 + 8 * 3  # of places on the way, and those with which searches begin
    assert int(spent) <= 13_000 / 10 + 20 * hessians
    enough = re.search(r"pass max_rows=([\d,]+)", str(raised.value))[1].replace(",", "")
    with pytest.warns((BiasWarning, VerdictWarning), match=r"exploded|NO: site 'x'"):
        run = ps.BAOA(endless, compile=False).run(None, max_rows=int(enough), **QUIET)
    assert run.report().verdict == "no"


@pytest.mark.slow
def test_a_run_that_went_on_says_its_own_thinning(monkeypatch):
    """A draw of every step, of which less than a fifth is effective."""
    monkeypatch.setattr(choose, "PILOTS", dataclasses.replace(PILOTS, effective=1e-3))
    with choices.recorded() as made:
        run = ps.BAOA(line).run((X, Y), **QUIET)
    thinning = run.diagnostics().attrs["thinning"]
    assert thinning == run._last.plan.steps.thinning > made[-1].steps.thinning == 1
    told = f"thinning: {thinning} steps from one draw to the next, as too few draws 1 step apart"
    assert told in str(run.report())
    assert float(run.diagnostics()["ess_bulk"].min()) > 800


@pytest.mark.slow
def test_a_step_size_that_was_set_is_the_one_to_lower():
    data = (X - double(0.0, 20.0), Y)
    run = ps.BAOA(line, lr=0.3, compile=False).run(data, batch_size=10, num_samples=100, **QUIET)
    with pytest.warns(BiasWarning) as caught:
        run.diagnostics()
    said = " ".join(str(warning.message) for warning in caught)
    assert "lower lr from 0.3" in said
    assert "lr='auto' chooses" not in said
