"""The curvature of priors, against Hessians of log densities that are written out by hand."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from curvatures import REAL, TIGHT, B, N, V, W, X, flat_hessian, weights
from reference import close, double, normals

import pyro_scale as ps
from pyro_scale.core.layout import Layout
from pyro_scale.curvature import prior_hessian
from pyro_scale.curvature.prior_hessian import prior_precision, prior_product

pytestmark = pytest.mark.usefixtures("float64", "store")


def sites(**priors):
    """A model of these latents, with rows that depend on all of them."""

    def model(x, y):
        values = {}
        for name, make in priors.items():
            values[name] = pyro.sample(name, make(values))
        total = sum(value.sum() for value in values.values())
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x[:, 0] * total, 1.0), obs=y)

    return model


PRECISION = double([2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 1.5])


def hierarchy_log_joint(p):
    """tau ~ HalfNormal(1), m ~ N(0, 4), w ~ N(m, tau^2), u = log tau: the Jacobian is tau."""
    u, m, w = p["tau"], p["m"], p["w"]
    tau = u.exp()
    return -0.5 * tau**2 + u - m**2 / 8 - (0.5 * ((w - m) / tau) ** 2 + u).sum()


def funnel(p):
    """v ~ N(0, 9), z ~ N(0, exp(v))."""
    return -(p["v"] ** 2).sum() / 18 - (0.5 * p["z"] ** 2 / p["v"].exp() + p["v"] / 2).sum()


# name: (model, params, log prior written out but for constants, whether its Hessian is diagonal)
PRIORS = {
    "normal": (
        sites(w=lambda v: dist.Normal(double(0.3, -1.0), double(0.5, 2.0)).to_event(1)),
        {"w": W},
        lambda p: -0.5 * (((p["w"] - double(0.3, -1.0)) / double(0.5, 2.0)) ** 2).sum(),
        True,
    ),
    "scalar": (
        sites(w=lambda v: dist.Normal(0.0, 0.5)),
        {"w": torch.tensor(0.3, dtype=torch.float64)},
        lambda p: -2 * p["w"] ** 2,
        True,
    ),
    "student": (
        sites(w=lambda v: dist.StudentT(4.0, torch.zeros(2), 0.5).to_event(1)),
        {"w": W},
        lambda p: -2.5 * torch.log1p((p["w"] / 0.5) ** 2 / 4).sum(),
        True,
    ),
    "multivariate": (
        sites(w=lambda v: dist.MultivariateNormal(torch.ones(3), precision_matrix=PRECISION)),
        {"w": normals(3)},
        lambda p: -0.5 * (p["w"] - 1) @ PRECISION @ (p["w"] - 1),
        False,
    ),
    "hierarchical": (
        sites(
            tau=lambda v: dist.HalfNormal(1.0),
            m=lambda v: dist.Normal(0.0, 2.0),
            w=lambda v: dist.Normal(v["m"].expand(3), v["tau"]).to_event(1),
        ),
        {
            "tau": torch.tensor(-0.4, dtype=torch.float64),
            "m": torch.tensor(0.7, dtype=torch.float64),
            "w": normals(3),
        },
        hierarchy_log_joint,
        False,
    ),
    "funnel": (
        sites(
            v=lambda v: dist.Normal(torch.zeros(1), 3.0).to_event(1),
            z=lambda v: dist.Normal(torch.zeros(80), (v["v"] / 2).exp()).to_event(1),
        ),
        {"z": normals(80), "v": double(0.6)},
        funnel,
        False,
    ),
    "gamma": (
        sites(r=lambda v: dist.Gamma(torch.full((2,), 2.0), 3.0).to_event(1)),
        {"r": W},
        lambda p: (2 * p["r"] - 3 * p["r"].exp()).sum(),
        True,
    ),
    "lognormal": (
        sites(r=lambda v: dist.LogNormal(torch.full((2,), 0.3), 0.5).to_event(1)),
        {"r": W},
        lambda p: -2 * ((p["r"] - 0.3) ** 2).sum(),
        True,
    ),
    "beta": (
        sites(r=lambda v: dist.Beta(torch.full((2,), 2.0), 3.0).to_event(1)),
        {"r": W},
        lambda p: (2 * p["r"] - 5 * torch.log1p(p["r"].exp())).sum(),
        True,
    ),
    "flat and normal": (
        sites(
            f=lambda v: dist.ImproperUniform(dist.constraints.real, (), (2,)),
            w=lambda v: dist.Normal(torch.zeros(2), 0.5).to_event(1),
        ),
        {"f": V, "w": W},
        lambda p: -2 * p["w"].square().sum() + 0 * p["f"].sum(),
        True,
    ),
    "flat": (
        sites(f=lambda v: dist.ImproperUniform(dist.constraints.real, (), (2,))),
        {"f": V},
        lambda p: 0 * p["f"].square().sum(),
        True,
    ),
    "linear": (
        sites(r=lambda v: dist.Laplace(torch.zeros(2), 0.5).to_event(1)),
        {"r": W},
        lambda p: -2 * p["r"].abs().sum() + 0 * p["r"].square().sum(),
        True,
    ),
    "saddle": (
        sites(w=lambda v: dist.Cauchy(torch.zeros(2), 0.1).to_event(1)),
        {"w": W},
        lambda p: -torch.log1p((p["w"] / 0.1) ** 2).sum(),
        True,
    ),
}


@pytest.fixture
def hessian_calls(monkeypatch):
    """How often the whole Hessian, or the diagonal of one, is computed."""
    calls = []
    for name in ("hessian", "hessian_diagonal"):
        function = getattr(prior_hessian, name)

        def counting(*args, function=function, name=name):
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(prior_hessian, name, counting)
    return calls


@pytest.mark.parametrize(
    ("model", "params", "log_prior", "is_diagonal"), PRIORS.values(), ids=PRIORS
)
def test_priors(model, params, log_prior, is_diagonal, hessian_calls):
    expected = -flat_hessian(log_prior, params)
    for num_data in (B, N):
        known = ps.LogPosterior(model, num_data=num_data)
        dense = prior_precision(known, params, (X, REAL), None, True)
        diagonal = prior_precision(known, params, (X, REAL), None, False)
        close(dense, expected, TIGHT)
        close(diagonal, expected.diagonal(), TIGHT)
        assert not dense.requires_grad
        assert not diagonal.requires_grad
        layout = Layout.from_tensors(params)
        vector = normals(layout.size)
        product = prior_product(known, params, (X, REAL), layout.unflatten(vector))
        close(layout.flatten(product), expected @ vector, TIGHT)
    assert hessian_calls == ([] if is_diagonal else ["hessian", "hessian_diagonal"] * 2)


@pytest.mark.parametrize("places", [(17, 63), (0, 99), (64, 65)])
@pytest.mark.parametrize("size", [1.0, 1e-6, -1e-9])
def test_two_elements_of_a_hundred_that_are_coupled(places, size):
    i, j = places

    def model(x, y):
        w = weights(100)
        pyro.factor("tie", -size * w[i] * w[j])
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x[:, 0] * w.sum(), 1.0), obs=y)

    expected = torch.eye(100)
    expected[i, j] = expected[j, i] = size
    known = ps.LogPosterior(model, num_data=N)
    found = prior_precision(known, {"w": normals(100)}, (X, REAL), None, True)
    close(found, expected, 1e-12)
    assert float(found[i, j]) == pytest.approx(size, rel=1e-5)
    diagonal = prior_precision(known, {"w": normals(100)}, (X, REAL), None, False)
    close(diagonal, torch.ones(100), 1e-12)


def test_a_prior_that_functorch_refuses():
    """One by one, then: -(w'w)^2, whose Hessian is -(4 w'w + 8 w w')."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            ctx.save_for_backward(w)
            return w @ w

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient * ctx.saved_tensors[0]

    def model(x, y):
        w = weights(70)
        pyro.factor("norm", -(Norm.apply(w) ** 2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x[:, 0] * w.sum(), 1.0), obs=y)

    w = normals(70) / 5
    expected = torch.eye(70) * (1 + 4 * w @ w) + 8 * torch.outer(w, w)
    known = ps.LogPosterior(model, num_data=N)
    close(prior_precision(known, {"w": w}, (X, REAL), None, True), expected, TIGHT)
    close(prior_precision(known, {"w": w}, (X, REAL), None, False), expected.diagonal(), TIGHT)


@pytest.mark.parametrize("dense", [True, False])
def test_priors_of_some_params(dense):
    model, params, log_prior, _ = PRIORS["hierarchical"]
    whole = -flat_hessian(log_prior, params)
    for chosen, index in ((["w"], [2, 3, 4]), (["m"], [1]), (["w", "tau"], [2, 3, 4, 0])):
        some = {name: params[name] for name in chosen}
        held = {name: value for name, value in params.items() if name not in chosen}
        block = whole[index][:, index]
        known = ps.LogPosterior(model, num_data=N)
        found = prior_precision(known, some, (X, REAL), held, dense)
        close(found, block if dense else block.diagonal(), TIGHT)


def test_priors_in_single_precision(hessian_calls):
    """A coupling of a thousandth is seen, and rounding is not taken for one."""

    def model(size, x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(100).float(), 0.3).to_event(1))
        pyro.factor("tie", -size * w[3] * w[80])
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x[:, 0] * w.sum(), 1.0), obs=y)

    for size in (0.0, 1e-3):
        known = ps.LogPosterior(partial(model, size), num_data=N)
        params = {"w": normals(100).float()}
        found = prior_precision(known, params, (X.float(), REAL.float()), None, True)
        assert found.dtype is torch.float32
        close(found.diagonal(), torch.full((100,), 0.3**-2), 1e-5)
        assert float(found[3, 80]) == pytest.approx(size, rel=1e-3)
    assert hessian_calls == ["hessian"]
