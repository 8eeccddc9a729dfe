"""The squares of rows' gradients from autograd's graph, against Jacobians of the same functions;
and of which params they are not to be had that way."""

import pyro.distributions as dist
import pytest
import torch
from models import of_network
from reference import close, normals
from torch import nn
from torch.nn import functional as F

import pyro_scale as ps
from pyro_scale.curvature.row_wise import RowWise

pytestmark = pytest.mark.usefixtures("float64")

B = 7
X, SQUARE, ONE = normals(B, 5, seed=1), normals(5, 5, seed=2), normals(1, 5, seed=3)
IMAGES = normals(B, 4, 6, 6, seed=4)
SEQUENCES = X[:, :, None] * normals(1, 4, seed=5)
PLACES = torch.tensor([[0, 3, 1], [2, 2, 0], [1, 1, 1], [3, 0, 2], [0, 0, 3], [2, 1, 0], [3, 3, 0]])
LAYER = {"w": (6, 5), "b": (6,), "v": (3, 6), "c": (3,)}


def two_layers(x):
    return lambda p: F.linear(F.linear(x, p["w"], p["b"]).relu(), p["v"], p["c"])


def from_the_left(x):
    return lambda p: (p["v"] @ (p["w"] @ x.T + p["b"][:, None]).relu()).T


def recurrent(p):
    h = X.new_zeros(B, 3)
    for step in SEQUENCES.unbind(1):
        h = torch.tanh(F.linear(step, p["w"]) + F.linear(h, p["u"], p["b"]))
    return F.linear(h, p["v"])


#: A function of params to `[B, ...]`, the params' shapes, and those that are taken in another way.
CASES = {
    "layers": (two_layers(X), LAYER, ""),
    "one row": (two_layers(ONE), LAYER, ""),
    "as many rows as columns": (
        two_layers(SQUARE),
        {**LAYER, "w": (5, 5), "b": (5,), "v": (3, 5)},
        "",
    ),
    "weights on the left": (from_the_left(X), {"w": (6, 5), "b": (6,), "v": (3, 6)}, ""),
    "square, on the left": (from_the_left(SQUARE), {"w": (5, 5), "b": (5,), "v": (3, 5)}, ""),
    "a vector": (lambda p: (X @ p["w"] + p["a"]).exp(), {"w": (5,), "a": ()}, ""),
    "positions": (
        lambda p: F.linear(F.linear(SEQUENCES, p["w"], p["b"]).tanh(), p["v"])[:, :, 0] * p["s"],
        {"w": (3, 4), "b": (3,), "v": (1, 3), "s": (5,)},
        "",
    ),
    "positions outside of rows": (
        lambda p: (X.T[:, :, None] @ p["w"]).tanh().sum(0),
        {"w": (1, 4)},
        "",
    ),
    "convolutions": (
        lambda p: (
            F.conv2d(
                F.conv2d(IMAGES, p["w"], p["b"], stride=2, padding=1).relu(),
                p["v"],
                p["c"],
                groups=2,
            )
            .flatten(1)
            .cumsum(1)[:, ::5]
        ),
        {"w": (4, 4, 3, 3), "b": (4,), "v": (4, 2, 2, 2), "c": (4,)},
        "",
    ),
    "a convolution in one dimension": (
        lambda p: F.conv1d(IMAGES[:, :, 0], p["w"], p["b"], dilation=2).flatten(1)[:, :3],
        {"w": (4, 4, 3), "b": (4,)},
        "",
    ),
    "an embedding": (
        lambda p: F.linear(F.embedding(PLACES, p["e"]).flatten(1).tanh(), p["w"]),
        {"e": (4, 2), "w": (2, 6)},
        "",
    ),
    "effects of groups": (
        lambda p: X @ p["w"] + p["a"][PLACES[:, 0]] * p["t"].exp(),
        {"w": (5,), "a": (4,), "t": ()},
        "",
    ),
    "effects of groups from the end": (lambda p: p["a"][PLACES[:, 0] - 4] ** 2, {"a": (4,)}, ""),
    "parts of one weight": (
        lambda p: (
            F.linear(X, p["w"].chunk(3)[0]) * F.linear(X, p["w"].chunk(3)[1])
            + F.linear(X, p["w"].chunk(3)[2], p["b"].chunk(3)[1])
        ),
        {"w": (9, 5), "b": (9,)},
        "",
    ),
    "several products at once": (
        lambda p: torch.bmm(X.expand(3, B, 5), p["w"]).sum(0),
        {"w": (3, 5, 2)},
        "",
    ),
    "einsum": (lambda p: torch.einsum("bi,io->bo", X, p["w"]), {"w": (5, 2)}, ""),
    "differences and quotients": (
        lambda p: (X - p["a"]) * p["s"] / (1 + p["d"].exp()) - 2 * X / p["a"],
        {"a": (5,), "s": (5,), "d": ()},
        "a d",
    ),
    "a scale of each weight": (lambda p: X @ (p["w"] * p["t"].exp()), {"w": (5,), "t": (5,)}, ""),
    "a scale of all weights": (lambda p: X @ (p["w"] * p["t"].exp()), {"w": (5,), "t": ()}, "t"),
    "a noise's scale": (
        lambda p: torch.stack([X @ p["w"], p["s"].exp().expand(B)], 1),
        {"w": (5,), "s": ()},
        "",
    ),
    "each row's own": (lambda p: (X @ p["w"] + p["z"]).exp(), {"w": (5,), "z": (B,)}, ""),
    "in mean and scale": (
        lambda p: torch.stack([X @ p["w"], (X @ p["w"]).exp()], 1),
        {"w": (5,)},
        "w",
    ),
    "a tied embedding": (
        lambda p: F.linear(F.embedding(PLACES, p["e"]).sum(1), p["e"]),
        {"e": (4, 2)},
        "e",
    ),
    "a recurrent network": (recurrent, {"w": (3, 4), "u": (3, 3), "b": (3,), "v": (2, 3)}, "w u b"),
    "its square": (lambda p: X @ (p["w"] * p["w"]), {"w": (5,)}, "w"),
    "normalized layers": (
        lambda p: F.layer_norm(F.linear(X, p["w"]), (3,), p["a"], p["b"]),
        {"w": (3, 5), "a": (3,), "b": (3,)},
        "a b",
    ),
    "rows that know of each other": (
        lambda p: F.linear(X - X.mean(0), p["w"]) - F.linear(X, p["u"]).mean(0),
        {"w": (2, 5), "u": (2, 5)},
        "u",
    ),
    "nothing": (lambda p: X[:, :2] + 0 * p["w"].detach().sum(), {"w": (3,)}, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_squares_are_those_of_the_jacobian(name):
    """Of some columns at a time, for some rows; and of params that are used twice, none."""
    function, shapes, others = CASES[name]
    params = {n: normals(1, *shape, seed=10 + i)[0] for i, (n, shape) in enumerate(shapes.items())}
    leaves = {n: value.clone().requires_grad_() for n, value in params.items()}
    outputs = (
        function(leaves).flatten(1) if function(leaves).dim() > 1 else function(leaves)[:, None]
    )
    seeds = normals(4, *outputs.shape, seed=20)
    keep = slice(0, 3)
    found = RowWise.from_outputs(outputs, leaves).squares(lambda a, b: seeds[a:b], 4, keep)
    assert set(found) == set(shapes) - set(others.split())
    jacobian = torch.func.jacrev(lambda p: function(p).reshape(outputs.shape))(params)
    for n, own in found.items():
        each = torch.einsum("cbk,bk...->cb...", seeds, jacobian[n])[:, keep]
        expected = each.square().sum((0, 1))
        assert float((own - expected).abs().max()) <= 1e-13 * max(1.0, float(expected.abs().max()))


def test_a_unit_that_is_dead_does_not_hide_where_rows_are():
    """Where but the chosen rows' gradients are not zero, another axis looks like the rows'."""
    weight = torch.eye(2).requires_grad_()
    bias = torch.tensor([[0.0], [-0.5]]).requires_grad_()
    x = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    outputs = (weight @ x.T + bias).relu().T
    leaves = {"w": weight, "b": bias}
    found = RowWise.from_outputs(outputs, leaves).squares(
        lambda a, b: torch.ones(b - a, 2, 2), 1, slice(None)
    )
    jacobian = torch.func.jacrev(lambda w, b: (w @ x.T + b).relu().T.sum(1), (0, 1))(weight, bias)
    for own, rows in zip((found.get("w"), found.get("b")), jacobian, strict=True):
        if own is not None:
            assert torch.equal(own, rows.square().sum(0))


def test_rounding_does_not_hide_where_rows_are():
    """Rows that a classifier is sure of have gradients that are small differences of large
    numbers."""
    x, w = 4 * normals(300, 5, seed=1).float(), normals(6, 5, seed=2).float().requires_grad_()
    v = normals(3, 6, seed=3).float().requires_grad_()
    logits = F.linear(F.linear(x, w).tanh(), 4 * v)
    of_rows = F.log_softmax(logits, 1).gather(1, logits.argmax(1, keepdim=True))
    found = RowWise.from_outputs(of_rows, {"w": w, "v": v}).squares(
        lambda a, b: torch.ones(b - a, len(x), 1), 1, slice(None)
    )
    each = [torch.autograd.grad(row, (w, v), retain_graph=True) for row in of_rows[:, 0]]
    for own, rows in zip((found["w"], found["v"]), zip(*each, strict=True), strict=True):
        assert torch.allclose(own, torch.stack(rows).square().sum(0), rtol=1e-4, atol=1e-7)


def test_rows_whose_gradients_have_few_digits_hide_nothing():
    """Below the least normal number: of a row's class whose chance is 1 to rounding."""
    x, w = normals(6, 5, seed=1).float(), normals(4, 5, seed=2).float().requires_grad_()
    v = normals(3, 4, seed=3).float().requires_grad_()
    far = torch.tensor([88.0, 0.0, 92.0, 0.0, 95.0, 0.0]).float()[:, None] * torch.eye(3)[0].float()
    logits = F.linear(F.linear(x, w).tanh(), v) + far
    of_rows = F.log_softmax(logits, 1)[:, :1]
    least = torch.autograd.grad(of_rows[4], [w], retain_graph=True)[0].abs().max()
    assert 0 < float(least) < torch.finfo(torch.float32).tiny
    found = RowWise.from_outputs(of_rows, {"w": w, "v": v})
    assert set(found.entries) == {"w", "v"}
    squares = found.squares(lambda a, b: torch.ones(b - a, len(x), 1).float(), 1, slice(None))
    each = [torch.autograd.grad(row, (w, v), retain_graph=True) for row in of_rows[:, 0]]
    for own, rows in zip((squares["w"], squares["v"]), zip(*each, strict=True), strict=True):
        assert torch.allclose(own, torch.stack(rows).square().sum(0), rtol=1e-4, atol=1e-7)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.cell(x)[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return F.linear(self.mix(self.table(x)).tanh().sum(1), self.table.weight)


class MeanAndScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(5, 3), nn.Linear(3, 1)

    def forward(self, x):
        f = self.out(self.hidden(x).tanh())
        return torch.cat([f, f + self.out.bias], 1)


class Adapted(nn.Module):
    """A weight that is known, and a change of it of low rank."""

    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(5, 4), nn.Linear(5, 2, bias=False), nn.Linear(2, 4)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


NETWORKS = {
    "recurrent": (Recurrent, SEQUENCES),
    "tied": (Tied, PLACES),
    "mean and scale": (MeanAndScale, X),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(4, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)),
        IMAGES,
    ),
    "normalized": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), X),
    "adapted": (Adapted, X),
}
HEADS = {
    "classes": (lambda f: dist.Categorical(logits=f), torch.arange(B) % 2),
    "noise of each row": (lambda f: dist.Normal(f[:, 0], F.softplus(f[:, 1])), normals(B, seed=30)),
}


@pytest.mark.parametrize("kind", ["ggn", "empirical_fisher"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_networks_diagonal_is_that_of_its_matrix(network, head, kind, store):
    """Which is made of Jacobians of rows."""
    torch.manual_seed(0)
    (make, x), (likelihood, y) = NETWORKS[network], HEADS[head]
    net = make()
    weights = {name: value.detach().clone() for name, value in net.named_parameters()}
    bayesian = ps.bayesianize(net)

    model = of_network(bayesian, likelihood)

    curvature = ps.Curvature(ps.LogPosterior(model, num_data=B), kind)
    found = curvature.diagonal(weights, (x, y))
    dense = curvature.dense(weights, (x, y)).diagonal()
    close(torch.cat([found[name].flatten() for name in weights]), dense, 1e-10)


@pytest.mark.parametrize("places", [[2, 1, 2], [0, 1, 2], [1, 1, 1]])
def test_a_table_with_as_many_places_as_there_are_rows(places):
    """Its places are not the rows', whichever rows read them."""
    x, made = normals(3, seed=1), normals(3, 2, seed=2)

    def function(p):
        table = torch.tanh(made @ p["w"]) * p["s"]
        return (table[torch.tensor(places)] * x)[:, None]

    params = {"w": normals(2, seed=3), "s": normals(3, seed=4)}
    leaves = {n: value.clone().requires_grad_() for n, value in params.items()}
    graph = RowWise.from_outputs(function(leaves), leaves)
    found = graph.squares(lambda a, b: torch.ones(b - a, 3, 1), 1, slice(None))
    jacobian = torch.func.jacrev(function)(params)
    for n, own in found.items():
        close(own, jacobian[n].square().sum((0, 1)), 1e-12)
