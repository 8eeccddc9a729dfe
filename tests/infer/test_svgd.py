"""Particles against the published algorithm written out in NumPy, against posteriors whose moments
are known, and against each other."""

import functools
import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torchopt
from both_arviz import groups_of
from models import normal, of_rows
from pyro.infer.autoguide import init_to_value
from reference import Doubled, close, double, normals
from row_datasets import RowByRow
from runs import QUIET
from torch.utils.data import DataLoader

import pyro_scale as ps
from pyro_scale.data.row_sampler import RowIndices
from pyro_scale.errors import ArgumentError, CallError, ConvergenceWarning, NonFiniteError

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:the particles' log joint still changed"),
]

N, B, D = 23, 5, 2
X = normals(N, D, seed=1)
Y = X @ double(0.7, -1.2) + 0.5 * normals(N, seed=2)
START = 0.3 * normals(6, D, seed=3)


def falling(lr, steps):
    return torchopt.adam(torchopt.schedule.polynomial_schedule(lr, 1e-3 * lr, 1.0, steps))


regression = of_rows(lambda x, w: dist.Normal(x @ w, 0.5), w=normal(D, sd=2.0))
logistic = of_rows(lambda x, w: dist.Bernoulli(logits=x @ w), w=normal(D, sd=2.0))


def run_svgd(
    optimizer, num_steps, batch_size=B, start=START, model=regression, data=None, **options
):
    how = {"num_particles": len(start), "init_strategy": {"w": start}, "compile": False, **options}
    svgd = ps.SVGD(model, optimizer=optimizer, **how)
    return svgd.run(data or (X, Y), num_steps=num_steps, batch_size=batch_size, **QUIET)


def particles(svgd):
    return svgd.get_samples()["w"]


# ------------------------------------------------------------------ the algorithm


def phi(theta, scores, temperature):
    """The released code's direction (dilinwang820/Stein-Variational-Gradient-Descent), pair by
    pair."""
    n = len(theta)
    squared = np.array([[((a - b) ** 2).sum() for b in theta] for a in theta])
    h = np.sqrt(0.5 * np.median(squared) / np.log(n + 1))
    found = np.zeros_like(theta)
    for i in range(n):
        for j in range(n):
            k = np.exp(-squared[i, j] / h**2 / 2)
            slope = -k * (theta[j] - theta[i]) / h**2  # of k by its first argument, x_j
            found[i] += (k * scores[j] + temperature * slope) / n
    return found


def scores(theta, chosen):
    """Of the log joint's estimate from some rows, in nats."""
    x, y = X[chosen].numpy(), Y[chosen].numpy()
    likelihood = np.stack([x.T @ (y - x @ w) / 0.5**2 for w in theta])
    return N / len(x) * likelihood - theta / 2.0**2


def batches(num_steps, size=B):
    """The rows of each step."""
    return RowIndices(0, range(1), N, size, "shuffle").span(0, num_steps)[0]


def by_hand(num_steps, lr, adagrad, temperature, size=B, start=START):
    """Gradient descent, or the released code's AdaGrad, on minibatches."""
    theta, history = start.numpy().copy(), 0.0
    for chosen in batches(num_steps, size):
        step = phi(theta, scores(theta, chosen), temperature) / N
        if adagrad:
            history = 0.9 * history + 0.1 * step**2
            step = step / (np.sqrt(history) + 1e-6)
        theta = theta + lr * step
    return torch.from_numpy(theta)


#: Optimizers, and whether they are the released code's.
OPTIMIZERS = {
    "sgd": (0.2, torchopt.sgd(0.2), False),
    "adagrad": (0.02, torchopt.rmsprop(0.02, alpha=0.9, eps=1e-6), True),
    "torch's": (0.02, lambda p: torch.optim.RMSprop(p, lr=0.02, alpha=0.9, eps=1e-6), True),
}


@pytest.mark.parametrize("count", [5, 6])  # the median is one number, or between two
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_the_published_ones(name, count):
    """Scores are scaled by N/B, the repulsion by the temperature, batches are the same for all."""
    lr, optimizer, adagrad = OPTIMIZERS[name]
    svgd = run_svgd(optimizer, 12, start=START[:count], temperature=0.7)
    close(particles(svgd), by_hand(12, lr, adagrad, 0.7, start=START[:count]), 1e-11)


shifted = of_rows(
    lambda x, w: dist.Normal(x @ w + pyro.param("shift", double(0.4)[0]), 0.5), w=normal(D, sd=2.0)
)


COMPILED = {
    "all rows": (regression, (X, Y), None),
    "rows by index, a param": (shifted, (X, Y), B),
    "a loader": (regression, DataLoader(RowByRow(X, Y), B), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_the_compiled_loop_takes_the_same_steps(name):
    model, data, size = COMPILED[name]
    eager, compiled = (
        run_svgd(torchopt.adam(0.02), 60, size, model=model, data=data, compile=compile)
        for compile in (False, True)
    )
    assert compiled.to_arviz().attrs["program"] == "compiled loop"
    close(particles(compiled), particles(eager), 1e-12)
    close(compiled.trace, eager.trace, 1e-12)
    for param, value in eager.params.items():
        close(compiled.params[param], value, 1e-12)


def test_one_particle_is_map():
    """k = 1, and there is nobody to be repelled by; the sites are real, so there is no Jacobian."""
    adam = torchopt.adam(0.02)
    at = {"w": START[:1]}
    mode = ps.MAP(regression, optimizer=adam, init_strategy=at, compile=False)
    mode.run((X, Y), num_steps=40, batch_size=B, **QUIET)
    svgd = run_svgd(adam, 40, start=START[:1])
    close(particles(svgd), mode.get_samples()["w"], 1e-14)
    close(svgd.trace, mode.trace[0], 1e-12)


def test_in_another_order_they_go_to_the_same_places():
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    adam = torchopt.adam(0.02)
    close(
        particles(run_svgd(adam, 30, start=START[order])),
        particles(run_svgd(adam, 30))[order],
        1e-12,
    )


def test_a_param_goes_by_the_mean_gradient():
    svgd = run_svgd(torchopt.sgd(0.2), 1, None, model=shifted)
    residuals = Y - 0.4 - START @ X.T
    close(svgd.params["shift"], 0.4 + 0.2 * residuals.sum(1).mean() / 0.5**2 / N, 1e-12)
    slopes = (residuals @ X / 0.5**2 - START / 2.0**2).numpy()
    directions = torch.from_numpy(phi(START.numpy(), slopes, 1.0)) / N
    close(particles(svgd), START + 0.2 * directions, 1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_single_steps_are_those_of_a_run(name):
    """On the run's batches, one after another, a param among what moves."""
    run = run_svgd(OPTIMIZERS[name][1], 7, model=shifted)
    svgd = ps.SVGD(
        shifted,
        num_particles=len(START),
        optimizer=OPTIMIZERS[name][1],
        init_strategy={"w": START},
        num_data=N,
    )
    for chosen, expected in zip(batches(7), run.trace, strict=True):
        log_joint = svgd.step(X[chosen], Y[chosen])
        assert log_joint == pytest.approx(float(expected), rel=1e-12)
        close(svgd.trace, expected[None], 1e-12)
    close(particles(svgd), particles(run), 1e-12)
    close(svgd.params["shift"], run.params["shift"], 1e-12)
    with pytest.raises(ArgumentError, match="which keep no data"):
        svgd.log_likelihood()
    assert svgd.log_likelihood(data=(X, Y))["y"].shape == (6, N)
    svgd.run((X, Y), num_steps=7, batch_size=B, **QUIET)  # afresh
    close(particles(svgd), particles(run), 1e-12)


def test_a_step_that_breaks_says_which_particle():
    svgd = ps.SVGD(regression, num_particles=3, optimizer=torchopt.sgd(1e200), num_data=N)
    svgd.step(X[:B], Y[:B])
    with pytest.raises(NonFiniteError, match="particle 0 at step 1"):
        svgd.step(X[:B], Y[:B])


@pytest.mark.slow
def test_models_that_vmap_refuses_and_that_subsample_take_the_same_steps():
    def refused(x, y):
        regression(Doubled.apply(x) / 2, y)

    def own(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(D), 2.0).to_event(1))
        with pyro.plate("data", len(x), subsample_size=B) as i:
            pyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])

    sgd, expected = torchopt.sgd(0.2), by_hand(5, 0.2, False, 1.0)
    for model, size in ((refused, B), (own, None)):
        for compile in (False, True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is not compiled
                svgd = run_svgd(sgd, 5, size, model=model, compile=compile)
            close(particles(svgd), expected, 1e-11)


# ------------------------------------------------------------------ posteriors


def of_sd(size, sd):
    def model():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("w", dist.Normal(torch.zeros(size), sd).to_event(1))

    return model


def settled(model, num_particles, lr, steps, data=None, **options):
    svgd = ps.SVGD(model, num_particles=num_particles, optimizer=falling(lr, steps), **options)
    return particles(svgd.run(data, num_steps=steps, **QUIET))


def test_the_papers_mixture():
    """Its figure 2: 1/3 N(-2, 1) + 2/3 N(2, 1), from N(-10, 1), 100 particles.  E[x], E[x^2] and
    E[cos(v x + b)] are five times as near as those of as many draws."""
    n, means = 100, double(-2.0, 2.0)

    def log_density(params, batch):
        return torch.logsumexp((double(1, 2) / 3).log() - (params["w"] - means).square() / 2, 0)

    target = ps.LogPosterior.from_function(log_density, {"w": double(0.0)[0]}, 1)
    start = {"w": -10 + normals(n, seed=5)}
    x = settled(target, n, 2.0, 300, init_strategy=start)
    assert abs(float(x.mean()) - 2 / 3) < 0.2 * (41 / 9 / n) ** 0.5
    assert abs(float(x.square().mean()) - 5) < 0.2 * (18 / n) ** 0.5
    v, b = normals(20, 1, seed=6), 6 * normals(20, 1, seed=7)
    found = torch.cos(v * x + b).mean(1)
    weighted = torch.cos(b - 2 * v) + 2 * torch.cos(b + 2 * v)
    truth = (torch.exp(-v.square() / 2) * weighted / 3)[:, 0]
    both = (torch.exp(-2 * v.square()) * (torch.cos(2 * b - 4 * v) + 2 * torch.cos(2 * b + 4 * v)))[
        :, 0
    ]
    variance = (1 + both / 3) / 2 - truth.square()
    assert float((found - truth).square().mean()) < 0.2**2 * float(variance.mean()) / n


@pytest.mark.slow
def test_a_gaussian_in_one_dimension():
    w = settled(of_sd(1, 3.0), 50, 0.5, 300)
    assert abs(float(w.mean())) < 0.01 * 3.0
    assert float(w.std()) == pytest.approx(3.0, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_where_dimensions_are_as_many_they_form_a_simplex(temperature):
    """Of n particles in n - 1 dimensions or more, all pairs are h log(n + 1) apart, squared, as the
    median is; phi is 0 where h = 2 T sd^2.  So the variance falls as log(n + 1) / D."""
    n, size, sd = 6, 8, 3.0
    w = settled(of_sd(size, sd), n, 1.0, 400, temperature=temperature)
    apart = 2 * temperature * sd**2 * math.log(n + 1)
    close(torch.pdist(w).square(), torch.full((15,), apart), 1e-6)
    close(w.mean(0), torch.zeros(size), 1e-6)
    close(w.var(0, correction=0).sum(), apart / 2 * (n - 1) / n, 1e-6)


@pytest.mark.long
def test_a_logistic_regression():
    """Means to a twentieth of a sd and sds to 8%, of sums over a grid."""
    x, y = X, (Y > 0).double()
    axis = torch.linspace(-9, 9, 400)
    grid = torch.cartesian_prod(axis, axis)
    logits = grid @ x.T
    rows = y * logits - torch.nn.functional.softplus(logits)
    weights = torch.softmax(rows.sum(1) - grid.square().sum(1) / 8, 0)[:, None]
    mean = (weights * grid).sum(0)
    sd = (weights * (grid - mean).square()).sum(0).sqrt()
    w = settled(logistic, 50, 0.5, 400, (x, y))
    assert bool(((w.mean(0) - mean).abs() < 0.05 * sd).all()), (w.mean(0), mean)
    assert bool(((w.std(0) / sd - 1).abs() < 0.08).all()), (w.std(0), sd)


# ------------------------------------------------------------------ results


@functools.cache
def finished():
    return run_svgd(torchopt.adam(0.05), 200, None)


@pytest.mark.slow
def test_particles_are_draws():
    svgd = finished()
    w = particles(svgd)
    assert torch.equal(svgd.get_samples(group_by_chain=True)["w"], w[None])
    idata = svgd.to_arviz()
    assert groups_of(idata) == {"posterior", "sample_stats", "observed_data", "log_likelihood"}
    assert np.array_equal(idata.posterior.w.values[0], w.numpy())
    close(svgd.log_likelihood()["y"], dist.Normal(w @ X.T, 0.5).log_prob(Y))
    assert svgd.predict(X, None)["y"].shape == (6, N)
    assert repr(svgd) == "<SVGD(temperature=1), N = 23, 1 x 6 draws>"
    starts = svgd.starts(8, seed=0)["w"]
    assert torch.equal(starts, w[torch.arange(8) % 6])
    ps.BAOA(regression, lr=0.01, init_strategy=svgd).run(
        (X, Y), num_samples=1, warmup_steps=0, thinning=1, **QUIET
    )


@pytest.mark.slow
def test_there_is_no_r_hat_and_no_density():
    svgd, w = finished(), particles(finished())
    with pytest.raises(ArgumentError, match="no R-hat and no ESS, because its particles are"):
        svgd.diagnostics()
    with pytest.raises(AttributeError, match="SVGD gives draws and no density"):
        svgd.psis()
    table = svgd.summary()
    assert not [name for name in table if name.startswith(("r_hat", "ess", "mcse"))]
    assert table.loc["w[0]", "mean"] == pytest.approx(float(w[:, 0].mean()), abs=6e-4)
    moments = svgd.moments()["w"]
    assert bool((moments.r_hat.isnan() & moments.ess.isnan()).all())
    close(moments.mean, w.mean(0))
    compared = ps.compare({"SVGD": svgd, "Laplace": ps.Laplace(regression).run((X, Y), **QUIET)})
    assert compared.reference == "Laplace"
    assert bool(compared.table.loc["SVGD", ["r_hat", "ess"]].isna().all())
    assert svgd.ksd() > 0


def test_results_come_back_from_a_file(tmp_path):
    svgd = finished()
    svgd.save(tmp_path / "particles")
    loaded = ps.SVGD.load(tmp_path / "particles", regression)
    assert torch.equal(particles(loaded), particles(svgd))
    assert torch.equal(loaded.trace, svgd.trace)
    assert loaded.converged == svgd.converged
    further = ps.SVGD(
        regression, num_particles=6, optimizer=torchopt.sgd(0.0), init_strategy=loaded
    )
    close(particles(further.run((X, Y), num_steps=1, **QUIET)), particles(svgd), 0)


@pytest.mark.slow
def test_it_says_whether_it_has_come_to_rest():
    with pytest.warns(ConvergenceWarning, match="log joint still changed"):
        away = run_svgd(torchopt.sgd(1e-3), 40, None)
    assert not away.converged
    assert run_svgd(falling(0.1, 400), 400, None).converged


def test_what_cannot_be_is_refused():
    at_zero = functools.partial(init_to_value, values={"w": torch.zeros(D)})
    with pytest.raises(ArgumentError, match="two particles start in the same place"):
        ps.SVGD(regression, init_strategy=at_zero).run((X, Y), num_steps=2, **QUIET)
    with pytest.raises(NonFiniteError, match="particle 0 at step"):
        run_svgd(torchopt.sgd(1e9), 200)
    with pytest.raises(ArgumentError, match="pass one of num_steps and num_epochs"):
        ps.SVGD(regression).run((X, Y), **QUIET)
    with pytest.raises(CallError, match=r"takes \(x, y=None\): .*'linearized'"):
        run_svgd(torchopt.sgd(1e-3), 1).predict(X, Y, linearized=True)
    for name, there_is in {
        "num_chains": "num_particles=, of the constructor",
        "mesh": "nothing: one process moves all particles",
        "checkpoint": "save\\(path\\), which keeps the results",
        "resume": "save\\(path\\), which keeps the results",
    }.items():
        with pytest.raises(ArgumentError, match=f"no argument '{name}': here it is {there_is}"):
            ps.SVGD(regression).run((X, Y), num_steps=2, **{name: 2})


def test_an_epoch_goes_through_all_rows():
    svgd = ps.SVGD(regression, num_particles=3).run((X, Y), num_epochs=2, batch_size=B, **QUIET)
    assert len(svgd.trace) == 2 * math.ceil(N / B)
