"""Which weights `bayesianize` makes random, by which priors, from which starts; what it refuses."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import initialize
from networks import (
    MASK,
    SD,
    B,
    Case,
    N,
    Sequence,
    TiedBody,
    Y,
    assert_same,
    attention,
    bert,
    case,
    classifier,
    convolution,
    encoder,
    gpt2,
    hugging_face,
    log_prior,
    lora,
    lstm,
    mlp,
    state,
    tokens,
    weight_norm,
)
from pyro.nn import PyroModule
from reference import close_in_scale, normals
from runs import EVERY_STEP, QUIET
from torch import nn
from torch.nn.functional import cross_entropy, dropout

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, ModelError, SiteError

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:.*(performance drop|nested tensors|is_gradient_check)"),
]

X = normals(N, 2)
PRIOR = dist.Normal(torch.tensor(0.0).double(), torch.tensor(SD, dtype=torch.float64))


def names_of(net, prior=PRIOR, **chosen):
    return list(ps.bayesianize(net, prior, **chosen).priors())


# ------------------------------------------------------------------ which weights

ENCODER = Sequence(encoder()).eval()
FIRST, SECOND = "layer.layers.0", "layer.layers.1"
CHOICES = {
    "a name": ({"include": "head.bias"}, lambda n: n == "head.bias"),
    "a module's name": ({"include": "head"}, lambda n: n.startswith("head.")),
    "a deep module's name": ({"include": FIRST}, lambda n: n.startswith(FIRST)),
    "a pattern": ({"include": "*.bias"}, lambda n: n.endswith(".bias")),
    "a pattern of modules": ({"include": "layer.layers.?.norm*"}, lambda n: ".norm" in n),
    "a list of patterns": (
        {"include": ["embed", "head"]},
        lambda n: n.startswith(("embed", "head")),
    ),
    "a module": ({"include": ENCODER.layer.layers[1]}, lambda n: n.startswith(SECOND)),
    "a class": ({"include": nn.LayerNorm}, lambda n: ".norm" in n),
    "a weight": ({"include": ENCODER.head.bias}, lambda n: n == "head.bias"),
    "a module's weights": ({"include": ENCODER.head.parameters()}, lambda n: n.startswith("head.")),
    "a set": ({"include": {"head", "embed"}}, lambda n: n.startswith(("embed", "head"))),
    "classes, modules and names": (
        {"include": [nn.LayerNorm, ENCODER.embed, "head.bias"]},
        lambda n: ".norm" in n or n.startswith("embed") or n == "head.bias",
    ),
    "but names": ({"exclude": "*bias"}, lambda n: not n.endswith("bias")),
    "but a class": ({"exclude": nn.Embedding}, lambda n: not n.startswith("embed")),
    "but a list": (
        {"exclude": [nn.LayerNorm, "layer.layers.0.*"]},
        lambda n: ".norm" not in n and not n.startswith(FIRST),
    ),
    "one layer but its biases": (
        {"include": SECOND, "exclude": "*bias"},
        lambda n: n.startswith(SECOND) and not n.endswith("bias"),
    ),
}


@pytest.mark.parametrize("kind", CHOICES)
def test_choices(kind):
    chosen, wanted = CHOICES[kind]
    every = [name for name, _ in ENCODER.named_parameters()]
    expected = [name for name in every if wanted(name)]
    assert 0 < len(expected) < len(every)
    assert names_of(ENCODER, **chosen) == expected


def test_no_name_is_a_prefix_of_another_ones():
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(12)))
    assert names_of(net, include="1") == ["1.weight", "1.bias"]


def test_frozen_weights_are_left_out_unless_they_are_named():
    net = mlp()
    net[0].requires_grad_(False)
    assert names_of(net) == ["2.weight", "2.bias"]
    assert names_of(net, include="0.bias") == ["0.bias"]
    assert names_of(net, include="*") == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.slow
def test_adapters_of_a_pretrained_model():
    net = lora()
    adapters = [name for name, _ in net.named_parameters() if "lora_" in name]
    assert len(adapters) == 4
    assert names_of(net, include="*lora_*") == adapters
    assert names_of(net, include="*lora_A*") == [n for n in adapters if "lora_A" in n]
    trained = [name for name, weight in net.named_parameters() if weight.requires_grad]
    assert names_of(net) == trained
    assert [n for n in trained if n not in adapters] == [n for n in trained if "classifier" in n]
    assert "weights: 32 Bayesian" in repr(ps.bayesianize(net, include="*lora_*"))


SUBSETS = [{"include": "2"}, {"exclude": "2.bias"}, {"include": "*.bias"}]


@pytest.mark.parametrize("chosen", SUBSETS)
def test_the_log_joint_of_some_weights(chosen):
    """The plain network's, with respect to them alone."""
    made = case("MLP")
    bayesian = ps.bayesianize(made.net, PRIOR, **chosen)
    weights = made.weights(bayesian.priors())
    assert 0 < len(weights) < 4
    log_posterior = ps.LogPosterior(classifier(bayesian), num_data=N)
    log_posterior.prepare(made.batch)
    params = {name: weight.detach() for name, weight in weights.items()}
    gradient, value = log_posterior.grad(params, made.batch)
    log_joint = log_prior(weights) - N * made.loss(weights, *made.batch)
    expected = torch.autograd.grad(log_joint, list(weights.values()))
    assert list(gradient) == list(weights)
    close_in_scale(value.log_joint, log_joint.detach())
    for mine, each in zip(gradient.values(), expected, strict=True):
        close_in_scale(mine, each)


@pytest.mark.parametrize(
    ("chosen", "training"),
    [({"include": "3"}, True), ({"exclude": "3.weight"}, False), ({"include": "*.bias"}, True)],
)
def test_what_is_frozen_stays_and_the_callers_network_too(chosen, training):
    net = nn.Sequential(mlp()[0], nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    net(normals(9, 2))
    net.train(training)
    net[1].eval()
    net[3].bias.requires_grad_(False)
    before = state(net)
    bayesian = ps.bayesianize(net, PRIOR, **chosen)
    assert {path: m.training for path, m in bayesian._net.named_modules()} == before["training"]
    inner = state(bayesian._net)
    sampler = ps.SGHMC(classifier(bayesian), lr=0.05, compile=False)
    sampler.run((X, Y), num_samples=60, **EVERY_STEP, batch_size=B, num_chains=2, **QUIET)
    assert sampler.params == {}
    assert set(sampler.get_samples()) == set(bayesian.priors())
    sampler.predict(X, Y)
    assert_same(state(net), before)
    assert_same(state(bayesian._net), inner)
    for name, weight in bayesian._net.named_parameters():
        assert weight.grad is None
        assert weight.requires_grad == (name in bayesian.priors() and before["requires_grad"][name])


def test_the_copy_is_independent():
    made = case("BatchNorm")
    bayesian = ps.bayesianize(made.net, PRIOR, include="4")
    log_posterior, params = initialize(classifier(bayesian), *made.batch, num_data=N)
    before = log_posterior(params, made.batch)
    with torch.no_grad():
        for tensor in [*made.net.parameters(), *made.net.buffers()]:
            tensor.add_(1)
    made.net.train()
    assert torch.equal(log_posterior(params, made.batch).log_joint, before.log_joint)
    assert torch.equal(log_posterior.init(0, *made.batch)["4.bias"], params["4.bias"])


# ------------------------------------------------------------------ points


@pytest.mark.parametrize("chains", [1, 3])
def test_points_move_along_their_gradient(chains):
    """One step of SGD by hand; a point's gradient is the chains' mean, without a prior."""
    made, lr = case("MLP"), 0.3
    made.net[0].bias.requires_grad_(False)
    before = state(made.net)
    bayesian = ps.bayesianize(made.net, PRIOR, include="2", rest="point")
    model = classifier(bayesian)
    fit = ps.SGHMC.from_sgd(model, lr=lr, temperature=0)
    fit.run(made.data, num_samples=1, **EVERY_STEP, num_chains=chains, **QUIET)
    log_posterior = ps.LogPosterior(model, num_data=N)
    log_posterior.prepare(made.data)
    start = made.net[0].weight.detach()
    losses, point = [], start.clone().requires_grad_()
    for chain in range(chains):
        weights = log_posterior.start(made.data, 0, chain)
        loss = made.loss({**weights, "0.weight": point}, *made.data)
        losses.append(loss)
        own = {n: w.clone().requires_grad_() for n, w in weights.items()}
        total = made.loss(own, *made.data) - log_prior(own) / N
        gradients = torch.autograd.grad(total, list(own.values()))
        for (name, weight), gradient in zip(own.items(), gradients, strict=True):
            drawn = fit.get_samples(group_by_chain=True)[name][chain, 0]
            close_in_scale(drawn, weight.detach() - lr * gradient)
    (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), point)
    assert gradient.abs().max() > 1e-3
    assert set(fit.params) == {"0.weight"}
    close_in_scale(fit.params["0.weight"], start - lr * gradient)
    assert_same(state(made.net), before)
    assert torch.equal(bayesian._net[0].weight, start)
    fit.write_params()
    close_in_scale(bayesian._net[0].weight.detach(), start - lr * gradient)
    assert torch.equal(bayesian._net[0].bias, made.net[0].bias)
    assert isinstance(bayesian._net[0].weight, nn.Parameter)
    assert not list(pyro.get_param_store())
    assert_same(state(made.net), before)


def test_predictions_are_at_the_points():
    made = case("MLP")
    bayesian = ps.bayesianize(made.net, PRIOR, include="2", rest="point")
    fit = ps.BAOA(classifier(bayesian), lr=0.1, compile=False)
    fit.run(made.data, num_samples=4, **EVERY_STEP, num_chains=1, batch_size=B, **QUIET)
    draws = fit.get_samples()
    assert set(draws) == {"2.weight", "2.bias"}
    last = fit.params | {name: values[-1] for name, values in draws.items()}
    logits = fit.predict(*made.data, return_sites=["logits"])["logits"]
    close_in_scale(logits[-1], made.logits(last, X).detach())


def test_a_point_is_a_param_for_pyro_too(store):
    made = case("MLP")
    bayesian = ps.bayesianize(made.net, PRIOR, include="2", rest="point")
    draw = made.weights(["2.weight", "2.bias"])
    point = pyro.param("0.weight", normals(4, 2, seed=9))
    logits = pyro.poutine.condition(bayesian, draw)(X)
    close_in_scale(logits, made.logits({**draw, "0.weight": point}, X).detach())


# ------------------------------------------------------------------ tied weights


@pytest.mark.parametrize(
    "chosen", [{}, {"include": "embed"}, {"include": "decode.weight"}, {"exclude": "head"}]
)
def test_tied_weights_are_one_site_and_both_change(chosen):
    net = TiedBody()
    bayesian = ps.bayesianize(net, PRIOR, **chosen)
    assert [n for n in bayesian.priors() if "head" not in n] == ["embed.weight"]
    log_posterior = ps.LogPosterior(classifier(bayesian), num_data=N)
    log_posterior.prepare((tokens(), Y))
    weights = {n: w.detach() + 0.5 for n, w in Case(net, ()).weights(bayesian.priors()).items()}
    untied = dict(net.named_parameters()) | weights
    body = torch.tanh(untied["embed.weight"][tokens()].mean(1) @ untied["embed.weight"].T)
    logits = body @ untied["head.weight"].T + untied["head.bias"]
    found = -log_posterior(weights, (tokens(), Y)).log_lik.sum()
    close_in_scale(found, cross_entropy(logits, Y, reduction="sum").detach())


def test_excluding_either_name_excludes_a_tied_weight():
    for name in "embed", "decode":
        assert names_of(TiedBody(), exclude=name) == ["head.weight", "head.bias"]


# ------------------------------------------------------------------ priors


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.conv = nn.Conv2d(8, 4, 3, groups=2)
        self.transposed = nn.ConvTranspose2d(8, 6, (2, 5), groups=2)
        self.lstm = nn.LSTM(5, 3)
        self.embed = nn.Embedding(7, 9)
        self.layer_norm = nn.LayerNorm(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.batch_norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.tensor(1.0))


SCALES = {
    "linear.weight": 6,
    "conv.weight": 4 * 9,
    "transposed.weight": 4 * 10,
    "lstm.weight_ih_l0": 5,
    "lstm.weight_hh_l0": 3,
}


def parameters_of(prior, weight):
    """Means and scales of a normal prior, found to be of the weight's shape."""
    assert prior.shape() == prior.event_shape == weight.shape
    assert prior.sample().dtype == weight.dtype
    return prior.mean, prior.stddev


def test_kaiming_and_unit_scales():
    net = Everything()
    for name, prior in ps.bayesianize(net, "kaiming").priors().items():
        mean, scale = parameters_of(prior, net.get_parameter(name))
        fan_in = SCALES.get(name)
        center = 1.0 if name.endswith("norm.weight") else 0.0
        close_in_scale(mean, torch.full_like(mean, center))
        close_in_scale(
            scale, torch.full_like(scale, 1.0 if fan_in is None else math.sqrt(2 / fan_in))
        )
    for name, prior in ps.bayesianize(net).priors().items():  # "unit"
        mean, scale = parameters_of(prior, net.get_parameter(name))
        assert torch.equal(mean, torch.zeros_like(mean))
        assert torch.equal(scale, torch.ones_like(scale))


def test_only_scales_of_normalization_layers_are_centered_at_one():
    priors = ps.bayesianize(nn.Sequential(nn.Linear(2, 3), nn.PReLU(3)), "kaiming").priors()
    assert torch.equal(priors["1.weight"].mean, torch.zeros(3))


@pytest.mark.slow
def test_kaiming_reads_hugging_faces_transposed_layers():
    priors = ps.bayesianize(gpt2(), "kaiming", include="*.mlp.c_proj").priors()
    scale = priors["transformer.h.0.mlp.c_proj.weight"].stddev  # [16, 4]: 16 inputs
    close_in_scale(scale, torch.full((16, 4), math.sqrt(2 / 16)))


CENTRE, SPREAD = normals(4, 2, seed=4), normals(4, 2, seed=5).exp()
PRIORS = {
    "a scalar's": (lambda: dist.Laplace(0.1, 0.4), lambda n, w: dist.Laplace(0.1, 0.4)),
    "another scalar's": (
        lambda: dist.StudentT(3.0, 0.2, 0.5),
        lambda n, w: dist.StudentT(3, 0.2, 0.5),
    ),
    "of float32": (
        lambda: dist.Normal(torch.tensor(0.5).float(), torch.tensor(2.0).float()),
        lambda n, w: dist.Normal(0.5, 2.0),
    ),
    "weight decay": (lambda: ps.weight_decay(0.02, 200), lambda n, w: dist.Normal(0.0, 0.5)),
    "at the weights": (
        lambda: lambda name, weight: dist.Normal(weight, 0.3),
        lambda n, w: dist.Normal(w, 0.3),
    ),
    "by name": (
        lambda: lambda name, weight: dist.Normal(0.0, 1.0 if name.endswith("bias") else 0.2),
        lambda n, w: dist.Normal(0.0, 1.0 if w.dim() == 1 else 0.2),
    ),
    "shaped": (
        lambda: lambda n, w: dist.Normal(CENTRE, SPREAD) if n == "0.weight" else dist.Normal(0, 1),
        lambda n, w: dist.Normal(CENTRE, SPREAD) if n == "0.weight" else dist.Normal(0.0, 1.0),
    ),
    "shaped events": (
        lambda: (
            lambda n, w: (
                dist.Normal(CENTRE, SPREAD).to_event(2) if n == "0.weight" else dist.Normal(0, 1)
            )
        ),
        lambda n, w: dist.Normal(CENTRE, SPREAD) if n == "0.weight" else dist.Normal(0.0, 1.0),
    ),
    "flat": (
        lambda: dist.ImproperUniform(dist.constraints.real, (), ()),
        lambda n, w: dist.Normal(0.0, 1.0).mask(False),
    ),
}


@pytest.mark.parametrize("kind", PRIORS)
def test_the_log_prior_is_the_sum_over_weights(kind):
    make, expected = PRIORS[kind]
    net = mlp()
    own = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    log_posterior = ps.LogPosterior(classifier(ps.bayesianize(net, make())), num_data=N)
    log_posterior.prepare((X, Y))
    params = {name: weight + 0.3 for name, weight in own.items()}
    by_hand = sum(expected(n, own[n]).log_prob(params[n]).sum() for n in own)
    close_in_scale(log_posterior(params, (X, Y)).log_prior, by_hand)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    "prior",
    [
        "kaiming",
        dist.Normal(torch.tensor(0.0).float(), torch.tensor(1.0).float()),
        lambda name, weight: dist.Normal(weight, 1.0),
        lambda name, weight: dist.Normal(torch.zeros(weight.shape).float(), 1.0).to_event(
            weight.dim()
        ),
    ],
    ids=["named", "scalar", "centered", "of float32 events"],
)
def test_priors_follow_the_networks_dtype(prior, late):
    net = mlp().float()
    moved = ps.bayesianize(net, prior).double() if late else ps.bayesianize(net.double(), prior)
    for name, each in moved.priors().items():
        assert each.sample().dtype == torch.float64
        density = each.log_prob(moved.weights()[name])
        assert density.dtype == torch.float64
        assert not density.requires_grad
    model = classifier(moved)
    log_posterior = ps.LogPosterior(model, num_data=N)
    assert all(value.dtype == torch.float64 for value in log_posterior.init(0, X, Y).values())
    drawn = pyro.infer.Predictive(model, num_samples=2)(X, Y)  # of the prior
    assert drawn["0.weight"].dtype == torch.float64


# ------------------------------------------------------------------ starts


def starts(net, chain, seed=0, call=None, data=(X, Y), **chosen):
    model = classifier(ps.bayesianize(net, PRIOR, **chosen), *([call] if call else []))
    log_posterior = ps.LogPosterior(model, num_data=N)
    state_before = torch.random.get_rng_state()
    log_posterior.prepare(data)
    found = log_posterior.start(data, seed, chain)
    assert torch.equal(torch.random.get_rng_state(), state_before)
    return found


@pytest.mark.parametrize("chosen", [{}, {"include": "2"}, {"include": "*.bias"}])
def test_chain_0_starts_at_the_module_and_others_where_its_layers_are_reset(chosen):
    net = mlp()
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(5)
    before = state(net)
    first, second, again, other = (
        starts(net, chain, seed, **chosen) for chain, seed in ((0, 0), (1, 0), (1, 0), (1, 1))
    )
    assert list(first) == names_of(net, **chosen)
    for name, value in first.items():
        assert torch.equal(value, net.get_parameter(name))
        assert second[name].abs().max() < 1  # within 1 / sqrt(fan in)
        assert torch.equal(second[name], again[name])
        assert (second[name] != other[name]).all()
    assert_same(state(net), before)


@pytest.mark.parametrize("make", [lstm, attention, encoder])
def test_layers_are_reset_as_they_are_built(make):
    net = Sequence(make()).eval()
    with torch.no_grad():
        net.embed.weight.add_(100)
        for name, weight in net.named_parameters():
            if name.endswith(("weight_ih_l1", "in_proj_weight", "linear1.weight")):
                weight.add_(100)
    found = starts(net, 1, data=(tokens(), Y))
    assert max(float(value.abs().max()) for value in found.values()) < 10


def test_weights_without_reset_parameters_start_at_their_own():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = mlp(), nn.Parameter(torch.tensor(2.5))

        def forward(self, x):
            return self.scale * self.body(x)

    net = Scaled()
    found = starts(net, 1)
    assert float(found["scale"]) == 2.5
    assert (found["body.0.weight"] != net.body[0].weight).all()


def test_parametrized_layers_are_reset_too():
    net = weight_norm()
    found = starts(net, 1)
    name = "0.parametrizations.weight.original1"
    assert (found[name] != net.get_parameter(name)).any()


def test_init_to_module_starts_all_chains_there():
    net = mlp()
    model = classifier(ps.bayesianize(net, PRIOR, exclude="0.bias"))
    sampler = ps.SGLD(model, lr=1e-12, temperature=0, init_strategy=ps.init_to_module)
    sampler.run((X, Y), num_samples=1, **EVERY_STEP, num_chains=3, **QUIET)
    found = sampler.get_samples()
    assert list(found) == ["0.weight", "2.weight", "2.bias"]
    for name, value in found.items():
        close_in_scale(value, net.get_parameter(name).detach().expand(3, *value.shape[1:]))


# ------------------------------------------------------------------ what is refused


class Integers(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.table = nn.Module()
        self.table.weight = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)


def frozen():
    return mlp().requires_grad_(False)


def old_weight_norm(used=False):
    net = mlp()
    nn.utils.weight_norm(net[0])
    if used:
        with torch.no_grad():
            net(X)
    return net


def nested(module):
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Identity(), module))


REFUSED = {
    "no module": (lambda: ps.bayesianize(lambda x: x), ArgumentError, "nn.Module, not function"),
    "no parameters": (lambda: ps.bayesianize(nn.Tanh()), ModelError, "Tanh has no parameters"),
    "unknown rest": (lambda: ps.bayesianize(mlp(), rest="free"), ArgumentError, "rest='free'.*'po"),
    "all frozen": (lambda: ps.bayesianize(frozen()), ArgumentError, "all.*frozen.*include="),
    "nothing left": (
        lambda: ps.bayesianize(mlp(), include="0", exclude=["*.weight", "*.bias"]),
        ArgumentError,
        "leave no weight",
    ),
    "no choice": (lambda: ps.bayesianize(mlp(), include=[]), ArgumentError, "leave no weight"),
    "unknown pattern": (
        lambda: ps.bayesianize(mlp(), include="head"),
        ArgumentError,
        "include: no weight is in 'head'.*0.weight, 0.bias, 2.weight, 2.bias",
    ),
    "unknown pattern among others": (
        lambda: ps.bayesianize(mlp(), include=["0", "haed"]),
        ArgumentError,
        "include: no weight is in 'haed'",
    ),
    "unknown exclusion": (
        lambda: ps.bayesianize(mlp(), exclude="head"),
        ArgumentError,
        "exclude: no weight is in 'head'",
    ),
    "class that is not there": (
        lambda: ps.bayesianize(mlp(), include=nn.Conv2d),
        ArgumentError,
        "include: no weight is in Conv2d",
    ),
    "class without weights": (
        lambda: ps.bayesianize(mlp(), exclude=nn.Tanh),
        ArgumentError,
        "exclude: no weight is in Tanh",
    ),
    "foreign module": (
        lambda: ps.bayesianize(mlp(), include=mlp()[0]),
        ArgumentError,
        "this Linear is no part of the Sequential",
    ),
    "number": (lambda: ps.bayesianize(mlp(), include=2), ArgumentError, "include=2: pass patterns"),
    "numbers": (lambda: ps.bayesianize(mlp(), include=[2]), ArgumentError, "include=2: pass patt"),
    "unknown class": (lambda: ps.bayesianize(mlp(), include=int), ArgumentError, "int.*pass patt"),
    "foreign parameter": (
        lambda: ps.bayesianize(mlp(), include=mlp()[0].weight),
        ArgumentError,
        "no weight is in Parameter",
    ),
    "tensor": (
        lambda: ps.bayesianize(mlp(), include=torch.ones(2)),
        ArgumentError,
        "pass patterns",
    ),
    "unknown prior": (
        lambda: ps.bayesianize(mlp(), "flat"),
        ArgumentError,
        "prior='flat'.*'kaiming', 'unit'",
    ),
    "no prior": (lambda: ps.bayesianize(mlp(), None), ArgumentError, "prior=None: pass a distr"),
    "a prior's scale": (
        lambda: ps.bayesianize(mlp(), lambda name, weight: 0.5),
        ArgumentError,
        "gave 0.5 for '0.weight'",
    ),
    "no prior for a weight": (
        lambda: ps.bayesianize(mlp(), lambda n, w: None if n == "2.bias" else PRIOR),
        ArgumentError,
        "'2.bias'",
    ),
    "transposed prior": (
        lambda: ps.bayesianize(mlp(), lambda n, w: dist.Normal(torch.zeros(w.shape[::-1]), 1.0)),
        ArgumentError,
        r"prior of '0.weight' has shape \[2, 4\].*\[4, 2\]",
    ),
    "prior of rows": (
        lambda: ps.bayesianize(mlp(), dist.Normal(torch.zeros(2), 1.0).to_event(1)),
        ArgumentError,
        r"prior of '0.weight' has shape \[2\].*\[4, 2\]",
    ),
    "compiled": (
        lambda: ps.bayesianize(torch.compile(mlp())),
        ModelError,
        r"torch.compile.*_orig_mod",
    ),
    "script": (lambda: ps.bayesianize(torch.jit.script(mlp())), ModelError, "ScriptModule"),
    "script inside": (
        lambda: ps.bayesianize(nested(torch.jit.script(nn.Linear(2, 3)))),
        ModelError,
        r"submodule '1\.1'.*Script",
    ),
    "lazy": (
        lambda: ps.bayesianize(nested(nn.LazyLinear(3))),
        ModelError,
        r"submodule '1.1' \(LazyLinear\) has no shapes.*call the network on a batch first",
    ),
    "PyroModule": (
        lambda: ps.bayesianize(nested(PyroModule[nn.Linear](2, 3))),
        ModelError,
        r"submodule '1.1' \(PyroLinear\) is a PyroModule",
    ),
    "twice": (
        lambda: ps.bayesianize(ps.bayesianize(mlp())),
        ModelError,
        "BayesianModule is a PyroModule",
    ),
    "integers": (
        lambda: ps.bayesianize(Integers(), include="*"),
        ModelError,
        r"submodule 'table'.*weight 'table.weight' is of torch.int8.*exclude=",
    ),
    "meta": (
        lambda: ps.bayesianize(nested(nn.Linear(2, 3, device="meta"))),
        ModelError,
        r"submodule '1.1' \(Linear\): weight '1.1.weight' has no values",
    ),
    "max_norm": (
        lambda: ps.bayesianize(nested(nn.Embedding(3, 2, max_norm=1.5))),
        ModelError,
        r"submodule '1.1' \(Embedding\) has max_norm=1.5.*exclude=",
    ),
    "sparse": (
        lambda: ps.bayesianize(nested(nn.EmbeddingBag(3, 2, sparse=True))),
        ModelError,
        r"submodule '1.1' \(EmbeddingBag\) has sparse gradients: set sparse=False",
    ),
    "old weight_norm": (
        lambda: ps.bayesianize(old_weight_norm()),
        ModelError,
        r"submodule '0' \(Linear\) cannot be copied.*torch.nn.utils.parametrizations",
    ),
    "no decay": (lambda: ps.weight_decay(0.0, 10), ArgumentError, "decay=0.0 must be above 0"),
    "negative decay": (lambda: ps.weight_decay(-1.0, 10), ArgumentError, "decay=-1.0 must be ab"),
    "no rows": (lambda: ps.weight_decay(1e-4, 0), ArgumentError, "num_data=0 must be above 0"),
}


@pytest.mark.filterwarnings("ignore:.*(weight_norm|torch.jit)")
@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind):
    make, error, message = REFUSED[kind]
    with pytest.raises(error, match=f"(?s){message}"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        Integers,
        lambda: nn.ModuleList([nn.Linear(1, 1), nn.Embedding(3, 2, max_norm=1.0)]),
        lambda: nn.ModuleList([nn.Linear(1, 1), nn.Embedding(3, 2, sparse=True)]),
        lambda: nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")]),
    ],
)
def test_what_is_not_chosen_may_be_anything(make):
    net = make()
    first = next(iter(dict(net.named_children())))
    assert names_of(net, include=first) == [f"{first}.weight", f"{first}.bias"]


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_old_weight_norm_is_refused_or_works():
    """After a call without gradients it can be copied, but not after one under vmap."""
    net = old_weight_norm(used=True)
    try:
        model = classifier(ps.bayesianize(net, PRIOR))
    except ModelError:
        return
    for _ in range(2):
        sampler = ps.SGHMC(model, lr=0.05, compile=False)
        sampler.run((X, Y), num_samples=2, **EVERY_STEP, num_chains=2, **QUIET).predict(X, Y)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.end = mlp(), nn.Sequential(nn.Identity(), self.Dropped())

    class Dropped(nn.Module):
        def forward(self, x):
            return dropout(x, 0.3, self.training)

    def forward(self, x):
        return self.end(self.body(x))


IMAGES, IDS = normals(N, 1, 4, 4), tokens()
RANDOM = {
    "dropout": (
        lambda: nn.Sequential(mlp(), nn.Sequential(nn.Dropout(0.2))),
        (X,),
        r"submodule '1.0' \(Dropout\) has active dropout \(p=0.2\).*\.eval",
    ),
    "functional dropout": (Dropping, (X,), r"submodule 'end.1' \(Dropped\) draws at random.*eval"),
    "LSTM": (lambda: Sequence(lstm()), (IDS,), r"'layer' \(LSTM\) has active dropout \(p=0.2\)"),
    "attention": (
        lambda: Sequence(attention()),
        (IDS,),
        r"'layer' \(MultiheadAttention\) has active dropout \(p=0.1\)",
    ),
    "transformer": (
        lambda: Sequence(encoder()),
        (IDS,),
        r"'layer\.layers\.0\.self_attn' \(MultiheadAttention\) has active dropout",
    ),
    "BatchNorm": (
        lambda: convolution(nn.BatchNorm2d),
        (IMAGES,),
        r"submodule '1' \(BatchNorm2d\) in train mode.*\.eval\(\).*replace_batchnorm",
    ),
    "BatchNorm without statistics": (
        lambda: convolution(lambda n: nn.BatchNorm2d(n, track_running_stats=False)).eval(),
        (IMAGES,),
        r"submodule '1' \(BatchNorm2d\) keeps no running statistics.*replace_batchnorm",
    ),
    "Bert": (bert, (IDS, MASK), r"'bert.embeddings.dropout' \(Dropout\) has active dropout.*eval"),
    "GPT-2": (gpt2, (IDS, MASK), r"'transformer.drop' \(Dropout\) has active dropout.*eval"),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_networks_in_train_mode_are_refused_by_submodule(kind):
    make, inputs, message = RANDOM[kind]
    net = make().double()
    if "statistics" not in kind:
        net.train()
    before = state(net)
    model = classifier(
        ps.bayesianize(net), hugging_face if kind in ("Bert", "GPT-2") else Case(net, ()).call
    )
    with pytest.raises(ModelError, match=f"(?s){message}"):
        ps.BAOA(model, lr=0.1).run(
            (*inputs, Y), num_samples=1, **EVERY_STEP, num_chains=1, batch_size=B, **QUIET
        )
    with pytest.raises(ModelError, match=f"(?s){message}"):
        ps.LogPosterior(model, num_data=N).init(0, *inputs, Y)
    assert_same(state(net), before)


def test_eval_may_be_called_on_either():
    for on_copy in True, False:
        net = nn.Sequential(mlp(), nn.Dropout(0.5)).train()
        bayesian = ps.bayesianize(net if on_copy else net.eval())
        ps.LogPosterior(classifier(bayesian.eval() if on_copy else bayesian), num_data=N).init(
            0, X, Y
        )
        assert net.training == on_copy


def test_a_network_called_inside_of_the_datas_plate_is_refused():
    bayesian = ps.bayesianize(mlp())

    def model(x, y):
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=bayesian(x)), obs=y)

    with pytest.raises(SiteError, match=r"site '0.weight'.*plate"):
        ps.BAOA(model, lr=0.1).run(
            (X, Y), num_samples=1, **EVERY_STEP, num_chains=1, batch_size=B, **QUIET
        )
