"""The log posterior of minibatches that are shared out among processes: each process evaluates the
model on a part of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pyro_scale.compile.trace import is_tracing
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Estimate(NamedTuple):
    """The log joint of all data, as estimated from a minibatch whose rows are on several ranks.

    Attributes:
        log_joint: the estimate, a scalar in nats.
    """

    log_joint: Tensor


def sum_over(group: ProcessGroup, tensor: Tensor) -> Tensor:
    """The sum of a tensor over the ranks of a process group, the same on each of them: an
    all-reduce that can be traced and compiled.
    """
    # private, but what torch.compile makes of all_reduce; not every torch has it
    from torch.distributed import _functional_collectives as collectives

    summed: Tensor = collectives.wait_tensor(collectives.all_reduce(tensor, "sum", group))
    return summed


@dataclass(frozen=True)
class DataParallel:
    """The log posterior of a minibatch of B rows, of which each rank r has B_r.

    A rank's own estimate of the log joint is log prior + N/B_r sum_r, where sum_r is the log
    likelihood of its rows. The mean of these estimates with weights B_r/B is log prior + N/B sum:
    the prior counts once and all rows count alike, however many each rank has. The same holds for
    gradients, so that a step needs one sum of a vector over ranks.

    Attributes:
        density: the log posterior, which is evaluated on this rank's rows.
        weight: B_r/B of this rank.
        group: the ranks that divide the rows of the same minibatches among themselves.
    """

    density: Any
    weight: float
    group: ProcessGroup

    @property
    def num_data(self) -> int:
        """N, the number of rows of the whole data."""
        return int(self.density.num_data)

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Arguments, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Any]:
        """(Gradient of the log joint, by site; the log joint's estimate), both from the rows of all
        ranks.

        Args:
            params: unconstrained parameters by site.
            batch: the model's arguments, with this rank's rows of the minibatch.
            indices: indices of the rows, for a model that subsamples by itself; None for others.

        Raises:
            RankError: the model has failed on the rows of a rank.
        """
        layout, error = Layout.from_tensors(dict(params)), None
        like = next(iter(params.values()))
        term = like.new_full((layout.size + 1,), torch.nan, dtype=layout.dtype)
        try:
            by_site, evaluation = self.density.plain_grad(params, batch, indices)
            joined = torch.cat([layout.flatten(by_site), evaluation.log_joint.reshape(1)]).detach()
            term = self.weight * joined if self.weight else torch.zeros_like(joined)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            pass  # NaN on all ranks ends this chain alone, as in a compiled step
        except Exception as raised:
            if is_tracing():
                raise
            error = raised
        if is_tracing():  # a compiled step runs no Python of the model, so that it cannot raise
            mean = sum_over(self.group, term)
        else:
            message = torch.cat([term, term.new_full((1,), float(error is not None))])
            mean, failed = sum_over(self.group, message).split([layout.size + 1, 1])
            if bool(failed):
                raise RankError(f"the model has failed at a step: {self._errors(error)}") from error
        return layout.unflatten(mean[:-1]), Estimate(mean[-1])

    def _errors(self, error: Exception | None) -> str:
        """A text for messages with the errors of all ranks, which all of them must call at the same
        time; `error` is this rank's error, None if it has none.
        """
        from torch import distributed as dist

        words = None
        if error is not None:
            words = f"on rank {dist.get_rank()}, {type(error).__name__}: {error}"
        by_rank: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(by_rank, words, group=self.group)
        return "; ".join(filter(None, by_rank))

    grad = plain_grad

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Arguments, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The gradient of the log likelihood of each of this rank's rows with respect to params,
        `[rows, *shape]` by site; not summed over ranks."""
        gradients: dict[str, Tensor] = self.density.row_gradients(params, batch, indices)
        return gradients
