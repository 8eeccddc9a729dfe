"""Posteriors of regressions whose moments are known, for step sizes to be judged by."""

import numpy as np
import torch
from densities import logistic_regression

PRIOR_SD = 2.0
logistic = logistic_regression(sd=PRIOR_SD)


class Problem:
    """A regression, its exact posterior and a batch's gradient over N, written by hand.

    Attributes:
        x, y: the data.
        mean, sd: of the posterior's elements.
    """

    def gradient(self, w, x, y):
        """Of the log joint over N at [chains, D], from batches [chains, B, ...]."""
        residual = self.residual(y, torch.einsum("cbd,cd->cb", x, w))
        return torch.einsum("cb,cbd->cd", residual, x) / x.shape[1] - w / PRIOR_SD**2 / len(self.x)


class Logistic(Problem):
    """569 tumors, three standardized columns and an intercept, B = 64.  The moments are
    Gauss-Hermite sums over 15^4 points in the coordinates of the Laplace approximation."""

    model, batch_size = staticmethod(logistic), 64

    def __init__(self):
        from sklearn.datasets import load_breast_cancer

        columns, labels = load_breast_cancer(return_X_y=True)
        x = torch.from_numpy(columns[:, :3])
        x = (x - x.mean(0)) / x.std(0)
        self.x = torch.cat([torch.ones(len(x), 1), x], dim=1).double()
        self.y = torch.from_numpy(labels).double()
        self.mean, self.sd = self.moments()

    def log_joint(self, w):
        """[..., D] -> [...]."""
        logits = w @ self.x.T
        rows = self.y * logits - torch.nn.functional.softplus(logits)
        return rows.sum(-1) - w.square().sum(-1) / (2 * PRIOR_SD**2)

    def moments(self, order=15):
        w = torch.zeros(4)
        for _ in range(30):  # Newton
            chance = torch.sigmoid(self.x @ w)
            slope = self.x.T @ (self.y - chance) - w / PRIOR_SD**2
            curvature = (self.x.T * (chance * (1 - chance))) @ self.x + torch.eye(4) / PRIOR_SD**2
            w = w + torch.linalg.solve(curvature, slope)
        nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite.hermgauss(order))
        # 1.15 times as wide as Laplace, as the posterior's tails are a little wider
        spread = 1.15 * torch.linalg.inv(torch.linalg.cholesky(curvature)).T * 2**0.5
        grid = torch.cartesian_prod(*[nodes] * 4)
        points = w + grid @ spread.T
        log_weight = torch.cartesian_prod(*[weights.log()] * 4).sum(1) + grid.square().sum(1)
        log_weight = log_weight + torch.cat([self.log_joint(p) for p in points.split(20_000)])
        weight = (log_weight - log_weight.max()).exp()
        mean = (weight[:, None] * points).sum(0) / weight.sum()
        square = (weight[:, None] * (points - mean).square()).sum(0) / weight.sum()
        return mean, square.sqrt()

    def residual(self, y, fit):
        return y - torch.sigmoid(fit)
