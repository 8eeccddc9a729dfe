"""The curvature of whole models, of networks and of what vmap refuses among them, against Jacobians
of outputs that are written out by hand; and natural gradients."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from curvatures import (
    CLASSES,
    COUNTS,
    EYE,
    KINDS,
    PARAMS,
    POSITIVE,
    REAL,
    TIGHT,
    B,
    N,
    V,
    W,
    X,
    check,
    gamma,
    gamma_outputs,
    gauss_newton,
    observed,
    of,
    of_classes,
    of_gamma,
    outer,
    poisson,
    poisson_by_hand,
    squared,
    weights,
)
from models import of_network
from pyro.nn import PyroModule, PyroSample
from reference import batches, close, double, normals
from torch import nn

import pyro_scale as ps
from pyro_scale.core.layout import Layout
from pyro_scale.curvature.prior_hessian import prior_precision

pytestmark = pytest.mark.usefixtures("float64", "store")


# ------------------------------------------------------------------ sums over rows


@pytest.mark.parametrize("kind", ["ggn", "empirical_fisher"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7])
def test_a_batch_is_the_sum_of_its_parts(kind, size):
    """Whatever the size of the batch that the model was understood on."""
    found = of(poisson, kind)
    parts = [found.dense({"w": W}, part) for part in batches((X, COUNTS), size)]
    diagonals = [found.diagonal({"w": W}, part)["w"] for part in batches((X, COUNTS), size)]
    whole = of(poisson, kind).dense({"w": W}, (X, COUNTS))
    close(sum(parts), whole, TIGHT)
    close(sum(diagonals), whole.diagonal(), TIGHT)
    if kind == "ggn":
        close(whole, poisson_by_hand(W, X), TIGHT)


def test_neither_order_nor_num_data_matters():
    order = double(3, 1, 4, 0, 6, 2, 5).long()
    expected = poisson_by_hand(W, X)
    for num_data in (B, N, 10**6):
        found = of(poisson, num_data=num_data)
        check(found, {"w": W}, (X[order], COUNTS[order]), expected)


def test_arguments_by_name_and_without_rows():
    def model(x, y, power, link, nothing=None):
        w = weights(2)
        assert link == "log"
        assert nothing is None
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson(((x @ w) * power).exp()), obs=y)

    batch = {"y": COUNTS, "x": X, "link": "log", "power": torch.tensor(2.0), "nothing": None}
    check(of(model), {"w": W}, batch, 4 * poisson_by_hand(2 * W, X))
    check(of(model), {"w": W}, (X, COUNTS, 2.0, "log", None), 4 * poisson_by_hand(2 * W, X))


@pytest.mark.parametrize("vmapped", [True, False])
def test_some_rows_of_a_batch(vmapped):
    """As where a batch is padded."""

    def model(x, y):
        w = weights(2)
        assert vmapped or float((x @ w).detach().sum()) < 1e9
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)

    found = of(model)
    for keep in (slice(None), slice(2, 5), slice(0, 1), slice(3, None)):
        total = torch.zeros(2, 2)
        for block in found.observe({"w": W}, (X, COUNTS), keep=keep).blocks():
            block.add_to(total)
        close(total, poisson_by_hand(W, X[keep]), TIGHT)


@pytest.mark.parametrize("kind", ["ggn", "empirical_fisher"])
def test_two_sites_on_the_same_rows(kind):
    """The GGN adds up; the empirical Fisher is of the rows' whole log likelihood."""

    def model(x, y, r):
        w = weights(2)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)
            pyro.sample("r", dist.Normal((x @ w) ** 2, 0.5), obs=r)

    def log_lik(p):
        first = COUNTS * (X @ p["w"]) - (X @ p["w"]).exp()
        return first - 2 * (REAL - (X @ p["w"]) ** 2) ** 2

    slope = 2 * (X @ W)[:, None] * X
    exact = poisson_by_hand(W, X) + 4 * slope.T @ slope
    expected = exact if kind == "ggn" else outer(log_lik, {"w": W})
    check(of(model, kind), {"w": W}, (X, COUNTS, REAL), expected)


def test_a_site_without_params_adds_nothing():
    def model(x, y, r, only=False):
        w = weights(2)
        with pyro.plate("data", len(x)):
            pyro.sample("r", dist.Normal(x[:, 0], 0.5), obs=r)
            pyro.sample("s", dist.MixtureSameFamily(*two_components(x @ W)), obs=r)
            pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)

    check(of(model), {"w": W}, (X, COUNTS, REAL), poisson_by_hand(W, X))


def two_components(m):
    means = torch.stack([m, m + 1], -1)
    return dist.Categorical(torch.ones(*m.shape, 2)), dist.Normal(means, 1.0)


def test_no_params_at_all_is_zero():
    def model(x, y):
        weights(2)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x[:, 0], 0.5), obs=y)

    for kind in KINDS:
        found = of(model, kind)
        close(found.dense({"w": W}, (X, REAL)), torch.zeros(2, 2), 1e-12)
        close(found.diagonal({"w": W}, (X, REAL))["w"], torch.zeros(2), 1e-12)
        close(found.product({"w": W}, (X, REAL), {"w": V})["w"], torch.zeros(2), 1e-12)


# ------------------------------------------------------------------ networks


class Shared(PyroModule):
    """Layers of weights drawn by Pyro, of which one is used twice."""

    def __init__(self):
        super().__init__()
        self.first = PyroModule[nn.Linear](2, 2)
        self.first.weight = PyroSample(dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        self.first.bias = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    def forward(self, x, y=None):
        loc = self.first(torch.tanh(self.first(x)))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(loc, 0.5).to_event(1), obs=y)


def small_network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def classifier_of(net):
    return of_network(net, lambda f: dist.Categorical(logits=f))


def weights_and_curvature(net, x):
    weights = {name: value.detach() for name, value in net.named_parameters()}
    return weights, gauss_newton(
        lambda p: torch.func.functional_call(net, p, (x,)), of_classes, weights
    )


def test_a_bayesianized_network():
    net = small_network()
    params, expected = weights_and_curvature(net, X)
    assert expected.shape == (27, 27)
    check(of(classifier_of(ps.bayesianize(net))), params, (X, CLASSES), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_subset_of_the_params(kind):
    net = small_network()
    params, _ = weights_and_curvature(net, X)
    found = of(classifier_of(ps.bayesianize(net)), kind, num_draws=2)
    whole = found.dense(params, (X, CLASSES))
    layout = Layout.from_tensors(params)
    places = layout.slices()
    for chosen in (["2.weight"], ["0.bias", "2.bias"], ["2.bias", "0.weight"], list(params)[:3]):
        index = torch.cat([torch.arange(layout.size)[places[name]] for name in chosen])
        some = {name: params[name] for name in chosen}
        held = {name: value for name, value in params.items() if name not in chosen}
        block = whole[index][:, index]
        close(found.dense(some, (X, CLASSES), held=held), block, TIGHT)
        diagonal = found.diagonal(some, (X, CLASSES), held=held)
        close(torch.cat([diagonal[name].reshape(-1) for name in chosen]), block.diagonal(), TIGHT)
        vector = normals(len(index))
        parts = Layout.from_tensors(some).unflatten(vector)
        product = found.product(some, (X, CLASSES), parts, held=held)
        assert list(product) == chosen
        close(Layout.from_tensors(some).flatten(product), block @ vector, TIGHT)


def test_a_network_in_single_precision():
    net = small_network(torch.float32)
    params, _ = weights_and_curvature(net, X.float())
    found = of(classifier_of(ps.bayesianize(net, dist.Normal(torch.tensor(0.0).float(), 1.0))))
    _, expected = weights_and_curvature(net.double(), X)
    dense = found.dense(params, (X.float(), CLASSES))
    assert dense.dtype is torch.float32
    close(dense.double(), expected, 1e-5)
    check(found, params, (X.float(), CLASSES), expected.float(), 1e-5)


def test_single_precision_is_kept_by_site():
    """Params of two dtypes: the matrix has the wider one, and entries their own."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2).float(), 1.0).to_event(1))
        v = weights(2, name="v")
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ (w.double() + v), 0.7), obs=y)

    params = {"w": W.float(), "v": V}
    found = of(model)
    dense = found.dense(params, (X, REAL))
    assert dense.dtype is torch.float64
    close(dense, (X.T @ X / 0.49).repeat(2, 2), 1e-5)
    assert found.diagonal(params, (X, REAL))["w"].dtype is torch.float32


def test_weights_drawn_by_pyro():
    params = {"first.weight": normals(2, 2, seed=3), "first.bias": double(0.1, -0.3)}
    target = normals(B, 2, seed=12)

    def outputs(p):
        def layer(x):
            return x @ p["first.weight"].T + p["first.bias"]

        return layer(torch.tanh(layer(X)))

    def information(o):
        return 4 * EYE.expand(len(o), 2, 2)

    check(of(Shared()), params, (X, target), gauss_newton(outputs, information, params))


def test_points_are_params_too():
    def model(x, y):
        b = pyro.param("b", double(0.2))
        w = weights(2)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson((x @ w + b).exp()), obs=y)

    params = {"w": W, "b": double(-0.5)}
    one = torch.cat([X, torch.ones(B, 1)], 1)
    check(of(model), params, (X, COUNTS), poisson_by_hand(torch.cat([W, double(-0.5)]), one))
    check(of(model), {"w": W}, (X, COUNTS), math.exp(0.2) * poisson_by_hand(W, X))
    expected = torch.diag(double(1, 1, 0))
    close(
        prior_precision(of(model).log_posterior, params, (X, COUNTS), None, True), expected, TIGHT
    )


# ------------------------------------------------------------------ models that vmap refuses


class Square(torch.autograd.Function):
    """In the old style, which functorch refuses."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def with_a_branch(x, w):
    m = x @ w
    return m * m if float(m.detach().sum()) < 1e9 else m


def old_style(x, w):
    return Square.apply(x @ w)


def refusing_one_row(error):
    def function(x, w):
        if len(x) == 1:
            raise error("one row")
        return (x @ w) ** 2

    return function


REFUSED = {
    "a branch": with_a_branch,
    "an autograd.Function": old_style,
    "one row: RuntimeError": refusing_one_row(RuntimeError),
    "one row: ValueError": refusing_one_row(ValueError),
    "one row: IndexError": refusing_one_row(IndexError),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_what_vmap_refuses(function, kind):
    plain = of(squared(lambda x, w: (x @ w) ** 2), kind, num_draws=3)
    expected = plain.dense({"w": W}, (X, REAL))
    if kind == "ggn":
        slope = 2 * (X @ W)[:, None] * X
        close(expected, 4 * slope.T @ slope, TIGHT)
    found = of(squared(function), kind, num_draws=3)
    close(found.dense({"w": W}, (X, REAL)), expected, TIGHT)
    close(found.diagonal({"w": W}, (X, REAL))["w"], expected.diagonal(), TIGHT)


@pytest.mark.parametrize(
    "function",
    REFUSED.values(),
    ids=REFUSED,
)
def test_products_of_what_vmap_refuses(function):
    slope = 2 * (X @ W)[:, None] * X
    expected = 4 * slope.T @ slope
    found = of(squared(function))
    close(found.product({"w": W}, (X, REAL), {"w": V})["w"], expected @ V, TIGHT)
    step, _ = found.natural_gradient({"w": W}, (X, REAL))
    plain, _ = of(squared(lambda x, w: (x @ w) ** 2)).natural_gradient({"w": W}, (X, REAL))
    close(step["w"], plain["w"], 1e-7)


def test_a_model_of_the_whole_data_only():
    """Its plate has a fixed size."""

    def model(x, y):
        w = weights(2)
        with pyro.plate("data", B):
            pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)

    check(of(model, num_data=B), {"w": W}, (X, COUNTS), poisson_by_hand(W, X))


def test_a_model_with_its_data():
    check(of(lambda: poisson(X, COUNTS), num_data=None), {"w": W}, (), poisson_by_hand(W, X))


def subsampled_counts(x, y):
    w = weights(2)
    with pyro.plate("data", B, subsample_size=3) as index:
        pyro.sample("y", dist.Poisson((x[index] @ w).exp()), obs=y[index])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_subsamples_by_itself(kind):
    index = torch.tensor([4, 0, 5])
    found = of(subsampled_counts, kind, num_data=None, num_draws=3)
    expected = of(poisson, kind, num_draws=3).dense({"w": W}, (X[index], COUNTS[index]))
    check(found, {"w": W}, (X, COUNTS), expected, indices=index)


def test_rows_that_a_model_draws_are_those_of_one_subset():
    """Without indices: the information is that of the rows whose Jacobian it is between."""
    subsets = [list(rows) for rows in itertools.combinations(range(B), 3)]
    expected = [poisson_by_hand(W, X[rows]) for rows in subsets]
    found = of(subsampled_counts, num_data=None)
    for _ in range(5):
        dense = found.dense({"w": W}, (X, COUNTS))
        assert min(float((dense - each).abs().max()) for each in expected) < 1e-9
        product = found.product({"w": W}, (X, COUNTS), {"w": V})["w"]
        assert min(float((product - each @ V).abs().max()) for each in expected) < 1e-9


def test_a_natural_gradient_of_rows_that_a_model_draws():
    """The gradient's rows and the curvature's are the same in all products."""
    found = of(subsampled_counts, num_data=None)
    possible = []
    for rows in itertools.combinations(range(B), 3):
        x, y = X[list(rows)], COUNTS[list(rows)]
        gradient = B / 3 * x.T @ (y - (x @ W).exp()) - W
        possible.append(torch.linalg.solve(B / 3 * poisson_by_hand(W, x) + EYE, gradient))
    for _ in range(5):
        step, _ = found.natural_gradient({"w": W}, (X, COUNTS))
        assert min(float((step["w"] - each).abs().max()) for each in possible) < 1e-6


# ------------------------------------------------------------------ natural gradients


def newton(known, params, batch, matrix, precision, damping):
    """By a dense solve."""
    layout = Layout.from_tensors(params)
    gradient = layout.flatten(known.grad(params, batch)[0])
    count = len(batch[0])
    whole = N / count * matrix + precision + damping * torch.eye(layout.size)
    return torch.linalg.solve(whole, gradient)


@pytest.mark.parametrize("damping", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 5), slice(6, 7)])
def test_natural_gradients(damping, rows):
    x, y = X[rows], POSITIVE[rows]
    found = of(observed(gamma))
    matrix = gauss_newton(lambda p: gamma_outputs(x, p["w"], p["v"]), of_gamma, PARAMS)
    step, evaluation = found.natural_gradient(PARAMS, (x, y), damping)
    expected = newton(found.log_posterior, PARAMS, (x, y), matrix, torch.eye(4), damping)
    close(torch.cat([step["w"], step["v"]]), expected, 1e-6)
    for mine, theirs in zip(evaluation, found.log_posterior(PARAMS, (x, y)), strict=True):
        close(mine, theirs, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_natural_gradients_with_a_dense_prior(kind):
    precision = double([2.0, 0.5], [0.5, 1.0])

    def model(x, y):
        w = pyro.sample("w", dist.MultivariateNormal(V, precision_matrix=precision))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)

    found = of(model, kind, num_draws=4)
    matrix = found.dense({"w": W}, (X, COUNTS))
    step, _ = found.natural_gradient({"w": W}, (X, COUNTS))
    gradient = N / B * X.T @ (COUNTS - (X @ W).exp()) - precision @ (W - V)
    close(step["w"], torch.linalg.solve(N / B * matrix + precision, gradient), 1e-6)


def test_a_natural_gradient_is_a_step_of_newton():
    """To the posterior mean of a linear regression, from anywhere."""
    found = of(squared(lambda x, w: x @ w), num_data=B)
    mean = torch.linalg.solve(4 * X.T @ X + EYE, 4 * X.T @ REAL)
    for start in (W, 30 * V, torch.zeros(2)):
        step, _ = found.natural_gradient({"w": start}, (X, REAL))
        close(start + step["w"], mean, 1e-6)


def test_a_natural_gradient_of_nothing():
    """At the mode there is nowhere to go."""
    found = of(squared(lambda x, w: x @ w), num_data=B)
    mean = torch.linalg.solve(4 * X.T @ X + EYE, 4 * X.T @ REAL)
    step, _ = found.natural_gradient({"w": mean}, (X, REAL))
    close(step["w"], torch.zeros(2), 1e-7)


# ------------------------------------------------------------------ nothing else changes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "function", [lambda x, w: (x @ w) ** 2, with_a_branch], ids=["vmap", "loop"]
)
def test_nothing_else_changes(function, kind):
    def model(x, y):
        b = pyro.param("b", double(0.2))
        w, v = weights(2), net(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(function(x, w) + b + v, 0.5), obs=y)

    net = nn.Linear(2, 1).double()
    pyro.param("mine", double(1.0))
    store = {name: value.clone() for name, value in pyro.get_param_store().items()}
    weight = net.weight.detach().clone()
    params = {"w": W.clone().requires_grad_()}
    state = torch.get_rng_state()
    found = of(model, kind)
    results = [
        found.dense(params, (X, REAL)),
        found.diagonal(params, (X, REAL))["w"],
        found.product(params, (X, REAL), {"w": V})["w"],
        found.natural_gradient(params, (X, REAL))[0]["w"],
        prior_precision(found.log_posterior, params, (X, REAL), None, True),
    ]
    assert torch.equal(state, torch.get_rng_state())
    assert not any(result.requires_grad for result in results)
    assert params["w"].requires_grad
    assert params["w"].grad is None
    assert torch.equal(params["w"].detach(), W)
    assert net.weight.requires_grad
    assert net.weight.grad is None
    assert torch.equal(net.weight.detach(), weight)
    now = dict(pyro.get_param_store().items())
    assert now.keys() == store.keys()
    assert all(torch.equal(now[name], store[name]) for name in store)
    assert torch.is_grad_enabled()


def test_results_have_no_history():
    batch = X.clone().requires_grad_(), REAL
    found = of(squared(lambda x, w: (x @ w) ** 2))
    results = [
        found.dense({"w": W}, batch),
        found.diagonal({"w": W}, batch)["w"],
        found.product({"w": W}, batch, {"w": V})["w"],
        found.natural_gradient({"w": W}, batch)[0]["w"],
    ]
    assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_without_gradients_around(kind):
    found = of(poisson, kind)
    expected = found.dense({"w": W}, (X, COUNTS))
    with torch.no_grad():
        check(found, {"w": W}, (X, COUNTS), expected)
        close(prior_precision(found.log_posterior, {"w": W}, (X, COUNTS), None, True), EYE)
        found.natural_gradient({"w": W}, (X, COUNTS))


def test_a_vector_in_any_order():
    found = of(observed(gamma))
    vector = {"w": V, "v": W}
    expected = found.product(PARAMS, (X, POSITIVE), vector)
    swapped = found.product(PARAMS, (X, POSITIVE), dict(reversed(vector.items())))
    for name in expected:
        close(swapped[name], expected[name], 1e-12)
