"""A module called with other weights is left as it was, whatever is shared within it."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_scale as ps
from pyro_scale.model.program import call_with


def twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)


def tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    return net


def both():
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = layer.weight
    return nn.Sequential(layer, other, nn.Sequential(other, layer))


@pytest.mark.parametrize("make", [twice, tied, both])
def test_weights_are_in_all_their_places_and_go_again(make):
    torch.manual_seed(0)
    net, plain = make(), make()
    before = dict(net.named_parameters())
    values = {name: torch.randn_like(weight) for name, weight in before.items()}
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.copy_(values[name])
    x = torch.randn(5, 4)
    assert torch.equal(call_with(net, values, (x,)), plain(x))
    after = dict(net.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is weight for name, weight in before.items())


def test_a_name_may_be_by_any_path():
    net, value = twice(), torch.ones(4, 4)
    x = torch.randn(5, 4)
    ways = [call_with(net, {f"{i}.weight": value}, (x,)) for i in (0, 2, 4)]
    assert torch.equal(ways[0], ways[1])
    assert torch.equal(ways[0], ways[2])


@pytest.mark.filterwarnings("ignore::pyro_scale.errors.PyroScaleWarning")
@pytest.mark.parametrize("make", [twice, both])
def test_networks_that_use_a_layer_twice_are_sampled_and_left_alone(make):
    """Runs after the first need the layer's own weights, as where chains start."""
    torch.manual_seed(0)
    net = make()
    before = {name: weight.clone() for name, weight in net.named_parameters()}
    bnn = ps.bayesianize(net)

    def model(x, y=None):
        mean = pyro.deterministic("mean", bnn(x)[:, 0])
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.3), obs=y)

    x, y = torch.randn(40, 4), torch.randn(40)
    how = {"num_samples": 2, "warmup_steps": 1, "thinning": 1, "num_chains": 2}
    for _ in range(2):
        run = ps.SGLD(model, lr=1e-4, compile=False).run((x, y), seed=0, progress=False, **how)
    draws = run.get_samples()
    assert set(draws) == set(before)
    for name, weight in net.named_parameters():
        assert type(weight) is nn.Parameter
        assert torch.equal(weight, before[name])
    means = run.predict(x)["mean"]
    for draw in range(4):
        with torch.no_grad():
            for name, weight in net.named_parameters():
                weight.copy_(draws[name][draw])
        torch.testing.assert_close(means[draw], net(x)[:, 0])
