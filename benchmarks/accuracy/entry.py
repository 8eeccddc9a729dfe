"""A posterior to sample: its model, its data, and how to run it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from exact import Moments
from torch import Tensor

Tensors = tuple[Tensor, ...]


def no_start(data: Tensors) -> dict[str, Tensor]:
    """All sites start where the library puts them."""
    return {}


@dataclass(frozen=True)
class Posterior:
    """A model, its data, and how to run it.

    Attributes:
        name: posteriordb's, `data-model`; `-scaled` behind it marks the same model in units that
            a method of first order gets somewhere in, unlike the published ones.
        about: what it is, and what makes it hard.
        model: takes the tensors, whose first dimension is rows.
        read: the file's content, lists as tensors -> the model's tensors.
        batch_size: rows of a minibatch; None where rows do not stand alone, or are few.
        sites: whose elements are compared: the published parameters.
        start: constrained values where chains start, for sites that a random start is bad for.
        exact: the tensors -> moments by quadrature, for linear regressions.
        same_as: the name of a posterior with the same moments, whose reference serves both.
    """

    name: str
    about: str
    model: Callable[..., Any]
    read: Callable[[dict[str, Any]], Tensors]
    batch_size: int | None = None
    sites: tuple[str, ...] = ("beta", "sigma")
    start: Callable[[Tensors], dict[str, Tensor]] = no_start
    exact: Callable[[Tensors], Moments] | None = None
    same_as: str | None = None

    @property
    def file(self) -> Path:
        """Where the data are: `$PYRO_SCALE_DATA/posteriordb`, ../shared/data by default."""
        folder = Path(os.environ.get("PYRO_SCALE_DATA", "../shared/data"))
        root = Path(__file__).resolve().parents[2]  # relative paths are from the repository
        return root / folder / "posteriordb" / f"{self.name.partition('-')[0]}.json"

    def load(self) -> Tensors | None:
        """The data; None, and a line that says so, if the file is missing."""
        if not self.file.exists():
            print(f"{self.name}: skipped, no {self.file} (set PYRO_SCALE_DATA)", flush=True)
            return None
        content = json.loads(self.file.read_text())
        return self.read(
            {
                key: torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
                for key, value in content.items()
            }
        )


def elements(values: dict[str, Tensor], sites: tuple[str, ...]) -> dict[str, Tensor]:
    """Sites `[chains, draws, ...]` -> each scalar, "site" or "site[index]", `[chains, draws]`."""
    found = {}
    for site in sites:
        if values[site].ndim == 2:
            found[site] = values[site]
        else:
            columns = values[site].flatten(2).unbind(-1)
            found |= {f"{site}[{index}]": column for index, column in enumerate(columns)}
    return found
