"""Preconditioned SGLD: what it is where its preconditioner is settled, and the bias where not."""

import math

import pytest
import torch
from gaussian import Field, bound, hills
from reference import double, normals
from repetitions import long_but

from pyro_scale.kernels import SGLD, pSGLD

SLOPE = Field(torch.func.grad(hills))
NEWTON = Field(lambda x: -x)  # of a standard normal


def test_a_settled_preconditioner_is_a_step_size_for_each_element():
    """Nothing is forgotten: SGLD at lr / (damping + sqrt(v))."""
    square = double(0.04, 1.0, 9.0)
    kernel = bound(pSGLD(lr=0.1, forgetting=0, damping=0.3, temperature=0.4), num_data=5)
    plain = bound(SGLD(lr=1.0, temperature=0.4), num_data=5)
    lr = double(0.1 / 0.5, 0.1 / 1.3, 0.1 / 3.3)
    plain = plain.replace(lr=lr)
    start = normals(3, seed=1)
    state = kernel.init(start, start)._replace(square=square)
    other = plain.init(start, start)
    for noise in normals(20, 1, 3, seed=2):
        state, _ = kernel.update(state, SLOPE, noise)
        other, _ = plain.update(other, SLOPE, noise)
        torch.testing.assert_close(state.position, other.position, rtol=1e-12, atol=1e-13)
    assert torch.equal(state.square, square)


def test_by_default_v_moves_less_and_less_of_the_way_to_each_gradients_square():
    """By (1 + step)^-0.7 / 2, from the temperature over N."""
    kernel, state, square = pSGLD(lr=0.01, temperature=0.6), None, 0.2
    for step in range(6):
        now = bound(kernel, num_data=3, step=step)
        state = now.init(double(0.5, -1.0, 0.2), normals(3)) if state is None else state
        gradient = SLOPE.grad(state.position)[0]
        square = square + 0.5 * (1 + step) ** -0.7 * (gradient**2 - square)
        state, _ = now.update(state, SLOPE, normals(1, 3, seed=step))
        torch.testing.assert_close(state.square, square, rtol=1e-12, atol=0)


def variance(kernel, warmup, steps, chains=6000):
    """(That of a standard normal over time and independent chains, its standard error, the
    chains' mean preconditioner)."""
    source = torch.Generator().manual_seed(1)
    state, total, mean_g = None, 0.0, 0.0
    for step in range(warmup + steps):
        now = bound(kernel, step=step)
        noise = torch.randn(2, chains, generator=source, dtype=torch.float64)
        state = now.init(noise[1], noise[1]) if state is None else state
        state, _ = now.update(state, NEWTON, noise[:1])
        if step >= warmup:
            total = total + state.position.square() / steps
            mean_g = mean_g + 1 / (now.damping + state.square.sqrt()) / steps
    return float(total.mean()), float(total.std() / chains**0.5), mean_g


@pytest.mark.slow
def test_forgetting_all_has_the_stationary_law_of_the_equation_without_gamma():
    """G = 1 / (damping + |x|), the drift G x and the diffusion 2 G: the density is in proportion to
    exp(-x^2/2) / G, whose variance at damping 0.1 is 1.89, however small the step."""
    found, error, _ = variance(pSGLD(lr=0.004, forgetting=1, damping=0.1), 1500, 1000)
    damped = 0.1 * math.sqrt(2 * math.pi)
    assert found == pytest.approx((damped + 4) / (damped + 2), abs=4.4 * error)
    assert error < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgetting", "bias"), long_but([(0.5, 0.7), (0.1, 0.4), (0.01, 0.04)], (0.1, 0.4))
)
def test_constant_forgetting_has_a_bias_that_smaller_steps_do_not_take_away(forgetting, bias):
    for lr in (0.05, 0.02):
        kernel = pSGLD(lr=lr, forgetting=forgetting, damping=0.1)
        found, error, metric = variance(kernel, round(20 / lr), round(10 / lr))
        own = float((1 / (1 - lr * metric / 2)).mean())  # SGLD's
        assert found - own > bias + 4.4 * error


@pytest.mark.slow
@pytest.mark.long
def test_falling_forgetting_leaves_sglds_law():
    """1 / (1 - lr G / 2); what was forgotten at step 10,000, 0.0016, still adds about half of
    1%."""
    lr = 0.2
    found, error, metric = variance(pSGLD(lr=lr), 10_000, 500, chains=3000)
    expected = float((1 / (1 - lr * metric / 2)).mean())
    assert found == pytest.approx(expected, abs=0.01 + 4.4 * error)
    assert error < 0.004
    assert expected > 1.05
    assert float(metric.mean()) == pytest.approx(1, abs=0.1)
