"""Amounts that are exactly zero for some: a masked mixture chosen by an enumerated switch."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(26)
amounts = rng.binomial(1, 0.6, 120) * rng.normal(2.0, 0.7, 120)


def model(amounts):
    spent = pyro.sample("spent", dist.Beta(1.0, 1.0))
    mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
    sd = pyro.sample("sd", dist.HalfNormal(2.0))
    with pyro.plate("people", len(amounts)):
        z = pyro.sample("z", dist.Bernoulli(spent), infer={"enumerate": "parallel"})
        nothing = dist.Delta(torch.zeros(len(amounts)))
        something = dist.Normal(mean, sd).expand([len(amounts)])
        amount = dist.MaskedMixture(z.bool(), nothing, something)
        pyro.sample("amount", amount, obs=amounts)


data = (torch.tensor(amounts, dtype=torch.float32),)
right = ("spent", "mean", "sd")
