"""Updates taken param by param: the same function, and no copy of the gradient."""

import pytest
import torch

from pyro_scale.compile.compiled import _compile
from pyro_scale.compile.trace import trace

aten = torch.ops.aten
SIZES = (300, 256), (300,), (7, 300)
TOTAL = sum(torch.Size(size).numel() for size in SIZES)


def step(position, momentum, noise, lr, rows, scale):
    """SGHMC of a network's weights side by side, the prior's precision by element."""
    sizes = [torch.Size(size).numel() for size in SIZES]
    w, b, v = (part.view(size) for part, size in zip(position.split(sizes), SIZES, strict=True))
    hidden = torch.tanh(rows @ w.mT + b)
    slope = torch.ones(len(rows), 7, dtype=rows.dtype)
    back = (slope @ v) * (1 - hidden.square())
    by_param = [-w + back.mT @ rows, -b + back.sum(0), -v + slope.mT @ hidden]
    gradient = torch.cat([each.reshape(-1) for each in by_param]) * scale
    kick = torch.sqrt(2 * lr) * noise
    momentum = (1 - lr) * momentum + lr * gradient + kick
    return position + lr * momentum, momentum, gradient.square().sum()


def arguments(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(TOTAL, dtype=dtype, generator=generator) for _ in range(3)]
    rows = torch.randn(5, 256, dtype=dtype, generator=generator)
    scale = torch.rand(TOTAL, dtype=dtype, generator=generator)
    return [*vectors, torch.tensor(0.3, dtype=dtype), rows, scale]


def targets(graph):
    return [node.target for node in graph.module.graph.nodes if node.op == "call_function"]


def test_the_graph_is_the_same_function():
    examples = arguments()
    graph = trace(step, [x.clone() for x in examples])
    got = graph.module(*examples, *(constant.tensor for constant in graph.constants))
    for ours, theirs in zip(got, step(*examples), strict=True):
        assert torch.equal(ours, theirs) or torch.allclose(ours, theirs, rtol=1e-14, atol=1e-14)


def test_only_what_others_read_is_put_together():
    graph = trace(step, arguments())
    cats = [n for n in graph.module.graph.nodes if n.target is aten.cat.default]
    assert [len(cat.args[0]) for cat in cats] == [3] * len(cats)
    readers = {user.target for cat in cats for user in cat.users}
    assert readers <= {aten.sum.default, "output"}  # no update
    assert len(cats) == 3  # position, momentum, and the squares that are added up


def test_short_vectors_are_left_alone():
    def short(position, noise):
        return torch.cat([position[:3], position[3:]]) * noise, position.sum()

    examples = [torch.randn(8), torch.randn(8)]
    assert targets(trace(short, examples)).count(aten.mul.Tensor) == 1


def test_a_vector_of_its_own_size_is_not_cut():
    """A tensor whose last dimension is one number, and one that another cat makes."""

    def two(position, other, one):
        first = torch.cat([position[:40_000] * 2, position[40_000:] + 1])
        second = torch.cat([other[:50_000] * 3, other[50_000:]])
        return first * second + one, first - second

    examples = [torch.randn(80_000), torch.randn(80_000), torch.randn(1)]
    graph = trace(two, [x.clone() for x in examples])
    got = graph.module(*examples)
    for ours, theirs in zip(got, two(*examples), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.long
def test_compiled_it_is_the_same_function():
    examples = arguments()
    graph = trace(step, [x.clone() for x in examples])
    compiled = _compile(graph, 1)
    got = compiled.call([*examples, *(constant.tensor for constant in graph.constants)])
    for ours, theirs in zip(got, step(*examples), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
