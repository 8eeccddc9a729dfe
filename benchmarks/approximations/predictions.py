"""Predictions of 4,000 draws for 1,000 rows: ours, draw by draw, and the matrix products alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from models import logistic_model
from networks import trained
from ours import mlp_model
from problems import logistic_data
from protocol import Timing
from torch import Tensor

import pyro_scale as ps

DRAWS, ROWS, COLUMNS = 4000, 1000, 8
#: Draws that are taken together by the matrix products: as many as fit the cache.
TOGETHER = 16


def predict(hidden: tuple[int, ...] | None, way: str) -> Callable[[], Timing]:
    """The chances of a regression with 8 columns, or of a network's classes, in the mean over
    draws.

    Args:
        hidden: of the network; None for the regression.
        way: "ours", `predict` of a sampler; "each draw", a pass of torch's for each of the same
            draws; "products", its batched matrix products and biases without any function.
    """
    net: Any = None
    if hidden is None:
        x, y = map(torch.from_numpy, logistic_data(ROWS, COLUMNS))
        model: Any = logistic_model
    else:
        at = trained(hidden)
        x, y, net = at.x[:ROWS], at.y[:ROWS], at.net
        model = mlp_model(net)
    sampler = ps.BAOA(model, lr=1e-3)
    steps = {"num_samples": DRAWS, "warmup_steps": 0, "thinning": 1, "num_chains": 1}
    sampler.run((x, y), batch_size=32, seed=0, progress=False, **steps)
    draws = {name: value.contiguous() for name, value in sampler.get_samples().items()}

    def of_each() -> Tensor:
        total: Any = 0
        for place in range(DRAWS):
            draw = {name: value[place] for name, value in draws.items()}
            if net is None:
                total = total + torch.sigmoid(x @ draw["w"])
            else:
                total = total + torch.func.functional_call(net, draw, (x,)).softmax(-1)
        return total / DRAWS

    def products() -> Tensor:
        names = list(draws)
        for start in range(0, DRAWS, TOGETHER):
            part = slice(start, start + TOGETHER)
            values = x.expand(TOGETHER, -1, -1)
            for weight, bias in pairwise(names):
                if bias.endswith("bias"):
                    values = torch.baddbmm(draws[bias][part, None], values, draws[weight][part].mT)
        return values

    def ours() -> Tensor:
        return sampler.predict(x, reduce="mean")["y"]

    run = {"ours": ours, "each draw": of_each, "products": products}[way]
    run()

    def timing() -> Timing:
        begin = time.process_time()
        with torch.no_grad():
            found = run()
        seconds = time.process_time() - begin
        return Timing({"": seconds}, draws=None if way == "products" else found.reshape(1, -1))

    return timing
