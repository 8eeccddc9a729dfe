"""What the draws of a window teach in more dimensions than they could tell a covariance of, and
hierarchies whose mode is far from the posterior."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import double, normals

import pyro_scale as ps
from pyro_scale.core.whitening import DenseWhitening, DiagonalWhitening
from pyro_scale.tuning.windows import learn, learn_spread

SIZE, DRAWS = 200, 768


def _learned(true_root, old_root, count=DRAWS):
    """The sds that the truth has in the geometry that draws of it lead to from an old one."""
    old = DenseWhitening(torch.zeros(SIZE).double(), old_root)
    draws = normals(4, DRAWS // 4, SIZE, seed=1).double() @ true_root.mT
    change, new = learn_spread(old, old.to_whitened(draws), double(count)[0])
    assert torch.equal(new.factor, new.factor.tril())
    inverse = torch.linalg.solve_triangular(new.factor, true_root, upper=False)
    return change, torch.linalg.svdvals(inverse)


def test_draws_of_a_matrix_itself_leave_it_as_it_is():
    """Their own covariance would have sds from 0.5 to 1.5."""
    root = torch.linalg.cholesky(torch.cov(normals(SIZE, 2 * SIZE, seed=2).double()))
    change, sds = _learned(root, root)
    assert change < 1.25
    assert 0.8 < float(sds.min()) < float(sds.max()) < 1.25


def test_draws_teach_a_matrix_the_direction_that_is_longer():
    axis = normals(SIZE, seed=3).double()
    axis = axis / axis.norm()
    eye = torch.eye(SIZE).double()
    change, sds = _learned(eye + 5 * axis[:, None] * axis, eye)
    assert change > 3
    assert float(sds.max()) < 2


@pytest.mark.parametrize("kind", [DenseWhitening, DiagonalWhitening])
def test_a_chain_that_was_thrown_does_not_stretch_the_geometry(kind):
    """A tenth of one chain's draws is 100 sds away, so that the sd is 16 and the mean 2.5."""
    z = normals(4, 192, 3, seed=6).double()
    thrown = z.clone()
    thrown[1, 50:70, 0] -= 100
    start, count = torch.zeros(3).double(), torch.tensor(400.0).double()
    old = kind(start, torch.eye(3).double() if kind is DenseWhitening else torch.ones(3).double())
    (_, new), (_, other) = learn(old, z, 1, count), learn(old, thrown, 1, count)
    of_first, of_thrown = (float(geometry.variance[0]) ** 0.5 for geometry in (new, other))
    assert of_thrown < 2 * of_first
    assert abs(float(other.center[0] - new.center[0])) < 0.3
    _, plain = learn_spread(old, z, count)
    assert torch.equal(new.tensors[1], plain.tensors[1])  # draws of a normal are not moved


def _groups(num_groups):
    """Ten rows a group, non-centered, and the exact posterior's moments of log tau and log sigma.

    Group means and slopes are normal given the scales, so that these are two sums of squares.
    """
    group = torch.arange(num_groups).repeat_interleave(10)
    effects = 0.7 * normals(num_groups, seed=4).float()
    y = effects[group] + normals(len(group), seed=5).float()

    def model(group, y):
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(num_groups), 1.0).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(tau * z[group], sigma), obs=y)

    by_group = y.double().view(num_groups, 10)
    means = by_group.mean(1)
    within = float((by_group - means[:, None]).square().sum())
    between = float(means.square().sum())
    tau = torch.linspace(0.3, 1.3, 1001).double()[:, None]
    sigma = torch.linspace(0.8, 1.2, 801).double()
    variance = tau.square() + sigma.square() / 10
    log_p = -num_groups * variance.log() / 2 - between / variance / 2
    log_p = log_p - 9 * num_groups * sigma.log() - within / sigma.square() / 2
    log_p = log_p - tau.square() / 2 - sigma.square() / 2
    weight = (log_p - log_p.max()).exp()
    weight = weight / weight.sum()
    exact = {}
    for name, values in {"tau": tau, "sigma": sigma}.items():
        mean = float((weight * values).sum())
        exact[name] = mean, math.sqrt(float((weight * (values - mean).square()).sum()))
    return model, {"group": group, "y": y}, exact


@pytest.mark.long
@pytest.mark.parametrize("num_groups", [300, 600])  # a matrix; elements and a few directions
def test_hierarchies_of_many_groups_are_right_with_nothing_set(num_groups):
    """The mode of their joint density has a tau five times too large."""
    model, data, exact = _groups(num_groups)
    mcmc = ps.BAOA(model).run(data, seed=0, progress=False)
    report = mcmc.report()
    assert report.verdict == "yes", str(report)
    draws = mcmc.get_samples()
    for name, (mean, sd) in exact.items():
        # 0.1 sds and 5%, and four standard errors of 2,000 effective draws
        assert abs(float(draws[name].double().mean()) - mean) < (0.1 + 4 / 2000**0.5) * sd
        assert abs(float(draws[name].double().std()) / sd - 1) < 0.05 + 4 / 4000**0.5
