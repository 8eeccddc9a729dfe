"""The bias of an approximation by importance weights, against quadrature."""

import torch

from pyro_scale.diagnostics.importance_bias import importance_bias


def _tilt(x):
    """Log density ratio of a posterior to its approximation, bounded above."""
    return torch.nn.functional.logsigmoid(2 * x[..., 0]) - 0.1 * (x**2).sum(-1)


def _by_quadrature(dims):
    axis = torch.linspace(-9, 9, 901, dtype=torch.float64)
    x = torch.stack(torch.meshgrid(*[axis] * dims, indexing="ij"), -1).reshape(-1, dims)
    p = (_tilt(x) - (x**2).sum(-1) / 2).softmax(0)[:, None]
    mean = (p * x).sum(0)
    sd = (p * (x - mean) ** 2).sum(0).sqrt()
    return -mean / sd, -sd.log()


def _check(dims):
    mean, log_sd = _by_quadrature(dims)
    generator = torch.Generator().manual_seed(0)
    scores = []
    for _ in range(200):
        x = torch.randn(2000, dims, generator=generator, dtype=torch.float64)
        bias = importance_bias(x, _tilt(x) + 3.0)
        errors = torch.stack([bias.mean_mcse, bias.log_sd_mcse])
        scores.append((torch.stack([bias.mean - mean, bias.log_sd - log_sd])) / errors)
    scores = torch.stack(scores)
    assert (scores[0].abs() < 4).all()
    assert (scores.mean(0).abs() * 200**0.5 < 4).all()
    assert ((scores.std(0) > 0.8) & (scores.std(0) < 1.2)).all()


def test_bias_in_one_dimension_is_that_of_quadrature():
    _check(1)


def test_bias_in_two_dimensions_is_that_of_quadrature():
    _check(2)


def test_equal_weights_have_no_bias_and_no_error():
    x = torch.randn(100, 3, dtype=torch.float64)
    assert all(
        torch.allclose(part, torch.zeros(3).double(), atol=1e-12)
        for part in importance_bias(x, torch.zeros(100).double())
    )
