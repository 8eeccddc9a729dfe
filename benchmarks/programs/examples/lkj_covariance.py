"""A covariance matrix: scales, and an LKJ prior of the correlations."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

rng = np.random.default_rng(11)
covariance = np.array([[1.0, 0.6, 0.0], [0.6, 2.0, -0.5], [0.0, -0.5, 0.5]])
measured = rng.multivariate_normal([0.5, 0.0, -1.0], covariance, 80)


def model(y):
    mean = pyro.sample("mean", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(torch.full((3,), 2.0)).to_event(1))
    corr_tril = pyro.sample("corr_tril", dist.LKJCholesky(3, 2.0))
    scale_tril = scale[:, None] * corr_tril
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MultivariateNormal(mean, scale_tril=scale_tril), obs=y)


data = (torch.tensor(measured, dtype=torch.float32),)
right = ("mean", "scale", "corr_tril")
