"""Linearized predictions of layers without forward derivatives: the numbers of plain autograd."""

from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import normals
from repetitions import long_but
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import pyro_scale as ps
from pyro_scale.posterior.predictive import spread_evenly

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore")]
N, STEPS = 12, 4
X = normals(N, STEPS, 2, seed=1)
LENGTHS = torch.arange(N) % STEPS + 1


class Packed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        state = self.layer(packed)[1]
        return self.head((state[0] if isinstance(state, tuple) else state)[-1])


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x, lengths):
        return self.head(Cube.apply(self.layer(x[:, 0])))


NETS = {"LSTM": lambda: Packed(nn.LSTM), "GRU": lambda: Packed(nn.GRU), "own": Own}


@pytest.mark.slow  # draws go through the layers one by one
@pytest.mark.parametrize(
    ("name", "kind"),
    long_but(product(NETS, [True, "probit"]), ("LSTM", True), ("own", "probit")),
)
def test_layers_without_forward_derivatives(name, kind):
    torch.manual_seed(0)
    net = ps.bayesianize(NETS[name]().double().eval())

    def model(x, lengths, y=None):
        out = net(x, lengths)
        with pyro.plate("data", len(x)):
            if kind == "probit":
                pyro.sample("y", dist.Categorical(logits=out), obs=y)
            else:
                pyro.sample("y", dist.Normal(out, 0.5).to_event(1), obs=y)

    y = (X[:, 0, 0] > 0).long() if kind == "probit" else X[:, 0]
    fit = ps.Laplace(model, structure="dense").run(
        (X, LENGTHS, y), mode=net.weights(), seed=0, progress=False
    )
    found = fit.predict(X, LENGTHS, linearized=kind, num_samples=50, reduce="mean")["y"]

    center = fit.fit.centers[0].clone().requires_grad_()
    with torch.enable_grad():
        weights = fit.fit.layout.unflatten(center)
        out = torch.func.functional_call(net._net, weights, (X, LENGTHS))
    jacobian = torch.stack(
        [torch.autograd.grad(each, center, retain_graph=True)[0] for each in out.flatten()]
    )
    if kind == "probit":
        axes = fit.fit.at(0, torch.eye(len(center))) - center.detach()
        variance = (jacobian @ axes.T).square().sum(1).reshape(N, 2)
        exact = (out / (1 + torch.pi / 8 * variance).sqrt()).softmax(-1)
    else:
        positions = fit.fit.by_start(spread_evenly(1000, 50))[0]
        exact = out + ((positions - center) @ jacobian.T).mean(0).reshape(N, 2)
    torch.testing.assert_close(found, exact.detach(), rtol=1e-9, atol=1e-9)
