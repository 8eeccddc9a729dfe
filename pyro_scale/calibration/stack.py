"""Chains that have a data set each, moved by one compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.whitening import Whitening
from pyro_scale.data.row_sampler import RowIndices, Sampling
from pyro_scale.data.stacked import StackedBatches
from pyro_scale.engine.checkpoint import Checkpoint
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.loop import simulate
from pyro_scale.engine.plan import StepPlan
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.engine.step import Engine
from pyro_scale.kernels import Kernel
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.draws import in_chunks
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.rng.streams import NoiseStream

T = TypeVar("T")


@dataclass(frozen=True)
class Coordinates:
    """Each chain's own: params are m + S z.

    Attributes:
        whitening: of all chains, its tensors `[chains, ...]`.
        factor: of the kernel's step size, `[chains]`.
    """

    whitening: Whitening
    factor: Tensor

    @classmethod
    def of_each(cls, whitenings: Sequence[Whitening], factor: Tensor) -> Coordinates:
        """From each chain's whitening."""
        tensors = zip(*(whitening.tensors for whitening in whitenings), strict=True)
        return cls(whitenings[0].with_tensors([torch.stack(each) for each in tensors]), factor)

    @property
    def tables(self) -> list[Tensor]:
        """As batches bring them."""
        return [*self.whitening.tensors, self.factor]

    def of(self, chains: Tensor) -> Coordinates:
        """Those of some chains."""
        tensors = [tensor[chains] for tensor in self.whitening.tensors]
        return Coordinates(self.whitening.with_tensors(tensors), self.factor[chains])

    def mapped(self, way: str, vectors: Tensor) -> Tensor:
        """One of the whitening's maps, of vectors `[chains, ..., D]`."""

        def of_chain(tensors: list[Tensor], own: Tensor) -> Tensor:
            mapped: Tensor = getattr(self.whitening.with_tensors(tensors), way)(own)
            return mapped

        return torch.vmap(of_chain)(list(self.whitening.tensors), vectors)


@dataclass(frozen=True)
class StackedDensity:
    """What the engine sees of a model and many data sets: batches are those of `StackedBatches`.

    A chain's coordinates and the factor of its step size come with the batch, in that order:
    params are m + S z.

    Attributes:
        log_posterior: of the model of (shared rows, own rows).
        layout: of a position.
        whitening: the form of the coordinates, whose tensors batches bring; None where chains move
            in params themselves.
        in_batches: whether a step takes some of the rows; all of them come by column, tables as
            `[columns, N]`.
    """

    log_posterior: LogPosterior
    layout: Layout
    whitening: Whitening | None
    in_batches: bool

    @property
    def num_data(self) -> int:
        """N, of each data set."""
        return self.log_posterior.num_data

    def grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Any]:
        """(The gradient of a chain's log joint by z, by site; the evaluation)."""
        return self._pulled(self.log_posterior.grad, params, batch)

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Any]:
        """The same by plain autograd."""
        return self._pulled(self.log_posterior.plain_grad, params, batch)

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Nothing that chains with a data set each ask for."""
        raise NotImplementedError

    def own_values(self, values: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor]:
        """Hyperparameter values of one chain: the step size is multiplied by the chain's factor,
        which comes with the batch."""
        constants, _, _ = batch
        if not constants:
            return dict(values)
        return {**values, "lr": values["lr"] * constants[-1][0]}

    def _pulled(
        self, grad: Callable[..., Any], params: Mapping[str, Tensor], batch: Any
    ) -> tuple[dict[str, Tensor], Any]:
        constants, shared, own = batch
        if not self.in_batches:
            shared, own = turned(shared), rows.take(own, 0)
        arguments = shared, own
        if self.whitening is None:
            gradient: tuple[dict[str, Tensor], Any] = grad(params, arguments)
            return gradient
        whitening = self.whitening.with_tensors([tensor[0] for tensor in constants[:-1]])
        here = self.layout.unflatten(whitening.to_params(self.layout.flatten(params)))
        by_site, evaluation = grad(here, arguments)
        pulled = whitening.pull_back(self.layout.flatten(by_site))
        return self.layout.unflatten(pulled), evaluation


@dataclass(frozen=True)
class Stack:
    """Data sets of the same rows but for the observations, a chain each.

    Attributes:
        log_posterior: of the model of (shared rows, own rows), understood.
        layout: of a position.
        shared: rows that all data sets have.
        own: rows of each, by site, `[chains, N, ...]`.
        seeds: a chain's own.
        batch_size: rows a step; None for all.
        sampling: how rows are drawn.
        compile: whether steps become one program.
        earlier: what has been compiled for other data sets of the same model.
        bar: is told how far it is.
        vectorized: whether vmap takes the model.
        columns: the shared rows as steps on all of them take them.
    """

    log_posterior: LogPosterior
    layout: Layout
    shared: Arguments
    own: Mapping[str, Tensor]
    seeds: Sequence[int]
    batch_size: int | None
    sampling: Sampling
    compile: bool | Literal["auto"]
    earlier: Earlier
    bar: Progress
    vectorized: bool = True
    columns: Arguments | None = None

    def __post_init__(self) -> None:
        if self.columns is None:  # once, as programs know them by identity
            columns = rows.map_rows(lambda table: table.contiguous(), turned(self.shared))
            object.__setattr__(self, "columns", columns)

    @property
    def num_chains(self) -> int:
        """How many data sets there are."""
        return len(self.seeds)

    @property
    def num_data(self) -> int:
        """N, of each data set."""
        return self.log_posterior.num_data

    @property
    def share_of_rows(self) -> float:
        """The part of all rows that a step takes."""
        return 1.0 if self.batch_size is None else self.batch_size / self.num_data

    def arguments(self, number: Tensor) -> Arguments:
        """What the model takes, of one data set."""
        return self.shared, {name: take_one(table, number) for name, table in self.own.items()}

    def each(self, function: Callable[[Tensor], T]) -> T:
        """A function of a data set's number, of all of them, as many at a time as memory allows:
        what it gives, `[chains, ...]`."""
        parts: list[T] = list(in_chunks(function, [torch.arange(self.num_chains)]))
        return pytree.tree_map(lambda *leaves: torch.cat(leaves), *parts)

    def log_joint(self, position: Tensor, number: Tensor) -> Tensor:
        """The log joint of one data set at params [D], in nats."""
        params = self.layout.unflatten(position)
        return self.log_posterior(params, self.arguments(number)).log_joint

    def log_joints(self, positions: Tensor) -> Tensor:
        """Those of all data sets, each at params of its own, `[chains, D]`: `[chains]`."""

        def of_one(number: Tensor) -> Tensor:
            return self.log_joint(take_one(positions, number), number)

        return self.each(of_one)

    def run(
        self,
        kernel: Kernel,
        positions: Tensor,
        steps: Steps,
        stage: tuple[Purpose, int] | None = None,
        coordinates: Coordinates | None = None,
        columns: Mapping[str, Tensor] | None = None,
        noise: Callable[..., NoiseStream] | None = None,
        last: Callable[[StackedBatches], Checkpoint] | None = None,
    ) -> Draws:
        """Moves every chain, from positions `[chains, D]` in its own coordinates.

        Args:
            kernel: the method.
            positions: where chains start.
            steps: how many, and which are kept.
            stage: what the steps are for, whose seeds are derived from the chains' own; None for
                the run itself, which takes those.
            coordinates: of each chain; None where they move in params.
            columns: the hyperparameters' values, step by step; the kernel's by default.
            noise: of the steps, a class that is made of seeds; the steps' own by default.
            last: what to go on from.

        Raises:
            Exception: what ended the steps before their time.
        """
        in_batches = self.batch_size is not None
        seeds, numbers = list(self.seeds), [0] * self.num_chains
        if stage is not None:
            purpose, number = stage
            seeds = [derived_seed(seed, number, purpose) for seed in seeds]
        num_rows = rows.count(self.arguments(torch.tensor(0))) or 1
        indices = None
        if self.batch_size is not None:
            indices = RowIndices(seeds, numbers, num_rows, self.batch_size, self.sampling)
        tables = [] if coordinates is None else coordinates.tables
        shared = self.shared if in_batches else self.columns
        assert shared is not None
        batches = StackedBatches(shared, dict(self.own), num_rows, tables, indices)
        whitening = None if coordinates is None else coordinates.whitening
        density = StackedDensity(self.log_posterior, self.layout, whitening, in_batches)
        engine = Engine(kernel, density, self.layout, self.layout.size, self.vectorized)
        own = None
        if noise is not None:
            shape = kernel.normals, self.layout.size
            own = noise(seeds, numbers, shape, positions.dtype, positions.device)
        plan = StepPlan(
            engine,
            positions,
            batches,
            kernel.columns(steps.total) if columns is None else columns,
            steps,
            seeds,
            self.compile,
            self.earlier,
            noise=own,
            numbers=numbers,
        )
        draws = simulate(plan, self.bar, last=None if last is None else last(batches))
        if draws.error is not None:
            raise draws.error
        return draws

    def of(self, chains: Tensor) -> Stack:
        """Some of the data sets."""
        own = {name: table[chains] for name, table in self.own.items()}
        return self.with_data(own, [self.seeds[chain] for chain in chains.tolist()])

    def with_data(self, own: Mapping[str, Tensor], seeds: Sequence[int]) -> Stack:
        """Other data sets of the same model."""
        return dataclasses.replace(self, own=own, seeds=seeds)


def take_one(table: Tensor, number: Tensor) -> Tensor:
    """A table's entry at a number, 0-d, as a tensor of its own."""
    return table.index_select(0, number[None])[0]


def turned(shared: Arguments) -> Arguments:
    """Rows with tables turned over: sums over rows then run along what lies side by side."""
    return rows.map_rows(lambda table: table.mT if table.dim() == 2 else table, shared)
