"""The search for a mode where L-BFGS stalls, and the reasons that it gives if there is none."""

from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import of_network
from repetitions import long_but
from runs import QUIET
from torch import nn

import pyro_scale as ps
from pyro_scale.errors import ApproximationWarning, ArgumentError


def tanh_regression(width, activation, seed):
    """A network and rows drawn from another: its log joint is bounded, and its prior proper."""
    torch.manual_seed(seed)
    bnn = ps.bayesianize(nn.Sequential(nn.Linear(4, width), activation(), nn.Linear(width, 1)))
    x = torch.randn(100, 4)
    y = torch.sin(2 * x[:, 0]) * x[:, 1] + 0.3 * torch.randn(100)

    model = of_network(bnn, lambda f: dist.Normal(f[:, 0], 0.3))
    return model, (x, y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_scale.errors.ApproximationWarning")
@pytest.mark.parametrize(
    ("activation", "structure"),
    long_but(product([nn.Tanh, nn.ReLU], ["dense", "kron"]), (nn.Tanh, "kron")),
)
def test_a_network_of_a_proper_prior_has_a_mode(activation, structure):
    """From where the search ended, 1,000 steps of Adam gain next to nothing."""
    model, data = tanh_regression(8, activation, 1)
    fit = ps.Laplace(model, structure=structure).run(data, **QUIET)
    size = fit.fit.layout.size
    assert fit.fit.attrs["distance"][0] <= 0.01 * size
    found = fit.fit.centers[0].requires_grad_()

    def log_joint(position):
        params = fit.fit.layout.unflatten(position)
        return fit.fit.log_posterior(params, data).log_joint

    first = float(log_joint(found).detach())
    optimizer, best = torch.optim.Adam([found], lr=1e-3), first
    for _ in range(1000):
        optimizer.zero_grad()
        loss = -log_joint(found)
        loss.backward()
        best = max(best, -float(loss.detach()))
        optimizer.step()
    assert best - first < 0.02 * size


def test_a_log_density_that_grows_is_said_to_and_where():
    """Separable classes under a flat prior: the log likelihood rises for ever."""
    x = torch.linspace(-2, 2, 20)
    y = (x > 0).float()

    def model(x, y=None):
        w = pyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), ()))
        with pyro.plate("data", len(x)):
            return pyro.factor("y", w * (2 * y - 1) * x)

    with pytest.raises(
        ArgumentError, match=r"no mode.*grows without bounds: in a direction of site 'w'|rose to"
    ):
        ps.Laplace(model).run((x, y), **QUIET)


LABELS = torch.arange(60) % 3


@pytest.mark.parametrize("structure", ["diag", "dense", "kron", "low_rank"])
@pytest.mark.parametrize("width", [4, 24])
def test_a_stale_mode_is_said_to_be_far_away(width, structure):
    """Weights as they were before training: 41 and 201 of them."""
    torch.manual_seed(0)
    x = torch.randn(60, 4) + 2 * nn.functional.one_hot(LABELS, 4)
    net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
    bnn = ps.bayesianize(net)

    model = of_network(bnn, lambda f: dist.Categorical(logits=f))

    with pytest.warns(
        ApproximationWarning, match="posterior sds away from that of the dens"
    ) as all_:
        ps.Laplace(model, structure=structure).run((x, LABELS), mode=bnn.weights(), **QUIET)
    assert not [w for w in all_ if "Pareto" in str(w.message)]


@pytest.mark.slow
def test_a_mode_of_the_sites_own_values_is_not_said_to_be_far_away(recwarn):
    """The scale's mode is elsewhere in unconstrained space, by parts of an sd."""
    y = torch.randn(50, generator=torch.Generator().manual_seed(0))

    def model(y=None):
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with pyro.plate("data", 50):
            return pyro.sample("y", dist.Normal(0.0, sigma), obs=y)

    mode = ps.MAP(model, structure="dense").run((y,), num_steps=500, **QUIET)
    ps.Laplace(model).run((y,), mode=mode, **QUIET)
    assert not [w for w in recwarn if "given mode" in str(w.message)]
