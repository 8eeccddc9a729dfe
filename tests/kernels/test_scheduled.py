"""Learning rates that are schedules: against TorchOpt's own updates, which call the schedule at
every step, and compiled against eager."""

import math
import warnings
from itertools import product

import pytest
import torch
import torchopt
from densities import logistic_regression
from reference import close, double, normals
from repetitions import long_but

import pyro_scale as ps
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels.scheduled import Scheduled, find_schedules

pytestmark = pytest.mark.usefixtures("float64")

ROWS, STEPS = 40, 300
X = normals(ROWS, 2, seed=1)
Y = (X @ double(1.0, -0.5) + normals(ROWS, seed=2) > 0).double()
EXPONENTIAL, POLYNOMIAL = torchopt.schedule.exponential_decay, torchopt.schedule.polynomial_schedule

logistic = logistic_regression()


def loss(w):
    """The negative log joint over N, but for a constant."""
    z = X @ w
    return (torch.nn.functional.softplus(z) - Y * z).mean() + w.square().sum() / (2 * ROWS)


def falling_at_7(count):
    """A user's, with a branch on the number."""
    return 0.1 if count < 7 else 0.02


SCHEDULES = {
    "polynomial": POLYNOMIAL(0.2, 0.01, 2.0, 200, transition_begin=5),
    "exponential": EXPONENTIAL(0.2, 0.97, transition_begin=3),
    "staircase, with an end": EXPONENTIAL(
        0.2, 0.5, transition_steps=20, staircase=True, end_value=0.01
    ),
    "a function": lambda count: 0.2 / (1 + count),
    "a function with a branch": falling_at_7,
    "ours": ps.schedules.cosine_decay(0.2, 100, end=0.01),
}
OPTIMIZERS = {
    **{f"adam, {name}": torchopt.adam(schedule) for name, schedule in SCHEDULES.items()},
    "sgd": torchopt.sgd(SCHEDULES["a function"], momentum=0.8, nesterov=True),
    "adamw": torchopt.adamw(SCHEDULES["exponential"], weight_decay=0.1),
    "rmsprop": torchopt.rmsprop(SCHEDULES["polynomial"], centered=True),
    "two schedules": torchopt.chain(
        torchopt.transform.scale_by_schedule(SCHEDULES["polynomial"]),
        torchopt.sgd(SCHEDULES["exponential"]),
    ),
}


def by_torchopt(optimizer):
    """Where TorchOpt's own loop ends, which hands a count to the schedules."""
    params = [torch.zeros(2)]
    state = optimizer.init(params)
    for _ in range(STEPS):
        gradients = [torch.func.grad(loss)(params[0])]
        updates, state = optimizer.update(gradients, state, params=params, inplace=False)
        params = [params[0] + updates[0]]
    return params[0]


def start():
    return {"w": torch.zeros(1, 2)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name", long_but(OPTIMIZERS, "adam, staircase, with an end", "sgd", "two schedules")
)
def test_it_is_torchopts_own_loop_compiled_or_not(name):
    optimizer, ends = OPTIMIZERS[name], {}
    for compile, program in ((True, "compiled loop"), (False, "eager")):
        method = ps.MAP(logistic, optimizer=optimizer, compile=compile, init_strategy=start())
        fit = method.run((X, Y), num_steps=STEPS, seed=0, progress=False).fit
        assert fit.attrs["program"] == program
        ends[program] = fit.centers[0]
    close(ends["eager"], by_torchopt(optimizer), 1e-12)
    close(ends["compiled loop"], ends["eager"], 1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("structure", "sticking"),
    long_but(product(["diag", "dense"], [False, True]), ("dense", True)),
)
def test_compiled_variational_inference_is_eager(structure, sticking):
    """In minibatches, from two starts; sticking the landing when dense solves L^T x = eps."""
    optimizer, fits = torchopt.adam(SCHEDULES["exponential"]), []
    settings = {"num_steps": 200, "batch_size": 8, "num_chains": 2, "seed": 3, "progress": False}
    for compile, program in ((True, "compiled loop"), (False, "eager")):
        how = {"structure": structure, "sticking_the_landing": sticking, "compile": compile}
        fit = ps.VI(logistic, optimizer=optimizer, **how).run((X, Y), **settings).fit
        assert fit.attrs["program"] == program
        fits.append(fit)
    compiled, eager = fits
    close(compiled.centers, eager.centers, 1e-11)
    close(compiled.trace, eager.trace, 1e-11)
    for one, other in zip(compiled.gaussians, eager.gaussians, strict=True):
        close(one.sample(torch.eye(2)), other.sample(torch.eye(2)), 1e-11)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_another_run_of_an_object_follows_its_schedule_anew():
    """What it has compiled serves a longer run, whose step sizes are others."""
    optimizer = torchopt.sgd(SCHEDULES["polynomial"])
    again = ps.MAP(logistic, optimizer=optimizer, compile=True, init_strategy=start())
    again.run((X, Y), num_steps=20, seed=0, progress=False)
    centers = again.run((X, Y), num_steps=STEPS, seed=0, progress=False).fit.centers
    close(centers[0], by_torchopt(optimizer), 1e-12)


@pytest.mark.parametrize("name", ["polynomial", "a function with a branch"])
def test_steps_of_ones_own_are_a_runs(name):
    make = lambda: ps.MAP(  # noqa: E731
        logistic, optimizer=torchopt.adam(SCHEDULES[name]), num_data=ROWS, init_strategy=start()
    )
    stepping = make()
    for _ in range(12):
        stepping.step(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        run = make().run((X, Y), num_steps=12, seed=0, progress=False)
    close(stepping.fit.centers, run.fit.centers, 1e-12)


FORMULAS = {
    "of numbers": (lambda n: math.exp(-n / 10), lambda n: math.exp(-n / 10)),
    "of any": (lambda n: 0.5**n, lambda n: 0.5**n),
    "of tensors": (lambda t: torch.exp(-t / 10), lambda n: math.exp(-n / 10)),
    "of tensors, with a branch": (
        lambda t: t.double().exp() if t < 3 else torch.tensor(1.0),
        lambda n: math.exp(n) if n < 3 else 1.0,
    ),
    "constant": (lambda n: 0.25, lambda n: 0.25),
    "a table": (
        [0.3, 0.2, 0.1, 0.4, 0.5, 0.6].__getitem__,
        [0.3, 0.2, 0.1, 0.4, 0.5, 0.6].__getitem__,
    ),
    "of each alone": (
        lambda t: 0.1 * t / torch.as_tensor(t).max().clamp(min=1),
        lambda n: 0.1 * (n > 0),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_schedules_are_evaluated_step_by_step(name):
    """However they are written; a step size is the negative lr."""
    schedule, formula = FORMULAS[name]
    found = find_schedules(torchopt.adam(schedule)).step_sizes(range(2, 6))
    close(found, [[-formula(step)] for step in range(2, 6)], 1e-14)


def test_without_a_schedule_an_optimizer_stays_what_it_is():
    for optimizer in (torchopt.adam(0.1), torchopt.chain(torchopt.sgd(0.1))):
        assert find_schedules(optimizer) is optimizer
    assert isinstance(find_schedules(torchopt.adam(falling_at_7)), Scheduled)


def test_a_schedule_that_gives_no_number_is_refused():
    with pytest.raises(ArgumentError, match="the schedule of its lr must give a number"):
        ps.MAP(logistic, optimizer=torchopt.adam(lambda n: "0.1")).run(
            (X, Y), num_steps=3, progress=False
        )
