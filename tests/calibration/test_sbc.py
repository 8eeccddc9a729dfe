"""Simulation-based calibration, from a model to ranks."""

import functools
import itertools
import os
import signal
import subprocess
import sys
import textwrap

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import of_network, of_rows

import pyro_scale as ps
from pyro_scale.calibration.simulations import Generator
from pyro_scale.errors import ArgumentError, CallError, ModelError, SiteError
from pyro_scale.infer import sbc
from pyro_scale.tuning.policy import WARM_UP

QUIET = {"progress": False, "seed": 3}
X = torch.linspace(-1, 1, 12)
Y = torch.zeros(12)
#: A case that is repeated by another one.
long = functools.partial(pytest.param, marks=pytest.mark.long)
#: Settings that leave nothing to be chosen.
FIXED = {"warmup_steps": 20, "thinning": 2}


normal_rows = of_rows(lambda mu: dist.Normal(mu, 0.5), mu=lambda: dist.Normal(1.0, 2.0))


def line_with_noise(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    sd = pyro.sample("sd", dist.LogNormal(0.0, 0.3))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(slope * x, sd), obs=y)


def effects_of(sd, y):
    tau = pyro.sample("tau", dist.LogNormal(0.0, 0.5))
    with pyro.plate("schools", len(sd)):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(tau * effect, sd), obs=y)


def exact_means(found, num_rows=12):
    """Means and variance of the normal mean's posteriors, and the means of its data."""
    means = torch.stack([found.data(i)[0].mean() for i in range(found.num_simulations)])
    precision = 1 / 4 + num_rows / 0.25
    return (1 / 4 + num_rows * means / 0.25) / precision, 1 / precision, means


@pytest.mark.slow
def test_draws_are_those_of_the_posterior_of_each_data_set():
    found = ps.sbc(ps.BAOA(normal_rows), Y, num_simulations=60, **QUIET)
    mean, variance, data_means = exact_means(found)
    z = (found.mean["mu"] - mean) / (variance / 100) ** 0.5  # of at least so many effective draws
    assert float(z.abs().max()) < 5
    assert float(z.square().mean()) < 2
    assert abs(float(found.sd["mu"].square().mean() / variance) - 1) < 5 * (2 / 60 / 60) ** 0.5
    off = (data_means - found.true["mu"]) / (0.25 / 12) ** 0.5  # each set is of its own truth
    assert 0.5 < float(off.square().mean()) < 1.7
    assert abs(float((found.true["mu"] - 1).square().mean()) / 4 - 1) < 5 * (2 / 60) ** 0.5
    assert found.verdict == "calibrated"
    assert not found.failed
    assert float(found.ess.min()) >= 200


class Chosen(Exception):
    """How simulations would be fitted is known."""


@pytest.mark.parametrize(
    ("layers", "settings", "expected"),
    [
        ((1, 3, 1), {}, "OneByOne"),
        ((1, 3, 1), {"lr": 0.05}, "Stacked"),
        ((1, 1), {}, "Stacked"),
    ],
    ids=["trained", "a number for lr", "a head"],
)
def test_networks_that_are_trained_are_fitted_one_by_one(monkeypatch, layers, settings, expected):
    pairs = itertools.pairwise(layers)
    net = ps.bayesianize(torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairs)))

    model = of_network(lambda x: net(x[:, None]), lambda f: dist.Normal(f[:, 0], 0.5))

    fitter_of = sbc.fitter_for

    def chosen(*args):
        raise Chosen(type(fitter_of(*args)).__name__)

    monkeypatch.setattr(sbc, "fitter_for", chosen)
    with pytest.raises(Chosen, match=expected):
        ps.sbc(ps.BAOA(model, **settings), (X, Y), num_simulations=20, **QUIET)


@pytest.mark.parametrize(("kind", "expected"), [("dense", "OneByOne"), ("diag", "Stacked")])
def test_matrices_of_many_dimensions_are_learned_one_by_one(monkeypatch, kind, expected):
    """Draws teach these a few directions, as many as each posterior has."""

    def model(y):
        z = pyro.sample("z", dist.Normal(torch.zeros(WARM_UP.matrix + 1), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z.mean(), 0.5), obs=y)

    fitter_of = sbc.fitter_for

    def chosen(*args):
        raise Chosen(type(fitter_of(*args)).__name__)

    monkeypatch.setattr(sbc, "fitter_for", chosen)
    with pytest.raises(Chosen, match=expected):
        ps.sbc(ps.BAOA(model, precondition=kind), Y, num_simulations=20, **QUIET)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "compile"), [(None, False), long(5, False), long(None, True), (5, True)]
)
def test_ranks_are_those_of_separate_runs(batch_size, compile):
    how = {"batch_size": batch_size, **FIXED}
    sampler = ps.SGHMC(line_with_noise, lr=0.05, compile=compile)
    found = ps.sbc(sampler, (X, Y), num_simulations=20, **how, **QUIET)
    for number in (0, 7, 19):
        alone = ps.SGHMC(line_with_noise, lr=0.05, compile=compile).run(
            found.data(number),
            num_chains=1,
            num_samples=100,
            seed=found.seeds[number],
            progress=False,
            **how,
        )
        for name, draws in alone.get_samples().items():
            assert torch.allclose(draws.double().mean(), found.mean[name][number], rtol=2e-3)
            rank = int((draws < found.true[name][number]).sum())
            assert abs(rank - int(found.ranks[name][number])) <= int(compile)  # which rounds


@pytest.mark.slow
def test_nuts_ranks_are_those_of_separate_runs():
    pytest.importorskip("nutpie")
    found = ps.sbc(ps.NUTS(line_with_noise), (X, Y), num_simulations=20, warmup_steps=100, **QUIET)
    count = found.attrs["steps_draws"]
    for number in (3, 11):
        how = {"num_chains": 1, "num_samples": count, "warmup_steps": 100, "progress": False}
        alone = ps.NUTS(line_with_noise).run(found.data(number), seed=found.seeds[number], **how)
        every = count // 100
        draws = alone.get_samples()["slope"][every - 1 :: every]
        assert int((draws < found.true["slope"][number]).sum()) == found.ranks["slope"][number]


@pytest.mark.slow
def test_more_simulations_and_resumed_ones_change_nothing():
    sampler = ps.SGLD(normal_rows, lr=0.05)
    few = ps.sbc(sampler, Y, num_simulations=20, **FIXED, **QUIET)
    many = ps.sbc(sampler, Y, num_simulations=33, **FIXED, **QUIET)
    resumed = ps.sbc(sampler, Y, num_simulations=33, resume=few, **FIXED, progress=False)
    for found in (few, resumed):
        count = found.num_simulations
        for name in many.ranks:
            assert torch.equal(found.ranks[name], many.ranks[name][:count])
            assert torch.equal(found.true[name], many.true[name][:count])
    assert list(few.seeds) == list(many.seeds)[:20]


@pytest.mark.slow
def test_blocks_change_nothing():
    sampler = ps.SGLD(normal_rows, lr=0.05)
    how = {"num_simulations": 24, **FIXED, **QUIET}
    whole, parts = (
        ps.sbc(sampler, Y, memory_budget=budget, **how) for budget in (None, 8 * 12_500)
    )
    assert (whole.attrs["blocks"], parts.attrs["blocks"]) == (2, 3)
    assert all(torch.equal(whole.ranks[name], parts.ranks[name]) for name in whole.ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "shape"), [long(4.0, "too wide"), (0.25, "too narrow")])
def test_a_wrong_spread_is_found(temperature, shape):
    sampler = ps.BAOA(normal_rows, temperature=temperature)
    found = ps.sbc(sampler, Y, num_simulations=200, **QUIET)
    assert found.verdict == "miscalibrated"
    assert shape in str(found)


@pytest.mark.slow
def test_the_log_likelihood_finds_draws_of_the_prior():
    def blind(y):
        mu = pyro.sample("mu", dist.Normal(1.0, 2.0))
        with pyro.plate("data", len(y)), pyro.poutine.scale(scale=1e-6):
            pyro.sample("y", dist.Normal(mu, 0.5), obs=y)

    how = {"num_simulations": 200, "simulator": normal_rows, **QUIET, "seed": 4}
    table = ps.sbc(ps.BAOA(blind), Y, **how).summary()
    assert table.p_value["mu"] > 1e-3
    assert table.p_value["loglik"] < 1e-10


@pytest.mark.slow
def test_another_prior_is_found():
    wide = of_rows(lambda mu: dist.Normal(mu, 3.0), mu=lambda: dist.Normal(4.0, 4.0))

    how = {"num_simulations": 200, "simulator": wide}
    assert ps.sbc(ps.BAOA(normal_rows), Y, **how, **QUIET).verdict == "miscalibrated"


@pytest.mark.slow
def test_posterior_calibration_is_of_given_and_new_data_together():
    y = torch.linspace(1.5, 2.5, 12)
    sampler = ps.BAOA(normal_rows, lr=0.3, compile=False)
    sampler.run(y, num_samples=50, thinning=5, warmup_steps=50, **QUIET)
    how = {"num_simulations": 60, "warmup_steps": 50, "thinning": 5}
    found = ps.sbc(sampler, y, method="posterior", **how, **QUIET)
    both = found.data(7)[0]
    assert torch.equal(both[:12], y)
    precision = 1 / 4 + 24 / 0.25
    mean = (1 / 4 + both.sum() / 0.25) / precision
    assert abs(float(found.mean["mu"][7] - mean)) < 5 * (1 / precision / 100) ** 0.5
    assert found.summary().p_value.min() > 1e-3


@pytest.mark.slow
def test_predictions_and_quantities_are_ranked():
    quantities = {"signal": lambda sites, data: sites["slope"] / sites["sd"] + data[1].sum()}
    at = (torch.tensor([0.0, 2.0]), torch.zeros(2))
    found = ps.sbc(
        ps.SGLD(line_with_noise, lr=0.05),
        (X, Y),
        num_simulations=20,
        quantities=quantities,
        predictive=at,
        **FIXED,
        **QUIET,
    )
    assert found.ranks["y (predicted)"].shape == (20, 2)
    expected = found.true["slope"] / found.true["sd"] + torch.stack(
        [found.data(i)[1].sum() for i in range(20)]
    )
    assert torch.allclose(found.true["signal"], expected, atol=1e-5)


@pytest.mark.slow
def test_resampled_covariates_go_with_their_own_observations():
    found = ps.sbc(
        ps.SGLD(line_with_noise, lr=0.05),
        (X, Y),
        resample=True,
        num_simulations=20,
        **FIXED,
        **QUIET,
    )
    (x, y), (other, _) = found.data(4), found.data(5)
    assert not torch.equal(x, other)
    assert set(x.tolist()) <= set(X.tolist())
    by_hand = dist.Normal(found.true["slope"][4] * x, found.true["sd"][4]).log_prob(y).sum()
    assert abs(float(by_hand - found.true["loglik"][4])) < 1e-4


@pytest.mark.slow
def test_several_settings_have_the_same_data():
    settings = {
        name: ps.SGLD(normal_rows, lr=lr) for name, lr in zip("ab", (0.1, 0.2), strict=True)
    }
    found = ps.sbc(settings, Y, num_simulations=20, **FIXED, **QUIET)
    assert torch.equal(found["a"].true["mu"], found["b"].true["mu"])
    assert not torch.equal(found["a"].mean["mu"], found["b"].mean["mu"])


@pytest.mark.slow
def test_the_log_likelihood_is_the_data_s():
    found = ps.sbc(
        ps.SGLD(effects_of, lr=0.05, compile=False),
        (X.exp(), Y),
        num_simulations=20,
        **FIXED,
        **QUIET,
    )
    for i in (0, 13):
        sd, y = found.data(i)
        by_hand = dist.Normal(found.true["tau"][i] * found.true["effect"][i], sd).log_prob(y).sum()
        assert abs(float(by_hand - found.true["loglik"][i])) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["VI", "Laplace"])
def test_approximations(kind):
    how = {"num_steps": 3000} if kind == "VI" else {}
    method = ps.VI(normal_rows, compile=True) if kind == "VI" else ps.Laplace(normal_rows)
    found = ps.sbc(method, Y, num_simulations=20, **how, **QUIET)
    mean, variance, _ = exact_means(found)
    z = (found.mean["mu"] - mean) / variance**0.5
    assert float(z.abs().max()) < (0.5 if kind == "Laplace" else 1.0)


def one_step_back(y):
    a = pyro.sample("a", dist.Normal(0.0, 0.5))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a * torch.cat([y[:1] * 0, y[:-1]]), 1.0), obs=y)


def with_factor(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.factor("by hand", -0.5 * (y - mu) ** 2)


def improper(y):
    mu = pyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def with_learned_mean(y):
    mu = pyro.param("mu", torch.tensor(0.0))
    sd = pyro.sample("sd", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, sd), obs=y)


def subsamples(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y), subsample_size=4) as rows:
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y[rows])


def of_nothing(y):
    pyro.sample("mu", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("model", "error", "match"),
    [
        (one_step_back, SiteError, "'y'.*simulator="),
        (with_factor, SiteError, "'by hand' is a pyro.factor"),
        (improper, SiteError, "'mu'.*improper prior"),
        (with_learned_mean, ModelError, "'mu' is a param"),
        (subsamples, ModelError, "plate 'data' takes subsamples"),
        (of_nothing, ModelError, "no observed site"),
    ],
)
def test_models_of_which_no_data_can_be_drawn(model, error, match):
    with pytest.raises(error, match=match):
        ps.sbc(ps.BAOA(model, lr=0.1), Y, **QUIET)


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"num_simulations": 19}, ArgumentError, "num_simulations"),
        ({"num_samples": 100}, CallError, "num_samples cannot be set"),
        ({"thining": 3}, CallError, "no setting 'thining'"),
        ({"method": "both"}, ArgumentError, "method='both'"),
        ({"batch_size": 100}, ArgumentError, "batch_size=100"),
        ({"quantities": {"mu": abs}}, ArgumentError, "latent site"),
        ({"quantities": {"q": 3}}, ArgumentError, "not callable"),
        ({"resume": 3}, ArgumentError, "resume"),
        ({"simulator": line_with_noise}, TypeError, "missing a required"),
        ({"memory_budget": 0}, ArgumentError, "memory_budget"),
    ],
)
def test_wrong_calls(how, error, match):
    with pytest.raises(error, match=match):
        ps.sbc(ps.BAOA(normal_rows), Y, **{**QUIET, **how})


def test_what_is_no_method_is_refused():
    with pytest.raises(ArgumentError, match=r"ps.BAOA\(model\)"):
        ps.sbc(normal_rows, Y)


def test_data_off_the_support_are_refused_by_site():
    positive = of_rows(lambda mu: dist.LogNormal(mu, 0.5), mu=lambda: dist.Normal(1.0, 2.0))

    with pytest.raises(SiteError, match="'y'"):
        ps.sbc(ps.BAOA(positive), Y + 1, simulator=normal_rows, num_simulations=20, **QUIET)


def test_missing_values_and_several_sites_stay_where_they_are():
    y = torch.tensor([1.0, torch.nan, 2.0, 3.0])
    labels = torch.tensor([0, 1, 2, 1])

    def model(y, labels):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 4), pyro.poutine.mask(mask=~y.isnan()):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y.nan_to_num())
        with pyro.plate("other", 4):
            pyro.sample("labels", dist.Categorical(logits=mu * torch.arange(3.0)), obs=labels)

    log_posterior = ps.LogPosterior(model, num_data=4)
    generator = Generator.from_model(log_posterior, (y, labels))
    drawn = generator.draw(generator.prior_draws(5, 0), 0)
    assert {name: list(table.shape) for name, table in drawn.items()} == {
        "y": [5, 4],
        "labels": [5, 4],
    }
    given = generator.fill_arguments({name: table[2] for name, table in drawn.items()})
    assert torch.equal(given[1], drawn["labels"][2])
    assert given[1].dtype == labels.dtype
    assert torch.equal(given[0].isnan(), y.isnan())


@pytest.mark.slow
def test_nothing_of_the_caller_s_is_changed():
    y, before = torch.ones(12), torch.get_rng_state()
    ps.sbc(ps.SGLD(normal_rows, lr=0.05), y, num_simulations=20, **FIXED, **QUIET)
    assert torch.equal(y, torch.ones(12))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_control_c_keeps_the_simulations_that_are_done(tmp_path):
    script = textwrap.dedent(
        """
        import warnings, torch, pyro, pyro.distributions as dist, pyro_scale as ps
        from pyro_scale.calibration.chains import Stacked
        Stacked.most_at_once = 20
        fit, blocks = Stacked.fit, []
        def counted(*args):
            blocks.append(1)
            print(len(blocks), flush=True)
            return fit(*args)
        Stacked.fit = counted
        def model(y):
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            with pyro.plate("data", len(y)):
                pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        how = dict(num_simulations=2000, warmup_steps=20, thinning=2, progress=False)
        sampler = ps.SGLD(model, lr=0.1, compile=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = ps.sbc(sampler, torch.zeros(5), seed=0, **how)
        assert any("resume=" in str(w.message) for w in caught), caught
        assert 20 <= found.num_simulations < 2000, found.num_simulations
        print("kept")
        """
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    for text in run.stdout:
        if text.strip() == "4":
            run.send_signal(signal.SIGINT)
            break
    assert "kept" in run.communicate(timeout=300)[0]


@pytest.mark.long  # a minute of warm-up in spikes
def test_one_data_set_without_a_mode_breaks_alone():
    """A centered hierarchy: of some data sets the search ends in the spike at tau = 0."""
    place = torch.arange(80) % 8

    def centered(place, y):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("groups", 8):
            effect = pyro.sample("effect", dist.Normal(mu, tau))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(effect[place], 1.0), obs=y)

    how = {"num_simulations": 20, "seed": 5, "progress": False}
    found = ps.sbc(ps.BAOA(centered), (place, torch.zeros(80)), **how)
    assert 0 < len(found.failed) < 20


@pytest.mark.slow
def test_chains_that_do_not_move_are_not_effective():
    model = of_rows(lambda mu: dist.Normal(mu, 1.0), mu=lambda: dist.Normal(0.0, 1.0))

    method = ps.GHMC(model, lr=50.0, friction=1.0)
    found = ps.sbc(method, torch.zeros(10), num_simulations=30, seed=1, progress=False)
    assert str(found).startswith("NOT KNOWN: 30 of 30 simulations")
