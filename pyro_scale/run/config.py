"""The arguments of `Sampler.run` after they were checked, and checks that a run's length and memory
are possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_scale.core.memory import bytes_of, in_words
from pyro_scale.core.schedules import Cyclical
from pyro_scale.core.validation import AUTO, as_count
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.draws import Steps
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels.hyperparameters import Hyper
from pyro_scale.storage.files import FilePath

#: Where draws go: None for memory, a path for a Zarr store, False to keep summaries only.
Store = FilePath | Literal[False] | None


@dataclass(frozen=True)
class RunConfig:
    """The arguments of `Sampler.run`, after they were checked.

    Attributes:
        num_samples: number of draws of each chain.
        warmup_steps: number of steps before the first draw; None if tuning is to choose it.
        thinning: number of steps from one draw to the next; None if tuning is to choose it.
        keeps: function from the number of a step after warm-up to whether a draw may be kept after
            it; None if one may be kept after any step.
        num_chains: number of chains.
        superchains: number of groups of chains that share a start; None if each chain has its own.
        batch_size: number of rows of a step's minibatch, for data in tensors; None for all rows, or
            the loader's minibatches; `"auto"` if tuning is to choose it.
        sampling: how the rows of minibatches are drawn, such as "shuffle" or "replacement".
        share_batches: whether all chains have the same minibatches.
        store: where draws are stored: None for memory, a path for a Zarr store, False for summaries
            only.
        memory_budget: bytes that draws may take in memory; None for half of the machine's memory.
        progress: whether a progress bar is shown.
    """

    num_samples: int
    warmup_steps: int | None
    thinning: int | None
    keeps: Callable[[int], bool] | None
    num_chains: int
    superchains: int | None
    batch_size: int | Literal["auto"] | None
    sampling: Sampling
    share_batches: bool
    store: Store
    memory_budget: int | None
    progress: bool

    @property
    def steps(self) -> Steps | None:
        """The schedule of the run: its number of steps, and the steps after which draws are kept.
        None if tuning is still to choose warm-up or thinning.
        """
        if self.warmup_steps is None or self.thinning is None:
            return None
        return Steps(self.num_samples, self.warmup_steps, self.thinning, self.keeps)

    @property
    def facts(self) -> dict[str, Any]:
        """Those arguments of a run, by name, that have to be the same in a run that resumes it,
        such as the thinning; checkpoints store them for comparison."""
        facts: dict[str, Any] = {
            "warmup_steps": AUTO if self.warmup_steps is None else self.warmup_steps,
            "thinning": AUTO if self.thinning is None else self.thinning,
            "num_chains": self.num_chains,
            "sampling": self.sampling,
            "share_batches": int(self.share_batches),
        }
        if self.superchains is not None:
            facts["superchains"] = self.superchains
        return facts


#: Most steps of all chains, beyond which a run raises an error; and the least seconds of a step.
_MOST_STEPS, _SECONDS_A_STEP = 10**12, 1e-6


def check_length(num_draws: int, num_chains: int, steps: int) -> None:
    """Raises if a run cannot end within weeks even at the speed of the smallest models, or if the
    log joints of its draws, one number each, do not fit into memory.

    Args:
        num_draws: number of draws of each chain.
        num_chains: number of chains.
        steps: number of steps of each chain.

    Raises:
        ArgumentError: the run is too long, or its log joints do not fit.
    """
    if steps * num_chains > _MOST_STEPS:
        days = steps * num_chains * _SECONDS_A_STEP / 86_400
        raise ArgumentError(
            f"{num_chains} x {steps:,} steps take {days:,.0f} days or more, at a microsecond each: "
            "pass a smaller thinning, warmup_steps or num_samples"
        )
    needed, available = num_draws * (1 + num_chains) * 8, bytes_of(torch.device("cpu")) // 2
    if needed > available:
        raise ArgumentError(
            f"num_samples={num_draws:,}: log joints of so many draws take {in_words(needed)} of "
            f"memory, and {in_words(available)} are available: pass fewer, and a larger thinning",
            code="memory",
        )


def check_memory(positions: Tensor, num_draws: int, budget: int | None) -> None:
    """Raises if the draws of a run do not fit into memory.

    Args:
        positions: starts of the run's chains, `[chains, D]`, which give the size of a draw.
        num_draws: number of draws of each chain.
        budget: bytes that draws may take; None for half of the machine's memory.

    Raises:
        ArgumentError: the draws do not fit, or the budget is not a positive integer.
    """
    if budget is not None:
        budget = as_count("memory_budget", budget, hint=" of bytes")
    needed = num_draws * positions.numel() * positions.element_size()
    available = budget or bytes_of(torch.device("cpu")) // 2
    if needed > available:
        chains, size = positions.shape
        raise ArgumentError(
            f"num_samples={num_draws:,}: draws of {chains} x {size:,} numbers each would take "
            f"{in_words(needed)} of memory, and {in_words(available)} are available: pass "
            "store='draws.zarr' to write them to disk, store=False to keep summaries only, a "
            "larger thinning, or memory_budget=",
            code="memory",
        )


def check_equal_weights(lr: Hyper, kept: Tensor) -> None:
    """Raises if draws have different weights because the step size changes: `store=False` averages
    draws without weights.

    Args:
        lr: the step size as the user passed it; a `Cyclical` is accepted.
        kept: step sizes at the steps after which a draw is kept, `[draws, ...]`, which are compared
            with each other.

    Raises:
        ArgumentError: the step size changes.
    """
    if not isinstance(lr, Cyclical) and bool((kept != kept[0]).any()):
        raise ArgumentError(
            "store=False adds draws up alike, but a step size that changes gives them weights: "
            "pass a path as store, or a constant lr"
        )
