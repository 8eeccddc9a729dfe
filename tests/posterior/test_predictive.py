"""`predict` against direct computation from all draws at once, and its draws against their moments.

Statistical tests have fixed seeds; were those drawn anew, a z beyond 4.4 would come once in
90,000 comparisons.
"""

import functools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from dtypes import default_dtype
from models import normal, of_network, of_rows
from pyro import poutine
from reference import close, double, normals
from repetitions import each_once, long_but
from runs import EVERY_STEP, QUIET

import pyro_scale as ps
from pyro_scale import metrics
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.posterior import chunked_vmap, reductions, row_batches

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore")]
SIZE = 12
X = normals(SIZE, 2, seed=1)
MASK = torch.arange(SIZE) % 3 > 0
CUTS = double(-0.5, 0.7)


class Case(NamedTuple):
    """A family of an observed site, and of its output e the mean, variance, and chances of classes;
    neither mean nor variance where values are classes' numbers."""

    family: Any
    mean: Any = None
    variance: Any = None
    out: tuple[int, ...] = ()
    chances: Any = None


def identity(e):
    return e


def constant(value):
    return lambda e: torch.full_like(e, value)


def softmax(e):
    return e.softmax(-1)


def in_pairs(e):
    return e.unflatten(-1, (2, 3))


def binary(e):
    return torch.stack([1 - e.sigmoid(), e.sigmoid()], -1)


def ordered(e):
    below = (CUTS - e[..., None]).sigmoid()
    return torch.cat(
        [torch.zeros_like(e)[..., None], below, torch.ones_like(e)[..., None]], -1
    ).diff()


def spread(chances):
    return lambda e: chances(e) * (1 - chances(e))


CASES = {
    "Normal": Case(lambda e: dist.Normal(e, 0.7), identity, constant(0.49)),
    "heteroscedastic": Case(
        lambda e: dist.Normal(e[..., 0], (0.3 * e[..., 1]).exp()),
        lambda e: e[..., 0],
        lambda e: (0.6 * e[..., 1]).exp(),
        (2,),
    ),
    "outputs": Case(
        lambda e: dist.Normal(e, 0.7).mask(e < 9).to_event(1).mask(e[..., 0] < 9),
        identity,
        constant(0.49),
        (3,),
    ),
    "StudentT": Case(lambda e: dist.StudentT(5.0, e, 0.5), identity, constant(0.25 * 5 / 3)),
    "Poisson": Case(lambda e: dist.Poisson(e.exp()), torch.exp, torch.exp),
    "Gamma": Case(
        lambda e: dist.Gamma(2.0, e.exp()), lambda e: 2 * (-e).exp(), lambda e: 2 * (-2 * e).exp()
    ),
    "LogNormal": Case(
        lambda e: dist.LogNormal(e, 0.5),
        lambda e: (e + 0.125).exp(),
        lambda e: math.expm1(0.25) * (2 * e + 0.25).exp(),
    ),
    "Multinomial": Case(
        lambda e: dist.Multinomial(5, logits=e),
        lambda e: 5 * softmax(e),
        lambda e: 5 * spread(softmax)(e),
        (3,),
    ),
    "ZeroInflated": Case(
        lambda e: dist.ZeroInflatedPoisson(e.exp(), gate=torch.tensor(0.3)),
        lambda e: 0.7 * e.exp(),
        lambda e: 0.7 * e.exp() * (1 + 0.3 * e.exp()),
    ),
    "Bernoulli": Case(
        lambda e: dist.Bernoulli(logits=e), torch.sigmoid, spread(torch.sigmoid), (), binary
    ),
    "Bernoullis": Case(
        lambda e: dist.Bernoulli(probs=e.sigmoid()).to_event(1),
        torch.sigmoid,
        spread(torch.sigmoid),
        (3,),
        binary,
    ),
    "Categorical": Case(
        lambda e: dist.Categorical(logits=e).mask(e[..., 0] < 9), out=(3,), chances=softmax
    ),
    "probs": Case(lambda e: dist.Categorical(probs=softmax(e)), out=(3,), chances=softmax),
    "Categoricals": Case(
        lambda e: dist.Categorical(logits=in_pairs(e)).to_event(1),
        out=(6,),
        chances=lambda e: softmax(in_pairs(e)),
    ),
    "OrderedLogistic": Case(lambda e: dist.OrderedLogistic(e, CUTS), chances=ordered),
    "OneHot": Case(
        lambda e: dist.OneHotCategorical(logits=e), softmax, spread(softmax), (3,), softmax
    ),
    "OneHots": Case(
        lambda e: dist.OneHotCategorical(logits=in_pairs(e)).to_event(1),
        lambda e: softmax(in_pairs(e)),
        spread(lambda e: softmax(in_pairs(e))),
        (6,),
        lambda e: softmax(in_pairs(e)),
    ),
}
REFUSES = [False]  # whether models branch on their weights, which vmap refuses


def model_of(family, out=()):
    """Outputs x w are a deterministic site."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, *out), 1.0).to_event(1 + len(out)))
        if REFUSES[0] and w.sum() > 1e9:
            raise AssertionError
        with pyro.plate("data", len(x)):
            e = pyro.deterministic("e", x @ w, event_dim=len(out))
            return pyro.sample("y", family(e), obs=y)

    return model


def drawn_from(family, out=()):
    torch.manual_seed(0)
    return family(0.1 * torch.ones(SIZE, *out)).sample()


def run_method(model, data, method=ps.BAOA, lr=0.05, **kwargs):
    settings = {**EVERY_STEP, **QUIET, "num_samples": 3, "num_chains": 3, **kwargs}
    return method(model, lr=lr).run(data, **settings)


@functools.cache
def fit_of_case(name):
    case = CASES[name]
    return run_method(model_of(case.family, case.out), (X, drawn_from(case.family, case.out)))


def outputs(fit, x=X, samples=None):
    """x w, `[draws, rows, ...]`."""
    return torch.einsum("nd,sd...->sn...", x, (samples or fit.get_samples())["w"])


def close_parts(actual, expected, tolerance=1e-12):
    if isinstance(expected, tuple):
        assert type(actual) is metrics.Uncertainty
        for one, other in zip(actual, expected, strict=True):
            close_parts(one, other, tolerance)
    else:
        close(actual, expected, tolerance)


def reduced_as_by_hand(fit, case, e, tolerance=1e-12, **chosen):
    """All that there is of a case's predictions is that of outputs `[draws, rows, ...]`."""
    mean = fit.predict(X, reduce="mean", **chosen)
    close_parts(mean["y"], (case.mean or case.chances)(e).mean(0), tolerance)
    if "e" in mean:
        close_parts(mean["e"], e.mean(0), tolerance)
    if case.chances:
        found = fit.predict(X, reduce="entropy", **chosen)
        close_parts(found["y"], metrics.uncertainty(case.chances(e)), tolerance)
    if case.variance:
        found = fit.predict(X, reduce="variance", **chosen)
        close_parts(found["y"], metrics.variance(case.mean(e), case.variance(e)), tolerance)
        second = (case.variance(e) + case.mean(e) ** 2).mean(0)
        close_parts(found["y"].total, second - case.mean(e).mean(0) ** 2, 100 * tolerance)
    torch.manual_seed(3)
    drawn = fit.predict(X, **chosen)["y"]
    for levels in ((0.0, 0.3), double(0.05, 0.5, 0.95)):
        if case.mean:
            torch.manual_seed(3)
            found = fit.predict(X, reduce=levels, **chosen)
            levels = torch.as_tensor(levels)
            close_parts(found["y"], drawn.quantile(levels, dim=0), tolerance)
            if "e" in found:
                close_parts(found["e"], e.quantile(levels, dim=0), tolerance)


@pytest.fixture(
    params=[
        pytest.param((None, 0), id="all"),
        pytest.param((1, 0), id="1", marks=pytest.mark.long),
        pytest.param((5, 300), id="5"),
        pytest.param((100, 0), id="100", marks=pytest.mark.long),
    ]
)
def batch_size(request, monkeypatch):
    """Rows at a time, and once also fewer draws at a time than there are."""
    rows, small = request.param
    if small:
        monkeypatch.setattr(chunked_vmap, "CHUNK_BYTES", small)
        monkeypatch.setattr(reductions, "_NUMBERS_SORTED", small // 8)
    return rows


# ------------------------------------------------------------------ against all draws at once


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_is_that_of_all_draws(name, batch_size):
    fit = fit_of_case(name)
    reduced_as_by_hand(fit, CASES[name], outputs(fit), batch_size=batch_size)


@pytest.mark.parametrize("reduce", ["mean", "entropy", "variance"])
def test_draws_one_by_one_give_the_same(reduce, monkeypatch):
    one = fit_of_case("Bernoulli").predict(X, reduce=reduce, batch_size=5)["y"]
    monkeypatch.setattr(sys.modules[__name__], "REFUSES", [True])
    close_parts(fit_of_case("Bernoulli").predict(X, reduce=reduce, batch_size=5)["y"], one)


def test_variances_far_from_zero_are_added_up_in_double_precision():
    """What comes out has the model's precision."""
    x = X.float()
    narrow = model_of(lambda e: dist.Normal(4000 + e, x.new_tensor(0.5)))
    with default_dtype(torch.float32):
        fit = run_method(narrow, (x, 4000 + x[:, 0]), lr=0.01)
        found = fit.predict(x, reduce="variance")["y"]
    close_parts(found.epistemic.double(), outputs(fit, x).double().var(0, correction=0), 2e-3)
    assert {part.dtype for part in found} == {torch.float32}


ODD = {
    "StudentT": (lambda e: dist.StudentT(1.5, e, 1.0), "variance", math.inf),
    "InverseGamma": (lambda e: dist.InverseGamma(0.5, e.exp()), "mean", math.inf),
    "Cauchy": (lambda e: dist.Cauchy(e, 1.0), "mean", math.nan),
}


@pytest.mark.parametrize("name", ODD)
def test_moments_that_are_infinite_or_do_not_exist_say_so(name):
    family, reduce, expected = ODD[name]
    found = run_method(model_of(family), (X, drawn_from(family)), lr=0.01).predict(
        X, reduce=reduce
    )["y"]
    found = found if reduce == "mean" else found.total
    torch.testing.assert_close(found, torch.full((SIZE,), expected), equal_nan=True)


# ------------------------------------------------------------------ which draws, which rows


def test_fewer_draws_are_evenly_spaced_over_the_chains():
    fit = fit_of_case("Normal")
    found = fit.predict(X, num_samples=3, reduce="mean", return_sites=["e", "y"])
    assert list(found) == ["e", "y"]
    close_parts(found["e"], outputs(fit)[[0, 4, 8]].mean(0))


def test_draws_count_by_their_weights():
    family = CASES["Bernoulli"].family
    data = X, drawn_from(family)
    fit = run_method(model_of(family), data, ps.SGLD, lambda step: 0.3 / (1 + step), num_samples=40)
    weights = torch.as_tensor(fit.to_arviz().sample_stats["weight"].values).flatten()
    e = fit.predict(X, reduce="mean")["e"]
    close_parts(e, outputs(fit, samples=fit.predict(X, return_sites=["w"])).mean(0))
    exact = (weights[:, None] * outputs(fit)).sum(0) / weights.sum()
    assert float((e - exact).norm()) < 0.2 * float((outputs(fit).mean(0) - exact).norm())


@pytest.mark.parametrize(("left", "classes"), each_once([True, False], [False, True]))
def test_plates_left_or_right_of_the_datas(left, classes, batch_size):
    """Three outputs in a plate of their own; a deterministic site with the rows in its middle."""

    def placed(e):
        return e.unflatten(-1, (3, 2)).transpose(-3, -2) if left else e.unflatten(-1, (3, 2))

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 6), 1.0).to_event(2))
        e, y = placed(x @ w), y.T if left and y is not None else y
        pyro.deterministic("middle", (x @ w).unflatten(-1, (3, 2)).transpose(0, 1))
        with pyro.plate("data", len(x), dim=left - 2), pyro.plate("out", 3, dim=-1 - left):
            fn = dist.Categorical(logits=e) if classes else dist.Normal(e[..., 0], 1.0)
            return pyro.sample("y", fn, obs=y)

    y = torch.arange(3 * SIZE).view(SIZE, 3) % 2
    fit = run_method(model, (X, y if classes else y.double()))
    e, middle = placed(outputs(fit)), outputs(fit).unflatten(-1, (3, 2)).transpose(1, 2)
    case = Case(None, lambda e: e[..., 0], lambda e: 0 * e[..., 0] + 1)
    case = Case(None, chances=softmax) if classes else case
    reduced_as_by_hand(fit, case, e, batch_size=batch_size)
    close_parts(fit.predict(X, reduce="mean", batch_size=batch_size)["middle"], middle.mean(0))
    close_parts(
        fit.predict(X, reduce=[0.5], batch_size=batch_size, return_sites=["middle"])["middle"][0],
        middle.quantile(0.5, dim=0),
    )


def test_models_that_subsample_by_themselves_are_predicted_for_all_rows():
    """12 rows in blocks of 5, of which the last overlaps the one before."""
    y = drawn_from(CASES["Normal"].family)

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", SIZE, subsample_size=5) as rows:
            pyro.sample("y", dist.Normal(X[rows] @ w, 0.7), obs=y[rows])

    fit = run_method(model, None)
    e = outputs(fit)
    close_parts(fit.predict(reduce="mean")["y"], e.mean(0))
    close_parts(fit.predict(reduce="variance")["y"], metrics.variance(e, 0 * e + 0.49))
    assert fit.predict(reduce=[0.1, 0.9])["y"].shape == (2, SIZE)


def groups(count):
    def model(group, y=None):
        with pyro.plate("groups", count):
            mean = pyro.sample("mean", dist.Normal(2.0, 1.0))
        with pyro.plate("data", len(group)):
            return pyro.sample("y", dist.Normal(mean[group], 0.5), obs=y)

    return model


def test_a_new_group_has_no_draws_unless_the_plate_has_a_place_for_it():
    group = torch.arange(SIZE) % 3
    data, new = (group, 1.0 * group), torch.full((2,), 3)
    fit = ps.Laplace(groups(3), structure="diag").run(data, seed=0)
    with pytest.raises(IndexError) as raised:
        fit.predict(new)
    told, advice = raised.value.__notes__
    assert told == "raised by the model in predict: 0 is int64 [2]"
    assert "give the groups' plate a place" in advice
    drawn = ps.Laplace(groups(4), structure="diag").run(data, seed=0).predict(new)["y"]
    # of the prior: mean 2, variance 1 + .25, and 1 between two rows of the group
    assert drawn.mean(0).sub(2).abs().max() < 4.4 * math.sqrt(1.25 / 1000)
    covariance = drawn.T.cov()
    assert covariance[0, 0] == pytest.approx(1.25, abs=4.4 * 1.25 * math.sqrt(2 / 1000))
    assert covariance[0, 1] == pytest.approx(1.0, abs=4.4 * math.sqrt((1.25**2 + 1) / 1000))


def test_joint_densities_are_predicted_of_all_rows_together(monkeypatch):
    monkeypatch.setattr(row_batches, "CHUNK_ROWS", 5)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        covariance = torch.eye(len(x)) + (-(x[:, None] - x).square().sum(-1)).exp()
        return pyro.sample("y", dist.MultivariateNormal(x @ w - (x @ w).mean(), covariance), obs=y)

    fit = run_method(model, (X, X[:, 0]))
    e = outputs(fit)
    close_parts(fit.predict(X, reduce="mean")["y"], e.mean(0) - e.mean(), 1e-10)


def test_masked_rows_are_predicted_too():
    """A mask says what counts in the likelihood, not what is predicted."""

    def model(x, mask, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)), poutine.mask(mask=mask):
            return pyro.sample("y", dist.Normal(x @ w, 0.7), obs=y)

    fit = run_method(model, (X, MASK, X[:, 0]))
    found = fit.predict(X, MASK, reduce="variance", batch_size=5)["y"]
    close_parts(found, metrics.variance(outputs(fit), 0 * outputs(fit) + 0.49))


def test_networks_with_a_frozen_base(batch_size):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    bayesian = ps.bayesianize(net, include="2")

    model = of_network(bayesian, lambda f: dist.Categorical(logits=f))

    fit = run_method(model, (X, torch.arange(SIZE) % 3), lr=0.02)
    weights = {f"2.{name.split('.')[-1]}": value for name, value in fit.get_samples().items()}
    logits = torch.vmap(lambda some: torch.func.functional_call(net, some, X))(weights)
    reduced_as_by_hand(fit, Case(None, chances=softmax), logits, batch_size=batch_size)


# ------------------------------------------------------------------ memory

MEMORY = """
import sys, pyro, pyro.distributions as dist, torch
import pyro_scale as ps

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024

def convolved(x, w):
    return torch.conv2d(x, w[:, None], padding=1).tanh().mean((-1, -2))

call, x, shape = {
    "linear": (torch.matmul, torch.randn(1500, 4), (4, 50)),
    "convolution": (convolved, torch.randn(50, 1, 16, 16), (8, 3, 3)),
}[sys.argv[1]]

def model(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Categorical(logits=call(x, w)), obs=y)

fit = ps.VI(model).run((x, torch.zeros(len(x))), batch_size=50, num_steps=2, num_chains=2, seed=0,
                       progress=False)
assert len(fit.get_samples()["w"]) == 2000
fit.predict(x[:50], num_samples=2, reduce="entropy")
before = peak()
for reduce in ("mean", "entropy"):
    found = fit.predict(x, reduce=reduce)["y"]
assert len(found.total) == len(x)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says its peak there")
@pytest.mark.parametrize("kind", long_but(["linear", "convolution"], "convolution"))
@pytest.mark.long
def test_memory_is_that_of_some_draws(kind):
    """MB: chances of 2,000 draws would take 600, activations 820."""
    command = [sys.executable, "-W", "ignore", "-c", MEMORY, kind]
    grown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert float(grown) < 250


# ------------------------------------------------------------------ draws


DRAWN = {
    "noise": Case(lambda e: dist.Normal(torch.zeros_like(X[:1, 0]), 1.0), constant(0), constant(1)),
    "coin": Case(lambda e: dist.Bernoulli(0.3), constant(0.3), constant(0.21)),
    "Binomial": Case(
        lambda e: dist.Binomial(9, logits=e),
        lambda e: 9 * e.sigmoid(),
        lambda e: 9 * spread(torch.sigmoid)(e),
    ),
    "Beta": Case(
        lambda e: dist.Beta(2 * e.exp(), 2.0),
        torch.sigmoid,
        lambda e: spread(torch.sigmoid)(e) / (2 * e.exp() + 3),
    ),
    **{name: case for name, case in CASES.items() if name not in ("LogNormal", "ZeroInflated")},
    "StudentT": Case(lambda e: dist.StudentT(9.0, e, 0.5), identity, constant(0.25 * 9 / 7)),
}


def drawn_of(name):
    """Draws for 2,000 rows, twice of the same state, their outputs, and calls of the model."""
    calls, case = [], DRAWN[name]
    plain = model_of(case.family, case.out)

    def model(x, y=None):
        calls.append(len(x))
        return plain(x, y)

    with pyro.plate("data", SIZE):
        y = pyro.sample("y", case.family(0.1 * torch.ones(SIZE, *case.out)))
    fit, x, drawn = run_method(model, (X, y), lr=0.02), 0.7 * normals(2000, 2, seed=5), []
    del calls[:]
    for _ in range(2):
        torch.manual_seed(6)
        drawn.append(fit.predict(x)["y"])
    return drawn, outputs(fit, x), len(calls) / 2


@pytest.mark.parametrize("name", DRAWN)
def test_draws_have_their_moments_and_are_independent(name):
    """Over 9 draws of the posterior and 2,000 rows, z values (of the first output, or class) have
    mean 0 and mean square 1, and so have their sums over draws, or rows, over the root of how
    many; the same state of the generator gives the draws again."""
    (y, again), e, _ = drawn_of(name)
    assert torch.equal(y, again)
    case = DRAWN[name]
    if case.mean:
        mean, variance = case.mean(e), case.variance(e)
    else:
        y, mean, variance = y[..., None] == 0, case.chances(e), spread(case.chances)(e)
    z = (y.double() - mean) / variance.sqrt()
    z = z.flatten(2)[..., 0] if z.dim() > 2 else z
    for values in (z, z.square() - 1, z.sum(0).square() / 9 - 1):
        assert abs(float(values.mean() / values.std())) * values.numel() ** 0.5 < 4.4
    assert float(z.sum(1).square().sum()) / 2000 < 9 + 4.4 * 18**0.5 + 10  # a longer tail


@pytest.mark.parametrize("name", ["Normal", "Bernoulli", "Categorical", "Poisson", "Gamma"])
def test_models_are_called_once_for_many_draws(name):
    assert drawn_of(name)[2] < 5


@pytest.mark.parametrize("refuses", [False, True], ids=["vmapped", "one by one"])
def test_sites_that_depend_on_others_follow_them_within_a_draw(refuses, monkeypatch):
    def model(x, y=None, z=None):
        y = model_of(CASES["Poisson"].family)(x, y)
        with pyro.plate("again", len(x)):
            pyro.sample("z", dist.Poisson(1e10 * y + 1e-9), obs=z)

    fit = run_method(model, (X, 0 * X[:, 0] + 1, 0 * X[:, 0] + 1e10), lr=1e-9)
    monkeypatch.setattr(sys.modules[__name__], "REFUSES", [refuses])
    drawn = fit.predict(X, X[:, 0], X[:, 0])
    close_parts(drawn["z"] / 1e10, drawn["y"], 1e-3)
    assert float(drawn["y"].std(0).mean()) > 0.3


# ------------------------------------------------------------------ approximations


@functools.cache
def approximated(kind, name):
    case, settings = CASES[name], {"seed": 0, "progress": False}
    if kind != "Laplace":
        settings |= {"num_steps": 20, "num_chains": 2}
    data = X, drawn_from(case.family, case.out)
    return getattr(ps, kind)(model_of(case.family, case.out)).run(data, **settings)


FITS = [("MAP", False), ("VI", False), ("Laplace", False), ("Laplace", True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "name"), each_once(FITS, ["heteroscedastic", "Poisson", "Bernoulli", "probs"])
)
def test_approximations_reduce_over_their_draws(of, name):
    """The outputs are linear, so that linearized predictions are the plain ones."""
    kind, linear = of
    fit, case = approximated(kind, name), CASES[name]
    count = None if kind == "MAP" else 50
    samples = fit.get_samples(count)
    assert len(samples["w"]) == (count or 2)
    chosen = {"batch_size": 5, "linearized": linear, "num_samples": count}
    reduced_as_by_hand(fit, case, outputs(fit, samples=samples), 1e-10, **chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    each_once(["heteroscedastic", "Bernoullis", "Categorical", "OneHot"], [None, 3]),
)
def test_linearized_networks_reduce_over_their_linear_arguments(name, count):
    """Outputs at each start's mode + J (w - mode), by forward derivatives of the network."""
    case = CASES[name]

    def network(a, b, x=X):
        return torch.tanh(x @ a) @ b

    model = of_rows(
        lambda x, a, b: case.family(network(a, b, x)), a=normal(2, 2), b=normal(2, *case.out)
    )
    data = X, drawn_from(case.family, case.out)
    fit = ps.Laplace(model).run(data, num_chains=2, seed=0, progress=False)
    drawn, e = fit.get_samples(group_by_chain=True), []
    for start, center in enumerate(fit.fit.centers):
        a, b = fit.fit.layout.unflatten(center).values()

        def moved(w, v, a=a, b=b):
            return sum(torch.func.jvp(network, (a, b), (w - a, v - b)))

        e.append(torch.vmap(moved)(drawn["a"][start], drawn["b"][start]))
    e = torch.cat(e)
    e = e if count is None else e[[0, 1000, 1999]]
    chosen = {"linearized": True, "batch_size": 5, "num_samples": count}
    reduced_as_by_hand(fit, case, e, 1e-10, **chosen)


def test_linearized_means_of_a_lognormal_are_refused():
    with pytest.raises(ArgumentError, match="there is no mean in closed form for site 'y'"):
        approximated("Laplace", "LogNormal").predict(X, reduce="mean", linearized=True)


# ------------------------------------------------------------------ refusals

UNKNOWN = r"pass one of \['mean', 'entropy', 'variance'\], or quantiles' levels from 0 to 1"
REFUSED = {
    "unknown": ("Normal", "median", rf"reduce='median': {UNKNOWN}"),
    "no levels": ("Normal", [], rf"reduce=\[\]: {UNKNOWN}"),
    "a number": ("Normal", 0.5, rf"reduce=0.5: {UNKNOWN}"),
    "above 1": ("Normal", [0.5, 1.01], UNKNOWN),
    "below 0": ("Normal", (-0.01,), UNKNOWN),
    "nan": ("Normal", [math.nan], UNKNOWN),
    "names": ("Normal", ["mean", "variance"], UNKNOWN),
    "scalar": ("Normal", torch.tensor(0.5), UNKNOWN),
    "entropy": ("Normal", "entropy", "'y' is a Normal, which has no classes: pass reduce="),
    "counts": ("Multinomial", "entropy", "'y' is a Multinomial, which has no classes"),
    "variance": ("Categoricals", "variance", "'y' is categorical, .* pass reduce='entropy'"),
    "order": ("OrderedLogistic", [0.1], "'y' is categorical, and classes have no order: .*'mean'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_there_is_not_is_refused(name):
    case, reduce, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        fit_of_case(case).predict(X, reduce=reduce)


@pytest.mark.parametrize("reduce", ["mean", "variance"])
def test_a_moment_without_a_closed_form_is_refused(reduce):
    def family(e):
        return dist.FoldedDistribution(dist.Normal(e, 1.0))

    fit = run_method(model_of(family), (X, drawn_from(family)))
    message = r"no mean in closed form for site 'y' \(FoldedDistribution\): pass quantiles' levels"
    with pytest.raises(ArgumentError, match=message):
        fit.predict(X, reduce=reduce)


@pytest.mark.parametrize("reduce", [None, "mean", "entropy", [0.5]])
def test_unknown_sites_and_no_rows_are_refused(reduce):
    with pytest.raises(ArgumentError, match=r"no site 'q'; the model has .*'y'"):
        fit_of_case("Bernoulli").predict(X, reduce=reduce, return_sites=["y", "q"])
    with pytest.raises(ArgumentError, match="batch_size=0"):
        fit_of_case("Bernoulli").predict(X, reduce=reduce, batch_size=0)


@pytest.mark.parametrize("reduce", [None, "mean"])
def test_loaders_are_refused(reduce):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=4)
    with pytest.raises(DataError, match=r"argument 0 is a DataLoader: pass .* batch_size="):
        fit_of_case("Bernoulli").predict(loader, reduce=reduce)


def test_no_rows_are_refused_linearized_too():
    with pytest.raises(ArgumentError, match="batch_size=0"):
        approximated("Laplace", "Poisson").predict(X, reduce="mean", batch_size=0, linearized=True)
