"""The curvature of a likelihood: C = sum over rows of J^T F J.

With J the Jacobian of the arguments that the user gave to the observation's distribution, and F
that distribution's Fisher information in them, C is the generalized Gauss-Newton matrix (Martens
2020; the paper's A.1, where it is the conditional Fisher, equation 7): the same however the model
is written, positive semi-definite, and the Hessian where the link is canonical and linear in the
params.  The other kinds are the same sum: for the empirical Fisher the row's log likelihood takes
the place of the arguments, and for Monte Carlo the log likelihoods of drawn observations do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
import torchopt
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive, own_generator
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count
from pyro_scale.errors import ArgumentError
from pyro_scale.model.curvature.observations import Observation, observations_of
from pyro_scale.model.curvature.prior_hessian import prior_product
from pyro_scale.model.derivatives import row_gradients
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.scaling import Evaluation
from pyro_scale.rng.seeds import Purpose, derived_seed

#: "ggn", "empirical_fisher", or "monte_carlo": the GGN from drawn observations, for many outputs.
RowKind: TypeAlias = Literal["ggn", "empirical_fisher", "monte_carlo"]

#: Numbers of a block of Jacobians.
_BLOCK_NUMBERS = 2**21
#: Rows that are differentiated together, which takes as many backward passes through all of them.
_TOGETHER = 64


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

    Example:
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
        self, params: Params, batch: Any, indices: Tensor | None = None, held: Params | None = None
    ) -> dict[str, Tensor]:
        """The diagonal by site.

        Args:
            params: unconstrained values that the curvature is in.
            batch: the model's arguments, a tuple by position or a dict by name.
            indices: the rows to take, for a model that subsamples by itself.
            held: unconstrained values of the other sites.
        """
        layout = Layout.of(params)
        total = torch.zeros(layout.size, dtype=layout.dtype, device=_device(params))
        for block in self.blocks(params, rows.as_arguments(batch), indices, held):
            block.add_to(total)
        return layout.unflatten(total)

    def dense(
        self, params: Params, batch: Any, indices: Tensor | None = None, held: Params | None = None
    ) -> Tensor:
        """The matrix [D, D], in the order of params; arguments as for `diagonal`."""
        layout = Layout.of(params)
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
    ) -> dict[str, Tensor]:
        """The matrix times a vector by site, without the matrix: two gradients' worth of time."""
        arguments, held = rows.as_arguments(batch), held or {}
        indices = self._indices(arguments, indices)
        observed = self._observe({**params, **held}, arguments, indices)
        params, vector = dict(params), {name: vector[name] for name in params}

        def outputs(params: Params) -> list[Tensor]:
            sites = self.log_posterior.run({**params, **held}, arguments, indices).sites
            return [each.outputs(sites, each.known) for each in observed]

        try:
            with torch.no_grad():
                moved: list[Tensor] = torch.func.jvp(outputs, (params,), (vector,))[1]
                inner = [
                    each.times(part[..., None], each.known)[..., 0]
                    for each, part in zip(observed, moved, strict=True)
                ]
                return torch.func.vjp(outputs, params)[1](inner)[0]
        except (RuntimeError, NotImplementedError):  # a model that functorch refuses
            layout = Layout.of(params)
            flat = layout.flatten(vector)
            blocks = self.blocks(params, arguments, indices, held)
            return layout.unflatten(sum((b.times(flat) for b in blocks), torch.zeros_like(flat)))

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
        arguments, layout = rows.as_arguments(batch), Layout.of(params)
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
        arguments = rows.as_arguments(batch)
        indices = self._indices(arguments, indices)
        observed = self._observe(params, arguments, indices)
        return [each.note for each in observed if each.note is not None]

    def blocks(
        self,
        params: Params,
        arguments: Arguments,
        indices: Tensor | None = None,
        held: Params | None = None,
        keep: slice = slice(None),
    ) -> Iterator[Block]:
        """The sum's terms of some rows at a time; `keep` says which rows of the batch count."""
        held = held or {}
        layout = Layout.of(params)
        indices = self._indices(arguments, indices)
        observed = self._observe({**params, **held}, arguments, indices)
        if not observed:  # no row depends on the params
            return
        known = [each.known for each in observed]
        known_rows = [each[keep] for each in known]

        def outputs(params: Params, arguments: Arguments, known: Sequence[Tensor]) -> Tensor:
            sites = self.log_posterior.run({**params, **held}, arguments, indices).sites
            pairs = zip(observed, known, strict=True)
            return torch.cat([each.outputs(sites, own) for each, own in pairs], dim=1)

        def flat(jacobian: Mapping[str, Tensor]) -> Tensor:
            leads = [jacobian[name].shape[:2] for name in layout.names]
            parts = [
                jacobian[name].reshape(*lead, -1).to(layout.dtype)
                for name, lead in zip(layout.names, leads, strict=True)
            ]
            return torch.cat(parts, dim=2)

        def together(arguments: Arguments, known: Sequence[Tensor]) -> Tensor:
            return flat(row_gradients(lambda p: outputs(p, arguments, known), params))

        def of_row(params: Params, row: Arguments, known: Sequence[Tensor]) -> Tensor:
            return outputs(params, row, [each[None] for each in known])[0]

        def row_by_row(arguments: Arguments, known: Sequence[Tensor]) -> Tensor:
            single = rows.map_rows(lambda leaf: leaf[:, None], arguments)  # batches of one row
            mapped = rows.vmap_dims(single, 0)
            each_row = torch.vmap(torch.func.jacrev(of_row), in_dims=(None, mapped, 0))
            with torch.no_grad():
                return flat(each_row(dict(params), single, list(known)))

        understood = self.log_posterior.model_info
        if understood.own_plate is not None or understood.whole_only or not rows.count(arguments):
            yield Block(together(arguments, known)[keep], observed, known_rows)
            return
        width = sum(each.width for each in observed)
        size = max(1, _BLOCK_NUMBERS // (width * max(width, layout.size)))
        jacobian, start = row_by_row, 0
        while start < len(known_rows[0]):
            part = slice(start, start + size)
            batch, own = rows.take(rows.take(arguments, keep), part), [k[part] for k in known_rows]
            try:
                found = jacobian(batch, own)
            except Exception:  # whatever a model says that cannot take one row, or no vmap
                if jacobian is together:
                    raise
                jacobian, size = together, min(size, _TOGETHER)
                continue
            yield Block(found, observed, own)
            start += size

    def _indices(self, arguments: Arguments, indices: Tensor | None) -> Tensor | None:
        """Which rows a model takes that subsamples by itself: some, unless the caller says."""
        self.log_posterior.prepare(arguments)
        info = self.log_posterior.model_info
        if info.own_plate is None or indices is not None:
            return indices
        with exclusive:
            return torch.randperm(self.log_posterior.num_data)[: info.batch_size]

    def _observe(
        self, params: Params, arguments: Arguments, indices: Tensor | None
    ) -> list[Observation]:
        with own_generator(derived_seed(self.seed, 0, Purpose.CURVATURE)):
            return observations_of(
                self.log_posterior, params, arguments, indices, self.kind, self.num_draws
            )


@dataclass(frozen=True)
class Block:
    """Some rows' terms.

    Attributes:
        jacobian: of all outputs, `[b, K, D]`.
        observed: whose outputs those are.
        known: what each needs to know of these rows.
    """

    jacobian: Tensor
    observed: Sequence[Observation]
    known: Sequence[Tensor]

    def add_to(self, total: Tensor) -> None:
        """Adds the terms, or their diagonals, to a total [D, D] or [D] of the caller's own."""
        for part, inner in self._factors(self.jacobian):
            if total.dim() == 1:
                total += (part * inner).sum((0, 1))  # einsum takes ten times as long
            else:
                total.addmm_(part.flatten(0, 1).T, inner.flatten(0, 1))

    def times(self, vector: Tensor) -> Tensor:
        """The terms' sum times a vector [D]."""
        along = (self.jacobian @ vector)[..., None]
        inner = torch.cat([moved for _, moved in self._factors(along)], dim=1)
        return torch.einsum("bkd,bk->d", self.jacobian, inner[..., 0])

    def _factors(self, outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each observation's part of `[b, K, ...]`, and what is between times that."""
        parts = outputs.split([each.width for each in self.observed], dim=1)
        for each, part, known in zip(self.observed, parts, self.known, strict=True):
            yield part, each.times(part, known)


def _device(params: Params) -> torch.device:
    return next(iter(params.values())).device
