"""Linear regression: scikit-learn's diabetes data, standardized."""

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_diabetes

x, y = (torch.tensor(a, dtype=torch.float32) for a in load_diabetes(return_X_y=True))
x = x[:, [2, 3, 8]]  # body mass, blood pressure, triglycerides
x = torch.cat([torch.ones(len(x), 1), (x - x.mean(0)) / x.std(0)], 1)
y = (y - y.mean()) / y.std()


def model(x, y=None):
    beta = pyro.sample("beta", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


data = (x, y)
right = ("beta", "sigma")
