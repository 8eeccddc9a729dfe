"""Every way of scaling the likelihood, against Pyro's own density of the whole data.

Each model has the same two latents, and says what one row adds and what is counted once; the
log joint of every batch is then known by hand, and its average over a partition by Pyro.
"""

import math
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from densities import initialize
from models import of_rows
from pyro.infer.autoguide.initialization import init_to_value
from reference import averaged, batches, close, full_log_joint, log_jacobian, pyro_log_joint
from runs import ONE_CHAIN, QUIET
from torch.distributions import Normal

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, ModelError, PlateError, SiteError

pytestmark = pytest.mark.usefixtures("float64")

N, B = 12, 4


def data():
    source = torch.Generator().manual_seed(0)
    kwargs = {"generator": source, "dtype": torch.float64}
    return torch.randn(N, 2, **kwargs), torch.randn(N, **kwargs), torch.rand(N, **kwargs) + 0.5


def latents(x):
    w = pyro.sample("w", dist.Normal(torch.tensor([0.0, 1.0]), 2.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(0.3, 0.5))
    return x @ w, s


# ------------------------------------------------------------------ the models


def declared_plate(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", N, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def indexed_plate(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", N, subsample=torch.arange(len(x))):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def plate_of_the_batch(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def no_plate(x, y, weight):
    mean, s = latents(x)
    pyro.sample("y", dist.Normal(mean, s), obs=y)


def no_plate_broadcast_by_the_data(x, y, weight):
    _, s = latents(x)
    pyro.sample("y", dist.Normal(s, s), obs=y)


def to_event(x, y, weight):
    mean, s = latents(x)
    pyro.sample("y", dist.Normal(mean, s).to_event(1), obs=y)


def to_event_over_rows_and_columns(x, y, weight):
    mean, s = latents(x)
    pyro.sample("y", dist.Normal(mean[:, None], s).expand([len(x), 2]).to_event(2), obs=x)


def columns_in_the_event(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean[:, None], s).expand([len(x), 2]).to_event(1), obs=x)


def columns_in_a_plate(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("columns", 2, dim=-2), pyro.plate("data", len(x), dim=-1):
        pyro.sample("y", dist.Normal(mean, s), obs=x.T)


def rows_left_of_columns(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x), dim=-2), pyro.plate("columns", 2, dim=-1):
        pyro.sample("y", dist.Normal(mean[:, None], s), obs=x)


def scaled_by_hand(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x)), poutine.scale(scale=N / len(x)):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def scaled_by_hand_with_a_tensor(x, y, weight):
    mean, s = latents(x)
    with poutine.scale(scale=torch.tensor(N) / len(x)):
        pyro.sample("y", dist.Normal(mean, s).to_event(1), obs=y)


def own_scale(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x)), poutine.scale(scale=0.5):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def own_scale_that_equals_n_over_b(x, y, weight):
    # equal numbers alone decide nothing: this one does not follow the batch
    mean, s = latents(x)
    with pyro.plate("data", len(x)), poutine.scale(scale=N / B):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def weighted_rows(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x)), poutine.scale(scale=weight):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def weighted_rows_in_a_declared_plate(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", N, subsample_size=len(x)), poutine.scale(scale=weight):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def masked(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x)), poutine.mask(mask=y > 0):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def masked_distribution(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, s).mask(y > 0), obs=y)


def masked_event(x, y, weight):
    mean, s = latents(x)
    pyro.sample("y", dist.Normal(mean, s).mask(y > 0).to_event(1), obs=y)


def factor(x, y, weight):
    mean, s = latents(x)
    pyro.factor("y", Normal(mean, s).log_prob(y))


def factor_in_a_plate(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x)):
        pyro.factor("y", Normal(mean, s).log_prob(y))


def factor_in_a_declared_plate(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", N, subsample_size=len(x)):
        pyro.factor("y", Normal(mean, s).log_prob(y))


def global_factor(x, y, weight):
    mean, s = latents(x)
    pyro.factor("f", -3 * s)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def global_observation(x, y, weight):
    mean, s = latents(x)
    pyro.sample("known", dist.Normal(s, 0.2), obs=torch.tensor(1.5))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def calibration_set_as_large_as_the_batch(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("calibration", B):
        pyro.sample("known", dist.Normal(s, 0.2), obs=torch.arange(B) * 1.0)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def scaled_calibration_set_without_a_plate(x, y, weight):
    mean, s = latents(x)
    with poutine.scale(scale=2.0):
        pyro.sample("known", dist.Normal(s, 0.2).expand([B]).to_event(1), obs=torch.arange(B) * 1.0)
    pyro.sample("y", dist.Normal(mean, s), obs=y)


def two_observations_by_different_hands(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", N, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(mean, s), obs=y)
    pyro.sample("weight", dist.Gamma(s, 1.0), obs=weight)


def group_effects_as_many_as_the_batch(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("groups", B):
        u = pyro.sample("u", dist.Normal(0.0, s))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean + u[(4 * weight).long() % B], s), obs=y)


def tempered_as_a_whole(x, y, weight):
    with poutine.scale(scale=0.25):
        plate_of_the_batch(x, y, weight)


# ------------------------------------------------------------------ what they should give


def normal_rows(x, y, weight, v):
    return Normal(x @ v["w"], v["s"]).log_prob(y)


def columns(x, y, weight, v):
    return Normal((x @ v["w"])[:, None], v["s"]).log_prob(x).sum(-1)


def calibration(v):
    return Normal(v["s"], 0.2).log_prob(torch.arange(B) * 1.0).sum()


@dataclass
class Row:
    """A model and its parts by hand: a row's log likelihood, what is counted once, who scales."""

    model: object
    rows: object = normal_rows
    once: object = lambda v: 0.0
    scaled_by: str = "us"
    prior_scale: float = 1.0


TABLE = [
    Row(declared_plate, scaled_by="Pyro"),
    Row(indexed_plate, scaled_by="Pyro"),
    Row(plate_of_the_batch),
    Row(no_plate),
    Row(no_plate_broadcast_by_the_data, lambda x, y, weight, v: Normal(v["s"], v["s"]).log_prob(y)),
    Row(to_event),
    Row(to_event_over_rows_and_columns, columns),
    Row(columns_in_the_event, columns),
    Row(columns_in_a_plate, columns),
    Row(rows_left_of_columns, columns),
    Row(scaled_by_hand, scaled_by="Pyro"),
    Row(scaled_by_hand_with_a_tensor, scaled_by="Pyro"),
    Row(own_scale, lambda *a: 0.5 * normal_rows(*a)),
    Row(own_scale_that_equals_n_over_b, lambda *a: N / B * normal_rows(*a)),
    Row(weighted_rows, lambda x, y, weight, v: weight * normal_rows(x, y, weight, v)),
    Row(
        weighted_rows_in_a_declared_plate,
        lambda x, y, weight, v: weight * normal_rows(x, y, weight, v),
        scaled_by="Pyro",
    ),
    Row(masked, lambda x, y, weight, v: normal_rows(x, y, weight, v) * (y > 0)),
    Row(masked_distribution, lambda x, y, weight, v: normal_rows(x, y, weight, v) * (y > 0)),
    Row(masked_event, lambda x, y, weight, v: normal_rows(x, y, weight, v) * (y > 0)),
    Row(factor),
    Row(factor_in_a_plate),
    Row(factor_in_a_declared_plate, scaled_by="Pyro"),
    Row(global_factor, once=lambda v: -3 * v["s"]),
    Row(global_observation, once=lambda v: Normal(v["s"], 0.2).log_prob(torch.tensor(1.5))),
    Row(calibration_set_as_large_as_the_batch, once=calibration),
    Row(scaled_calibration_set_without_a_plate, once=lambda v: 2 * calibration(v)),
    Row(
        two_observations_by_different_hands,
        lambda x, y, weight, v: (
            normal_rows(x, y, weight, v) + torch.distributions.Gamma(v["s"], 1.0).log_prob(weight)
        ),
        scaled_by="Pyro",
    ),
    Row(
        group_effects_as_many_as_the_batch,
        lambda x, y, weight, v: normal_rows(x, y - v["u"][(4 * weight).long() % B], weight, v),
        once=lambda v: Normal(0.0, v["s"]).log_prob(v["u"]).sum(),
    ),
    Row(tempered_as_a_whole, lambda *a: 0.25 * normal_rows(*a), prior_scale=0.25),
]
IDS = [row.model.__name__ for row in TABLE]


def prior(v):
    w = Normal(torch.tensor([0.0, 1.0]), 2.0).log_prob(v["w"]).sum()
    return w + torch.distributions.LogNormal(0.3, 0.5).log_prob(v["s"])


@pytest.mark.parametrize("row", TABLE, ids=IDS)
class TestTable:
    def test_every_batch_is_prior_plus_n_over_b_times_its_rows(self, row):
        log_posterior, params = initialize(row.model, *batches(data(), B)[0], num_data=N, seed=1)
        v = log_posterior.constrain(params)
        # s = exp(u), so the log Jacobian is u
        log_prior = row.prior_scale * prior(v) + row.once(v) + params["s"]
        for batch in batches(data(), B) + batches(data(), 1)[:2] + batches(data(), 5):
            value, log_lik = log_posterior(params, batch), row.rows(*batch, v)
            close(value.log_lik, log_lik)
            close(value.log_prior, log_prior)
            close(value.log_joint, log_prior + N / len(log_lik) * log_lik.sum())

    @pytest.mark.parametrize("size", [1, 3, B, 5, N])
    def test_the_average_over_a_partition_is_pyros_density_of_the_whole(self, row, size):
        log_posterior, params = initialize(row.model, *batches(data(), size)[0], num_data=N, seed=2)
        whole = full_log_joint(row.model, log_posterior, params, data())
        close(averaged(log_posterior, params, data(), size), whole)

    def test_explain_says_who_scales(self, row):
        shown = {r["site"]: r for r in ps.explain(row.model, data(), batch_size=B).rows}
        factors = {"us": ("1", "N/B = 3"), "Pyro": ("N/B = 3", "1")}
        assert (shown["y"]["Pyro"], shown["y"]["ours"]) == factors[row.scaled_by]
        for site in shown.keys() - {"y", "weight"}:
            assert (shown[site]["Pyro"], shown[site]["ours"]) == ("1", "1")
        if "weight" in shown:  # the second site on the same rows has its own factor
            assert (shown["weight"]["Pyro"], shown["weight"]["ours"]) == factors["us"]


# ------------------------------------------------------------------ models that subsample


def own_plate(x, y, weight, size=B):
    mean, s = latents(x)
    with pyro.plate("data", N, subsample_size=size) as i:
        pyro.sample("y", dist.Normal(mean[i], s), obs=y[i])


def own_plate_by_subsample(x, y, weight, size=B):
    _, s = latents(x)
    w = pyro.deterministic("w_", torch.ones(2) * s)
    with pyro.plate("data", N, subsample_size=size):
        rows, values = pyro.subsample(x, event_dim=1), pyro.subsample(y, event_dim=0)
        pyro.sample("y", dist.Normal(rows @ w, s), obs=values)


ROWS = data()


def own_plate_without_arguments(size=B):
    own_plate(*ROWS, size=size)


def own_plate_of_weighted_rows(x, y, weight, size=B):
    mean, s = latents(x)
    with pyro.plate("data", N, subsample_size=size) as i, poutine.scale(scale=weight[i]):
        pyro.sample("y", dist.Normal(mean[i], s), obs=y[i])


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (own_plate, data()),
        (own_plate_by_subsample, data()),
        (own_plate_of_weighted_rows, data()),
        (own_plate_without_arguments, ()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_subsamples_takes_the_rows_it_is_given(model, arguments):
    log_posterior, params = initialize(model, *arguments)
    assert log_posterior.num_data == N
    values = log_posterior.constrain(params)
    jacobian = log_jacobian(log_posterior.constrain, params)
    whole = pyro_log_joint(lambda *a: model(*a, size=N), values, arguments) + jacobian

    order = torch.randperm(N, generator=torch.Generator().manual_seed(0)).reshape(-1, B)
    estimates = []
    for index in order:
        value = log_posterior(params, arguments, indices=index)
        estimates.append(value.log_joint)
        given = pyro_log_joint(model, values | {"data": index}, arguments)
        close(value.log_joint, given + jacobian)
        close(value.log_prior + N / B * value.log_lik.sum(), value.log_joint)
    close(torch.stack(estimates).mean(), whole)
    vmapped = torch.vmap(lambda i: log_posterior(params, arguments, indices=i).log_joint)(order)
    close(vmapped, torch.stack(estimates))


def test_indices_are_drawn_without_repetition_if_left_out():
    log_posterior, params = initialize(own_plate, *data())
    values = log_posterior.constrain(params)
    each = normal_rows(*data(), values)
    taken = log_posterior(params, data()).log_lik
    found = (taken[:, None] - each).abs() < 1e-9
    assert found.sum() == B
    assert found.any(0).sum() == B


# ------------------------------------------------------------------ the whole data only


def process(x, y, weight):
    mean, s = latents(x)
    covariance = torch.exp(-(torch.cdist(x, x) ** 2)) + s * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(mean, covariance), obs=y)


def markov_rows(x, y, weight):
    _, s = latents(x)
    before = torch.tensor(0.0)
    for t in pyro.markov(range(len(y))):
        pyro.sample(f"y_{t}", dist.Normal(0.7 * before, s), obs=y[t])
        before = y[t]


def sequential_plate(x, y, weight):
    mean, s = latents(x)
    for i in pyro.plate("data", len(x)):
        pyro.sample(f"y_{i}", dist.Normal(mean[i], s), obs=y[i])


def scalar_factor(x, y, weight):
    mean, s = latents(x)
    pyro.factor("y", Normal(mean, s).log_prob(y).sum())


def mean_factor(x, y, weight):
    mean, s = latents(x)
    pyro.factor("y", Normal(mean, s).log_prob(y).mean())


def scalar_factor_scaled_by_hand(x, y, weight):
    mean, s = latents(x)
    pyro.factor("y", N / len(x) * Normal(mean, s).log_prob(y).sum())


def row_factor_scaled_inside(x, y, weight):
    mean, s = latents(x)
    pyro.factor("y", N / len(x) * Normal(mean, s).log_prob(y))


def batch_statistics(x, y, weight):
    mean, s = latents(x - x.mean(0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def summary_of_the_batch(x, y, weight):
    _, s = latents(x)
    pyro.sample("y", dist.Normal(s, 1.0), obs=y.mean())


def position_in_the_batch(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean + torch.arange(len(x)), s), obs=y)


JOINT = [
    process,
    markov_rows,
    sequential_plate,
    scalar_factor,
    mean_factor,
    scalar_factor_scaled_by_hand,
    row_factor_scaled_inside,
    batch_statistics,
    summary_of_the_batch,
    position_in_the_batch,
]


@pytest.mark.parametrize("model", JOINT)
class TestJointDensity:
    def test_counts_once_with_the_whole_data(self, model):
        log_posterior, params = initialize(model, *data(), num_data=N, seed=3)
        close(
            log_posterior(params, data()).log_joint,
            full_log_joint(model, log_posterior, params, data()),
        )

    def test_is_refused_for_a_batch(self, model):
        log_posterior = ps.LogPosterior(model, num_data=N)
        with pytest.raises(
            PlateError, match=r"(?s)site 'y.*(one value|depends on .* in its batch)"
        ):
            log_posterior.init(3, *batches(data(), B)[0])

    def test_is_refused_for_a_batch_that_comes_later(self, model):
        log_posterior, params = initialize(model, *data(), num_data=N, seed=3)
        with pytest.raises((PlateError, SiteError), match="site 'y"):
            log_posterior(params, batches(data(), B)[0])


# ------------------------------------------------------------------ what is ambiguous


def doubly_scaled(x, y, weight):
    mean, s = latents(x)
    with (
        pyro.plate("data", N, subsample_size=len(x)),
        poutine.scale(scale=N / len(x)),
    ):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def averaged_rows(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x)), poutine.scale(scale=1 / len(x)):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def scaled_for_another_n(x, y, weight):
    mean, s = latents(x)
    with poutine.scale(scale=100 / len(x)):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def weights_normalized_over_the_batch(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x)), poutine.scale(scale=weight / weight.sum()):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def plate_of_another_n(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", 100, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def plate_of_fixed_size(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def scaled_prior(x, y, weight):
    with poutine.scale(scale=len(x) / N):  # as if for a mean of log likelihoods
        mean, s = latents(x)
    pyro.sample("y", dist.Normal(mean, s), obs=y)


def global_factor_in_the_hand_made_scale(x, y, weight):
    mean, s = latents(x)
    with poutine.scale(scale=N / len(x)):
        pyro.factor("f", -3 * s)
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def prior_from_the_batch(x, y, weight):
    mean, s = latents(x)
    b = pyro.sample("b", dist.Normal(y.mean(), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean + b, s), obs=y)


def support_from_the_batch(x, y, weight):
    mean, s = latents(x)
    b = pyro.sample("b", dist.Uniform(y.min(), y.max()))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean + b, s), obs=y)


def columns_subsampled(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x), dim=-2), pyro.plate("columns", 2, subsample_size=1) as j:
        pyro.sample("y", dist.Normal(mean[:, None], s), obs=x[:, j])


def fixed_subsample_size(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", N, subsample_size=3):
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def outer_product_by_mistake(x, y, weight):
    mean, s = latents(x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, s), obs=y[:, None])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (doubly_scaled, "site 'y': plate 'data' already multiplies .* remove the poutine.scale"),
        (averaged_rows, r"site 'y': its poutine.scale changes .*0.25 for 4 rows.*remove it"),
        (scaled_for_another_n, r"site 'y': .*25 for 4 rows.*not N/B \(N = 12\)"),
        (weights_normalized_over_the_batch, "site 'y': .*scale depends on the other rows"),
        (plate_of_another_n, "site 'y': plate 'data' .* 100 rows in all, .*N = 12; write plate"),
        (plate_of_fixed_size, r"plate 'data' .*fixed size 12 .*4 rows: .*subsample_size=len\(x\)"),
        (scaled_prior, "site 'w': a prior must count once, but its scale follows the batch; move"),
        (global_factor_in_the_hand_made_scale, "site 'f': .*must count once.*move it out of"),
        (prior_from_the_batch, "site 'b'.*prior"),
        (support_from_the_batch, "site 'b'.*(prior|support)"),
        (columns_subsampled, "plate 'columns' takes 1 of 2"),
        (fixed_subsample_size, r"plate 'data' takes 3 of 12 .*but 4 .*subsample_size=len\(x\)"),
        (outer_product_by_mistake, r"site 'y'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ambiguous_models_are_refused_with_site_sizes_and_fix(model, message):
    with pytest.raises((PlateError, SiteError), match=f"(?s){message}"):
        ps.LogPosterior(model, num_data=N).init(0, *batches(data(), B)[0])


@pytest.mark.parametrize("model", [plate_of_fixed_size, no_plate])
def test_a_single_row_does_not_hide_a_plate_of_fixed_size(model):
    # in plate("data", N), one row broadcasts to N copies of itself, without an error of Pyro's
    log_posterior, params = initialize(model, *data(), num_data=N)
    row = batches(data(), 1)[0]
    if model is no_plate:
        expected = normal_rows(*row, log_posterior.constrain(params))
        close(log_posterior(params, row).log_lik, expected)
    else:
        with pytest.raises(PlateError, match="subsample_size"):
            log_posterior(params, row)
        with pytest.raises(PlateError, match="subsample_size"):
            ps.LogPosterior(model, num_data=N).init(0, *row)


def test_rows_selected_inside_the_model_are_refused_when_some_are_missing():
    def selected(x, y, weight):
        mean, s = latents(x)
        kept = y < 10
        pyro.sample("y", dist.Normal(mean[kept], s), obs=y[kept])

    x, y, weight = data()
    y[[5, 6, 7]] = 11.0  # leaves one row of the second batch, which would broadcast over B
    log_posterior = ps.LogPosterior(selected, num_data=N)
    first, second, _ = batches((x, y, weight), B)
    params = log_posterior.init(0, *first)
    with pytest.raises(PlateError, match="site 'y'"):
        log_posterior(params, second)


def test_two_self_subsampling_plates_are_refused():
    def model(x, y, weight):
        mean, s = latents(x)
        for name in ("first", "second"):
            with pyro.plate(name, N, subsample_size=B) as i:
                pyro.sample(f"y_{name}", dist.Normal(mean[i], s), obs=y[i])

    with pytest.raises(PlateError, match="plates 'first' and 'second' both subsample"):
        ps.LogPosterior(model).init(0, *data())


def test_n_of_a_self_subsampling_plate_cannot_be_overridden():
    with pytest.raises(PlateError, match="plate 'data' has 12 rows in all, but num_data is 100"):
        ps.LogPosterior(own_plate, num_data=100).init(0, *data())


def test_n_comes_from_a_declared_plate_or_must_be_given():
    batch = batches(data(), B)[0]
    log_posterior, _ = initialize(declared_plate, *batch)
    assert log_posterior.num_data == N
    with pytest.raises(ArgumentError, match="N is unknown: pass num_data"):
        ps.LogPosterior(plate_of_the_batch).init(0, *batch)
    with pytest.raises(ArgumentError, match="num_data=3 is less than the 4 rows"):
        ps.LogPosterior(plate_of_the_batch, num_data=3).init(0, *batch)


def test_temperature_of_the_data_is_theirs_alone():
    """The posterior of a conjugate model: were the prior counted N/B times, or the likelihood
    averaged, its curvature would be another."""

    model = of_rows(lambda m: dist.Normal(m, 2.0), m=lambda: dist.Normal(0.0, 0.5))

    y = data()[1]
    log_posterior, _ = initialize(model, y[:B], num_data=N)
    precision = -torch.func.hessian(lambda m: log_posterior({"m": m}, (y[:B],)).log_joint)(
        torch.tensor(0.3)
    )
    close(precision, 1 / 0.5**2 + N / 2.0**2)
    gradient, value = log_posterior.grad({"m": torch.tensor(0.0)}, (y[:B],))
    close(gradient["m"], N / B * y[:B].sum() / 4)
    expected = -0.5 * math.log(2 * math.pi * 0.25)
    close(value.log_prior, expected)


def test_a_constant_scale_that_equals_n_over_b_is_kept_and_questioned():
    sampler = ps.SGLD(own_scale_that_equals_n_over_b, lr=1e-3)
    with pytest.warns(UserWarning, match="site 'y': .* equals N/B = 3; it is kept.*remove it"):
        sampler.run(data(), batch_size=B, num_samples=1, **ONE_CHAIN, **QUIET)
    warned = ps.explain(own_scale_that_equals_n_over_b, data(), batch_size=B).warnings
    assert len(warned) == 1


def test_a_factor_that_is_zero_where_the_chain_starts_is_not_taken_for_a_constant():
    def model(x, y, weight):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
        pyro.factor("f", -torch.relu(w.sum() - 1) * y.sum())

    init = init_to_value(values={"w": torch.zeros(2, dtype=torch.float64)})
    with pytest.raises(PlateError, match="site 'f'"):
        ps.LogPosterior(model, num_data=N).prepare(batches(data(), B)[0], init)


def own_event(x, y, xb, yb, w):
    pyro.sample("y", dist.Normal(xb @ w, 1.0).to_event(1), obs=yb)


def own_factor(x, y, xb, yb, w):
    pyro.factor("y", dist.Normal(xb @ w, 1.0).log_prob(yb).sum())


def own_prior(x, y, xb, yb, w):
    pyro.sample("y", dist.Normal(yb.mean(), 1.0))


@pytest.mark.parametrize("outside", [own_event, own_factor, own_prior])
def test_what_uses_an_own_subsample_outside_of_its_plate_is_refused(outside):
    def model(x, y, weight):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with pyro.plate("data", N, subsample_size=B) as i:
            xb, yb = x[i], y[i]
            pyro.sample("z", dist.Normal(xb @ w, 1.0), obs=yb)
        outside(x, y, xb, yb, w)

    with pytest.raises(PlateError, match="site 'y'"):
        ps.LogPosterior(model).init(0, *data())


def test_rows_of_an_own_subsample_that_mix_are_refused():
    def model(x, y, weight):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with pyro.plate("data", N, subsample_size=B) as i:
            pyro.sample("y", dist.Normal((x[i] - x[i].mean(0)) @ w, 1.0), obs=y[i])

    with pytest.raises(PlateError, match="site 'y'"):
        ps.LogPosterior(model).init(0, *data())


@pytest.mark.parametrize("offset", [10.0, 1e3, 1e4])
def test_rows_that_mix_are_found_in_float32_beside_large_values(offset):
    x, y, _ = (rows.float() for rows in data())

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2).float(), 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(torch.tensor(0.0).float(), 1000.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(b + (x - x.mean(0)) @ w, 1.0), obs=y)

    with pytest.raises(PlateError, match="site 'y'"):
        ps.LogPosterior(model, num_data=N).init(0, x[:B], y[:B] + offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_of_float32_latents_is_no_mixing_in_float64(dtype):
    """A product of matrices is rounded as its size has it; of float64 latents so much is none."""

    def model(x, y, weight):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=dtype), 1.0).to_event(1))
        rounding = 1e-7 * len(x)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal((x.to(dtype) @ w + rounding).double(), 1.0), obs=y)

    posterior = ps.LogPosterior(model, num_data=N)
    if dtype is torch.float32:
        posterior.init(0, *batches(data(), B)[0])
    else:
        with pytest.raises(PlateError, match="site 'y'"):
            posterior.init(0, *batches(data(), B)[0])


def test_rows_that_mix_only_away_from_the_start_are_refused():
    def model(x, y, weight):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal((x - x.mean(0)) @ w, 1.0), obs=y)

    init = init_to_value(values={"w": torch.zeros(2, dtype=torch.float64)})
    with pytest.raises(PlateError, match="site 'y'"):
        ps.LogPosterior(model, num_data=N).prepare(batches(data(), B)[0], init)


@pytest.mark.parametrize("size", [B, N])
def test_a_column_against_a_row_is_refused_whatever_the_batch(size):
    def model(x, y, weight):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 1), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    with pytest.raises(PlateError, match=r"site 'y': .*\[B, 1\].*squeeze"):
        ps.LogPosterior(model, num_data=N).init(0, *batches(data(), size)[0])


@pytest.mark.parametrize("value", [lambda p, b: p["w"].expand(3), lambda p, b: None])
def test_a_function_that_is_no_scalar_is_refused(value):
    log_posterior = ps.LogPosterior.from_function(value, {"w": torch.tensor(1.0)}, num_data=9)
    with pytest.raises(ModelError, match="per datum, a scalar"):
        log_posterior.init(0, torch.zeros(3))
