"""Logistic regression of scikit-learn's breast cancer data, by minibatches of a DataLoader."""

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_breast_cancer
from torch.utils.data import DataLoader, TensorDataset

x, y = (torch.tensor(a, dtype=torch.float32) for a in load_breast_cancer(return_X_y=True))
x = ((x - x.mean(0)) / x.std(0))[:, [1, 4, 8]]  # texture, smoothness, symmetry


def model(x, y=None):
    bias = pyro.sample("bias", dist.Normal(0.0, 2.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Bernoulli(logits=bias + x @ w), obs=y)


data = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
right = ("bias", "w")
