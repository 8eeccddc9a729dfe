"""A posterior is a value: it stays what it is, whatever its method does next."""

import copy
import functools
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
import torchopt
from linear import linear_data
from reference import double
from runs import QUIET
from stored import same

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, CallError, FileError, NonFiniteError, NotRunError

pytestmark = pytest.mark.usefixtures("float64")

X, Y = DATA = linear_data(40)
OTHER = X, Y + 1.0


def model(x, y, sd=1.0):
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, sd), obs=y)


def noisier(x, y):
    return model(x, y, 2.0)


def sampler(**how):
    return ps.BAOA(model, **{"lr": 0.1, "friction": 1.0, "precondition": None, **how})


def run_baoa(method, data=DATA, **how):
    lengths = {"num_samples": 30, "warmup_steps": 10, "thinning": 1, "num_chains": 2}
    return method.run(data, **QUIET, **{**lengths, **how})


def steps(method, data=DATA):
    return method.run(data, num_steps=50, **QUIET)


#: A method of each kind, and a run of it.
KINDS = {
    "BAOA": (sampler, run_baoa),
    "NUTS": (
        lambda: ps.NUTS(model, compile=False),
        lambda m, data=DATA: m.run(data, num_samples=15, warmup_steps=15, num_chains=2, **QUIET),
    ),
    "Laplace": (lambda: ps.Laplace(model), lambda m, data=DATA: m.run(data, **QUIET)),
    "EKF": (lambda: ps.EKF(model), lambda m, data=DATA: m.run(data, **QUIET)),
    "VI": (lambda: ps.VI(model, optimizer=torchopt.adam(1e-2)), steps),
    "MAP": (lambda: ps.MAP(model), steps),
    "SVGD": (lambda: ps.SVGD(model, num_particles=7), steps),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def finished(kind):
    """The posterior of a run, which nothing changes."""
    make, run = KINDS[kind]
    return run(make()).posterior


quiet = pytest.mark.filterwarnings("ignore::UserWarning")


@quiet
@every_kind
def test_running_twice_is_two_objects_running_once(kind):
    make, run = KINDS[kind]
    method = make()
    first = run(method).posterior
    before = first.get_samples()
    second = run(method, OTHER).posterior
    same(first.get_samples(), before)
    same(first.get_samples(), finished(kind).get_samples())
    same(second.get_samples(), run(make(), OTHER).get_samples())
    assert not torch.equal(first.get_samples()["w"], second.get_samples()["w"])
    assert method.posterior is second


@quiet
@pytest.mark.slow
def test_running_twice_with_nothing_set_is_two_objects_running_once():
    how = {"num_samples": 50, "num_chains": 2, "max_rows": 200_000, **QUIET}
    method = ps.BAOA(model, compile=False)
    method.run(OTHER, **how)
    again = method.run(DATA, **how).posterior
    alone = ps.BAOA(model, compile=False).run(DATA, **how).posterior
    same(again.get_samples(), alone.get_samples())
    assert again.attrs["lr"] == alone.attrs["lr"]


@quiet
@every_kind
def test_a_run_overwrites_nothing_that_was_asked_for(kind):
    make, run = KINDS[kind]
    method = make()
    caches = {"_last", "_earlier", "_understood", "_last_program"}

    def asked():
        return {name: value for name, value in vars(method).items() if name not in caches}

    before = copy.copy(asked())
    run(method)
    after = asked()
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


@pytest.mark.slow
def test_what_was_chosen_is_in_the_facts_and_what_was_asked_for_in_the_method():
    method = ps.BAOA(model, compile=False)
    asked = method.kernel
    run = method.run(DATA, num_samples=50, num_chains=2, max_rows=200_000, **QUIET)
    assert method.kernel is asked
    assert run.posterior.attrs["lr"] != asked.lr
    assert f"lr={run.posterior.attrs['lr']:.4g}" in repr(method)
    laplace = ps.Laplace(model).run(DATA, **QUIET)
    assert (laplace.structure, laplace.posterior.attrs["structure"]) == ("auto", "dense")


@every_kind
def test_before_a_run_there_is_none(kind):
    method = KINDS[kind][0]()
    with pytest.raises(NotRunError, match=r"call run\(data, ...\) first"):
        method.posterior  # noqa: B018
    with pytest.raises(NotRunError, match=kind):
        method.summary()


def test_a_run_that_ended_by_an_error_leaves_none():
    method = sampler(lr=1e6)
    with pytest.raises(NonFiniteError):
        run_baoa(method)
    with pytest.raises(NotRunError, match="all chains"):
        method.summary()
    kept = run_baoa(sampler()).posterior
    kept.summary()


@quiet
@every_kind
@pytest.mark.parametrize("copied", ["file", "pickle"])
def test_it_goes_into_a_file_and_back(kind, copied, tmp_path):
    before = finished(kind)
    if copied == "file":
        before.save(tmp_path / "run.ps")
        after = ps.load(tmp_path / "run.ps", model)
        loaded = getattr(ps, kind).load(tmp_path / "run.ps", model)
        assert type(loaded).__name__ == kind
        same(loaded.get_samples(), before.get_samples())
        after.save(tmp_path / "again.ps")
        same(ps.load(tmp_path / "again.ps", model).get_samples(), before.get_samples())
        with pytest.raises(ArgumentError, match="keep no data"):
            after.log_likelihood()
    else:
        after = pickle.loads(pickle.dumps(before))
    assert type(after) is type(before)
    same(after.get_samples(), before.get_samples())
    assert after.summary().equals(before.summary())
    same(after.log_likelihood(DATA), before.log_likelihood())
    if kind != "SVGD":
        assert after.diagnostics().equals(before.diagnostics())


def test_another_model_is_refused(tmp_path):
    run_baoa(sampler()).save(tmp_path / "run.ps")
    with pytest.raises(FileError, match="the model is not the one of the file"):
        ps.load(tmp_path / "run.ps", noisier)
    with pytest.raises(ArgumentError, match="model"):
        ps.load(tmp_path / "run.ps", 3)


# ------------------------------------------------------------------ chains


@quiet
@pytest.mark.parametrize("kind", ["BAOA", "EKF", "VI", "MAP", "SVGD"])
def test_a_chain_that_begin_gives_is_the_one_of_step(kind):
    make, _ = KINDS[kind]
    torch.manual_seed(1)
    method = make()
    method._num_data = len(X)
    values = [method.step(X[place], Y[place]) for place in torch.arange(40).split(10)]
    torch.manual_seed(1)
    other = make()
    other._num_data = len(X)
    chain = other.begin(X[:10], Y[:10])
    with pytest.raises(NotRunError):
        chain.posterior  # noqa: B018
    assert values == [chain.step(X[place], Y[place]) for place in torch.arange(40).split(10)]
    same(chain.posterior.get_samples(), method.get_samples())
    with pytest.raises(NotRunError):
        other.posterior  # noqa: B018


def test_chains_of_one_method_do_not_know_of_each_other():
    method = ps.SGLD(model, lr=0.01, num_data=len(X))
    one, other = method.begin(X, Y), method.begin(X, Y)
    one.step(X, Y)
    kept = one.posterior
    before = kept.get_samples()
    other.step(X, Y)
    one.step(X, Y)
    same(kept.get_samples(), before)
    assert not torch.equal(one.posterior.get_samples()["w"], before["w"])


def test_a_run_leaves_the_chain_and_a_step_the_run():
    method = sampler(num_data=len(X))
    run = run_baoa(method).posterior
    method.step(X, Y)
    assert method.get_samples()["w"].shape[0] == 1
    assert run.get_samples()["w"].shape[0] == 60
    with pytest.raises(ArgumentError, match=r"step\(\) keeps no data"):
        method.step_size_bias()
    again = run_baoa(method).posterior
    same(again.get_samples(), run.get_samples())


# ------------------------------------------------------------------ what it is for


def test_two_results_of_one_method_are_compared():
    method, runs = ps.Laplace(model), {}
    for seed in (0, 1):
        runs[str(seed)] = method.run(DATA, seed=seed, progress=False).posterior
    table = ps.compare(runs, data=DATA).table
    assert list(table.index) == ["0", "1"]
    assert 0 < table.mean_distance.max() < 1
    assert len(set(table.lpd)) == 2


@pytest.mark.slow
def test_a_posterior_is_where_chains_start():
    def sharp():
        pyro.sample("w", dist.Normal(double(3.0), 1e-3))
        pyro.factor("no data", torch.zeros(()))

    start = ps.NUTS(sharp, compile=False).run(None, num_samples=20, **QUIET).posterior
    how = {"num_samples": 1, "warmup_steps": 0, "thinning": 1, **QUIET}
    run = ps.SGLD(sharp, lr=1e-12, init_strategy=start).run(None, **how)
    assert (run.get_samples()["w"] - 3).abs().max() < 0.01


def test_they_say_what_they_are():
    assert repr(finished("BAOA")) == "<Posterior by BAOA, N = 40, 2 x 30 draws>"
    fit = ps.Laplace(model).run(DATA, **QUIET).posterior
    assert repr(fit) == "<GaussianPosterior by Laplace, N = 40, starts: 1>"
    assert isinstance(fit, ps.GaussianPosterior)


# ------------------------------------------------------------------ bad input


@quiet
@pytest.mark.parametrize("kind", ["BAOA", "EKF", "VI", "MAP", "SVGD"])
def test_a_step_that_breaks_leaves_the_state_before_it(kind):
    make, _ = KINDS[kind]
    torch.manual_seed(1)
    method = make()
    method._num_data = len(X)
    method.step(X[:10], Y[:10])
    expected = copy.deepcopy(method).get_samples()
    with pytest.raises(NonFiniteError):
        method.step(X[:10], Y[:10] * torch.nan)
    same(method.get_samples(), expected)


@quiet
@every_kind
def test_what_it_cannot_be_asked_is_said(kind):
    posterior = finished(kind)
    with pytest.raises(CallError, match="did you mean var_names="):
        posterior.summary(var_name=["w"])
    with pytest.raises(CallError):
        posterior.starts(1)
    with pytest.raises(ArgumentError, match="num_chains"):
        posterior.starts("a", 0)


def test_fits_go_on_from_a_posterior():
    fit = ps.Laplace(model).run(DATA, **QUIET)
    for start in (fit, fit.posterior):
        ekf = ps.EKF(model, init_strategy=start).run(OTHER, **QUIET)
        with pytest.raises(ArgumentError, match="not meant to be the model's posterior"):
            ekf.psis()
        again = ps.Laplace(model).run(DATA, mode=start, **QUIET)
        assert torch.equal(again.fit.centers, fit.fit.centers)
        method = run_baoa(ps.BAOA(model, lr=0.1, precondition=start))
        assert method.posterior.attrs["whitened"] == 1
    draws = finished("BAOA")
    with pytest.raises(ArgumentError, match="it has no Gaussian"):
        ps.EKF(model, init_strategy=draws).run(DATA, **QUIET)
    with pytest.raises(ArgumentError, match="a fitted MAP"):
        ps.Laplace(model).run(DATA, mode=draws, **QUIET)
    with pytest.raises(ArgumentError, match="init_strategy"):
        ps.BAOA(model, init_strategy=ps.Posterior)


def test_a_fit_at_another_temperature_goes_into_a_file(tmp_path):
    ps.Laplace(model).run(DATA, **QUIET).save(tmp_path / "fit.ps")
    warm = ps.Laplace.load(tmp_path / "fit.ps", model).at_temperature(4.0)
    warm.save(tmp_path / "warm.ps")
    again = ps.load(tmp_path / "warm.ps", model)
    cold = ps.load(tmp_path / "fit.ps", model)
    variances = [each.fit.gaussians[0].variance for each in (cold, again)]
    torch.testing.assert_close(variances[1], 4 * variances[0], rtol=1e-12, atol=0)
    assert again.log_marginal_likelihood() == cold.log_marginal_likelihood()
    with pytest.raises(ArgumentError, match="it is of Laplace"):
        steps(ps.MAP(model)).posterior.log_marginal_likelihood()


def test_weights_from_some_rows_leave_the_fit_as_it_is():
    posterior = ps.Laplace(model).run(DATA, **QUIET).posterior
    attrs, table = dict(posterior.attrs), posterior.diagnostics()
    assert posterior.psis(num_rows=20).num_rows == 20
    assert posterior.attrs == attrs
    assert posterior.diagnostics().equals(table)


@quiet
def test_what_other_libraries_look_for_has_a_hint():
    posterior = finished("BAOA")
    for name, hint in {
        "num_chains": "call .to_arviz",
        "run": "init_strategy=",
        "psis": "Laplace",
    }.items():
        with pytest.raises(AttributeError, match=hint):
            getattr(posterior, name)
    with pytest.raises(AttributeError, match="'Posterior' object has no attribute 'sites'"):
        posterior.sites  # noqa: B018
    assert not hasattr(posterior, "step_size_bias")
    assert copy.deepcopy(posterior).attrs == pickle.loads(pickle.dumps(posterior.attrs))
