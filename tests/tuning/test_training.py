"""Networks and temperature 0 with nothing set: trained starts, and what is said of the draws."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import linear_regression
from models import of_network
from pyro.nn import PyroModule, PyroSample
from reference import double, normals
from repetitions import each_once, long_but
from runs import QUIET
from torch import nn

import pyro_scale as ps
from pyro_scale import kernels
from pyro_scale.errors import FileError, NonFiniteError, VerdictWarning
from pyro_scale.tuning import training
from pyro_scale.tuning.low_rank import steepest_by_products
from pyro_scale.tuning.policy import Training
from pyro_scale.tuning.stable_lr import largest_stable_lr

pytestmark = pytest.mark.usefixtures("float64")

X = normals(200, 3, seed=0)
LABELS = (X[:, 0] * X[:, 1] > 0).long()
NOISE = 0.3
line = linear_regression(NOISE, name="beta")


def relu_classifier():
    torch.manual_seed(0)
    layers = nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 2)
    net = ps.bayesianize(nn.Sequential(*layers))

    return of_network(net, lambda f: dist.Categorical(logits=f))


Y = X @ double(1.0, -0.5, 0.2) + NOISE * normals(200, seed=1)


def nats_from_the_mode(betas):
    """By how much the log density of `line` at Y falls from its mode to these."""
    precision = X.T @ X / NOISE**2 + torch.eye(3)
    away = betas - torch.linalg.solve(precision, X.T @ Y / NOISE**2)
    return ((away @ precision) * away).sum(1) / 2


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", long_but([ps.BAOA, ps.SGLD, ps.SGNHT], ps.BAOA, ps.SGLD))
def test_temperature_0_ends_at_the_mode_with_a_draw_a_chain(method):
    run = method(line, temperature=0).run((X, Y), **QUIET)
    found = run.get_samples()["beta"]
    assert found.shape == (4, 3)
    assert float(nats_from_the_mode(found).max()) < 0.5  # the loss falls by no more
    assert run.report().verdict == "ensemble"
    assert run.report().headline.startswith("ENSEMBLE, not posterior: 4 points")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "batch_size"), each_once([ps.SGHMC, ps.SGLD, ps.SGNHT], [None, 20])
)
def test_at_temperature_0_a_step_size_that_is_set_is_the_optimizers(method, batch_size):
    """It goes to the mode, by its own steps until the loss no longer falls, and then keeps as many
    draws as were asked for; it says what they are."""
    lr = 0.02 if method is ps.SGLD else 0.1
    sampler = method(line, lr=lr, temperature=0, compile=False)
    run = sampler.run((X, Y), num_samples=6, num_chains=2, batch_size=batch_size, **QUIET)
    found = run.get_samples()["beta"]
    assert found.shape == (12, 3)
    # of thousands at the start; batches drawn anew leave 5.5 times a chi square of 3, over 2
    assert float(nats_from_the_mode(found).max()) < (0.5 if batch_size is None else 60)
    assert run.report().verdict == "ensemble"
    assert "2 optimizers at temperature 0, after" in run.report().headline
    assert run.report().choices["step size"] == f"lr={lr}, as it was set"


def test_lengths_that_are_set_stay_so_at_temperature_0():
    """A thinning that is chosen is 1: there is no noise that draws could forget."""

    def beta(**how):
        sampler = ps.BAOA(line, lr=0.1, temperature=0, compile=False)
        run = sampler.run((X, X[:, 0]), num_samples=5, num_chains=2, **how, **QUIET)
        return run.get_samples()["beta"]

    assert torch.equal(beta(warmup_steps=7), beta(warmup_steps=7, thinning=1))
    thinned = beta(warmup_steps=7, thinning=3)
    assert not torch.equal(thinned, beta(warmup_steps=7))


def test_at_temperature_0_a_step_size_that_is_too_long_is_named():
    sampler = ps.BAOA(line, lr=20.0, temperature=0, compile=False)
    with pytest.raises(NonFiniteError, match=r"pass a smaller lr \(lr=20\)"):
        sampler.run((X, X[:, 0]), **QUIET)


@pytest.mark.slow
def test_a_network_is_trained_and_then_sampled_and_called_an_ensemble():
    with pytest.warns(VerdictWarning, match="ENSEMBLE, not posterior: R-hat of 200 training rows"):
        run = ps.BAOA(relu_classifier()).run((X, LABELS), num_samples=200, **QUIET)
    probabilities = run.predict(X, reduce="mean")["y"]
    assert float(ps.metrics.accuracy(probabilities, LABELS)) > 0.95
    assert run.get_samples(group_by_chain=True)["0.weight"].shape[:2] == (4, 200)
    assert "steps of Adam" in run.report().choices["start"]
    assert set(run.summary().verdict) == {"ensemble"}


def binary(*layers):
    """A model of logits, whose network has few weights."""
    torch.manual_seed(0)
    net = ps.bayesianize(nn.Sequential(*layers))

    return of_network(net, lambda f: dist.Bernoulli(logits=f[:, 0]))


def hidden():
    return binary(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.slow
@pytest.mark.long
def test_a_network_of_few_weights_is_trained_if_it_has_a_hidden_layer():
    labels = LABELS.double()
    with pytest.warns(VerdictWarning, match="NOT KNOWN"):
        run = ps.BAOA(hidden()).run((X, labels), max_rows=8_000_000, **QUIET)
    report = run.report()
    checks = {finding.check: finding.verdict for finding in report.findings}
    assert "steps of Adam" in report.choices["start"]
    assert checks["predictions"] == "yes"
    assert "mixing" not in checks  # weights have equivalent modes
    probabilities = run.predict(X, reduce="mean")["y"]
    assert float(((probabilities > 0.5) == labels.bool()).double().mean()) > 0.95


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_head_of_few_weights_is_sampled():
    labels = (X[:, 0] > 0.5 * normals(200, seed=1)).double()
    report = ps.BAOA(binary(nn.Linear(3, 1))).run((X, labels), **QUIET).report()
    assert report.verdict == "yes"
    assert "around the mode" in report.choices["start"]


@pytest.mark.slow
def test_steps_that_are_cheap_are_many(monkeypatch):
    """As many for the first draw as are cheap, and three times as many to the last, where training
    takes fewer."""
    cheap = Training(cheap=512 * 200 * 41)  # steps, rows, weights
    monkeypatch.setattr(training, "TRAINING", cheap)
    how = {"num_samples": 12, **QUIET}
    with pytest.warns(VerdictWarning):
        run = ps.BAOA(hidden(), init_strategy=ps.init_to_module).run((X, LABELS.double()), **how)
    attrs = run.diagnostics().attrs
    assert (attrs["warmup_steps"], attrs["thinning"]) == (512, 3 * 512 / 12)
    assert attrs["trained_steps"] < 512


@pytest.mark.slow
@pytest.mark.long
def test_a_long_warm_up_is_looked_at_in_few_places(monkeypatch):
    """As a look takes as long as thousands of steps of a small network."""
    places = []

    def counted(density, whitening, place):
        places.append(place)
        return steepest_by_products(density, whitening, place)

    monkeypatch.setattr(training, "steepest_by_products", counted)
    how = {"num_samples": 10, "warmup_steps": 1000, "max_rows": 2_000_000, **QUIET}
    with pytest.warns(VerdictWarning):
        run = ps.BAOA(relu_classifier(), init_strategy=ps.init_to_module).run((X, LABELS), **how)
    assert len(places) == 4 + 4 * 4  # chains at their starts, and four times in warm-up
    assert run.diagnostics().attrs["warmup_steps"] == 1000


@pytest.mark.slow
def test_a_start_that_is_given_is_not_trained():
    sampler = ps.BAOA(relu_classifier(), init_strategy=ps.init_to_module)
    run = sampler.run((X, LABELS), num_samples=20, max_rows=200_000, **QUIET)
    assert run.report().choices["start"] == "as it was given"


@pytest.mark.slow
@pytest.mark.long
def test_a_resumed_network_has_the_same_draws_and_does_not_grow(tmp_path):
    how = {"warmup_steps": 100, **QUIET}
    whole = ps.BAOA(relu_classifier()).run((X, LABELS), num_samples=40, checkpoint=tmp_path, **how)
    again = ps.BAOA(relu_classifier()).run((X, LABELS), num_samples=40, resume=tmp_path, **how)
    assert torch.equal(whole.get_samples()["0.weight"], again.get_samples()["0.weight"])
    with pytest.raises(FileError, match="num_samples"):
        ps.BAOA(relu_classifier()).run((X, LABELS), num_samples=80, resume=tmp_path, **how)


@pytest.mark.slow
def test_a_network_whose_chains_agree_in_predictions_is_no_ensemble():
    """600 weights of a linear layer have a Gaussian posterior, 560 directions of it the prior."""
    wide, spread = normals(40, 600, seed=2), 0.05
    y = wide[:, 0] + NOISE * normals(40, seed=3)
    prior = dist.Normal(0.0, spread)
    net = ps.bayesianize(nn.Linear(600, 1, bias=False), prior=prior)

    model = of_network(net, lambda f: dist.Normal(f[:, 0], NOISE))

    run = ps.BAOA(model).run((wide, y), **QUIET)
    report = run.report()
    checked = next(f for f in report.findings if f.check == "predictions")
    assert checked.verdict == "yes", checked.told
    assert report.verdict != "ensemble"
    gram = spread**2 * wide @ wide.T
    gain = torch.linalg.solve(gram + NOISE**2 * torch.eye(40), gram).T
    predicted = run.get_samples()["weight"][:, 0] @ wide.T
    sd = (gram - gain @ gram).diagonal().sqrt()
    away = (predicted.mean(0) - gain @ y) / sd
    assert float(away.abs().max()) < 0.4  # at least 100 effective draws: 4 standard errors
    assert float((predicted.std(0) / sd).log().abs().max()) < 0.3


def units(rows=300):
    """(Columns of which half are in a unit 1,000 times as large, the prior's sds, y, a model)."""
    sds = torch.cat([torch.full((300,), 0.003), torch.full((300,), 3.0)])
    x = normals(rows, 600, seed=4) * 0.05 / sds
    y = x[:, 0] * sds[0] + x[:, 300] * sds[300] + NOISE * normals(rows, seed=5)
    net = nn.Linear(600, 1, bias=False)
    net = ps.bayesianize(net, prior=lambda name, weight: dist.Normal(torch.zeros(1, 600), sds))

    model = of_network(net, lambda f: dist.Normal(f[:, 0], NOISE))
    return x, sds, y, model


@pytest.mark.slow
def test_weights_have_their_posterior_whatever_their_priors_unit():
    """300 rows: trained on batches, sampled on all of them, without minibatches' heat."""
    x, sds, y, model = units()
    run = ps.BAOA(model).run((x, y), **QUIET)
    gram = (x * sds.square()) @ x.T
    gain = torch.linalg.solve(gram + NOISE**2 * torch.eye(len(x)), x * sds.square()).T
    mean, variance = gain @ y, sds.square() - (gain * (x * sds.square()).T).sum(1)
    draws = run.get_samples()["weight"][:, 0]
    away = (draws.mean(0) - mean) / variance.sqrt()
    widths = (draws.std(0) / variance.sqrt()).log()
    for half in (slice(0, 300), slice(300, 600)):
        assert float(away[half].square().mean().sqrt()) < 0.15
        assert float(widths[half].mean().abs()) < 0.03
    assert run.report().choices["geometry"] == "whitened by the prior's sds"


@pytest.mark.slow
@pytest.mark.long
def test_a_batch_size_and_a_friction_that_are_given_are_kept():
    x, _, y, model = units()
    how = {"num_samples": 10, "max_rows": 300_000, **QUIET}
    run = ps.BAOA(model, friction=20.0).run((x, y), batch_size=50, **how)
    attrs = run.diagnostics().attrs
    assert (attrs["batch_size"], attrs["friction"]) == (50, 20.0)
    assert "geometry" not in run.report().choices


class ByHand(PyroModule):
    """A network of 979 weights that are `PyroSample`s of its layers."""

    def __init__(self):
        super().__init__()
        layer = PyroModule[nn.Linear]
        self.first, self.second, self.last = layer(3, 40), layer(40, 19), layer(19, 2)
        for each in (self.first, self.second, self.last):
            for name, weight in list(each.named_parameters()):
                prior = dist.Normal(0.0, 1.0).expand(weight.shape).to_event(weight.dim())
                setattr(each, name, PyroSample(prior))

    def forward(self, x, y=None):
        logits = self.last(self.second(self.first(x).relu()).relu())
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)


@pytest.mark.slow
@pytest.mark.long
def test_a_network_with_priors_by_hand_is_one():
    with pytest.warns(VerdictWarning):
        run = ps.BAOA(ByHand()).run((X, LABELS), num_samples=100, max_rows=2_000_000, **QUIET)
    assert "steps of Adam" in run.report().choices["start"]
    probabilities = run.predict(X, reduce="mean")["y"]
    assert float(ps.metrics.accuracy(probabilities, LABELS)) > 0.95


@pytest.mark.parametrize("precision", [0.01, 3.0, 1e4])
def test_the_largest_stable_step_is_that_of_a_gaussian(precision):
    of_momentum = largest_stable_lr(kernels.BAOA(lr=1.0), precision) * precision**0.5
    without = largest_stable_lr(kernels.SGLD(lr=1.0), precision) * precision
    assert 2 / 1.1 <= of_momentum <= 2 or precision == 0.01  # no more than 10
    assert 2 / 1.1 <= without <= 2 or precision == 0.01


@pytest.mark.slow
def test_training_that_breaks_says_so():
    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        mean = torch.where(weight.abs().sum() > 4, torch.nan, 1.0) * (x @ weight)
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", dist.Normal(mean, NOISE), obs=y)

    start = {"weight": torch.full((4, 3), 1.33)}
    with pytest.raises(NonFiniteError, match="while it was trained: scale the data"):
        ps.BAOA(model, temperature=0, init_strategy=start).run((X, 100 * X[:, 0]), **QUIET)
