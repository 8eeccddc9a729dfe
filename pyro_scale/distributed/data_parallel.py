"""A log posterior whose batches are shared out among processes, each of which has some rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.distributed.ranks import Rows


@dataclass(frozen=True)
class DataParallel:
    """The log posterior of a batch, of whose B rows each rank takes B_r.

    A rank's own estimate of the log joint is log prior + N/B_r sum_r, with sum_r of its rows' log
    likelihoods.  The mean over ranks with weights B_r/B is log prior + N/B sum: the prior counts
    once, and every row alike, however many rows each rank has.  So is the mean of gradients, which
    is one sum over ranks of a vector.

    Attributes:
        density: the log posterior.
        rows: which part of a batch this rank takes.
    """

    density: Any
    rows: Rows

    @property
    def num_data(self) -> int:
        """N."""
        return int(self.density.num_data)

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Any]:
        """(Gradient of the log joint by site, the evaluation, of whose log joint all rows are
        part)."""
        layout, size = Layout.of(dict(params)), rows.count(batch) or 1
        own = self.rows.of(size)
        weight = (own.stop - own.start) / size
        if weight == 0:  # the other ranks have all rows
            own = slice(0, 1)
        error: Exception | None = None
        evaluation: Any = None
        try:
            by_site, evaluation = self.density.plain_grad(params, rows.take(batch, own))
            vector = torch.cat([layout.flatten(by_site), evaluation.log_joint.reshape(1)])
        except Exception as raised:  # the others wait for a vector: NaN stops their chains
            error, vector = raised, torch.full((layout.size + 1,), torch.nan, dtype=layout.dtype)
        vector = vector.detach() * weight
        dist.all_reduce(vector, group=self.rows.group)
        if error is not None:
            raise error
        return layout.unflatten(vector[:-1]), evaluation._replace(log_joint=vector[-1])

    grad = plain_grad

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The gradient of each row's log likelihood by site, of the rows that are given."""
        gradients: dict[str, Tensor] = self.density.row_gradients(params, batch, indices)
        return gradients
