"""The arguments of a sampler's run, checked."""

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
    """The arguments of `Sampler.run`, after checks.

    Attributes:
        num_samples: draws of each chain.
        warmup_steps: steps before the first draw; None if it is to be chosen.
        thinning: steps from one draw to the next; None if it is to be chosen.
        keeps: whether a step after warm-up may be kept; None if all may.
        num_chains: number of chains.
        superchains: number of groups of chains that share a start; None if none do.
        batch_size: rows a step, of tensors; None for all rows, or the loader's batches; `"auto"`
            if it is to be chosen.
        sampling: how rows are drawn.
        share_batches: whether all chains have the same batches.
        store: where draws go.
        memory_budget: bytes that draws may take in memory; None for half of the machine's memory.
        progress: whether a bar is shown.
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
        """How many steps there are, and which are kept; None if that is to be chosen."""
        if self.warmup_steps is None or self.thinning is None:
            return None
        return Steps(self.num_samples, self.warmup_steps, self.thinning, self.keeps)

    @property
    def facts(self) -> dict[str, Any]:
        """The arguments that a run must have in common with the one that resumes it, by name."""
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
    """Checks that a run could end within weeks, at the speed of the smallest models, and that its
    log joints fit into memory.

    Args:
        num_draws: of each chain.
        num_chains: number of chains.
        steps: of each chain.

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
    """Checks that the draws of a run fit into memory.

    Args:
        positions: of its chains, `[chains, D]`.
        num_draws: of each chain.
        budget: bytes that draws may take; by default half of the machine's memory.

    Raises:
        ArgumentError: they do not fit, or the budget is not a positive integer.
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
    """Checks that all draws have the same weight, as `store=False` adds them up unweighted: the
    step size has to be constant.

    Args:
        lr: the step size, as passed.
        kept: its values at the steps that are kept.

    Raises:
        ArgumentError: the step size changes.
    """
    if not isinstance(lr, Cyclical) and bool((kept != kept[0]).any()):
        raise ArgumentError(
            "store=False adds draws up alike, but a step size that changes gives them weights: "
            "pass a path as store, or a constant lr"
        )
