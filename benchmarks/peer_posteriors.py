"""posteriors: SGHMC on the logistic regression, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import posteriors
import pyro
import torch
from models import logistic_model
from peer_torch import COLUMNS, OPTIONS, ROWS, log_joint, timed_loop
from problems import FRICTION, LOGISTIC_LR, logistic_data
from protocol import Timing
from pyro import poutine
from torch import Tensor

Batch = tuple[Tensor, Tensor]


def through_pyro(params: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """The Pyro model's log joint over N, which is posteriors' convention (temperature 1/N)."""
    trace = poutine.trace(poutine.condition(logistic_model, data=params)).get_trace(*batch)
    trace.compute_log_prob()
    prior, likelihood = trace.nodes["w"], trace.nodes["y"]
    value = prior["log_prob_sum"] / ROWS + likelihood["log_prob_sum"] / len(batch[0])
    return value, torch.tensor([])


def by_hand(params: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """The same in few operations."""
    return log_joint(params["w"], *batch), torch.tensor([])


def logistic(
    density: str, steps: int, compiled: bool = False, unrolled: int = 1
) -> Callable[[], Timing]:
    """The sampler on "through_pyro" or "by_hand"; `unrolled` steps in one compiled program."""
    pyro.enable_validation(False)  # which costs a quarter of the step
    x, y = (torch.from_numpy(a) for a in logistic_data(ROWS, COLUMNS))
    log_posterior = {"through_pyro": through_pyro, "by_hand": by_hand}[density]
    sghmc = posteriors.sgmcmc.sghmc.build(
        log_posterior, lr=LOGISTIC_LR, alpha=FRICTION, temperature=1 / ROWS
    )

    def several(state: Any, indices: Tensor) -> Any:
        for chosen in indices.unbind():
            state, _ = sghmc.update(state, (x[chosen], y[chosen]), inplace=not compiled)
        return state

    if compiled:
        several = torch.compile(several, fullgraph=True, dynamic=False, options=OPTIONS)
    state = sghmc.init({"w": torch.zeros(COLUMNS)})
    return timed_loop(several, state, lambda state: state.params["w"], steps, unrolled)
