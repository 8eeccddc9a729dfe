"""A small network as a PyroModule, a normal prior on every weight; the curve is what counts."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn

rng = np.random.default_rng(23)
x = rng.uniform(-2, 2, 60)
y = np.sin(2 * x) + rng.normal(0, 0.2, 60)
grid = torch.linspace(-2, 2, 5)[:, None]


class Network(PyroModule):
    def __init__(self, hidden=6):
        super().__init__()
        self.inner = PyroModule[nn.Linear](1, hidden)
        self.inner.weight = PyroSample(dist.Normal(0.0, 2.0).expand([hidden, 1]).to_event(2))
        self.inner.bias = PyroSample(dist.Normal(0.0, 2.0).expand([hidden]).to_event(1))
        self.outer = PyroModule[nn.Linear](hidden, 1)
        self.outer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, hidden]).to_event(2))
        self.outer.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def forward(self, x, y=None):
        f = self.outer(torch.tanh(self.inner(x))).squeeze(-1)
        pyro.deterministic("curve", self.outer(torch.tanh(self.inner(grid))).squeeze(-1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, 0.2), obs=y)


model = Network()
data = (
    torch.tensor(x, dtype=torch.float32)[:, None],
    torch.tensor(y, dtype=torch.float32),
)
right = ("curve",)
