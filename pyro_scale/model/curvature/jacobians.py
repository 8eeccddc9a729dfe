"""The curvature of a likelihood from the Jacobians of rows, whatever the params do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.model.curvature.observations import Observation
from pyro_scale.model.derivatives import row_gradients
from pyro_scale.model.log_posterior import LogPosterior, Params

#: Numbers of a block of Jacobians.
_BLOCK_NUMBERS = 2**20
#: Rows that are differentiated together, which takes as many backward passes through all of them.
_TOGETHER = 64


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


def blocks_of(
    log_posterior: LogPosterior,
    observed: Sequence[Observation],
    params: Params,
    arguments: Arguments,
    indices: Tensor | None,
    held: Params,
    keep: slice,
) -> Iterator[Block]:
    """The sum's terms of some rows at a time.

    Args:
        log_posterior: the model.
        observed: its observations on the batch.
        params: unconstrained values that the curvature is in.
        arguments: the batch.
        indices: the rows to take, for a model that subsamples by itself.
        held: unconstrained values of the other sites.
        keep: which rows of the batch count.
    """
    layout = Layout.from_tensors(params)
    if not observed:  # no row depends on the params
        return
    known = [each.known for each in observed]
    known_rows = [each[keep] for each in known]

    def outputs(params: Params, arguments: Arguments, known: Sequence[Tensor]) -> Tensor:
        sites = log_posterior.run({**params, **held}, arguments, indices).sites
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

    understood = log_posterior.model_info
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
        except Exception as error:  # whatever a model says that cannot take one row, or no vmap
            raise_if_from_handler(error)
            if jacobian is together:
                raise
            jacobian, size = together, min(size, _TOGETHER)
            continue
        yield Block(found, observed, own)
        start += size
