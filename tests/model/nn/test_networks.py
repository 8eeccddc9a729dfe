"""Networks of every architecture, and what practitioners do with them, against plain PyTorch."""

import functools

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from networks import (
    CASES,
    CLASSES,
    LENGTH,
    MASK,
    SD,
    B,
    Case,
    N,
    Sequence,
    Swapped,
    TiedBody,
    Y,
    assert_same,
    attention,
    case,
    classifier,
    convolution,
    encoder,
    log_prior,
    mlp,
    state,
    tokens,
)
from reference import close_in_scale, normals
from repetitions import long_but
from runs import EVERY_STEP, QUIET
from torch import nn
from torch.nn.functional import cross_entropy

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, ModelError

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:.*(performance drop|nested tensors|is_gradient_check)"),
]


def padding_rows(net):
    """Names of embeddings -> their padding row."""
    return {
        f"{path}.weight": module.padding_idx
        for path, module in net.named_modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
    }


# ------------------------------------------------------------------ densities


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_the_log_joint_and_its_gradient_are_the_plain_networks(kind):
    """At the module's values, and elsewhere."""
    made = case(kind)
    names = [n for n, weight in made.net.named_parameters() if weight.requires_grad]
    before = state(made.net)
    bayesian = ps.bayesianize(made.net, dist.Normal(0.0, SD))
    log_posterior = ps.LogPosterior(classifier(bayesian, made.call), num_data=N)
    log_posterior.prepare(made.batch)
    assert list(log_posterior.latents) == names
    assert not log_posterior.points
    own = made.weights(names)
    moved = {n: (w + 0.1 * normals(*w.shape)).detach() for n, w in own.items()}
    for name, row in padding_rows(made.net).items():
        if name in moved:  # the network does not see its draws
            moved[name][row] = own[name][row].detach()
    for weights in own, {n: w.requires_grad_() for n, w in moved.items()}:
        log_lik = -N * made.loss(weights, *made.batch)
        log_joint = log_lik + log_prior(weights)
        expected = torch.autograd.grad(log_joint, list(weights.values()), retain_graph=True)
        part = torch.autograd.grad(log_lik, list(weights.values()))
        assert sum(float(each.abs().max()) > 1e-3 for each in part) >= 0.7 * len(part)
        given = {n: w.detach() for n, w in weights.items()}
        close_in_scale(log_posterior(given, made.batch).log_joint, log_joint.detach())
        for grad in log_posterior.grad, log_posterior.plain_grad:
            gradient, value = grad(given, made.batch)
            close_in_scale(value.log_joint, log_joint.detach())
            close_in_scale(value.log_prior, log_prior(given))
            for name, each in zip(names, expected, strict=True):
                close_in_scale(gradient[name], each)
    assert_same(state(made.net), before)


@pytest.mark.parametrize("kind", ["MLP", "convolution", "tied"])
def test_weight_decay_is_the_optimizers(kind):
    """-log joint = N (mean loss + decay/2 |w|²), but for the Gaussian's constant."""
    made, decay = case(kind), 0.03
    prior = ps.weight_decay(decay, num_data=N)
    log_posterior = ps.LogPosterior(classifier(ps.bayesianize(made.net, prior)), num_data=N)
    log_posterior.prepare(made.batch)

    def objective(weights):
        squares = sum((weight**2).sum() for weight in weights.values())
        return N * (made.loss(weights, *made.batch) + decay / 2 * squares)

    weights = made.weights()
    gradient, value = log_posterior.grad({n: w.detach() for n, w in weights.items()}, made.batch)
    expected = torch.autograd.grad(objective(weights), list(weights.values()))
    for mine, each in zip(gradient.values(), expected, strict=True):
        close_in_scale(mine, -each)
    zeros = {n: torch.zeros_like(w) for n, w in weights.items()}
    fall = value.log_joint - log_posterior(zeros, made.batch).log_joint
    close_in_scale(fall, (objective(zeros) - objective(weights)).detach())


# ------------------------------------------------------------------ predictions


def reading(call):
    """The same network, whose outputs are read, which vmap refuses."""

    def called(net, *inputs):
        logits = call(net, *inputs)
        assert bool(logits.isfinite().all())
        return logits

    return called


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "MLP",
        "BatchNorm",
        "padded embedding",
        "LSTM",
        "masked transformer",
        "weight norm",
        "tied",
        "masked Bert",
        "LoRA",
    ],
)
def test_predictions_are_the_plain_networks_with_a_draw_for_its_weights(kind):
    made, samplers = case(kind), []
    bayesian = ps.bayesianize(made.net, dist.Normal(0.0, SD))
    for call in made.call, reading(made.call):
        sampler = ps.SGHMC(classifier(bayesian, call), lr=0.05, compile=False)
        sampler.run(made.data, num_samples=2, **EVERY_STEP, num_chains=2, batch_size=B, **QUIET)
        samplers.append(sampler)
    close_in_scale(*(sampler.posterior.draws.positions for sampler in samplers))
    assert samplers[1].posterior.draws.attrs["program"] == "eager, chain by chain"
    if kind not in ("masked Bert", "LoRA"):  # whose masks are read
        assert samplers[0].posterior.draws.attrs["program"] == "eager"
    draws = samplers[0].get_samples()
    logits, looped = (s.predict(*made.data, return_sites=["logits"])["logits"] for s in samplers)
    close_in_scale(looped, logits)
    assert logits.shape == (4, N, CLASSES)
    assert logits.std(0).min() > 0
    for i in range(4):
        weights = {name: values[i].clone() for name, values in draws.items()}
        for name, row in padding_rows(made.net).items():
            if name in weights:
                weights[name][row] = made.net.get_parameter(name)[row].detach()
        close_in_scale(logits[i], made.logits(weights, *made.inputs).detach())


# ------------------------------------------------------------------ embeddings


def test_a_padding_row_stays_as_it_is():
    """Its draws change nothing, and all that moves it is its prior."""
    made = case("padded embedding")
    log_posterior = ps.LogPosterior(
        classifier(ps.bayesianize(made.net, dist.Normal(0.0, SD))), num_data=N
    )
    log_posterior.prepare(made.data)
    params = {n: w.detach() for n, w in made.weights().items()}
    here = log_posterior(params, made.data)
    for row, changes in [(0, False), (1, True)]:
        other = {n: w.clone() for n, w in params.items()}
        other["embed.weight"][row] += 1.0
        there = log_posterior(other, made.data)
        assert torch.equal(there.log_lik, here.log_lik) is not changes
        close_in_scale(there.log_prior, log_prior(other))
        gradient, _ = log_posterior.grad(other, made.data)
        of_prior = -other["embed.weight"][row] / SD**2
        assert torch.allclose(gradient["embed.weight"][row], of_prior, atol=1e-12) is not changes


def test_a_tied_padding_row_is_drawn_where_it_is_no_padding():
    net = TiedBody(padding_idx=0)
    log_posterior = ps.LogPosterior(classifier(ps.bayesianize(net)), num_data=N)
    log_posterior.prepare((tokens(), Y))
    params = Case(net, ()).weights()
    with torch.no_grad():
        params["embed.weight"][0] += 1.0
    loss = N * cross_entropy(Swapped(net, params)(tokens()), Y)
    close_in_scale(
        -log_posterior({n: w.detach() for n, w in params.items()}, (tokens(), Y)).log_lik.sum(),
        loss.detach(),
    )


# ------------------------------------------------------------------ without BatchNorm


class Twice(nn.Module):
    """One normalization layer at two places."""

    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm2d(6, eps=1e-3)
        self.body = nn.Sequential(nn.Conv2d(6, 6, 1), self.first, nn.BatchNorm2d(6, affine=False))

    def forward(self, x):
        return self.body(self.first(x))


@pytest.mark.parametrize("by", ["group", "filter_response"])
@pytest.mark.parametrize("training", [True, False])
def test_batchnorm_is_replaced(by, training):
    net = Twice().train(training)
    nn.init.normal_(net.first.weight)
    nn.init.normal_(net.first.bias)
    net.first.train(not training)  # a mode of its own
    before = state(net)
    new = ps.replace_batchnorm(net, by)
    assert_same(state(net), before)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in new.modules())
    assert new.first is new.body[1]
    assert new.first is not new.body[2]
    for name in "weight", "bias":
        assert torch.equal(new.first.get_parameter(name), net.first.get_parameter(name))
        assert new.first.get_parameter(name) is not net.first.get_parameter(name)
    assert (new.training, new.first.training, new.body[2].training) == (
        training,
        not training,
        training,
    )
    assert not any(name.startswith("running") for name, _ in new.named_buffers())
    if by == "group":
        assert 6 % new.first.num_groups == 0
        assert new.first.eps == 1e-3
        assert next(new.body[2].parameters(), None) is None
    x = normals(5, 6, 4, 4)
    close_in_scale(new(x)[2:3], new(x[2:3]))  # no row depends on another


@pytest.mark.parametrize(
    ("channels", "groups"), [(64, 16), (32, 8), (96, 24), (256, 32), (6, 1), (7, 1)]
)
def test_groups_divide_the_channels(channels, groups):
    assert ps.replace_batchnorm(nn.BatchNorm2d(channels)).num_groups == groups


@pytest.mark.parametrize("channels", [3, 8, 32, 64])
def test_what_replaces_batchnorm_lets_features_through(channels):
    """A group of one value would be a constant, one of two a sign."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, channels), nn.BatchNorm1d(channels))
    values = ps.replace_batchnorm(net)(normals(N, 2))
    assert values.std(0).min() > 0.01
    assert len(values.round(decimals=3).unique()) > values.numel() // 2


def test_replacements_stay_frozen():
    net = convolution(nn.BatchNorm2d)
    net[1].requires_grad_(False)
    for by in "group", "filter_response":
        new = ps.replace_batchnorm(net, by)
        assert not any(weight.requires_grad for weight in new[1].parameters())
        assert all(weight.requires_grad for weight in new[0].parameters())


def test_filter_response_normalization_is_its_formula():
    net = ps.replace_batchnorm(convolution(nn.BatchNorm2d), by="filter_response")
    layer, x = net[1], normals(3, 4, 2, 5)
    for i in range(3):
        for c in range(4):
            expected = x[i, c] / (x[i, c].square().mean() + 1e-6).sqrt()
            close_in_scale(layer(x)[i, c], (layer.weight[c] * expected + layer.bias[c]).detach())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ps.replace_batchnorm(3), ArgumentError, "takes an nn.Module, not int"),
        (lambda: ps.replace_batchnorm(mlp(), by="layer"), ArgumentError, "by='layer'.*'group'"),
        (lambda: ps.replace_batchnorm(mlp()), ModelError, "Sequential has no BatchNorm"),
        (
            lambda: ps.replace_batchnorm(
                nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)), "filter_response"
            ),
            ModelError,
            r"submodule '1' \(BatchNorm1d\).*by='group'",
        ),
    ],
)
def test_what_cannot_be_replaced_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# ------------------------------------------------------------------ practitioners' models


def check_density(model, data, by_hand, params):
    """The log joint and its gradient on a batch, against a function of the params."""
    log_posterior = ps.LogPosterior(model, num_data=N)
    log_posterior.prepare(data)
    params = {name: value.detach() for name, value in params.items()}
    assert params.keys() == set(log_posterior.latents)
    gradient, value = log_posterior.grad(params, data)
    expected, log_joint = torch.func.grad_and_value(by_hand)(params)
    close_in_scale(value.log_joint, log_joint)
    for name, each in expected.items():
        close_in_scale(gradient[name], each)
    return log_posterior


def test_weights_of_classes_are_scales_of_rows():
    made, weight_of = case("MLP"), torch.tensor([0.2, 1.0, 3.5])
    bayesian = ps.bayesianize(made.net, dist.Normal(0.0, SD))
    x, y = made.batch

    def model(x, y):
        logits = bayesian(x)
        with pyro.plate("data", len(x)), poutine.scale(scale=weight_of[y]):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    def by_hand(weights):
        loss = cross_entropy(made.logits(weights, x), y, weight=weight_of, reduction="sum")
        return log_prior(weights) - N / B * loss

    check_density(model, (x, y), by_hand, made.weights())


@pytest.mark.parametrize("noise", ["of the network", "a site"])
def test_learned_noise(noise):
    net, x, y = mlp(), normals(B, 2), normals(B, seed=3)
    bayesian = ps.bayesianize(net, dist.Normal(0.0, SD))
    params, site = Case(net, ()).weights(), noise == "a site"

    def heads(out, sigma):
        return out[:, 0], sigma if site else out[:, 1].exp()

    def model(x, y):
        sigma = pyro.sample("sigma", dist.Gamma(2.0, 3.0)) if site else None
        mean, sd = heads(bayesian(x), sigma)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, sd), obs=y)

    def by_hand(params):
        weights = {n: value for n, value in params.items() if n != "sigma"}
        prior, sigma = log_prior(weights), None
        if site:  # in log space
            sigma = params["sigma"].exp()
            prior = prior + dist.Gamma(2.0, 3.0).log_prob(sigma) + params["sigma"]
        mean, sd = heads(Swapped(net, weights)(x), sigma)
        return prior + N / B * dist.Normal(mean, sd).log_prob(y).sum()

    check_density(model, (x, y), by_hand, params | ({"sigma": torch.tensor(-0.4)} if site else {}))


@pytest.mark.parametrize("way", ["mask of the distribution", "poutine.mask"])
@pytest.mark.parametrize("layer", [encoder, attention])
def test_tags_of_padded_sequences(way, layer):
    body = Sequence(layer().eval())
    body.head = nn.Identity()

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer, self.head = body.embed, body.layer, nn.Linear(4, CLASSES)

        def forward(self, ids, mask):
            x = self.embed(ids)
            if isinstance(self.layer, nn.MultiheadAttention):
                return self.head(self.layer(x, x, x, key_padding_mask=~mask)[0])
            return self.head(self.layer(x, src_key_padding_mask=~mask))

    net = Tagger().eval()
    bayesian = ps.bayesianize(net, dist.Normal(0.0, SD))
    batch = slice(2, 2 + B)
    ids, mask = tokens()[batch], MASK[batch]
    tags = (ids + torch.arange(LENGTH)) % CLASSES

    def model(ids, mask, tags):
        logits = bayesian(ids, mask)
        if way == "poutine.mask":
            rows, columns = pyro.plate("data", len(ids), dim=-2), pyro.plate("tokens", LENGTH)
            with rows, columns, poutine.mask(mask=mask):
                pyro.sample("tags", dist.Categorical(logits=logits), obs=tags)
        else:
            with pyro.plate("data", len(ids)):
                fn = dist.Categorical(logits=logits).mask(mask).to_event(1)
                pyro.sample("tags", fn, obs=tags)

    def by_hand(weights):
        logits = Swapped(net, weights)(ids, mask)
        return log_prior(weights) - N / B * cross_entropy(logits[mask], tags[mask], reduction="sum")

    params = {n: w.detach() for n, w in Case(net, ()).weights().items()}
    log_posterior = check_density(model, (ids, mask, tags), by_hand, params)
    other = torch.where(mask, ids, 7), mask, torch.where(mask, tags, 2)
    assert not torch.equal(other[2], tags)
    here, there = (log_posterior(params, rows) for rows in ((ids, mask, tags), other))
    close_in_scale(there.log_lik, here.log_lik)


def test_a_deep_ensemble_is_sgd_from_every_start():
    made, chains, steps = case("MLP"), 8, 40
    model = classifier(ps.bayesianize(made.net, dist.Normal(0.0, SD)))
    ensemble = ps.SGHMC.from_sgd(model, lr=0.5, momentum=0.9, temperature=0)
    ensemble.run(
        made.data, num_samples=1, thinning=1, warmup_steps=steps - 1, num_chains=chains, **QUIET
    )
    found = ensemble.get_samples(group_by_chain=True)
    log_posterior = ps.LogPosterior(model, num_data=N)
    log_posterior.prepare(made.data)
    for chain in range(chains):
        weights = log_posterior.start(made.data, 0, chain)
        for weight in weights.values():
            weight.requires_grad_()
        decay = 1 / (SD**2 * N)
        sgd = torch.optim.SGD(weights.values(), lr=0.5, momentum=0.9, weight_decay=decay)
        for _ in range(steps):
            sgd.zero_grad()
            made.loss(weights, *made.data).backward()
            sgd.step()
        for name, weight in weights.items():
            close_in_scale(found[name][chain, 0], weight.detach(), 1e-9)
    ends = ensemble.posterior.draws.positions[:, 0]
    assert torch.nn.functional.pdist(ends).min() > 0.1


@pytest.mark.parametrize("kind", ["MAP", "Laplace"])
@pytest.mark.filterwarnings("ignore:the log joint still rose")
def test_warm_starts(kind):
    """Chains begin at the fit's draws: at its mode, or about it."""
    made = case("MLP")
    model = classifier(ps.bayesianize(made.net, dist.Normal(0.0, SD), include="2"))
    fit = ps.MAP(model).run(made.data, num_steps=50, **QUIET)
    if kind == "Laplace":
        fit = ps.Laplace(model, structure="dense").run(made.data, mode=fit, **QUIET)
    sampler = ps.SGHMC(model, lr=1e-9, init_strategy=fit)
    sampler.run(made.data, num_samples=1, **EVERY_STEP, num_chains=2, **QUIET)
    starts = fit.starts(2, 0)
    found = sampler.get_samples()
    assert set(found) == {"2.weight", "2.bias"}
    for name, start in starts.items():
        close_in_scale(found[name], start, 1e-7)
        apart = (found[name][0] - found[name][1]).abs().max()
        assert (apart > 1e-3) == (kind == "Laplace")


@pytest.mark.slow
@pytest.mark.parametrize("rest", long_but(["frozen", "point"], "point"))
def test_a_part_of_a_network_is_compiled(rest):
    made = case("MLP")
    bayesian = ps.bayesianize(made.net, dist.Normal(0.0, SD), include="2", rest=rest)
    make = functools.partial(ps.BAOA, classifier(bayesian), lr=0.1)
    fast, slow = (
        make(compile=compile).run(
            made.data, num_samples=50, **EVERY_STEP, num_chains=2, batch_size=B, **QUIET
        )
        for compile in (True, False)
    )
    assert fast.posterior.draws.attrs["program"] == "compiled loop"
    close_in_scale(fast.posterior.draws.positions, slow.posterior.draws.positions)
    assert set(fast.params) == ({"0.weight", "0.bias"} if rest == "point" else set())
