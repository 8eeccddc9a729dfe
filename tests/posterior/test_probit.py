"""Chances of classes by the probit approximation, against Jacobians by hand and quadrature."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from models import normal, of_network, of_rows
from reference import close, normals
from runs import QUIET
from torch import nn

import pyro_scale as ps
from pyro_scale.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("float64", "store")
X, NEW = normals(30, 2, seed=1), 3 * normals(5, 2, seed=2)
LABELS = (X[:, 0] > 0).long() + (X[:, 1] > 0.3).long()
HEADS = {
    "logits": (lambda f: dist.Categorical(logits=f), LABELS, None),
    "one-hot": (lambda f: dist.OneHotCategorical(logits=f), torch.eye(3)[LABELS], None),
    "probs": (lambda f: dist.Categorical(probs=f.softmax(-1)), LABELS, torch.log_softmax),
    "coins": (lambda f: dist.Bernoulli(logits=f).to_event(1), torch.eye(3)[LABELS], None),
    "coins by probs": (
        lambda f: dist.Bernoulli(f.sigmoid()).to_event(1),
        torch.eye(3)[LABELS],
        None,
    ),
}


def network(head):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    bayesian = ps.bayesianize(net)

    model = of_network(bayesian, head)
    return model, net


@pytest.mark.parametrize("structure", ["dense", "kron", "diag", "low_rank"])
@pytest.mark.parametrize("name", HEADS)
def test_logits_are_divided_by_what_their_variance_says(name, structure):
    """As the model writes the logits: those that a softmax is given, of probs their logs."""
    if structure != "dense" and name != "logits":
        return
    head, y, logs = HEADS[name]
    model, net = network(head)
    mode = {n: value.detach() for n, value in net.named_parameters()}
    fit = ps.Laplace(model, structure=structure).run((X, y), mode=mode, **QUIET)
    found = fit.predict(NEW, linearized="probit", reduce="mean", num_samples=3)["y"]

    def logits(flat):
        params = fit.fit.layout.unflatten(flat)
        f = torch.func.functional_call(net, params, (NEW,))
        return f if logs is None else logs(f, -1)

    center, gaussian = fit.fit.centers[0], fit.fit.gaussians[0]
    jacobian = torch.autograd.functional.jacobian(logits, center)
    along = torch.stack([gaussian.covariance_times(row) for row in jacobian.flatten(0, 1)])
    variance = (along.unflatten(0, (5, 3)) * jacobian).sum(-1)
    expected = logits(center) / (1 + math.pi / 8 * variance).sqrt()
    chances = expected.sigmoid() if name.startswith("coins") else expected.softmax(-1)
    close(found, chances, 1e-10)


coin = of_rows(lambda x, w: dist.Bernoulli(logits=x @ w), w=normal(2, sd=2.0))


def test_a_coins_chance_is_near_its_expectation():
    """By Gauss and Hermite's rule: the approximation is off by up to two percent, and without the
    variance by more."""
    fit = ps.Laplace(coin, structure="dense").run((X, (LABELS > 0).double()), **QUIET)
    found = fit.predict(NEW, linearized="probit", reduce="mean")["y"]
    gaussian = fit.fit.gaussians[0]
    mean, sd = NEW @ gaussian.mean, (NEW @ gaussian.covariance * NEW).sum(1).sqrt()
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.hermite_e.hermegauss(80))
    chances = (mean[:, None] + sd[:, None] * nodes).sigmoid() @ weights / weights.sum()
    assert float((found - chances).abs().max()) < 0.02
    assert float((mean.sigmoid() - chances).abs().max()) > 0.05
    pyro.set_rng_seed(1)
    draws = fit.predict(NEW, linearized="probit")["y"]
    assert draws.shape == (1000, 5)
    errors = (found * (1 - found) / 1000).sqrt()
    assert float(((draws.mean(0) - found) / errors).abs().max()) < 4.4


def test_what_are_no_classes_is_refused():
    counts = of_rows(lambda x, w: dist.Poisson((x @ w).exp()), w=normal(2, sd=2.0))

    fit = ps.Laplace(counts).run((X, LABELS.double()), **QUIET)
    with pytest.raises(ArgumentError, match=r"site 'y' is a Poisson.*linearized=True"):
        fit.predict(NEW, linearized="probit")
    with pytest.raises(ArgumentError, match="linearized='mackay': pass True, False or 'probit'"):
        fit.predict(NEW, linearized="mackay")
