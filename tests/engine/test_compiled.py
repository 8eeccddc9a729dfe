"""Compiled runs against eager ones: the same draws, log joints and step numbers, to rounding.

Tracing knows tensors by identity and the loop knows them by address, so that a mix-up shows
neither as an error nor as a strange shape: only as other numbers.
"""

import dataclasses
import functools
import itertools
import re
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from dtypes import default_dtype
from hypothesis import example, given, settings
from hypothesis import strategies as st
from methods import STOCHASTIC
from models import normal, of_network, of_rows
from pyro.nn import PyroModule, PyroSample
from reference import close_in_scale, double, normals
from repetitions import long_but
from row_datasets import RowByRow, Stream
from runs import EVERY_STEP, QUIET, same_steps
from torch import nn
from torch.distributions import constraints
from torch.utils.data import DataLoader

import pyro_scale as ps
from pyro_scale.engine import inputs as step_inputs
from pyro_scale.engine import loop as simulation
from pyro_scale.engine.draws import Steps
from pyro_scale.errors import NonFiniteError
from pyro_scale.infer.sampler import Sampler
from pyro_scale.kernels import Kernel
from pyro_scale.run import run

pytestmark = pytest.mark.usefixtures("float64")

LOOP, STEP, EITHER = "compiled loop", "compiled step", "compiled"
N, B = 40, 7  # the batch does not divide the rows
STEPS = 200


def ran(make, compile, data, **kwargs):
    """A finished sampler."""
    chosen = {**EVERY_STEP, **QUIET, "num_samples": STEPS, "num_chains": 2, **kwargs}
    return make(compile=compile).run(data, **chosen)


def compiled_as_eager(make, data, program=LOOP, tolerance=1e-10, **kwargs):
    """The compiled sampler, found equal to the eager one."""
    fast, slow = (ran(make, compile, data, **kwargs) for compile in (True, False))
    assert fast.posterior.draws.attrs["program"].startswith(program)
    assert slow.posterior.draws.attrs["program"].startswith("eager")
    same_steps(fast, slow, tolerance)
    return fast


logistic = of_rows(lambda x, w: dist.Bernoulli(logits=x @ w), w=normal(3))


def rows(num_rows=N, size=3, seed=0):
    x = normals(num_rows, size, seed=seed)
    return x, (x.sum(1) + normals(num_rows, seed=seed + 1) > 0).double()


X, Y = rows()


# ------------------------------------------------------------------ kernels

METHODS = [row.sampler for row in STOCHASTIC]


def hypers(method, kind):
    """Each value apart from the others, so that no column passes for another."""
    row = STOCHASTIC[METHODS.index(method)]
    if kind == "floats":
        return {"lr": row.lr, "temperature": 1.3, **row.others}
    if kind == "temperature 0":
        return {"lr": row.lr, "temperature": 0.0, **row.others}
    return {
        "lr": ps.schedules.cosine_decay(row.lr, 150, end=row.lr / 5),
        "temperature": lambda step: 0.5 + (step % 11) / 10,
        **{
            name: lambda step, i=i, value=value: value * (0.6 + (step % (7 + i)) / 9)
            for i, (name, value) in enumerate(row.others.items())
        },
    }


@pytest.mark.parametrize(
    ("method", "kind"),
    long_but(
        itertools.product(METHODS, ["floats", "schedules", "temperature 0"]),
        *[(ps.BAOA, "temperature 0"), (ps.SGNHT, "schedules"), (ps.UBU, "floats")],
        (ps.pSGLD, "schedules"),
    ),
)
@pytest.mark.slow
def test_every_kernel(method, kind):
    make = functools.partial(method, logistic, **hypers(method, kind))
    fast = compiled_as_eager(make, (X, Y), batch_size=B, num_chains=3, warmup_steps=3, seed=4)
    apart = fast.posterior.draws.positions
    assert not torch.isclose(apart[0, 9], apart[1, 9]).any()


#: Two sites, one of them constrained.
scaled = of_rows(lambda x, w, s: dist.Normal(x @ w, s), w=normal(3), s=lambda: dist.Gamma(3.0, 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("method", long_but([ps.BAOA, ps.SGNHT, ps.pSGLD], ps.BAOA))
def test_values_by_site(method):
    """Numbers, schedules and tensors, a column or none of the block each."""
    row = STOCHASTIC[METHODS.index(method)]
    falling = ps.schedules.cosine_decay(row.lr, 150, end=row.lr / 5)
    given = {
        "lr": {"w": double(0.05, 0.02, 0.03), "s": lambda step: falling(step) / 10},
        "friction": {"s": lambda step: 0.5 + (step % 7) / 7, "w": 1.5},
        "mass": {"s": 2.0, "w": double(0.5, 2.0, 1.0)},
    }
    by_site = {name: given[name] for name in row.kernel.per_site}
    make = functools.partial(method, scaled, **{**row.others, **by_site})
    fast = compiled_as_eager(make, (X, Y), batch_size=B, num_chains=3, thinning=2, num_samples=60)
    assert "lr_s" in fast.posterior.draws.sample_stats


@pytest.mark.slow
@pytest.mark.parametrize("thinning", long_but([1, 3]))
def test_cycles(thinning):
    """What is kept is not even: sampling phases of 7 steps, of every 20."""
    cycle = ps.schedules.Cyclical(0.3, cycle_steps=20, exploration=0.65, settling=0.0)
    make = functools.partial(ps.BAOA, logistic, lr=cycle, friction=0.7)
    fast = compiled_as_eager(
        make, (X, Y), batch_size=B, warmup_steps=9, num_samples=90, thinning=thinning
    )
    steps = [step for step in range(9, 1200) if step % 20 >= 13][thinning - 1 :: thinning][:90]
    assert fast.posterior.draws.sample_stats["step"].tolist() == [steps] * 2


class Moving(NamedTuple):
    """A state whose position is neither its first leaf nor alone in its shape."""

    momentum: torch.Tensor
    count: torch.Tensor
    before: torch.Tensor
    position: torch.Tensor
    copy: torch.Tensor
    xi: torch.Tensor


def sampler_of(kernel):
    """The sampler of a kernel of one's own, without signature or documentation."""
    return type(kernel.__name__, (Sampler,), {"kernel_class": kernel})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Later(Kernel):
    """A kernel as others may write one: two normals, scalars, an integer, twins."""

    normals = 2
    before = staticmethod(torch.tanh)
    xi_rate: Any = 0.1

    def init(self, position, values, noise):
        zero = torch.zeros((), dtype=position.dtype)
        count = torch.zeros((), dtype=torch.int64)
        return Moving(noise, count, position, position, position, zero)

    def update(self, state, target, values, noise):
        gradient, evaluation = target.grad(state.position)
        kick = torch.sqrt(2 * values["lr"] * values["temperature"])
        momentum = (0.8 - 0.1 * torch.tanh(state.xi)) * state.momentum + values["lr"] * gradient
        momentum = momentum + kick * noise[0] - 0.01 * state.before
        position = state.position + momentum + 0.3 * kick * noise[1] + 1e-3 * torch.cos(state.count)
        xi = state.xi + values["xi_rate"] * (momentum @ momentum - 0.1 * state.copy[0])
        before = self.before(state.position)
        return Moving(momentum, state.count + 1, before, position, position, xi), evaluation


class PassedOn(Later):
    """One leaf is another's old value, which a loop that swaps buffers could lose."""

    before = staticmethod(torch.clone)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "program"), [(Later, LOOP), (PassedOn, EITHER)])
def test_a_kernel_that_the_engine_does_not_know(kernel, program):
    make = functools.partial(sampler_of(kernel), logistic, lr=0.02, xi_rate=0.05)
    compiled_as_eager(make, (X, Y), program, batch_size=B, num_chains=3)


class Averaged(NamedTuple):
    """The average of a path is kept."""

    path: torch.Tensor
    position: torch.Tensor


class Watched(NamedTuple):
    """The path is kept, its average beside it."""

    position: torch.Tensor
    average: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaging(Kernel):
    state = Averaged

    def init(self, position, values, noise):
        return self.state(position, position)

    def update(self, state, target, values, noise):
        path, average = state
        gradient, evaluation = target.grad(path)
        path = (
            path
            + values["lr"] * gradient
            + torch.sqrt(2 * values["lr"] * values["temperature"]) * noise[0]
        )
        return self.state(path, average + 0.1 * (path - average)), evaluation


class Watching(Averaging):
    state = Watched


@pytest.mark.long
def test_two_kernels_that_differ_in_what_is_kept_alone():
    """The same step, so a program kept from the one must not serve the other."""
    draws = []
    for kernel in (Averaging, Watching):
        make = functools.partial(sampler_of(kernel), logistic, lr=0.1)
        draws.append(compiled_as_eager(make, (X, Y), batch_size=B).posterior.draws.positions)
    assert not torch.isclose(*draws).all(-1).any()


@pytest.mark.slow
@pytest.mark.parametrize("method", long_but(METHODS, ps.SGNHT))
def test_many_chains_over_threads(method):
    """Loops of several chains side by side write nowhere but in their own parts."""
    make = functools.partial(method, logistic, **hypers(method, "floats"))
    one = ran(make, True, (X, Y), batch_size=B, num_chains=12, thinning=2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three = ran(make, True, (X, Y), batch_size=B, num_chains=12, thinning=2)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one.posterior.draws.positions, three.posterior.draws.positions)
    single = ran(make, True, (X, Y), batch_size=B, num_chains=1, thinning=2)
    assert torch.equal(one.posterior.draws.positions[:1], single.posterior.draws.positions)


# ------------------------------------------------------------------ data


def as_dict(batch):
    x, y = zip(*batch, strict=True)
    return {"y": torch.stack(y), "x": torch.stack(x)}


def with_constants(x, half, y, options, scale):
    """Arguments that are no rows: a float, a dict of a list, a 0-d tensor, None."""
    assert options["names"] == ["a", None]
    w = pyro.sample("w", dist.Normal(torch.zeros(3), scale).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=half * x @ w), obs=y)


def by_itself(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x), subsample_size=B) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def without_data():
    w = pyro.sample("w", dist.Normal(torch.ones(3), 0.5).to_event(1))
    s = pyro.sample("s", dist.Gamma(2.0, 3.0))
    pyro.factor("f", -s * w.square().sum())


def constants(x, y):
    return x, 0.5, y, {"names": ["a", None]}, torch.tensor(2.0)


DATA = {
    "whole": (logistic, (X, Y), {}),
    "shuffle": (logistic, (X, Y), {"batch_size": B}),
    "replacement": (logistic, (X, Y), {"batch_size": B, "sampling": "replacement"}),
    "one row": (logistic, (X, Y), {"batch_size": 1}),
    "all rows but one": (logistic, (X, Y), {"batch_size": N - 1}),
    "dict, whole": (logistic, {"y": Y, "x": X}, {}),
    "dict, batches": (logistic, {"y": Y, "x": X}, {"batch_size": B}),
    "not tensors": (with_constants, constants(X, Y), {}),
    "not tensors, batches": (with_constants, constants(X, Y), {"batch_size": B}),
    "model subsamples": (by_itself, (X, Y), {}),
    "loader, map-style": (logistic, DataLoader(RowByRow(X, Y), B), {}),
    "loader, dict": (logistic, DataLoader(RowByRow(X, Y), B, collate_fn=as_dict), {}),
    "stream": (logistic, DataLoader(Stream(X, Y), B), {}),
    "shared": (logistic, (X, Y), {"batch_size": B, "share_batches": True}),
    "shared stream": (logistic, DataLoader(Stream(X, Y), B), {"share_batches": True}),
    "none": (without_data, None, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    long_but(
        DATA,
        *["model subsamples", "loader, map-style", "stream"],
    ),
)
def test_every_kind_of_data(kind):
    model, data, kwargs = DATA[kind]
    make = functools.partial(ps.BAOA, model, lr=0.2, friction=0.7)
    compiled_as_eager(
        make, data, num_chains=3, thinning=3, num_samples=70, warmup_steps=2, **kwargs
    )


linear = of_rows(lambda x, w: dist.Normal(x @ w, 1.0), w=normal(3))


#: Both arguments as columns, which may be the same tensor.
column = of_rows(
    lambda x, w: dist.Normal(w[0] + w[1] * x.sin(), 1.0),
    w=lambda: dist.Normal(torch.tensor([0.3, 0.0]), 1.0).to_event(1),
)


#: The very tensors that are passed as data are in the closure too, whole.
holding = of_rows(
    lambda x, w: dist.Bernoulli(logits=x @ w - X[0] @ w + Y.mean()),
    w=lambda: dist.Normal(X.mean(0), 1.0).to_event(1),
)


BLOCK = normals(N + 1, 6, seed=3)
LAYOUTS = {
    "held by the model": (holding, (X, Y)),
    "one tensor twice": (column, (Y, Y)),
    "transposed": (linear, (normals(3, N).T, Y)),
    "part of a larger one": (linear, (BLOCK[1:, 1:4], BLOCK[1:, 5])),
    "every second": (linear, (normals(2 * N, 6)[::2, ::2], normals(2 * N)[1::2])),
    "expanded rows": (linear, (double(0.5, -1.0, 2.0).expand(N, 3), Y)),
    "expanded outcomes": (linear, (X, torch.ones(1).expand(N))),
    "views of one tensor": (linear, (BLOCK[:N, :3], BLOCK[:N, 2])),
    "with a graph": (linear, (X.clone().requires_grad_() * 1.5, Y)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "batch_size"),
    long_but(
        [(kind, size) for kind in LAYOUTS for size in (None, B)],
        ("one tensor twice", B),
        ("transposed", None),
        ("part of a larger one", B),
    ),
)
def test_however_the_rows_lie_in_memory(kind, batch_size):
    model, data = LAYOUTS[kind]
    make = functools.partial(ps.SGHMC, model, lr=0.2)
    before = [tensor.detach().clone() for tensor in data]
    compiled_as_eager(make, data, batch_size=batch_size, num_chains=2)
    assert all(torch.equal(tensor, old) for tensor, old in zip(data, before, strict=True))


def mixed(count, flag, z, wide):
    """Integers, booleans and float64 beside float32 latents."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float32), 1.0).to_event(1))
    with pyro.plate("data", len(z)):
        rate = (z @ w * 0.3).exp() + flag * 0.5 + wide.float().square()
        pyro.sample("count", dist.Poisson(rate), obs=count)
        pyro.sample("wide", dist.Normal((z @ w).double(), 2.0), obs=wide)


@pytest.mark.parametrize("batch_size", [pytest.param(None, marks=pytest.mark.long), B])
@pytest.mark.long
def test_rows_of_several_types_beside_float32_latents(batch_size):
    data = ((X[:, 0] * 3).abs().long(), Y > 0, X.float(), normals(N, seed=9))
    make = functools.partial(ps.BAOA, mixed, lr=0.2)
    fast = compiled_as_eager(make, data, tolerance=1e-5, batch_size=batch_size)
    assert fast.posterior.draws.positions.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("method", long_but(METHODS, ps.SGNHT))
def test_float32(method):
    """Beside 1e-5 of rounding, a wrong number would show just as well."""
    make = functools.partial(method, logistic, **hypers(method, "schedules"))
    with default_dtype(torch.float32):
        fast = compiled_as_eager(make, (X.float(), Y.float()), tolerance=1e-5, batch_size=B)
    assert fast.posterior.draws.positions.dtype == torch.float32


# ------------------------------------------------------------------ which steps are kept


@functools.cache
def every_state():
    """(The plan of a run of 300 steps, its program, all states of an eager run)."""
    plans, programs = [], []
    simulate, choose_program = simulation.simulate, simulation.choose_program
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "simulate", lambda *a, **k: (plans.append(a[0]), simulate(*a, **k))[1])
        patch.setattr(
            simulation,
            "choose_program",
            lambda *a: (programs.append(choose_program(*a)), programs[-1])[1],
        )
        make = functools.partial(ps.BAOA, logistic, lr=0.3)
        fast, slow = (
            ran(make, c, (X, Y), batch_size=B, num_chains=3, num_samples=300) for c in (True, False)
        )
    same_steps(fast, slow)
    assert programs[0].name == LOOP
    return (
        plans[0],
        programs[0],
        slow.posterior.draws.positions,
        slow.posterior.draws.sample_stats["lp"],
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([0, 1, 6, 7, 63, 64, 65]),
    st.sampled_from([1, 2, 3, 7, 50]),
    st.integers(1, 40),
    st.lists(st.integers(1, 90), max_size=8),
)
@example(0, 1, 1, [])
@example(0, 1, 300, [])
@example(0, 1, 300, [1] * 299)
@example(7, 7, 40, [])
@example(0, 3, 40, [3, 3, 1, 2])
@example(63, 7, 2, [63, 7])
@example(64, 3, 1, [63, 1, 2])
@example(65, 50, 2, [64, 50, 1])
def test_exactly_the_right_states_are_kept(warmup, thinning, num_samples, lengths):
    """Against all states of one eager run, however the steps are cut into inputs."""
    plan, program, positions, lp = every_state()
    num_samples = max(1, min(num_samples, (300 - warmup) // thinning))
    steps = Steps(num_samples, warmup, thinning)
    chains = simulation.Chains(plan.engine, plan.positions, plan.values_at(0), plan.seed)
    inputs = step_inputs.Inputs(plan.values, chains.noise, plan.batches)
    draws = simulation.Draws.allocate(plan.positions, steps)
    start = 0
    for length in [*lengths, steps.total]:
        if start < steps.total:
            stop = min(start + length, steps.total)
            chains.move(program, plan.batches, inputs.block(start, stop), steps, draws)
            start = stop
    kept = torch.arange(warmup + thinning - 1, warmup + num_samples * thinning, thinning)
    assert chains.count == steps.total == kept[-1] + 1
    close_in_scale(draws.positions, positions[:, kept])
    close_in_scale(draws.log_joint, lp[:, kept])
    assert torch.equal(draws.kept_steps, kept)
    assert chains.log_joint == pytest.approx(float(lp[:, kept[-1]].mean()), abs=1e-9)


@pytest.mark.parametrize("length", [1, 37])
@pytest.mark.long
def test_where_tapes_are_cut_changes_nothing(length, monkeypatch):
    """Thousands of steps over many blocks of noise and epochs, bit for bit; schedules as well."""
    make = functools.partial(ps.SGHMC, logistic, **hypers(ps.SGHMC, "schedules"))
    kwargs = {"batch_size": B, "num_samples": 800, "thinning": 3, "warmup_steps": 11}
    whole = ran(make, True, (X, Y), **kwargs)
    monkeypatch.setattr(simulation, "steps_within_budget", lambda *_: length)
    cut = ran(make, True, (X, Y), **kwargs)
    same_steps(cut, whole, tolerance=0.0)


# ------------------------------------------------------------------ models


def hierarchical(x, group, y):
    """Several sites on several supports, some of which share their shape."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfCauchy(torch.ones(2)).to_event(1))
    sd = pyro.sample("sd", dist.LogNormal(0.0, 0.5))
    low = pyro.sample("low", dist.Uniform(-1.0, 2.0))
    with pyro.plate("groups", 4):
        b = pyro.sample("b", dist.Normal(mu, tau).to_event(1))
    with pyro.plate("data", len(x)):
        mean = b[group, 0] + b[group, 1] * x[:, 0] + low
        pyro.sample("y", dist.StudentT(4.0, mean, sd), obs=y)


simplex = of_rows(
    lambda x, weights, low: dist.Normal(x @ weights + low, 1.0),
    weights=lambda: dist.Dirichlet(torch.tensor([2.0, 3.0, 4.0])),
    low=lambda: dist.Uniform(-1.0, 2.0),
)


def correlated(x):
    corr = pyro.sample("corr", dist.LKJCholesky(3, 2.0))
    sd = pyro.sample("sd", dist.HalfNormal(torch.ones(3)).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample(
            "x", dist.MultivariateNormal(torch.zeros(3), scale_tril=sd[:, None] * corr), obs=x
        )


def three_components(y):
    weights = pyro.sample("weights", dist.Dirichlet(torch.tensor([2.0, 3.0, 4.0])))
    m = pyro.sample("m", dist.Normal(torch.tensor([-1.0, 0.0, 2.0]), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(m[z], 0.7), obs=y)


def scaled_products(x, y):
    """`alpha` and `beta` other than 1."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 4), 1.0).to_event(2))
    b = pyro.sample("b", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    hidden = torch.tanh(torch.addmm(b, x, w, beta=0.5, alpha=1.7))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(hidden.sum(-1), 1.0), obs=y)


def ordered(x, grade):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    cut = dist.TransformedDistribution(
        dist.Normal(torch.zeros(2), 1.0).to_event(1), dist.transforms.OrderedTransform()
    )
    cut = pyro.sample("cut", cut)
    with pyro.plate("data", len(x)):
        pyro.sample("grade", dist.OrderedLogistic(x @ w, cut), obs=grade)


def with_params(x, y):
    """A `pyro.param` of its own and one on a support, which all chains share."""
    shift = pyro.param("shift", double(0.1, 0.2, 0.3))
    s = pyro.param("s", torch.tensor(1.5), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(shift, 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, s), obs=y)


def gaussian_process(y):
    """Rows are curves at five places; the kernel's length and noise are unknown."""
    place = torch.linspace(0, 1, 5)
    length = pyro.sample("length", dist.LogNormal(-1.0, 0.3))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.3))
    covariance = torch.exp(-0.5 * ((place[:, None] - place) / length).square())
    covariance = covariance + noise * torch.eye(5)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(5), covariance), obs=y)


def hidden_markov(y):
    """Pyro's own, whose safe logarithm functorch refuses."""
    initial = pyro.sample("initial", dist.Dirichlet(torch.ones(2)))
    stay = pyro.sample("stay", dist.Dirichlet(torch.tensor([[4.0, 1.0], [1.0, 4.0]])).to_event(1))
    place = pyro.sample("place", dist.Normal(double(-1.0, 1.0), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        hmm = dist.DiscreteHMM(initial.log(), stay.log(), dist.Normal(place, 1.0))
        pyro.sample("y", hmm, obs=y)


def per_datum(params, batch):
    """As for `from_function`: a mean over rows, and the prior over N."""
    x, y = batch
    error = (x @ params["w"] + params["b"] - y).square().mean()
    return -0.5 * error - 0.5 * (params["w"].square().sum() + params["b"].cosh()) / N


def categorical(out):
    return dist.Categorical(logits=out)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 6), nn.GELU(), nn.Linear(6, 3))


class PartlyFrozen(PyroModule):
    """A frozen layer, a layer with a prior, a buffer, and a point-estimated bias."""

    def __init__(self, point):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(3, 5).requires_grad_(False)
        self.head = PyroModule[nn.Linear](5, 1)
        self.head.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 5]).to_event(2))
        self.head.bias.requires_grad_(point)
        self.register_buffer("offset", torch.tensor(0.25))

    def forward(self, x, y):
        mean = self.head(torch.tanh(self.frozen(x))).squeeze(-1) + self.offset
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


GROUP = torch.arange(N) % 4
CLASS = torch.arange(N) % 3
MODELS = {  # model, data, program, lr
    "hierarchical": lambda: (hierarchical, (X, GROUP, Y), LOOP, 0.05),
    "simplex": lambda: (simplex, (X, Y), LOOP, 0.1),
    "mixture": lambda: (three_components, normals(N, seed=5) * 2, EITHER, 0.1),
    "ordered": lambda: (ordered, (X, CLASS), EITHER, 0.1),
    "scaled products": lambda: (scaled_products, (X, Y), LOOP, 0.1),
    "from_function": lambda: (
        ps.LogPosterior.from_function(
            per_datum, {"w": double(0.5, -0.5, 1.0), "b": torch.tensor(0.3)}, num_data=N
        ),
        (X, Y),
        LOOP,
        0.2,
    ),
    "mlp": lambda: (
        of_network(ps.bayesianize(mlp()), categorical),
        (normals(N, 4), CLASS),
        LOOP,
        0.05,
    ),
    "frozen part": lambda: (PartlyFrozen(point=False), (X, Y), LOOP, 0.1),
    "Gaussian process": lambda: (gaussian_process, normals(N, 5), LOOP, 0.1),
    "convolutions": lambda: (
        of_network(ps.bayesianize(convolutions()), categorical),
        (normals(N, 1, 4, 4), CLASS),
        STEP,
        0.05,
    ),
    "hidden Markov": lambda: (hidden_markov, normals(N, 3), EITHER, 0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    long_but(
        MODELS,
        *["hierarchical", "mlp"],
    ),
)
def test_every_kind_of_model(kind):
    model, data, program, lr = MODELS[kind]()
    make = functools.partial(ps.BAOA, model, lr=lr, friction=0.7)
    compiled_as_eager(make, data, program, batch_size=B, thinning=2, num_samples=100)


def near_the_edge(y):
    """Covariances that are none where x > 1."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        covariance = torch.eye(2) * (1 - x)
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(2), covariance), obs=y)


@pytest.mark.slow
def test_a_factorization_that_fails_ends_its_chain_at_the_same_step():
    """Compiled it is NaN, eagerly torch's error."""
    starts, ends = {"x": double(-2.0, 0.0, 0.5, -1.0)}, []
    for compile in (True, False):
        sampler = ps.BAOA(near_the_edge, lr=0.5, compile=compile, init_strategy=starts)
        with pytest.raises(NonFiniteError) as caught:
            sampler.run(
                torch.full((3, 2), 0.3),
                num_samples=200,
                num_chains=4,
                seed=1,
                progress=False,
                **EVERY_STEP,
            )
        ends.append(re.findall(r"chain (\d) at step (\d+)", str(caught.value)))
    assert ends[0] == ends[1]
    assert len(ends[0]) == 4


@pytest.mark.long
def test_correlations_are_compiled():
    make = functools.partial(ps.BAOA, correlated, lr=0.1)
    compiled_as_eager(make, X, EITHER, batch_size=B, num_samples=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        pytest.param(
            with_params,
            {"num_chains": 4, "batch_size": B, "thinning": 3, "num_samples": 70},
            marks=pytest.mark.long,
        ),
        pytest.param(with_params, {"num_chains": 1}, marks=pytest.mark.long),
        (PartlyFrozen, {"num_chains": 4, "batch_size": B}),
    ],
)
def test_points_are_the_same(model, settings):
    """All chains move at once, tied by their points; a chain alone too."""
    pyro.clear_param_store()
    model = model(point=True) if model is PartlyFrozen else model
    make = functools.partial(ps.SGHMC, model, lr=0.1)
    fast, slow = (ran(make, c, (X, Y), **settings) for c in (True, False))
    assert fast.posterior.draws.attrs["program"] == LOOP
    same_steps(fast, slow)
    assert fast.params.keys() == slow.params.keys()
    for name, value in slow.params.items():
        close_in_scale(fast.params[name], value)


# ------------------------------------------------------------------ again and again


@pytest.mark.slow
def test_a_second_run_takes_its_own_data_and_seed():
    """Of one sampler and of a new one, by one model, in one process."""
    fast, slow = (ps.BAOA(logistic, lr=0.3, compile=c) for c in (True, False))
    other = rows(seed=7)
    for data, seed, size in [((X, Y), 0, B), (other, 0, B), (other, 1, B), (other, 1, 4)]:
        kwargs = {
            **EVERY_STEP,
            "num_samples": STEPS,
            "batch_size": size,
            "num_chains": 2,
            "progress": False,
        }
        for sampler in (fast, slow):
            sampler.run(data, seed=seed, **kwargs)
        same_steps(fast, slow)
        make = functools.partial(ps.BAOA, logistic, lr=0.3)
        new = ran(make, True, data, seed=seed, batch_size=size)
        same_steps(new, fast, tolerance=0.0)


@pytest.mark.slow
def test_data_written_to_between_two_runs_are_read_anew():
    x, y = X.clone(), Y.clone()
    sampler = ps.BAOA(logistic, lr=0.3, compile=True)
    kwargs = {**EVERY_STEP, **QUIET, "num_samples": STEPS, "num_chains": 1}
    before = sampler.run((x, y), **kwargs).posterior.draws
    x.neg_()
    after = sampler.run((x, y), **kwargs).posterior.draws
    assert not torch.isclose(before.positions[0, -1], after.positions[0, -1]).any()
    same_steps(sampler, ps.BAOA(logistic, lr=0.3, compile=False).run((x, y), **kwargs))


def numbered(i):
    """Models of one code object, of three shapes; each holds numbers of its own."""
    size = 1 + i % 3
    shift, spread = normals(size, seed=i), normals(size, seed=50 + i).exp()

    def model(x):
        w = pyro.sample("w", dist.Normal(shift, spread).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(w + shift, 1.0).to_event(1), obs=x)

    return model, normals(10, size, seed=100 + i)


@pytest.mark.parametrize("count", long_but([4, 30], 4))
@pytest.mark.long
def test_many_models_in_one_process(count, recwarn):
    """Graphs that are alike share their program, and nothing else."""
    for i in range(count):
        model, data = numbered(i)
        make = functools.partial(ps.BAOA, model, lr=0.2)
        compiled_as_eager(make, data, batch_size=4, num_samples=20, num_chains=1, seed=i)
    assert not [w for w in recwarn if "compile" in str(w.message)]


@pytest.mark.long
def test_thirty_programs_in_one_process(recwarn):
    """Dynamo gives up after eight of one code object."""
    for i in range(30):
        make = functools.partial(METHODS[i % 3], numbered(i)[0], lr=0.2 + i / 1000)
        data = normals(10 + i, 1 + i % 3, seed=100 + i)
        compiled_as_eager(make, data, num_samples=20, num_chains=1, seed=i)
    assert not [w for w in recwarn if "compile" in str(w.message)]
