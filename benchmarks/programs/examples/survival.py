"""Survival times, some of them censored: a Weibull likelihood, and a factor for the survivors."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine

rng = np.random.default_rng(20)
treated = rng.binomial(1, 0.5, 120).astype(np.float32)
time = np.exp(1.0 + 0.5 * treated) * rng.weibull(1.5, 120)
censored = time > 5.0


def model(treated, time, censored):
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
    scale = torch.exp(intercept + effect * treated)
    with pyro.plate("patients", len(time)):
        with poutine.mask(mask=~censored):
            pyro.sample("time", dist.Weibull(scale, shape), obs=time)
        with poutine.mask(mask=censored):
            pyro.factor("survived", -((time / scale) ** shape))


data = (
    torch.tensor(treated),
    torch.tensor(np.minimum(time, 5.0), dtype=torch.float32),
    torch.tensor(censored),
)
right = ("shape", "intercept", "effect")
