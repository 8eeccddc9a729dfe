"""The extended Kalman filter's step: a pure function, to be run as it is or compiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.fullbatch.chunks import Chunk
from pyro_scale.kernels.ekf import EKFState, absorb, predict
from pyro_scale.model import derivatives
from pyro_scale.model.curvature.ggn import Curvature, RowKind
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.scaling import Evaluation


@dataclass(frozen=True)
class Step:
    """A step of the filter on a model.

    Attributes:
        log_posterior: the model, understood.
        layout: of the latents.
        curvature: which.
        drifts: whether any param walks at random between batches.
    """

    log_posterior: LogPosterior
    layout: Layout
    curvature: RowKind
    drifts: bool

    def __call__(
        self, state: EKFState, lr: Tensor, drift: Tensor, chunk: Chunk, seed: int = 0
    ) -> tuple[EKFState, Tensor]:
        """(The state after a batch, the batch's log likelihood at the mean before it).

        Args:
            state: before it.
            lr: the power of the likelihood.
            drift: variances of the params' walk before the batch, [D].
            chunk: the batch; one without rows brings the walk alone.
            seed: of the curvature's draws.
        """
        if self.drifts:
            state = predict(state, drift)
        if chunk.num_rows == 0:
            return state, state.mean.new_zeros(())
        params = self.layout.unflatten(state.mean)
        gradient, log_lik = self._gradient(params, chunk)
        curvature, total = self._curvature(seed), torch.zeros_like(state.precision)
        for block in curvature.blocks(params, chunk.arguments, chunk.indices, None, chunk.keep):
            block.add_to(total)
        return absorb(state, gradient, total, lr), log_lik

    def on_rows(
        self, state: EKFState, lr: Tensor, drift: Tensor, batch: Arguments
    ) -> tuple[EKFState, Tensor]:
        """The same on a batch of rows."""
        return self(state, lr, drift, Chunk(batch, None, slice(None), rows.count(batch) or 0))

    def check_is_traceable(self, state: EKFState, batch: Arguments) -> None:
        """Refuses what cannot be the same at every step of a compiled loop.

        Raises:
            RuntimeError: the state is not on a processor; its curvature is estimated from draws.
        """
        if state.mean.device.type != "cpu":
            raise RuntimeError(f"the model is on {state.mean.device}, and loops are for processors")
        for note in self._curvature(0).notes(self.layout.unflatten(state.mean), batch):
            raise RuntimeError(f"the curvature is estimated, of {note}")

    def _curvature(self, seed: int) -> Curvature:
        return Curvature(self.log_posterior, self.curvature, seed=seed)

    def _gradient(self, params: Params, chunk: Chunk) -> tuple[Tensor, Tensor]:
        def evaluate(params: Params) -> Evaluation:
            evaluation = self.log_posterior(params, chunk.arguments, chunk.indices)
            return evaluation._replace(log_joint=evaluation.log_lik[chunk.keep].sum())

        try:
            gradient, evaluation = derivatives.gradient(evaluate, params)
        except (RuntimeError, NotImplementedError):  # a model that functorch refuses
            gradient, evaluation = derivatives.plain_gradient(evaluate, params)
        return self.layout.flatten(gradient), evaluation.log_joint
