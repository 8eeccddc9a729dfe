"""One step of all chains: a kernel's update, vmapped.

Batch, noise and hyperparameter values of a step are tensors, and nothing else changes from step to
step, so this function can be traced and compiled.  This file defines the step, `compile_step.py`
compiles it, and `executors.py` runs many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.core.whitening import Whitening
from pyro_scale.data.batches import Batch


class Density(Protocol):
    """What sampling needs of a log posterior."""

    @property
    def num_data(self) -> int:
        """N."""
        ...

    def grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Any]:
        """(Gradient of the log joint by site, its evaluation) for one chain, under vmap."""
        ...

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Any]:
        """The same with plain autograd, which cannot be vmapped."""
        ...

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Gradients of the rows' log likelihoods, by site."""
        ...


@runtime_checkable
class Coupled(Protocol):
    """A kernel whose chains interact: each moves by the gradients of all.  They share a batch."""

    def couple(self, positions: Tensor, gradients: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Direction of every chain, from all positions and gradients, all `[chains, D]`."""
        ...

    def move(self, state: Any, direction: Tensor, values: Mapping[str, Tensor]) -> Any:
        """A chain's next state, from its direction [D]."""
        ...


@dataclass(frozen=True)
class Target:
    """The log posterior on the batch of one chain, as a kernel sees it; a function of whitened
    coordinates if there is a whitening."""

    density: Density
    layout: Layout
    arguments: rows.Arguments
    indices: Tensor | None
    vectorized: bool
    whitening: Whitening | None = None

    @property
    def num_data(self) -> int:
        """N."""
        return self.density.num_data

    def grad(self, position: Tensor) -> tuple[Tensor, Any]:
        """(Gradient of the log joint at the position [D], over N; the log joint's evaluation)."""
        grad = self.density.grad if self.vectorized else self.density.plain_grad
        params = self.layout.unflatten(to_params(self.whitening, position))
        by_site, evaluation = grad(params, self.arguments, self.indices)
        gradient = self.layout.flatten(by_site) / self.density.num_data
        return _map_latents(self.whitening, "pull_back", gradient), evaluation

    def own(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The hyperparameters' values of this chain, for densities that change them by chain."""
        own_values = getattr(self.density, "own_values", None)
        return values if own_values is None else own_values(values, self.arguments)

    def total(self, values: Tensor) -> Tensor:
        """Sum of values over all elements of the chain, those of other processes included."""
        total: Tensor = getattr(self.density, "total", torch.sum)(values)
        return total


def to_params(whitening: Whitening | None, positions: Tensor) -> Tensor:
    """The unconstrained params `[..., D]` of chains at positions `[..., D]`."""
    return _map_latents(whitening, "to_params", positions)


def _map_latents(whitening: Whitening | None, method: str, vectors: Tensor) -> Tensor:
    """Vectors with their leading elements mapped by a method of a whitening; the other elements,
    which are points, are unchanged."""
    if whitening is None:
        return vectors
    size = len(whitening.tensors[0])
    mapped = getattr(whitening, method)(vectors[..., :size])
    if size == vectors.shape[-1]:
        return mapped
    return torch.cat([mapped, vectors[..., size:]], dim=-1)


@dataclass(frozen=True)
class Engine:
    """Moves all chains by one step.

    Positions are `[chains, D]`: latents, then points (`pyro.param` sites and unfrozen weights),
    which all chains share.  Points get no noise, and after each step the mean over chains.  As
    updates are linear in the gradient, they move by their mean gradient at temperature 0.

    Attributes:
        kernel: the method.
        density: the log posterior.
        layout: of a position.
        num_latents: number of a position's elements that are latents; the others are points.
        vectorized: False moves the chains one by one with plain autograd, for models that do not
            work under vmap or functorch's gradient.
        known_noise: variance of the minibatch gradient of the log joint over N, `[D]`, which is
            subtracted from the injected noise; None subtracts nothing.
        whitening: map from the coordinates in which the kernel moves to latents; None if it moves
            latents themselves.
    """

    kernel: Any
    density: Density
    layout: Layout
    num_latents: int
    vectorized: bool = True
    known_noise: Tensor | None = None
    whitening: Whitening | None = None

    def init(self, positions: Tensor, noise: Tensor, values: Mapping[str, Tensor]) -> Any:
        """The state of chains at params `[chains, D]`, with noise `[chains, latents]`."""
        values = self.kernel_values(values)
        positions = _map_latents(self.whitening, "to_whitened", positions)

        def init(position: Tensor, noise: Tensor) -> Any:
            return self.kernel.init(position, values, noise)

        return self._share_points(torch.vmap(init)(positions, self.pad(noise)))

    def step(
        self, state: Any, batch: Batch, noise: Tensor, values: Mapping[str, Tensor]
    ) -> tuple[Any, Any]:
        """(Next state, evaluations of the chains), with noise `[chains, normals, latents]`."""
        if isinstance(self.kernel, Coupled):
            return self._step_together(self.kernel, state, batch, values)
        values = self.subtract_known_noise(self.kernel_values(values))

        def update(arguments: Any, indices: Any, state: Any, noise: Tensor) -> tuple[Any, Any]:
            target = self._target(arguments, indices, self.whitening)
            return self.kernel.update(state, target, target.own(values), noise)

        state, evaluation = self._over_chains(update, batch, state, self.pad(noise))
        return self._share_points(state), evaluation

    def _step_together(
        self, kernel: Coupled, state: Any, batch: Batch, values: Mapping[str, Tensor]
    ) -> tuple[Any, Any]:
        """A step of chains that interact; points move by the mean gradient."""
        target = self._target(*batch.of_chain(0), self.whitening)
        gradients, evaluation = self._map_chains(target.grad, state.position)
        latents, points = gradients.split(self._sizes, 1)
        values = self.kernel.per_datum(values, self.density.num_data)
        directions = kernel.couple(state.position[:, : self.num_latents], latents, values)
        directions = torch.cat([directions, points.mean(0).expand_as(points)], 1)

        def move(state: Any, direction: Tensor) -> Any:
            return kernel.move(state, direction, values)

        return self._map_chains(move, state, directions), evaluation

    def evaluate(self, positions: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(Log joint of every chain at its params `[chains, D]`, gradient over N `[chains, D]`), as
        a step evaluates them."""

        def at(arguments: Any, indices: Any, position: Tensor) -> tuple[Tensor, Tensor]:
            gradient, evaluation = self._target(arguments, indices).grad(position)
            return evaluation.log_joint, gradient

        return self._over_chains(at, batch, positions)

    def gradient(self, positions: Tensor, batch: Batch) -> Tensor:
        """Gradient of the log joint over N of every chain at its params, `[chains, D]`."""

        def evaluate(arguments: Any, indices: Any, position: Tensor) -> Tensor:
            return self._target(arguments, indices).grad(position)[0]

        return self._over_chains(evaluate, batch, positions)

    def kinetic(self, state: Any, values: Mapping[str, Tensor]) -> Tensor:
        """Kinetic temperature p^2 / m of chains with a momentum, relative to the temperature set:
        means over the elements of each latent site, `[chains, latent sites]`."""
        values, device = self.kernel_values(values), state.momentum.device
        unit = (values["mass"] * values["temperature"]).expand(self.layout.size).to(device)
        momentum = state.momentum
        if self.whitening is not None:  # of the params' velocities
            momentum = _map_latents(self.whitening, "push_forward", momentum)
            variance, (_, num_points) = self.whitening.variance, self._sizes
            unit = unit * torch.nn.functional.pad(variance, (0, num_points), value=1.0)
        energy = momentum.double().square() / unit
        places = list(self.layout.slices().values())[: self.num_latent_sites]
        return torch.stack([energy[:, place].mean(1) for place in places], 1).cpu()

    @property
    def num_data(self) -> int:
        """N."""
        return self.density.num_data

    @property
    def num_latent_sites(self) -> int:
        """Number of latent sites."""
        return sum(place.stop <= self.num_latents for place in self.layout.slices().values())

    @property
    def has_points(self) -> bool:
        """Whether there are points."""
        return self.num_latents < self.layout.size

    @property
    def ties_chains(self) -> bool:
        """Whether chains must take a step together: they share points, or interact."""
        return self.has_points or isinstance(self.kernel, Coupled)

    def to_params(self, positions: Tensor) -> Tensor:
        """The unconstrained params `[..., D]` of states at these positions."""
        return to_params(self.whitening, positions)

    def _target(
        self, arguments: Any, indices: Tensor | None, whitening: Whitening | None = None
    ) -> Target:
        return Target(self.density, self.layout, arguments, indices, self.vectorized, whitening)

    def _over_chains(self, function: Callable[..., Any], batch: Batch, *states: Any) -> Any:
        """function(arguments, indices, *states) for every chain; states are `[chains, ...]`."""
        if self.vectorized:
            arguments = rows.vmap_dims(batch.arguments, 0 if batch.per_chain else None)
            indices = None if batch.indices is None else 0
            every = torch.vmap(function, in_dims=(arguments, indices, *(0 for _ in states)))
            return every(batch.arguments, batch.indices, *states)
        return _stack(
            function(*batch.of_chain(chain), *state)
            for chain, state in enumerate(_by_chain(states))
        )

    def _map_chains(self, function: Callable[..., Any], *states: Any) -> Any:
        """function(*states) for every chain; states are `[chains, ...]`."""
        if self.vectorized:
            return torch.vmap(function)(*states)
        return _stack(function(*state) for state in _by_chain(states))

    def kernel_values(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A step's values as the kernel takes them: the temperature over N; values that differ by
        site, or between latents and points, as vectors [D]."""
        scaled: dict[str, Tensor] = self.kernel.per_datum(values, self.density.num_data)
        for name, hyper in self.kernel.hyperparameters().items():
            if isinstance(hyper, Mapping):
                scaled[name] = self._by_site(hyper, scaled[name])
        if "temperature" in scaled and self.has_points:
            scaled["temperature"] = self._of_latents(scaled["temperature"])
        return scaled

    def latent_values(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of `kernel_values` for latents, in double precision."""
        return {
            name: value.double()[: self.num_latents] if value.dim() else value.double()
            for name, value in self.kernel_values(values).items()
        }

    def _of_latents(self, temperature: Tensor) -> Tensor:
        """The temperature as a vector [D], 0 for points."""
        num_latents, num_points = self._sizes
        cold = temperature.new_zeros(num_points, dtype=self.layout.dtype)
        return torch.cat([temperature.to(cold).expand(num_latents), cold])

    def subtract_known_noise(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values with a lower temperature, so that less noise is injected, by `known_noise`."""
        if self.known_noise is None:
            return dict(values)
        added = self.kernel.theory.added_temperature(values, self.known_noise)
        return {**values, "temperature": (values["temperature"] - added).clamp(min=0)}

    def _by_site(self, hyper: Mapping[str, Any], values: Tensor) -> Tensor:
        """A hyperparameter as a vector [D]: the values of the sites, times their tensors if any."""
        by_site = {}
        for place, (name, entry) in enumerate(hyper.items()):
            number = values[place].to(self.layout.dtype)
            factor = entry.to(self.layout.dtype) if isinstance(entry, Tensor) else 1.0
            shape = self.layout.shapes[self.layout.names.index(name)]
            by_site[name] = (number * factor).expand(shape)
        return self.layout.flatten(by_site)

    def pad(self, latents: Tensor) -> Tensor:
        """Values of latents `[..., latents]`, with 0 for points, `[..., D]`."""
        return torch.nn.functional.pad(latents, (0, self._sizes[1]))

    @property
    def _sizes(self) -> tuple[int, int]:
        """(Number of latents, number of points)."""
        return self.num_latents, self.layout.size - self.num_latents

    def _share_points(self, state: Any) -> Any:
        """The state with the points of all chains replaced by their mean."""
        if not self.has_points:
            return state

        def share(leaf: Tensor) -> Tensor:
            latents, points = leaf.split(self._sizes, dim=-1)
            finite = torch.isfinite(leaf).all(dim=-1, keepdim=True)  # not of a chain that breaks
            mean = torch.where(finite, points, 0).sum(0) / finite.sum(0)
            return torch.cat([latents, torch.where(finite, mean, points)], dim=-1)

        return pytree.tree_map(
            lambda leaf: share(leaf) if leaf.shape[1:] == (self.layout.size,) else leaf, state
        )


def _by_chain(states: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The states of one chain after another, from states `[chains, ...]`."""
    num_chains = len(pytree.tree_leaves(states)[0])
    return (pytree.tree_map(lambda leaf, c=c: leaf[c], states) for c in range(num_chains))


def _stack(by_chain: Iterable[Any]) -> Any:
    """Results of single chains, with chains as the first dimension."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *by_chain)
