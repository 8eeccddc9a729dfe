"""A stack of data sets of one model, and the log posterior density that a compiled step evaluates
on all of them, one chain for each data set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.whitening import Whitening
from pyro_scale.data.row_sampler import RowIndices, Sampling
from pyro_scale.data.stacked import StackedBatches
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import SiteError
from pyro_scale.model.diagnose import find_broken_site
from pyro_scale.model.init_strategies import InitFunction
from pyro_scale.model.log_posterior import MOST_STARTS, LogPosterior
from pyro_scale.posterior.chunked_vmap import vmap_in_chunks

T = TypeVar("T")
#: A batch of `StackedBatches`: (tensors of the chain, rows that all data sets share, own rows).
ChainBatch = tuple[Sequence[Tensor], Arguments, Arguments]


@dataclass(frozen=True)
class StackedDensity:
    """The log posteriors of many data sets, one for each chain, as a step evaluates them.

    Batches are those of `StackedBatches`.  They contain constants: the tensors of the chain's
    whitening, then a factor on the chain's step size.  The density is a function of whitened
    coordinates z, with params = center + S z.

    Attributes:
        log_posterior: log posterior of a model whose arguments are (rows that all data sets share,
            a data set's own rows).
        layout: sites, shapes and offsets of a position `[D]`.
        whitening: a map of the structure of the chains' whitenings, whose tensors come with the
            batches; None if chains move in params.
        in_batches: whether a step uses some of the rows of data.  If a step uses all, tables of
            shared rows are stored transposed, `[columns, N]`.
    """

    log_posterior: LogPosterior
    layout: Layout
    whitening: Whitening | None
    in_batches: bool

    @property
    def num_data(self) -> int:
        """N, the number of rows of each data set."""
        return self.log_posterior.num_data

    def grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """(Gradient of a chain's log joint with respect to the whitened coordinates z, by site; the
        model's evaluation with the log joint).

        Args:
            params: the chain's coordinates z, by site.
            batch: batch of the chain's data set, from `StackedBatches`.
            indices: not used.
        """
        return self._grad_of_z(self.log_posterior.grad, params, batch)

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """(Gradient of a chain's log joint with respect to the whitened coordinates z, by site; the
        model's evaluation with the log joint), as `grad`, but by `torch.autograd`, for models that
        `torch.func` does not support.
        """
        return self._grad_of_z(self.log_posterior.plain_grad, params, batch)

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Always raises NotImplementedError: a calibration does not need gradients of single rows
        of data."""
        raise NotImplementedError

    def own_values(self, values: Mapping[str, Tensor], batch: ChainBatch) -> dict[str, Tensor]:
        """The hyperparameters of one chain's step, tensors by name: `values` with `lr` multiplied
        by the chain's own factor, if the chain's batch brings one."""
        constants, _, _ = batch
        if not constants:
            return dict(values)
        return {**values, "lr": values["lr"] * constants[-1][0]}

    def _grad_of_z(
        self,
        grad: Callable[..., tuple[dict[str, Tensor], Evaluation]],
        params: Mapping[str, Tensor],
        batch: ChainBatch,
    ) -> tuple[dict[str, Tensor], Evaluation]:
        constants, shared, table = batch
        if not self.in_batches:
            shared, table = transpose_tables(shared), rows.take(table, 0)
        if self.whitening is None:
            return grad(params, (shared, table))
        whitening = self.whitening.with_tensors([tensor[0] for tensor in constants[:-1]])
        params = self.layout.unflatten(whitening.to_params(self.layout.flatten(params)))
        by_site, evaluation = grad(params, (shared, table))
        by_z = whitening.pull_back(self.layout.flatten(by_site))
        return self.layout.unflatten(by_z), evaluation


@dataclass(frozen=True)
class Stack:
    """Data sets of one model that differ in their observations.

    Attributes:
        log_posterior: log posterior of a model whose arguments are (rows that all data sets share,
            a data set's own rows), after its checks.
        layout: sites, shapes and offsets of a position `[D]`.
        shared: rows of data that all data sets have in common.
        tables: observations of all data sets, by site, `[data sets, N, ...]`.
        seeds: a seed for each data set.
        batch_size: number of rows of data in a step; None for all.
        sampling: how the rows of a batch are drawn.
        compile: whether steps are compiled.
        earlier: cache of the steps that were compiled for other data sets of the same model.
        bar: progress bar.
        vectorized: True if the model works under `torch.vmap` over data sets.
        columns: shared rows with transposed tables, for steps on all rows; derived if not passed.
        starts: unconstrained parameters at which chains start unless an init function says where,
            `[data sets, D]`; None if they are drawn.
    """

    log_posterior: LogPosterior
    layout: Layout
    shared: Arguments
    tables: Mapping[str, Tensor]
    seeds: Sequence[int]
    batch_size: int | None
    sampling: Sampling
    compile: bool | Literal["auto"]
    earlier: Earlier
    bar: Progress
    vectorized: bool = True
    columns: Arguments = ()
    starts: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.columns:  # once, as compiled programs recognize them by identity
            columns = rows.map_rows(lambda table: table.contiguous(), transpose_tables(self.shared))
            object.__setattr__(self, "columns", columns)

    @property
    def num_chains(self) -> int:
        """Number of data sets; each has one chain."""
        return len(self.seeds)

    @property
    def num_data(self) -> int:
        """N, the number of rows of each data set."""
        return self.log_posterior.num_data

    @property
    def share_of_rows(self) -> float:
        """Fraction of a data set's rows that one step uses: 1 without batches."""
        return 1.0 if self.batch_size is None else self.batch_size / self.num_data

    def arguments(self, number: Tensor) -> tuple[Arguments, dict[str, Tensor]]:
        """The model's arguments for one data set: (shared rows, the data set's own rows by site).

        Args:
            number: number of the data set, a 0-d integer tensor, also under vmap.
        """
        return self.shared, {name: take_one(table, number) for name, table in self.tables.items()}

    def batches(self, seeds: Sequence[int], constants: Sequence[Tensor]) -> StackedBatches:
        """An endless source of batches for all chains.

        Args:
            seeds: a seed for each chain, from which its batches follow.
            constants: tensors that come with every batch of a chain, `[chains, ...]`.
        """
        num_rows = rows.count(self.arguments(torch.tensor(0))) or 1
        if self.batch_size is None:
            return StackedBatches(self.columns, dict(self.tables), num_rows, constants)
        numbers = [0] * self.num_chains
        indices = RowIndices(seeds, numbers, num_rows, self.batch_size, self.sampling)
        return StackedBatches(self.shared, dict(self.tables), num_rows, constants, indices)

    def map(self, function: Callable[[Tensor], T]) -> T:
        """Evaluates a function for all data sets under vmap, as many data sets at a time as memory
        allows. Returns the results stacked, `[data sets, ...]`.

        Args:
            function: function of the number of a data set, a 0-d tensor, that returns a pytree of
                tensors.
        """
        parts: list[T] = list(vmap_in_chunks(function, [torch.arange(self.num_chains)]))
        return pytree.tree_map(lambda *leaves: torch.cat(leaves), *parts)

    def log_joint(self, position: Tensor, number: Tensor) -> Tensor:
        """The log joint of one data set, in nats, 0-d.

        Args:
            position: unconstrained parameters, `[D]`.
            number: number of the data set, a 0-d integer tensor.
        """
        params = self.layout.unflatten(position)
        return self.log_posterior(params, self.arguments(number)).log_joint

    def log_joints(self, positions: Tensor) -> Tensor:
        """The log joint of each data set at its own params, in nats, `[data sets]`.

        Args:
            positions: unconstrained parameters of each data set, `[data sets, D]`.
        """

        def log_joint(number: Tensor) -> Tensor:
            return self.log_joint(take_one(positions, number), number)

        return self.map(log_joint)

    def select(self, chains: Tensor) -> Stack:
        """A copy of the stack with some of its data sets only.

        Args:
            chains: numbers of these data sets, int64 `[n]`.
        """
        tables = {name: table[chains] for name, table in self.tables.items()}
        starts = None if self.starts is None else self.starts[chains]
        return self.with_data(tables, [self.seeds[chain] for chain in chains.tolist()], starts)

    def with_data(
        self, tables: Mapping[str, Tensor], seeds: Sequence[int], starts: Tensor | None = None
    ) -> Stack:
        """A copy with other data sets of the same model.

        Args:
            tables: observations of the data sets, by site, `[data sets, N, ...]`.
            seeds: a seed for each data set.
            starts: where chains start; None to draw that.
        """
        return dataclasses.replace(self, tables=tables, seeds=seeds, starts=starts)


def take_one(table: Tensor, number: Tensor) -> Tensor:
    """The entry `table[number]`, of shape `table.shape[1:]`; works under vmap, where indexing does
    not. `number` is a 0-d integer tensor."""
    return table.index_select(0, number[None])[0]


def transpose_tables(shared: Arguments) -> Arguments:
    """The model's arguments with every two-dimensional tensor of rows transposed to `[columns, N]`,
    so that sums over rows of data run along contiguous memory."""
    return rows.map_rows(lambda table: table.mT if table.dim() == 2 else table, shared)


def find_starts(stack: Stack, init: InitFunction | None) -> Tensor:
    """Unconstrained parameters at which the chains start, `[chains, D]`: the same as in single runs
    with the same seeds.

    Several starts are tried for a chain. If the log joint is finite at none of them, the chain
    stops at its first step, and its simulation counts as failed.

    Args:
        stack: data sets of one model.
        init: one of Pyro's init functions; None for the library's default.

    Raises:
        SiteError: no data set has a finite log joint at any start.
    """
    if init is None and stack.starts is not None:
        return stack.starts.clone()

    def draw(number: int, attempt: int) -> Tensor:
        params = stack.log_posterior.start(
            stack.arguments(torch.tensor(number)), stack.seeds[number], 0, init, attempt=attempt
        )
        return stack.layout.flatten(params)

    starts = torch.stack([draw(number, 0) for number in range(stack.num_chains)])
    for attempt in range(1, MOST_STARTS):
        values = stack.log_joints(starts)
        broken = torch.nonzero(~values.isfinite())[:, 0].tolist()
        if not broken:
            return starts
        for number in broken:
            starts[number] = draw(number, attempt)
    if len(broken) < stack.num_chains:
        return starts
    place = stack.layout.unflatten(starts[broken[0]]), stack.arguments(torch.tensor(broken[0]))
    site, _ = find_broken_site(stack.log_posterior, *place)
    raise SiteError(
        f"site '{site or '?'}': the log joint of simulation {broken[0]} is not finite at any of "
        f"{MOST_STARTS} starts: the model draws data that it gives no density, or init_strategy "
        "starts where there is none",
        code="not-finite",
    )
