"""Parts add up to the whole, whatever the shapes, sizes and tails."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import batches, close
from torch.distributions import Normal

import pyro_scale as ps

pytestmark = pytest.mark.usefixtures("float64")

quick = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)


def normals(*shape, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source, dtype=torch.float64)


# who groups the rows: each (rows x, columns) -> the site that observes them
def plated(mean, s, y):
    with pyro.plate("data", len(y), dim=-2), pyro.plate("columns", y.shape[1], dim=-1):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def evented(mean, s, y):
    pyro.sample("y", dist.Normal(mean, s).to_event(2), obs=y)


def transposed(mean, s, y):
    pyro.sample("y", dist.Normal(mean.T, s), obs=y.T)


def factored(mean, s, y):
    pyro.factor("y", Normal(mean, s).log_prob(y).sum(-1))


def weighted(mean, s, y):
    with pyro.plate("data", len(y)), poutine.scale(scale=y[:, 0].abs()):
        pyro.sample("y", dist.Normal(mean, s).to_event(1), obs=y)


WAYS = [plated, evented, transposed, factored, weighted]


def hierarchical(way, num_groups):
    def model(x, y, group):
        w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1], y.shape[1]), 1.0).to_event(2))
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("groups", num_groups, dim=-2):
            u = pyro.sample("u", dist.StudentT(4.0, 0.0, s))
        way(x @ w + u[group], s, y)

    return model


def log_joint_by_hand(params, x, y, group, way, ratio):
    s = params["s"].exp()
    mean = x @ params["w"] + params["u"][group]
    each = Normal(mean, s).log_prob(y).sum(-1)
    if way is weighted:
        each = each * y[:, 0].abs()
    prior = Normal(0.0, 1.0).log_prob(params["w"]).sum()
    prior = prior + torch.distributions.HalfNormal(1.0).log_prob(s) + params["s"]
    prior = prior + torch.distributions.StudentT(4.0, 0.0, s).log_prob(params["u"]).sum()
    return prior + ratio * each.sum()


def data_of(num_rows, num_features, num_columns, num_groups):
    return (
        normals(num_rows, num_features),
        normals(num_rows, num_columns, seed=1),
        torch.arange(num_rows) % num_groups,
    )


def weighted_mean(gradients, counts):
    total = sum(counts)
    return {
        name: sum(n * g[name] for n, g in zip(counts, gradients, strict=True)) / total
        for name in gradients[0]
    }


class TestAnyShape:
    @quick
    @given(
        way=st.sampled_from(WAYS),
        num_rows=st.integers(2, 13),
        size=st.integers(1, 13),
        num_features=st.integers(1, 3),
        num_columns=st.integers(2, 5),
        num_groups=st.integers(2, 6),
    )
    def test_gradients_of_the_parts_average_to_the_wholes(
        self, way, num_rows, size, num_features, num_columns, num_groups
    ):
        """Equal batches, or a ragged tail: weighted by their rows, each with its own B."""
        size = min(size, num_rows)
        data = data_of(num_rows, num_features, num_columns, num_groups)
        parts = batches(data, size)
        log_posterior = ps.LogPosterior(hierarchical(way, num_groups), num_data=num_rows)
        params = log_posterior.init(0, *parts[0])
        whole, value = log_posterior.grad(params, data)
        given = [log_posterior.grad(params, part)[0] for part in parts]
        average = weighted_mean(given, [len(part[0]) for part in parts])
        expected = torch.func.grad(lambda p: log_joint_by_hand(p, *data, way, 1.0))(params)
        close(value.log_joint, log_joint_by_hand(params, *data, way, 1.0))
        for name in params:
            size_of = whole[name].abs().max().clamp(min=1.0)
            assert (average[name] - whole[name]).abs().max() <= 1e-12 * size_of
            close(whole[name], expected[name])

    @quick
    @given(
        way=st.sampled_from(WAYS),
        size=st.integers(1, 9),
        num_data=st.integers(9, 10**9),
        num_columns=st.integers(2, 9),
    )
    def test_one_batch_counts_n_over_b_times(self, way, size, num_data, num_columns):
        data = data_of(size, 2, num_columns, 3)
        log_posterior = ps.LogPosterior(hierarchical(way, 3), num_data=num_data)
        params = log_posterior.init(0, *data)
        value = log_posterior(params, data)
        close(value.log_joint, log_joint_by_hand(params, *data, way, num_data / size))
        assert value.log_lik.shape == (size,)
        assert value.log_joint == value.log_prior + num_data / size * value.log_lik.sum()


@pytest.mark.parametrize("way", WAYS)
def test_the_mean_over_disjoint_equal_batches_is_the_full_gradient(way):
    """To 1e-12, relative, in float64; for batches in any order."""
    data = data_of(96, 3, 2, 5)
    log_posterior = ps.LogPosterior(hierarchical(way, 5), num_data=96)
    params = log_posterior.init(0, *batches(data, 8)[0])
    whole, _ = log_posterior.grad(params, data)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0)).reshape(12, 8)
    parts = [tuple(column[index] for column in data) for index in order]
    stacked = tuple(torch.stack(column) for column in zip(*parts, strict=True))
    gradients, _ = torch.vmap(log_posterior.grad, in_dims=(None, 0))(params, stacked)
    for name, full in whole.items():
        relative = (gradients[name].mean(0) - full).norm() / full.norm()
        assert relative < 1e-12


def test_a_wrong_scale_is_seen_by_these_tests():
    """Mutants of the estimate: each must be off by far more than what is allowed above."""
    data = data_of(12, 2, 2, 3)
    log_posterior = ps.LogPosterior(hierarchical(plated, 3), num_data=12)
    part = batches(data, 4)[0]
    params = log_posterior.init(0, *part)
    value, expected = log_posterior(params, part), log_joint_by_hand(params, *part, plated, 3.0)
    prior, lik = value.log_prior, value.log_lik
    mutants = {
        "prior counted N/B times": 3 * (prior + lik.sum()),
        "prior counted for each batch": prior / 3 + 3 * lik.sum(),
        "N/B squared": prior + 9 * lik.sum(),
        "mean for sum": prior + 3 * lik.mean(),
        "no N/B": prior + lik.sum(),
        "sign": -prior + 3 * lik.sum(),
        "Jacobian left out": prior - params["s"] + 3 * lik.sum(),
        "Jacobian's sign": prior - 2 * params["s"] + 3 * lik.sum(),
    }
    for name, mutant in mutants.items():
        assert (mutant - expected).abs() > 1e-2, name
    close(value.log_joint, expected)
