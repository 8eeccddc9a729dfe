"""The log posterior of a chain's own data set, in the chain's own coordinates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.whitening import Whitening
from pyro_scale.model.log_posterior import LogPosterior


@dataclass(frozen=True)
class StackedDensity:
    """What the engine sees of a model and many data sets: batches are those of `StackedBatches`.

    A chain's coordinates and the factor of its step size come with the batch, in that order:
    params are m + S z.

    Attributes:
        log_posterior: of the model of (shared rows, own rows).
        layout: of a position.
        whitening: the form of the coordinates, whose tensors batches bring; None where chains move
            in params themselves.
        in_batches: whether a step takes some of the rows; all of them come by column, tables as
            `[columns, N]`.
    """

    log_posterior: LogPosterior
    layout: Layout
    whitening: Whitening | None
    in_batches: bool

    @property
    def num_data(self) -> int:
        """N, of each data set."""
        return self.log_posterior.num_data

    def grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Any]:
        """(The gradient of a chain's log joint by z, by site; the evaluation)."""
        return self._pulled(self.log_posterior.grad, params, batch)

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Any]:
        """The same by plain autograd."""
        return self._pulled(self.log_posterior.plain_grad, params, batch)

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Nothing that chains with a data set each ask for."""
        raise NotImplementedError

    def own_values(self, values: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor]:
        """The hyperparameters of one chain, whose step size is its own."""
        constants, _, _ = batch
        if not constants:
            return dict(values)
        return {**values, "lr": values["lr"] * constants[-1][0]}

    def _pulled(
        self, grad: Callable[..., Any], params: Mapping[str, Tensor], batch: Any
    ) -> tuple[dict[str, Tensor], Any]:
        constants, shared, own = batch
        if not self.in_batches:
            shared, own = turned(shared), rows.take(own, 0)
        arguments = shared, own
        if self.whitening is None:
            gradient: tuple[dict[str, Tensor], Any] = grad(params, arguments)
            return gradient
        whitening = self.whitening.with_tensors([tensor[0] for tensor in constants[:-1]])
        here = self.layout.unflatten(whitening.to_params(self.layout.flatten(params)))
        by_site, evaluation = grad(here, arguments)
        pulled = whitening.pull_back(self.layout.flatten(by_site))
        return self.layout.unflatten(pulled), evaluation


def turned(shared: Arguments) -> Arguments:
    """Rows with tables turned over: sums over rows then run along what lies side by side."""
    return rows.map_rows(lambda table: table.mT if table.dim() == 2 else table, shared)
