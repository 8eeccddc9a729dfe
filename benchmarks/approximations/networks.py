"""The network on digits that all contenders share, trained to the same weights."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from problems import digits
from torch import Tensor, nn


class Trained(NamedTuple):
    """A network near the mode of its posterior, with its data.

    Attributes:
        net: the module, with the weights.
        weights: the same by name, without a graph.
        x: pixels, `[1797, 64]`.
        y: digits, `[1797]`.
    """

    net: nn.Sequential
    weights: dict[str, Tensor]
    x: Tensor
    y: Tensor


def trained(hidden: tuple[int, ...], dtype: str = "float32", steps: int = 200) -> Trained:
    """A tanh network, trained by Adam on all rows with standard normal weights' prior.

    It is trained in float64 whatever its type, so that all processes arrive at the same weights.
    """
    torch.manual_seed(0)
    sizes = (64, *hidden, 10)
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.Tanh())]
    net = nn.Sequential(*layers[:-1]).double()
    pixels, labels = digits()
    x, y = torch.from_numpy(pixels).double(), torch.from_numpy(labels)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        prior = sum(weight.square().sum() for weight in net.parameters()) / 2
        (nn.functional.cross_entropy(net(x), y, reduction="sum") + prior).backward()
        optimizer.step()
    net = net.to(getattr(torch, dtype))
    for weight in net.parameters():
        weight.grad = None
    weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    return Trained(net, weights, x.to(getattr(torch, dtype)), y)
