"""What is asked after a run whose local latents were summed out, against closed forms: random
intercepts with normal noise, in groups of unlike lengths of which several share a unit."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_scale as ps
from pyro_scale.diagnostics.local_latents import check_local_latents
from pyro_scale.errors import ArgumentError
from pyro_scale.marginal.integrated import Integrated

GROUPS, LENGTHS = 30, [1, 2, 3, 5, 40]


def model(x, group, y=None):
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    tau, s = pyro.sample("tau", dist.HalfNormal(2.0)), pyro.sample("s", dist.HalfNormal(2.0))
    with pyro.plate("groups", GROUPS):
        z = pyro.sample("z", dist.Normal(0.0, tau))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(b * x + z[group], s), obs=y)


@pytest.fixture(scope="module")
def data():
    source = torch.Generator().manual_seed(0)
    lengths = torch.tensor(LENGTHS * (GROUPS // len(LENGTHS)))
    group = torch.arange(GROUPS).repeat_interleave(lengths)
    group = group[torch.randperm(len(group), generator=source)]
    x = torch.randn(len(group), generator=source)
    z = 1.5 * torch.randn(GROUPS, generator=source)
    return x, group, 0.5 * x + z[group] + 0.7 * torch.randn(len(group), generator=source)


@pytest.fixture(scope="module")
def fit(data):
    method = ps.Laplace(ps.marginalize(model, "z"))
    return method.run(ps.Grouped(data, by=1), seed=0, progress=False)


def conditional(samples, data):
    """(Mean, sd) of every group's z given each draw of the globals, `[draws, groups]`."""
    x, group, y = data
    b, tau, s = (samples[name].double()[:, None] for name in ("b", "tau", "s"))
    counts = torch.bincount(group, minlength=GROUPS)
    sums = torch.zeros(len(b), GROUPS, dtype=torch.float64)
    sums.index_add_(1, group, y - b * x)
    precision = counts / s**2 + tau**-2
    return sums / s**2 / precision, precision.rsqrt()


def test_several_groups_share_a_unit(fit):
    units = fit.posterior.draws.data.slots
    assert len(units) < GROUPS
    assert (units >= 0).sum() == GROUPS


def test_latents_are_draws_given_the_others(fit, data):
    samples, z = fit.get_samples(), fit.latents("z")
    assert z.shape == (len(samples["b"]), GROUPS)
    mean, sd = conditional(samples, data)
    score = (z - mean) / sd
    count = score.numel()
    assert abs(score.mean()) < 4 / math.sqrt(count)
    assert abs(score.var() - 1) < 4 * math.sqrt(2 / count)
    assert (score.mean(0).abs() < 4.5 / math.sqrt(len(score))).all()  # each group has its own
    few = fit.get_samples(num_samples=20, local=True)
    torch.testing.assert_close(few["z"], fit.latents("z", num_samples=20))


def test_log_likelihood_and_loo_are_of_groups(fit, data):
    x, group, y = data
    samples, values = fit.get_samples(), fit.log_likelihood()["y"]
    assert values.shape == (len(samples["b"]), GROUPS)
    draw = 7
    b, tau, s = (samples[name][draw].double() for name in ("b", "tau", "s"))
    for label in (0, 4, GROUPS - 1):
        rows = group == label
        count = int(rows.sum())
        covariance = s**2 * torch.eye(count, dtype=torch.float64) + tau**2
        residual = (y - b * x)[rows].double()
        exact = dist.MultivariateNormal(torch.zeros(count).double(), covariance).log_prob(residual)
        assert abs(float(values[draw, label] - exact)) < 1e-4
    loo = fit.loo()
    assert len(loo.pointwise) == GROUPS
    with pytest.raises(ArgumentError, match="num_rows"):
        fit.loo(num_rows=10)


def test_predictions_of_seen_and_new_groups(fit, data):
    torch.manual_seed(0)
    samples = fit.get_samples()
    mean, sd = conditional(samples, data)
    seen = torch.tensor([4, 0, 4])
    drawn = fit.predict(torch.zeros(4), torch.cat([seen, torch.tensor([GROUPS + 5])]))["y"]
    b, tau, s = (samples[name].double() for name in ("b", "tau", "s"))
    expected = torch.cat([mean[:, seen], torch.zeros(len(b), 1)], 1)
    spread = torch.cat(
        [(sd[:, seen] ** 2 + s[:, None] ** 2).sqrt(), (tau**2 + s**2).sqrt()[:, None]], 1
    )
    score = (drawn - expected) / spread
    count = len(score)
    assert (score.mean(0).abs() < 4 / math.sqrt(count)).all()
    assert ((score.var(0) - 1.0).abs() < 4 * math.sqrt(2 / count) + 0.02).all()
    # rows of one group have the same z in a draw
    apart = drawn[:, 0] - drawn[:, 2]
    assert abs(float((apart.double() / (math.sqrt(2) * s)).var()) - 1) < 4 * math.sqrt(2 / count)


def test_too_few_nodes_are_reported(fit):
    result = fit.posterior.draws
    assert check_local_latents(result)[0].verdict == "yes"
    own = result.log_posterior.model

    class Coarse(Integrated):
        def gaussians(self, values, units, modes):
            around = super().gaussians(values, units, modes)
            return around._replace(center=around.center + 0.3 * values["tau"])

    coarse = Coarse(own.local, 2, own.is_far)
    result.log_posterior.model = coarse
    try:
        assert check_local_latents(result)[0].verdict == "unknown"
    finally:
        result.log_posterior.model = own


def test_modes_that_no_node_reaches_are_reported(fit):
    """Every row has two narrow modes, at plus and minus the root of y."""
    y = (0.9 + torch.randn(150, generator=torch.Generator().manual_seed(1))) ** 2 + 0.3

    def squares(y):
        mean = pyro.sample("mean", dist.Normal(0.9, 0.2))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(mean, 1.0))
            pyro.sample("y", dist.Normal((z - 0.3) ** 2, 0.03), obs=y)

    two = ps.Laplace(ps.marginalize(squares)).run((y,), seed=0, progress=False)
    (found,) = [f for f in two.report().findings if f.check == "local latents"]
    assert found.verdict == "unknown"
    assert "modes that nodes do not reach" in str(found)
    (normal,) = [f for f in fit.report().findings if f.check == "local latents"]
    assert normal.verdict == "yes"
    assert fit.posterior.draws.log_posterior.model.unseen_bias == 0


def test_methods_without_all_data_refuse():
    marginal = ps.marginalize(model, "z")
    for call in (
        lambda: ps.EKF(marginal).run((torch.zeros(3),) * 3),
        lambda: ps.BAOA(marginal, lr=0.1, num_data=3).begin(*(torch.zeros(3),) * 3),
    ):
        with pytest.raises(ArgumentError, match="sum local latents out"):
            call()


def test_explain_lists_latents_that_are_summed_out(data):
    rows = ps.explain(model, ps.Grouped(data, by=1)).rows
    (local,) = [row for row in rows if row["kind"] == "local"]
    assert local["site"] == "z"
    assert "nodes of each group" in local["why"]
