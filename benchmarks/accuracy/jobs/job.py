"""A posterior whose data are simulated, or bundled with scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from entry import Posterior, Tensors


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
) -> Job:
    """A job; with `in_batches`, its rows are independent given the latents."""
    return Job(
        f"jobs/{name}", about, model, lambda _: simulate(), 10 if in_batches else None, sites
    )


def groups(count: int, rows: int) -> torch.Tensor:
    """The group of each row, `[rows]`: every group has some, at random more."""
    return torch.cat([torch.arange(count), torch.randint(count, (rows - count,))])
