"""Limits on the memory and time that a run may ask for."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.core.memory import bytes_of, in_words
from pyro_scale.core.schedules import Cyclical
from pyro_scale.core.validation import as_count
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels.hyperparameters import Hyper

#: Steps of all chains that nobody waits for, and the least that one takes.
_MOST_STEPS, _SECONDS_A_STEP = 10**12, 1e-6


def check_length(num_draws: int, num_chains: int, steps: int) -> None:
    """Checks that a run ends within weeks at the speed of the smallest models, and that memory
    holds its draws' numbers and log joints.

    Raises:
        ArgumentError: it does not.
    """
    if steps * num_chains > _MOST_STEPS:
        days = steps * num_chains * _SECONDS_A_STEP / 86_400
        raise ArgumentError(
            f"{num_chains} x {steps:,} steps take {days:,.0f} days or more, at a microsecond each: "
            "pass a smaller thinning, warmup_steps or num_samples"
        )
    needed, there = num_draws * (1 + num_chains) * 8, bytes_of(torch.device("cpu")) // 2
    if needed > there:
        raise ArgumentError(
            f"num_samples={num_draws:,}: log joints of so many draws take {in_words(needed)} of "
            f"memory, and {in_words(there)} are for them: pass fewer, and a larger thinning",
            code="memory",
        )


def check_memory(positions: Tensor, num_draws: int, budget: int | None) -> None:
    """Checks that memory holds the draws of a run.

    Args:
        positions: of its chains, `[chains, D]`.
        num_draws: of each chain.
        budget: bytes that draws may take; half of the machine's by default.

    Raises:
        ArgumentError: they would take more; the budget is no number of bytes.
    """
    if budget is not None:
        budget = as_count("memory_budget", budget, hint=" of bytes")
    needed = num_draws * positions.numel() * positions.element_size()
    there = budget or bytes_of(torch.device("cpu")) // 2
    if needed > there:
        chains, size = positions.shape
        raise ArgumentError(
            f"num_samples={num_draws:,}: draws of {chains} x {size:,} numbers each would take "
            f"{in_words(needed)} of memory, and {in_words(there)} are for them: pass "
            "store='draws.zarr' to write them to disk, store=False to keep summaries only, a "
            "larger thinning, or memory_budget=",
            code="memory",
        )


def check_equal_weights(lr: Hyper, kept: Tensor) -> None:
    """Checks that draws count alike where they are only added up: that the step size is constant.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(lr, Cyclical) and bool((kept != kept[0]).any()):
        raise ArgumentError(
            "store=False adds draws up alike, but a step size that changes gives them weights: "
            "pass a path as store, or a constant lr"
        )
