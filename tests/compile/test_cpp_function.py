"""The C function of a vector against autograd, from any thread."""

import ctypes
import math
from concurrent.futures import ThreadPoolExecutor

import pyro.distributions as dist
import pytest
import torch
from dtypes import default_dtype
from reference import double, normals
from repetitions import long_but

from pyro_scale.compile.compiled import compile_value_and_gradient
from pyro_scale.compile.operations import NotALoop
from pyro_scale.compile.trace import trace

X, Y = normals(40, 3, seed=0), (normals(40, seed=1) > 0).double()


def value_and_gradient(log_density, examples):
    """The compiled function, and the same by autograd."""

    def both(x, *others):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = log_density(leaf, *others)
            (gradient,) = torch.autograd.grad(value, leaf)
        return value.detach(), gradient

    return compile_value_and_gradient(trace(both, examples)), both


def logistic_log_joint(w, x, y):
    logits = x @ w
    return (y * logits - torch.nn.functional.softplus(logits)).sum() - w.square().sum() / 2


def product(w, x, y):
    """A matrix product that goes to ATen."""
    weights = w.reshape(2, 3) @ x.mT
    return torch.tanh(weights).sum(0) @ y - w.pow(4).sum()


COVARIANCE = normals(6, 6, seed=2) @ normals(6, 6, seed=2).mT + torch.eye(6).double()


def gaussian_log_joint(x):
    """A Cholesky factor, triangular solves, and the gradients of both."""
    covariance = COVARIANCE * x.exp().outer(x.exp()) + torch.eye(6).double()
    density = dist.MultivariateNormal(torch.zeros(6).double(), covariance, validate_args=False)
    return density.log_prob(COVARIANCE).sum()


def distances(x):
    """An operation with an optional argument, whose gradient is another operation."""
    points = x.reshape(3, 2)
    return torch.cdist(points, points + 0.3).square().sum()


def determinant(x):
    return torch.linalg.slogdet(COVARIANCE + torch.outer(x, x)).logabsdet


def special(x):
    """A function whose gradient no kernel has."""
    return torch.special.digamma(x.exp()).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("density", "size"),
    long_but(
        [
            *[
                (logistic_log_joint, 3),
                (product, 6),
                (gaussian_log_joint, 6),
                (distances, 6),
                (determinant, 6),
            ],
            (special, 2),
        ],
        *[(product, 6), (gaussian_log_joint, 6), (distances, 6), (special, 2)],
    ),
)
def test_it_is_autograds(density, size):
    others = [X, Y] if density in (logistic_log_joint, product) else []
    function, exact = value_and_gradient(density, [normals(size), *others])
    for seed in range(5):
        x = normals(size, seed=seed)
        value, gradient = function(x)
        expected_value, expected_gradient = exact(x, *others)
        torch.testing.assert_close(value, expected_value, rtol=1e-14, atol=1e-13)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_it_reads_the_tensors_that_it_was_traced_at():
    """By pointer: a change in place shows, and they outlive their names."""
    scale = double(2.0, 3.0)
    function, _ = value_and_gradient(lambda w, s: (s * w).sum(), [normals(2), scale])
    scale.mul_(10)
    del scale
    torch.testing.assert_close(function(torch.ones(2))[1], double(20.0, 30.0))


@pytest.mark.slow
def test_a_frozen_tensor_is_an_input_too():
    frozen = double(0.5, -1.0)
    function, _ = value_and_gradient(lambda w: (frozen * w.exp()).sum(), [normals(2)])
    torch.testing.assert_close(function(torch.zeros(2))[1], frozen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x", "code"), [([1.0, 2.0], 0), ([-1.0, 2.0], 1), ([0.0, 2.0], 1), ([math.nan, 1.0], 1)]
)
def test_the_code_says_what_is_not_finite(x, code):
    """The log of -1 is NaN, that of 0 has an infinite slope."""
    function, _ = value_and_gradient(lambda w: w.log().sum(), [torch.ones(2).double()])
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, *[ctypes.c_void_p] * 4)(function.address)
    at, gradient, value = double(*x), double(0.0, 0.0), double(0.0)
    pointers = (at.data_ptr(), gradient.data_ptr(), value.data_ptr(), function.inputs_address)
    assert call(2, *pointers) == code


@pytest.mark.slow
def test_what_is_not_positive_definite_is_not_finite():
    """Torch raises an error there, and leaves half of a factor."""

    def density(x):
        factor = torch.linalg.cholesky(torch.diag(x))
        return factor.diagonal().log().sum() + torch.linalg.inv(torch.diag(x + 3)).sum()

    function, exact = value_and_gradient(density, [double(1.0, 2.0, 3.0)])
    torch.testing.assert_close(function(double(3.0, 2.0, 1.0)), exact(double(3.0, 2.0, 1.0)))
    for x in ([1.0, -2.0, 3.0], [-1.0, 2.0, 3.0], [-3.0, 1.0, 1.0]):
        value, gradient = function(double(*x))
        assert value.isnan()
        assert gradient.isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("density", [product, gaussian_log_joint])
def test_threads_do_not_share_buffers(density):
    others = [X, Y] if density is product else []
    function, exact = value_and_gradient(density, [normals(6), *others])
    points = [normals(6, seed=seed) for seed in range(400)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(function, points))
    for x, (value, gradient) in zip(points, found, strict=True):
        expected_value, expected_gradient = exact(x, *others)
        torch.testing.assert_close(value, expected_value, rtol=1e-13, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_what_is_no_value_and_gradient_of_a_vector_is_refused():
    for example in (normals(2).float(), normals(2, 2)):
        with pytest.raises(TypeError, match="float64 vector"):
            value_and_gradient(lambda w: w.sum(), [example])
    with pytest.raises(TypeError, match=r"\(value, gradient\)"):
        compile_value_and_gradient(trace(lambda w: [w.sum()], [normals(2)]))


def random(x):
    return (x * torch.poisson(x.detach().exp())).sum()


def convolved(x):
    """An operation with lists among its arguments."""
    return torch.nn.functional.conv1d(x.reshape(1, 1, 6), COVARIANCE[:1, None, :3]).sum()


@pytest.mark.parametrize("density", [random, convolved])
def test_what_cannot_be_called_is_refused(density):
    with pytest.raises(NotALoop):
        value_and_gradient(density, [normals(6)])


def test_tensors_without_a_dtype_have_that_of_the_trace():
    """A graph that says torch.eye(2) is compiled where the default may be another one: 0.1 is not
    the same number in float32."""
    with default_dtype(torch.float64):
        graph = trace(lambda x: [(0.1 * torch.eye(2) * x).sum(0), x.sum()], [double(1.0, 2.0)])
    made = [node for node in graph.module.graph.nodes if "eye" in str(node.target)]
    assert [node.kwargs["dtype"] for node in made] == [torch.float64]
