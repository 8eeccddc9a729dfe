"""What people write who come from Pyro, and what they are told."""

import arviz
import pyro
import pyro.distributions as dist
import pytest
import torch
from both_arviz import IS_1
from models import normal, of_network, of_rows
from pyro.infer import MCMC
from pyro.infer.autoguide import AutoNormal
from runs import EVERY_STEP, ONE_CHAIN, QUIET
from warned import told

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, NonFiniteError

X = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)


model = of_rows(lambda x, w: dist.Normal(x @ w, 1.0), w=normal(2))


def short(**how):
    settings = {"num_samples": 5, **ONE_CHAIN, **QUIET, **how}
    return ps.BAOA(model, lr=0.1, compile=False).run((X, Y), **settings)


WRONG = {
    "the model's arguments one by one": (
        lambda: ps.BAOA(model, lr=0.1).run(X, Y, num_samples=5),
        r"BAOA.run takes 1 positional .* not 2: pass .* run\(\(x, y\), ...\)",
    ),
    "num_warmup": (lambda: short(num_warmup=5), r"no argument 'num_warmup': .* warmup_steps="),
    "a typo": (
        lambda: short(num_chain=5),
        r"no argument 'num_chain': did you mean num_chains=\?",
    ),
    "a hyperparameter of run's": (
        lambda: ps.BAOA(model, lr=0.1, num_samples=5),
        r"no hyperparameter 'num_samples'.*: pass it to run\(\)",
    ),
    "an argument of the constructor's": (
        lambda: short(temperature=0.5),
        "no argument 'temperature': pass it to the constructor",
    ),
    "a misspelt hyperparameter": (
        lambda: ps.BAOA(model, lr=0.1, fricton=1.0),
        r"no hyperparameter 'fricton'.*did you mean friction=\?",
    ),
    "a guide": (lambda: ps.VI(model, AutoNormal(model)), "a guide is made by structure="),
    "a named guide": (lambda: ps.VI(model, guide=AutoNormal(model)), "VI makes its own guide"),
    "optim": (lambda: ps.VI(model, optim=None), "'optim': here it is optimizer="),
    "optimiser": (lambda: ps.MAP(model, optimiser=None), "'optimiser': here it is optimizer="),
    "lr of VI": (lambda: ps.VI(model, lr=0.1), r"'lr': here it is optimizer=torchopt.adam\(lr\)"),
    "Pyro's optimizer": (
        lambda: ps.VI(model, optimizer=pyro.optim.Adam({"lr": 0.1})),
        "pass one of TorchOpt's",
    ),
    "steps of a sampler": (lambda: short(num_steps=5), "here it is num_samples=, warmup_steps="),
    "an interval": (lambda: short().summary(prob=0.9), r"no argument 'prob': .* arviz.summary"),
    "a misspelt argument of results": (
        lambda: short().get_samples(num_sample=3),
        r"get_samples has no argument 'num_sample': did you mean num_samples=\?",
    ),
    "the step size by place": (lambda: ps.BAOA(model, 0.1), "passed by name, such as lr="),
    "steps of Laplace": (
        lambda: ps.Laplace(model).run((X, Y), num_steps=5),
        "it looks for the mode by itself",
    ),
    "a word for a flag": (
        lambda: short(share_batches="yes"),
        "share_batches='yes': pass True or",
    ),
    "another": (
        lambda: ps.BAOA(model, lr=0.1, subtract_noise="no"),
        "subtract_noise='no': pass True or False",
    ),
    "a flag for a path": (lambda: short(store=True), "store=True: pass the path"),
    "data one by one": (lambda: ps.explain(model, X, Y), r"one tuple or dict, data=\(x, y\)"),
    "data one by one, as arrays": (
        lambda: ps.explain(model, X.numpy(), Y.numpy()),
        r"batch_size is given rows: .* data=\(x, y\)",
    ),
    "data one by one, after a run": (
        lambda: short().log_likelihood(X, Y),
        r"log_likelihood takes 1 positional .* log_likelihood\(\(x, y\), ...\)",
    ),
    "a function's data one by one": (
        lambda: ps.sample(model, X, Y),
        r"sample takes 2 positional .* sample\(model, \(x, y\), ...\)",
    ),
    "rows in place of a count": (lambda: short().loo((X, Y)), r"num_rows is given rows"),
    "a device": (
        lambda: ps.BAOA(model, device="cuda"),
        r"no hyperparameter 'device'; it has .*: here it is the model's .*x\.to\(device\)",
    ),
    "a run's device": (
        lambda: short(device="cuda"),
        "no argument 'device': here it is the model's",
    ),
    "a function's device": (
        lambda: ps.explain(model, (X, Y), device="cuda"),
        "explain has no argument 'device': here it is the model's",
    ),
    "a prediction's device": (
        lambda: short().predict(x=X, device="cuda"),
        r"the model, which takes \(x, y=None\): .*'device'",
    ),
    "a prediction of nothing": (lambda: short().predict(), r"takes \(x, y=None\): missing.*'x'"),
    "a prediction of a tuple": (
        lambda: short().predict((X,)),
        r"one by one: write predict\(x\)",
    ),
    "a prediction of a list": (lambda: short().predict([X]), r"one by one: write predict\(x\)"),
    "a step on a tuple": (
        lambda: ps.BAOA(model, lr=0.1, num_data=20).step((X, Y)),
        r"one by one: write .*step\(x, y\)",
    ),
    "a second step on a tuple": (
        lambda: [(s := ps.EKF(model, num_data=20)).step(X, Y), s.step((X, Y))],
        r"one by one: write .*step\(x, y\)",
    ),
    "a tuple too many": (lambda: ps.MAP(model).run(((X, Y),), num_steps=1), "one by one"),
    "too many arguments": (
        lambda: ps.MAP(model).run((X, Y, X), num_steps=1),
        r"the model, which takes \(x, y=None\): too many",
    ),
    "no data": (lambda: ps.BAOA(model, lr=0.1).run(), "BAOA.run: missing a required argument"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_the_right_one(name):
    call, said = WRONG[name]
    with pytest.raises(ArgumentError, match=said):
        call()


def test_a_call_that_python_refuses_is_a_type_error_too():
    with pytest.raises(TypeError, match="num_warmup"):
        short(num_warmup=5)


def test_pyros_mcmc_is_told_that_it_is_not_needed():
    with pytest.raises(AttributeError, match=r"BAOA is no kernel .* ps.BAOA\(model, ...\).run"):
        MCMC(ps.BAOA(model, lr=0.1), num_samples=5, disable_progbar=True).run(X, Y)


@pytest.mark.skipif(IS_1, reason="ArviZ 1 has no converter of Pyro's own")
def test_arvizs_converter_is_told_that_it_is_not_needed():
    with pytest.raises(AttributeError, match=r"call .to_arviz\(\)"):
        arviz.from_pyro(short())


def test_a_method_says_what_it_is():
    given = "BAOA(lr=0.1, temperature=1, friction=1, mass=1)"
    assert repr(ps.BAOA(model, lr=0.1)) == f"<{given}, not run>"
    assert repr(short(num_chains=3)) == f"<{given}, N = 20, 3 x 5 draws>"
    assert repr(ps.VI(model, structure="dense")).startswith("<VI(structure=dense")
    fit = ps.Laplace(model).run((X, Y), progress=False)
    assert repr(fit) == "<Laplace(structure=dense), N = 20, starts: 1>"
    with pytest.raises(AttributeError, match="'BAOA' object has no attribute 'color'"):
        short().color  # noqa: B018


def test_torch_does_not_ask_for_issues_to_be_filed(recwarn):
    """Of what vmap takes one by one, on which nobody can act."""

    def one_by_one(y):
        probs = pyro.sample("probs", dist.Beta(2.0, 2.0))
        with pyro.plate("data", len(y)):
            places = torch.searchsorted(torch.linspace(0, 1, 5) * probs, y)
            pyro.sample("y", dist.Normal(places.float(), 1.0), obs=y)

    ps.explain(one_by_one, Y)
    ps.BAOA(one_by_one, lr=0.01).run(Y, num_samples=3, **ONE_CHAIN, **QUIET)
    assert not [each for each in recwarn if "performance drop" in str(each.message)]


# ------------------------------------------------------------------ noise


def test_time_steps_are_one_line_and_bounds_are_no_tensors():
    def series(y):
        low = pyro.sample("low", dist.Uniform(torch.zeros(3), torch.arange(3) + 1.0).to_event(1))
        z = pyro.sample("z", dist.Uniform(torch.tensor(0.25), 1.0))
        for t in range(58):
            pyro.sample(f"y_{t}", dist.Normal(z + low.sum(), 1.0), obs=y[t])

    explained = ps.explain(series, torch.linspace(0, 1, 58))
    lines = str(explained).splitlines()
    assert [line.split("  ")[0] for line in lines[2:5]] == ["low", "z", "y_0 ... y_57 (58)"]
    assert "tensor(" not in str(explained)
    assert "tensor of shape [3]" in lines[2]
    assert "Interval(0.25, 1.0)" in lines[3]
    assert len(explained.rows) == 60
    assert len(explained._repr_html_()) < 5000


@pytest.mark.slow
def test_a_run_is_a_few_lines_of_a_log(capfd):
    sampler = ps.BAOA(model, lr=0.1, compile=False)
    sampler.run((X, Y), num_samples=600, seed=0, progress=True, **ONE_CHAIN)
    lines = capfd.readouterr().err.replace("\r", "\n").split("\n")
    assert 2 < len([line for line in lines if line.strip()]) < 16


def two_modes(x):
    w = pyro.sample("w", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(w.abs(), 0.1), obs=x)


@pytest.mark.slow
def test_only_of_networks_it_is_said_that_predictions_count():
    starts = {"w": torch.tensor([2.0, -2.0])}
    sampler = ps.BAOA(two_modes, lr=0.02, compile=False, init_strategy=starts)
    sampler.run(2 + X[:, 0] / 10, num_samples=250, num_chains=2, **EVERY_STEP, **QUIET)
    _, said = told(sampler.diagnostics)
    assert any("do not agree" in each for each in said)
    assert not any("network" in each for each in said)
    network = ps.bayesianize(torch.nn.Linear(2, 1), dist.Normal(0.0, 1.0))

    regression = of_network(network, lambda f: dist.Normal(f[:, 0], 1.0))

    starts = {"weight": torch.tensor([[[3.0, 3.0]], [[-3.0, -3.0]]]), "bias": torch.zeros(2, 1)}
    slow = ps.BAOA(regression, lr=1e-5, compile=False, init_strategy=starts)
    slow.run((X, Y), num_samples=250, num_chains=2, **EVERY_STEP, **QUIET)
    _, said = told(slow.diagnostics)
    assert any("for a network, check its predictions" in each for each in said)


def test_a_gradient_that_is_nan_at_the_start_is_not_the_steps_fault():
    def flat(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal((w - w).abs().sqrt(), 1.0), obs=x)

    with pytest.raises(NonFiniteError, match="the gradient is not finite at the start") as error:
        ps.BAOA(flat, lr=1e-6, compile=False).run(X[:, 0], num_samples=5, **ONE_CHAIN, **QUIET)
    assert "try lr" not in str(error.value)
