"""A log posterior whose batches are shared out among processes, each of which has some rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pyro_scale.compile.trace import is_tracing
from pyro_scale.core.layout import Layout
from pyro_scale.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Estimate(NamedTuple):
    """What the rows of a batch say, on all ranks together.

    Attributes:
        log_joint: estimated from them, in nats, a total over the data.
    """

    log_joint: Tensor


def sum_over(group: ProcessGroup, tensor: Tensor) -> Tensor:
    """The sum of the tensors of a group's ranks: an operation that can be traced and compiled."""
    # private, but what torch.compile makes of all_reduce; not every torch has it
    from torch.distributed import _functional_collectives as collectives

    summed: Tensor = collectives.wait_tensor(collectives.all_reduce(tensor, "sum", group))
    return summed


@dataclass(frozen=True)
class DataParallel:
    """The log posterior of a batch, of whose B rows each rank has B_r.

    A rank's own estimate of the log joint is log prior + N/B_r sum_r, with sum_r of its rows' log
    likelihoods.  The mean over ranks with weights B_r/B is log prior + N/B sum: the prior counts
    once, and every row alike, however many rows each rank has.  So is the mean of gradients, which
    is one sum over ranks of a vector.

    Attributes:
        density: the log posterior.
        weight: of this rank, B_r/B.
        group: the ranks that have parts of the same batches.
    """

    density: Any
    weight: float
    group: ProcessGroup

    @property
    def num_data(self) -> int:
        """N."""
        return int(self.density.num_data)

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Estimate]:
        """(Gradient of the log joint by site, its estimate), of all ranks' rows.

        Raises:
            RankError: the model has failed on the rows of a rank.
        """
        layout, error = Layout.from_tensors(dict(params)), None
        like = next(iter(params.values()))
        own = like.new_full((layout.size + 1,), torch.nan, dtype=layout.dtype)
        try:
            by_site, evaluation = self.density.plain_grad(params, batch, indices)
            joined = torch.cat([layout.flatten(by_site), evaluation.log_joint.reshape(1)]).detach()
            own = self.weight * joined if self.weight else torch.zeros_like(joined)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            pass  # NaN on all ranks ends the chain alone, as in a compiled step
        except Exception as raised:
            if is_tracing():
                raise
            error = raised
        if is_tracing():  # a compiled step runs no Python of the model's, which could raise
            mean = sum_over(self.group, own)
        else:
            told = torch.cat([own, own.new_full((1,), float(error is not None))])
            mean, failed = sum_over(self.group, told).split([layout.size + 1, 1])
            if bool(failed):
                raise RankError(f"the model has failed at a step: {self._told(error)}") from error
        return layout.unflatten(mean[:-1]), Estimate(mean[-1])

    def _told(self, error: Exception | None) -> str:
        """What has failed on which ranks."""
        from torch import distributed as dist

        words = None
        if error is not None:
            words = f"on rank {dist.get_rank()}, {type(error).__name__}: {error}"
        told: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(told, words, group=self.group)
        return "; ".join(each for each in told if each is not None)

    grad = plain_grad

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The gradient of each row's log likelihood by site, of the rows that are given."""
        gradients: dict[str, Tensor] = self.density.row_gradients(params, batch, indices)
        return gradients
