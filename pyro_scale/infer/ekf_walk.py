"""How far params walk between the batches of an extended Kalman filter, `transition_sd`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from pyro_scale.core.layout import Layout
from pyro_scale.errors import ArgumentError

#: One sd for all params, or one a site: a number, or a tensor of the site's unconstrained shape.
TransitionSd: TypeAlias = float | Mapping[str, float | Tensor]


def check_transition_sd(given: object) -> None:
    """Refuses what is no sd.

    Raises:
        ArgumentError: it is negative or not finite, or neither a number nor a dict of them.
    """
    by_site = given if isinstance(given, Mapping) else {None: given}
    for site, value in by_site.items():
        argument = "transition_sd" if site is None else f"transition_sd['{site}']"
        kinds = "a number" if site is None else "a number or a tensor of them"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_tensor = site is not None and isinstance(value, Tensor) and value.dtype != torch.bool
        if not (is_number or is_tensor) or not _is_sd(torch.as_tensor(value)):
            raise ArgumentError(f"{argument}={value!r}: pass {kinds} >= 0")


def _is_sd(value: Tensor) -> bool:
    return bool((torch.isfinite(value) & (value >= 0)).all())


def does_walk(given: TransitionSd) -> bool:
    """Whether any param does."""
    sds = given.values() if isinstance(given, Mapping) else [given]
    return any(bool(torch.as_tensor(sd).any()) for sd in sds)


def drift_of(given: TransitionSd, layout: Layout) -> Tensor:
    """Each element's variance of the walk before a batch, [D].

    Raises:
        ArgumentError: a site that the model has not, or a tensor of another shape.
    """
    if not isinstance(given, Mapping):
        return torch.full((layout.size,), given, dtype=layout.dtype).square()
    if unknown := sorted(given.keys() - set(layout.names)):
        raise ArgumentError(
            f"transition_sd: {unknown} are no latent sites of the model, which has "
            f"{list(layout.names)}"
        )
    sds = {}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        sd = torch.as_tensor(given.get(name, 0.0), dtype=layout.dtype)
        if sd.shape not in (shape, torch.Size()):
            raise ArgumentError(
                f"transition_sd['{name}'] has the shape {list(sd.shape)}, the site "
                f"{list(shape)} in unconstrained space: pass a number or a tensor of that shape"
            )
        sds[name] = sd.expand(shape)
    return layout.flatten(sds).square()


def as_plain(given: TransitionSd) -> float | dict[str, object]:
    """The same as numbers and lists, to be written down."""
    if not isinstance(given, Mapping):
        return float(given)
    return {name: torch.as_tensor(value).tolist() for name, value in given.items()}
