"""Fixed effects of a Gaussian model with random intercepts against generalized least squares."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

import pyro_scale as ps

COUNT, TAU, SIGMA = 50, 0.9, 0.6


def simulate():
    """Rows in groups of 3 to 9, in random order: (x `[N, 2]`, groups' labels, y)."""
    rng = np.random.default_rng(0)
    group = rng.permutation(np.repeat(np.arange(COUNT), rng.integers(3, 10, COUNT)))
    x = rng.normal(size=(len(group), 2))
    effects = TAU * rng.normal(size=COUNT)
    y = 1 + x @ [0.5, -0.3] + effects[group] + SIGMA * rng.normal(size=len(group))
    return x, group, y


def least_squares(x, group, y):
    """Coefficients and sds of generalized least squares, at the true variances."""
    design = np.column_stack([np.ones(len(y)), x])
    member = group[:, None] == np.arange(COUNT)
    covariance = SIGMA**2 * np.eye(len(y)) + TAU**2 * member @ member.T
    weighted = np.linalg.solve(covariance, design)
    inverse = np.linalg.inv(design.T @ weighted)
    return inverse @ weighted.T @ y, np.sqrt(np.diag(inverse))


def test_coefficients_and_their_sds_are_those_of_least_squares():
    x, group, y = simulate()

    def model(x, group, y):
        b = pyro.sample("b", dist.Normal(torch.zeros(3), 1e4).to_event(1))
        with pyro.plate("groups", COUNT):
            z = pyro.sample("z", dist.Normal(0.0, TAU))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(b[0] + x @ b[1:] + z[group], SIGMA), obs=y)

    rows = torch.tensor(x).float(), torch.tensor(group), torch.tensor(y).float()
    laplace = ps.Laplace(ps.marginalize(model, "z"))
    laplace.run(ps.Grouped(rows, by=1), seed=0, progress=False)
    gaussian = laplace.fit.gaussians[0]
    mean, sd = least_squares(x, group, y)
    np.testing.assert_allclose(gaussian.mean.numpy(), mean, rtol=1e-3)
    np.testing.assert_allclose(gaussian.variance.sqrt().numpy(), sd, rtol=1e-3)
