"""Chains shared out among processes: the same draws as in one, on any number of them.

    torchrun --standalone --nproc-per-node=2 examples/distributed.py

Run without torchrun, it does the same in one process.
"""

import os

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_breast_cancer

import pyro_scale as ps

x, y = load_breast_cancer(return_X_y=True)
x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
y = torch.tensor(y, dtype=torch.float32)


def model(x, y=None):
    """Logistic regression."""
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


mcmc = ps.BAOA(model).run((x, y), num_chains=8, num_samples=500, seed=0)

if os.environ.get("RANK", "0") == "0":  # it has all draws; report() and summary() are on every rank
    print(mcmc.report())
    print("draws of all chains:", list(mcmc.get_samples(group_by_chain=True)["w"].shape))
    print("first chain, first draw:", mcmc.get_samples(group_by_chain=True)["w"][0, 0, :3].tolist())
