"""What simulation-based calibration makes of models and arguments as users pass them."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import of_rows
from pyro import poutine

import pyro_scale as ps
from pyro_scale.calibration import campaign
from pyro_scale.calibration.simulations import Generator
from pyro_scale.calibration.truth import FromPosterior
from pyro_scale.errors import ArgumentError, CallError, NonFiniteError, PlateError, SiteError
from pyro_scale.model.log_posterior import LogPosterior

ROWS = torch.linspace(-1.0, 2.0, 12)
#: By hand, so that chains are short.
SHORT = {"warmup_steps": 5, "thinning": 1}


normal_mean_of = of_rows(lambda mu: dist.Normal(mu, 1.5), mu=lambda: dist.Normal(0.5, 2.0))


def slope_model(prior=1.0, sd=1.0, by=1.0):
    def model(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, prior))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(by * slope * x, sd), obs=y)

    return model


line = slope_model()


def sbc(model, data, count=20, method=None, **settings):
    method = method or ps.BAOA(model, lr=1.0, friction=1.0, compile=False)
    settings = {**SHORT, "seed": 0, **settings}
    return ps.sbc(method, data, num_simulations=count, progress=False, **settings)


def generator(model, *arguments):
    return Generator.from_model(LogPosterior(model, len(ROWS)), arguments)


# ------------------------------------------------------------------ which values are observations


def test_a_covariate_that_equals_the_observations_is_not_one_of_them():
    model = generator(line, ROWS.clone(), ROWS.clone())
    assert model.places["y"].leaf == 1
    x, y = model.fill_arguments({"y": -torch.ones(12)})
    assert torch.equal(x, ROWS)
    assert torch.equal(y, -torch.ones(12))
    assert generator(line, ROWS, ROWS).places["y"].leaf == 1


def test_observations_may_be_a_column_of_a_table():
    def model(table):
        line(table[:, 0], table[:, 1])

    table = torch.stack([ROWS, ROWS**2], 1)
    known = generator(model, table)
    (filled,) = known.fill_arguments({"y": -torch.ones(12)})
    assert torch.equal(filled, torch.stack([ROWS, -torch.ones(12)], 1))
    (twice,) = known.with_rows_twice().fill_arguments({"y": -torch.arange(24.0)})
    assert torch.equal(twice, torch.stack([torch.cat([ROWS, ROWS]), -torch.arange(24.0)], 1))


def test_observations_that_begin_later_may_not_depend_on_those_before():
    def autoregression(y):
        a = pyro.sample("a", dist.Normal(0.0, 0.5))
        with pyro.plate("rows", len(y) - 1):
            pyro.sample("y", dist.Normal(a * y[:-1], 1.0), obs=y[1:])

    with pytest.raises(SiteError, match="site 'y': its distribution depends on observations"):
        generator(autoregression, ROWS)


def test_the_first_draws_of_a_posterior_do_not_depend_on_how_many_there_are():
    draws = {"mu": torch.arange(50.0)}
    truth = FromPosterior.from_draws(generator(normal_mean_of, ROWS), draws)
    few, many = truth.params(40, 3)["mu"], truth.params(70, 3)["mu"]
    assert torch.equal(few, many[:40])
    assert len(set(many[:50].tolist())) == 50


# ------------------------------------------------------------------ before the work starts


def test_data_that_the_fitted_model_cannot_have_are_refused():
    def waiting(y):
        rate = pyro.sample("mu", dist.Normal(0.5, 2.0)).exp()
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Exponential(rate), obs=y)

    with pytest.raises(
        SiteError, match=r"site 'y': the observations of simulation \d+ are outside"
    ):
        sbc(waiting, torch.ones(12), simulator=normal_mean_of)


def test_a_global_choice_is_summed_out_on_all_rows_only():
    def chosen(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mu + 3 * z, 1.0), obs=y)

    with pytest.raises(PlateError, match="site 'y'"):
        sbc(chosen, ROWS, batch_size=4)


def test_quantities_and_predictions_are_tried_first():
    with pytest.raises(ArgumentError, match=r"quantities\['a'\] fails: KeyError"):
        sbc(normal_mean_of, ROWS, quantities={"a": lambda sites, data: sites["nu"]})
    with pytest.raises(ArgumentError, match="predictive: the model fails on it"):
        sbc(normal_mean_of, ROWS, predictive=(ROWS, ROWS))


@pytest.mark.parametrize("name", ["checkpoint", "max_seconds", "share_batches"])
def test_settings_of_one_long_run_are_refused(name):
    with pytest.raises(CallError, match=f"{name} is for one long run"):
        sbc(normal_mean_of, ROWS, **{name: 1})


def test_all_methods_of_a_dict_are_checked_before_the_first_is_run():
    methods = {"first": ps.BAOA(normal_mean_of), "second": ps.Laplace(normal_mean_of)}
    with pytest.raises(CallError, match=r"Laplace\.run has no setting 'thinning'"):
        ps.sbc(methods, ROWS, num_simulations=20, thinning=1, progress=False)


# ------------------------------------------------------------------ what comes of it


@pytest.mark.slow
def test_chains_of_lengths_that_are_set_are_not_slow_for_being_short():
    found = sbc(normal_mean_of, ROWS, warmup_steps=10, thinning=4)
    assert found.ess.max() > 50
    assert float(found.ess.min()) < 50
    assert not found.slow


def test_it_says_so_where_all_simulations_break():
    method = ps.BAOA(normal_mean_of, lr=1e6, friction=1.0, compile=False)
    with pytest.raises(NonFiniteError, match="all of the first 20 simulations broke"):
        sbc(normal_mean_of, ROWS, method=method)


@pytest.mark.slow
def test_resume_takes_the_same_call_only():
    short = sbc(normal_mean_of, ROWS)
    whole, resumed = sbc(normal_mean_of, ROWS, 30), sbc(normal_mean_of, ROWS, 30, resume=short)
    for name, ranks in whole.ranks.items():
        assert torch.equal(ranks, resumed.ranks[name])
    assert resumed.slow == whole.slow
    with pytest.raises(ArgumentError, match="thinning=1, and not 2"):
        sbc(normal_mean_of, ROWS, 30, resume=short, thinning=2)
    with pytest.raises(ArgumentError, match="its model or its quantities differ"):
        sbc(line, (ROWS, ROWS), 30, resume=short)
    with pytest.raises(ArgumentError, match="its model or its quantities differ"):
        sbc(
            normal_mean_of,
            ROWS,
            30,
            resume=short,
            quantities={"a": lambda sites, data: sites["mu"]},
        )


@pytest.mark.slow
def test_resume_refuses_another_model_or_other_rows(monkeypatch):
    def square(sites, data):
        return sites["slope"].square()

    asked = {"quantities": {"q": square}, "predictive": (ROWS, ROWS)}
    short = sbc(slope_model(), (ROWS, ROWS.clone()), **asked)

    def resumed(model, x=ROWS, **changes):
        return sbc(model, (x, ROWS.clone()), 21, resume=short, **{**asked, **changes})

    for model, changes, what in (
        (slope_model(), {"x": 5 * ROWS}, "covariates"),
        (slope_model(), {"x": ROWS.flip(0)}, "covariates"),
        (slope_model(), {"predictive": (2 * ROWS, ROWS)}, "rows of predictive="),
        (slope_model(), {"resample": True}, "covariates|log likelihood"),
        (slope_model(prior=2.0), {}, "the log prior at the first true latents was"),
        (slope_model(sd=3.0), {}, "the log likelihood at the first true latents was"),
        (slope_model(by=5.0), {}, "the log likelihood beside it, at the first true latents was"),
        (slope_model(), {"simulator": slope_model(by=2.0)}, "the log likelihood"),
        (slope_model(), {"quantities": {"q": lambda sites, data: sites["slope"]}}, "'q' has other"),
        (
            slope_model(),
            {"quantities": {"q": lambda sites, data: data[1].mean()}},
            "'q' has other values at the same latents and data",
        ),
    ):
        with pytest.raises(ArgumentError, match=f"resume: .*({what})"):
            resumed(model, **changes)
    # as another machine would have rounded it
    exact = campaign.model_fingerprint
    monkeypatch.setattr(
        campaign,
        "model_fingerprint",
        lambda *args, **kwargs: {n: v * (1 + 1e-6) for n, v in exact(*args, **kwargs).items()},
    )
    assert resumed(slope_model()).num_simulations == 21


@pytest.mark.slow
def test_a_posterior_of_other_data_is_refused():
    fit = ps.BAOA(line, lr=0.1, friction=1.0, compile=False)
    fit.run((ROWS, ROWS.clone()), num_samples=50, seed=0, progress=False, **SHORT)
    with pytest.raises(ArgumentError, match="not those that the inference was run on"):
        ps.sbc(fit, (ROWS, 2 * ROWS), method="posterior", num_simulations=20, progress=False)


@pytest.mark.slow
def test_masked_rows_do_not_count():
    def masked(y, seen):
        mu = pyro.sample("mu", dist.Normal(0.5, 2.0))
        with pyro.plate("rows", len(y)), poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(mu, 1.5), obs=y)

    seen = torch.arange(12) < 5
    found = sbc(masked, (ROWS, seen))
    truth = generator(masked, ROWS, seen)
    params = truth.prior_draws(20, 0)
    observed = truth.draw(params, 0)["y"]
    of_rows = dist.Normal(params["mu"][:, None], 1.5).log_prob(observed)
    expected = (of_rows * seen).sum(1).double()
    assert torch.allclose(found.true["loglik"], expected, atol=1e-4)
