"""The arguments of a run, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pyro_scale.core.validation import AUTO
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.draws import Steps
from pyro_scale.storage.files import FilePath

#: Where draws go: None is memory, a path is a Zarr store, False is nowhere.
Store = FilePath | Literal[False] | None


@dataclass(frozen=True)
class RunConfig:
    """What a run was asked for.

    Attributes:
        num_samples: draws of each chain.
        warmup_steps: before the first draw; None where that is to be chosen.
        thinning: steps from one draw to the next; None likewise.
        keeps: whether a step may be kept once warm-up is over; None if all may.
        num_chains: how many chains.
        superchains: how many groups of them share a start; None where each has its own.
        batch_size: rows a step, for tensors; None for all, or the loader's; or to be chosen.
        sampling: how rows are drawn.
        share_batches: whether all chains have the same.
        store: where draws go.
        memory_budget: bytes that draws may take in memory; None for half of the machine's.
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
        """How many there are and which are kept; None where that is to be chosen."""
        if self.warmup_steps is None or self.thinning is None:
            return None
        return Steps(self.num_samples, self.warmup_steps, self.thinning, self.keeps)

    @property
    def facts(self) -> dict[str, Any]:
        """What of it is among a run's facts, and has to be alike for another to go on with it."""
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
