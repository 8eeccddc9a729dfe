"""Which networks have hidden layers: weights that multiply what comes of weights."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from networks import CASES, case, classifier
from pyro.nn import PyroModule, PyroSample
from reference import normals
from torch import nn

import pyro_scale as ps
from pyro_scale.tuning.hidden_layers import has_hidden_layer

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:.*(performance drop|nested tensors|is_gradient_check)"),
]

ROWS = 12
X, Y = normals(ROWS, 4), normals(ROWS, seed=1)
GROUPS = torch.arange(ROWS) % 3


def is_deep(model, *data):
    log_posterior = ps.LogPosterior(model, ROWS)
    params = log_posterior.init(0, *data)
    return has_hidden_layer(log_posterior, params, log_posterior.bind(data, {}))


def observe(distribution, y):
    with pyro.plate("rows", len(y)):
        pyro.sample("y", distribution, obs=y)


def network_regression(net, call=lambda net, x: net(x)):
    """The mean of a normal, whose noise is a latent, too."""

    def model(x, y):
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        observe(dist.Normal(call(net, x).flatten(), sigma), y)

    return model


@pytest.mark.parametrize("kind", [kind for kind in CASES if "asked" not in kind])
def test_every_architecture_has(kind):
    here = case(kind)
    assert is_deep(classifier(ps.bayesianize(here.net), here.call), *here.data)


# ------------------------------------------------------------------ networks


class Merged(nn.Module):
    """A frozen matrix, to which an adapter of low rank is added."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 1)
        self.a, self.b = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(1, 2))

    def forward(self, x):
        return nn.functional.linear(x, self.base.weight + self.b @ self.a)


class OneUnit(PyroModule):
    """A layer of one unit, and priors by hand."""

    def __init__(self):
        super().__init__()
        self.first, self.last = PyroModule[nn.Linear](4, 1), PyroModule[nn.Linear](1, 1)
        self.first.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 4]).to_event(2))
        self.last.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 1]).to_event(2))

    def forward(self, x, y):
        observe(dist.Normal(self.last(self.first(x)).flatten(), 1.0), y)


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.unflatten(1, (4, 1)))[0][:, -1, 0]


def beside_effects(net):
    """A network beside effects of groups, whose sd is a latent."""

    def model(x, y):
        sd = pyro.sample("sd", dist.HalfNormal(1.0))
        with pyro.plate("groups", 3):
            effects = pyro.sample("effects", dist.Normal(0.0, sd))
        observe(dist.Normal(net(x)[:, 0] + effects[GROUPS[: len(x)]], 1.0), y)

    return model


def three_layers():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))


def two_layers():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


DEEP = {
    "an adapter": lambda: network_regression(ps.bayesianize(Merged(), include=["a", "b"])),
    "a unit": OneUnit,
    "an LSTM in one operation": lambda: network_regression(
        ps.bayesianize(Recurrent(nn.LSTM(1, 1, batch_first=True)).float()),
        lambda net, x: net(x.float()),  # of doubles it has many operations
    ),
    "a recurrent weight alone": lambda: network_regression(
        ps.bayesianize(Recurrent(nn.GRU(1, 2, batch_first=True)), include="*weight_hh*")
    ),
    "effects beside": lambda: beside_effects(ps.bayesianize(two_layers())),
    "a frozen layer between": lambda: network_regression(
        ps.bayesianize(three_layers(), include=["0.weight", "4.weight"])
    ),
}


@pytest.mark.parametrize("kind", DEEP)
def test_a_network_has(kind):
    assert is_deep(DEEP[kind](), X, Y)


# ------------------------------------------------------------------ heads


class Heads(nn.Module):
    """As many outputs as inputs, so that shapes do not tell heads from layers."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.one(x), self.other(x)


def heads(observed):
    net = ps.bayesianize(Heads())

    def model(x, y):
        observe(observed(*net(x)), y)

    return model


def gamma_of(one, other):
    """By shape and mean, whose quotient is the rate."""
    shape, mean = one[:, 0].exp(), other[:, 0].exp()
    return dist.Gamma(shape, shape / mean)


def low_rank(one, other):
    """A covariance of low rank, of what a head gives."""
    factor = other[..., None]
    return dist.LowRankMultivariateNormal(one, factor, torch.ones(4))


class Scaled(nn.Module):
    """A head, and the noise's scale as a weight of the same module."""

    def __init__(self):
        super().__init__()
        self.head, self.log_scale = nn.Linear(4, 1), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.head(x)[:, 0], self.log_scale.exp()


def scaled_network():
    net = ps.bayesianize(Scaled())
    return lambda x, y: observe(dist.Normal(*net(x)), y)


def correlated_effects(net):
    """Effects of groups made of latents by the factor of their covariance."""

    def model(x, y):
        root = pyro.sample("root", dist.LKJCholesky(2, 1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        effects = (z @ root.mT)[GROUPS[: len(x)]]
        observe(dist.Normal(net(x)[:, 0] + (effects * x[:, :2]).sum(1), 1.0), y)

    return model


class Additive(nn.Module):
    """Effects of groups from a table, beside a head."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(3, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(x) + self.table(GROUPS[: len(x)])


BINARY, COUNTS = (Y > 0).double(), torch.arange(ROWS).double()
SHALLOW = {
    "mean": (lambda: network_regression(ps.bayesianize(nn.Linear(4, 1))), Y),
    "logits": (
        lambda: heads(lambda one, _: dist.Bernoulli(logits=one[:, 0])),
        BINARY,
    ),
    "probabilities": (lambda: heads(lambda one, _: dist.Categorical(one.softmax(1))), GROUPS),
    "counts": (lambda: heads(lambda one, _: dist.Poisson(one[:, 0].exp())), COUNTS),
    "mean and scale": (
        lambda: heads(lambda one, other: dist.Normal(one, other.exp()).to_event(1)),
        X,
    ),
    "shape and mean": (lambda: heads(gamma_of), COUNTS + 1),
    "low rank": (lambda: heads(low_rank), X),
    "scale as a weight": (scaled_network, Y),
    "correlated effects beside": (
        lambda: correlated_effects(ps.bayesianize(nn.Linear(4, 1))),
        Y,
    ),
    "effects from a table beside": (lambda: network_regression(ps.bayesianize(Additive())), Y),
    "a last layer": (lambda: network_regression(ps.bayesianize(two_layers(), include="2.*")), Y),
    "half of an adapter": (lambda: network_regression(ps.bayesianize(Merged(), include="b")), Y),
    "biases": (lambda: network_regression(ps.bayesianize(two_layers(), include="*.bias")), Y),
    "a convolution": (
        lambda: network_regression(
            ps.bayesianize(nn.Conv1d(1, 1, 4)), lambda net, x: net(x[:, None])
        ),
        Y,
    ),
    "no network": (lambda: lambda x, y: observe(dist.Normal(hand_written(x), 1.0), y), Y),
}


def hand_written(x):
    """Latents that are no module's weights, whatever they compute."""
    first = pyro.sample("first", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))
    last = pyro.sample("last", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    return torch.tanh(x @ first) @ last


@pytest.mark.parametrize("kind", SHALLOW)
def test_a_head_has_not(kind):
    make, y = SHALLOW[kind]
    assert not is_deep(make(), X, y)


def test_gradients_of_frozen_weights_do_not_count():
    """Nor is the caller's graph touched."""
    frozen, head = nn.Linear(4, 4), ps.bayesianize(nn.Linear(4, 1))
    assert not is_deep(network_regression(head, lambda net, x: net(torch.tanh(frozen(x)))), X, Y)
    assert frozen.weight.grad is None
