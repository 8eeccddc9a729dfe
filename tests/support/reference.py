"""Log densities computed without the package: by Pyro itself, and Jacobians by autograd; the
float64 numbers that tests are made of; and a function that functorch refuses."""

import pyro.poutine as poutine
import torch

from pyro_scale.core import rows


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def normals(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(actual, expected, tolerance=1e-9):
    """Equal to 1e-9 of the larger, or to 1e-9 where that is below 1."""
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance
    )


def close_in_scale(actual, expected, tolerance=1e-10):
    """Equal to a part of the largest number that is expected, or to that where it is below 1."""
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def close_to_largest(actual, expected, rtol=1e-12):
    """Equal to a part of the largest number that is expected; `expected` broadcasts."""
    expected = torch.as_tensor(expected, dtype=actual.dtype).expand_as(actual)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


def z_of_variance(centered, expected):
    """How many standard errors the mean square of independent normals is off its expectation."""
    return float((centered.square().mean() / expected - 1) / (2 / centered.numel()) ** 0.5)


def pyro_log_joint(model, values, arguments):
    """Pyro's own log density of a model's sites, its latents at constrained values."""
    trace = poutine.trace(poutine.condition(model, values)).get_trace(*arguments)
    return trace.log_prob_sum().detach()


def log_jacobian(constrain, params, free=lambda name, value: value):
    """log |d values / d params| from autograd's Jacobian of the whole map.

    Args:
        constrain: unconstrained params -> values.
        params: unconstrained params.
        free: (name, value) -> the value's coordinates that are free, as many as the param's.
    """
    names = list(params)
    sizes = [params[name].numel() for name in names]

    def flat(vector):
        parts = zip(names, vector.split(sizes), strict=True)
        values = constrain({name: part.reshape(params[name].shape) for name, part in parts})
        return torch.cat([free(name, values[name]).reshape(-1) for name in names])

    vector = torch.cat([params[name].reshape(-1) for name in names])
    return torch.linalg.slogdet(torch.autograd.functional.jacobian(flat, vector)).logabsdet


def full_log_joint(model, log_posterior, params, arguments):
    """The whole data's log density in unconstrained space, for sites whose value is all free."""
    values = log_posterior.constrain(params)
    jacobian = log_jacobian(log_posterior.constrain, params)
    return pyro_log_joint(model, values, arguments) + jacobian


def batches(arguments, size):
    """A partition into batches of `size` rows, the last with what is left."""
    count = rows.count(arguments)
    return [rows.take(arguments, slice(i, i + size)) for i in range(0, count, size)]


def averaged(log_posterior, params, arguments, size):
    """The mean of the log joint's estimates over a partition, each weighted by its rows."""
    parts = batches(arguments, size)
    total = sum(log_posterior(params, part).log_joint * rows.count(part) for part in parts)
    return total / rows.count(arguments)


class Doubled(torch.autograd.Function):
    """2 x, in the old style, which functorch refuses."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient
