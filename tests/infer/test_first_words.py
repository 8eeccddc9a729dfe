"""What new users type: arrays and frames, float64, networks in a model's place."""

import functools
import re

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from dtypes import default_dtype
from models import normal, of_network, of_rows
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from runs import QUIET
from torch import nn

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, DataError, ModelError, PyroScaleError

EXACT = {"num_samples": 20, "warmup_steps": 10, "thinning": 1, "num_chains": 2, **QUIET}


def from_seed():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=source, dtype=torch.float32)
    return x, x.sum(1) + 0.3 * torch.randn(60, generator=source, dtype=torch.float32)


X, Y = from_seed()


@pytest.fixture(autouse=True)
def in_float32():
    with default_dtype(torch.float32):
        yield


linear = of_rows(lambda x, w: dist.Normal(x @ w, 0.5), w=normal(3))


METHODS = {
    "BAOA": lambda data: ps.BAOA(linear, lr=0.05).run(data, batch_size=20, **EXACT),
    "GHMC": lambda data: ps.GHMC(linear, lr=0.1).run(data, **EXACT),
    "VI": lambda data: ps.VI(linear).run(data, num_steps=10, batch_size=20, **QUIET),
    "MAP": lambda data: ps.MAP(linear).run(data, num_steps=10, **QUIET),
    "Laplace": lambda data: ps.Laplace(linear).run(data, **QUIET),
    "EKF": lambda data: ps.EKF(linear).run(data, batch_size=20, **QUIET),
    "SVGD": lambda data: ps.SVGD(linear, num_particles=4).run(data, num_steps=5, **QUIET),
    "IVON": lambda data: ps.IVON(linear).run(data, num_steps=10, **QUIET),
}
FORMS = {
    "arrays": (X.double().numpy(), Y.double().numpy()),
    "frames": (pd.DataFrame(X.double().numpy()), pd.Series(Y.double().numpy())),
    "a dict": {"x": pd.DataFrame(X.numpy()), "y": Y.numpy()},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_scale.errors.PyroScaleWarning")
@pytest.mark.parametrize("method", METHODS)
def test_arrays_and_frames_are_their_tensors(method):
    """Bit for bit: they are rows, N is their number, and float32's rounding gives Y back."""
    expected = METHODS[method]((X, Y)).get_samples()
    for form in FORMS.values():
        found = METHODS[method](form).get_samples()
        assert torch.equal(found["w"], expected["w"])


@pytest.mark.filterwarnings("ignore::pyro_scale.errors.PyroScaleWarning")
def test_whatever_takes_rows_takes_arrays():
    x, y = FORMS["frames"]
    fit = METHODS["Laplace"]((X, Y))
    own = fit.log_likelihood((X, Y))["y"]
    assert torch.equal(fit.log_likelihood((x, y))["y"], own)
    assert torch.equal(fit.predict(x, reduce="mean")["y"], fit.predict(X, reduce="mean")["y"])
    assert fit.predict(x=x.to_numpy(), num_samples=2)["y"].shape == (2, 60)
    assert fit.loo(data=(x, y)).elpd == fit.loo(data=(X, Y)).elpd
    assert ps.compare({"a": fit}, data=(x, y)).table.equals(
        ps.compare({"a": fit}, data=(X, Y)).table
    )
    with torch.random.fork_rng():
        (lower, upper), (others, _) = (
            (torch.manual_seed(0), fit.predict(x, interval=0.9, calibrate=held)["y"])[1]
            for held in ((x[::-1], y[::-1]), (X.flip(0), Y.flip(0)))
        )
    assert (lower < upper).all()
    assert torch.equal(lower, others)
    log_posterior = ps.LogPosterior(linear, num_data=60)
    params = log_posterior.init(0, x, y)
    assert torch.equal(
        log_posterior(params, (x, y)).log_joint, log_posterior(params, (X, Y)).log_joint
    )
    assert str(ps.explain(linear, (x, y))) == str(ps.explain(linear, (X, Y)))
    steps = [ps.BAOA(linear, lr=0.1, num_data=60) for _ in range(2)]
    values = []
    for step, rows in zip(steps, ((x, y), (X, Y)), strict=True):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            values.append(step.step(*rows))
    assert values[0] == values[1]


# ------------------------------------------------------------------ dtypes


classes = of_rows(lambda x, w: dist.Bernoulli(logits=x @ w), w=normal(3))


def by_group(g, y=None):
    a = pyro.sample("a", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    with pyro.plate("data", len(g)):
        return pyro.sample("y", dist.Normal(a[g], 1.0), obs=y)


def made_of(net):
    net = ps.bayesianize(net)

    return of_network(net, lambda f: dist.Normal(f.squeeze(-1), 1.0))


G = torch.arange(60) % 4
CLASHES = {
    "float64 rows": (
        linear,
        (X.double(), Y),
        r"argument x is float64, .* float32 on the way to site 'y' .*: pass x\.float\(\), or call "
        r"torch\.set_default_dtype",
    ),
    "both in float64": (linear, (X.double(), Y.double()), r"pass x\.float\(\)"),
    "by name": (linear, {"x": X.double(), "y": Y}, r"argument x is float64.*x\.float\(\)"),
    "integers": (linear, (X.long(), Y), r"argument x is int64, .* pass x\.float\(\)$"),
    "half": (linear, (X.half(), Y), r"argument x is float16.*x\.float\(\)$"),
    "classes in integers": (
        classes,
        (X, (Y > 0).long()),
        r"argument y is int64, where the model needs float32 at site 'y'.*y\.float\(\)$",
    ),
    "classes in booleans": (classes, (X, Y > 0), r"argument y is bool.*site 'y'.*y\.float\(\)$"),
    "an index in floats": (by_group, (G.float(), Y), r"argument g is float32.*int64.*g\.long\(\)$"),
    "an index in int8": (by_group, (G.to(torch.int8), Y), r"argument g is int8.*g\.long\(\)$"),
    "a network": (made_of(nn.Linear(3, 1)), (X.double(), Y), r"argument x.*site 'y'.*x\.float"),
    "a network in float64": (
        made_of(nn.Linear(3, 1).double()),
        (X, Y),
        r"argument x is float32, where the model needs float64.*x\.double\(\)$",
    ),
}


def message_of(error):
    return str(error).partition("\nSee")[0]


@pytest.mark.parametrize("name", CLASHES)
def test_dtypes_that_clash_are_named_with_what_to_pass(name):
    model, data, message = CLASHES[name]
    with pytest.raises(DataError) as raised:
        ps.explain(model, data)
    assert re.search(message, message_of(raised.value))
    with pytest.raises(DataError, match="argument"):
        ps.VI(model).run(data, num_steps=1, **QUIET)


@pytest.mark.parametrize(
    "data", [(X, Y.double()), (X, Y.long())], ids=["float64 values", "integer values"]
)
def test_what_torch_takes_is_not_refused(data):
    assert ps.explain(linear, data).num_data == 60


def test_dtypes_of_later_calls():
    fit = METHODS["Laplace"]((X, Y))
    step = ps.BAOA(linear, lr=0.01, num_data=60)
    step.step(X, Y)
    wide = X.double()
    for call in (
        lambda: fit.predict(wide),
        lambda: fit.predict(x=wide),
        lambda: fit.predict(wide, reduce="mean"),
        lambda: fit.predict(wide, linearized=True),
        lambda: fit.predict(X, interval=0.9, calibrate=(wide, Y)),
        lambda: fit.log_likelihood((wide, Y)),
        lambda: fit.loo(data=(wide, Y)),
        lambda: fit.to_arviz(data=(wide, Y)),
        lambda: fit.ksd((wide, Y)),
        lambda: ps.compare({"a": fit}, data=(wide, Y)),
        lambda: step.step(wide, Y),
    ):
        with pytest.raises(DataError, match=r"argument x is float64.*'y'.*pass x\.float\(\)"):
            call()


def test_an_error_of_the_models_own_stays():
    def breaks(x, y=None):
        linear(x, y)
        raise RuntimeError("not the dtype's fault")

    with pytest.raises(RuntimeError, match="not the dtype's fault"):
        ps.explain(breaks, (X, Y.double()))


# ------------------------------------------------------------------ what is no model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, labels=None):
        out = self.layer(x)
        return out if labels is None else ((out - labels) ** 2).mean()


class OneArgument(Net):
    def forward(self, x):
        return self.layer(x)


class Bert(Net):
    __module__ = "transformers.models.bert"


NETWORKS = {
    "a layer": nn.Linear(3, 1),
    "layers": nn.Sequential(nn.Linear(3, 1), nn.Tanh()),
    "of the user's own": OneArgument(),
    "with labels": Net(),
    "of another library": Bert(),
    "as a PyroModule": PyroModule[nn.Linear](3, 1),
    "bayesianized": ps.bayesianize(Net()),
    "compiled": torch.compile(nn.Linear(3, 1)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_told_from_a_model(name):
    by_name = [{"x": X, "y": Y}] if "PyroModule" not in name else []  # whose argument is input
    for data in ((X, Y), (X,), *by_name):
        with pytest.raises(ModelError, match=r"is a network: ps\.bayesianize\(net\)") as raised:
            ps.BAOA(NETWORKS[name]).run(data, **QUIET)
        lines = message_of(raised.value).splitlines()[1:]
        assert len(lines) == 3
    with pytest.raises(ModelError, match="is a network"):
        ps.explain(NETWORKS[name], (X, Y))


def test_the_three_lines_run():
    with pytest.raises(ModelError) as raised:
        ps.BAOA(nn.Linear(3, 1))
    lines = message_of(raised.value).splitlines()[1:]
    names = {"ps": ps, "pyro": pyro, "dist": dist, "net": nn.Linear(3, 1)}
    exec("\n".join(line[4:] for line in lines), names)
    explained = ps.explain(names["model"], (X, Y[:, None]), batch_size=20)
    assert explained.num_data == 60
    assert explained.rows[-1]["ours"] == "N/B = 3"


def test_torchs_own_networks_are_refused_before_there_are_data():
    for name in ("a layer", "layers", "of another library", "compiled"):
        with pytest.raises(ModelError, match="is a network"):
            ps.VI(NETWORKS[name])


def test_modules_that_observe_are_models():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = ps.bayesianize(nn.Linear(3, 1))

        def forward(self, x, y=None):
            return pyro.sample("y", dist.Normal(self.net(x), 1.0).to_event(1), obs=y)

    assert ps.explain(Model(), (X, Y[:, None])).num_data == 60
    with pytest.raises(ArgumentError, match=r"is a class: pass an instance of it, Model\(\.\.\.\)"):
        ps.BAOA(Model)


@pytest.mark.parametrize(
    ("model", "message"),
    [("net", "not callable"), (None, "not callable"), (OneArgument, "is a class")],
)
def test_what_is_no_model_is_refused(model, message):
    for make in (ps.BAOA, ps.Laplace, ps.EKF, functools.partial(ps.explain, data=(X, Y))):
        with pytest.raises(ArgumentError, match=message):
            make(model)


def test_a_guide_is_no_model():
    with pytest.raises(ArgumentError, match=r"is a guide \(AutoNormal\): pass the model"):
        ps.VI(AutoNormal(linear))


def test_wrapped_networks_are_to_be_unwrapped():
    with pytest.raises(ArgumentError, match=r"net is a DataParallel.*pass net\.module"):
        ps.bayesianize(nn.DataParallel(nn.Linear(2, 1)))
    with pytest.raises(ArgumentError, match=r"net\.0 is a DataParallel.*pass net\.0\.module"):
        ps.bayesianize(nn.Sequential(nn.DataParallel(nn.Linear(2, 1))))


def test_arguments_that_are_tuples_for_the_model_stay_tuples():
    def model(batch):
        return linear(*batch)

    fit = ps.Laplace(model).run(((X, Y),), **QUIET)
    expected = METHODS["Laplace"]((X, Y))
    assert torch.equal(fit.get_samples()["w"], expected.get_samples()["w"])
    assert fit.predict((X, None), num_samples=2)["y"].shape == (2, 60)
    assert np.isfinite(ps.BAOA(model, lr=0.1, num_data=60).step((X, Y)))
    with pytest.raises(PyroScaleError):
        ps.BAOA(linear, lr=0.1, num_data=60).step((X, Y))
