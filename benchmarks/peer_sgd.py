"""What a network's step costs as plain SGD with momentum, compiled by hand and eager."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import mlp
from peer_torch import OPTIONS
from problems import FRICTION, MLP_BATCH, MLP_LR, MLP_THINNING, digits
from protocol import Timing
from torch import Tensor
from torch.nn import functional

LEARNING_RATE, MOMENTUM = MLP_LR**2, 1 - MLP_LR * FRICTION


def compiled(
    hidden: tuple[int, ...], steps: int, flat: bool, unrolled: int = 1
) -> Callable[[], Timing]:
    """SGD with momentum, compiled, and a `torch.randn` of the parameters at every step.

    Args:
        hidden: the layers' widths.
        steps: to time.
        flat: one vector of parameters, rather than one tensor a weight.
        unrolled: steps in one compiled program.
    """
    x, y = (torch.from_numpy(a) for a in digits())
    leaves = [p.detach().clone() for p in mlp(hidden).parameters()]
    shapes, sizes = [p.shape for p in leaves], [p.numel() for p in leaves]
    params = [torch.cat([p.flatten() for p in leaves])] if flat else leaves
    momenta = [torch.zeros_like(p) for p in params]

    def weights(params: Sequence[Tensor]) -> list[Tensor]:
        if not flat:
            return list(params)
        pieces = params[0].split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def loss(weights: list[Tensor], rows: Tensor) -> Tensor:
        return functional.cross_entropy(_forward(weights, x[rows]), y[rows])

    def several(params: list[Tensor], momenta: list[Tensor], indices: Tensor) -> None:
        for rows in indices.unbind():
            gradient = torch.func.grad(loss)(weights(params), rows)
            if flat:
                gradient = [torch.cat([g.flatten() for g in gradient])]
            for p, m, g in zip(params, momenta, gradient, strict=True):
                m.mul_(MOMENTUM).add_(g)
                p.sub_(LEARNING_RATE * m)

    program = torch.compile(several, fullgraph=True, dynamic=False, options=OPTIONS)

    def step() -> None:
        program(params, momenta, torch.randint(len(x), (unrolled, MLP_BATCH)))
        for _ in range(unrolled):
            torch.randn(sum(sizes))

    def accuracy() -> float:
        return float((_forward(weights(params), x).argmax(-1) == y).float().mean())

    return _timed(step, steps // unrolled, unrolled, accuracy)


def eager(hidden: tuple[int, ...], steps: int) -> Callable[[], Timing]:
    """`torch.optim.SGD` as in any training loop, without noise."""
    x, y = (torch.from_numpy(a) for a in digits())
    net = mlp(hidden)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def step() -> None:
        rows = torch.randint(len(x), (MLP_BATCH,))
        optimizer.zero_grad()
        functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()

    return _timed(step, steps, 1, lambda: float((net(x).argmax(-1) == y).float().mean()))


def randn(hidden: tuple[int, ...], steps: int) -> Callable[[], Timing]:
    """A `torch.randn` of the parameters alone."""
    size = sum(p.numel() for p in mlp(hidden).parameters())
    return _timed(lambda: torch.randn(size), steps)


def _forward(weights: list[Tensor], x: Tensor) -> Tensor:
    for layer in range(0, len(weights), 2):
        x = functional.linear(x if layer == 0 else x.relu(), *weights[layer : layer + 2])
    return x


def _timed(
    step: Callable[[], Any],
    calls: int,
    steps_a_call: int = 1,
    accuracy: Callable[[], float] | None = None,
) -> Callable[[], Timing]:
    for _ in range(MLP_THINNING // steps_a_call):
        step()

    def timing() -> Timing:
        start = time.perf_counter()
        for _ in range(calls):
            step()
        seconds = (time.perf_counter() - start) / (calls * steps_a_call)
        return Timing({"": seconds}, accuracy=accuracy and accuracy())

    return timing
