"""One step of all chains: a kernel's update, vmapped.

Minibatch, standard normal numbers and hyperparameters of a step are tensors, and nothing else
changes from step to step, so this function can be traced and compiled. This file defines the step,
`compile_step.py` compiles it, and `executors.py` runs many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.whitening import Whitening
from pyro_scale.data.batches import Batch


class Density(Protocol):
    """Protocol of a log posterior, as sampling needs it: gradients of the log joint, estimated from
    minibatches for all N rows.
    """

    @property
    def num_data(self) -> int:
        """N, the number of rows of the whole data."""
        ...

    def grad(
        self, params: Mapping[str, Tensor], batch: Arguments, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """(Gradient of the minibatch estimate of the log joint with respect to params, by site; the
        model's evaluation with that log joint) for one chain. Works under `torch.vmap`.

        Args:
            params: unconstrained parameters by site.
            batch: the model's arguments, with the rows of one minibatch.
            indices: indices of the rows `[B]`, for a model that subsamples by itself; None for
                others.
        """
        ...

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Arguments, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """(Gradient of the minibatch estimate of the log joint with respect to params, by site; the
        model's evaluation with that log joint) for one chain, by plain autograd. Works for more
        models than `grad`, but not under `torch.vmap`. Arguments as for `grad`.
        """
        ...

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Arguments, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Gradients of the log likelihood of each row of a minibatch with respect to params, `[B,
        *shape]` by site. Arguments as for `grad`."""
        ...


class State(Protocol):
    """The state of a sampler's kernel: a named tuple of tensors."""

    @property
    def position(self) -> Tensor:
        """Where a chain is, `[D]`; of all chains, `[chains, D]`."""
        ...


@runtime_checkable
class Coupled(Protocol):
    """A sampler's kernel whose chains interact, such as SVGD: each chain's step depends on the
    positions and gradients of all chains. The chains have one minibatch in common."""

    def couple(self, positions: Tensor, gradients: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """The direction in which every chain moves, `[chains, D]`.

        Args:
            positions: positions of all chains, `[chains, D]`.
            gradients: gradients at these positions of the log joint divided by N, the number of
                rows of the data, `[chains, D]`.
            values: hyperparameters of the step, tensors by name.
        """
        ...

    def move(self, state: Any, direction: Tensor, values: Mapping[str, Tensor]) -> Any:
        """The next state of one chain, from the chain's state and the direction [D] in which it
        moves."""
        ...


@dataclass(frozen=True)
class Target:
    """A sampler's view of the log posterior on the minibatch of one chain: a function of the
    position [D] at which the sampler's kernel moves. With a whitening (a linear map to coordinates
    in which the posterior is isotropic), positions are whitened coordinates.
    """

    density: Density
    layout: Layout
    arguments: Arguments
    indices: Tensor | None
    vectorized: bool
    whitening: Whitening | None = None

    @property
    def num_data(self) -> int:
        """N, the number of rows of the whole data."""
        return self.density.num_data

    def grad(self, position: Tensor) -> tuple[Tensor, Evaluation]:
        """(Gradient `[D]`, at a position [D], of the log joint divided by N, the number of rows of
        the data; the model's evaluation with the log joint itself, in nats).
        """
        grad = self.density.grad if self.vectorized else self.density.plain_grad
        params = self.layout.unflatten(to_params(self.whitening, position))
        by_site, evaluation = grad(params, self.arguments, self.indices)
        gradient = self.layout.flatten(by_site) / self.density.num_data
        return _map_latents(self.whitening, "pull_back", gradient), evaluation

    def own(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The hyperparameters of this chain's step, tensors by name: `values` themselves, unless
        the density has others for each chain.
        """
        own_values = getattr(self.density, "own_values", None)
        return values if own_values is None else own_values(values, self.arguments)

    def total(self, values: Tensor) -> Tensor:
        """The sum of all elements of a vector of a chain, 0-d. Where processes divide the chain's
        elements among themselves, the sum includes those of other processes.
        """
        total: Tensor = getattr(self.density, "total", torch.sum)(values)
        return total


def to_params(whitening: Whitening | None, positions: Tensor) -> Tensor:
    """Unconstrained params `[..., D]` at the positions `[..., D]` where a sampler's kernel moves,
    whose latents may be whitened; without a whitening, the positions themselves."""
    return _map_latents(whitening, "to_params", positions)


def _map_latents(whitening: Whitening | None, method: str, vectors: Tensor) -> Tensor:
    """Vectors `[..., D]` whose leading elements, the latents, are mapped by a method of a
    whitening. The other elements, of point-estimated parameters, are unchanged; so is everything
    without a whitening.

    Args:
        whitening: map between whitened coordinates and latents; None for no map.
        method: name of the whitening's method, such as "to_params".
        vectors: the vectors to map.
    """
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

    Positions are `[chains, D]`: latents, then point-estimated parameters (`pyro.param` sites and
    unfrozen weights), "points" for short, which all chains share. Points get no noise, and are
    averaged over chains after each step. As updates are linear in the gradient, points move by the
    mean gradient of the chains, at temperature 0.

    Attributes:
        kernel: the sampler's kernel, which defines the update of one chain.
        density: the log posterior.
        layout: names, shapes and dtypes of the sites, in the order of their elements in the vector
            [D].
        num_latents: number of a position's elements that are latents; the others are points.
        vectorized: False moves the chains one by one with plain autograd, for models that do not
            work under vmap or functorch's gradient.
        known_noise: variance of the minibatch gradient of the log joint divided by N, the number of
            rows of the data, `[D]`; less noise is injected, by as much as this variance heats the
            chain; None for no correction.
        whitening: map from the coordinates in which the kernel moves to latents; None if the kernel
            moves latents themselves.
    """

    kernel: Any
    density: Density
    layout: Layout
    num_latents: int
    vectorized: bool = True
    known_noise: Tensor | None = None
    whitening: Whitening | None = None

    def init(self, positions: Tensor, noise: Tensor, values: Mapping[str, Tensor]) -> State:
        """The state of the sampler's kernel for chains that start at params.

        Args:
            positions: unconstrained parameters, `[chains, D]`.
            noise: standard normal numbers for initial momenta, `[chains, latents]`.
            values: hyperparameters at the first step, by name.
        """
        values = self.kernel_values(values)
        positions = _map_latents(self.whitening, "to_whitened", positions)

        def init(position: Tensor, noise: Tensor) -> State:
            return self.kernel.init(position, values, noise)

        return self._share_points(torch.vmap(init)(positions, self.pad(noise)))

    def step(
        self, state: State, batch: Batch, noise: Tensor, values: Mapping[str, Tensor]
    ) -> tuple[State, Evaluation]:
        """Takes one step with every chain. Returns (next state of the sampler's kernel, evaluations
        of the model with the log joints in nats), both for all chains.

        Args:
            state: the state of the sampler's kernel before the step, for all chains.
            batch: the minibatches of all chains.
            noise: standard normal numbers, `[chains, normals, latents]`.
            values: hyperparameters of the step, by name.
        """
        if isinstance(self.kernel, Coupled):
            return self._step_together(self.kernel, state, batch, values)
        values = self.subtract_known_noise(self.kernel_values(values))

        def update(
            arguments: Arguments, indices: Tensor | None, state: State, noise: Tensor
        ) -> tuple[State, Evaluation]:
            target = self._target(arguments, indices, self.whitening)
            return self.kernel.update(state, target, target.own(values), noise)

        state, evaluation = self._over_chains(update, batch, state, self.pad(noise))
        return self._share_points(state), evaluation

    def _step_together(
        self, kernel: Coupled, state: State, batch: Batch, values: Mapping[str, Tensor]
    ) -> tuple[State, Evaluation]:
        """Takes a step with chains that interact: latents move in the directions that the kernel
        computes from all chains, points by the mean gradient. Returns (next state of the sampler's
        kernel, evaluations of the model with the log joints), both for all chains.
        """
        target = self._target(*batch.of_chain(0), self.whitening)
        gradients, evaluation = self._map_chains(target.grad, state.position)
        latents, points = gradients.split(self._sizes, 1)
        values = self.kernel.per_datum(values, self.density.num_data)
        directions = kernel.couple(state.position[:, : self.num_latents], latents, values)
        directions = torch.cat([directions, points.mean(0).expand_as(points)], 1)

        def move(state: State, direction: Tensor) -> State:
            return kernel.move(state, direction, values)

        return self._map_chains(move, state, directions), evaluation

    def evaluate(self, positions: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(Minibatch log joint of every chain at its params `[chains, D]`, in nats, `[chains]`; its
        gradient divided by N, the number of rows of the data, `[chains, D]`), computed just as in a
        step.
        """

        def at(
            arguments: Arguments, indices: Tensor | None, position: Tensor
        ) -> tuple[Tensor, Tensor]:
            gradient, evaluation = self._target(arguments, indices).grad(position)
            return evaluation.log_joint, gradient

        return self._over_chains(at, batch, positions)

    def gradient(self, positions: Tensor, batch: Batch) -> Tensor:
        """The gradient of every chain's minibatch log joint, divided by N (the number of rows of
        the data), with respect to all D unconstrained parameters: `[chains, D]`. `positions` are
        the chains' params, `[chains, D]`.
        """

        def evaluate(arguments: Arguments, indices: Tensor | None, position: Tensor) -> Tensor:
            return self._target(arguments, indices).grad(position)[0]

        return self._over_chains(evaluate, batch, positions)

    def kinetic(self, state: Any, values: Mapping[str, Tensor]) -> Tensor:
        """Kinetic temperature p^2 / m of each latent site and chain, relative to the temperature
        set, averaged over the site's elements: `[chains, latent sites]`, about 1 at equilibrium.

        Args:
            state: state of a kernel with a momentum, for all chains.
            values: the step's hyperparameters, by name.
        """
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
        """N, the number of rows of the whole data."""
        return self.density.num_data

    @property
    def num_latent_sites(self) -> int:
        """The number of the model's latent sites; they come first in `layout`, before
        point-estimated ones.
        """
        return sum(place.stop <= self.num_latents for place in self.layout.slices().values())

    @property
    def has_points(self) -> bool:
        """Whether the model has point-estimated parameters (`pyro.param` sites, unfrozen weights),
        which all chains share.
        """
        return self.num_latents < self.layout.size

    @property
    def ties_chains(self) -> bool:
        """Whether all chains must take a step at the same time, on one process: they share
        point-estimated parameters, or the sampler's kernel makes them interact.
        """
        return self.has_points or isinstance(self.kernel, Coupled)

    def to_params(self, positions: Tensor) -> Tensor:
        """The unconstrained params `[..., D]` of chains whose kernel moves at positions `[..., D]`;
        the positions themselves without a whitening."""
        return to_params(self.whitening, positions)

    def _target(
        self, arguments: Arguments, indices: Tensor | None, whitening: Whitening | None = None
    ) -> Target:
        return Target(self.density, self.layout, arguments, indices, self.vectorized, whitening)

    def _over_chains(self, function: Callable[..., Any], batch: Batch, *states: Any) -> Any:
        """Calls a function for every chain, and returns the results with chains as the first
        dimension.

        Args:
            function: function (arguments of the model, row indices or None, *states of one chain).
            batch: the minibatches of all chains.
            *states: pytrees of tensors `[chains, ...]`.
        """
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
        """Calls `function(*states)` for every chain, and returns the results with chains as the
        first dimension; tensors of `states` are `[chains, ...]`."""
        if self.vectorized:
            return torch.vmap(function)(*states)
        return _stack(function(*state) for state in _by_chain(states))

    def kernel_values(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The hyperparameters of a step in the form that the sampler's kernel takes, a dict of
        tensors by name. The temperature is divided by N, the number of rows of the data;
        hyperparameters that differ by site, or between latents and points, are vectors [D]; others
        are scalars.
        """
        scaled: dict[str, Tensor] = self.kernel.per_datum(values, self.density.num_data)
        for name, hyper in self.kernel.hyperparameters().items():
            if isinstance(hyper, Mapping):
                scaled[name] = self._by_site(hyper, scaled[name])
        if "temperature" in scaled and self.has_points:
            scaled["temperature"] = self._of_latents(scaled["temperature"])
        return scaled

    def latent_values(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The hyperparameters in the kernel's units, as `kernel_values` returns them, for latents
        alone, in float64: scalars, or vectors `[latents]`."""
        return {
            name: value.double()[: self.num_latents] if value.dim() else value.double()
            for name, value in self.kernel_values(values).items()
        }

    def _of_latents(self, temperature: Tensor) -> Tensor:
        """The temperature as a vector [D]: the same number for all latents, and 0 for points
        (point-estimated parameters), which are not sampled.
        """
        num_latents, num_points = self._sizes
        cold = temperature.new_zeros(num_points, dtype=self.layout.dtype)
        return torch.cat([temperature.to(cold).expand(num_latents), cold])

    def subtract_known_noise(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Hyperparameters with a lower temperature, at least 0, so that injected noise and the
        known noise of minibatch gradients together have the temperature set; unchanged if no noise
        is known."""
        if self.known_noise is None:
            return dict(values)
        added = self.kernel.theory.added_temperature(values, self.known_noise)
        return {**values, "temperature": (values["temperature"] - added).clamp(min=0)}

    def _by_site(self, hyper: Mapping[str, Any], values: Tensor) -> Tensor:
        """A hyperparameter that differs by site, as a vector [D] with an entry for each
        unconstrained parameter.

        Args:
            hyper: dict from a site's name to the hyperparameter's schedule, number or tensor of
                factors.
            values: the hyperparameter of each site at this step, in the order of `hyper`.
                Multiplied by the site's tensor in `hyper`, if that is one.
        """
        by_site = {}
        for place, (name, entry) in enumerate(hyper.items()):
            number = values[place].to(self.layout.dtype)
            factor = entry.to(self.layout.dtype) if isinstance(entry, Tensor) else 1.0
            shape = self.layout.shapes[self.layout.names.index(name)]
            by_site[name] = (number * factor).expand(shape)
        return self.layout.flatten(by_site)

    def pad(self, latents: Tensor) -> Tensor:
        """Vectors `[..., D]` of all params from vectors of latents alone, `[..., latents]`:
        point-estimated parameters get 0.
        """
        return torch.nn.functional.pad(latents, (0, self._sizes[1]))

    @property
    def _sizes(self) -> tuple[int, int]:
        """(Number of a position's elements that are latents, number of those that are
        point-estimated parameters).
        """
        return self.num_latents, self.layout.size - self.num_latents

    def _share_points(self, state: State) -> State:
        """The state with the points of each chain replaced by their mean over chains. Chains that
        are not finite are left out of the mean, and unchanged."""
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
    """Yields the state of one chain after another, from pytrees of tensors `[chains, ...]`."""
    num_chains = len(pytree.tree_leaves(states)[0])
    return (pytree.tree_map(lambda leaf, c=c: leaf[c], states) for c in range(num_chains))


def _stack(by_chain: Iterable[Any]) -> Any:
    """One pytree of tensors `[chains, ...]` from the pytrees of single chains, in their order."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *by_chain)
