"""The curvature of a likelihood: C = sum over rows of J^T F J.

With J the Jacobian of the arguments that the user gave to the observation's distribution, and F
that distribution's Fisher information in them, C is the generalized Gauss-Newton matrix (Martens
2020; the paper's A.1, where it is the conditional Fisher, equation 7): the same however the model
is written, positive semi-definite, and the Hessian where the link is canonical and linear in the
params.  The other kinds are the same sum: for the empirical Fisher the row's log likelihood takes
the place of the arguments, and for Monte Carlo the log likelihoods of drawn observations do.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
import torchopt
from torch import Tensor
from torch.autograd import forward_ad

from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive, own_generator
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count
from pyro_scale.errors import ArgumentError
from pyro_scale.model.curvature.jacobians import Block, blocks_of
from pyro_scale.model.curvature.kronecker import Basis, Factors, eigenvalues_of, factors_of
from pyro_scale.model.curvature.observed import Observed, observe
from pyro_scale.model.curvature.prior_hessian import prior_product
from pyro_scale.model.curvature.row_wise import CannotRepeat, RowWise
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.scaling import Evaluation
from pyro_scale.rng.seeds import Purpose, derived_seed

#: "ggn", "empirical_fisher", or "monte_carlo": the GGN from drawn observations, for many outputs.
RowKind: TypeAlias = Literal["ggn", "empirical_fisher", "monte_carlo"]


@dataclass(frozen=True)
class Curvature:
    """The curvature of a model's likelihood in its unconstrained params, in nats, a sum over the
    rows of a batch: without N/B, and without the prior's.

    Args:
        log_posterior: the model.
        kind: which.
        num_draws: of each row's observation, for Monte Carlo.
        seed: of those draws.

    Raises:
        ArgumentError: an unknown kind, no draws.
        SiteError: "ggn" of what has no distribution, such as a `pyro.factor`.

    Examples:
        >>> import torch, pyro, pyro.distributions as dist
        >>> import pyro_scale as ps
        >>> def model(x, y=None):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
        >>> curvature = ps.Curvature(ps.LogPosterior(model, num_data=3))
        >>> batch = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), torch.zeros(3)
        >>> curvature.dense({"w": torch.zeros(2)}, batch)  # x'x / 0.5^2
        tensor([[12., 12.],
                [12., 20.]])
    """

    log_posterior: LogPosterior
    kind: RowKind = "ggn"
    num_draws: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(RowKind):
            raise ArgumentError(f"kind={self.kind!r}: pass one of {get_args(RowKind)}")
        as_count("num_draws", self.num_draws)

    def diagonal(
        self,
        params: Params,
        batch: Any,
        indices: Tensor | None = None,
        held: Params | None = None,
        keep: slice = slice(None),
        run: Observed | None = None,
    ) -> dict[str, Tensor]:
        """The diagonal by site.

        A param that enters products, convolutions, tables or elementwise operations of which each
        row has its own part takes a backward pass for each output; any other takes Jacobians of
        all rows.

        Args:
            params: unconstrained values that the curvature is in.
            batch: the model's arguments, a tuple by position or a dict by name.
            indices: the rows to take, for a model that subsamples by itself.
            held: unconstrained values of the other sites.
            keep: which rows of the batch count.
            run: `observe` of the same, where it has been run.
        """
        arguments, held = rows.as_arguments(batch), dict(held or {})
        indices = self._indices(arguments, indices)
        run = run or self.observe(params, arguments, indices, held)
        found: dict[str, Tensor] = {}
        with suppress(CannotRepeat):
            if (graph := self._graph(run)) is not None:
                found = graph.squares(run.columns, run.num_columns, keep)
        others = {name: value for name, value in params.items() if name not in found}
        if others:
            layout = Layout.from_tensors(others)
            total = torch.zeros(layout.size, dtype=layout.dtype, device=_device(others))
            held |= {name: params[name] for name in found}
            for block in self.blocks(others, arguments, indices, held, keep):
                block.add_to(total)
            found |= layout.unflatten(total)
        return {name: found[name] for name in params}

    def dense(
        self, params: Params, batch: Any, indices: Tensor | None = None, held: Params | None = None
    ) -> Tensor:
        """The matrix [D, D], in the order of params; arguments as for `diagonal`."""
        layout = Layout.from_tensors(params)
        total = torch.zeros(layout.size, layout.size, dtype=layout.dtype, device=_device(params))
        for block in self.blocks(params, rows.as_arguments(batch), indices, held):
            block.add_to(total)
        return total

    def product(
        self,
        params: Params,
        batch: Any,
        vector: Params,
        indices: Tensor | None = None,
        held: Params | None = None,
        keep: slice = slice(None),
    ) -> dict[str, Tensor]:
        """The matrix times a vector by site, without the matrix: two gradients' worth of time;
        other arguments as for `diagonal`."""
        arguments, held = rows.as_arguments(batch), held or {}
        indices = self._indices(arguments, indices)
        leaves = _leaves(params)
        nothing = {name: torch.zeros_like(value) for name, value in params.items()}
        try:
            with torch.enable_grad(), forward_ad.dual_level():
                duals = {
                    name: forward_ad.make_dual(leaf, vector[name].to(leaf))
                    for name, leaf in leaves.items()
                }
                observed = self._observe({**held, **duals}, arguments, indices)
                if not observed.observations:
                    return nothing
                outputs, moved = forward_ad.unpack_dual(observed.outputs)
        except RuntimeError:  # of operations without forward derivatives; others' come again
            layout = Layout.from_tensors(params)
            flat = layout.flatten(vector)
            blocks = self.blocks(params, arguments, indices, held, keep)
            return layout.unflatten(sum((b.times(flat) for b in blocks), torch.zeros_like(flat)))
        if moved is None:
            return nothing
        inner = torch.zeros_like(moved)
        inner[keep] = observed.between(moved.detach())[keep]
        back = torch.autograd.grad(outputs, list(leaves.values()), inner, materialize_grads=True)
        return dict(zip(leaves, back, strict=True))

    def kronecker(
        self,
        params: Params,
        batch: Any,
        indices: Tensor | None = None,
        held: Params | None = None,
        keep: slice = slice(None),
        among: Container[str] | None = None,
    ) -> tuple[dict[str, list[Factors]], dict[str, Tensor]]:
        """(Kronecker factors of the blocks of those sites, among some or all, that are weights of
        products, convolutions and projections, or biases; the diagonal by site of all others);
        arguments as for `diagonal`.  See `pyro_scale.model.curvature.kronecker`."""
        arguments, held = rows.as_arguments(batch), dict(held or {})
        indices = self._indices(arguments, indices)
        arguments, keep = _two_rows(arguments, keep) if indices is None else (arguments, keep)
        factors: dict[str, list[Factors]] = {}
        run = self.observe(params, arguments, indices, held)
        with suppress(CannotRepeat):
            if (graph := self._graph(run)) is not None:
                factors = factors_of(graph, run.columns, run.num_columns, keep, among or params)
        others = {name: value for name, value in params.items() if name not in factors}
        held |= {name: params[name] for name in factors}
        return factors, self.diagonal(others, arguments, indices, held, keep) if others else {}

    def eigenvalues(
        self,
        params: Params,
        batch: Any,
        bases: Mapping[str, Sequence[Basis]],
        indices: Tensor | None = None,
        held: Params | None = None,
        keep: slice = slice(None),
    ) -> dict[str, list[Tensor]]:
        """The diagonal of the curvature in bases of blocks that have Kronecker factors, such as
        the factors' eigenvectors (EKFAC; George et al. 2018), by site, `[m, n]` for each block;
        other arguments as for `diagonal`."""
        arguments = rows.as_arguments(batch)
        indices = self._indices(arguments, indices)
        arguments, keep = _two_rows(arguments, keep) if indices is None else (arguments, keep)
        run = self.observe(params, arguments, indices, held or {})
        graph = self._graph(run)
        assert graph is not None  # or there would be no factors
        return eigenvalues_of(graph, run.columns, run.num_columns, keep, bases)

    def natural_gradient(
        self, params: Params, batch: Any, damping: float = 0.0, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """(The gradient of the log joint, multiplied by the inverse of its curvature; the
        evaluation): added to params, it is a step of Newton's method that needs no matrix.

        The curvature is the prior's and N/B times the batch's; the equations are solved by
        conjugate gradients.

        Args:
            params: unconstrained values of all sites.
            batch: the model's arguments.
            damping: added to the curvature's diagonal, in nats over the square of a param's unit.
            indices: the rows to take, for a model that subsamples by itself.
        """
        arguments, layout = rows.as_arguments(batch), Layout.from_tensors(params)
        indices = self._indices(arguments, indices)
        try:
            gradient, evaluation = self.log_posterior.grad(params, arguments, indices)
        except (RuntimeError, NotImplementedError):  # a model that functorch refuses
            gradient, evaluation = self.log_posterior.plain_grad(params, arguments, indices)
        scale = self.log_posterior.num_data / len(evaluation.log_lik)

        def product(vector: Tensor) -> Tensor:
            parts = layout.unflatten(vector)
            of_rows = layout.flatten(self.product(params, arguments, parts, indices))
            of_prior = prior_product(self.log_posterior, params, arguments, parts)
            return scale * of_rows + layout.flatten(of_prior) + damping * vector

        tolerance = torch.finfo(layout.dtype).eps ** 0.5
        solve = torchopt.linear_solve.solve_cg(rtol=tolerance, maxiter=10 * layout.size)
        with torch.no_grad():
            solution = solve(product, layout.flatten(gradient))
        return layout.unflatten(solution), evaluation

    def notes(self, params: Params, batch: Any, indices: Tensor | None = None) -> list[str]:
        """What is to be said of it: which sites' Fisher information is estimated."""
        if self.kind == "empirical_fisher":  # of the log likelihood as it is
            return []
        arguments = rows.as_arguments(batch)
        indices = self._indices(arguments, indices)
        observed = self._observe(_leaves(params), arguments, indices).observations
        return [each.note for each in observed if each.note is not None]

    def blocks(
        self,
        params: Params,
        arguments: Arguments,
        indices: Tensor | None = None,
        held: Params | None = None,
        keep: slice = slice(None),
        run: Observed | None = None,
    ) -> Iterator[Block]:
        """The sum's terms of some rows at a time, with their Jacobians; arguments as for
        `diagonal`."""
        held, indices = held or {}, self._indices(arguments, indices)
        observed = (run or self.observe(params, arguments, indices, held)).observations
        if observed:  # some row depends on the params
            yield from blocks_of(
                self.log_posterior, observed, params, arguments, indices, held, keep
            )

    def observe(
        self, params: Params, arguments: Arguments, indices: Tensor | None, held: Params
    ) -> Observed:
        """A run of the model on a batch, differentiable in the params; arguments as for
        `diagonal`."""
        return self._observe({**held, **_leaves(params)}, arguments, indices)

    def _graph(self, run: Observed) -> RowWise | None:
        """The graph of the rows' outputs; None of a model that takes nothing less than all
        rows."""
        if self.log_posterior.model_info.whole_only:
            return None
        with torch.enable_grad():
            return RowWise.of(run.outputs, run.leaves)

    def _indices(self, arguments: Arguments, indices: Tensor | None) -> Tensor | None:
        """Which rows a model takes that subsamples by itself: some, unless the caller says."""
        self.log_posterior.prepare(arguments)
        info = self.log_posterior.model_info
        if info.own_plate is None or indices is not None:
            return indices
        with exclusive:
            return torch.randperm(self.log_posterior.num_data)[: info.batch_size]

    def _observe(self, params: Params, arguments: Arguments, indices: Tensor | None) -> Observed:
        with own_generator(derived_seed(self.seed, 0, Purpose.CURVATURE)):
            return observe(
                self.log_posterior, params, arguments, indices, self.kind, self.num_draws
            )


def _two_rows(arguments: rows.Arguments, keep: slice) -> tuple[rows.Arguments, slice]:
    """A single row twice, of which one counts: what is of params alone looks like one row's."""
    if rows.count(arguments) != 1:
        return arguments, keep
    twice = torch.zeros(2, dtype=torch.long, device=rows.device(arguments))
    return rows.take(arguments, twice), slice(0, len(range(*keep.indices(1))))


def _leaves(params: Params) -> dict[str, Tensor]:
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def _device(params: Params) -> torch.device:
    return next(iter(params.values())).device
