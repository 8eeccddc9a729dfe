"""One step of all chains: a kernel's update, vmapped.

The step's batch, noise and hyperparameter values come in as tensors and nothing else changes
between steps, so that the same function can be traced and compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.drive.batches import Batch


class Density(Protocol):
    """What the engine needs of a log posterior."""

    @property
    def num_data(self) -> int: ...

    def grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Any]: ...


@dataclass(frozen=True)
class Target:
    """A log posterior on one batch, for one chain, as a kernel sees it."""

    density: Density
    layout: Layout
    arguments: rows.Arguments
    indices: Tensor | None

    def grad(self, position: Tensor) -> tuple[Tensor, Any]:
        """(Gradient of the log joint over N at the position [D], the evaluation)."""
        params = self.layout.unflatten(position)
        gradient, evaluation = self.density.grad(params, self.arguments, self.indices)
        return self.layout.flatten(gradient) / self.density.num_data, evaluation


@dataclass(frozen=True)
class Engine:
    """Moves all chains by one step.

    Positions are `[chains, D]`, latents first and then points: `pyro.param` sites and unfrozen
    weights, which all chains share.  Points get no noise, and each step's mean over chains;
    as updates are linear in the gradient, that moves them by their mean gradient at
    temperature 0.

    Attributes:
        kernel: the method.
        density: the log posterior.
        layout: of a position.
        num_latents: how many of a position's elements are latents; the rest are points.
    """

    kernel: Any
    density: Density
    layout: Layout
    num_latents: int

    def init(self, positions: Tensor, noise: Tensor, values: Mapping[str, Tensor]) -> Any:
        """The state of chains at positions `[chains, D]`, given noise `[chains, latents]`."""
        kernel = self._bound(values)
        state = torch.vmap(kernel.init)(positions, self._padded(noise))
        return self._shared(state)

    def step(
        self, state: Any, batch: Batch, noise: Tensor, values: Mapping[str, Tensor]
    ) -> tuple[Any, Any]:
        """(The next state, each chain's evaluation); noise is `[chains, normals, latents]`."""
        kernel = self._bound(values)

        def update(state: Any, arguments: Any, indices: Any, noise: Tensor) -> tuple[Any, Any]:
            target = Target(self.density, self.layout, arguments, indices)
            return kernel.update(state, target, noise)

        in_dims = (
            0,
            rows.vmap_dims(batch.arguments, 0 if batch.per_chain else None),
            None if batch.indices is None else 0,
            0,
        )
        step = torch.vmap(update, in_dims=in_dims)
        state, evaluation = step(state, batch.arguments, batch.indices, self._padded(noise))
        return self._shared(state), evaluation

    def _bound(self, values: Mapping[str, Tensor]) -> Any:
        """The kernel at this step's values, its temperature over N as in the paper."""
        scaled = {"temperature": values["temperature"] / self.density.num_data}
        return self.kernel.bind({**values, **scaled})

    def _padded(self, noise: Tensor) -> Tensor:
        return torch.nn.functional.pad(noise, (0, self.layout.size - self.num_latents))

    def _shared(self, state: Any) -> Any:
        if self.num_latents == self.layout.size:
            return state

        def share(leaf: Tensor) -> Tensor:
            sizes = [self.num_latents, self.layout.size - self.num_latents]
            own, points = leaf.split(sizes, dim=-1)
            finite = torch.isfinite(leaf).all(dim=-1, keepdim=True)  # a broken chain has no say
            mean = torch.where(finite, points, 0).sum(0) / finite.sum(0)
            return torch.cat([own, torch.where(finite, mean, points)], dim=-1)

        return pytree.tree_map(
            lambda leaf: share(leaf) if leaf.shape[-1:] == (self.layout.size,) else leaf, state
        )
