"""Latents in half precision: the state is in float32, and only the model sees theirs."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from repetitions import long_but

import pyro_scale as ps

X = torch.randn(40, generator=torch.Generator().manual_seed(0))
Y = 0.5 * X + torch.randn(40, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "compile"),
    long_but(
        [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)],
        (torch.bfloat16, True),
    ),
)
def test_a_gaussian_posterior_is_right(dtype, compile):
    one = torch.ones((), dtype=dtype)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0 * one, one))
        assert w.dtype is dtype
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w * x, one), obs=y)

    x, y = X.to(dtype), Y.to(dtype)
    precision = 1 + x.double().square().sum()
    mean, sd = float((x.double() * y.double()).sum() / precision), float(precision**-0.5)
    sampler = ps.BAOA(model, lr=0.5, compile=compile)
    how = {
        "num_samples": 2000 if not compile else 4000,
        "thinning": 1,
        "warmup_steps": 100,
        "num_chains": 4,
    }
    sampler.run((x, y), **how, seed=0, progress=False)
    draws = sampler.get_samples()["w"]
    assert draws.dtype is torch.float32
    # Monte Carlo errors of 2%, and bfloat16's roundings of the likelihood
    assert abs(float(draws.mean()) - mean) < 0.1 * sd
    assert abs(float(draws.std()) / sd - 1) < 0.06
    table = sampler.summary()  # by way of NumPy, which has no bfloat16
    assert abs(table["mean"]["w"] - mean) < 0.1 * sd
    if compile:
        assert sampler.to_arviz().posterior.attrs["program"] == "compiled loop"
