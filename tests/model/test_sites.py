"""Every kind of site: its transform, its Jacobian, its gradient, and what it must leave alone."""

import contextlib
import math
from functools import partial

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from densities import initialize, prior_only
from models import normal, of_network, of_rows
from pyro.distributions import constraints
from pyro.infer.reparam import LocScaleReparam, TransformReparam
from pyro.nn import PyroModule, PyroParam, PyroSample
from reference import (
    averaged,
    batches,
    close,
    full_log_joint,
    log_jacobian,
    normals,
    pyro_log_joint,
)
from torch import nn
from torch.distributions import Normal

import pyro_scale as ps
from pyro_scale.model.transforms import CorrelationCholesky

pytestmark = pytest.mark.usefixtures("float64")


def prior_of(model):
    """(log posterior, start) of a model without data."""
    log_posterior = ps.LogPosterior(model)
    return log_posterior, log_posterior.init(0)


# ------------------------------------------------------------------ constrained sites


def lower_triangle(value, offset=0):
    rows, columns = torch.tril_indices(value.shape[-1], value.shape[-1], offset)
    return value[..., rows, columns]


CONSTRAINED = {
    "real": (lambda: dist.Normal(torch.zeros(3), 2.0).to_event(1), None),
    "multivariate": (lambda: dist.MultivariateNormal(torch.ones(2), 2 * torch.eye(2)), None),
    "positive": (lambda: dist.Gamma(2.0, 3.0 * torch.ones(2, 2)).to_event(2), None),
    "positive, unplated batch": (lambda: dist.LogNormal(torch.zeros(3), 0.7), None),
    "lower bound": (lambda: dist.Pareto(2.0, torch.ones(2)).to_event(1), None),
    "interval": (lambda: dist.Uniform(torch.tensor([-1.0, 2.0]), 3.0).to_event(1), None),
    "unit interval": (lambda: dist.Beta(2.0 * torch.ones(2), 3.0).to_event(1), None),
    "simplex": (lambda: dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0, 0.5])), lambda z: z[..., :-1]),
    "two simplices": (
        lambda: dist.Dirichlet(torch.ones(2, 3)).to_event(1),
        lambda z: z[..., :-1],
    ),
    "Cholesky factor of a correlation": (
        lambda: dist.LKJCholesky(4, torch.tensor(1.5)),
        lambda z: lower_triangle(z, -1),
    ),
    "correlation": (lambda: dist.LKJ(3, torch.tensor(1.5)), lambda z: lower_triangle(z, -1)),
    "Cholesky factor": (
        lambda: dist.ImproperUniform(constraints.lower_cholesky, (), (3, 3)),
        lower_triangle,
    ),
    "ordered": (
        lambda: dist.TransformedDistribution(
            dist.Normal(torch.zeros(4), 1.0).to_event(1), dist.transforms.OrderedTransform()
        ),
        None,
    ),
    "ordered, improper": (
        lambda: dist.ImproperUniform(constraints.ordered_vector, (), (3,)),
        None,
    ),
}


@pytest.mark.parametrize("kind", CONSTRAINED)
def test_log_jacobian_is_autograds(kind):
    fn, free = CONSTRAINED[kind]
    log_posterior, params = prior_of(prior_only(fn, "z"))
    value = log_posterior.constrain(params)["z"]
    log_prob = fn().log_prob(value).sum()
    jacobian = log_jacobian(
        log_posterior.constrain, params, lambda name, value: free(value) if free else value
    )
    close(log_posterior(params, ()).log_joint, log_prob + jacobian)
    close(log_posterior(params, ()).log_prior, log_prob + jacobian)
    assert bool(fn().support.check(value).all())
    close(log_posterior.unconstrain({"z": value})["z"], params["z"])


@pytest.mark.parametrize(
    "fn",
    [
        dist.HalfNormal(2.0),
        dist.HalfCauchy(1.0),
        dist.Exponential(3.0),
        dist.Gamma(1.5, 0.5),
        dist.InverseGamma(2.0, 1.0),
        dist.LogNormal(1.0, 0.5),
        dist.Pareto(2.0, 1.5),
        dist.Beta(0.5, 2.0),
        dist.Uniform(-1.0, 3.0),
        dist.TransformedDistribution(dist.Normal(0.0, 1.0), dist.transforms.SigmoidTransform()),
        dist.Dirichlet(torch.tensor([2.0, 0.7])),
        dist.LKJCholesky(2, torch.tensor(2.0)),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_unconstrained_density_integrates_to_one(fn):
    log_posterior, params = prior_of(prior_only(lambda: fn, "z"))
    grid = torch.linspace(-45.0, 45.0, 6001).reshape(-1, *params["z"].shape)
    density = torch.vmap(lambda z: log_posterior({"z": z}, ()).log_joint)(grid).exp()
    close(density.sum() * 90 / 6000, 1.0, tolerance=1e-6)


def uniform_below_a_latent():
    pyro.factor("no data", torch.zeros(()))
    s = pyro.sample("s", dist.Gamma(2.0, 1.0))
    pyro.sample("z", dist.Uniform(0.0, s))


def interval_between_latents():
    pyro.factor("no data", torch.zeros(()))
    low = pyro.sample("s", dist.Normal(0.0, 1.0))
    pyro.sample("z", dist.Uniform(low, low.exp() + low))


@pytest.mark.parametrize(
    "model",
    [
        uniform_below_a_latent,
        interval_between_latents,
        prior_only(lambda: dist.Dirichlet(torch.tensor([2.0, 1.0, 3.0])), "z"),
        prior_only(
            lambda: dist.TransformedDistribution(
                dist.Normal(torch.tensor([0.3, -0.2]), 1.0).to_event(1),
                dist.transforms.OrderedTransform(),
            ),
            "z",
        ),
    ],
    ids=["below", "between", "simplex", "ordered"],
)
def test_unconstrained_density_integrates_to_one_over_the_plane(model):
    log_posterior, params = prior_of(model)
    axis = torch.linspace(-15.0, 15.0, 151)
    points = torch.cartesian_prod(axis, axis)
    if len(params) == 2:
        assert list(params) == ["s", "z"]
        grid = {"s": points[:, 0], "z": points[:, 1]}
    else:
        grid = {"z": points}
    density = torch.vmap(lambda p: log_posterior(p, ()).log_joint)(grid).exp()
    close(density.sum() * 0.2**2, 1.0, tolerance=1e-4)


def test_support_that_depends_on_a_latent_by_hand():
    log_posterior, _ = prior_of(uniform_below_a_latent)
    u, v = torch.tensor(0.4), torch.tensor(-0.8)
    s, share = u.exp(), v.sigmoid()
    close(log_posterior.constrain({"s": u, "z": v})["z"], s * share)
    # Gamma(2, 1) has density s exp(-s), ds/du = s; Uniform(0, s) has 1/s, dz/dv = s share (1-share)
    expected = u - s + u - u + u + share.log() + (1 - share).log()
    close(log_posterior({"s": u, "z": v}, ()).log_joint, expected)
    close(log_posterior.unconstrain({"s": s, "z": s * share})["z"], v)


# ------------------------------------------------------------------ gradients and vmap


def many_latents(x, y, group):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    s = pyro.sample("s", dist.HalfCauchy(1.0))
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    chol = pyro.sample("chol", dist.LKJCholesky(2, torch.tensor(2.0)))
    top = pyro.sample("top", dist.Uniform(0.0, s))
    cuts = pyro.sample(
        "cuts",
        dist.TransformedDistribution(
            dist.Normal(torch.zeros(2), 1.0).to_event(1), dist.transforms.OrderedTransform()
        ),
    )
    with pyro.plate("groups", 3):
        u = pyro.sample("u", dist.Normal(p, s))
        r = pyro.sample("r", dist.Beta(2.0, 2.0))
    pyro.deterministic("total", u.sum())
    with pyro.plate("data", len(x)):
        pyro.sample("rows", dist.MultivariateNormal(w, scale_tril=chol), obs=x)
        pyro.sample("y", dist.Normal(x @ w + u[group], s + r[group] * top), obs=y)
        pyro.sample("z", dist.Normal(cuts[group % 2], 1.0), obs=y)


def rows_of(count):
    return normals(count, 2), normals(count, seed=1), torch.arange(count) % 3


def free_of_many(name, value):
    free = {"p": lambda z: z[:-1], "chol": lambda z: lower_triangle(z, -1)}
    return free.get(name, lambda z: z)(value)


class TestManyLatents:
    def test_log_joint_is_pyros(self):
        log_posterior, params = initialize(many_latents, *batches(rows_of(12), 4)[0], num_data=12)
        jacobian = log_jacobian(log_posterior.constrain, params, free_of_many)
        whole = pyro_log_joint(many_latents, log_posterior.constrain(params), rows_of(12))
        close(averaged(log_posterior, params, rows_of(12), 4), whole + jacobian)

    def test_vmapped_gradients_are_those_one_by_one(self):
        log_posterior = ps.LogPosterior(many_latents, num_data=100)
        batch = rows_of(6)
        chains = [log_posterior.init(seed, *batch) for seed in range(5)]
        stacked = {name: torch.stack([chain[name] for chain in chains]) for name in chains[0]}
        gradient, value = torch.vmap(log_posterior.grad, in_dims=(0, None))(stacked, batch)
        for i, chain in enumerate(chains):
            alone, alone_value = log_posterior.grad(chain, batch)
            assert alone.keys() == chain.keys()
            for name in chain:
                close(gradient[name][i], alone[name], 1e-12)
            for part, alone_part in zip(value, alone_value, strict=True):
                close(part[i], alone_part, 1e-12)

    def test_vmapped_over_batches_too(self):
        log_posterior = ps.LogPosterior(many_latents, num_data=100)
        parts = batches(rows_of(12), 4)
        params = log_posterior.init(0, *parts[0])
        together = tuple(torch.stack(column) for column in zip(*parts, strict=True))
        gradient, _ = torch.vmap(log_posterior.grad, in_dims=(None, 0))(params, together)
        for i, part in enumerate(parts):
            for name, alone in log_posterior.grad(params, part)[0].items():
                close(gradient[name][i], alone, 1e-12)

    def test_gradient_is_the_calls_by_plain_autograd_and_differences(self):
        log_posterior = ps.LogPosterior(many_latents, num_data=100)
        batch = rows_of(6)
        params = log_posterior.init(3, *batch)
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        log_joint = log_posterior(leaves, batch).log_joint
        expected = torch.autograd.grad(log_joint, list(leaves.values()))
        gradient, value = log_posterior.grad(params, batch)
        close(value.log_joint, log_joint.detach(), 1e-12)
        for name, by_autograd in zip(leaves, expected, strict=True):
            close(gradient[name], by_autograd, 1e-12)
            step = 1e-5 * normals(*params[name].shape, seed=2)
            ahead = log_posterior({**params, name: params[name] + step}, batch).log_joint
            behind = log_posterior({**params, name: params[name] - step}, batch).log_joint
            close((ahead - behind) / 2, (gradient[name] * step).sum(), 1e-8)


def test_gradient_is_that_of_a_density_written_by_hand():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 3.0).to_event(1))
        s = pyro.sample("s", dist.Exponential(2.0))
        with pyro.plate("data", 50, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ w, s), obs=y)

    def by_hand(w, u, x, y):
        s = u.exp()
        log_lik = -0.5 * ((y - x @ w) / s) ** 2 - u - 0.5 * math.log(2 * math.pi)
        log_w = (-0.5 * (w / 3) ** 2 - math.log(3) - 0.5 * math.log(2 * math.pi)).sum()
        return log_w + math.log(2) - 2 * s + u + 50 / len(x) * log_lik.sum()

    x, y, _ = rows_of(5)
    w, u = normals(2, seed=3).requires_grad_(), torch.tensor(-0.4, requires_grad=True)
    value = by_hand(w, u, x, y)
    expected = torch.autograd.grad(value, (w, u))
    gradient, evaluation = ps.LogPosterior(model).grad({"w": w.detach(), "s": u.detach()}, (x, y))
    close(evaluation.log_joint, value.detach())
    close(gradient["w"], expected[0])
    close(gradient["s"], expected[1])


def test_gradients_hold_no_graph_of_a_modules_weights():
    # the next position is made of the gradient, so a graph would grow with every step of a run
    net = nn.Linear(2, 1)

    model = of_rows(lambda x, s: dist.Normal(net(x).squeeze(-1), s), s=lambda: dist.HalfNormal(1.0))

    gradient, value = ps.LogPosterior(model, num_data=9).grad(
        {"s": torch.tensor(0.0)}, rows_of(3)[:2]
    )
    assert not gradient["s"].requires_grad
    assert not any(part.requires_grad for part in value)


# ------------------------------------------------------------------ enumeration

PROBS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
PARALLEL = {"enumerate": "parallel"}


def component_means():
    return pyro.sample("m", dist.Normal(torch.zeros(3), 2.0).to_event(1))


def row_mixture(y):
    m = component_means()
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(PROBS), infer=PARALLEL)
        pyro.sample("y", dist.Normal(m[z], 1.0), obs=y)


@pyro.infer.config_enumerate
def mixture_by_config(y):
    m = component_means()
    with pyro.plate("data", 12, subsample_size=len(y)):
        z = pyro.sample("z", dist.Categorical(PROBS))
        pyro.sample("y", dist.Normal(m[z], 1.0), obs=y)


def mixture_without_a_plate(y):
    m = component_means()
    z = pyro.sample("z", dist.Categorical(PROBS.expand(len(y), 3)), infer=PARALLEL)
    pyro.sample("y", dist.Normal(m[z], 1.0), obs=y)


def one_hot_mixture(y):
    m = component_means()
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.OneHotCategorical(PROBS), infer=PARALLEL)
        pyro.sample("y", dist.Normal((m * z).sum(-1), 1.0), obs=y)


def mixture_log_lik(m, y):
    return (PROBS.log() + Normal(m, 1.0).log_prob(y[..., None])).logsumexp(-1)


def means_log_prior(m):
    return Normal(0.0, 2.0).log_prob(m).sum()


@pytest.mark.parametrize(
    "model", [row_mixture, mixture_by_config, mixture_without_a_plate, one_hot_mixture]
)
class TestMixture:
    def test_is_summed_out(self, model):
        m, y = normals(3), normals(12, seed=1)
        log_posterior, _ = initialize(model, y[:4], num_data=12)
        for part in (y[:4], y[4:6], y[:1], y):
            value, log_lik = log_posterior({"m": m}, (part,)), mixture_log_lik(m, part)
            close(value.log_lik, log_lik)
            close(value.log_joint, means_log_prior(m) + 12 / len(part) * log_lik.sum())

    def test_gradient_and_vmap(self, model):
        y, chains = normals(4), normals(5, 3, seed=1)

        def by_hand(m):
            return means_log_prior(m) + 3 * mixture_log_lik(m, y).sum()

        log_posterior, _ = initialize(model, y, num_data=12)
        gradient, _ = torch.vmap(lambda m: log_posterior.grad({"m": m}, (y,)))(chains)
        close(gradient["m"], torch.vmap(torch.func.grad(by_hand))(chains))


def log_lik_at(m, model, *data):
    """Of half of all rows."""
    log_posterior, _ = initialize(model, *data, num_data=2 * len(data[0]))
    return log_posterior({"m": m}, data).log_lik


def test_rows_of_several_observations_share_their_component():
    def model(y):
        m = component_means()
        with pyro.plate("data", len(y), dim=-1):
            z = pyro.sample("z", dist.Categorical(PROBS), infer=PARALLEL)
            with pyro.plate("repeats", 5, dim=-2):
                pyro.sample("y", dist.Normal(m[z], 1.0), obs=y.T)

    m, y = normals(3), normals(4, 5, seed=1)
    log_lik = (PROBS.log() + Normal(m, 1.0).log_prob(y[..., None]).sum(1)).logsumexp(-1)
    close(log_lik_at(m, model, y), log_lik)


def test_a_component_for_each_of_several_columns():
    def model(y):
        m = component_means()
        with pyro.plate("data", len(y), dim=-1), pyro.plate("columns", 5, dim=-2):
            z = pyro.sample("z", dist.Categorical(PROBS), infer=PARALLEL)
            pyro.sample("y", dist.Normal(m[z], 1.0), obs=y.T)

    m, y = normals(3), normals(4, 5, seed=1)
    close(log_lik_at(m, model, y), mixture_log_lik(m, y).sum(-1))


def test_deeper_plates_are_summed_out_first():
    """A component for each row, and within it a sign for each repeat."""

    def model(y):
        m = component_means()
        with pyro.plate("data", len(y), dim=-2):
            a = pyro.sample("a", dist.Categorical(PROBS), infer=PARALLEL)
            with pyro.plate("repeats", 5, dim=-1):
                b = pyro.sample("b", dist.Bernoulli(0.2), infer=PARALLEL)
                pyro.sample("y", dist.Normal(m[a] * (1 - 2 * b), 1.0), obs=y)

    m, y = normals(3), normals(4, 5, seed=1)
    each = [Normal(sign * m, 1.0).log_prob(y[..., None]) for sign in (1, -1)]
    repeat = torch.logaddexp(math.log(0.8) + each[0], math.log(0.2) + each[1])
    log_lik = (PROBS.log() + repeat.sum(1)).logsumexp(-1)
    close(log_lik_at(m, model, y), log_lik)


def test_two_enumerated_sites_of_which_one_depends_on_the_other():
    table = torch.tensor([[0.7, 0.3], [0.1, 0.9], [0.5, 0.5]])

    def model(y):
        m = component_means()
        with pyro.plate("data", len(y)):
            a = pyro.sample("a", dist.Categorical(PROBS), infer=PARALLEL)
            b = pyro.sample("b", dist.Bernoulli(table[a][..., 1]), infer=PARALLEL)
            pyro.sample("y", dist.Normal(m[a] + b, 1.0), obs=y)

    m, y = normals(3), normals(4, seed=1)
    joint = PROBS[:, None] * table
    each = Normal(m[:, None] + torch.arange(2), 1.0).log_prob(y[:, None, None])
    log_lik = (joint.log() + each).flatten(1).logsumexp(1)
    close(log_lik_at(m, model, y), log_lik)


TRANSITION = torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=torch.float64)


def hidden_markov(y, length):
    m = pyro.sample("m", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("data", len(y)):
        z = 0
        for t in pyro.markov(range(y.shape[1])):
            with poutine.mask(mask=t < length):
                z = pyro.sample(f"z_{t}", dist.Categorical(TRANSITION[z]), infer=PARALLEL)
                pyro.sample(f"y_{t}", dist.Normal(m[z], 1.0), obs=y[:, t])


def forward_algorithm(m, y):
    log_alpha = torch.tensor([0.0, -math.inf])
    for value in y:
        log_alpha = (log_alpha[:, None] + TRANSITION.log()).logsumexp(0)
        log_alpha = log_alpha + Normal(m, 1.0).log_prob(value)
    return log_alpha.logsumexp(0)


@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 2, 0]], ids=["full", "masked"])
def test_rows_that_are_hidden_markov_chains(lengths):
    m, y, lengths = normals(2), normals(3, 5, seed=1), torch.tensor(lengths)
    log_posterior, _ = initialize(hidden_markov, y, lengths, num_data=6)
    expected = [forward_algorithm(m, row[:n]) for row, n in zip(y, lengths, strict=True)]
    close(log_posterior({"m": m}, (y, lengths)).log_lik, torch.stack(expected))


def test_long_markov_chains_are_right_or_refused():
    # torch's tensors have 64 dimensions at most, fewer than this chain has states
    m, y, lengths = normals(2), normals(2, 70, seed=1), torch.tensor([70, 70])
    log_posterior = ps.LogPosterior(hidden_markov, num_data=2)
    expected = torch.stack([forward_algorithm(m, row) for row in y])
    with contextlib.suppress(ps.errors.ModelError):
        log_posterior.init(0, y, lengths)
        close(log_posterior({"m": m}, (y, lengths)).log_lik, expected)


@pytest.mark.parametrize("both", [True, False])
def test_masked_rows_of_a_mixture_add_nothing(both):
    def model(y):
        m = component_means()
        with pyro.plate("data", len(y)):
            observed = y > 0
            with poutine.mask(mask=observed if both else torch.tensor(True)):
                z = pyro.sample("z", dist.Categorical(PROBS), infer=PARALLEL)
            with poutine.mask(mask=observed):
                pyro.sample("y", dist.Normal(m[z], 1.0), obs=y)

    m, y = normals(3), normals(8, seed=1)
    close(log_lik_at(m, model, y), mixture_log_lik(m, y) * (y > 0))


def test_weighted_rows_of_a_mixture():
    def model(y, weight):
        m = component_means()
        with pyro.plate("data", len(y)), poutine.scale(scale=weight):
            z = pyro.sample("z", dist.Categorical(PROBS), infer=PARALLEL)
            pyro.sample("y", dist.Normal(m[z], 1.0), obs=y)

    m, y, weight = normals(3), normals(8, seed=1), normals(8, seed=2).exp()
    close(log_lik_at(m, model, y, weight), weight * mixture_log_lik(m, y))


def global_component(y):
    m = component_means()
    z = pyro.sample("z", dist.Categorical(PROBS), infer=PARALLEL)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(m[z], 1.0), obs=y)


@pytest.mark.parametrize("count", [3, 8])
def test_a_global_enumerated_site_is_summed_out_over_the_whole_data(count):
    m, y = normals(3), normals(count, seed=1)
    log_posterior, _ = initialize(global_component, y, num_data=count)
    each = PROBS.log() + Normal(m, 1.0).log_prob(y[:, None]).sum(0)
    close(log_posterior({"m": m}, (y,)).log_joint, means_log_prior(m) + each.logsumexp(0))


def global_component_without_a_plate(x, y):
    m = component_means()
    z = pyro.sample("z", dist.Categorical(PROBS), infer=PARALLEL)
    pyro.sample("y", dist.Normal(m[z] + x, 1.0), obs=y)


@pytest.mark.parametrize("count", [2, 3, 8])
class TestRowsOutsideOfPlates:
    """One component for all rows must never be taken for one a row."""

    def test_a_batch_is_refused(self, count):
        log_posterior = ps.LogPosterior(global_component_without_a_plate, num_data=24)
        with pytest.raises(ps.errors.ModelError, match=r"site '[yz]'.*plate"):
            log_posterior.init(0, normals(count), normals(count, seed=1))

    def test_the_whole_data_are_right_or_refused(self, count):
        m, x, y = normals(3), normals(count, seed=2), normals(count, seed=1)
        each = PROBS.log() + Normal(m, 1.0).log_prob((y - x)[:, None]).sum(0)
        log_posterior = ps.LogPosterior(global_component_without_a_plate, num_data=count)
        with contextlib.suppress(ps.errors.ModelError):  # as Pyro, which wants a plate
            log_posterior.init(0, x, y)
            log_joint = log_posterior({"m": m}, (x, y)).log_joint
            close(log_joint, means_log_prior(m) + each.logsumexp(0))


def test_a_mixture_prior_over_groups_is_counted_once():
    def model(y, group):
        m = component_means()
        with pyro.plate("groups", 4):
            z = pyro.sample("z", dist.Categorical(PROBS), infer=PARALLEL)
            u = pyro.sample("u", dist.Normal(m[z], 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(u[group], 1.0), obs=y)

    m, u, y, group = normals(3), normals(4, seed=1), normals(12, seed=2), torch.arange(12) % 4
    prior = means_log_prior(m) + mixture_log_lik(m, u).sum()
    log_posterior = ps.LogPosterior(model, num_data=12)
    log_posterior.init(0, y[:4], group[:4])  # as many rows as groups
    value = log_posterior({"m": m, "u": u}, (y[:4], group[:4]))
    close(value.log_prior, prior)
    close(value.log_lik, Normal(u[group[:4]], 1.0).log_prob(y[:4]))
    whole = prior + Normal(u[group], 1.0).log_prob(y).sum()
    close(averaged(log_posterior, {"m": m, "u": u}, (y, group), 4), whole)


# ------------------------------------------------------------------ nested plates, reparam


def grouped_effects(x, y, group):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", 3, dim=-2):
        v = pyro.sample("v", dist.Normal(mu, tau))
        with pyro.plate("columns", 2, dim=-1):
            u = pyro.sample("u", dist.Normal(v, tau))
    with pyro.plate("data", len(x), dim=-2), pyro.plate("outputs", 2, dim=-1):
        pyro.sample("y", dist.Normal(u[group] + x, 1.0), obs=y[:, None])


CENTERED = LocScaleReparam(0.0)
REPARAMETRIzED = {
    "as it is": grouped_effects,
    "LocScaleReparam": poutine.reparam(grouped_effects, config={"u": CENTERED, "v": CENTERED}),
    "half LocScaleReparam": poutine.reparam(grouped_effects, config={"u": LocScaleReparam(0.3)}),
}


@pytest.mark.parametrize("kind", REPARAMETRIzED)
@pytest.mark.parametrize("size", [1, 3, 5, 12])
def test_nested_plates_with_group_latents_reparametrized(kind, size):
    model = REPARAMETRIzED[kind]
    log_posterior, params = initialize(model, *batches(rows_of(12), size)[0], num_data=12, seed=1)
    whole = full_log_joint(model, log_posterior, params, rows_of(12))
    close(averaged(log_posterior, params, rows_of(12), size), whole)
    values = log_posterior.constrain(params)
    shown = values | log_posterior.deterministics(params)
    assert {name: shown[name].shape for name in "uv"} == {"u": (3, 2), "v": (3, 1)}
    if kind == "LocScaleReparam":
        close(shown["v"], values["mu"] + values["tau"] * values["v_decentered"])
        close(shown["u"], shown["v"] + values["tau"] * values["u_decentered"])


def test_a_reparametrized_density_is_the_same_density():
    """Its log density differs from the original's by the Jacobian of the map between them."""
    plain = ps.LogPosterior(grouped_effects, num_data=12)
    other = ps.LogPosterior(REPARAMETRIzED["LocScaleReparam"], num_data=12)
    plain.init(0, *rows_of(12))
    params = other.init(0, *rows_of(12))
    values = other.constrain(params) | other.deterministics(params)
    same = plain.unconstrain({name: values[name] for name in plain.latents})
    log_tau = values["tau"].log()
    close(
        other(params, rows_of(12)).log_joint,
        plain(same, rows_of(12)).log_joint + (3 + 6) * log_tau,
    )


def test_transform_reparam_moves_the_jacobian_into_the_base():
    plain = of_rows(lambda s: dist.Normal(0.0, s), s=lambda: dist.LogNormal(0.5, 0.3))

    y = normals(6)
    log_posterior, _ = initialize(plain, y, num_data=6)
    other = ps.LogPosterior(poutine.reparam(plain, config={"s": TransformReparam()}), num_data=6)
    params = other.init(0, y)
    u = params["s_base"]  # Normal(0.5, 0.3): the log, which the library's transform takes too
    close(other.deterministics(params)["s"], u.exp())
    close(other(params, (y,)).log_joint, log_posterior({"s": u}, (y,)).log_joint)


def test_a_learned_centering_is_a_param():
    pyro.clear_param_store()
    model = poutine.reparam(grouped_effects, config={"v": LocScaleReparam()})
    log_posterior, params = initialize(model, *rows_of(12), num_data=12)
    (name,) = log_posterior.points
    assert name == "v_centered"
    assert str(log_posterior.points[name].constraint) == str(constraints.unit_interval)
    whole = full_log_joint(model, log_posterior, params, rows_of(12))
    pyro.clear_param_store()  # Pyro's own run has put it there
    close(averaged(log_posterior, params, rows_of(12), 4), whole)


def test_two_models_conditioned_on_the_outside():
    def unconditioned(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w + b, 1.0))

    def model(x, y):
        return poutine.condition(unconditioned, data={"y": y, "b": torch.tensor(0.7)})(x)

    x, y, _ = rows_of(12)
    log_posterior, params = initialize(model, x[:4], y[:4], num_data=12)
    assert list(params) == ["w"]
    whole = full_log_joint(model, log_posterior, params, (x, y))
    close(averaged(log_posterior, params, (x, y), 4), whole)


def test_rows_with_missing_values_by_a_distribution_that_allows_them():
    model = of_rows(lambda x, w: dist.NanMaskedNormal(x @ w, torch.ones(len(x))), w=normal(2))

    x, y, _ = rows_of(12)
    y[[1, 7]] = math.nan
    log_posterior, params = initialize(model, x[:4], y[:4], num_data=12)
    expected = torch.where(y.isnan(), 0.0, Normal(x @ params["w"], 1.0).log_prob(y.nan_to_num()))
    close(log_posterior(params, (x, y)).log_lik, expected)


# ------------------------------------------------------------------ params and modules


class Regression(PyroModule):
    """Sampled, constrained, free and frozen weights, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = PyroModule[nn.Linear](2, 1)
        self.layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        self.sd = PyroSample(lambda self: dist.LogNormal(self.shift, 1.0))  # of another attribute
        self.norm = PyroModule[nn.BatchNorm1d](2)
        self.shift = nn.Parameter(torch.tensor(0.3))
        self.scale = PyroParam(torch.tensor(0.7), constraint=constraints.positive)
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.norm.running_mean += 0.5
        self.norm.requires_grad_(False)
        self.eval()

    def forward(self, x, y):
        mean = self.scale * self.layer(self.norm(x)).squeeze(-1) + self.frozen
        sd = self.sd  # read outside of the plate, in which it would be a site of the plate's
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(mean, sd), obs=y)


class TestPyroModule:
    x, y, _ = rows_of(12)

    def params(self, log_posterior, module):
        params = log_posterior.init(0, self.x[:4], self.y[:4])
        points = {name: p.unconstrained for name, p in log_posterior.points.items()}
        assert set(points) == {"layer.bias", "shift", "scale"}
        close(points["scale"], math.log(0.7))
        return params | points

    def by_hand(self, p, x, y, module):
        sd, scale = p["sd"].exp(), p["scale"].exp()
        z = (x - 0.5) / (1 + module.norm.eps) ** 0.5
        mean = scale * (z @ p["layer.weight"][0] + p["layer.bias"]) + 2.0
        prior = Normal(0.0, 1.0).log_prob(p["layer.weight"]).sum()
        prior = prior + Normal(p["shift"], 1.0).log_prob(p["sd"])  # Jacobian included
        return prior + 12 / len(x) * Normal(mean, sd).log_prob(y).sum()

    def test_log_joint_and_gradient_are_by_hand_for_latents_and_points(self):
        module = Regression()
        log_posterior = ps.LogPosterior(module, num_data=12)
        params = self.params(log_posterior, module)
        params["shift"] = params["shift"] - 0.9  # moved points must be used, not the module's
        params["layer.bias"] = params["layer.bias"] + 0.4
        params["scale"] = params["scale"] + 0.1
        batch = self.x[:4], self.y[:4]
        gradient, value = log_posterior.grad(params, batch)
        close(value.log_joint, self.by_hand(params, *batch, module))
        expected = torch.func.grad(lambda p: self.by_hand(p, *batch, module))(params)
        for name in params:
            close(gradient[name], expected[name])

    def test_nothing_of_it_is_changed(self):
        pyro.clear_param_store()
        module = Regression()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        needs = {name: value.requires_grad for name, value in module.named_parameters()}
        log_posterior = ps.LogPosterior(module, num_data=12)
        params = self.params(log_posterior, module)
        log_posterior.grad({name: value + 1 for name, value in params.items()}, (self.x, self.y))
        assert module.state_dict().keys() == before.keys()
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert {n: v.requires_grad for n, v in module.named_parameters()} == needs
        assert all(value.grad is None for value in module.parameters())
        assert not any(m.training for m in module.modules())
        assert len(pyro.get_param_store()) == 0

    def test_write_points_puts_constrained_values_into_the_module(self):
        module = Regression()
        log_posterior = ps.LogPosterior(module, num_data=12)
        self.params(log_posterior, module)
        log_posterior.write_points(
            {"scale": torch.tensor(3.0), "shift": torch.tensor(-1.0), "layer.bias": torch.ones(1)}
        )
        close(module.scale.detach(), 3.0)
        close(module.shift.detach(), -1.0)
        close(module.layer.bias.detach(), torch.ones(1))


def test_two_modules_with_weights_of_the_same_name_stay_apart():
    def regression(shift):
        module = Regression()
        module.shift.data += shift
        return module

    x, y, _ = rows_of(4)
    pair = [regression(0.0), regression(5.0)]
    priors = []
    for module in pair:
        log_posterior, params = initialize(module, x, y, num_data=4)
        priors.append(log_posterior({**params, "sd": torch.tensor(0.0)}, (x, y)).log_prior)
    difference = Normal(5.3, 1.0).log_prob(torch.tensor(0.0)) - Normal(0.3, 1.0).log_prob(
        torch.tensor(0.0)
    )
    close(priors[1] - priors[0], difference)


def test_pyro_module_statement_makes_points_of_a_plain_networks_weights():
    pyro.clear_param_store()
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).eval()
    net[0].bias.requires_grad_(False)

    def model(x, y):
        registered = pyro.module("net", net)
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(registered(x).squeeze(-1), s), obs=y)

    x, y, _ = rows_of(6)
    log_posterior, params = initialize(model, x, y, num_data=12)
    points = {name: p.unconstrained for name, p in log_posterior.points.items()}
    weights = {name for name, value in net.named_parameters() if value.requires_grad}
    assert set(points) == {f"net$$${name}" for name in weights}
    gradient, _ = log_posterior.grad(params | points, (x, y))
    s = log_posterior.constrain(params)["s"]
    loss = 2 * Normal(net(x).squeeze(-1), s).log_prob(y).sum()
    for name, expected in zip(
        weights, torch.autograd.grad(loss, [net.get_parameter(n) for n in weights]), strict=True
    ):
        close(gradient[f"net$$${name}"], expected)
    assert len(pyro.get_param_store()) == 0
    assert net[0].bias.requires_grad is False


def with_scale_param(y):
    a = pyro.param("a", torch.tensor(2.0), constraint=constraints.positive)
    m = pyro.sample("m", dist.Normal(0.0, a))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(m, a), obs=y)


@pytest.mark.parametrize("stored", [None, 3.0])
def test_a_param_is_a_point_that_starts_at_the_stores_value(stored):
    pyro.clear_param_store()
    if stored:
        pyro.param("a", torch.tensor(stored), constraint=constraints.positive)
    y = normals(4)
    log_posterior, params = initialize(with_scale_param, y, num_data=12)
    assert list(params) == ["m"]
    start = log_posterior.points["a"].unconstrained
    close(start, math.log(stored or 2.0))

    def by_hand(m, log_a):
        a = log_a.exp()
        return Normal(0.0, a).log_prob(m) + 3 * Normal(m, a).log_prob(y).sum()

    close(log_posterior(params, (y,)).log_joint, by_hand(params["m"], start))
    moved = start + 0.3  # a point has no prior, so no Jacobian either
    gradient, value = log_posterior.grad({**params, "a": moved}, (y,))
    close(value.log_joint, by_hand(params["m"], moved))
    expected = torch.func.grad(by_hand, (0, 1))(params["m"], moved)
    close(torch.stack([gradient["m"], gradient["a"]]), torch.stack(expected))
    close(log_posterior.constrain({**params, "a": moved})["a"], moved.exp())
    assert list(pyro.get_param_store()) == (["a"] if stored else [])
    if stored:
        close(pyro.param("a").detach(), stored)


def test_bayesianized_weights_are_sites_named_as_in_the_module():
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    weights = {name: value.clone() for name, value in net.named_parameters()}
    bayesian = ps.bayesianize(net, prior=dist.Normal(0.0, 0.5))

    model = of_network(bayesian, lambda f: dist.Normal(f.squeeze(-1), 1.0))

    x, y, _ = rows_of(6)
    log_posterior, params = initialize(model, x, y, num_data=18)
    assert list(params) == list(weights)
    for name, value in params.items():  # chain 0 starts at the module's values
        assert torch.equal(value, weights[name].detach())
    prior = sum(Normal(0.0, 0.5).log_prob(value).sum() for value in params.values())
    log_lik = Normal(net(x).squeeze(-1), 1.0).log_prob(y).detach()
    close(log_posterior(params, (x, y)).log_joint, prior + 3 * log_lik.sum())


# ------------------------------------------------------------------ deterministic sites


def test_deterministic_sites_outside_the_datas_plate_are_results():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.deterministic("norm", (w**2).sum())
        with pyro.plate("data", len(x)):
            mean = pyro.deterministic("mean", x @ w)
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    x, y, _ = rows_of(12)
    log_posterior, params = initialize(model, x[:4], y[:4], num_data=12)
    shown = log_posterior.deterministics(params)
    assert list(shown) == ["norm"]
    close(shown["norm"], (params["w"] ** 2).sum())
    whole = full_log_joint(model, log_posterior, params, (x, y))
    close(averaged(log_posterior, params, (x, y), 4), whole)


# ------------------------------------------------------------------ without Pyro


class TestFromFunction:
    y = normals(6)

    @staticmethod
    def per_datum(params, batch):
        (y,) = batch
        prior = -0.5 * (params["m"] ** 2).sum() / 12
        return Normal(params["m"].sum(), 1.0).log_prob(y).mean() + prior

    def test_is_multiplied_by_n(self):
        start = {"m": torch.tensor([0.5, -1.0])}
        log_posterior = ps.LogPosterior.from_function(self.per_datum, start, num_data=12)
        params = log_posterior.init(0, self.y)
        assert torch.equal(params["m"], start["m"])
        value = log_posterior(params, (self.y,))
        expected = 12 / 6 * Normal(-0.5, 1.0).log_prob(self.y).sum() - 0.5 * 1.25
        close(value.log_joint, expected)
        close(value.log_prior + 2 * value.log_lik.sum(), expected)
        gradient, _ = log_posterior.grad(params, (self.y,))
        close(gradient["m"], 2 * (self.y + 0.5).sum() - start["m"])
        assert log_posterior.num_data == 12

    def test_is_unbiased_over_a_partition_and_vmaps(self):
        start = {"m": torch.tensor([0.5, -1.0])}
        log_posterior = ps.LogPosterior.from_function(self.per_datum, start, num_data=12)
        params = log_posterior.init(0, self.y[:2])
        whole = log_posterior(params, (self.y,)).log_joint
        close(averaged(log_posterior, params, (self.y,), 2), whole)
        chains = {"m": normals(4, 2)}
        gradient, _ = torch.vmap(log_posterior.grad, in_dims=(0, None))(chains, (self.y,))
        for m, g in zip(chains["m"], gradient["m"], strict=True):
            close(g, log_posterior.grad({"m": m}, (self.y,))[0]["m"])

    def test_takes_a_dict_by_name(self):
        def fn(params, batch):
            return Normal(params["m"], 1.0).log_prob(batch["y"]).mean()

        start = {"m": torch.tensor(0.0)}
        log_posterior = ps.LogPosterior.from_function(fn, start, num_data=12)
        params = log_posterior.init(0, y=self.y)
        expected = 2 * Normal(0.0, 1.0).log_prob(self.y).sum()
        close(log_posterior(params, {"y": self.y}).log_joint, expected)


# ------------------------------------------------------------------ dtypes and batches


def plain(x, y):
    w = pyro.sample("w", dist.Normal(x.new_zeros(2), x.new_ones(())).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(x.new_ones(())))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, s), obs=y)


def test_float32_data_give_float32_to_its_rounding():
    x, y, _ = rows_of(12)
    wide = ps.LogPosterior(plain, num_data=120)
    params = wide.init(0, x, y)
    narrow = ps.LogPosterior(plain, num_data=120)
    narrow.init(0, x.float(), y.float())
    single = {name: value.float() for name, value in params.items()}
    gradient, value = narrow.grad(single, (x.float(), y.float()))
    expected, expected_value = wide.grad(params, (x, y))
    for part, exact in zip(value, expected_value, strict=True):
        assert part.dtype == torch.float32
        torch.testing.assert_close(part.double(), exact, rtol=1e-5, atol=1e-4)
    for name, exact in expected.items():
        assert gradient[name].dtype == torch.float32
        torch.testing.assert_close(gradient[name].double(), exact, rtol=1e-4, atol=1e-3)


def test_batches_by_position_by_name_and_nested_are_the_same():
    def nested(batch):
        plain(batch["inputs"][0], batch["inputs"][1])

    def with_option(x, y, *, note="", power=1):
        assert note == "as given"
        plain(x**power, y)

    x, y, _ = rows_of(12)
    x, y = x[:4], y[:4]
    expected = None
    for model, batch in [
        (plain, (x, y)),
        (plain, [x, y]),
        (plain, {"y": y, "x": x}),
        (nested, ({"inputs": (x, y)},)),
        (nested, {"inputs": (x, y)}),  # a dict is by name: this model has no such argument
        (with_option, {"x": x, "y": y, "note": "as given", "power": 1}),
    ]:
        log_posterior = ps.LogPosterior(model, num_data=12)
        if model is nested and isinstance(batch, dict):
            with pytest.raises(TypeError, match=r"takes \(batch\)"):
                log_posterior.grad({"w": torch.ones(2), "s": torch.tensor(0.5)}, batch)
            continue
        value = log_posterior({"w": torch.ones(2), "s": torch.tensor(0.5)}, batch)
        expected = expected or value
        for part, same in zip(value, expected, strict=True):
            assert torch.equal(part, same)


def test_init_by_position_and_by_name_is_the_same_draw():
    x, y, _ = rows_of(4)
    draws = [
        ps.LogPosterior(plain, num_data=4).init(7, *args, **kwargs)
        for args, kwargs in [((x, y), {}), ((x,), {"y": y}), ((), {"y": y, "x": x})]
    ]
    for draw in draws[1:]:
        assert all(torch.equal(draw[name], draws[0][name]) for name in draw)
    other = ps.LogPosterior(plain, num_data=4).init(8, x, y)
    assert not torch.equal(other["w"], draws[0]["w"])


# ------------------------------------------------------------------ what is left alone


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("model", [plain, with_scale_param, row_mixture])
def test_no_global_state_is_changed(model, enabled):
    pyro.clear_param_store()
    pyro.param("mine", torch.tensor(3.0), constraint=constraints.positive)
    arguments = rows_of(12)[:2] if model is plain else rows_of(12)[1:2]
    settings = pyro.settings.get()
    with pyro.validation_enabled(enabled):
        flags = pyro.settings.get()
        state = torch.get_rng_state()
        log_posterior, params = initialize(model, *arguments, num_data=12)
        log_posterior.grad(params, arguments)
        torch.vmap(log_posterior.grad, in_dims=(0, None))(
            {name: torch.stack([value, value]) for name, value in params.items()}, arguments
        )
        assert torch.equal(torch.get_rng_state(), state)
        assert pyro.settings.get() == flags
        assert torch.distributions.Normal(0.0, 1.0)._validate_args is enabled
    assert pyro.settings.get() == settings
    store = pyro.get_param_store()
    assert list(store) == ["mine"]
    close(store["mine"].detach(), 3.0)
    assert store._constraints["mine"] is constraints.positive
    assert torch.get_default_dtype() == torch.float64
    pyro.clear_param_store()


def test_state_is_restored_when_the_model_fails():
    pyro.clear_param_store()

    def model(y):
        pyro.factor("no data", torch.zeros(()))
        pyro.param("a", torch.tensor(1.0))
        pyro.sample("m", dist.Normal(0.0, 1.0))
        raise KeyError("the user's own")

    settings, state = pyro.settings.get(), torch.get_rng_state()
    with pytest.raises(KeyError, match="the user's own"):
        ps.LogPosterior(model, num_data=4).init(0, torch.ones(4))
    assert pyro.settings.get() == settings
    assert torch.equal(torch.get_rng_state(), state)
    assert list(pyro.get_param_store()) == []
    assert pyro.poutine.runtime._PYRO_STACK == []


def test_tensors_passed_in_are_not_written_to():
    x, y, _ = rows_of(6)
    before = x.clone(), y.clone()
    log_posterior, params = initialize(plain, x, y, num_data=12)
    kept = {name: value.clone() for name, value in params.items()}
    log_posterior.grad(params, (x, y))
    log_posterior.constrain(params)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    assert all(torch.equal(params[name], kept[name]) for name in kept)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_correlations_map_as_torchs_do_without_masks(n):
    """The same map, inverse and Jacobian, which is the determinant that autograd finds."""
    ours = CorrelationCholesky()
    theirs = torch.distributions.biject_to(constraints.corr_cholesky)
    source = torch.Generator().manual_seed(n)
    x = torch.randn(4, n * (n - 1) // 2, dtype=torch.float64, generator=source) / 2
    y = ours(x)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
    close(y, theirs(x))
    close(ours.inv(y), x)
    close(ours.log_abs_det_jacobian(x, y), theirs.log_abs_det_jacobian(x, y))
    rows, columns = torch.tril_indices(n, n, -1)
    jacobian = torch.func.jacrev(lambda v: ours(v)[rows, columns])(x[0])
    close(torch.linalg.slogdet(jacobian)[1], ours.log_abs_det_jacobian(x[0], y[0]))
    assert ours.forward_shape(x.shape) == y.shape
    assert ours.inverse_shape(y.shape) == x.shape
