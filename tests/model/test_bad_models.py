"""What no model may do: refused by name, with the fix, before any step is taken."""

import contextlib
import math
import random

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from densities import initialize, linear_regression, weights
from pyro.nn import PyroModule, PyroSample
from runs import ONE_CHAIN, QUIET
from torch import nn

import pyro_scale as ps
from pyro_scale.engine.step import Engine
from pyro_scale.errors import ArgumentError, ModelError, PlateError, SiteError

pytestmark = pytest.mark.usefixtures("float64")

N, B = 12, 4
ONE_STEP = {**ONE_CHAIN, **QUIET, "num_samples": 1}
PARALLEL = {"enumerate": "parallel"}


def random_rows(count):
    source = torch.Generator().manual_seed(0)
    x = torch.randn(count, 2, generator=source, dtype=torch.float64)
    return x, torch.randn(count, generator=source, dtype=torch.float64)


# ------------------------------------------------------------------ latents


def nothing_latent(x, y):
    pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


def local_latent_without_a_plate(x, y):
    e = pyro.sample("e", dist.Normal(torch.zeros(len(x)), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(x @ weights() + e, 1.0), obs=y)


def observation_forgotten(x, y):
    w = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("e", dist.Normal(x @ w, 1.0), obs=None)


class SiteReadInsideThePlate(PyroModule):
    def __init__(self):
        super().__init__()
        self.e = PyroSample(dist.Normal(0.0, 1.0))

    def forward(self, x, y):
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(self.e, 1.0), obs=y)


def discrete(fn, infer):
    def model(x, y):
        weights()
        k = pyro.sample("k", fn(), infer=infer)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(1.0 * k, 1.0), obs=y)

    return model


def discrete_observation_forgotten(x, y):
    w = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("k", dist.Bernoulli(logits=x @ w), obs=None)


def shape_from_the_batch(x, y):
    groups = 2 * len(x)
    with pyro.plate("groups", groups):
        u = pyro.sample("u", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(u[: len(x)], 1.0), obs=y)


def groups_counted_in_the_batch(x, y):
    count = int((y > y[0]).sum()) + 1
    u = pyro.sample("u", dist.Normal(torch.zeros(count), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(u.sum(), 1.0), obs=y)


def latent_for_some_batches(x, y):
    w = weights()
    if len(x) < B:
        pyro.sample("extra", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def one_name_twice(x, y):
    weights()
    for _ in range(2):
        pyro.sample("twice", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


def delta_for_a_deterministic(x, y):
    mean = pyro.sample("mean", dist.Delta(x @ weights()).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def latent_of(fn):
    def model(x, y):
        v = pyro.sample("v", fn())
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(v.sum(), 1.0), obs=y)

    return model


def support_from_an_enumerated_site(x, y):
    z = pyro.sample("z", dist.Bernoulli(0.5), infer=PARALLEL)
    u = pyro.sample("u", dist.Uniform(torch.zeros(()), 1 + z))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(u, 1.0), obs=y)


# ------------------------------------------------------------------ enumeration


def enumerated_over_all_rows(x, y):
    z = pyro.sample("z", dist.Bernoulli(0.5), infer=PARALLEL)
    w = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w + z, 1.0), obs=y)


def enumerated_in_another_plate(x, y):
    w = weights()
    with pyro.plate("groups", 3, dim=-2):
        z = pyro.sample("z", dist.Bernoulli(0.5), infer=PARALLEL)
    with pyro.plate("data", len(x), dim=-1):
        pyro.sample("y", dist.Normal(x @ w + z, 1.0), obs=y)


def enumerated_values_moved_into_a_plates_dimension(x, y):
    w = weights()
    with pyro.plate("groups", 3, dim=-2):
        z = pyro.sample("z", dist.Bernoulli(0.5), infer=PARALLEL)
    with pyro.plate("data", len(x), dim=-1):
        pyro.sample("y", dist.Normal(x @ w + z.sum(-2), 1.0), obs=y)


def enumerated_sites_of_different_scales(x, y):
    w = weights()
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.5), infer=PARALLEL)
        with poutine.scale(scale=0.5):
            pyro.sample("y", dist.Normal(x @ w + z, 1.0), obs=y)


# ------------------------------------------------------------------ values that break


def nan_in_the_likelihood(x, y):
    mean = x @ weights()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean / (x[:, 0] - x[:, 0]), 1.0), obs=y)


def infinite_factor(x, y):
    weights()
    pyro.factor("f", torch.tensor(-math.inf))
    pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


def nan_in_a_prior(x, y):
    weights()
    pyro.sample("v", dist.Normal(math.nan, 1.0))
    pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


def negative_counts(x, y):
    rate = weights().exp().sum()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Poisson(rate), obs=-y.abs().round() - 1)


def class_out_of_range(x, y):
    logits = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Categorical(logits=logits), obs=torch.full((len(x),), 3))


# ------------------------------------------------------------------ modules and randomness


RECURRENT = nn.GRU(2, 2, num_layers=2, dropout=0.5).double()


def noisy_labels(x, y):
    w = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y + 0.1 * torch.randn(len(y)))


def seldom_noisy(x, y):
    # one draw in a thousand differs, so that comparing a few evaluations rarely sees it
    w = weights()
    flip = (torch.rand(len(x)) < 1e-3).double()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w + flip, 1.0), obs=y)


def noise_from_python(x, y):
    w = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w + random.random(), 1.0), obs=y)


def branches_on_a_latent(x, y):
    w = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w if w.sum() > 0 else x @ -w, 1.0), obs=y)


def branches_on_the_data(x, y):
    w = weights()
    sign = 1.0 if y.sum() > -100 else -1.0
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(sign * x @ w, 1.0), obs=y)


LSTM = nn.LSTM(2, 2, batch_first=True).double()  # vmap has no rule for it
BAYESIAN_LSTM = ps.bayesianize(LSTM)


def weights_of_an_lstm(x, y):
    features, _ = BAYESIAN_LSTM(x[:, None])
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(features[:, 0, 0], 1.0), obs=y)


BAD = {
    "no latent": (nothing_latent, ModelError, "no latent site.*nothing to infer"),
    "local latent, no plate": (
        local_latent_without_a_plate,
        SiteError,
        "site 'e': .*one for every row.*marginalize",
    ),
    "observation forgotten": (
        observation_forgotten,
        ModelError,
        "no observed site and no factor.*site 'e' in plate 'data'",
    ),
    "PyroSample read inside the plate": (
        SiteReadInsideThePlate(),
        SiteError,
        "site 'e': every latent of the model is one of each row",
    ),
    "discrete": (
        discrete(lambda: dist.Bernoulli(0.5), {}),
        SiteError,
        "site 'k': a discrete latent .*enumerate.*parallel",
    ),
    "discrete, sequential": (
        discrete(lambda: dist.Bernoulli(0.5), {"enumerate": "sequential"}),
        SiteError,
        "site 'k': a discrete latent .*enumerate.*parallel",
    ),
    "discrete without end": (
        # it is enumerated already: to say so again would send its author in circles
        discrete(lambda: dist.Poisson(3.0), PARALLEL),
        SiteError,
        "site 'k': .*Poisson.*(infinite|cannot be enumerated|no finite|unbounded)",
    ),
    "discrete observation forgotten": (
        discrete_observation_forgotten,
        ModelError,
        "no observed site and no factor.*'k'",
    ),
    "shape from the batch": (
        shape_from_the_batch,
        SiteError,
        r"site 'u': its shape depends on the data \(\[8\] .*\[4\] now\).*from a constant",
    ),
    "groups counted in the batch": (
        groups_counted_in_the_batch,
        SiteError,
        "site 'u': its shape depends on the data.*from a constant",
    ),
    "latent for some batches": (latent_for_some_batches, SiteError, "site 'extra': .*every batch"),
    "one name twice": (one_name_twice, SiteError, "site 'twice': two sites .*rename"),
    "Delta for deterministic": (
        delta_for_a_deterministic,
        SiteError,
        "site 'mean': .*pyro.deterministic",
    ),
    "no transform: sphere": (
        latent_of(lambda: dist.ProjectedNormal(torch.ones(2))),
        SiteError,
        "site 'v': .*ProjectedNormal.*(transform|support).*",
    ),
    "no transform: positive definite": (
        latent_of(lambda: dist.Wishart(torch.tensor(3.0), covariance_matrix=torch.eye(2))),
        SiteError,
        "site 'v': .*Wishart.*(transform|support)",
    ),
    "support from an enumerated site": (
        support_from_an_enumerated_site,
        ModelError,
        "site '[uz]'.*enumerated",
    ),
    "enumerated over all rows": (
        enumerated_over_all_rows,
        PlateError,
        "site '[yz]'.*(inside the data's plate|whole data)",
    ),
    "enumerated in another plate": (
        enumerated_in_another_plate,
        SiteError,
        "site 'y' depends on the enumerated site 'z' but is not in all of its plates",
    ),
    "enumerated, dimension lost": (
        enumerated_values_moved_into_a_plates_dimension,
        ModelError,
        "site '[yz]'",
    ),
    "enumerated, different scales": (
        enumerated_sites_of_different_scales,
        SiteError,
        "site 'z': .*different scales; put one poutine.scale",
    ),
    "NaN likelihood": (nan_in_the_likelihood, SiteError, "site 'y': its log density is NaN|infin"),
    "infinite factor": (infinite_factor, SiteError, "site 'f': its log density is infinite"),
    "NaN prior": (nan_in_a_prior, ModelError, "'v'.*|NaN"),
    "outside the support": (negative_counts, SiteError, "site 'y': .*support of its Poisson"),
    "class out of range": (
        class_out_of_range,
        (SiteError, ModelError),
        "(site 'y': .*support of its Categorical|validation)",
    ),
    "BatchNorm": (
        linear_regression(features=nn.BatchNorm1d(2)),
        ModelError,
        r"BatchNorm1d in train mode.*call .eval\(\)",
    ),
    "BatchNorm without statistics": (
        # .eval() does not help here, so it must not be what is advised alone
        linear_regression(features=nn.BatchNorm1d(2, track_running_stats=False).eval()),
        ModelError,
        "BatchNorm1d.*track_running_stats",
    ),
    "dropout": (
        linear_regression(features=nn.Dropout(0.2)),
        ModelError,
        r"Dropout has active dropout \(p=0.2\).*\.eval",
    ),
    "alpha dropout": (
        linear_regression(features=nn.AlphaDropout(0.2)),
        ModelError,
        r"AlphaDropout.*\.eval",
    ),
    "dropout of a GRU": (
        linear_regression(features=lambda x: RECURRENT(x)[0]),
        ModelError,
        r"GRU has active dropout.*call \.eval",
    ),
    "functional dropout": (
        linear_regression(features=lambda x: torch.nn.functional.dropout(x, 0.5)),
        ModelError,
        "site 'y': .*at random",
    ),
    "noisy labels": (noisy_labels, ModelError, "site 'y': .*at random.*pyro.sample"),
    "seldom noisy": (seldom_noisy, ModelError, "at random"),
    "noise from Python": (noise_from_python, ModelError, "site 'y': .*NumPy, random or a gen"),
}


@pytest.fixture
def no_steps(monkeypatch):
    def step(*args):
        raise AssertionError("a step was taken")

    monkeypatch.setattr(Engine, "step", step)


@pytest.mark.usefixtures("no_steps")
@pytest.mark.parametrize("kind", BAD)
def test_bad_models_are_refused_before_any_step(kind):
    model, error, message = BAD[kind]
    with pytest.raises(error, match=f"(?s){message}"):
        ps.BAOA(model, lr=0.1).run(random_rows(N), **ONE_STEP, batch_size=B)
    with pytest.raises(error, match=f"(?s){message}"):
        ps.explain(model, random_rows(N), batch_size=B)


def absolute(x, y):
    """`branches_on_a_latent`, written so that it can be vectorized."""
    w = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w * torch.sign(w.sum()), 1.0), obs=y)


def lstm_by_hand(x, y):
    """`weights_of_an_lstm` for sequences of one step, from zero states."""
    shapes = {name.removeprefix("net."): w.shape for name, w in BAYESIAN_LSTM.named_parameters()}
    w = {
        name: pyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))
        for name, shape in shapes.items()
    }
    gates = x @ w["weight_ih_l0"].T + w["bias_ih_l0"] + w["bias_hh_l0"]
    i, _, g, o = gates.split(2, dim=-1)
    hidden = o.sigmoid() * torch.tanh(i.sigmoid() * g.tanh())
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(hidden[:, 0], 1.0), obs=y)


@pytest.mark.parametrize("batch_size", [None, B])
@pytest.mark.parametrize(
    ("model", "equivalent"),
    [
        (branches_on_a_latent, absolute),
        (branches_on_the_data, linear_regression()),
        (weights_of_an_lstm, lstm_by_hand),
    ],
    ids=["branch on a latent", "branch on the data", "LSTM's weights"],
)
def test_models_that_vmap_refuses_run_chain_by_chain(model, equivalent, batch_size):
    starts = started_at(equivalent)
    draws, likelihoods = [], []
    for each in (model, equivalent):
        sampler = ps.BAOA(each, lr=0.1, init_strategy=starts)
        sampler.run(
            random_rows(N), **{**ONE_STEP, "num_samples": 5, "num_chains": 2}, batch_size=batch_size
        )
        draws.append(sampler.get_samples())
        likelihoods.append(sampler.log_likelihood()["y"])
    for site in draws[0]:
        torch.testing.assert_close(draws[0][site], draws[1][site], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(*likelihoods, rtol=1e-9, atol=1e-12)


def started_at(model):
    """The same starts for both, `[2, ...]`."""
    log_posterior = ps.LogPosterior(model, num_data=N)
    starts = [log_posterior.constrain(log_posterior.init(seed, *random_rows(N))) for seed in (0, 1)]
    return {site: torch.stack([start[site] for start in starts]) for site in starts[0]}


@pytest.mark.usefixtures("no_steps")
@pytest.mark.parametrize("batch_size", [None, B])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_in_the_data_names_the_site(bad, batch_size):
    x, y = random_rows(N)
    x_bad, y_bad = x.clone(), y.clone()
    x_bad[1, 0], y_bad[1] = bad, bad
    model = linear_regression()
    for data, told in [
        ((x_bad, y), r"site 'y': .*argument 0 is (NaN|infinite) in row 1 "),
        ((x, y_bad), r"site 'y': .*(observed value is NaN|argument 1 is infinite in row 1)"),
    ]:
        with pytest.raises(SiteError, match=told):
            ps.BAOA(model, lr=0.1).run(data, **ONE_STEP, batch_size=batch_size)


def defined_for_positive_m(y):
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(m.log(), 1.0), obs=y)


@pytest.mark.usefixtures("no_steps")
@pytest.mark.parametrize("seed", range(3))
def test_a_start_that_breaks_one_chain_names_the_chain(seed):
    starts = {"m": torch.tensor([1.0, -1.0])}
    sampler = ps.BAOA(defined_for_positive_m, lr=0.1, init_strategy=starts)
    with pytest.raises(SiteError, match=r"site 'y': .*chain 1 .*init_strategy"):
        sampler.run(random_rows(N)[1], **{**ONE_STEP, "num_chains": 2, "seed": seed})


@pytest.mark.parametrize("seed", range(4))
def test_a_model_is_judged_where_its_chains_start(seed):
    starts = {"m": torch.tensor([1.0, 2.0])}
    sampler = ps.BAOA(defined_for_positive_m, lr=1e-4, init_strategy=starts)
    sampler.run(random_rows(N)[1], **{**ONE_STEP, "num_chains": 2, "seed": seed})
    assert (sampler.get_samples()["m"] - starts["m"]).abs().max() < 0.1


def test_a_module_that_is_refused_is_not_written_to():
    norm = nn.BatchNorm1d(2)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    with pytest.raises(ModelError, match="train mode"):
        ps.LogPosterior(linear_regression(features=norm), num_data=N).init(0, *random_rows(B))
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    assert norm.training


@pytest.mark.parametrize("make", ["instance norm", "spectral norm"])
def test_layers_that_write_to_their_buffers_are_refused_or_left_alone(make):
    if make == "instance norm":
        layer = nn.InstanceNorm1d(2, track_running_stats=True)

        def features(x):
            return layer(x[:, :, None] + torch.arange(3.0)).sum(-1)
    else:
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
        features = layer
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with contextlib.suppress(ModelError):
        log_posterior, params = initialize(
            linear_regression(features=features), *random_rows(B), num_data=N
        )
        log_posterior.grad(params, random_rows(B))
    changed = [n for n, value in layer.state_dict().items() if not torch.equal(value, before[n])]
    assert changed == []


def in_a_plate_of(size):
    def model(x, y):
        w = weights()
        with pyro.plate("data", size):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    return model


def test_a_plate_of_fixed_size_is_named_even_where_n_is_unknown():
    with pytest.raises(PlateError, match=r"plate 'data' .*12.*4 rows.*subsample_size=len\(x\)"):
        ps.LogPosterior(in_a_plate_of(N)).init(0, *random_rows(B))


@pytest.mark.parametrize("batch", [{}, {"batch_size": B}])
def test_a_plate_of_another_size_than_the_data_is_named(batch):
    with pytest.raises(PlateError, match=rf"'data' .*{N + 1}, .*{N} rows: .*'data', len\(x\)"):
        ps.BAOA(in_a_plate_of(N + 1)).run(random_rows(N), seed=0, progress=False, **batch)


@pytest.mark.parametrize("size", [N, B])
def test_values_that_every_row_would_be_compared_with_are_refused(size):
    """Pyro adds up such a likelihood, and chains agree on its posterior."""

    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal((x @ w)[:, None], 1.0).to_event(1), obs=y)

    x, y = random_rows(size)
    with pytest.raises(SiteError, match=rf"'y': values of shape \[{size}\] .*y\[:, None\]"):
        ps.LogPosterior(model, num_data=N).init(0, x, y)
    ps.LogPosterior(model, num_data=N).init(0, x, y[:, None])


def test_one_event_may_have_all_values():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean[None], 1.0).to_event(1), obs=y)

    y = torch.arange(4.0)
    log_posterior, _ = initialize(model, y, num_data=4)
    slopes, _ = log_posterior.grad({"mean": torch.tensor(0.5)}, (y,))
    assert float(slopes["mean"]) == pytest.approx(6 - 4 * 0.5 - 0.5)


def test_a_models_own_error_says_what_the_batch_was():
    def model(x, y):
        pyro.sample("w", dist.Normal(0.0, 1.0))
        raise RuntimeError("no such rows")

    log_posterior = ps.LogPosterior(model, num_data=N)
    with pytest.raises(RuntimeError, match="no such rows") as raised:
        log_posterior.init(0, *random_rows(B))
    (told,) = raised.value.__notes__
    assert told == "raised by the model on its first batch: 0 is float64 [4, 2], 1 is float64 [4]"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ps.LogPosterior(3), ArgumentError, "model=3 is not callable"),
        (lambda: ps.LogPosterior(observation_forgotten, num_data=0), ArgumentError, "num_data=0"),
        (
            lambda: ps.LogPosterior(observation_forgotten, num_data=2.5),
            ArgumentError,
            "num_data=2.5",
        ),
        (
            lambda: ps.LogPosterior(observation_forgotten, num_data=True),
            ArgumentError,
            "num_data=True",
        ),
        (lambda: ps.bayesianize(3), ArgumentError, "takes an nn.Module, not int"),
        (lambda: ps.bayesianize(nn.ReLU()), ModelError, "ReLU has no parameters"),
        (lambda: ps.bayesianize(nn.Linear(1, 1), prior=0.5), ArgumentError, "prior=0.5: pass a"),
        (
            lambda: ps.bayesianize(nn.Linear(1, 1), prior=dist.Normal(torch.zeros(2), 1.0)),
            ArgumentError,
            r"the prior of 'weight' has shape \[2\]: pass one of a scalar",
        ),
    ],
)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_params_that_do_not_fit_the_model_are_refused():
    x, y = random_rows(B)
    log_posterior, _ = initialize(linear_regression(), x, y, num_data=N)
    with pytest.raises(SiteError, match="site 'w'"):
        log_posterior({}, (x, y))
    with pytest.raises(SiteError, match=r"site 'w': .*\[3\]"):
        log_posterior({"w": torch.zeros(3)}, (x, y))
    with pytest.raises(ArgumentError, match="no value for site 'w'"):
        log_posterior.unconstrain({})


def test_nothing_is_known_before_the_first_batch():
    log_posterior = ps.LogPosterior(observation_forgotten, num_data=N)
    with pytest.raises(ps.errors.NotRunError, match="has not seen a batch yet: call init"):
        log_posterior.constrain({"w": torch.zeros(2)})


def test_every_question_about_a_batch_may_be_the_first():
    x, y = random_rows(B)
    params = {"w": torch.zeros(2, dtype=x.dtype)}
    expected = dist.Normal(0.0, 1.0).log_prob(y)
    for ask in (
        lambda density: density(params, (x, y)).log_lik,
        lambda density: density.grad(params, (x, y))[1].log_lik,
        lambda density: density.log_likelihood(params, (x, y))["y"],
    ):
        torch.testing.assert_close(ask(ps.LogPosterior(linear_regression(), num_data=N)), expected)
    gradients = ps.LogPosterior(linear_regression(), num_data=N).row_gradients(params, (x, y))
    torch.testing.assert_close(gradients["w"], x * y[:, None])


@pytest.mark.parametrize("name", ["a/b", "", ".", "..", r"C:\x", "a\0b"])
def test_names_that_no_file_can_hold_are_refused_before_a_run(name):
    def model(x, y):
        w = pyro.sample(name, dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    with pytest.raises(SiteError, match="results are files whose variables have these names"):
        ps.explain(model, random_rows(B))


def test_latents_without_elements_are_refused():
    def model(x, y):
        pyro.sample("none", dist.Normal(torch.zeros(0), 1.0).to_event(1))
        linear_regression()(x, y)

    with pytest.raises(SiteError, match=r"site 'none': it has the shape \[0\], no elements"):
        ps.explain(model, random_rows(B))


def test_runs_that_never_end_and_numbers_beyond_all_rows_are_refused():
    sampler = ps.BAOA(linear_regression(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"1 x 5,000,000,000,000 steps take 58 days or more"):
        sampler.run(random_rows(B), num_samples=5, warmup_steps=0, num_chains=1, thinning=10**12)
    with pytest.raises(ArgumentError, match=r"num_data=1000000000000000000000000000000: pass"):
        ps.BAOA(linear_regression(), lr=0.1, num_data=10**30)


def test_a_step_on_no_rows_is_refused_each_time():
    x, y = random_rows(B)
    sampler = ps.BAOA(linear_regression(), lr=0.01, num_data=N)
    sampler.step(x, y)
    with pytest.raises(ps.errors.DataError, match="no rows"):
        sampler.step(x[:0], y[:0])
