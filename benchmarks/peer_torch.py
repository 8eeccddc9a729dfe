"""PyTorch without a library: SGHMC on the logistic regression as a hand-written step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from problems import (
    FRICTION,
    LOGISTIC_BATCH,
    LOGISTIC_LR,
    LOGISTIC_THINNING,
    WARMUP,
    logistic_data,
)
from protocol import Timing
from torch import Tensor

ROWS, COLUMNS = 768, 8

#: Of compiled contenders; it makes small programs cheaper to call.
OPTIONS: dict[str, Any] = {"cpp_wrapper": True}


def log_joint(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The log joint over N, estimated from a batch, in few operations."""
    z = x @ w
    return (y * z - torch.nn.functional.softplus(z)).mean() - 0.5 * torch.dot(w, w) / ROWS


def logistic(steps: int, unrolled: int = 1) -> Callable[[], Timing]:
    """SGHMC, compiled; `unrolled` steps in one program."""
    x, y = (torch.from_numpy(a) for a in logistic_data(ROWS, COLUMNS))
    spread = (2 * LOGISTIC_LR * FRICTION / ROWS) ** 0.5

    def several(
        position: Tensor, momentum: Tensor, indices: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        for rows, normal in zip(indices.unbind(), noise.unbind(), strict=True):
            gradient = torch.func.grad(log_joint)(position, x[rows], y[rows])
            momentum = momentum + LOGISTIC_LR * (gradient - FRICTION * momentum) + spread * normal
            position = position + LOGISTIC_LR * momentum
        return position, momentum

    compiled = torch.compile(several, fullgraph=True, dynamic=False, options=OPTIONS)

    def step(state: tuple[Tensor, Tensor], indices: Tensor) -> tuple[Tensor, Tensor]:
        return compiled(*state, indices, torch.randn(len(indices), COLUMNS))

    state = (torch.zeros(COLUMNS), torch.zeros(COLUMNS))
    return timed_loop(step, state, lambda state: state[0], steps, unrolled)


def timed_loop(
    several: Callable[[Any, Tensor], Any],
    state: Any,
    position: Callable[[Any], Tensor],
    steps: int,
    unrolled: int = 1,
) -> Callable[[], Timing]:
    """Times a Python loop over `several(state, indices [unrolled, B])`, after warming it up."""

    def run(state: Any, steps: int) -> tuple[Any, list[Tensor]]:
        draws = []
        for step in range(0, steps, unrolled):
            state = several(state, torch.randint(ROWS, (unrolled, LOGISTIC_BATCH)))
            if step % LOGISTIC_THINNING == 0:
                draws.append(position(state).clone())
        return state, draws

    state, _ = run(state, WARMUP)

    def timing() -> Timing:
        nonlocal state
        start = time.perf_counter()
        state, draws = run(state, steps)
        seconds = time.perf_counter() - start
        return Timing({"": seconds / steps}, draws=torch.stack(draws).numpy())

    return timing
