"""Control variates and subtracted noise: what they do to gradients is known exactly, and so is
what minibatches do to the temperature."""

import dataclasses
import warnings

import gaussian
import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import logistic_regression, normal_mean, prepare_run
from methods import METHODS, STOCHASTIC, by_name
from models import normal, of_rows
from reference import Doubled, close, double, normals
from repetitions import each_once, long_but
from runs import EVERY_STEP, ONE_CHAIN
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale import kernels
from pyro_scale.core.layout import Layout
from pyro_scale.curvature.control_variates import ControlVariates
from pyro_scale.engine.draws import Steps
from pyro_scale.engine.step import Engine
from pyro_scale.errors import ArgumentError
from pyro_scale.tuning.choice import Settings
from pyro_scale.tuning.plan import resolve_anchor
from pyro_scale.tuning.step_size import tune

pytestmark = pytest.mark.usefixtures("float64", "store")

QUIET = {"progress": False}
N, B = 24, 6
X = normals(N, 2, seed=1)
Y = X @ double(0.7, -1.2) + 0.5 * normals(N, seed=2)
COUNTS = torch.arange(N).double() % 5
two_means = normal_mean()


#: Not Gaussian, with a constrained site.
hierarchical = of_rows(
    lambda x, w, s: dist.Normal(x @ w, s), w=normal(2, sd=2.0), s=lambda: dist.LogNormal(0.3, 0.6)
)


def poisson_with_param(x, y):
    """With a weight that is a parameter, shared by the chains."""
    b = pyro.param("b", double(0.2))
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Poisson((x @ w + b).exp()), obs=y)


def subsampled(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(0.3, 0.6))
    with pyro.plate("data", N, subsample_size=B) as index:
        pyro.sample("y", dist.Normal(x[index] @ w, s), obs=y[index])


CASES = {
    "minibatches": (hierarchical, (X, Y), {"batch_size": B}),
    "loader": (hierarchical, DataLoader(TensorDataset(X, Y), B, shuffle=True), {}),
    "by itself": (subsampled, (X, Y), {}),
    "points": (poisson_with_param, (X, COUNTS), {"batch_size": B}),
}


#: Nothing is to be chosen.
NOTHING = Settings(
    name="BAOA",
    chosen=frozenset(),
    precondition=None,
    control_variates=False,
    subtract_noise=False,
    starts=False,
    compile=False,
)


def found_out(model, data, *, kernel=None, num_chains=1, sampling="shuffle", asked, **kwargs):
    """The problem of a run with what was `asked` for (fields of `Settings`)."""
    kernel = kernel or kernels.SGLD(lr=0.01)
    problem = prepare_run(model, data, kernel=kernel, chains=num_chains, seed=3, **kwargs)
    asked = dataclasses.replace(NOTHING, **asked)
    anchor = resolve_anchor(problem, asked.control_variates)
    return tune(problem, asked, anchor, Steps(10, 10, 1), sampling)[0]


def with_control_variates(case, anchor=True):
    model, data, kwargs = CASES[case]
    return found_out(model, data, asked={"control_variates": anchor}, **kwargs)


def partition(problem):
    """Disjoint batches of B rows, as `density.grad` takes them."""
    rows = torch.arange(N).split(B)
    if problem.log_posterior.model_info.own_plate is not None:
        return [((X, Y), part) for part in rows]
    y = COUNTS if "b" in problem.engine.layout.names else Y
    return [((X[part], y[part]), None) for part in rows]


def whole_gradient(problem, params):
    parts = [problem.log_posterior.grad(params, *batch)[0] for batch in partition(problem)]
    return {name: sum(part[name] for part in parts) / len(parts) for name in params}


def some_params(problem, seed, spread=1.0):
    layout = problem.engine.layout
    return layout.unflatten(spread * normals(layout.size, seed=seed))


# ------------------------------------------------------------------ the gradient


@pytest.mark.parametrize(("case", "gradient"), each_once(CASES, ["grad", "plain_grad"]))
class TestGradient:
    def test_the_mean_over_a_partition_is_the_whole_gradient(self, case, gradient):
        problem = with_control_variates(case)
        density = problem.engine.density
        assert isinstance(density, ControlVariates)
        for seed in range(3):
            params = some_params(problem, seed)
            parts = [getattr(density, gradient)(params, *batch)[0] for batch in partition(problem)]
            for name, whole in whole_gradient(problem, params).items():
                scatter = torch.stack([part[name] for part in parts])
                assert float(scatter.std(0).max()) > 1e-3 * float(whole.abs().max())
                close(scatter.mean(0), whole, 1e-12)

    def test_every_batch_has_the_whole_gradient_at_the_anchor(self, case, gradient):
        problem = with_control_variates(case)
        density = problem.engine.density
        whole = whole_gradient(problem, density.anchor)
        for batch in partition(problem):
            theirs, _ = getattr(density, gradient)(density.anchor, *batch)
            for name in whole:
                close(theirs[name], whole[name], 1e-9)
                assert float(theirs[name].abs().max()) < 1e-5  # as the anchor is the mode

    def test_the_log_joint_is_the_batchs_own(self, case, gradient):
        problem = with_control_variates(case)
        params = some_params(problem, 5)
        for batch in partition(problem):
            _, evaluation = getattr(problem.engine.density, gradient)(params, *batch)
            for mine, theirs in zip(evaluation, problem.log_posterior(params, *batch), strict=True):
                close(mine, theirs, 1e-13)


@pytest.mark.parametrize("case", CASES)
def test_row_gradients_are_differences_to_the_anchor(case):
    problem = with_control_variates(case)
    known, density = problem.log_posterior, problem.engine.density
    params = some_params(problem, 6)
    for batch in partition(problem):
        here, there = (known.row_gradients(at, *batch) for at in (params, density.anchor))
        rows = density.row_gradients(params, *batch)
        for name in rows:
            close(rows[name], here[name] - there[name], 1e-12)
            # N/B times their sum is what a batch's gradient differs by from the anchor's,
            # but for the prior's part, which is the same for all batches
            summed = N / B * rows[name].sum(0)
            corrected = density.grad(params, *batch)[0][name]
            prior = whole_gradient(problem, params)[name] - sum(
                known.row_gradients(params, *other)[name].sum(0) for other in partition(problem)
            )
            prior_there = whole_gradient(problem, density.anchor)[name] - sum(
                known.row_gradients(density.anchor, *other)[name].sum(0)
                for other in partition(problem)
            )
            close(corrected, summed + prior - prior_there + density.gradient[name], 1e-9)


def test_any_anchor_is_unbiased_and_is_given_in_constrained_values():
    anchor = {"w": double(0.4, -0.9), "s": torch.tensor(0.8)}
    problem = with_control_variates("minibatches", anchor)
    density = problem.engine.density
    close(density.anchor["w"], anchor["w"], 1e-12)
    close(density.anchor["s"], anchor["s"].log(), 1e-12)
    assert float(density.gradient["w"].abs().max()) > 1  # not the mode
    for seed in range(3):
        params = some_params(problem, seed)
        parts = [density.grad(params, *batch)[0] for batch in partition(problem)]
        for name, whole in whole_gradient(problem, params).items():
            close(torch.stack([part[name] for part in parts]).mean(0), whole, 1e-12)


def test_an_anchor_may_name_parameters_too():
    problem = with_control_variates("points", {"w": double(0.1, 0.3), "b": double(-0.5)})
    close(problem.engine.density.anchor["b"], [-0.5])
    without = with_control_variates("points", {"w": double(0.1, 0.3)})
    close(without.engine.density.anchor["b"], [0.2])  # where it starts


@pytest.mark.parametrize(
    ("anchor", "message"),
    [
        ({"w": double(0.1, 0.3), "s": torch.tensor(1.0), "z": double(0.0)}, r"'z'.*'w': \[2\]"),
        ({"w": double(0.1, 0.3, 0.2), "s": torch.tensor(1.0)}, r"'w'.*'w': \[2\]"),
        ({"w": double(0.1, 0.3)}, r"control_variates\['s'\]: pass constrained values"),
    ],
)
def test_anchors_that_do_not_fit_are_refused(anchor, message):
    sampler = ps.BAOA(hierarchical, lr=0.01, control_variates=anchor)
    with pytest.raises(ArgumentError, match=message):
        sampler.run((X, Y), batch_size=B, num_samples=2, seed=0, **ONE_CHAIN, **QUIET)


@pytest.mark.parametrize("anchor", ["mode", 1, [double(0.0)], None, {}])
def test_anchors_of_another_kind_are_refused(anchor):
    with pytest.raises(ArgumentError, match=r"control_variates=.*True, False, .auto. or a dict"):
        ps.BAOA(hierarchical, lr=0.01, control_variates=anchor)


# ------------------------------------------------------------------ runs


def quiet_run(method, model, data, seed=4, **kwargs):
    hyperparameters = {k: kwargs.pop(k) for k in list(kwargs) if k in HYPERPARAMETERS}
    sampler = method(model, **hyperparameters)
    return sampler.run(data, seed=seed, **QUIET, **ONE_CHAIN | kwargs)


HYPERPARAMETERS = {"lr", "control_variates", "subtract_noise", "compile", "friction", "mass"}


@pytest.mark.parametrize("row", long_but(STOCHASTIC, METHODS["BAOA"], METHODS["SGLD"]), ids=by_name)
def test_a_linear_gaussian_model_has_no_noise_left_anywhere(row):
    """Every batch of a normal mean then has the whole data's gradient, so that chains are those
    of the whole data, for every method."""
    y = normals(N, 3, seed=7)
    steps = {"num_samples": 40, "num_chains": 2}
    whole = quiet_run(row.sampler, two_means, y, lr=row.lr, **steps)
    sampler = quiet_run(
        row.sampler, two_means, y, lr=row.lr, batch_size=B, control_variates=True, **steps
    )
    without = quiet_run(row.sampler, two_means, y, lr=row.lr, batch_size=B, **steps)
    close(sampler.get_samples()["w"], whole.get_samples()["w"], 1e-8)
    far = (without.get_samples()["w"] - whole.get_samples()["w"]).abs().max()
    assert float(far) > 0.05
    table = sampler.diagnostics()
    assert table.loc["w", "minibatch_heating"] == pytest.approx(1.0, abs=1e-12)
    assert table.loc["w", "gradient_variance"] < 1e-20


@pytest.mark.parametrize("case", ["minibatches", "points"])
def test_on_the_whole_data_they_change_nothing(case):
    """With B = N the correction is nothing but rounding."""
    model, data, _ = CASES[case]
    steps = {"num_samples": 30, "lr": 0.05}
    plain = quiet_run(ps.BAOA, model, data, **steps)
    varied = quiet_run(ps.BAOA, model, data, control_variates=True, **steps)
    for name, draws in plain.get_samples().items():
        close(varied.get_samples()[name], draws, 1e-8)
    close(varied.posterior.draws.sample_stats["lp"], plain.posterior.draws.sample_stats["lp"], 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("case", long_but(["minibatches", "by itself"], "minibatches"))
def test_compiled_is_eager(case):
    model, data, kwargs = CASES[case]
    both = [
        quiet_run(
            ps.BAOA,
            model,
            data,
            lr=0.05,
            control_variates=True,
            compile=compile,
            num_samples=100,
            num_chains=2,
            **kwargs,
        )
        for compile in (True, False)
    ]
    assert "compiled" in str(both[0].diagnostics().attrs["program"])
    assert both[1].diagnostics().attrs["program"] == "eager"
    for name, draws in both[1].get_samples().items():
        close(both[0].get_samples()[name], draws, 1e-9)


@pytest.mark.parametrize("row", long_but(STOCHASTIC, METHODS["SGNHT"], METHODS["UBU"]), ids=by_name)
def test_every_method_goes_with_them(row):
    """Near the mode, where chains start here, the noise falls to a small part.  There pSGLD's
    first gradients are next to nothing, and its steps 10^5 times lr."""
    problem = with_control_variates("minibatches")
    mode = problem.log_posterior.constrain(problem.engine.density.anchor)
    sampler = row.sampler(
        hierarchical,
        lr=1e-7 if row.name == "pSGLD" else row.lr / 200,
        control_variates=True,
        init_strategy={name: value[None] for name, value in mode.items()},
    )
    sampler.run((X, Y), batch_size=B, num_samples=30, seed=4, **ONE_CHAIN, **QUIET)
    noise = sampler.posterior.draws.measurements.gradient_noise
    assert float(noise.reduction.min()) > 5


LABELS = (X[:, 0] + 0.3 * normals(N, seed=8) > 0).double()
logistic = logistic_regression(sd=2.0)


def test_the_reduction_that_is_reported_is_the_rows_own():
    """All draws are at one place, and B = N/2, so that every two batches are all rows: the
    variances are the population's, with 71 for the 72 rows that are seen at a draw."""
    place, anchor = double(0.9, -0.4), double(0.6, 0.2)
    sampler = ps.SGLD(
        logistic,
        lr=1e-14,
        control_variates={"w": anchor},
        init_strategy={"w": place.expand(2, 2).clone()},
    )
    steps = {"num_samples": 20, "num_chains": 2, "seed": 0}
    sampler.run((X, LABELS), batch_size=N // 2, **EVERY_STEP, **steps, **QUIET)
    here, there = ((LABELS - torch.sigmoid(X @ w))[:, None] * X for w in (place, anchor))
    share = 1 / (N // 2) * (1 - 0.5)
    share = share * 72 / 71
    with_them = (here - there).var(0, unbiased=False) * share
    without = here.var(0, unbiased=False) * share
    noise = sampler.posterior.draws.measurements.gradient_noise
    close(noise.variance, with_them, 1e-6)
    close(noise.reduction, without / with_them, 1e-6)
    table = sampler.diagnostics()
    assert table.loc["w", "variance_reduction"] == pytest.approx(
        float((without / with_them).min()), rel=1e-6
    )
    assert table.loc["w", "gradient_variance"] == pytest.approx(float(with_them.max()), rel=1e-6)


def test_without_control_variates_there_is_no_reduction():
    sampler = quiet_run(ps.SGLD, logistic, (X, LABELS), lr=0.01, batch_size=B, num_samples=20)
    assert "variance_reduction" not in sampler.diagnostics()


@pytest.mark.parametrize("asked", [{"control_variates": True}, {"subtract_noise": True}])
def test_step_sees_no_whole_data(asked):
    sampler = ps.SGLD(logistic, lr=0.01, num_data=N, **asked)
    with pytest.raises(ArgumentError, match=r"all rows, and .* subtract_noise need them.*use run"):
        sampler.step(X[:B], LABELS[:B])


def test_models_that_functorch_refuses():
    odd = of_rows(lambda x, w: dist.Bernoulli(logits=Doubled.apply(x @ w)), w=normal(2, sd=2.0))

    even = of_rows(lambda x, w: dist.Bernoulli(logits=2 * (x @ w)), w=normal(2, sd=2.0))

    steps = {"lr": 0.05, "control_variates": True, "batch_size": B, "num_samples": 20}
    refused, taken = (quiet_run(ps.BAOA, model, (X, LABELS), **steps) for model in (odd, even))
    close(refused.get_samples()["w"], taken.get_samples()["w"], 1e-8)


# ------------------------------------------------------------------ what minibatches add


def two_scalars(y):
    """Two normal means side by side: N(0, 1/4) and N(0, 1), with noise of sd 1 and 2."""
    a = pyro.sample("a", dist.Normal(double(0.0), 0.5).to_event(1))
    b = pyro.sample("b", dist.Normal(double(0.0), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y0", dist.Normal(a, 1.0), obs=y[:, 0])
        pyro.sample("y1", dist.Normal(b, 2.0), obs=y[:, 1])


PAIRS = normals(64, 2, seed=9) * double(1.0, 6.0)
#: Variances of rows' gradients: (y - w) / sd^2.
VARIANCES = PAIRS.var(0) / double(1.0, 16.0)
#: Precisions over N.
PRECISIONS = (double(4.0, 1.0) + 64 / double(1.0, 4.0)) / 64
LR, FRICTION, MASS = double(0.05, 0.11), double(0.8, 1.7), double(0.6, 2.3)


def by_site(values):
    return {"a": float(values[0]), "b": float(values[1])}


@pytest.mark.parametrize("row", long_but(STOCHASTIC, METHODS["BAOA"], METHODS["SGLD"]), ids=by_name)
def test_the_inflation_is_known_to_rounding(row):
    """B = N/2: every two batches are all rows.  1 + lr N V/(2 friction mass B) by element (SGLD:
    lr N V/(2 B)), times 1 - B/N, as a batch's rows are all different."""
    noise = VARIANCES / 32 * (1 - 0.5)
    if row.name == "SGLD":
        hyperparameters, added = {"lr": by_site(LR)}, LR / 2 * noise
    elif row.name == "pSGLD":
        hyperparameters, added = {"lr": by_site(LR)}, LR / 2 * noise / (1e-5 + noise.sqrt())
    elif row.name == "SGNHT":
        hyperparameters, added = {"lr": by_site(LR), "mass": by_site(MASS)}, 0 * noise
    else:
        hyperparameters = {
            "lr": by_site(LR),
            "mass": by_site(MASS),
            "friction": by_site(FRICTION),
        }
        added = LR * noise / (2 * FRICTION * MASS)
    sampler = row.sampler(two_scalars, temperature=0.7, **hyperparameters)
    sampler.run(
        PAIRS, batch_size=32, num_samples=20, seed=0, sampling="shuffle", **ONE_CHAIN, **QUIET
    )
    found = sampler.posterior.draws.measurements.gradient_noise
    close(found.variance, noise, 1e-9)
    close(found.inflation, 1 + added / (0.7 / 64), 1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = sampler.diagnostics()
    assert table.loc["a", "minibatch_heating"] == pytest.approx(float(found.inflation[0]))
    assert table.loc["b", "minibatch_heating"] == pytest.approx(float(found.inflation[1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(["BAOA", "SGLD", "SGHMC", "UBU"], "BAOA"))
def test_the_inflation_is_what_comes_out(name):
    """Drawn with replacement, by site; the exact variance of the linear recursion is within a
    quarter of the excess of what is reported, to first order in lr."""
    lr = LR / 2
    hyperparameters = {"lr": by_site(lr)}
    if name != "SGLD":
        hyperparameters |= {"friction": by_site(FRICTION), "mass": by_site(MASS)}
    chains = 200
    center = PAIRS.sum(0) / double(1.0, 4.0) / (64 * PRECISIONS)
    starts = {site: center[i].expand(chains, 1).clone() for i, site in enumerate("ab")}
    sampler = METHODS[name].sampler(two_scalars, init_strategy=starts, **hyperparameters)
    relaxation = 120 if name == "SGLD" else 60
    sampler.run(
        PAIRS,
        batch_size=4,
        num_samples=3,
        warmup_steps=3 * relaxation,
        thinning=2 * relaxation,
        num_chains=chains,
        sampling="replacement",
        seed=1,
        **QUIET,
    )
    inflation = sampler.posterior.draws.measurements.gradient_noise.inflation
    kernel = type(sampler.kernel)
    for i, site in enumerate("ab"):
        own = {key: value[site] for key, value in hyperparameters.items()}
        one = gaussian.bound(kernel(**own), 64)
        precision = PRECISIONS[i].reshape(1, 1)
        noise = float(VARIANCES[i] * 63 / 64 / 4)
        exact = gaussian.stationary(one, precision, gradient_noise=noise)[0, 0]
        clean = 1 / 64 / PRECISIONS[i]
        draws = sampler.get_samples()[site] - center[i]
        z = float((draws.square().mean() / exact - 1) / (2 / draws.numel()) ** 0.5)
        assert abs(z) < 4.4
        assert float(exact / clean) > 1.1
        assert float(inflation[i] - 1) == pytest.approx(float(exact / clean) - 1, rel=0.25)


# ------------------------------------------------------------------ noise that is subtracted


class Known:
    """A density that is asked for N alone."""

    def __init__(self, num_data):
        self.num_data = num_data


def engine_of(kernel, noise, num_data=50):
    layout = Layout.from_tensors({"w": torch.zeros(len(noise))})
    return Engine(kernel, Known(num_data), layout, len(noise), known_noise=noise)


def cool(engine, bound):
    return gaussian.Bound(bound.kernel, engine.subtract_known_noise(bound.values))


def noise_at(kernel, share, num_data=50):
    """The gradient noise that adds a share of the temperature."""
    bound = gaussian.bound(kernel, num_data)
    per_unit = bound.added_temperature(torch.ones(2))
    return share * bound.temperature / per_unit


def stationary_2d(bound, precision, noise):
    """The exact covariance of the position under a gradient noise that differs by element."""
    transition, injected, pushed = gaussian.read_out(bound, precision)
    added = injected @ injected.T + pushed @ torch.diag(noise) @ pushed.T
    return gaussian.lyapunov(transition, added)[:2, :2]


PRECISION_2D = double([1.3, 0.4], [0.4, 0.7])
SHARES = double(0.6, 0.25)
HEATED = [row for row in STOCHASTIC if row.kernel.theory.heated]


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("name", ["SGLD", "SGHMC"])
def test_injected_and_added_noise_are_the_whole(name, temperature):
    """Where gradient noise and injected noise enter at the same place, exactly."""
    kernel = METHODS[name].of(temperature=temperature)
    noise = noise_at(kernel, SHARES)
    engine = engine_of(kernel, noise)
    bound = gaussian.Bound(kernel, engine.kernel_values(kernel.values(0)))
    clean = stationary_2d(bound, PRECISION_2D, 0 * noise)
    cooled = stationary_2d(cool(engine, bound), PRECISION_2D, noise)
    close(cooled, clean, 1e-10)
    heated = stationary_2d(bound, PRECISION_2D, noise)
    assert float((heated / clean).diagonal().min()) > 1.15


@pytest.mark.parametrize("name", ["BAOA", "UBU"])
def test_injected_and_added_noise_are_the_whole_to_second_order(name):
    """At the same share of the temperature, half the step leaves a quarter of the error."""
    errors = []
    for lr in (0.08, 0.04, 0.02):
        kernel = METHODS[name].of(lr=lr)
        noise = noise_at(kernel, SHARES)
        engine = engine_of(kernel, noise)
        bound = gaussian.Bound(kernel, engine.kernel_values(kernel.values(0)))
        clean = stationary_2d(bound, PRECISION_2D, 0 * noise)
        cooled = stationary_2d(cool(engine, bound), PRECISION_2D, noise)
        errors.append(float((cooled / clean - 1).abs().max()))
    assert errors[0] < 2e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("row", HEATED, ids=by_name)
def test_no_less_than_no_noise_is_injected(row):
    kernel = row.of()
    noise = noise_at(kernel, double(0.5, 3.0))
    engine = engine_of(kernel, noise)
    bound = gaussian.Bound(kernel, engine.kernel_values(kernel.values(0)))
    cooled = cool(engine, bound)
    close(cooled.temperature / bound.temperature, double(0.5, 0.0), 1e-12)
    for field in dataclasses.fields(kernel):
        if field.name != "temperature":
            assert torch.equal(getattr(cooled, field.name), getattr(bound, field.name))


@pytest.mark.parametrize("row", [row for row in STOCHASTIC if row not in HEATED], ids=by_name)
def test_methods_that_adapt_to_the_noise_have_none_to_subtract(row):
    with pytest.raises(ArgumentError, match=r"subtract_noise.*adapts to the noise"):
        row.sampler(logistic, lr=0.1, subtract_noise=True)


BIG = 20_000


def heated(subtract, method, lr, chains=200, **others):
    """A normal mean of 20,000 rows, B = 32, from the posterior itself; z of the variance."""
    y = normals(BIG, 1, seed=11)
    exact = 1 / (4 + BIG)
    center = float(y.sum()) * exact
    starts = center + exact**0.5 * normals(chains, 1, seed=12)
    sampler = method(
        two_means, lr=lr, subtract_noise=subtract, init_strategy={"w": starts}, **others
    )
    relaxation = round(1 / lr)
    sampler.run(
        y,
        batch_size=32,
        sampling="replacement",
        num_chains=chains,
        num_samples=6,
        warmup_steps=2 * relaxation,
        thinning=2 * relaxation,
        seed=13,
        **QUIET,
    )
    draws = sampler.get_samples()["w"] - center
    return sampler, float(draws.square().mean() / exact), (2 / draws.numel()) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lr"), long_but([(ps.SGLD, 2e-3), (ps.BAOA, 2e-3)], (ps.BAOA, 2e-3))
)
def test_twenty_thousand_rows_in_batches_of_32(method, lr):
    """1 + lr N V/(2 B) = 1.62 without (friction 1), 1 with; draws two relaxation times apart are
    correlated to e^-2 or e^-4 in squares, which the standard error has 10% for."""
    expected = 1 + lr * BIG / 64
    _, factor, error = heated(False, method, lr)
    assert abs(factor - expected) < 4.4 * 1.1 * error * expected
    assert expected > 1.6
    sampler, factor, error = heated(True, method, lr)
    assert abs(factor - 1) < 4.4 * 1.1 * error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        reported = sampler.diagnostics().loc["w", "minibatch_heating"]
    # V from 4096 rows at the mode to 2.2%, and from 8192 at draws to 1.6%
    assert reported == pytest.approx(1, abs=4.4 * 0.62 * 0.028)


class TestWhereTheNoiseIsTooMuch:
    """V/B of the site b is 3 times what its lr leaves room for; a has none too much."""

    y = PAIRS

    def sampler(self, lr_b):
        return ps.SGLD(two_scalars, lr={"a": 0.05, "b": lr_b}, subtract_noise=True)

    def run(self, lr_b):
        return self.sampler(lr_b).run(
            self.y,
            batch_size=8,
            sampling="replacement",
            num_samples=20,
            seed=1,
            **ONE_CHAIN,
            **QUIET,
        )

    def test_a_warning_names_the_site_and_how_much_lower_lr_must_be(self):
        noise = float(VARIANCES[1] * 63 / 64 / 8)
        limit = 2 / 64 / noise  # lr N V/(2 B) = 1
        with pytest.warns(UserWarning, match=r"subtract_noise") as caught:
            self.run(3 * limit)
        message = str(next(w for w in caught if "subtract_noise" in str(w.message)).message)
        assert "1 of 2 elements (site 'b')" in message
        share = float(message.split("multiply lr by less than ")[1].split(",")[0])
        times = float(message.split("stays up to ")[1].split(" ")[0])
        # V from 4096 rows
        assert share == pytest.approx(1 / 3, rel=0.1)
        assert times == pytest.approx(3, rel=0.1)

    def test_the_advice_works(self):
        noise = float(VARIANCES[1] * 63 / 64 / 8)
        limit = 2 / 64 / noise
        with pytest.warns(UserWarning, match="subtract_noise") as caught:
            self.run(3 * limit)
        message = str(next(w for w in caught if "subtract_noise" in str(w.message)).message)
        share = float(message.split("multiply lr by less than ")[1].split(",")[0])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*subtract_noise.*")
            self.run(3 * limit * share * 0.98)

    def test_what_is_left_is_reported(self):
        noise = float(VARIANCES[1] * 63 / 64 / 8)
        with pytest.warns(UserWarning, match="subtract_noise"):
            sampler = self.run(3 * 2 / 64 / noise)
        inflation = sampler.posterior.draws.measurements.gradient_noise.inflation
        assert float(inflation[0]) == pytest.approx(1, abs=0.05)
        assert float(inflation[1]) == pytest.approx(3, rel=0.1)


def test_the_noise_that_is_subtracted_is_that_of_the_sampling():
    """At B = N/2 batches of different rows have half the noise (and N/(N - 1) of it)."""
    known = {}
    for sampling in ("shuffle", "replacement"):
        problem = found_out(
            two_scalars, PAIRS, batch_size=32, sampling=sampling, asked={"subtract_noise": True}
        )
        known[sampling] = problem.engine.known_noise
    close(known["shuffle"], VARIANCES / 32 / 2, 2e-3)  # from 4096 rows, 64 times all of them
    torch.testing.assert_close(
        known["replacement"], VARIANCES / 32 * 63 / 64, rtol=4.4 * (2 / 4096) ** 0.5, atol=0
    )


def test_no_noise_is_subtracted_that_batches_cancel_themselves():
    """Shuffled batches' errors sum to zero over an epoch, so that little is left to subtract."""
    y = normals(250, 1, seed=11)
    sampler = ps.SGLD(two_means, lr=0.05, subtract_noise=True)
    for sampling in ("shuffle", "symmetric"):
        with pytest.raises(ArgumentError, match=rf"subtract_noise with sampling='{sampling}'"):
            sampler.run(y, batch_size=25, num_samples=2, sampling=sampling, **ONE_CHAIN, **QUIET)
    sampler.run(y, batch_size=25, num_samples=2, seed=0, **ONE_CHAIN, **QUIET)
    assert sampler.diagnostics().attrs["sampling"] == "replacement"


def test_points_have_no_noise_to_subtract():
    problem = found_out(
        poisson_with_param, (X, COUNTS), batch_size=B, asked={"subtract_noise": True}
    )
    assert problem.engine.known_noise.shape == (3,)
    assert float(problem.engine.known_noise[2]) == 0.0
    assert float(problem.engine.known_noise[:2].min()) > 0


def test_the_whole_data_have_no_noise_to_subtract():
    sampler = ps.BAOA(logistic, lr=0.1, subtract_noise=True)
    with pytest.raises(ArgumentError, match="the whole data at every step has no noise"):
        sampler.run((X, LABELS), num_samples=2, seed=0, **ONE_CHAIN, **QUIET)


def test_control_variates_leave_no_noise_to_subtract():
    with pytest.raises(ArgumentError, match="control_variates leave no noise to subtract"):
        ps.BAOA(logistic, lr=0.1, subtract_noise=True, control_variates=True)


def test_a_model_without_rows_has_no_noise_that_is_known():
    function = ps.LogPosterior.from_function(
        lambda params, batch: -0.5 * (params["w"] - batch[0].mean()).square().sum(),
        {"w": double(0.0)},
        num_data=N,
    )
    sampler = ps.BAOA(function, lr=0.1, subtract_noise=True)
    with pytest.raises(ArgumentError, match="subtract_noise needs the gradient of single rows"):
        sampler.run((Y,), batch_size=B, num_samples=2, seed=0, **ONE_CHAIN, **QUIET)
