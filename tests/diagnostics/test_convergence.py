"""Chains that do not agree are found out, on sites and on predictions; chains that do are not."""

import dataclasses
from functools import partial

import arviz
import numpy
import pyro
import pyro.distributions as dist
import pytest
import torch
import warned
from densities import prior_only
from models import of_rows
from reference import double, normals
from repetitions import long_but
from runs import ONE_CHAIN, QUIET

import pyro_scale as ps
from pyro_scale.errors import ArgumentError
from pyro_scale.run.measurements import VirialTemperature

pytestmark = pytest.mark.usefixtures("float64", "compiled_early")

run = warned.quiet_runs(num_samples=200, warmup_steps=200, thinning=3, num_chains=4, **QUIET)
#: (The table, what it said of chains that do not agree).
disagreement = partial(warned.told, about="do not agree")
X, NEW = normals(40), normals(7, seed=1)
Y = 0.7 * X.abs() + 0.5 * normals(40, seed=2)


def two_modes_and_v():
    """At -4 and 4, each of sd 1/2; v mixes."""
    w = pyro.sample("w", dist.Normal(0.0, 100.0))
    pyro.factor("modes", dist.Normal(double(-4.0, 4.0), 0.5).log_prob(w).logsumexp(0))
    pyro.sample("v", dist.Normal(torch.zeros(2), 1.0).to_event(1))


#: The sign of w does not matter to what is predicted.
sign = of_rows(lambda x, w: dist.Normal(w.abs() * x.abs(), 0.5), w=lambda: dist.Normal(0.0, 1.0))


def classes_and_values(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Categorical(logits=x[:, None] * w), obs=y)
        pyro.sample("z", dist.Normal(x * w[0], 1.0), obs=None if y is None else y.double())


def altered(draws, positions, virial=None):
    """The posterior with other positions, and other parts in the temperature."""
    temperature = None if virial is None else VirialTemperature(virial)
    measurements = dataclasses.replace(draws.measurements, virial=temperature)
    return ps.Posterior(dataclasses.replace(draws, positions=positions, measurements=measurements))


def stuck(model=two_modes_and_v, apart=4.0, **how):
    starts = apart * double(-1.0, 1.0, 1.0, -1.0).repeat(3)[: how.get("num_chains", 4)]
    return ps.BAOA(model, lr=0.05, init_strategy={"w": starts})


# ------------------------------------------------------------------ warnings


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [2, 4])
def test_chains_in_two_modes_are_said(num_chains):
    fit = run(stuck(num_chains=num_chains), num_chains=num_chains)
    (said,) = disagreement(fit.diagnostics)[1]
    assert said.startswith("'w': the chains do not agree, R-hat is")


@pytest.mark.slow
def test_chains_on_their_way_get_one_advice():
    """They look hot, but a smaller step would only slow them down."""
    starts = {"w": 8.0 * double(-1.0, 1.0, -1.0, 1.0)}
    fit = run(
        ps.SGLD(prior_only(lambda: dist.Normal(0.0, 1.0), "w"), lr=0.002, init_strategy=starts),
        warmup_steps=0,
    )
    _, said = warned.told(fit.diagnostics)
    (unmixed,) = [each for each in said if "do not agree" in each]
    (hot,) = [each for each in said if "is hotter" in each]
    assert "larger lr" not in unmixed
    assert "take a longer warm-up first; if it stays, lower lr" in hot


@pytest.mark.slow
def test_false_alarms_are_rare():
    """50 runs of 4 chains that mix, taken together."""
    starts = {"w": torch.full((200,), 4.0)}
    fit = run(
        ps.BAOA(two_modes_and_v, lr=0.5, init_strategy=starts), num_samples=100, num_chains=200
    )
    whole = fit.posterior.draws
    for positions in whole.positions.split(4):
        assert not disagreement(altered(whole, positions).diagnostics)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("apart", "num_chains", "num_samples", "is_said"),
    long_but(
        [
            (0.5, 4, 99, False),
            (0.5, 4, 100, True),
            (0.5, 12, 49, False),
            (0.5, 12, 50, True),
            (2.0, 4, 19, False),
            (2.0, 4, 20, True),
            (2.0, 1, 400, False),
        ],
        *[(0.5, 4, 99, False), (0.5, 12, 50, True)],
    ),
)
def test_few_draws_say_only_what_is_not_chance(apart, num_chains, num_samples, is_said):
    """R-hats of about 1.1 and 2.2, as variances between chains are apart^2 of those within."""
    how = {"num_samples": num_samples, "num_chains": num_chains}
    fit = run(stuck(**how), **how)
    independent = normals(num_chains, num_samples, fit.posterior.draws.positions.shape[-1])
    sides = double(-1.0, 1.0).repeat(6)[:num_chains, None, None]
    positions = independent + apart * sides
    assert bool(disagreement(altered(fit.posterior.draws, positions).diagnostics)[1]) is is_said


@pytest.mark.slow
def test_chains_without_noise_may_end_anywhere():
    starts = {"w": 4 * double(-1.0, 1.0, 1.0, -1.0)}
    fit = run(ps.SGLD(two_modes_and_v, lr=0.01, temperature=0.0, init_strategy=starts))
    assert not disagreement(fit.diagnostics)[1]


@pytest.mark.slow
def test_a_step_that_was_chosen_gets_more_steps_for_advice():
    """At the step that would not heat, so few would be off by more."""
    starts = {"w": 4.0 * double(-1.0, 1.0, 1.0, -1.0)}
    sampler = ps.SGLD(sign, lr="auto", precondition=None, init_strategy=starts)
    fit = run(sampler, (X, Y), batch_size=1, num_samples=40, warmup_steps=0)
    positions = fit.posterior.draws.positions + 50 * torch.arange(4)[:, None, None]
    virial = 9.0 + 0.1 * normals(4, 40, 1, 1).expand(-1, -1, -1, 2)
    _, said = warned.told(altered(fit.posterior.draws, positions, virial).diagnostics)
    (unmixed,) = [each for each in said if "do not agree" in each]
    (hot,) = [each for each in said if "is hotter" in each]
    assert "larger lr" not in unmixed
    assert "lower lr" not in hot
    assert "take more steps, for which lr='auto' chooses a smaller one" in hot


# ------------------------------------------------------------------ explosions


def exploding(method=ps.SGLD, lr=300.0, num_samples=70, **how):
    how = {**ONE_CHAIN, "num_samples": num_samples, "batch_size": 10, **how}
    return warned.told(method(sign, lr=lr).run, (X, Y), **QUIET, **how)


@pytest.mark.parametrize(
    ("method", "lr", "how"),
    [
        (ps.SGLD, 300.0, {}),
        (ps.SGLD, 300.0, {"num_chains": 4}),
        (ps.BAOA, 30.0, {"num_chains": 4, "superchains": 2}),
        (ps.SGLD, 300.0, {"num_chains": 2, "store": False}),
    ],
)
def test_chains_that_have_exploded_get_one_advice(method, lr, how, recwarn, capfd):
    """They are finite yet: the gradient of a quadratic multiplies them at every step."""
    fit, said = exploding(method, lr, 40, **how)
    assert fit.moments()["w"].mean.abs() > 1e30
    for told in (said, warned.told(fit.diagnostics)[1]):
        (exploded,) = told
        assert exploded.startswith("the chains have exploded: site 'w' has reached ")
        assert exploded.endswith(f"pass a smaller lr, {lr / 3:.2g} instead of {lr:.2g}")
    fit.diagnostics(), fit.summary()
    if how.get("store") is not False:
        report = fit.report()
        assert report.verdict == report.of_site("w") == "no"
        assert report.headline.startswith("NO: the chains have exploded: site 'w' has reached ")
    assert not [
        each for each in recwarn if not issubclass(each.category, UserWarning)
    ]  # of NumPy's
    assert "WARNING" not in capfd.readouterr().err  # of ArviZ's


def five():
    pyro.factor("no data", torch.zeros(()))
    pyro.sample("x", dist.Normal(torch.zeros(5), 1.0).to_event(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lr", "how"),
    [
        (ps.SGLD, 2.1, {"num_samples": 120}),
        (ps.BAOA, 2.03, {"num_samples": 250, "store": False}),
        (ps.SGHMC, 1.3, {"num_chains": 10}),
    ],
)
def test_chains_on_their_way_to_infinity_have_exploded(method, lr, how):
    """Just above the stable range: 2 of SGLD and BAOA, 1.236 of SGHMC."""
    how = {**QUIET, "num_samples": 60, "warmup_steps": 0, "thinning": 1, "num_chains": 4, **how}
    fit, said = warned.told(method(five, lr=lr).run, None, **how)
    assert fit.posterior.draws.positions.abs().max() < 1e13
    for (exploded,) in (said, warned.told(fit.diagnostics)[1]):
        assert exploded.startswith("the chains have exploded: site 'x' has become ever hotter")
        assert exploded.endswith(f"pass a smaller lr, {lr / 3:.2g} instead of {lr:.2g}")


def rising(step):
    return 1e-4 * 1.04 ** min(step, 220)


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "start"), [(0.1, 1e3), (1.9, 1.0), (rising, 50.0)])
def test_chains_from_afar_have_not_exploded(lr, start):
    """They are hotter by far, but first and not last."""
    sampler = ps.BAOA(five, lr=lr, init_strategy={"x": torch.full((4, 5), start)})
    how = {"num_samples": 200, "warmup_steps": 0, "thinning": 1, "num_chains": 4}
    fit, said = warned.told(sampler.run, None, **QUIET, **how)
    assert (fit.posterior.draws.measurements.virial.parts.mean() > 100) == (start > 1)
    assert not [each for each in said if "exploded" in each]


def test_of_an_explosion_nothing_is_computed_silently():
    fit, _ = exploding(num_samples=40, num_chains=2)
    _, (exploded,) = warned.told(fit.loo)
    assert exploded.startswith("the chains have exploded")
    for compute in (fit.ksd, fit.step_size_bias):
        with pytest.raises(ArgumentError, match="the chains have exploded"):
            compute()


def test_a_step_too_long_is_not_said_to_be_too_short():
    """Minibatches heat, which is not measured in so few draws, and chains do not agree."""
    fit = run(ps.SGLD(sign, lr=0.5), (X, Y), batch_size=1, num_samples=21, warmup_steps=0)
    positions = fit.posterior.draws.positions + 50 * torch.arange(4)[:, None, None]
    _, said = warned.told(altered(fit.posterior.draws, positions).diagnostics)
    (unmixed,) = [each for each in said if "do not agree" in each]
    assert "larger lr" not in unmixed
    assert [each for each in said if "lower lr from 0.5" in each]


# ------------------------------------------------------------------ predictions


@pytest.mark.slow
def test_predictions_mix_where_weights_do_not():
    fit = run(stuck(sign, apart=0.7), (X, Y))
    table, said = disagreement(fit.diagnostics)
    assert "do not agree" in said[0]
    assert "network" not in said[0]  # which it is not
    probed, said = disagreement(fit.diagnostics, predict_at=NEW)
    assert not said
    assert list(probed.index) == ["w", "y, predicted"]
    assert probed.r_hat["w"] > 1.5 > 1.05 > probed.r_hat["y, predicted"]
    assert probed.ess_bulk["y, predicted"] > 100
    assert probed.temperature.isna().tolist() == [False, True]
    assert probed.attrs == table.attrs
    assert probed.index.name == "site"
    assert probed.loc[["w"]].equals(table)


@pytest.mark.slow
def test_predictions_that_do_not_mix_are_said():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w.abs() * x.abs() + 0 * x, 0.5), obs=y)
            pyro.sample("z", dist.Normal(w, 100.0), obs=y)

    fit = run(stuck(model, apart=0.7), (X, Y))
    (said,) = disagreement(fit.diagnostics, predict_at=(NEW,))[1]
    assert said.startswith("'z, predicted'")
    assert "predict_at" not in said


@pytest.mark.slow
@pytest.mark.parametrize("how", [lambda x: x, lambda x: (x, None), lambda x: {"x": x}])
def test_it_is_arvizs_of_the_means(how):
    labels = torch.arange(40) % 3
    fit = run(ps.BAOA(classes_and_values, lr=0.1), (X, labels), num_samples=20)
    draws = fit.get_samples(group_by_chain=True)["w"]
    logits = NEW[:, None] * draws[:, :, None]
    expected = {"y": logits.softmax(-1).flatten(2), "z": NEW * draws[:, :, :1]}
    before = torch.get_rng_state()
    table, _ = disagreement(fit.diagnostics, predict_at=how(NEW))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(table.index) == ["w", "y, predicted", "z, predicted"]
    for name, value in expected.items():
        dataset = arviz.convert_to_dataset({name: numpy.asarray(value)})
        row = table.loc[f"{name}, predicted"]
        assert row.r_hat == pytest.approx(float(arviz.rhat(dataset)[name].max()), rel=1e-9)
        for kind in ("bulk", "tail"):
            least = float(arviz.ess(dataset, method=kind)[name].min())
            assert row[f"ess_{kind}"] == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("rows", [5, (), {"z": X}, (X, Y, Y), torch.zeros(3, 5), double(1.0)[0]])
def test_what_the_model_cannot_be_run_on_is_refused(rows):
    labels = Y.round().clamp(0, 2)
    fit = run(ps.BAOA(classes_and_values, lr=0.1), (X, labels), num_samples=4, warmup_steps=0)
    with pytest.raises(
        ArgumentError, match=r"^predict_at: .*pass some rows as the model's own argum"
    ):
        fit.diagnostics(predict_at=rows)


@pytest.mark.slow
def test_a_model_without_data_sites_predicts_nothing():
    with pytest.raises(ArgumentError, match="predict_at: the model has no data site"):
        run(stuck()).diagnostics(predict_at=NEW)
