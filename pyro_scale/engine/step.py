"""One step of all chains: a kernel's update, vmapped.

The step's batch, noise and hyperparameter values come in as tensors, and nothing else changes
between steps.  So the same function can be traced and compiled.  This file defines the step;
`executors.py` runs many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    def num_data(self) -> int: ...

    def grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Any]: ...

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Any]: ...

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]: ...


@runtime_checkable
class Coupled(Protocol):
    """A kernel whose chains move together, each by all gradients; they have one batch."""

    def couple(self, positions: Tensor, gradients: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Where each chain goes, from all positions and gradients, `[chains, D]`."""
        ...

    def move(self, state: Any, direction: Tensor, values: Mapping[str, Tensor]) -> Any:
        """A chain's next state, from where it goes, [D]."""
        ...


@dataclass(frozen=True)
class Target:
    """A log posterior on one batch, for one chain, as a kernel sees it: a function of whitened
    coordinates where there is a whitening."""

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
        """(Gradient of the log joint over N at the position [D], the evaluation)."""
        grad = self.density.grad if self.vectorized else self.density.plain_grad
        params = self.layout.unflatten(to_params(self.whitening, position))
        by_site, evaluation = grad(params, self.arguments, self.indices)
        gradient = self.layout.flatten(by_site) / self.density.num_data
        return _leading(self.whitening, "pull_back", gradient), evaluation

    def own(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The hyperparameters' values for this chain, where chains have values of their own."""
        own = getattr(self.density, "own_values", None)
        return values if own is None else own(values, self.arguments)

    def total(self, values: Tensor) -> Tensor:
        """The sum of a value for each element of the chain, of which a position may be a part."""
        total: Tensor = getattr(self.density, "total", torch.sum)(values)
        return total


def to_params(whitening: Whitening | None, positions: Tensor) -> Tensor:
    """Positions `[..., D]` of chains as unconstrained params."""
    return _leading(whitening, "to_params", positions)


def _leading(whitening: Whitening | None, way: str, vectors: Tensor) -> Tensor:
    """One of a whitening's maps, of vectors' leading elements; it leaves the others, which are
    points."""
    if whitening is None:
        return vectors
    size = len(whitening.tensors[0])
    mapped = getattr(whitening, way)(vectors[..., :size])
    if size == vectors.shape[-1]:
        return mapped
    return torch.cat([mapped, vectors[..., size:]], dim=-1)


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
        vectorized: False moves the chains one by one with plain autograd, for models that vmap
            or functorch's gradient refuses.
        known_noise: the variance of the minibatch gradient of the log joint over N, `[D]`, which
            is taken off the injected noise; None leaves that whole.
        whitening: the map from the coordinates that the kernel moves in to latents; None where it
            moves latents themselves.
    """

    kernel: Any
    density: Density
    layout: Layout
    num_latents: int
    vectorized: bool = True
    known_noise: Tensor | None = None
    whitening: Whitening | None = None

    def init(self, positions: Tensor, noise: Tensor, values: Mapping[str, Tensor]) -> Any:
        """The state of chains at params `[chains, D]`, given noise `[chains, latents]`."""
        values = self.kernel_values(values)
        positions = _leading(self.whitening, "to_whitened", positions)

        def init(position: Tensor, noise: Tensor) -> Any:
            return self.kernel.init(position, values, noise)

        return self._share_points(torch.vmap(init)(positions, self.pad(noise)))

    def step(
        self, state: Any, batch: Batch, noise: Tensor, values: Mapping[str, Tensor]
    ) -> tuple[Any, Any]:
        """(The next state, each chain's evaluation); noise is `[chains, normals, latents]`."""
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
        """A step of chains that see each other.  Points, which they share, go by the mean
        gradient."""
        target = self._target(*batch.of_chain(0), self.whitening)
        gradients, evaluation = self._each(target.grad, state.position)
        own, points = gradients.split([self.num_latents, self.layout.size - self.num_latents], 1)
        values = self.kernel.per_datum(values, self.density.num_data)
        directions = kernel.couple(state.position[:, : self.num_latents], own, values)
        directions = torch.cat([directions, points.mean(0).expand_as(points)], 1)

        def move(state: Any, direction: Tensor) -> Any:
            return kernel.move(state, direction, values)

        return self._each(move, state, directions), evaluation

    def evaluate(self, positions: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(Each chain's log joint at its params, its gradient over N, `[chains, D]`), the way
        that a step evaluates them."""

        def at(arguments: Any, indices: Any, position: Tensor) -> tuple[Tensor, Tensor]:
            gradient, evaluation = self._target(arguments, indices).grad(position)
            return evaluation.log_joint, gradient

        return self._over_chains(at, batch, positions)

    def gradient(self, positions: Tensor, batch: Batch) -> Tensor:
        """The gradient of each chain's log joint over N at its params, `[chains, D]`."""

        def evaluate(arguments: Any, indices: Any, position: Tensor) -> Tensor:
            return self._target(arguments, indices).grad(position)[0]

        return self._over_chains(evaluate, batch, positions)

    def kinetic(self, state: Any, values: Mapping[str, Tensor]) -> Tensor:
        """Each chain's kinetic temperature p^2 / m over the one asked for, on average over each
        latent site's elements, `[chains, latent sites]`, of a state with a momentum."""
        values, device = self.kernel_values(values), state.momentum.device
        unit = (values["mass"] * values["temperature"]).expand(self.layout.size).to(device)
        momentum = state.momentum
        if self.whitening is not None:  # of the params' velocities
            momentum = _leading(self.whitening, "push_forward", momentum)
            variance, rest = self.whitening.variance, self.layout.size - self.num_latents
            unit = unit * torch.nn.functional.pad(variance, (0, rest), value=1.0)
        energy = momentum.double().square() / unit
        places = list(self.layout.slices().values())[: self.num_latent_sites]
        return torch.stack([energy[:, place].mean(1) for place in places], 1).cpu()

    @property
    def num_data(self) -> int:
        """N."""
        return self.density.num_data

    @property
    def num_latent_sites(self) -> int:
        """How many sites are latents."""
        return sum(place.stop <= self.num_latents for place in self.layout.slices().values())

    @property
    def has_points(self) -> bool:
        """Whether there are points, which all chains share."""
        return self.num_latents < self.layout.size

    @property
    def ties_chains(self) -> bool:
        """Whether chains take a step together: they share points, or see each other."""
        return self.has_points or isinstance(self.kernel, Coupled)

    def to_params(self, positions: Tensor) -> Tensor:
        """Unconstrained params `[..., D]` where states are at these positions."""
        return to_params(self.whitening, positions)

    def _target(
        self, arguments: Any, indices: Tensor | None, whitening: Whitening | None = None
    ) -> Target:
        return Target(self.density, self.layout, arguments, indices, self.vectorized, whitening)

    def _over_chains(self, function: Callable[..., Any], batch: Batch, *states: Any) -> Any:
        """function(arguments, indices, *states) for every chain; states are `[chains, ...]`."""
        if self.vectorized:
            every = torch.vmap(function, in_dims=(*_batch_dims(batch), *(0 for _ in states)))
            return every(batch.arguments, batch.indices, *states)
        num_chains = len(pytree.tree_leaves(states)[0])
        return _stack(
            function(*batch.of_chain(c), *pytree.tree_map(lambda leaf, c=c: leaf[c], states))
            for c in range(num_chains)
        )

    def _each(self, function: Callable[..., Any], *states: Any) -> Any:
        """function(*states) for every chain; states are `[chains, ...]`."""
        if self.vectorized:
            return torch.vmap(function)(*states)
        num_chains = len(pytree.tree_leaves(states)[0])
        return _stack(
            function(*pytree.tree_map(lambda leaf, c=c: leaf[c], states)) for c in range(num_chains)
        )

    def kernel_values(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A step's values as the kernel takes them: the temperature over N, and what differs from
        site to site, or from latents to points, as vectors [D]."""
        scaled: dict[str, Tensor] = self.kernel.per_datum(values, self.density.num_data)
        for name, hyper in self.kernel.hyperparameters().items():
            if isinstance(hyper, Mapping):
                scaled[name] = self._by_site(hyper, scaled[name])
        if "temperature" in scaled and self.has_points:
            scaled["temperature"] = self._of_latents(scaled["temperature"])
        return scaled

    def latent_values(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `kernel_values`, for latents alone and in double precision."""
        return {
            name: value.double()[: self.num_latents] if value.dim() else value.double()
            for name, value in self.kernel_values(values).items()
        }

    def _of_latents(self, temperature: Tensor) -> Tensor:
        sizes = self.num_latents, self.layout.size - self.num_latents
        cold = temperature.new_zeros(sizes[1], dtype=self.layout.dtype)
        return torch.cat([temperature.to(cold).expand(sizes[0]), cold])

    def subtract_known_noise(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values with less injected noise, by the known noise of minibatches."""
        if self.known_noise is None:
            return dict(values)
        added = self.kernel.theory.added_temperature(values, self.known_noise)
        return {**values, "temperature": (values["temperature"] - added).clamp(min=0)}

    def _by_site(self, hyper: Mapping[str, Any], values: Tensor) -> Tensor:
        """A hyperparameter as a vector [D]: every site's value, times its tensor if it has one."""
        of_site = {}
        for place, (name, given) in enumerate(hyper.items()):
            number = values[place].to(self.layout.dtype)
            factor = given.to(self.layout.dtype) if isinstance(given, Tensor) else 1.0
            shape = self.layout.shapes[self.layout.names.index(name)]
            of_site[name] = (number * factor).expand(shape)
        return self.layout.flatten(of_site)

    def pad(self, latents: Tensor) -> Tensor:
        """Values of latents `[..., latents]`, and 0 for points, `[..., D]`."""
        return torch.nn.functional.pad(latents, (0, self.layout.size - self.num_latents))

    def _share_points(self, state: Any) -> Any:
        if not self.has_points:
            return state

        def share(leaf: Tensor) -> Tensor:
            sizes = [self.num_latents, self.layout.size - self.num_latents]
            own, points = leaf.split(sizes, dim=-1)
            finite = torch.isfinite(leaf).all(dim=-1, keepdim=True)  # not of a chain that breaks
            mean = torch.where(finite, points, 0).sum(0) / finite.sum(0)
            return torch.cat([own, torch.where(finite, mean, points)], dim=-1)

        return pytree.tree_map(
            lambda leaf: share(leaf) if leaf.shape[1:] == (self.layout.size,) else leaf, state
        )


def _stack(of_chains: Iterable[Any]) -> Any:
    """What single chains give, with chains as the first dimension."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *of_chains)


def _batch_dims(batch: Batch) -> tuple[Any, int | None]:
    """`in_dims` of a batch's arguments and indices."""
    return (
        rows.vmap_dims(batch.arguments, 0 if batch.per_chain else None),
        None if batch.indices is None else 0,
    )
