"""Variational inference: gradients and the bound against autograd and exact expectations, optima
against conjugate models.

Statistical tests have fixed seeds; were those drawn anew, a z beyond 4.4 would come once in
90,000 comparisons.
"""

import functools
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torchopt
from gaussian import Bound
from models import normal, of_network, of_rows
from pyro.infer.autoguide import init_to_value
from reference import close, double, normals, pyro_log_joint
from repetitions import long_but
from torch import nn
from torch.distributions import MultivariateNormal, constraints

import pyro_scale as ps
from pyro_scale import kernels
from pyro_scale.errors import ApproximationWarning, ArgumentError, NonFiniteError, NotRunError
from pyro_scale.kernels.optimizer import is_pure
from pyro_scale.kernels.vi import VIState
from pyro_scale.rng.streams import NoiseStream

pytestmark = pytest.mark.usefixtures("float64")

SETTINGS = {"progress": False, "seed": 0}


# ------------------------------------------------------------------ kernels

ROWS, TEMPERATURE = 50, 0.7
KINDS = {"diag": kernels.MeanField, "dense": kernels.FullRank}
structures = pytest.mark.parametrize("structure", KINDS)
MEAN = double(0.3, -0.5, 0.8)
SPREADS = {
    "diag": double(-0.4, 0.3, -1.1),
    "dense": double([-0.4, 0.0, 0.0], [0.5, 0.3, 0.0], [-0.7, 0.2, -1.1]),
}


class Target:
    """A log joint in nats, differentiated by autograd."""

    def __init__(self, log_joint, num_data=ROWS):
        self.log_joint, self.num_data = log_joint, num_data

    def grad(self, position):
        slope, value = torch.func.grad_and_value(self.log_joint)(position)
        return slope / self.num_data, ps.Evaluation(value, value, value)


def hills(x):
    """A log joint that is not quadratic, so that signs and scales all show."""
    return -3 * x.pow(4).sum(-1) - 2 * (x[..., 0] * x[..., 1]) + 4 * torch.sin(3 * x).sum(-1)


def factor(spread):
    """The covariance's factor."""
    if spread.dim() == 1:
        return spread.exp().diag()
    return torch.tril(spread, -1) + spread.diagonal().exp().diag()


def bound(log_joint, mean, spread, noise, landing=False):
    """The reparameterized estimate of the bound, in nats, as a function of q."""
    scale = factor(spread)
    draws = mean + noise @ scale.mT
    if landing:
        fixed = MultivariateNormal(mean.detach(), scale_tril=scale.detach())
        entropy = -fixed.log_prob(draws).mean()
    else:
        entropy = MultivariateNormal(mean, scale_tril=scale).entropy()
    return log_joint(draws).mean() + TEMPERATURE * entropy


def sgd(structure, num_particles=1, landing=False, temperature=TEMPERATURE):
    """A kernel whose update adds the gradient itself."""
    optimizer = torchopt.sgd(1.0)
    kind = KINDS[structure]
    kernel = kind(optimizer=optimizer, num_particles=num_particles, sticking_the_landing=landing)
    return Bound(kernel, {"temperature": torch.as_tensor(temperature / ROWS)})


def moved(kernel, target, noise, mean=MEAN, spread=None):
    """(By what an update changes mean and spread, the bound that it reports)."""
    spread = SPREADS["diag"] if spread is None else spread
    state = VIState(mean, spread, torchopt.sgd(1.0).init([mean, spread]))
    after, evaluation = kernel.update(state, target, noise)
    return after.position - mean, after.spread - spread, evaluation.log_joint


@pytest.mark.parametrize("num_particles", [1, 4])
@pytest.mark.parametrize("landing", [False, True])
@structures
def test_an_update_is_autograds_gradient_over_n(structure, landing, num_particles):
    noise = normals(num_particles, 3, seed=5)
    kernel = sgd(structure, num_particles, landing)
    assert kernel.normals == num_particles
    slope, widening, reported = moved(kernel, Target(hills), noise, spread=SPREADS[structure])
    leaves = [MEAN.clone().requires_grad_(), SPREADS[structure].clone().requires_grad_()]
    estimate = bound(hills, *leaves, noise, landing)
    expected = torch.autograd.grad(estimate, leaves)
    close(slope, expected[0] / ROWS)
    close(widening, expected[1] / ROWS)
    close(reported, bound(hills, MEAN, SPREADS[structure], noise))


PRECISION = double([9.0, 3.0, -2.0], [3.0, 6.0, 1.0], [-2.0, 1.0, 4.0])
CENTRE = double(0.5, -1.0, 0.2)


def quadratic(precision):
    def log_joint(x):
        away = x - CENTRE
        return -7.5 - ((away @ precision) * away).sum(-1) / 2

    return log_joint


@structures
def test_sticking_the_landing_has_no_noise_where_q_is_the_posterior(structure):
    precision = PRECISION if structure == "dense" else PRECISION.diagonal().diag()
    scale = torch.linalg.cholesky(torch.linalg.inv(precision) * TEMPERATURE)
    logs = scale.diagonal().log()
    spread = logs if structure == "diag" else scale.tril(-1) + logs.diag()
    target, noise = Target(quadratic(precision)), normals(2, 3, seed=1)
    for landing in (True, False):
        kernel = sgd(structure, 2, landing)
        slope, widening, _ = moved(kernel, target, noise, CENTRE, spread)
        assert (slope.abs().max() < 1e-12) == landing
        assert (widening.abs().max() < 1e-12) == landing


def z_scores(draws, expected):
    """Of the mean over the first dimension; what has no noise must be equal."""
    error = draws.mean(0) - expected
    sd = draws.std(0) / len(draws) ** 0.5
    return torch.where(sd > 1e-12, error / sd, torch.where(error.abs() < 1e-12, 0.0, torch.inf))


@pytest.mark.parametrize("landing", [False, True])
@structures
def test_gradients_and_the_reported_bound_are_unbiased(structure, landing):
    """For a Gaussian target all expectations are exact."""
    kernel, spread = sgd(structure, landing=landing), SPREADS[structure]

    class Exact:
        num_data = ROWS

        def grad(self, x):
            value = quadratic(PRECISION)(x)
            return -PRECISION @ (x - CENTRE) / ROWS, ps.Evaluation(value, value, value)

    def update(noise):
        return moved(kernel, Exact(), noise, spread=spread)

    slope, widening, reported = torch.vmap(update)(normals(20_000, 1, 3, seed=2))
    away, scale = MEAN - CENTRE, factor(spread)
    assert z_scores(slope, -PRECISION @ away / ROWS).abs().max() < 4.4
    of_factor = -PRECISION @ scale  # d/dL of -tr(P L L')/2, and of the entropy below
    of_factor = of_factor + TEMPERATURE * torch.linalg.inv(scale).mT
    by_log = torch.diag(of_factor.diagonal() * scale.diagonal())
    expected = by_log.diagonal() if structure == "diag" else of_factor.tril(-1) + by_log
    assert z_scores(widening, expected / ROWS).abs().max() < 4.4
    entropy = (scale.diagonal().log() + (1 + math.log(2 * math.pi)) / 2).sum()
    energy = (away @ PRECISION @ away + torch.trace(PRECISION @ scale @ scale.mT)) / 2
    assert z_scores(reported, -7.5 - energy + TEMPERATURE * entropy).abs() < 4.4


@pytest.mark.parametrize("landing", [False, True])
@structures
def test_elements_at_temperature_zero_have_neither_noise_nor_entropy(structure, landing):
    """As points are: the last element here."""
    temperature = TEMPERATURE * double(1.0, 1.0, 0.0)
    noise = torch.cat([normals(2, 2, seed=3), torch.zeros(2, 1)], dim=1)
    spread = SPREADS[structure].clone()
    if structure == "dense":
        spread[2, :2] = 0
    kernel = sgd(structure, 2, landing, temperature)
    slope, widening, reported = moved(kernel, Target(hills), noise, spread=spread)
    draws = MEAN + noise @ factor(spread).mT
    assert torch.equal(draws[:, 2], MEAN[2].expand(2))
    at_draws = torch.func.grad(lambda x: hills(x).mean())(draws).sum(0)
    close(slope[2], at_draws[2] / ROWS)
    assert not widening[2:].any()
    entropy = (spread if structure == "diag" else spread.diagonal())[:2].sum()
    entropy = entropy + 1 + math.log(2 * math.pi)
    close(reported, hills(draws).mean() + TEMPERATURE * entropy)


@structures
def test_q_starts_at_the_position_with_the_first_sds(structure):
    for given, sd in (({}, 0.1), ({"init_scale": 0.03}, 0.03)):
        state = KINDS[structure](optimizer=torchopt.sgd(1.0), **given).init(
            MEAN, {}, torch.zeros(3)
        )
        assert torch.equal(state.position, MEAN)
        close(factor(state.spread), sd * torch.eye(3))


@structures
def test_a_fit_starts_with_the_first_sds(structure):
    still = {"optimizer": torchopt.sgd(1e-30), "structure": structure, "init_scale": 0.03}
    fit = ps.VI(linear, **still).run((X, Y), num_steps=1, **SETTINGS)
    close(fit.fit.gaussians[0].variance, 0.03**2 * torch.ones(3))


def test_ivon_is_as_published():
    """Shen et al. (2024), equations 4 to 8 without weight decay, element by element."""
    lr, momentum, forgetting, first = 0.3, 0.8, 0.9, 2.5
    hypers = {"lr": lr, "momentum": momentum, "forgetting": forgetting, "first_curvature": first}
    values = {**hypers, "temperature": TEMPERATURE / ROWS}
    kernel = Bound(kernels.IVON(**hypers), {k: torch.tensor(v) for k, v in values.items()})
    state = kernel.init(MEAN, torch.zeros(3))
    slope = torch.func.grad(hills)
    m, h, g_mean = MEAN, torch.full((3,), first), torch.zeros(3)
    for step, eps in enumerate(normals(6, 3, seed=4), start=1):
        state, evaluation = kernel.update(state, Target(hills), eps[None])
        sd = (ROWS * h / TEMPERATURE) ** -0.5
        theta = m + sd * eps
        entropy = MultivariateNormal(m, sd.square().diag()).entropy()
        close(evaluation.log_joint, hills(theta) + TEMPERATURE * entropy)
        g = -slope(theta) / ROWS  # of the loss
        h_hat = g * (theta - m) / sd**2
        g_mean = momentum * g_mean + (1 - momentum) * g
        h_next = forgetting * h + (1 - forgetting) * h_hat
        h = h_next + (1 - forgetting) ** 2 * (h - h_hat) ** 2 / (2 * h)
        m = m - lr * g_mean / (1 - momentum**step) / h
        close(state.position, m)
        close(state.curvature, h)
    assert (h - first).abs().min() > 1e-3


def test_ivons_points_have_no_noise_and_keep_their_curvature():
    values = {"lr": 0.1, "momentum": 0.9, "forgetting": 0.9, "first_curvature": 4.0}
    bound_values = {k: torch.tensor(v) for k, v in values.items()}
    bound_values["temperature"] = TEMPERATURE / ROWS * double(1.0, 1.0, 0.0)
    kernel = Bound(kernels.IVON(), bound_values)
    state = kernel.init(MEAN, torch.zeros(3))
    after, evaluation = kernel.update(state, Target(hills), double([0.4, -1.0, 0.0]))
    sd = (TEMPERATURE / ROWS / 4.0) ** 0.5
    theta = MEAN + sd * double(0.4, -1.0, 0.0)
    close(after.curvature[2], 4.0)
    assert (after.curvature[:2] != 4.0).all()
    close(after.position[2], MEAN[2] + 0.1 * torch.func.grad(hills)(theta)[2] / ROWS / 4.0)
    entropy = 2 * (math.log(sd) + (1 + math.log(2 * math.pi)) / 2)
    close(evaluation.log_joint, hills(theta) + TEMPERATURE * entropy)


# ------------------------------------------------------------------ a conjugate model

N, B, SD, PRIOR = 40, 20, 1.0, 0.15
X = normals(N, 3, seed=1) @ double([1.0, 0.6, -0.3], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0])
Y = X @ double(1.0, -0.5, 0.3) + SD * normals(N, seed=2)


linear = of_rows(lambda x, w: dist.Normal(x @ w, SD), w=normal(3, sd=PRIOR))


LAMBDA = torch.eye(3).double() / PRIOR**2 + X.T @ X / SD**2
POSTERIOR = torch.linalg.solve(LAMBDA, X.T @ Y / SD**2)
COVARIANCE = SD**2 * torch.eye(N).double() + PRIOR**2 * X @ X.T
EVIDENCE = MultivariateNormal(0 * Y, COVARIANCE).log_prob(Y)


def exact_bound(covariance, temperature=1.0):
    """E[log joint] + T H of a Gaussian at the posterior's mean."""
    peak = EVIDENCE - MultivariateNormal(POSTERIOR, precision_matrix=LAMBDA).log_prob(POSTERIOR)
    peak = peak + 2 * MultivariateNormal(POSTERIOR, precision_matrix=LAMBDA).log_prob(POSTERIOR)
    entropy = MultivariateNormal(POSTERIOR, covariance).entropy()
    return float(peak - torch.trace(LAMBDA @ covariance) / 2 + temperature * entropy)


NEAR = {"w": POSTERIOR[None]}


def falling(count):
    """A learning rate that averages over ever more steps."""
    return 2.0 / (count + 200.0)


VIAS = {
    "diag": functools.partial(ps.VI, optimizer=torchopt.adam(falling)),
    "dense": functools.partial(ps.VI, structure="dense", optimizer=torchopt.adam(falling)),
    "IVON": functools.partial(
        ps.IVON,
        lr=lambda step: 3.0 / (step + 30),
        forgetting=lambda step: 1 - 2 / (step + 2000),
    ),
}


STEPS = {"diag": 500_000, "dense": 500_000, "IVON": 200_000}


@functools.cache
def optimum(kind, temperature=1.0):
    make, num_steps = VIAS[kind](linear, temperature=temperature, compile=True), STEPS[kind]
    return make.run((X, Y), num_steps=num_steps, batch_size=B, **SETTINGS)


def best(kind, temperature=1.0):
    """The optimum's covariance."""
    if kind == "dense":
        return temperature * torch.linalg.inv(LAMBDA)
    return temperature * torch.diag(1 / LAMBDA.diagonal())


def check_optimum(fit, kind, temperature, tolerance):
    """Variances and means to a part of the optimum's sds."""
    (gaussian,) = fit.fit.gaussians
    scale = torch.linalg.cholesky(best(kind, temperature))
    unit = torch.linalg.solve_triangular(scale, gaussian.sample(torch.eye(3)).T, upper=False)
    center = torch.linalg.solve_triangular(scale, POSTERIOR[:, None], upper=False)
    mine = torch.linalg.solve_triangular(scale, gaussian.mean[:, None], upper=False)
    found = unit - mine  # the factor in units of the optimum's
    assert (found @ found.T - torch.eye(3)).abs().max() < tolerance
    assert (mine - center).abs().max() < tolerance
    assert torch.equal(fit.fit.centers[0], gaussian.mean)


#: Each method, and a temperature other than 1.
OPTIMA = long_but(
    [(kind, temperature) for kind in VIAS for temperature in (1.0, 0.25)],
    ("diag", 1.0),
)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "temperature"), OPTIMA)
def test_the_optimum_of_minibatches_is_the_exact_one(kind, temperature):
    """Variances T / L_ii, or T L^-1 if dense: N/B, the prior and T are all in them."""
    fit = optimum(kind, temperature)
    assert fit.fit.attrs["program"].startswith("compiled")
    check_optimum(fit, kind, temperature, 0.04 if kind == "dense" else 0.01 / temperature**0.5)
    assert fit.converged


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "temperature"), OPTIMA)
def test_the_bound_is_in_nats_a_total_and_below_the_evidence(kind, temperature):
    """Equal to it where q is the posterior."""
    fit = optimum(kind, temperature)
    last = fit.trace[0, -60_000:]
    expected = exact_bound(best(kind, temperature), temperature)
    assert float(last.mean()) == pytest.approx(expected, abs=4.4 * float(last.std()) / 60_000**0.5)
    assert float(last.std()) < 10.0  # so that it is within 0.2 nats
    if temperature == 1.0:
        assert expected <= EVIDENCE + 1e-9
        assert (expected == pytest.approx(float(EVIDENCE), abs=1e-9)) == (kind == "dense")
    table = fit.diagnostics()
    tenth = fit.trace[0, -STEPS[kind] // 10 :]
    assert table.loc[0, "ELBO"] == pytest.approx(float(tenth.mean()), rel=1e-12)
    assert table.loc[0, "steps"] == STEPS[kind]
    assert bool(table.loc[0, "converged"])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", long_but([1.0, 0.25], 0.25))
def test_a_dense_fit_that_sticks_the_landing_is_exact(temperature):
    """Its gradient has no noise at the optimum, so no learning rate has to fall far."""
    optimizer = torchopt.adam(torchopt.schedule.polynomial_schedule(0.05, 1e-3, 1.0, 350))
    hypers = {"optimizer": optimizer, "temperature": temperature, "init_strategy": NEAR}
    vi = ps.VI(linear, structure="dense", sticking_the_landing=True, **hypers)
    fit = vi.run((X, Y), num_steps=900, **SETTINGS)
    check_optimum(fit, "dense", temperature, 5e-3)
    last = fit.trace[0, -200:]  # log joint + T H, which varies by half a chi square of 3
    assert float(last.std()) == pytest.approx(1.5**0.5 * temperature, rel=0.22)
    expected = exact_bound(best("dense", temperature), temperature)
    assert float(last.mean()) == pytest.approx(expected, abs=4.4 * temperature * 0.0866)


@pytest.mark.slow
def test_particles_average_the_noise():
    """Four give a bound of half the noise."""
    sds = []
    for count in (1, 4):
        vi = ps.VI(linear, num_particles=count, optimizer=torchopt.sgd(1e-12))
        sds.append(float(vi.run((X, Y), num_steps=120, **SETTINGS).trace.std()))
    assert sds[0] / sds[1] == pytest.approx(2.0, rel=0.2)


@pytest.mark.long
def test_a_schedule_of_temperatures_ends_where_its_last_value_says():
    schedule = ps.schedules.cosine_decay(4.0, 10_000, end=0.25)
    fit = optimum("diag", schedule)
    assert fit.fit.temperature == 0.25
    check_optimum(fit, "diag", 0.25, 0.02)
    first, last = fit.trace[0, 0], optimum("diag", 0.25).trace[0, 0]
    log_sds = math.log(0.1) + (1 + math.log(2 * math.pi)) / 2
    close(first - last, (4.0 - 0.25) * 3 * log_sds)


@pytest.mark.slow
@pytest.mark.parametrize("kind", VIAS)
def test_temperature_zero_is_the_mode(kind):
    optimizer = {} if kind == "IVON" else {"optimizer": torchopt.sgd(0.2)}
    fit = VIAS[kind](linear, temperature=0.0, **optimizer)
    fit.run((X, Y), num_steps=250, **SETTINGS)
    (gaussian,) = fit.fit.gaussians
    assert not gaussian.variance.any()
    close(gaussian.mean, POSTERIOR, 1e-5)
    peak = pyro_log_joint(linear, {"w": gaussian.mean}, (X, Y))
    close(fit.trace[0, -1], peak, 1e-7)
    assert torch.equal(fit.get_samples()["w"], gaussian.mean.expand(1000, 3))


# ------------------------------------------------------------------ minibatches

LABELS = (X[:, 0] + normals(N, seed=8) > 0).double()


logistic = of_rows(lambda x, w: dist.Bernoulli(logits=x @ w), w=normal(3))


@pytest.mark.long
def test_a_fit_is_the_same_with_minibatches_and_without():
    found = []
    for size in (None, 8):
        vi = ps.VI(logistic, optimizer=torchopt.adam(falling), compile=True)
        fit = vi.run((X, LABELS), batch_size=size, num_steps=300_000, **SETTINGS).fit
        found.append(fit.gaussians[0])
        assert fit.attrs["batch_size"] == (size or N)
    whole, batch = found
    close(batch.sd / whole.sd, torch.ones(3), 0.015)
    assert ((batch.mean - whole.mean) / whole.sd).abs().max() < 0.015


def test_epochs_are_steps_through_the_data():
    vi = ps.VI(linear).run((X, Y), batch_size=9, num_epochs=7, **SETTINGS)
    assert vi.trace.shape == (1, 7 * 5)
    assert vi.fit.attrs["num_steps"] == 35


# ------------------------------------------------------------------ programs, chains


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", long_but([*VIAS, "dense, sticking"], "diag", "dense, sticking", "IVON")
)
def test_compiled_is_eager(kind):
    make = VIAS[kind.split(",")[0]]
    if "sticking" in kind:
        make = functools.partial(make, sticking_the_landing=True)
    settings = {"batch_size": B, "num_chains": 2, "num_steps": 150, **SETTINGS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fast, slow = (make(linear, compile=c).run((X, Y), **settings) for c in (True, False))
    assert fast.fit.attrs["program"].startswith("compiled")
    assert slow.fit.attrs["program"].startswith("eager")
    close(fast.fit.centers, slow.fit.centers, 1e-10)
    close(fast.trace, slow.trace, 1e-10)
    for mine, theirs in zip(fast.fit.gaussians, slow.fit.gaussians, strict=True):
        close(mine.sample(torch.eye(3)), theirs.sample(torch.eye(3)), 1e-10)


@pytest.mark.parametrize("kind", VIAS)
def test_a_chain_is_the_same_whatever_others_there_are(kind):
    quick = functools.partial(VIAS[kind], linear)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        one, three = (
            quick().run((X, Y), batch_size=B, num_steps=30, num_chains=n, **SETTINGS)
            for n in (1, 3)
        )
    close(three.trace[:1], one.trace, 1e-12)
    close(three.fit.centers[:1], one.fit.centers, 1e-12)
    close(three.fit.gaussians[0].variance, one.fit.gaussians[0].variance, 1e-12)
    assert three.trace.shape == (3, 30)
    assert not torch.isclose(three.trace[0], three.trace[1]).any()
    assert len(three.fit.gaussians) == 3


# ------------------------------------------------------------------ the trace


def first_noise(num_latents, num_chains=1, seed=0):
    """Of step 0, `[chains, latents]`."""
    columns = NoiseStream(
        seed, range(num_chains), (1, num_latents), torch.float64, torch.device("cpu")
    )
    return columns.at(0)[:, 0]


@pytest.mark.parametrize("kind", VIAS)
def test_the_trace_has_one_estimate_a_step(kind):
    """Its first one, by hand: Pyro's log joint at the draw, and q's entropy."""
    start = {"w": double([0.2, -0.1, 0.4])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fit = VIAS[kind](linear, init_strategy=start).run((X, Y), num_steps=17, **SETTINGS)
    assert fit.trace.shape == (1, 17)
    sd = N**-0.5 if kind == "IVON" else 0.1
    draw = start["w"] + sd * first_noise(3)
    entropy = 3 * (math.log(sd) + (1 + math.log(2 * math.pi)) / 2)
    close(fit.trace[0, 0], pyro_log_joint(linear, {"w": draw[0]}, (X, Y)) + entropy)


FAR = {"w": double([30.0, -30.0, 30.0])}


@pytest.mark.slow
def test_a_bound_that_still_rises_is_said():
    slow = ps.VI(linear, optimizer=torchopt.adam(1e-2), init_strategy=FAR)
    for vi in (slow, ps.IVON(linear, lr=1e-3, init_strategy=FAR)):
        with pytest.warns(
            UserWarning, match="the ELBO still rose over the last quarter of the 200"
        ):
            fit = vi.run((X, Y), num_steps=200, **SETTINGS)
        assert not fit.converged
        assert not fit.diagnostics().loc[0, "converged"]


def test_a_bound_that_falls_is_said():
    rising = torchopt.schedule.polynomial_schedule(1e-3, 3.0, 1.0, 200)
    vi = ps.VI(linear, optimizer=torchopt.adam(rising), init_strategy=NEAR)
    with pytest.warns(UserWarning, match="the ELBO fell over the 200 steps.*lower the learning"):
        fit = vi.run((X, Y), num_steps=200, **SETTINGS)
    assert fit.trace[0, :50].mean() > fit.trace[0, -50:].mean() + 10


@pytest.mark.slow
def test_a_bound_that_does_not_rise_is_not_mentioned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ApproximationWarning)  # correlated, but diagonal
        vi = ps.VI(linear, init_strategy=NEAR)
        assert vi.run((X, Y), num_steps=20_000, **SETTINGS).converged


@pytest.mark.slow
def test_one_start_that_rises_is_enough():
    starts = {"w": torch.stack([POSTERIOR, FAR["w"][0]])}
    vi = ps.VI(linear, init_strategy=starts, optimizer=torchopt.adam(0.05))
    with pytest.warns(UserWarning, match="still rose"):
        vi.run((X, Y), num_steps=400, num_chains=2, **SETTINGS)
    assert not vi.converged
    assert not vi.diagnostics()["converged"][1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_but(["diag", "IVON"], "diag"))
def test_early_stopping_ends_once_the_bound_is_flat(kind):
    ivon, vi = (
        functools.partial(ps.IVON, lr=0.1),
        functools.partial(ps.VI, optimizer=torchopt.adam(0.05)),
    )
    method = ivon if kind == "IVON" else vi
    asked = {"init_strategy": NEAR, "compile": True}
    stopped = method(linear, early_stopping=True, **asked)
    stopped.run((X, Y), num_steps=50_000, **SETTINGS)
    steps = stopped.trace.shape[1]
    whole = method(linear, **asked).run((X, Y), num_steps=steps, **SETTINGS)
    assert 400 <= steps < 50_000
    assert steps % 100 == 0
    assert stopped.fit.attrs["num_steps"] == steps
    assert torch.equal(stopped.trace, whole.trace[:, :steps])
    before, now = stopped.trace[0, -(steps // 4) * 2 :].split(steps // 4)
    error = (before.var() / len(before) + now.var() / len(now)).sqrt()
    assert now.mean() - before.mean() + 2 * error <= 0.1 * stopped.fit.layout.size**0.5


@pytest.mark.slow
def test_early_stopping_does_not_end_a_rise():
    vi = ps.VI(linear, init_strategy=FAR, optimizer=torchopt.adam(0.02), early_stopping=True)
    with pytest.warns(UserWarning, match="still rose"):
        vi.run((X, Y), num_steps=400, **SETTINGS)
    assert vi.trace.shape == (1, 400)


# ------------------------------------------------------------------ points


def of_points(x, y):
    shift = pyro.param("shift", double(0.4))
    sd = pyro.param("sd", double(0.5)[0], constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(shift, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, sd), obs=y)


POINTED = {
    "diag": functools.partial(ps.VI, optimizer=torchopt.sgd(0.2)),
    "dense": functools.partial(ps.VI, structure="dense", optimizer=torchopt.sgd(0.2)),
    "IVON": functools.partial(ps.IVON, lr=0.2, first_curvature=2.0),
}


@pytest.mark.parametrize("kind", POINTED)
def test_points_move_by_their_mean_gradient_and_get_no_noise(kind):
    pyro.clear_param_store()
    starts = {"w": normals(3, 3, seed=6)}
    fit = POINTED[kind](of_points, init_strategy=starts)
    fit.run((X, Y), num_steps=1, num_chains=3, **SETTINGS)
    sd = (1 / N / 2.0) ** 0.5 if kind == "IVON" else 0.1
    w = starts["w"] + sd * first_noise(3, 3)
    shift, log_sd = double(0.4).requires_grad_(), double(0.5)[0].log().requires_grad_()
    log_joint = dist.Normal(shift, 1.0).log_prob(w).sum(-1)
    log_joint = log_joint + dist.Normal(w @ X.T, log_sd.exp()).log_prob(Y).sum(-1)
    gradients = torch.autograd.grad(log_joint.mean(), [shift, log_sd])
    rate = 0.2 / N / (2.0 if kind == "IVON" else 1.0)
    close(fit.params["shift"], shift.detach() + rate * gradients[0])
    close(fit.params["sd"], (log_sd.detach() + rate * gradients[1]).exp())
    assert (fit.fit.centers[:, 3:] == fit.fit.centers[0, 3:]).all()
    assert [gaussian.mean.shape for gaussian in fit.fit.gaussians] == [(3,)] * 3
    entropy = 3 * (math.log(sd) + (1 + math.log(2 * math.pi)) / 2)
    close(fit.trace[:, 0], log_joint.detach() + entropy)
    assert not list(pyro.get_param_store())


@pytest.mark.long
def test_points_end_where_the_bound_is_largest():
    """Dense, on a conjugate model, that is where the evidence is: type-II maximum likelihood."""
    vi = ps.VI(of_points, structure="dense", optimizer=torchopt.adam(falling), compile=True)
    params = vi.run((X, Y), num_steps=100_000, **SETTINGS).params

    def evidence(values):
        covariance = values[1].exp().square() * torch.eye(N) + X @ X.T
        return MultivariateNormal(X.sum(1) * values[0], covariance).log_prob(Y)

    found = torch.stack([params["shift"][0], params["sd"].log()])
    curvature = torch.func.hessian(evidence)(found)
    step = torch.linalg.solve(curvature, torch.func.grad(evidence)(found))  # to the maximum
    assert step.abs().max() < 0.01
    assert (torch.linalg.eigvalsh(curvature) < 0).all()


# ------------------------------------------------------------------ optimizers

IMPURE = {
    "clipped": torchopt.chain(torchopt.clip.clip_grad_norm(0.3), torchopt.sgd(0.1)),
    "radam": torchopt.radam(0.1),
}


@pytest.mark.parametrize("name", IMPURE)
def test_optimizers_that_vmap_refuses_run_chain_by_chain(name):
    settings = {"num_steps": 60, "batch_size": B, **SETTINGS}
    assert not is_pure(IMPURE[name])
    vi = ps.VI(linear, optimizer=IMPURE[name], compile=True, sticking_the_landing=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        two = vi.run((X, Y), num_chains=2, **settings).fit
        one = vi.run((X, Y), num_chains=1, **settings).fit
    assert two.attrs["program"].startswith("eager")
    close(two.centers[:1], one.centers)
    assert two.trace[:, -20:].mean() > two.trace[:, :5].mean() + 1


@pytest.mark.parametrize("structure", ["diag", "dense"])
def test_a_factory_of_torch_optim_takes_torchopts_steps(structure):
    """The same formula, so the same path, chain by chain."""
    pairs = [
        (torchopt.adam(0.02), lambda params: torch.optim.Adam(params, lr=0.02)),
        (
            torchopt.sgd(0.05, momentum=0.8),
            lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.8),
        ),
    ]
    settings = {"num_steps": 25, "batch_size": B, "num_chains": 2, **SETTINGS}
    for pure, factory in pairs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            fits = [
                ps.VI(linear, structure=structure, optimizer=optimizer).run((X, Y), **settings)
                for optimizer in (pure, factory)
            ]
        close(fits[1].trace, fits[0].trace, 1e-7)
        close(fits[1].fit.centers, fits[0].fit.centers, 1e-7)


# ------------------------------------------------------------------ networks


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_but(["VI", "IVON"], "IVON"))
def test_a_network_learns_from_minibatches(kind):
    torch.manual_seed(0)
    net = ps.bayesianize(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))

    model = of_network(net, lambda f: dist.Normal(f[:, 0], 0.1))

    x = torch.linspace(-2, 2, 200)[:, None]
    y = torch.sin(2 * x[:, 0]) + 0.1 * normals(200, seed=9)
    make = (
        ps.VI(model, optimizer=torchopt.adam(0.02))
        if kind == "VI"
        else ps.IVON(model, first_curvature=50.0)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fit = make.run((x, y), batch_size=50, num_steps=400, **SETTINGS)
    torch.manual_seed(1)
    mean = fit.predict(x, num_samples=30)["y"].mean(0)
    assert (mean - torch.sin(2 * x[:, 0])).square().mean() < 0.2  # of 0.58
    assert set(fit.get_samples()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert fit.get_samples()["0.weight"].shape == (1000, 8, 1)


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"structure": "low-rank"}, r"structure='low-rank': pass one of \('diag', 'dense'\)"),
        ({"num_particles": 0}, "num_particles=0"),
        ({"num_particles": 1.5}, "num_particles=1.5"),
        ({"init_scale": 0.0}, "init_scale=0.0"),
        ({"init_scale": "small"}, "init_scale='small'"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": {"w": 1.0}}, "temperature is one number"),
        ({"compile": "yes"}, "compile='yes'"),
        ({"optimizer": 0.1}, "optimizer=0.1: pass one of TorchOpt's"),
        ({"optimizer": lambda params: 3}, "pass one of TorchOpt's"),
        ({"optimizer": lambda params: torch.optim.Adam(params, lr=-1)}, "the factory failed"),
        ({"init_strategy": "median"}, "init_strategy='median'"),
        ({"num_data": 0}, "num_data=0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        ps.VI(linear, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr=0.0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"forgetting": 0.0}, "forgetting=0.0"),
        ({"first_curvature": 0}, "first_curvature=0"),
        ({"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_ivons_arguments_are_checked(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        ps.IVON(linear, **arguments)


def test_how_long_a_run_is_must_be_said_once():
    for lengths in ({}, {"num_steps": 3, "num_epochs": 1}):
        with pytest.raises(ArgumentError, match="one of num_steps and num_epochs"):
            ps.VI(linear).run((X, Y), **lengths, **SETTINGS)
    for lengths in ({"num_steps": 0}, {"num_epochs": 1.5}, {"num_steps": 2, "num_chains": 0}):
        with pytest.raises(ArgumentError, match=r"=(0|1\.5)"):
            ps.VI(linear).run((X, Y), **lengths, **SETTINGS)


def test_an_optimizer_that_needs_its_objective_again_is_refused():
    with pytest.raises(ArgumentError, match="LBFGS evaluates its objective several times"):
        ps.VI(linear, optimizer=torch.optim.LBFGS).run((X, Y), num_steps=2, **SETTINGS)


def test_a_schedule_out_of_range_is_refused_by_its_step():
    with pytest.raises(ArgumentError, match=r"temperature=-1.* at step 2"):
        ps.VI(linear, temperature=lambda s: 1.0 - s).run((X, Y), num_steps=5, **SETTINGS)


def test_a_fit_that_becomes_infinite_says_where_and_leaves_none():
    vi = ps.VI(linear, optimizer=torchopt.sgd(1e4))
    with pytest.raises(NonFiniteError, match=r"start 0 at step \d+, site 'w'"):
        vi.run((X, Y), num_steps=300, **SETTINGS)
    with pytest.raises(NotRunError, match="no fit yet"):
        vi.posterior  # noqa: B018


def test_a_start_may_be_a_function_of_pyros():
    init = init_to_value(values={"w": POSTERIOR})
    vi = ps.VI(linear, init_strategy=init, optimizer=torchopt.sgd(1e-12))
    close(vi.run((X, Y), num_steps=1, **SETTINGS).fit.centers[0], POSTERIOR)
