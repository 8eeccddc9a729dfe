"""The log joint density of all rows, chunk by chunk, and its derivatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.curvature.chunks import Chunk, chunks_of, is_row_wise, num_rows_in
from pyro_scale.data.sources import Data, IndexedData, TensorData
from pyro_scale.distributed.shares import WHOLE, Share
from pyro_scale.distributed.sums import Sums
from pyro_scale.errors import DataError
from pyro_scale.model.derivatives import hessian, hessian_diagonal
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.scaling import Evaluation
from pyro_scale.rng.seeds import Purpose, generator

T = TypeVar("T")

#: Rows times positions whose gradients are computed together.
_VMAP_ROWS = 2**19


@dataclass(frozen=True)
class FullDataDensity:
    """The log joint of all rows over N, and its derivatives, at positions [D].

    Every method goes through the data once, chunk by chunk.

    Attributes:
        log_posterior: the model's log posterior.
        data: all rows, or a sample that stands for all.
        layout: the params in a position.
        num_rows: how many rows `data` has, if it is a sample; None if it has all N.
        share: the chunks that this density sums over, where it is one of several that are added up.
        chunk_numbers: largest number of a chunk's rows times D.
    """

    log_posterior: LogPosterior
    data: Data
    layout: Layout
    num_rows: int | None = None
    share: Share = WHOLE
    chunk_numbers: int = 2**22

    def of_some_rows(self, most: int, seed: int) -> FullDataDensity:
        """The same density estimated from at most `most` rows, drawn at random.

        Returns the density itself if the data have no more rows than that, or cannot be sampled.
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
        """The sum of `function(density, *arguments)` over the densities of all shares of the rows.

        Args:
            function: returns a tensor or a tuple of tensors; defined in a module, so that other
                processes can import it.
            arguments: sent to the other processes.
        """
        return function(self, *arguments)

    def of_each(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """`function(density, *arguments)` of the density of each share of the rows, in their
        order: for values that do not add up."""
        return [function(self, *arguments)]

    def grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """(The log joint over N, its gradient over N, [D]).

        Raises:
            DataError: the data do not hold N rows.
        """
        value, gradient = zero_nats(position), torch.zeros_like(position)
        for part, slope, _ in self._gradients(position, history=False):
            value, gradient = value + part, gradient + slope
        return value, gradient

    def derivatives(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(The log joint, its gradient [D], its Hessian [D, D]), all over N, in one pass."""
        value, gradient = zero_nats(position), torch.zeros_like(position)
        matrix = position.new_zeros(self.layout.size, self.layout.size)
        for part, slope, leaf in self._gradients(position):
            value, gradient = value + part, gradient + slope.detach()
            matrix += hessian(slope, leaf)
        return value, gradient, matrix

    @property
    def passes(self) -> int:
        """Cost of `derivatives`, in gradients of all rows."""
        return 1 + self.layout.size

    def hessian(self, position: Tensor) -> Tensor:
        """The Hessian over N, [D, D]: minus the posterior's precision over N at the mode."""
        return self.derivatives(position)[2]

    def hessian_times(self, position: Tensor, vector: Tensor) -> Tensor:
        """The Hessian over N times a vector, [D], without the matrix."""
        total = torch.zeros_like(position)
        for _, slope, leaf in self._gradients(position):
            (product,) = torch.autograd.grad(slope, leaf, vector)
            total += product
        return total

    def hessian_diagonal(self, position: Tensor) -> Tensor:
        """The diagonal of the Hessian over N, [D], without the matrix."""
        total = torch.zeros_like(position)
        for _, slope, leaf in self._gradients(position):
            total += hessian_diagonal(slope, leaf)
        return total

    def values(self, positions: Tensor) -> Tensor:
        """The log joint over N at each position, `[positions]`."""
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
        """(The log joint over N at each position, `[positions]`; its gradients, `[positions, D]`).

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
                return self._grads_one_by_one(positions)
            values, slopes = values + value.detach(), slopes + slope.detach()
        return values, slopes

    def _grads_one_by_one(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        pairs = []
        for position in positions:
            try:
                pairs.append(self.grad(position))
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                pairs.append((zero_nats(position) + torch.nan, position + torch.nan))
        values, slopes = zip(*pairs, strict=True)
        return torch.stack(values), torch.stack(slopes)

    def _gradients(
        self, position: Tensor, history: bool = True
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(Each chunk's log joint over N; its gradient, with its graph if `history`; the position,
        as the leaf that the gradient is taken at)."""
        for chunk in self.chunks():
            leaf = position.detach().requires_grad_()
            with torch.enable_grad():
                part = self._part(chunk, leaf)
                (slope,) = torch.autograd.grad(part, leaf, create_graph=history)
            yield part.detach(), slope, leaf

    def _part(self, chunk: Chunk, position: Tensor) -> Tensor:
        """A chunk's part of the log joint over N."""
        params = self.layout.unflatten(position)
        evaluation = self.log_posterior(params, chunk.arguments, chunk.indices)
        zero = 0 * position.square().sum()  # gives second derivatives to flat and linear densities
        return self.part_of(evaluation, chunk) + zero

    def part_of(self, evaluation: Evaluation, chunk: Chunk) -> Tensor:
        """A chunk's part of the log joint over N, from the model's evaluation on the chunk."""
        num_data = self.log_posterior.num_data
        with torch.enable_grad():  # float64: the total is large, and its changes are small
            rows_sum = evaluation.log_lik[chunk.keep].sum(dtype=torch.float64)
            log_lik = rows_sum * (num_data / self.rows_in_all)
            log_prior = evaluation.log_prior * (chunk.num_new / self.rows_in_all)
            return (log_prior + log_lik) / num_data

    @property
    def rows_in_all(self) -> int:
        """How many rows `data` should have: N, or the size of the sample."""
        return self.num_rows or self.log_posterior.num_data

    def chunks(self, num_rows: int | None = None) -> Iterator[Chunk]:
        """The density's chunks of rows, about `num_rows` rows each.

        Raises:
            DataError: the data do not hold N rows.
        """
        count, size = 0, num_rows or self.chunk_numbers // self.layout.size
        for chunk in chunks_of(self.log_posterior, self.data, size, self.share):
            yield chunk
            count += chunk.num_new
        if self.share == WHOLE:
            self._check_count(count)

    def check_rows(self) -> None:
        """Checks that the data hold N rows; for use before they are shared out.

        Raises:
            DataError: they do not.
        """
        if isinstance(self.data, TensorData | IndexedData):
            self._check_count(num_rows_in(self.data))
        else:
            chunks = chunks_of(self.log_posterior, self.data)
            self._check_count(sum(chunk.num_new for chunk in chunks))

    def to_clean(self) -> str:
        """Advice on which data to clean, for an error message; "" if all rows are finite."""
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
    """The log joint of all rows, whose sums over rows are computed in shares.

    Attributes:
        sums: over the shares.
    """

    sums: Sums

    @classmethod
    def from_density(cls, density: FullDataDensity, sums: Sums) -> SharedDensity:
        """The density with its sums shared out.

        Args:
            density: the log joint of all rows, the same in every process.
            sums: computes terms of sums in several processes.

        Raises:
            DataError: the data do not hold N rows.
        """
        density.check_rows()
        part = dataclasses.replace(density, share=sums.share)
        sums = sums.with_terms({"grad": part.grad, "function": partial(_call, part)})
        return cls(density.log_posterior, density.data, density.layout, sums=sums)

    def grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """(The log joint over N, its gradient over N, [D])."""
        value, gradient = self.sums.ask("grad", position.detach())
        return value, gradient

    def add_up(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The sum of `function(density, *arguments)` over the densities of all shares."""
        return self.sums.ask("function", function, *arguments)

    def of_each(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """`function(density, *arguments)` of the density of each share, in their order."""
        return self.sums.ask_each("function", function, *arguments)


def _call(density: FullDataDensity, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(density, *arguments)


def zero_nats(like: Tensor) -> Tensor:
    """Zero on the device of `like`, in float64: a sum over many rows needs the digits."""
    return torch.zeros((), dtype=torch.float64, device=like.device)


def _or_nan(function: Callable[[Tensor], Tensor], position: Tensor) -> Tensor:
    """The function's value; NaN where a matrix of the model cannot be factorized."""
    try:
        return function(position)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return position.new_tensor(torch.nan)
