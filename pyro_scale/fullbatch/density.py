"""The log density of all rows, its mode, and its curvature there."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.data.sources import Data, IndexedData, TensorData
from pyro_scale.distributed.shares import WHOLE, Share
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.fullbatch.chunks import Chunk, chunks_of, is_row_wise, num_rows_in
from pyro_scale.model.derivatives import hessian, hessian_diagonal
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.scaling import Evaluation
from pyro_scale.model.site_checks import FINITE_DATA
from pyro_scale.rng.seeds import Purpose, generator

T = TypeVar("T")

#: Numbers that a chunk of the data may hold for each of its rows' parameters.
_PIECE_NUMBERS = 2**22
#: Rows times positions whose gradients are taken at once.
_AT_ONCE = 2**19
#: Passes through the data at most.
_MOST_PASSES = 200
#: The gradient over N at what counts as a mode: at most this, or this part of what it was at first.
_FLAT, _FLATTER = 1e-3, 0.1
#: The square of the distance to a mode, in sds, for each element, that counts as being there.
NEAR = 0.01
#: Newton's method needs one step where the log joint is quadratic, and few near a mode.
_MOST_NEWTON_STEPS = 10
#: Of a step that changes nothing.
_ROUNDINGS = 10


class LbfgsRun(NamedTuple):
    """Where an ascent ended, and gradients over N on its way, each [D].

    Attributes:
        position: the end.
        first: the gradient at the start.
        slope: the gradient at the end.
    """

    position: Tensor
    first: Tensor
    slope: Tensor


class Refined(NamedTuple):
    """Where Newton's method ended, near a mode.

    Attributes:
        position: the end, [D].
        distance: the square of its distance from the mode, in sds; infinite where that is not
            known.
        value: the log joint over N there.
        slope: its gradient over N there, [D].
    """

    position: Tensor
    distance: float
    value: float
    slope: Tensor


@dataclass(frozen=True)
class FullDataDensity:
    """The log joint of all rows over N, and its derivatives, at positions [D].

    Each of them goes through the data once, chunk by chunk.

    Attributes:
        log_posterior: the target, understood.
        data: all rows, or those that stand for all.
        layout: of a position.
        num_rows: how many rows the data have, where they stand for all.
        share: whose sum over all rows it is, of ranks that add theirs up.
    """

    log_posterior: LogPosterior
    data: Data
    layout: Layout
    num_rows: int | None = None
    share: Share = WHOLE

    def of_some_rows(self, most: int, seed: int) -> FullDataDensity:
        """The log density as some rows have it, drawn at random; the same where there are no more,
        or where they cannot be drawn."""
        num_data = self.log_posterior.num_data
        if not isinstance(self.data, TensorData) or not is_row_wise(self.log_posterior):
            return self
        if num_data <= most or rows.count(self.data.arguments) != num_data:
            return self
        source = generator(seed, 0, Purpose.SEARCH)
        chosen = torch.randperm(num_data, generator=source)[:most].sort().values
        arguments = rows.take(self.data.arguments, chosen.to(rows.device(self.data.arguments)))
        return dataclasses.replace(self, data=TensorData(arguments, num_data), num_rows=most)

    def grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """(The log joint over N, its gradient over N, [D]).

        Raises:
            DataError: the data do not hold N rows.
        """
        value, gradient = no_nats(position), torch.zeros_like(position)
        for chunk, kept in self.pieces():
            here = position.detach().requires_grad_()
            with torch.enable_grad():
                part = self._part(here, chunk, kept)
                (slope,) = torch.autograd.grad(part, here)
            value, gradient = value + part.detach(), gradient + slope
        return value, gradient

    def add_up(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of a density and the arguments comes to, of all rows: a tensor, or some,
        whose terms ranks add up.

        Args:
            function: of a module, as other ranks find it there by name.
            arguments: which other ranks are told.
        """
        return function(self, *arguments)

    def of_each(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """The same of each rank's rows, by rank: values that do not add up."""
        return [function(self, *arguments)]

    def hessian(self, position: Tensor) -> Tensor:
        """The Hessian over N, [D, D]: minus the posterior's precision over N at the mode."""
        total = position.new_zeros(self.layout.size, self.layout.size)
        for slope, here in self._slopes(position):
            total += hessian(slope, here)
        return total

    def derivatives(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(The log joint, its gradient [D], its Hessian [D, D]), all over N, in one pass."""
        value, gradient = no_nats(position), torch.zeros_like(position)
        matrix = position.new_zeros(self.layout.size, self.layout.size)
        for chunk, kept in self.pieces():
            here = position.detach().requires_grad_()
            with torch.enable_grad():
                part = self._part(here, chunk, kept)
                (slope,) = torch.autograd.grad(part, here, create_graph=True)
            value, gradient = value + part.detach(), gradient + slope.detach()
            matrix += hessian(slope, here)
        return value, gradient, matrix

    @property
    def passes(self) -> int:
        """Gradients of all rows that value, gradient and Hessian cost together."""
        return 1 + self.layout.size

    def values(self, positions: Tensor) -> Tensor:
        """The log joint over N at each position, `[positions]`."""
        total = no_nats(positions).repeat(len(positions))
        with torch.no_grad():
            for chunk, kept in self.pieces():

                def part(position: Tensor, chunk: Chunk = chunk, kept: int = kept) -> Tensor:
                    return self._part(position, chunk, kept)

                try:
                    total = total + torch.vmap(part)(positions)
                except (RuntimeError, NotImplementedError):
                    total = total + torch.stack([_or_nan(part, each) for each in positions])
        return total

    def grads(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(The log joint over N at each position, `[positions]`, its gradients, `[positions, D]`);
        NaN where a matrix of the model's cannot be factorized."""
        values, slopes = no_nats(positions).repeat(len(positions)), torch.zeros_like(positions)
        for chunk, kept in self.pieces():

            def part(position: Tensor, chunk: Chunk = chunk, kept: int = kept) -> Tensor:
                return self._part(position, chunk, kept)

            each, at_once = torch.func.grad_and_value(part), max(1, _AT_ONCE // max(1, kept))
            try:
                of_parts = [torch.vmap(each)(some) for some in positions.split(at_once)]
                slope, value = (torch.cat(both) for both in zip(*of_parts, strict=True))
            except (RuntimeError, NotImplementedError):  # of what does not go through vmap
                return self._grads_one_by_one(positions)
            values, slopes = values + value.detach(), slopes + slope.detach()
        return values, slopes

    def _grads_one_by_one(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for position in positions:
            try:
                found.append(self.grad(position))
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                found.append((no_nats(position) + torch.nan, position + torch.nan))
        values, slopes = zip(*found, strict=True)
        return torch.stack(values), torch.stack(slopes)

    def hessian_times(self, position: Tensor, vector: Tensor) -> Tensor:
        """The Hessian over N times a vector, [D], without the matrix."""
        total = torch.zeros_like(position)
        for slope, here in self._slopes(position):
            (product,) = torch.autograd.grad(slope, here, vector)
            total += product
        return total

    def hessian_diagonal(self, position: Tensor) -> Tensor:
        """Its diagonal, [D], without the matrix."""
        total = torch.zeros_like(position)
        for slope, here in self._slopes(position):
            total += hessian_diagonal(slope, here)
        return total

    def mode(self, start: Tensor, otherwise: str = "start nearer (init_strategy=)") -> Tensor:
        """The nearest mode, [D].

        Args:
            start: where to look from, [D].
            otherwise: what to do if there is none.

        Raises:
            ArgumentError: the log joint has none that could be found from here.
        """
        climb = self.lbfgs(start, otherwise)
        slope, first = float(climb.slope.norm()), float(climb.first.norm())
        if not slope <= max(_FLATTER * first, _FLAT):
            num_data = self.log_posterior.num_data
            raise no_mode(
                otherwise,
                f"L-BFGS ended where the gradient's norm is {num_data * slope:.2g} nats, "
                f"{num_data * first:.2g} at the start",
            )
        return climb.position

    def lbfgs(self, start: Tensor, otherwise: str, moves: Tensor | float = 1.0) -> LbfgsRun:
        """Where L-BFGS ends.

        Args:
            start: where it begins.
            otherwise: what to do if there is no mode.
            moves: 1 for elements that may move, 0 for those that stay, [D].

        Raises:
            DataError: the log joint is not finite at the start.
            ArgumentError: it is not where it ends.
        """
        position = start.detach().clone().requires_grad_()
        highest = -math.inf
        optimizer = torch.optim.LBFGS(
            [position],
            max_iter=_MOST_PASSES,
            max_eval=_MOST_PASSES,
            tolerance_grad=torch.finfo(start.dtype).eps ** 0.5,
            tolerance_change=torch.finfo(start.dtype).eps,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            nonlocal highest
            value, gradient = self.grad(position)
            if math.isfinite(float(value)):
                highest = max(highest, float(value))
            position.grad = -gradient * moves
            return -value

        value, first = self.grad(start)
        if not bool(torch.isfinite(value)):
            raise DataError(
                "the log joint of the whole data is NaN or infinite where chain 0 starts: "
                + (self.to_clean() or FINITE_DATA),
                code="not-finite",
            )
        with contextlib.suppress(RuntimeError):  # of L-BFGS, where numbers overflow
            optimizer.step(closure)
        best = position.detach()
        value, slope = self.grad(best)
        if not bool(torch.isfinite(best).all() and torch.isfinite(value)):
            raise no_mode(
                otherwise,
                f"the log joint rose to {self.log_posterior.num_data * highest:.4g} nats, and is "
                "NaN or infinite further on, so it grows without bounds or overflows",
            )
        return LbfgsRun(best, first, slope)

    def newton_refine(
        self,
        position: Tensor,
        precision: Callable[[Tensor], Tensor],
        places: Tensor,
        near: float = 0.0,
    ) -> Refined:
        """A position [D] near a mode after steps of Newton's method, for as long as they bring it
        nearer.

        Near is what the curvature says: a gradient's norm is that of the stiffest direction.

        Args:
            position: where to start.
            precision: position -> minus the Hessian over N, or what stands for it, [d, d].
            places: of the d elements that move.
            near: the square of the distance at which it may stop.
        """
        distance, num_data = float("inf"), self.log_posterior.num_data
        value, slope = self.grad(position)
        for _ in range(_MOST_NEWTON_STEPS):
            factor, failed = torch.linalg.cholesky_ex(precision(position))
            if bool(failed):
                break
            step = torch.zeros_like(position)
            step[places] = _solve(factor, slope[places])
            distance = num_data * float(slope @ step)
            value_there, there = self.grad(position + step)
            left = num_data * float(there[places] @ _solve(factor, there[places]))
            if not left < distance:
                break
            position, slope, distance = position + step, there, left
            value = value_there
            rounding = _ROUNDINGS * torch.finfo(step.dtype).eps * position.norm()
            if left <= near or step.norm() <= rounding:
                break
        return Refined(position, distance, float(value), slope)

    def _slopes(self, position: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(The gradient of each chunk with its history, the leaf that it is with respect to)."""
        for chunk, kept in self.pieces():
            here = position.detach().requires_grad_()
            with torch.enable_grad():
                part = self._part(here, chunk, kept)
                (slope,) = torch.autograd.grad(part, here, create_graph=True)
            yield slope, here

    def _part(self, position: Tensor, chunk: Chunk, kept: int) -> Tensor:
        """A chunk's share of the log joint over N, of so many rows that are its own."""
        params = self.layout.unflatten(position)
        evaluation = self.log_posterior(params, chunk.arguments, chunk.indices)
        nothing = 0 * position.square().sum()  # so that a flat or linear one has derivatives, too
        return self.part_of(evaluation, chunk, kept) + nothing

    def part_of(self, evaluation: Evaluation, chunk: Chunk, kept: int) -> Tensor:
        """A chunk's share of the log joint over N, by its evaluation."""
        num_data = self.log_posterior.num_data
        with torch.enable_grad():  # a total of many nats, whose changes are small
            of_rows = evaluation.log_lik[chunk.keep].sum(dtype=torch.float64)
            log_lik = of_rows * (num_data / self.rows_in_all)
            return (evaluation.log_prior * (kept / self.rows_in_all) + log_lik) / num_data

    @property
    def rows_in_all(self) -> int:
        """How many rows the data have: N, or those that stand for N."""
        return self.num_rows or self.log_posterior.num_data

    def pieces(self, num_rows: int | None = None) -> Iterator[tuple[Chunk, int]]:
        """(Chunks of all rows, or of this rank's share; how many of each are its own), about so
        many rows at a time.

        Raises:
            DataError: the data do not hold N rows.
        """
        seen, size = 0, num_rows or _PIECE_NUMBERS // self.layout.size
        for chunk in chunks_of(self.log_posterior, self.data, size, self.share):
            kept = chunk.num_new
            yield chunk, kept
            seen += kept
        if self.share == WHOLE:
            self._check_rows(seen)

    def check_rows(self) -> None:
        """Checks that the data hold N rows, before ranks share them out.

        Raises:
            DataError: they do not.
        """
        if isinstance(self.data, TensorData | IndexedData):
            self._check_rows(num_rows_in(self.data))
        else:
            chunks = chunks_of(self.log_posterior, self.data)
            self._check_rows(sum(chunk.num_new for chunk in chunks))

    def to_clean(self) -> str:
        """What to clean in the data, in words; "" where all rows are finite."""
        begin, of_all = 0, self.num_rows is None and self.share == WHOLE
        for chunk, kept in self.pieces():
            first = begin if chunk.indices is None else 0
            if told := rows.to_clean(
                chunk.arguments, first, "" if of_all else " of those looked at"
            ):
                return told
            begin += kept
        return ""

    def _check_rows(self, seen: int) -> None:
        num_data = self.log_posterior.num_data
        if seen != self.rows_in_all:
            raise DataError(
                f"the data hold {seen} rows, not N = {num_data}: what needs all of them "
                "(a mode, its curvature, lr='auto') cannot be had from a part"
            )


def no_nats(like: Tensor) -> Tensor:
    """Zero, in float64: of a total of many rows, the changes are small."""
    return torch.zeros((), dtype=torch.float64, device=like.device)


def _or_nan(function: Callable[[Tensor], Tensor], position: Tensor) -> Tensor:
    """The function there; NaN where a matrix of the model's cannot be factorized."""
    try:
        return function(position)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return position.new_tensor(torch.nan)


def no_mode(otherwise: str, seen: str) -> ArgumentError:
    """What to say where there is no mode: what the search saw, and what to do."""
    return ArgumentError(f"no mode of the posterior could be found: {seen}; {otherwise}")


def _solve(factor: Tensor, vector: Tensor) -> Tensor:
    """A matrix's inverse times a vector, given its Cholesky factor."""
    return torch.cholesky_solve(vector[:, None], factor)[:, 0]
