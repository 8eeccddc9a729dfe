"""A run of the model on a batch, with everything from which the rows' curvature is computed."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.observations import Observation, Total, observe_site
from pyro_scale.errors import ModelError, SiteError
from pyro_scale.model.derivatives import row_gradients
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import terms_of

#: Numbers in a block of Jacobians.
_BLOCK_NUMBERS = 2**20
#: Most rows whose Jacobians come from backward passes through all of them.
_JOINT_ROWS = 64


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a run of the model from which a curvature is computed.

    Attributes:
        params: unconstrained values of the sites whose curvature is computed, by name.
        held: unconstrained values of the other latent sites, which are constants.
        arguments: the model's arguments, a batch.
        indices: numbers of the rows to take, for a model that subsamples by itself; otherwise None.
        keep: the rows of the batch that are summed over.
    """

    params: Params
    held: Params
    arguments: Arguments
    indices: Tensor | None
    keep: slice

    def only(self, names: Container[str]) -> ModelInputs:
        """A copy of the inputs for the curvature of the named sites only; the other params move to
        `held` and are constants.
        """
        params = {name: value for name, value in self.params.items() if name in names}
        others = {name: value for name, value in self.params.items() if name not in names}
        return replace(self, params=params, held={**self.held, **others})


@dataclass(frozen=True)
class Block:
    """The terms J^T F J of a curvature for b rows of data, where F is a matrix [K, K] of each row,
    such as the Fisher information in the row's K outputs.

    Attributes:
        jacobian: the Jacobian J of a row's K outputs with respect to D params, `[b, K, D]`.
        observations: the observations that the K outputs belong to, in order.
        row_values: each observation's `row_values` for these rows, from which F is computed.
    """

    jacobian: Tensor
    observations: Sequence[Observation]
    row_values: Sequence[Tensor]

    def add_to(self, total: Tensor) -> None:
        """Adds the sum of the terms over rows to `total` in place: the matrices if it is [D, D],
        their diagonals if it is [D]."""
        for part, inner in self._factors(self.jacobian):
            if total.dim() == 1:
                total += (part * inner).sum((0, 1))  # einsum takes ten times as long
            else:
                total.addmm_(part.flatten(0, 1).T, inner.flatten(0, 1))

    def times(self, vector: Tensor) -> Tensor:
        """The product of the sum over rows of the terms J^T F J, a matrix [D, D] that is not
        formed, with a vector [D]: a vector [D].
        """
        along = (self.jacobian @ vector)[..., None]
        inner = torch.cat([product for _, product in self._factors(along)], dim=1)
        return torch.einsum("bkd,bk->d", self.jacobian, inner[..., 0])

    def _factors(self, outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields, for each observation, (the part `[b, k, ...]` of `outputs` `[b, K, ...]` that
        belongs to its k outputs; the product of the observation's F with this part).
        """
        parts = outputs.split([obs.width for obs in self.observations], dim=1)
        for observation, part, values in zip(
            self.observations, parts, self.row_values, strict=True
        ):
            yield part, observation.times(part, values)


@dataclass(frozen=True)
class ObservedBatch:
    """A run of the model on a batch, differentiable in some params.

    Attributes:
        log_posterior: the model's log posterior.
        inputs: the inputs of the run.
        leaves: the params by name, as leaves of the run's autograd graph.
        sites: all sites of the run, with their graph.
        observations: the observed sites that depend on the params, each with its outputs and the
            matrix F of each row.
    """

    log_posterior: LogPosterior
    inputs: ModelInputs
    leaves: Params
    sites: Mapping[str, Site]
    observations: Sequence[Observation]

    @property
    def width(self) -> int:
        """K, the number of outputs of a row, of all observations together."""
        return sum(obs.width for obs in self.observations)

    @cached_property
    def outputs(self) -> Tensor:
        """The K outputs of each of the batch's B rows, `[B, K]`, with their autograd graph; an
        empty tensor if no observation depends on the params."""
        parts = [obs.outputs(self.sites, obs.row_values) for obs in self.observations]
        return torch.cat(parts, dim=1) if parts else torch.zeros(0, 0)

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns start, ..., stop - 1 of a matrix L with L L^T = F, for each row of the batch,
        `[stop - start, B, K]`. The curvature is the sum of outer products of the gradients of
        outputs that are weighted by these columns.
        """
        parts, first = [], 0
        for obs in self.observations:
            begin, end = max(start - first, 0), min(stop - first, obs.width)
            if begin < end:
                columns = obs.columns(begin, end)
                after = self.width - first - obs.width
                parts.append(torch.nn.functional.pad(columns, (first, after)))
            first += obs.width
        return torch.cat(parts)

    def times(self, outputs: Tensor) -> Tensor:
        """The products of each row's matrix F [K, K] with the row's vector in `outputs`, `[B, K]`:
        a tensor `[B, K]`.
        """
        parts = outputs.split([obs.width for obs in self.observations], dim=1)
        pairs = zip(self.observations, parts, strict=True)
        return torch.cat(
            [obs.times(p[..., None], obs.row_values)[..., 0] for obs, p in pairs], dim=1
        )

    def blocks(self) -> Iterator[Block]:
        """Yields the terms J^T F J of the rows in `inputs.keep`, in blocks of rows, however the
        model uses its params.

        Jacobians come from `vmap(jacrev)` of the model on batches of one row; of a model that does
        not allow that, from backward passes through the batch.
        """
        if not self.observations:
            return
        inputs, layout = self.inputs, Layout.from_tensors(self.inputs.params)
        row_values = [obs.row_values for obs in self.observations]
        kept = [values[inputs.keep] for values in row_values]
        info = self.log_posterior.model_info
        if info.own_plate is not None or info.whole_only or not rows.count(inputs.arguments):
            jacobian = self._joint_jacobian(inputs.arguments, row_values)[inputs.keep]
            yield Block(jacobian, self.observations, kept)
            return
        compute, start = self._jacobian_by_row, 0
        size = max(1, _BLOCK_NUMBERS // (self.width * max(self.width, layout.size)))
        while start < len(kept[0]):
            part = slice(start, start + size)
            batch = rows.take(rows.take(inputs.arguments, inputs.keep), part)
            of_part = [values[part] for values in kept]
            try:
                jacobian = compute(batch, of_part)
            except Exception as error:  # a model may fail in any way on one row, or under vmap
                raise_if_from_handler(error)
                if compute == self._joint_jacobian:
                    raise
                compute, size = self._joint_jacobian, min(size, _JOINT_ROWS)
                continue
            yield Block(jacobian, self.observations, of_part)
            start += size

    def _jacobian_by_row(self, arguments: Arguments, row_values: Sequence[Tensor]) -> Tensor:
        """The Jacobian of b rows' outputs with respect to the params, `[b, K, D]`, by running the
        model on one row at a time, under vmap.

        Args:
            arguments: the model's arguments, a batch of these rows.
            row_values: each observation's `row_values` for these rows.
        """
        single = rows.map_rows(lambda leaf: leaf[:, None], arguments)  # batches of one row
        mapped = rows.vmap_dims(single, 0)

        def of_row(params: Params, row: Arguments, row_values: Sequence[Tensor]) -> Tensor:
            return self._outputs_at(params, row, [values[None] for values in row_values])[0]

        each_row = torch.vmap(torch.func.jacrev(of_row), in_dims=(None, mapped, 0))
        with torch.no_grad():
            return self._flat(each_row(dict(self.inputs.params), single, list(row_values)))

    def _joint_jacobian(self, arguments: Arguments, row_values: Sequence[Tensor]) -> Tensor:
        """The Jacobian of b rows' outputs with respect to the params, `[b, K, D]`, by running the
        model on all these rows together: for models that fail on one row or under vmap. Arguments
        as for `_jacobian_by_row`."""
        params = self.inputs.params
        return self._flat(
            row_gradients(lambda p: self._outputs_at(p, arguments, row_values), params)
        )

    def _outputs_at(
        self, params: Mapping[str, Tensor], arguments: Arguments, row_values: Sequence[Tensor]
    ) -> Tensor:
        """The outputs of b rows, `[b, K]`, in a new run of the model at `params` on a batch of
        these rows; `row_values` has each observation's `row_values` for these rows."""
        inputs = self.inputs
        sites = self.log_posterior.run({**params, **inputs.held}, arguments, inputs.indices).sites
        pairs = zip(self.observations, row_values, strict=True)
        return torch.cat([obs.outputs(sites, of_rows) for obs, of_rows in pairs], dim=1)

    def _flat(self, jacobian: Mapping[str, Tensor]) -> Tensor:
        """A Jacobian as one tensor `[b, K, D]`, from a dict that has a tensor `[b, K, *shape]` for
        each param.
        """
        layout = Layout.from_tensors(self.inputs.params)
        parts = [
            jacobian[name].reshape(*jacobian[name].shape[:2], -1).to(layout.dtype)
            for name in layout.names
        ]
        return torch.cat(parts, dim=2)


def observe(
    log_posterior: LogPosterior, inputs: ModelInputs, leaves: Params, kind: str, num_draws: int
) -> ObservedBatch:
    """Runs the model on a batch, and returns the run with the observations from which a curvature
    is computed.

    Args:
        log_posterior: the model's log posterior.
        inputs: the inputs of the run.
        leaves: the params of `inputs` by name, as leaves that require grad.
        kind: kind of the curvature: "ggn", "monte_carlo" or "empirical_fisher".
        num_draws: number of observations drawn for each row, for "monte_carlo".

    Raises:
        SiteError: a likelihood term such as a `pyro.factor` has no distribution, and `kind` is not
            "empirical_fisher".
        ModelError: no site of the model has a term for each row, or the call is within
            `torch.inference_mode`.
    """
    if torch.is_inference_mode_enabled():
        raise ModelError(
            "torch.inference_mode() leaves no derivatives: leave it out, or use torch.no_grad()"
        )
    scaling = log_posterior.model_info.scaling
    rules = {name: rule for name, rule in scaling.rules.items() if rule.role == "rows"}
    if not rules:
        raise ModelError(
            f"curvature='{kind}' is a sum over rows, and no site of the model follows them: use "
            "curvature='hessian'"
        )
    with torch.enable_grad():
        sites = log_posterior.run({**inputs.held, **leaves}, inputs.arguments, inputs.indices).sites
    if kind == "empirical_fisher":
        nothing = next(iter(leaves.values())).new_zeros(
            log_posterior.batch_size(inputs.arguments), 0
        )
        return ObservedBatch(log_posterior, inputs, leaves, sites, [Total(nothing, scaling)])
    summed = set() if log_posterior.model_info.enum_dim is None else _enumerated_terms(sites)
    observations = []
    for name, rule in rules.items():
        if name in summed or name not in sites or sites[name].kind != "observed":
            is_factor = name in sites and name not in summed
            what = "a pyro.factor" if is_factor else "a sum over enumerated sites"
            raise SiteError(
                f"site '{name}': {what} has no distribution, hence no Fisher information: use "
                "curvature='empirical_fisher' or 'hessian'"
            )
        observation = observe_site(sites[name], rule, kind, num_draws)
        if observation is not None:
            observations.append(observation)
    return ObservedBatch(log_posterior, inputs, leaves, sites, observations)


def _enumerated_terms(sites: Mapping[str, Site]) -> set[str]:
    """Names of the log joint's terms that are sums over enumerated sites. They are not the density
    of one distribution, so they have no Fisher information.
    """
    return {name for name, term in terms_of(sites).items() if term.site is None}
