"""The log joint density of all rows, chunk by chunk, and its derivatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.layout import Layout
from pyro_scale.curvature.chunks import Chunk, chunks_of, is_row_wise, num_rows_in
from pyro_scale.data.sources import Data, IndexedData, TensorData
from pyro_scale.distributed.shares import WHOLE, Share
from pyro_scale.distributed.sums import Sums
from pyro_scale.errors import DataError
from pyro_scale.model.derivatives import hessian, hessian_diagonal
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.rng.seeds import Purpose, generator

T = TypeVar("T")
_Pair: TypeAlias = tuple[Tensor, Tensor]

#: Rows times positions (vectors of params) whose gradients are computed together.
_VMAP_ROWS = 2**19


@dataclass(frozen=True)
class FullDataDensity:
    """The log joint density of all N rows of the data, divided by N, and its derivatives.

    A position is a vector [D] of all D unconstrained params.  Every method goes through the data
    once, chunk by chunk.

    Attributes:
        log_posterior: the model's log posterior.
        data: all rows, or a sample of them, from which the density is estimated.
        layout: the order of the params in a position.
        num_rows: the number of rows in `data`, if that is a sample; None if it has all N.
        share: the chunks of rows that this density sums over, if several processes share the data;
            by default all chunks.
        chunk_numbers: the largest number of a chunk's rows times D.
    """

    log_posterior: LogPosterior
    data: Data
    layout: Layout
    num_rows: int | None = None
    share: Share = WHOLE
    chunk_numbers: int = 2**22

    def of_some_rows(self, most: int, seed: int) -> FullDataDensity:
        """An estimate of the same density from `most` rows, drawn at random without replacement:
        cheaper to evaluate, for searches and pilots.

        Returns the density itself if the data have no more rows than `most`, are not tensors, or
        the model cannot run on a part of them.
        """
        num_data = self.log_posterior.num_data
        if not isinstance(self.data, TensorData) or not is_row_wise(self.log_posterior):
            return self
        if num_data <= most or rows.count(self.data.arguments) != num_data:
            return self
        random = generator(seed, 0, Purpose.SEARCH)
        chosen = torch.randperm(num_data, generator=random)[:most].sort().values
        arguments = rows.take(self.data.arguments, chosen.to(rows.device(self.data.arguments)))
        return dataclasses.replace(self, data=TensorData(arguments, num_data), num_rows=most)

    def add_up(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The sum of `function(density, *arguments)` over the processes that share the data; with a
        single process, just `function(self, *arguments)`.

        Args:
            function: function of the density of a process's own rows, which returns a tensor or a
                tuple of tensors; defined in a module, so that other processes can import it.
            arguments: further arguments, sent to the other processes.
        """
        return function(self, *arguments)

    def of_each(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """A list with the result of `function(density, *arguments)` from each of the processes that
        share the data, in the order of the shares: for results that cannot be added. Arguments as
        for `add_up`."""
        return [function(self, *arguments)]

    def grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint of all rows and its gradient at a position [D], in one pass through the
        data.

        Returns:
            (The log joint divided by N, in nats, in float64; its gradient divided by N, [D]).

        Raises:
            DataError: the data do not hold N rows.
        """
        value, gradient = zero_nats(position), torch.zeros_like(position)
        for part, slope, _ in self._gradients(position, history=False):
            value, gradient = value + part, gradient + slope
        return value, gradient

    def derivatives(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(The log joint, its gradient [D], its Hessian [D, D]) at a position [D], all divided by
        N, in one pass through the data."""
        value, gradient = zero_nats(position), torch.zeros_like(position)
        matrix = position.new_zeros(self.layout.size, self.layout.size)
        for part, slope, leaf in self._gradients(position):
            value, gradient = value + part, gradient + slope.detach()
            matrix += hessian(slope, leaf)
        return value, gradient, matrix

    @property
    def passes(self) -> int:
        """The cost of one call of `derivatives`, in gradients over all rows: 1 + D."""
        return 1 + self.layout.size

    def hessian(self, position: Tensor) -> Tensor:
        """The Hessian of the log joint divided by N, [D, D], at a position [D]. At a mode, this is
        minus the precision of the Laplace approximation, divided by N."""
        return self.derivatives(position)[2]

    @property
    def at_once(self) -> int:
        """The number of positions whose Hessians are computed together, at least 1: as many as the
        rows and D allow."""
        return max(1, _VMAP_ROWS // (self.layout.size * self.rows_in_all))

    def derivatives_at(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(The log joint `[P]`, its gradients `[P, D]`, its Hessians `[P, D, D]`) at each of P
        positions `[P, D]`, all divided by N. They are computed together, which takes much less time
        than one by one where a Hessian takes mostly calls, and is the same up to rounding.

        NaN where a matrix of the model cannot be factorized.
        """
        if len(positions) > 1:
            try:
                with torch.no_grad():
                    blocks = [self._derivatives_at(p) for p in positions.split(self.at_once)]
            except (RuntimeError, NotImplementedError):  # vmap does not support the model
                pass
            else:
                values, slopes, matrices = (torch.cat(parts) for parts in zip(*blocks, strict=True))
                return values, slopes, (matrices + matrices.mT) / 2
        return self._derivatives_one_by_one(positions)

    def _derivatives_at(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The result of `derivatives_at`, by vmap; the Hessians are not quite symmetric."""
        values, slopes = zero_nats(positions).repeat(len(positions)), torch.zeros_like(positions)
        matrices = positions.new_zeros(*positions.shape, self.layout.size)
        for chunk in self.chunks():

            def slope_of(position: Tensor, chunk: Chunk = chunk) -> tuple[Tensor, _Pair]:
                part = partial(self._part, chunk)
                slope, value = torch.func.grad_and_value(part)(position)
                return slope, (value, slope)

            expand = torch.vmap(torch.func.jacrev(slope_of, has_aux=True))
            matrix, (value, slope) = expand(positions)
            values, slopes, matrices = values + value, slopes + slope, matrices + matrix
        return values, slopes, matrices

    def _derivatives_one_by_one(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The result of `derivatives_at`, from a call of `derivatives` for each position."""
        nan = positions[0] + torch.nan
        failed = zero_nats(nan) + torch.nan, nan, nan.outer(nan)
        values, slopes, matrices = _one_by_one(self.derivatives, positions, failed)
        return values, slopes, matrices

    def hessians(self, positions: Tensor) -> Tensor:
        """The Hessians of the log joint divided by N at each of P positions `[P, D]`: `[P, D, D]`,
        as those of `derivatives_at`."""
        return self.derivatives_at(positions)[2]

    def hessian_times(self, position: Tensor, vector: Tensor) -> Tensor:
        """The Hessian of the log joint at a position, divided by N, times a vector [D]: a vector
        [D], without the matrix in memory."""
        total = torch.zeros_like(position)
        for _, slope, leaf in self._gradients(position):
            (product,) = torch.autograd.grad(slope, leaf, vector)
            total += product
        return total

    def hessian_diagonal(self, position: Tensor) -> Tensor:
        """The diagonal [D] of the Hessian of the log joint at a position, divided by N, without the
        matrix in memory."""
        total = torch.zeros_like(position)
        for _, slope, leaf in self._gradients(position):
            total += hessian_diagonal(slope, leaf)
        return total

    def values(self, positions: Tensor) -> Tensor:
        """The log joint divided by N at each of P positions `[P, D]`: a tensor `[P]` in float64.

        NaN where a matrix of the model cannot be factorized, for models that vmap does not support.
        """
        total = zero_nats(positions).repeat(len(positions))
        with torch.no_grad():
            for chunk in self.chunks():
                part = partial(self._part, chunk)
                try:
                    total = total + torch.vmap(part)(positions)
                except (RuntimeError, NotImplementedError):
                    total = total + torch.stack([_or_nan(part, place) for place in positions])
        return total

    def grads(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(The log joint at each of P positions `[P, D]`, `[P]`; its gradients, `[P, D]`), both
        divided by N.

        Both are NaN where a matrix of the model cannot be factorized.
        """
        values, slopes = zero_nats(positions).repeat(len(positions)), torch.zeros_like(positions)
        for chunk in self.chunks():
            of_chunk = torch.vmap(torch.func.grad_and_value(partial(self._part, chunk)))
            at_once = max(1, _VMAP_ROWS // max(1, chunk.num_new))
            try:
                parts = [of_chunk(block) for block in positions.split(at_once)]
                slope, value = (torch.cat(both) for both in zip(*parts, strict=True))
            except (RuntimeError, NotImplementedError):  # vmap does not support the model
                nan = positions[0] + torch.nan
                failed = zero_nats(nan) + torch.nan, nan
                values, slopes = _one_by_one(self.grad, positions, failed)
                return values, slopes
            values, slopes = values + value.detach(), slopes + slope.detach()
        return values, slopes

    def _gradients(
        self, position: Tensor, history: bool = True
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields for each chunk of rows (its part of the log joint divided by N, detached; that
        part's gradient, [D]; the position as the leaf that the gradient was computed from).

        Args:
            position: the params, [D].
            history: whether gradients have an autograd graph, for second derivatives.
        """
        for chunk in self.chunks():
            leaf = position.detach().requires_grad_()
            with torch.enable_grad():
                part = self._part(chunk, leaf)
                (slope,) = torch.autograd.grad(part, leaf, create_graph=history)
            yield part.detach(), slope, leaf

    def _part(self, chunk: Chunk, position: Tensor) -> Tensor:
        """A chunk's part of the log joint divided by N at a position [D], with an autograd graph.
        The parts of all chunks add up to the log joint divided by N."""
        params = self.layout.unflatten(position)
        evaluation = self.log_posterior(params, chunk.arguments, chunk.indices)
        zero = 0 * position.square().sum()  # gives second derivatives to flat and linear densities
        return self.part_of(evaluation, chunk) + zero

    def part_of(self, evaluation: Evaluation, chunk: Chunk) -> Tensor:
        """A chunk's part of the log joint divided by N, a scalar, from the model's evaluation on
        the chunk: the log likelihood of the chunk's new rows, and that fraction of the log prior
        which these rows are of all rows. The parts of all chunks add up to the log joint divided by
        N.
        """
        num_data = self.log_posterior.num_data
        with torch.enable_grad():  # float64: the total is large, and its changes are small
            rows_sum = evaluation.log_lik[chunk.keep].sum(dtype=torch.float64)
            log_lik = rows_sum * (num_data / self.rows_in_all)
            log_prior = evaluation.log_prior * (chunk.num_new / self.rows_in_all)
            return (log_prior + log_lik) / num_data

    @property
    def rows_in_all(self) -> int:
        """The number of rows that `data` must hold: N, or the size of the sample if the density is
        estimated from one.
        """
        return self.num_rows or self.log_posterior.num_data

    def chunks(self, num_rows: int | None = None) -> Iterator[Chunk]:
        """Yields the chunks of rows that this density sums over, about `num_rows` rows each; by
        default as many as `chunk_numbers` allows.

        Raises:
            DataError: after the last chunk, if the data did not hold N rows.
        """
        count, size = 0, num_rows or self.chunk_numbers // self.layout.size
        for chunk in chunks_of(self.log_posterior, self.data, size, self.share):
            yield chunk
            count += chunk.num_new
        if self.share == WHOLE:
            self._check_count(count)

    def check_rows(self) -> None:
        """Checks that the data hold N rows (or the sample as many as it should): to be called
        before several processes share the data, when none sees all rows.

        Raises:
            DataError: the data have another number of rows.
        """
        if isinstance(self.data, TensorData | IndexedData):
            self._check_count(num_rows_in(self.data))
        else:
            chunks = chunks_of(self.log_posterior, self.data)
            self._check_count(sum(chunk.num_new for chunk in chunks))

    def to_clean(self) -> str:
        """A sentence to add to an error message: which row of the data is NaN or infinite; "" if
        all rows are finite. Nothing is raised.
        """
        begin = 0
        whose = "" if self.num_rows is None and self.share == WHOLE else " of those looked at"
        for chunk in self.chunks():
            first = begin if chunk.indices is None else 0
            if advice := rows.to_clean(chunk.arguments, first, whose):
                return advice
            begin += chunk.num_new
        return ""

    def _check_count(self, count: int) -> None:
        num_data = self.log_posterior.num_data
        if count != self.rows_in_all:
            raise DataError(
                f"the data hold {count} rows, not N = {num_data}: what needs all of them "
                "(a mode, its curvature, lr='auto') cannot be had from a part"
            )


@dataclass(frozen=True, kw_only=True)
class SharedDensity(FullDataDensity):
    """The log joint density of all rows, where several processes each sum over a share of the rows.

    `grad`, `add_up` and `of_each` are shared; other methods go through all rows in this process.

    Attributes:
        sums: asks all processes for their terms, and adds these up.
    """

    sums: Sums

    @classmethod
    def from_density(cls, density: FullDataDensity, sums: Sums) -> SharedDensity:
        """A density like `density`, whose sums over rows are computed by several processes.

        Args:
            density: the log joint density of all rows, the same in every process.
            sums: sums whose terms several processes compute.

        Raises:
            DataError: the data do not hold N rows.
        """
        density.check_rows()
        part = dataclasses.replace(density, share=sums.share)
        sums = sums.with_terms({"grad": part.grad, "function": partial(_call, part)})
        return cls(density.log_posterior, density.data, density.layout, sums=sums)

    def grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """(The log joint at a position [D], its gradient [D]), both divided by N and summed over
        all processes."""
        value, gradient = self.sums.ask("grad", position.detach())
        return value, gradient

    def add_up(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The sum of `function(density, *arguments)` over all processes, each with the density of
        its own rows."""
        return self.sums.ask("function", function, *arguments)

    def of_each(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """A list of `function(density, *arguments)` from every process, each with the density of
        its own rows, in the order of the shares."""
        return self.sums.ask_each("function", function, *arguments)


def _call(density: FullDataDensity, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(density, *arguments)


def zero_nats(like: Tensor) -> Tensor:
    """A scalar 0 in float64, on the device of `like`: the start of a sum of log densities over many
    rows, for which float32 has too few digits.
    """
    return torch.zeros((), dtype=torch.float64, device=like.device)


def _one_by_one(
    function: Callable[[Tensor], tuple[Tensor, ...]],
    positions: Tensor,
    failed: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """The results of a function at each of P positions `[P, D]`, each stacked along a first
    dimension; `failed`, NaN of their shapes, where a matrix of the model cannot be factorized."""
    results = []
    for position in positions:
        try:
            results.append(function(position))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            results.append(failed)
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def _or_nan(function: Callable[[Tensor], Tensor], position: Tensor) -> Tensor:
    """The value of `function(position)`; NaN in place of the error that torch raises if a matrix of
    the model cannot be factorized at this position.
    """
    try:
        return function(position)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return position.new_tensor(torch.nan)
