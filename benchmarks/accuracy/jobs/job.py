"""A posterior whose data are simulated, or bundled with scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from entry import Posterior, Tensors, no_start
from torch import Tensor


@dataclass(frozen=True)
class Job(Posterior):
    """A posterior whose data are made in code, the same at every call."""

    def load(self) -> Tensors:
        """The data."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.read({})


def job(
    name: str,
    about: str,
    model: Callable[..., Any],
    simulate: Callable[[], Tensors],
    sites: tuple[str, ...],
    in_batches: bool = False,
    start: Callable[[Tensors], dict[str, Tensor]] = no_start,
) -> Job:
    """A job.  With `in_batches`, its rows are independent given the latents; `start` is where the
    reference starts: beside the modes that hold its chains, and next to no mass."""
    batch_size = 10 if in_batches else None
    return Job(f"jobs/{name}", about, model, lambda _: simulate(), batch_size, sites, start)


def groups(count: int, rows: int) -> Tensor:
    """The group of each row, `[rows]`: every group has some, at random more."""
    return torch.cat([torch.arange(count), torch.randint(count, (rows - count,))])
