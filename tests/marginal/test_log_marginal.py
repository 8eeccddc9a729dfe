"""The integrated log density, its gradients and biases, against closed forms and dense grids."""

import math

import integrals
import pyro
import pyro.distributions as dist
import pytest
import torch
from integrals import COUNTS, DISCRETE, GAUSSIAN, OTHER_PRIORS, Integral, Searched
from pyro import poutine

from pyro_scale.core import rows
from pyro_scale.marginal.grouped import Grouped
from pyro_scale.marginal.integrated import Integrated
from pyro_scale.model.log_posterior import LogPosterior

pytestmark = pytest.mark.usefixtures("float64")
#: Largest error of a member's log marginal in nats with 31 nodes, and largest relative error of
#: the gradient, at the nodes' place and away from it. Others: 1e-5.
ROUGH = {"gamma": 1e-3, "beta": 1e-3, "student": 5e-2}
#: Models whose integrals are of two dimensions, or whose grids take seconds.
LONG = {"two_latents", "chained", "item_response", "student", "occupancy", "slopes"}


def marked(cases):
    return [
        pytest.param(case, marks=[pytest.mark.slow] if case.__name__ in LONG else [])
        for case in cases
    ]


def check(case, away, tol, count=31):
    integral = Integral(case.model, case.data, case.at)
    for factor, shift in away:
        value, slope = integral.errors(case.truth, case.away(factor, shift), count)
        assert value < tol, (factor, shift)
        assert slope < tol, (factor, shift)


@pytest.mark.parametrize("make", marked(GAUSSIAN))
def test_gaussian_models_are_exact(make):
    """With 5 nodes where these are placed, with 31 anywhere."""
    case = make()
    check(case, [(1.0, 0.0)], 1e-11, count=5)
    check(case, [(1.2, 0.1), (0.5, -0.2), (2.0, 0.2)], 2e-6)


@pytest.mark.parametrize("make", marked(COUNTS + OTHER_PRIORS))
def test_log_marginals_are_those_of_a_dense_grid(make):
    tol = ROUGH.get(make.__name__, 1e-5)
    check(make(), [(1.0, 0.0), (1.2, 0.1), (0.5, -0.2), (2.0, 0.2)], tol)


@pytest.mark.parametrize("make", marked(DISCRETE))
def test_log_marginals_with_a_coin_a_row(make):
    """These rows are not log-concave, so that nodes are right near their place only."""
    check(make(), [(1.0, 0.0), (1.2, 0.1), (0.5, -0.2)], 1e-5)


def test_observations_of_a_row_that_share_a_coin():
    torch.manual_seed(0)
    coin = (torch.rand(40) < 0.6).double()
    x, y = 2 * coin + torch.randn(40), torch.poisson((1 + 0.4 * torch.randn(40)).exp())

    def model(x, y):
        b, tau = pyro.sample("b", dist.Normal(0.0, 2.0)), integrals._scale()
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, tau))
            coin = pyro.sample("coin", dist.Bernoulli(0.6), infer={"enumerate": "parallel"})
            pyro.sample("x", dist.Normal(2 * coin, 1.0), obs=x)
            pyro.sample("y", dist.Poisson((b + 0.2 * coin + z).exp()), obs=y)

    def truth(b, tau):
        def log_lik(u):
            parts = []
            for value, share in [(0.0, 0.4), (1.0, 0.6)]:
                rate = (b + 0.2 * value + tau * u).exp()
                of_x = dist.Normal(2 * value, 1.0).log_prob(x)
                parts.append(math.log(share) + of_x + dist.Poisson(rate).log_prob(y))
            return torch.logaddexp(*parts)

        return integrals.over_grid(log_lik)

    case = integrals.Case(model, (x, y), integrals.tensors(b=1.0, tau=0.4), truth)
    check(case, [(1.0, 0.0), (1.2, 0.1)], 1e-6)


def test_a_mode_beyond_a_flat_stretch_is_found():
    """At zero the log density rises steeply and hardly bends, so that a Newton step goes 40 times
    too far."""
    y = torch.tensor([1.0, 3.0])

    def model(y):
        b = pyro.sample("b", dist.Normal(0.0, 10.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Poisson((b + 20 * z).exp()), obs=y)

    def truth(b):
        return integrals.over_grid(lambda u: dist.Poisson((b + 20 * u).exp()).log_prob(y))

    check(integrals.Case(model, (y,), integrals.tensors(b=-10.0), truth), [(1.0, 0.0)], 1e-3)


@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0, 10.0, 30.0])
def test_eight_schools_for_any_tau(tau):
    case = integrals.eight_schools()
    integral = Integral(case.model, case.data, case.at)
    value, slope = integral.errors(case.truth, case.at | {"tau": torch.tensor(tau)}, 5)
    assert value < 1e-11
    assert slope < 1e-9


@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0, 10.0, 30.0])
def test_random_intercepts_for_any_tau(tau):
    """With the residual sd at the anchor's, the rows' likelihood is the one that was expanded."""
    case = integrals.intercepts()
    integral = Integral(case.model, case.data, case.at)
    value, _ = integral.errors(case.truth, case.at | {"tau": torch.tensor(tau)}, 5)
    assert value < 1e-10
    near = {"tau": torch.tensor(tau), "s": case.at["s"] * 1.05}
    value, _ = integral.errors(case.truth, case.at | near, 5)
    assert value < 1e-3


@pytest.mark.parametrize("count", [8, 30, 1000])
def test_effects_that_are_truly_zero(count):
    case = integrals.truly_zero(count)
    integral = Integral(case.model, case.data, case.at)
    for tau in (1e-3, 0.01, 0.1, 1.0):
        value, slope = integral.errors(case.truth, case.at | {"tau": torch.tensor(tau)}, 5)
        assert value < 1e-10
        assert slope < 1e-8


def test_errors_fall_with_the_number_of_nodes():
    case = integrals.poisson()
    integral = Integral(case.model, case.data, case.at)
    errors = [integral.errors(case.truth, case.at, count)[0] for count in (3, 5, 9, 15, 31)]
    for more, less in zip(errors[1:], errors, strict=False):
        assert more < less / 3


# ------------------------------------------------------------------ as in a run


@pytest.mark.parametrize(
    "make",
    [
        integrals.logistic,
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in GAUSSIAN + COUNTS + DISCRETE
            if case is not integrals.logistic
        ),
    ],
)
def test_a_run_has_the_integral(make):
    """At the anchor the chosen number of nodes is off by what is predicted; with 31 nodes, the log
    density is exact around it."""
    case = make()
    searched = Searched(case.model, case.data)
    bias = searched.anchor.bias
    assert bias.is_small
    value, slope = searched.errors(case.truth, searched.around(0.0))
    assert float(slope.abs().max()) < 0.05
    # rows with a coin are not log-concave, and nodes less exact away from the anchor
    tol, radii = (0.05, (1.0, 2.0)) if make in DISCRETE else (1e-3, (1.0, 2.0, 3.0))
    for radius in radii:
        value, slope = searched.errors(case.truth, searched.around(radius), 31)
        assert abs(value) < tol
        assert float(slope.abs().max()) < tol


def test_the_log_joint_has_the_priors_of_the_globals():
    case = integrals.poisson()
    searched = Searched(case.model, case.data)
    log_posterior = searched.log_posterior(61)
    position = searched.around(1.0)
    params = searched.anchor.layout.unflatten(position)
    evaluation = log_posterior(params, searched.arguments)
    b, log_tau = params["b"], params["tau"]
    log_prior = torch.distributions.Normal(0.0, 2.5).log_prob(b).sum()
    log_prior = log_prior + torch.distributions.Normal(-0.5, 1.0).log_prob(log_tau)
    truth = case.truth(b, log_tau.exp())
    torch.testing.assert_close(evaluation.log_prior, log_prior)
    torch.testing.assert_close(evaluation.log_lik, truth)
    torch.testing.assert_close(evaluation.log_joint, log_prior + truth.sum())


@pytest.mark.parametrize(
    "make", [integrals.poisson, pytest.param(integrals.gamma, marks=pytest.mark.slow)]
)
def test_the_predicted_bias_is_the_true_one(make):
    """Bias of the mode with K nodes, by the exact gradient there; of sds, by the exact Hessian."""
    case = make()
    searched = Searched(case.model, case.data)
    anchor, position = searched.anchor, searched.around(0.0)

    def hessian(count):
        log_posterior = searched.log_posterior(count)

        def log_joint(position):
            params = anchor.layout.unflatten(position)
            return log_posterior(params, searched.arguments).log_joint

        return -torch.func.hessian(log_joint)(position), torch.func.grad(log_joint)(position)

    (own, slope), (true, true_slope) = hessian(None), hessian(101)
    covariance = torch.linalg.inv(true)
    sds = covariance.diagonal().sqrt()
    means = torch.linalg.solve(own, slope - true_slope) / sds
    ratio = torch.linalg.inv(own).diagonal().sqrt() / sds - 1
    largest = float(means.abs().max())
    torch.testing.assert_close(anchor.bias.means, means, rtol=0.1, atol=0.05 * largest)
    largest = float(ratio.abs().max())
    torch.testing.assert_close(anchor.bias.sds, ratio, rtol=0.1, atol=0.1 * largest)


# ------------------------------------------------------------------ groups that share units


def test_groups_of_unlike_lengths_share_units():
    """Groups of 1 to 200 rows: the log marginal of each, and of each unit."""
    case = packed()
    integral = Integral(case.model, case.data, case.at)
    slots = integral.source.slots
    assert slots.shape[1] > 1
    for away in ((1.0, 0.0), (1.2, 0.1)):
        value, slope = integral.errors(case.truth, case.away(*away), 31)
        assert value < 1e-9
        assert slope < 1e-9
    truth = torch.cat([case.truth(**case.at), torch.zeros(1)])  # a slot without a group has -1
    log_posterior = LogPosterior(Integrated(integral.local, 9, is_far=True), len(slots))
    params = {"b": case.at["b"], "tau": case.at["tau"].log(), "s": case.at["s"].log()}
    units = log_posterior(params, (integral.units, integral.modes)).log_lik
    torch.testing.assert_close(units, truth[slots].sum(1))


def packed():
    """Two groups have 200 rows, 60 others 1 to 12."""
    torch.manual_seed(0)
    lengths = torch.cat([torch.tensor([200, 187]), torch.randint(1, 13, (60,))])
    return integrals.intercepts(len(lengths), 0.4, lengths=lengths)


def test_batches_of_units_estimate_the_total():
    """Each unit in one of the batches: their mean of N / B times the sum is the total."""
    case = packed()
    searched = Searched(case.model, case.data)
    log_posterior = searched.log_posterior()
    params = searched.anchor.layout.unflatten(searched.around(1.0))
    whole, count = log_posterior(params, searched.arguments), searched.num_units
    size = next(size for size in (4, 3, 2, 5, 1) if count % size == 0)
    estimates = [
        log_posterior(params, rows.take(searched.arguments, part)).log_joint
        for part in torch.randperm(count).split(size)
    ]
    torch.testing.assert_close(torch.stack(estimates).mean(), whole.log_joint)


# ------------------------------------------------------------------ masks and scales


@pytest.mark.parametrize("whole_group", [False, True])
def test_masked_rows_count_for_nothing(whole_group):
    case = integrals.intercepts()
    x, group, y = case.data.rows
    kept = group != 3 if whole_group else torch.arange(len(x)) % 3 > 0

    def masked(x, group, y, kept):
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 2.5).to_event(1))
        tau = pyro.sample("tau", dist.LogNormal(-0.5, 1.0))
        s = pyro.sample("s", dist.LogNormal(-0.5, 1.0))
        with pyro.plate("groups", 40):
            z = pyro.sample("z", dist.Normal(0.0, tau))
        with pyro.plate("rows", len(x)), poutine.mask(mask=kept):
            pyro.sample("y", dist.Normal(b[0] + b[1] * x + z[group], s), obs=y)

    some = Integral(masked, Grouped((x, group, y, kept), by=1), case.at)
    labels = torch.unique(group[kept])
    fewer = Grouped((x[kept], group[kept], y[kept]), by=1)
    for values in (case.at, case.away(1.2, 0.1)):
        own = some.log_marginal(values, 31)
        expected = torch.zeros(40)
        expected[labels] = gaussian_truth(*fewer.rows, fewer.num_groups, values)
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def gaussian_truth(x, group, y, count, values):
    """By the density of each group's rows."""
    result = []
    for member in range(count):
        own = group == member
        cov = values["s"] ** 2 * torch.eye(int(own.sum())) + values["tau"] ** 2
        fn = dist.MultivariateNormal(values["b"][0] + values["b"][1] * x[own], cov)
        result.append(fn.log_prob(y[own]))
    return torch.stack(result)


def test_a_scale_of_rows_multiplies_their_likelihood_under_the_integral():
    """A row of weight 2 is two rows with one latent."""
    case = integrals.poisson()
    x, y = case.data

    def model(x, y):
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 2.5).to_event(1))
        tau = pyro.sample("tau", dist.LogNormal(-0.5, 1.0))
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, tau))
            with poutine.scale(scale=2.0):
                pyro.sample("y", dist.Poisson((b[0] + b[1] * x + z).exp()), obs=y)

    def truth(b, tau):
        return integrals.over_grid(
            lambda u: 2 * dist.Poisson((b[0] + b[1] * x + tau * u).exp()).log_prob(y)
        )

    integral = Integral(model, (x, y), case.at)
    for values in (case.at, case.away(1.2, 0.1)):
        value, slope = integral.errors(truth, values, 31)
        assert value < 1e-6
        assert slope < 1e-6
