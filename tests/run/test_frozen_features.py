"""A frozen base that runs once for every row gives the draws that it gives at every step."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import of_network
from repetitions import each_once, long_but
from runs import EVERY_STEP, QUIET
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pyro_scale as ps
from pyro_scale.model.frozen import NoBase, frozen_base
from pyro_scale.run import frozen_features

N, B = 37, 8
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(N, 2, 6, 6, generator=GENERATOR).double()
SEQUENCE = torch.randn(N, 5, 4, generator=GENERATOR).double()
LABELS = torch.randint(0, 3, (N,), generator=GENERATOR)
COUNTS = torch.randint(0, 9, (N,), generator=GENERATOR)
EXPOSURE = torch.rand(N, generator=GENERATOR).double() + 0.5


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.GRU(4, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class Attention(nn.Module):
    """Sequence first, so that the rows are not in front inside of the network."""

    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x.transpose(0, 1)).mean(0))


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double().eval()


CONVOLUTION = seeded(
    lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
    )
)
NETWORKS = {
    "convolution": (CONVOLUTION, X, "4"),
    "last bias": (CONVOLUTION, X, "4.bias"),
    "recurrent": (seeded(Recurrent), SEQUENCE, "head"),
    "attention": (seeded(Attention), SEQUENCE, "head"),
}


def classifier(net, include="4", rest="frozen"):
    bayesian = ps.bayesianize(net, prior=dist.Normal(0.0, 0.7), include=include, rest=rest)

    return of_network(bayesian, lambda f: dist.Categorical(logits=f))


def counts(exposures=True):
    """Rows of their own in the likelihood, its constant too, besides a global site and a scale."""
    bayesian = ps.bayesianize(CONVOLUTION, include="4")

    def model(x, n, exposure):
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        pyro.sample("known", dist.Normal(shift, 1.0), obs=torch.tensor(0.3).double())
        rate = (bayesian(x)[:, 0] + shift).exp() * exposure
        with pyro.plate("data", len(x)), pyro.poutine.scale(scale=exposure):
            pyro.sample("n", dist.Poisson(rate), obs=n)

    return model


class Rows(Dataset):
    """Read by index; every read is counted, and adds noise of its own if it is asked to."""

    def __init__(self, noisy=False):
        self.noisy = noisy

    def __len__(self):
        return N

    def __getitem__(self, row):
        noise = torch.randn(X[row].shape).double() if self.noisy else 0.0
        return X[row] + noise, LABELS[row]


def left(*args):
    raise NoBase("it is to be left")


def draws(monkeypatch, taken_out, model, data, method=ps.BAOA, settings=None, **kwargs):
    """The fit, and whether a base was taken out."""
    monkeypatch.setattr(frozen_features, "frozen_base", frozen_base if taken_out else left)
    kwargs = {"num_samples": 12, "num_chains": 3, **EVERY_STEP, **QUIET, **kwargs}
    fit = method(model, lr=0.1, compile=False, **(settings or {})).run(data, **kwargs)
    return fit, fit.diagnostics().attrs["frozen_base"].startswith("run once")


def check_same(monkeypatch, model, data, **kwargs):
    fit, found = draws(monkeypatch, True, model, data, **kwargs)
    assert found
    expected, _ = draws(monkeypatch, False, model, data, **kwargs)
    for name, value in expected.get_samples().items():
        torch.testing.assert_close(fit.get_samples()[name], value, rtol=1e-11, atol=1e-11)
    joint = [
        each.to_arviz(log_likelihood=False).sample_stats["lp"].values for each in (fit, expected)
    ]
    torch.testing.assert_close(*map(torch.tensor, joint), rtol=1e-11, atol=1e-11)
    columns = ["gradient_variance", "minibatch_heating"]
    tables = [each.diagnostics() for each in (fit, expected)]
    for column in set(columns) & set(tables[1].columns):
        torch.testing.assert_close(*(torch.tensor(t[column].values) for t in tables))
    return fit


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_draws_are_the_same(monkeypatch, kind):
    net, x, include = NETWORKS[kind]
    check_same(monkeypatch, classifier(net, include), (x, LABELS), batch_size=B)


HOW = [
    {"batch_size": None},
    {"batch_size": N},
    {"batch_size": N - 1},
    {"batch_size": 2},
    {"batch_size": B, "sampling": "replacement"},
    {"batch_size": B, "sampling": "symmetric"},
    {"batch_size": B, "share_batches": True},
    {"batch_size": B, "num_chains": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("how", long_but(HOW, HOW[0], HOW[2], HOW[6]), ids=str)
def test_draws_are_the_same_however_rows_come(monkeypatch, how):
    check_same(monkeypatch, classifier(CONVOLUTION), (X, LABELS), **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "share"), each_once(["rows", "noisy rows", "tensors"], [False, True])
)
def test_draws_are_the_same_from_loaders(monkeypatch, kind, share):
    """Rows that differ at every reading are put through the base at every reading."""
    rows = TensorDataset(X, LABELS) if kind == "tensors" else Rows(kind == "noisy rows")
    loader = DataLoader(rows, batch_size=B, shuffle=True)
    check_same(monkeypatch, classifier(CONVOLUTION), loader, share_batches=share)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", long_but([B, None], B))
def test_draws_are_the_same_where_more_memory_is_needed_than_there_is(monkeypatch, batch_size):
    monkeypatch.setattr(frozen_features, "bytes_of", lambda device: 10)
    check_same(monkeypatch, classifier(CONVOLUTION), (X, LABELS), batch_size=batch_size)


@pytest.mark.slow
def test_what_depends_on_rows_alone_is_counted_once(monkeypatch):
    check_same(monkeypatch, counts(), (X, COUNTS, EXPOSURE), batch_size=B)


@pytest.mark.slow
def test_points_move_as_they_would(monkeypatch):
    """Weights that are estimated are no part of the base: here nothing is."""
    model = classifier(CONVOLUTION, rest="point")
    _, found = draws(monkeypatch, True, model, (X, LABELS), batch_size=B)
    assert not found
    for weight in CONVOLUTION[0].parameters():
        weight.requires_grad_(False)
    try:
        fit = check_same(monkeypatch, classifier(CONVOLUTION, rest="point"), (X, LABELS))
        assert set(fit.params) == {"1.weight", "1.bias"}
    finally:
        CONVOLUTION.requires_grad_(True)


@pytest.mark.parametrize("method", long_but([ps.MAP, ps.VI, ps.IVON], ps.VI))
def test_approximations_are_the_same(monkeypatch, method):
    fits = []
    for taken_out in (frozen_base, left):
        monkeypatch.setattr(frozen_features, "frozen_base", taken_out)
        fit = method(classifier(CONVOLUTION), init_strategy=ps.init_to_module, compile=False)
        fits.append(fit.run((X, LABELS), num_steps=20, batch_size=B, **QUIET).get_samples())
    for name, value in fits[1].items():
        torch.testing.assert_close(fits[0][name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_compiled_it_is_the_same(monkeypatch):
    model, steps = classifier(CONVOLUTION), {"batch_size": B, "num_chains": 2}
    expected, _ = draws(monkeypatch, False, model, (X, LABELS), **steps)
    monkeypatch.setattr(frozen_features, "frozen_base", frozen_base)
    fit = ps.BAOA(model, lr=0.1, compile=True)
    fit.run((X, LABELS), num_samples=12, **EVERY_STEP, **steps, **QUIET)
    assert fit.to_arviz(log_likelihood=False).sample_stats.attrs["program"] == "compiled loop"
    for name, value in expected.get_samples().items():
        torch.testing.assert_close(fit.get_samples()[name], value, rtol=1e-9, atol=1e-9)


def test_the_base_runs_once_for_every_row(monkeypatch):
    rows = []
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    found = {}

    def spied(*args):
        found["base"] = frozen_base(*args)
        forward = found["base"].base.forward

        def counted(*leaves):
            rows.append(len(leaves[0]))
            return forward(*leaves)

        found["base"].base.forward = counted
        return found["base"]

    monkeypatch.setattr(frozen_features, "frozen_base", spied)
    fit = ps.BAOA(classifier(net, "2"), lr=0.1, compile=False)
    fit.run(
        (SEQUENCE[:, 0], LABELS), num_samples=50, num_chains=8, batch_size=B, **EVERY_STEP, **QUIET
    )
    assert sum(rows) == B + -(-N // B) * B  # the first batch besides


class Centered(nn.Module):
    """Rows that depend on the others' mean."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.body(x)
        return self.head(hidden - hidden.mean(0))


class Detached(Centered):
    """The head's own weights, seen once without a gradient."""

    def forward(self, x):
        with torch.no_grad():
            shift = self.head.bias * 2
        return self.head(self.body(x)) - shift


class Branching(Centered):
    def forward(self, x):
        hidden = self.body(x)
        return self.head(hidden if float(hidden.sum()) > 0 else -hidden)


def likelihood(net):
    bayesian = ps.bayesianize(net, include="head")

    model = of_network(bayesian, lambda f: dist.Categorical(logits=f))
    return ps.LogPosterior(model, num_data=len(SEQUENCE))


def cut(build, x, y):
    log_posterior = likelihood(seeded(build))
    params = log_posterior.init(0, x, y)
    return log_posterior, params, frozen_base(log_posterior, params, (x, y))


def test_features_depend_on_their_own_row_alone():
    """All rows are there, so that the model is taken; the cut is before the mean over rows."""
    x, y = SEQUENCE[:, 0], LABELS
    log_posterior, params, found = cut(Centered, x, y)
    features = found.features((x, y))
    assert [tuple(feature.shape) for feature in features] == [(N, 6), (N, 1)]
    order = torch.arange(N - 1, -1, -1) // 2
    for feature, moved in zip(features, found.features((x[order], y[order])), strict=True):
        torch.testing.assert_close(moved, feature[order])
    close = torch.testing.assert_close
    close(found(params, features).log_lik, log_posterior(params, (x, y)).log_lik)


class Clamped(Centered):
    """A scale of the head's own weights without a gradient, which is a constant at the start."""

    def forward(self, x):
        with torch.no_grad():
            size = self.head.weight.norm().clamp(min=6.0)
        return self.head(self.body(x)) / size


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Detached, "params under torch.no_grad"),
        (Clamped, "params under torch.no_grad"),
        (Branching, "cannot be recorded"),
    ],
)
def test_what_a_graph_does_not_know_of_is_left_whole(build, reason):
    with pytest.raises(NoBase, match=reason):
        cut(build, SEQUENCE[:B, 0], LABELS[:B])


@pytest.mark.parametrize("kind", ["numpy", "sorted", "ragged"])
def test_constants_of_the_first_batch_are_not_taken_for_all(monkeypatch, kind):
    """Its rows are of full length, as where data are sorted, or are not."""
    net = ps.bayesianize(
        seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))), include="1"
    )
    short = torch.arange(N) % 3 if kind == "ragged" else (torch.arange(N) >= 2 * B) * 2
    mask = torch.arange(5) < (5 - short)[:, None]

    def model(x, mask, y):
        if kind == "numpy":
            logits = net((x * torch.from_numpy(mask.numpy().copy())[..., None]).sum(1))
        else:  # without the padding
            tokens = net(x[mask][:, None, :])[:, 0]
            logits = tokens.new_zeros(*mask.shape, 3).index_put((mask,), tokens).sum(1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    data = (SEQUENCE, mask, LABELS)
    fit, found = draws(monkeypatch, True, model, data, batch_size=B, num_chains=1)
    assert not found
    expected, _ = draws(monkeypatch, False, model, data, batch_size=B, num_chains=1)
    torch.testing.assert_close(fit.get_samples(), expected.get_samples())


def test_infinite_numbers_among_the_rows_are_features(monkeypatch):
    bias = torch.where(torch.arange(5) < 3, 0.0, -torch.inf).expand(N, 5).double().clone()
    net = ps.bayesianize(
        seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))), include="1"
    )

    def model(x, bias, y):
        outputs = net(x)
        weights = (outputs[..., 0] + bias).softmax(-1)
        logits = (outputs * weights[..., None]).sum(1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    check_same(monkeypatch, model, (SEQUENCE, bias, LABELS), batch_size=B)


def test_networks_without_a_base_are_left_alone():
    x, y = X[:B], LABELS[:B]
    log_posterior = ps.LogPosterior(classifier(CONVOLUTION, include=None), num_data=N)
    params = log_posterior.init(0, x, y)
    assert not log_posterior.model_info.is_frozen
    with pytest.raises(NoBase, match="params come in"):
        frozen_base(log_posterior, params, (x, y))
