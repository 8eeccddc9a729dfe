"""A program as it lies in `examples/`, and what is compared of its draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).parent / "examples"


@dataclass(frozen=True)
class Program:
    """A model, its data, and what has to become of them.

    Attributes:
        name: of its file.
        model: a Pyro model.
        data: the model's arguments, or a loader.
        right: the sites whose means and sds have to be those of `references.json`.
        refused: what the refusal has to say, of a model that may not be run.
    """

    name: str
    model: Any
    data: Any
    right: tuple[str, ...] = ()
    refused: str | None = None

    @classmethod
    def load(cls, name: str) -> Program:
        """Runs the program's file."""
        spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        right, refused = getattr(module, "right", ()), getattr(module, "refused", None)
        if bool(right) == bool(refused):
            raise ValueError(f"{name}: declare either the sites that are right, or the refusal")
        return cls(name, module.model, module.data, right, refused)


def names() -> list[str]:
    """Every program's name."""
    return sorted(path.stem for path in EXAMPLES.glob("*.py"))


def elements(values: Mapping[str, Any], sites: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Sites `[chains, draws, ...]` -> each scalar, "site" or "site[1,0]", `[chains, draws]`."""
    columns = {}
    for site in sites:
        value = np.asarray(values[site], np.float64)
        for index in np.ndindex(value.shape[2:]):
            name = f"{site}[{','.join(map(str, index))}]" if index else site
            columns[name] = value[(slice(None), slice(None), *index)]
    return columns
