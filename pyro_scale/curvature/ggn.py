"""The curvature of a likelihood: C = sum over rows of J^T F J.

J is the Jacobian of the arguments that the user gave to the observation's distribution, and F is
the distribution's Fisher information in them.  Then C is the generalized Gauss-Newton matrix
(Martens 2020; the paper's A.1, where it is the conditional Fisher, equation 7).  It does not depend
on how the model is written, is positive semi-definite, and equals the Hessian where the link is
canonical and linear in the params.  The other kinds are the same sum with other outputs: the row's
log likelihood for the empirical Fisher, log likelihoods of drawn observations for Monte Carlo.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyro_scale.core import rows
from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.exclusive import exclusive, own_generator
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count
from pyro_scale.curvature.graph import CannotRepeat
from pyro_scale.curvature.kronecker_factors import Basis, Factors, eigenvalues_of, factors_of
from pyro_scale.curvature.observed import ModelInputs, ObservedBatch, observe
from pyro_scale.curvature.prior_hessian import prior_product
from pyro_scale.curvature.row_wise import RowWise
from pyro_scale.errors import ArgumentError
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.rng.seeds import Purpose, derived_seed

#: "ggn", "empirical_fisher", or "monte_carlo": the GGN estimated from drawn observations, for
#: models with many outputs a row.
RowKind: TypeAlias = Literal["ggn", "empirical_fisher", "monte_carlo"]
_ALL_ROWS = slice(None)


@dataclass(frozen=True)
class Curvature:
    """The curvature of a model's likelihood in its unconstrained params, in nats.

    It is a sum over the rows of a batch, not multiplied by N/B, and without the prior's curvature.

    Args:
        log_posterior: the model's log posterior.
        kind: "ggn" for the generalized Gauss-Newton matrix, "monte_carlo" for an estimate of it
            from drawn observations, "empirical_fisher" for the sum of the outer products of rows'
            gradients.
        num_draws: number of observations drawn for each row, for "monte_carlo".
        seed: seed of these draws.

    Raises:
        ArgumentError: `kind` is unknown, or `num_draws` is not a positive number.
        SiteError: `kind` is "ggn", and a likelihood term such as a `pyro.factor` has no
            distribution.

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
        batch: Arguments,
        indices: Tensor | None = None,
        held: Params | None = None,
        keep: slice = _ALL_ROWS,
    ) -> dict[str, Tensor]:
        """The diagonal of the log likelihood's curvature in the params, in nats, summed over the
        rows of a batch: a dict from site to a tensor of the site's shape.

        The cost is one backward pass for each output of a row, if params are weights of products or
        convolutions, tables, or operands of sums and products.  Other params take the Jacobians of
        all rows.

        Args:
            params: unconstrained values of the sites whose curvature is computed.
            batch: the model's arguments, a tuple by position or a dict by name.
            indices: numbers of the rows to take, for a model that subsamples by itself; None for
                random ones.
            held: unconstrained values of the other latent sites; None if there are none.
            keep: the rows of the batch that are summed over; all by default.
        """
        return self.diagonal_of(self.observe(params, batch, indices, held, keep))

    def dense(
        self,
        params: Params,
        batch: Arguments,
        indices: Tensor | None = None,
        held: Params | None = None,
    ) -> Tensor:
        """The log likelihood's curvature as a matrix [D, D], in nats, summed over the rows of a
        batch. D is the number of elements of `params`, in whose order rows and columns are;
        arguments as for `diagonal`.
        """
        layout = Layout.from_tensors(params)
        total = torch.zeros(layout.size, layout.size, dtype=layout.dtype, device=_device(params))
        for block in self.observe(params, batch, indices, held).blocks():
            block.add_to(total)
        return total

    def product(
        self,
        params: Params,
        batch: Arguments,
        vector: Params,
        indices: Tensor | None = None,
        held: Params | None = None,
        keep: slice = _ALL_ROWS,
    ) -> dict[str, Tensor]:
        """The log likelihood's curvature (a matrix, which is not formed), summed over the rows of a
        batch, times a vector: a dict from site to a tensor of the site's shape.

        The product takes about as long as two gradients.  `vector` has a tensor of the param's
        shape for each site in `params`; other arguments as for `diagonal`.
        """
        inputs = self._inputs(params, batch, indices, held, keep)
        leaves = _leaves(params)
        zeros = {name: torch.zeros_like(value) for name, value in params.items()}
        try:
            with torch.enable_grad(), forward_ad.dual_level():
                duals = {
                    name: forward_ad.make_dual(leaf, vector[name].to(leaf))
                    for name, leaf in leaves.items()
                }
                run = self._observe(inputs, duals)
                if not run.observations:
                    return zeros
                outputs, tangent = forward_ad.unpack_dual(run.outputs)
        except RuntimeError:  # no forward derivatives; any other error comes again
            layout = Layout.from_tensors(params)
            flat = layout.flatten(vector)
            blocks = self._observe(inputs, leaves).blocks()
            return layout.unflatten(sum((b.times(flat) for b in blocks), torch.zeros_like(flat)))
        if tangent is None:
            return zeros
        inner = torch.zeros_like(tangent)
        inner[keep] = run.times(tangent.detach())[keep]
        back = torch.autograd.grad(outputs, list(leaves.values()), inner, materialize_grads=True)
        return dict(zip(leaves, back, strict=True))

    def kronecker(
        self,
        params: Params,
        batch: Arguments,
        indices: Tensor | None = None,
        held: Params | None = None,
        keep: slice = _ALL_ROWS,
        among: Container[str] | None = None,
    ) -> tuple[dict[str, list[Factors]], dict[str, Tensor]]:
        """The K-FAC approximation of the log likelihood's curvature, summed over the rows of a
        batch: two small matrices for each block of a weight.

        Weights of products, convolutions and projections have Kronecker factors, and so have
        biases. Further arguments are those of `diagonal`.

        Args:
            among: names of the sites that may have factors; all by default.

        Returns:
            (A dict from site to the Kronecker factors of its blocks; a dict from each site without
            factors to the diagonal of its curvature, in the site's shape).
        """
        inputs = _with_two_rows(self._inputs(params, batch, indices, held, keep))
        factors: dict[str, list[Factors]] = {}
        run = self._observe(inputs)
        with suppress(CannotRepeat):
            if (graph := self._graph(run)) is not None:
                names = params if among is None else among
                factors = factors_of(graph, run.columns, run.width, inputs.keep, names)
        others = [name for name in params if name not in factors]
        return factors, self.diagonal_of(self._observe(inputs.only(others))) if others else {}

    def eigenvalues(
        self,
        params: Params,
        batch: Arguments,
        bases: Mapping[str, Sequence[Basis]],
        indices: Tensor | None = None,
        held: Params | None = None,
        keep: slice = _ALL_ROWS,
    ) -> dict[str, list[Tensor]]:
        """The diagonal, in given bases, of the log likelihood's curvature, summed over the rows of
        a batch: a dict from site to a tensor `[m, n]` for each of its blocks.

        In the eigenvectors of the Kronecker factors this is EKFAC (George et al. 2018). Further
        arguments are those of `diagonal`.

        Args:
            bases: a dict from site to the bases of its blocks, for sites that have Kronecker
                factors.
        """
        inputs = _with_two_rows(self._inputs(params, batch, indices, held, keep))
        run = self._observe(inputs)
        graph = self._graph(run)
        assert graph is not None  # or there would be no factors
        return eigenvalues_of(graph, run.columns, run.width, inputs.keep, bases)

    def natural_gradient(
        self, params: Params, batch: Arguments, damping: float = 0.0, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """(The natural gradient of a batch's log joint, the model's evaluation on the batch).

        The natural gradient is the inverse of the curvature times the gradient of the log joint.
        The curvature is the prior's plus N/B times the batch's, and the equations are solved by
        conjugate gradients.  Added to params, the natural gradient is a step of Newton's method
        that needs no matrix.

        Args:
            params: unconstrained values of all sites.
            batch: the model's arguments.
            damping: number added to the curvature's diagonal, in nats over the square of a param's
                unit.
            indices: numbers of the rows to take, for a model that subsamples by itself; None for
                random ones.

        Returns:
            (The natural gradient, in each site's shape by site; the model's evaluation on the
            batch).
        """
        import torchopt

        arguments, layout = rows.as_arguments(batch), Layout.from_tensors(params)
        indices = self._indices(arguments, indices)
        try:
            gradient, evaluation = self.log_posterior.grad(params, arguments, indices)
        except (RuntimeError, NotImplementedError):  # functorch does not support the model
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

    def notes(self, params: Params, batch: Arguments, indices: Tensor | None = None) -> list[str]:
        """Remarks for users on the accuracy of the curvature: one string for each observed site
        whose Fisher information can only be estimated by Monte Carlo; empty if all is exact. The
        model is run on the batch to find its observed sites.
        """
        if self.kind == "empirical_fisher":  # which uses the log likelihood as it is
            return []
        observations = self.observe(params, batch, indices).observations
        return [obs.note for obs in observations if obs.note is not None]

    def observe(
        self,
        params: Params,
        batch: Arguments,
        indices: Tensor | None = None,
        held: Params | None = None,
        keep: slice = _ALL_ROWS,
    ) -> ObservedBatch:
        """Runs the model on a batch once, so that several things can be computed from the same run:
        the curvature (`diagonal_of`), the log joint, gradients.

        Args:
            params: unconstrained values of the sites whose curvature is computed.
            batch: the model's arguments, a tuple by position or a dict by name.
            indices: numbers of the rows to take, for a model that subsamples by itself; None for
                random ones.
            held: unconstrained values of the other latent sites; None if there are none.
            keep: the rows of the batch that are summed over; all by default.
        """
        return self._observe(self._inputs(params, batch, indices, held, keep))

    def diagonal_of(self, run: ObservedBatch) -> dict[str, Tensor]:
        """The diagonal of the log likelihood's curvature (of the class's `kind`) in the params, in
        nats, summed over the rows of a batch: a dict from site to a tensor of the site's shape. The
        same as `diagonal`, for callers that need more from the same run of the model.

        Args:
            run: run of the model on the batch, as `observe` returned it.
        """
        params, diagonal = run.inputs.params, dict[str, Tensor]()
        with suppress(CannotRepeat):
            if (graph := self._graph(run)) is not None:
                diagonal = graph.squares(run.columns, run.width, run.inputs.keep)
        others = {name: value for name, value in params.items() if name not in diagonal}
        if others:
            layout = Layout.from_tensors(others)
            total = torch.zeros(layout.size, dtype=layout.dtype, device=_device(others))
            for block in self._observe(run.inputs.only(others)).blocks():
                block.add_to(total)
            diagonal |= layout.unflatten(total)
        return {name: diagonal[name] for name in params}

    def _observe(self, inputs: ModelInputs, leaves: Params | None = None) -> ObservedBatch:
        leaves = _leaves(inputs.params) if leaves is None else leaves
        with own_generator(derived_seed(self.seed, 0, Purpose.CURVATURE)):
            return observe(self.log_posterior, inputs, leaves, self.kind, self.num_draws)

    def _inputs(
        self,
        params: Params,
        batch: Arguments,
        indices: Tensor | None,
        held: Params | None,
        keep: slice,
    ) -> ModelInputs:
        arguments = rows.as_arguments(batch)
        return ModelInputs(params, held or {}, arguments, self._indices(arguments, indices), keep)

    def _indices(self, arguments: Arguments, indices: Tensor | None) -> Tensor | None:
        """The indices of the rows that a model which subsamples by itself is to use: `indices` if
        they are passed, otherwise random ones, as many as its subsample has. None for any other
        model.
        """
        self.log_posterior.prepare(arguments)
        info = self.log_posterior.model_info
        if info.own_plate is None or indices is not None:
            return indices
        with exclusive:
            return torch.randperm(self.log_posterior.num_data)[: info.batch_size]

    def _graph(self, run: ObservedBatch) -> RowWise | None:
        """Autograd's graph of each row's outputs, from which squares of rows' gradients follow
        without Jacobians; None for a model that only runs on all rows of the data together.
        """
        if self.log_posterior.model_info.whole_only:
            return None
        with torch.enable_grad():
            return RowWise.from_outputs(run.outputs, run.leaves)


def row_moments(
    log_posterior: LogPosterior, params: Params, arguments: Arguments
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sum and the sum of squares, over the rows of a batch, of the gradients of rows' log
    likelihoods, in nats; without the prior and not multiplied by N/B.

    The sum of squares is the diagonal of the empirical Fisher; both come from one run of the model.

    Args:
        log_posterior: the model's log posterior.
        params: unconstrained values of all sites.
        arguments: the model's arguments, a batch.

    Returns:
        (The sums, the sums of squares), both dicts from latent site to a tensor of its shape.
    """
    latents = {name: params[name] for name in log_posterior.latents}
    held = {name: value for name, value in params.items() if name not in latents}
    curvature = Curvature(log_posterior, "empirical_fisher")
    run = curvature.observe(latents, arguments, held=held)
    squares = curvature.diagonal_of(run)
    leaves = [run.leaves[name] for name in latents]
    with torch.enable_grad():
        total = run.outputs.sum()
    sums = torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)
    return dict(zip(latents, sums, strict=True)), squares


def _with_two_rows(inputs: ModelInputs) -> ModelInputs:
    """The same inputs, with the row twice if the batch has a single row (`keep` still counts the
    row once): in a batch of one row, operations on params alone cannot be told from those on rows
    of data.
    """
    if inputs.indices is not None or rows.count(inputs.arguments) != 1:
        return inputs
    twice = torch.zeros(2, dtype=torch.long, device=rows.device(inputs.arguments))
    count = len(range(*inputs.keep.indices(1)))
    return replace(inputs, arguments=rows.take(inputs.arguments, twice), keep=slice(0, count))


def _leaves(params: Params) -> dict[str, Tensor]:
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def _device(params: Params) -> torch.device:
    return next(iter(params.values())).device
