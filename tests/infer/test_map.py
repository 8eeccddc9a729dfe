"""The mode of the density of the sites' own values, against closed forms, and optimizers against
loops that are written out by hand."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torchopt
from models import normal, of_rows
from pyro.infer.autoguide import init_to_value
from reference import close, double, normals
from repetitions import each_once, long_but
from row_datasets import RowByRow
from runs import QUIET
from torch.distributions import constraints
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.core import memory
from pyro_scale.errors import ArgumentError, DataError, NonFiniteError, NotRunError

pytestmark = pytest.mark.usefixtures("float64")

N, B = 23, 5
X = normals(N, 2, seed=1)
Y = X @ double(0.7, -1.2) + 0.5 * normals(N, seed=2)


def mode_of(fit, site, start=0):
    return fit.get_samples()[site][start]


# ------------------------------------------------------------------ closed forms


COUNTS = double(3, 0, 2, 4, 1, 1, 0)
FLIPS = double(1, 0, 0, 0, 1, 0, 0)
FACES = torch.tensor([0, 2, 2, 1, 2, 0, 2])
SIZES = double(0.4, 1.7, 0.2, 2.5, 1.1, 0.9, 0.3)


poisson = of_rows(lambda v: dist.Poisson(v), v=lambda: dist.Gamma(2.0, 3.0))
exponential = of_rows(lambda v: dist.Exponential(v), v=lambda: dist.Gamma(2.0, 3.0))
log_normal = of_rows(lambda v: dist.LogNormal(v.log(), 1.3), v=lambda: dist.LogNormal(0.5, 0.8))
bernoulli = of_rows(lambda v: dist.Bernoulli(v), v=lambda: dist.Beta(3.0, 1.5))
categorical = of_rows(
    lambda v: dist.Categorical(v), v=lambda: dist.Dirichlet(double(1.5, 2.0, 3.0))
)


bounded = of_rows(lambda v: dist.Normal(v, 1.0), v=lambda: dist.Uniform(0.2, 5.0))
bell = of_rows(lambda v: dist.Normal(v, 1.5), v=lambda: dist.Normal(3.0, 0.5))


LOG_PRECISION = 1 / 0.8**2 + 7 / 1.3**2
LOG_SUM = 0.5 / 0.8**2 + float(SIZES.log().sum()) / 1.3**2
#: Model, data, the mode of the sites' own density, and that of the density with the Jacobian.
CONJUGATE = {
    "Gamma, Poisson": (poisson, COUNTS, (2 - 1 + 11) / (3 + 7), (2 + 11) / (3 + 7)),
    "Gamma, Exponential": (
        exponential,
        SIZES,
        (2 - 1 + 7) / (3 + float(SIZES.sum())),
        (2 + 7) / (3 + float(SIZES.sum())),
    ),
    "LogNormal": (
        log_normal,
        SIZES,
        math.exp((LOG_SUM - 1) / LOG_PRECISION),
        math.exp(LOG_SUM / LOG_PRECISION),
    ),
    "Beta, Bernoulli": (bernoulli, FLIPS, (2 + 2) / (2.5 + 7), (3 + 2) / (4.5 + 7)),
    "Dirichlet, Categorical": (
        categorical,
        FACES,
        ((double(1.5, 2.0, 3.0) - 1 + double(2, 1, 4)) / (6.5 - 3 + 7)).tolist(),
        ((double(1.5, 2.0, 3.0) + double(2, 1, 4)) / (6.5 + 7)).tolist(),
    ),
    "Uniform, Normal": (bounded, SIZES, float(SIZES.mean()), None),
    "Normal": (
        bell,
        SIZES,
        (3.0 / 0.25 + float(SIZES.sum()) / 2.25) / (1 / 0.25 + 7 / 2.25),
        None,
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the log joint still rose")
@pytest.mark.parametrize(("family", "batch_size"), each_once(CONJUGATE, [3, None]))
def test_a_dense_map_is_the_mode_without_jacobian_to_rounding(family, batch_size):
    model, y, mode, other = CONJUGATE[family]
    fit = ps.MAP(model, structure="dense", optimizer=torchopt.adam(0.05))
    fit.run((y,), num_steps=150, batch_size=batch_size, **QUIET)
    close(mode_of(fit, "v"), mode, 1e-8)
    if other is not None:
        assert float((mode_of(fit, "v") - torch.tensor(other)).abs().max()) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("family", long_but(CONJUGATE, *list(CONJUGATE)[:2]))
def test_a_diagonal_map_is_where_the_optimizer_ends(family):
    """Gradient descent on all rows, without steps of Newton's method."""
    model, y, mode, _ = CONJUGATE[family]
    fit = ps.MAP(model, optimizer=torchopt.sgd(0.7)).run((y,), num_steps=200, **QUIET)
    close(mode_of(fit, "v"), mode, 1e-6)


def test_a_dense_map_is_at_the_mode_or_says_that_it_is_not():
    """Far from the mode, where the log joint is not concave, Newton's method cannot begin."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        at = {"w": START[None, :2], "s": double(8.0)}
        fit = ps.MAP(scaled, structure="dense", init_strategy=at).run((X, Y), num_steps=5, **QUIET)
    here = fit.fit.centers[0].requires_grad_()
    (slope,) = torch.autograd.grad(log_joint_of(here), here)
    assert said or float(slope.norm()) < 1e-6


@pytest.mark.slow
def test_two_sites_of_which_one_is_positive():
    """The joint density of (w, s): its slope in w and in s itself vanishes."""

    model = of_rows(
        lambda x, w, s: dist.Normal(x @ w, s), w=normal(2, sd=2.0), s=lambda: dist.Gamma(2.5, 2.0)
    )
    fit = ps.MAP(model, structure="dense", optimizer=torchopt.adam(0.05))
    fit.run((X, Y), num_steps=300, batch_size=B, **QUIET)
    w, s = (mode_of(fit, name).requires_grad_() for name in "ws")
    log_joint = (
        dist.Normal(0.0, 2.0).log_prob(w).sum()
        + dist.Gamma(2.5, 2.0).log_prob(s)
        + dist.Normal(X @ w, s).log_prob(Y).sum()
    )
    slopes = torch.autograd.grad(log_joint, (w, s))
    close(torch.cat([slope.reshape(-1) for slope in slopes]), torch.zeros(3), 1e-8)


def test_n_is_what_num_data_says():
    """Seven rows that stand for seventy: ten times the likelihood, once the prior."""
    fit = ps.MAP(poisson, num_data=70, optimizer=torchopt.sgd(0.5))
    fit.run((COUNTS,), num_steps=300, **QUIET)
    close(mode_of(fit, "v"), (2 - 1 + 110) / (3 + 70), 1e-6)


# ------------------------------------------------------------------ optimizers, step for step


#: w ~ N(0, 4), s ~ LogNormal(0.3, 0.36), y ~ N(x w, s^2).
scaled = of_rows(
    lambda x, w, s: dist.Normal(x @ w, s), w=normal(2, sd=2.0), s=lambda: dist.LogNormal(0.3, 0.6)
)


#: w and log s, where every loop starts.
START = double(0.3, -0.4, 0.2)


def log_joint_of(position):
    """The log density of (w, s) themselves, at [w, log s], of all rows: no Jacobian."""
    w, s = position[:2], position[2].exp()
    prior = dist.Normal(0.0, 2.0).log_prob(w).sum() + dist.LogNormal(0.3, 0.6).log_prob(s)
    return prior + dist.Normal(X @ w, s).log_prob(Y).sum()


def by_hand(factory, num_steps, lrs=None):
    """(The last position, the log joint before each step) of torch.optim's own loop."""
    position = torch.nn.Parameter(START.clone())
    optimizer, values = factory([position]), []
    for step in range(num_steps):
        if lrs is not None:
            optimizer.param_groups[0]["lr"] = lrs(step)
        optimizer.zero_grad()
        loss = -log_joint_of(position) / N
        values.append(-N * float(loss.detach()))
        loss.backward()
        optimizer.step()
    return position.detach(), double(*values)


def started(optimizer, data=(X, Y), num_steps=30, **kwargs):
    at = {"w": START[None, :2], "s": START[None, 2].exp()}
    settings = {"compile": False, "init_strategy": at, **kwargs}
    run = {name: settings.pop(name) for name in ("batch_size",) if name in settings}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the log joint still rose")
        return ps.MAP(scaled, optimizer=optimizer, **settings).run(
            data, num_steps=num_steps, **run, **QUIET
        )


FACTORIES = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "SGD, weight decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.3),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.03),
    "Adam, AMSGrad": lambda p: torch.optim.Adam(p, lr=0.03, amsgrad=True, betas=(0.5, 0.7)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.3),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_of_torch_optim_is_its_own_loop(name):
    position, values = by_hand(FACTORIES[name], 30)
    fit = started(FACTORIES[name])
    close(fit.fit.centers[0], position, 1e-12)
    close(fit.trace[0], values, 1e-12)


TWINS = {
    "sgd": (torchopt.sgd(0.1), FACTORIES["SGD"]),
    "sgd, Nesterov": (torchopt.sgd(0.05, momentum=0.9, nesterov=True), FACTORIES["SGD, Nesterov"]),
    "sgd, weight decay": (
        torchopt.sgd(0.1, momentum=0.5, weight_decay=0.3),
        FACTORIES["SGD, weight decay"],
    ),
    "adam": (torchopt.adam(0.03), FACTORIES["Adam"]),
}


@pytest.mark.parametrize("name", TWINS)
def test_torchopts_optimizers_are_those_of_torch(name):
    ours, theirs = TWINS[name]
    one, other = started(ours), started(theirs)
    close(one.fit.centers, other.fit.centers, 1e-9)
    close(one.trace, other.trace, 1e-9)


def test_adam_with_a_hundredth_is_the_default():
    default, adam = started(None), started(torchopt.adam(1e-2))
    assert torch.equal(default.fit.centers, adam.fit.centers)


def decaying(first, last, steps):
    return torchopt.schedule.polynomial_schedule(
        init_value=first, end_value=last, power=1.0, transition_steps=steps
    )


def test_a_schedule_of_torchopts_is_followed():
    fit = started(torchopt.sgd(decaying(0.2, 0.02, 20)))
    expected, values = by_hand(
        lambda p: torch.optim.SGD(p, lr=1.0), 30, lambda step: 0.2 - 0.18 * min(step / 20, 1)
    )
    close(fit.fit.centers[0], expected, 1e-10)
    close(fit.trace[0], values, 1e-10)


@pytest.mark.parametrize("optimizer", [torchopt.sgd(0.1), FACTORIES["SGD"]], ids=["own", "torch"])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_minibatches_of_equal_rows_are_the_whole_data(optimizer, batch_size):
    """N/B times a batch's log likelihood is then that of all rows, at every step."""
    data = (X[:1].expand(N, 2).contiguous(), Y[:1].expand(N).contiguous())
    whole = started(optimizer, data)
    parts = started(optimizer, data, batch_size=batch_size)
    close(parts.fit.centers, whole.fit.centers, 1e-10)
    close(parts.trace, whole.trace, 1e-10)


@pytest.mark.slow
def test_minibatches_are_unbiased():
    """With steps that shrink, the mode is that of all rows within the noise that is left."""
    fit = ps.MAP(bell, optimizer=torchopt.sgd(decaying(0.3, 0.003, 400)))
    fit.run((SIZES,), num_steps=600, batch_size=2, **QUIET)
    close(mode_of(fit, "v"), CONJUGATE["Normal"][2], 1e-2)


@pytest.mark.slow
def test_compiled_is_eager():
    asked = {"optimizer": torchopt.adam(0.02), "batch_size": B, "num_steps": 60}
    eager, compiled = (started(compile=compile, **asked) for compile in (False, True))
    assert eager.fit.attrs["program"] != compiled.fit.attrs["program"]
    close(compiled.fit.centers, eager.fit.centers, 1e-10)
    close(compiled.trace, eager.trace, 1e-10)


def test_a_factory_runs_eagerly_whatever_is_asked():
    asked = {"optimizer": FACTORIES["Adam"], "num_steps": 10, "batch_size": B}
    one, other = (started(compile=compile, **asked) for compile in (False, True))
    assert torch.equal(one.fit.centers, other.fit.centers)


# ------------------------------------------------------------------ how long


@pytest.mark.parametrize(
    ("data", "batch_size", "steps"),
    [
        ((X, Y), None, 3),
        ((X, Y), B, 15),
        ((X, Y), 1, 69),
        ((X, Y), 22, 6),
        (DataLoader(TensorDataset(X, Y), B), None, 15),
    ],
    ids=["whole", "ragged", "rows", "all but one", "loader"],
)
@pytest.mark.filterwarnings("ignore:the log joint still rose")
def test_epochs_are_passes_through_the_data(data, batch_size, steps):
    fit = ps.MAP(scaled).run(data, num_epochs=3, batch_size=batch_size, **QUIET)
    assert fit.trace.shape == (1, steps)
    same = ps.MAP(scaled).run(data, num_steps=steps, batch_size=batch_size, **QUIET)
    assert torch.equal(same.fit.centers, fit.fit.centers)


@pytest.mark.slow
def test_early_stopping_stops_at_the_mode():
    """From the mode on nothing rises: four windows of a hundred steps are enough to see it."""
    mode = torch.tensor([CONJUGATE["Normal"][2]])
    asked = {"init_strategy": {"v": mode}, "optimizer": torchopt.sgd(0.1)}
    stopped = ps.MAP(bell, early_stopping=True, **asked).run((SIZES,), num_steps=5000, **QUIET)
    assert stopped.trace.shape == (1, 400)
    assert stopped.fit.attrs["num_steps"] == 400
    assert stopped.converged
    on = ps.MAP(bell, **asked).run((SIZES,), num_steps=300, **QUIET)
    assert on.trace.shape == (1, 300)


@pytest.mark.slow
def test_early_stopping_looks_at_whole_epochs():
    """With 150 batches an epoch, a window is an epoch."""
    y = torch.tensor(3.0).expand(150).contiguous()
    asked = {"init_strategy": {"v": double(3.0)}, "optimizer": torchopt.sgd(0.1)}
    fit = ps.MAP(bell, early_stopping=True, **asked)
    fit.run((y,), num_steps=5000, batch_size=1, **QUIET)
    assert fit.trace.shape == (1, 600)


@pytest.mark.slow
def test_early_stopping_goes_on_while_it_rises():
    asked = {"init_strategy": {"v": double(40.0)}, "optimizer": torchopt.sgd(1e-4)}
    fit = ps.MAP(bell, early_stopping=True, **asked)
    with pytest.warns(UserWarning, match="the log joint still rose"):
        fit.run((SIZES,), num_steps=450, **QUIET)
    assert fit.trace.shape == (1, 450)
    assert not fit.converged
    assert fit.diagnostics()["converged"].tolist() == [False]


@pytest.mark.long
def test_early_stopping_is_the_same_at_each_run_and_compiled():
    """It waits for the slowest start."""

    def run(compile, num_chains=2):
        starts = {"v": double(3.0, 60.0)[-num_chains:]}
        fit = ps.MAP(
            bell,
            early_stopping=True,
            compile=compile,
            init_strategy=starts,
            optimizer=torchopt.sgd(decaying(0.03, 0.01, 300)),
        )
        return fit.run((SIZES,), num_steps=4000, batch_size=3, num_chains=num_chains, **QUIET)

    eager, again, compiled = run(False), run(False), run(True)
    assert 200 < eager.trace.shape[1] < 4000
    assert eager.trace.shape[1] % 100 == 0
    assert torch.equal(eager.trace, again.trace)
    assert torch.equal(eager.fit.centers, again.fit.centers)
    assert compiled.trace.shape == eager.trace.shape
    close(compiled.fit.centers, eager.fit.centers, 1e-10)


@pytest.mark.filterwarnings("ignore:the log joint still rose")
def test_the_table_has_a_row_a_start():
    fit = ps.MAP(scaled, optimizer=torchopt.sgd(0.05))
    table = fit.run((X, Y), num_steps=40, num_chains=3, **QUIET).diagnostics()
    assert table["steps"].tolist() == [40, 40, 40]
    close(torch.tensor(table["log joint"].to_numpy()), fit.trace[:, -4:].mean(1), 1e-12)


# ------------------------------------------------------------------ starts


squared = of_rows(lambda w: dist.Normal(w**2, 1.0), w=normal(sd=3.0))


@pytest.mark.filterwarnings("ignore:the log joint still rose")
def test_each_start_has_a_mode_of_its_own():
    """y ~ N(w^2, 1): -w/9 - 2w sum (w^2 - y) = 0, on both sides of 0."""
    y = double(4.0, 4.5, 3.0)
    fit = ps.MAP(squared, structure="dense", init_strategy={"w": double(1.5, -1.5, 3.0)})
    fit.run((y,), num_steps=200, num_chains=3, **QUIET)
    mode = math.sqrt(float(y.mean()) - 1 / (18 * 3))
    close(fit.get_samples()["w"], [mode, -mode, mode], 1e-8)
    assert fit.get_samples(group_by_chain=True)["w"].shape == (3, 1)
    assert fit.trace.shape == (3, 200)
    close(fit.sample(5)["w"], [mode, -mode, mode, mode, -mode], 1e-8)
    assert not fit.fit.gaussians


def test_starts_have_minibatches_of_their_own_and_a_seed_repeats_them():
    def run(seed):
        fit = ps.MAP(scaled, init_strategy=at, optimizer=torchopt.sgd(0.01))
        return fit.run(
            (X, Y), num_steps=8, batch_size=B, num_chains=2, seed=seed, progress=False
        ).trace

    at = {"w": START[:2].expand(2, 2), "s": START[2].exp().expand(2)}
    one = run(4)
    assert float((one[0] - one[1]).abs().max()) > 1e-3
    assert torch.equal(run(4), one)
    assert float((run(5) - one).abs().max()) > 1e-3


@pytest.mark.filterwarnings("ignore:the log joint still rose")
def test_ways_to_start():
    of_pyro = init_to_value(values={"w": START[:2], "s": START[2].exp()})
    expected = log_joint_of(START)
    fit = ps.MAP(scaled, init_strategy=of_pyro).run((X, Y), num_steps=20, **QUIET)
    close(fit.trace[0, 0], expected, 1e-12)
    after = ps.MAP(scaled, init_strategy=fit).run((X, Y), num_steps=2, **QUIET)
    close(after.trace[0, 0], log_joint_of(fit.fit.centers[0]), 1e-12)


# ------------------------------------------------------------------ params, modules, loaders


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("structure", ["diag", "dense"])
def test_params_are_part_of_the_mode(structure):
    """y ~ N(w, s^2) with s a param: s^2 is the mean square of what is left, and w shrinks."""

    def model(y):
        s = pyro.param("s", torch.tensor(0.8), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, 0.5))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w, s), obs=y)

    fit = ps.MAP(model, structure=structure, optimizer=torchopt.sgd(0.2, momentum=0.5))
    fit.run((SIZES,), num_steps=150, **QUIET)
    w, s = float(mode_of(fit, "w")), float(fit.params["s"])
    tolerance = 1e-8 if structure == "dense" else 1e-5
    close(double(s**2), [float((SIZES - w).square().mean())], tolerance)
    close(double(w), [float(SIZES.sum()) / s**2 / (4 + len(SIZES) / s**2)], tolerance)
    assert "s" not in pyro.get_param_store()
    fit.write_params()
    close(pyro.param("s").detach(), s, 1e-12)


def ridge(x, y, prior_precision, noise_precision):
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    precision = prior_precision * torch.eye(3) + noise_precision * x.T @ x
    return torch.linalg.solve(precision, noise_precision * x.T @ y)


@pytest.mark.parametrize("kind", ["bayesianized", "PyroModule"])
@pytest.mark.filterwarnings("ignore:the log joint still rose")
def test_modules(kind):
    """A linear layer with a normal prior: ridge regression."""
    if kind == "bayesianized":
        layer = ps.bayesianize(torch.nn.Linear(2, 1), prior=dist.Normal(0.0, 0.7))
    else:
        layer = pyro.nn.PyroModule[torch.nn.Linear](2, 1)
        layer.weight = pyro.nn.PyroSample(dist.Normal(torch.zeros(1, 2), 0.7).to_event(2))
        layer.bias = pyro.nn.PyroSample(dist.Normal(torch.zeros(1), 0.7).to_event(1))

    class Regression(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, y=None):
            mean = self.layer(x)[:, 0]
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    fit = ps.MAP(Regression(), structure="dense").run((X, Y), num_steps=50, batch_size=B, **QUIET)
    expected = ridge(X, Y, 1 / 0.49, 4.0)
    close(mode_of(fit, "layer.weight")[0], expected[:2], 1e-8)
    close(mode_of(fit, "layer.bias"), expected[2:], 1e-8)
    assert fit.predict(X[:3])["y"].shape == (1, 3)


LOADERS = {
    "TensorDataset": DataLoader(TensorDataset(X, Y), B, shuffle=True),
    "row by row": DataLoader(RowByRow(X, Y), B),
    "dropping the last": DataLoader(TensorDataset(X, Y), B, shuffle=True, drop_last=True),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the log joint still rose")
@pytest.mark.parametrize("name", long_but(LOADERS, next(iter(LOADERS))))
def test_loaders_lead_to_the_same_mode(name):
    asked = {"structure": "dense", "optimizer": torchopt.sgd(0.1)}
    whole = ps.MAP(scaled, **asked).run((X, Y), num_steps=200, **QUIET)
    fit = ps.MAP(scaled, **asked).run(LOADERS[name], num_epochs=40, **QUIET)
    close(fit.fit.centers, whole.fit.centers, 1e-8)


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "pass one of num_steps and num_epochs"),
        ({"num_steps": 5, "num_epochs": 5}, "pass one of num_steps and num_epochs"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_epochs": -1}, "num_epochs"),
        ({"num_steps": 2.5}, "num_steps"),
    ],
    ids=str,
)
def test_one_count_of_steps_or_epochs_is_needed(asked, message):
    with pytest.raises(ArgumentError, match=message):
        ps.MAP(scaled).run((X, Y), **asked, **QUIET)


def test_optimizers_that_evaluate_several_times_a_step_are_refused():
    fit = ps.MAP(scaled, optimizer=lambda p: torch.optim.LBFGS(p))
    with pytest.raises(ArgumentError, match="LBFGS evaluates its objective several times"):
        fit.run((X, Y), num_steps=3, **QUIET)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("adam", id="name"),
        pytest.param(0.1, id="number"),
        pytest.param(lambda params: params, id="no optimizer"),
        pytest.param(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), id="made"),
        pytest.param(lambda: None, id="no argument"),
    ],
)
def test_nonsense_optimizers_are_refused(optimizer):
    with pytest.raises(ArgumentError, match="optimizer"):
        ps.MAP(scaled, optimizer=optimizer)


@pytest.mark.parametrize(
    "asked",
    [{"structure": "full"}, {"structure": None}, {"compile": "yes"}, {"init_strategy": 3}],
    ids=str,
)
def test_unknown_arguments_are_refused(asked):
    with pytest.raises(ArgumentError, match=next(iter(asked))):
        ps.MAP(scaled, **asked)


@pytest.mark.parametrize("structure", ["diag", "dense"])
@pytest.mark.parametrize(
    "optimizer", [torchopt.sgd(1e6), lambda p: torch.optim.SGD(p, lr=1e6)], ids=["own", "torch"]
)
def test_a_state_that_is_not_finite_is_said_so(structure, optimizer):
    fit = ps.MAP(squared, structure=structure, optimizer=optimizer)
    with pytest.raises(NonFiniteError, match=r"start 0 at step \d+, site 'w'"):
        fit.run((double(4.0, 4.5, 3.0),), num_steps=50, **QUIET)
    with pytest.raises(NotRunError):
        fit.get_samples()


def test_nothing_is_there_before_a_run():
    for read in ("fit", "trace", "converged"):
        with pytest.raises(NotRunError, match="MAP has no fit yet"):
            getattr(ps.MAP(scaled), read)


def test_a_part_of_the_data_is_refused_where_all_rows_are_needed():
    fit = ps.MAP(scaled, structure="dense", num_data=200)
    with pytest.raises(DataError, match="the data hold 23 rows, not N = 200"):
        fit.run((X, Y), num_steps=5, **QUIET)


def test_what_does_not_fit_into_memory_is_refused_before_the_first_step(monkeypatch):
    """6 matrices of 200,000 x 200,000 float64 are 1.75 TiB."""
    monkeypatch.setattr(memory, "bytes_of", lambda device: 2**30)

    model = of_rows(lambda w: dist.Normal(w.sum(), 1.0), w=normal(200_000))
    with pytest.raises(ArgumentError, match=r"200,000.*1.75 TiB.*1 GiB.*structure='diag'"):
        ps.MAP(model, structure="dense").run((SIZES,), num_steps=1, **QUIET)
    assert ps.MAP(model).run((SIZES,), num_steps=1, **QUIET).trace.shape == (1, 1)


@pytest.mark.parametrize("asked", ["mass", "as_prior"])
def test_a_mode_is_no_gaussian(asked):
    fit = ps.MAP(bell).run((SIZES,), num_steps=1, **QUIET)
    with pytest.raises(ArgumentError, match="Gaussian"):
        getattr(fit, asked)()
    with pytest.raises(ArgumentError, match="needs a Gaussian"):
        fit.predict(SIZES, linearized=True)
