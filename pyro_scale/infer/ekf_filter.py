"""The extended Kalman filter's loop over batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian
from pyro_scale.core.layout import Layout
from pyro_scale.data.sources import Data
from pyro_scale.errors import NonFiniteError
from pyro_scale.fullbatch.chunks import Chunk
from pyro_scale.kernels.ekf import EKFState, absorb, predict
from pyro_scale.model import derivatives
from pyro_scale.model.curvature.ggn import Curvature, RowKind
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.scaling import Evaluation
from pyro_scale.posterior.collect import facts_of
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.rng.seeds import Purpose, derived_seed

#: Numbers of the path that are kept: 256 MiB of float64.
PATH_NUMBERS = 2**25


class Settings(NamedTuple):
    """How a filter absorbs; see `EKF`."""

    structure: str
    curvature: RowKind
    lr: float
    transition_sd: float


class Filter:
    """A filter at work.

    Attributes:
        log_posterior: the model, understood.
        layout: of the latents.
        data: what it began with.
        log_lik: of each step.
        path: means and sds after each step; None once there are too many.
    """

    def __init__(
        self,
        method: Settings,
        log_posterior: LogPosterior,
        data: Data,
        layout: Layout,
        state: EKFState,
        seed: int,
    ):
        self.log_posterior, self.layout = log_posterior, layout
        self._method, self.data, self._state, self._seed = method, data, state, seed
        self.log_lik: list[float] = []
        self.path: list[tuple[Tensor, Tensor]] | None = []

    def absorb(self, chunk: Chunk) -> float:
        """The next batch; returns its log likelihood at the mean before it."""
        method = self._method
        state = predict(self._state, method.transition_sd)
        params = self.layout.unflatten(state.mean)
        gradient, log_lik = self._gradient(params, chunk)
        seed = derived_seed(self._seed, len(self.log_lik), Purpose.CURVATURE)
        curvature = Curvature(self.log_posterior, method.curvature, seed=seed)
        total = torch.zeros_like(state.precision)
        for block in curvature.blocks(params, chunk.arguments, chunk.indices, None, chunk.keep):
            block.add_to(total)
        try:
            state = absorb(state, gradient, total, method.lr)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            state = EKFState(state.mean * torch.nan, state.precision)
        if not bool(torch.isfinite(state.mean).all() & torch.isfinite(state.precision).all()):
            raise NonFiniteError(
                f"step {len(self.log_lik)}: the filter's state became NaN or infinite: clean the "
                "data (torch.isfinite finds bad rows), scale them, or give the sites tighter priors"
            )
        self._state = state
        self.log_lik.append(log_lik)
        self._remember()
        return log_lik

    def fit(self, attrs: dict[str, Any]) -> Fit:
        """What it knows now."""
        method, gaussian = self._method, self._gaussian()
        facts = {"method": "EKF", **method._asdict(), "num_steps": len(self.log_lik)}
        points = {name: p.unconstrained for name, p in self.log_posterior.points.items()}
        layout = Layout.of({**self.layout.unflatten(gaussian.mean), **points})
        center = layout.flatten({**self.layout.unflatten(gaussian.mean), **points})
        return Fit(
            log_posterior=self.log_posterior,
            data=self.data,
            layout=layout,
            centers=center[None],
            sites=self.layout.names,
            gaussians=(gaussian,),
            seed=self._seed,
            attrs={**facts, **attrs, **facts_of(self.log_posterior, self._seed)},
            trace=torch.tensor([self.log_lik], dtype=torch.float64),
        )

    def _gaussian(self) -> Gaussian:
        mean, precision = self._state
        if precision.dim() == 1:
            return Diagonal.of_precision(mean, precision)
        return Dense.of_precision(mean, precision)

    def _gradient(self, params: Params, chunk: Chunk) -> tuple[Tensor, float]:
        def evaluate(params: Params) -> Evaluation:
            evaluation = self.log_posterior(params, chunk.arguments, chunk.indices)
            return evaluation._replace(log_joint=evaluation.log_lik[chunk.keep].sum())

        try:
            gradient, evaluation = derivatives.gradient(evaluate, params)
        except (RuntimeError, NotImplementedError):  # a model that functorch refuses
            gradient, evaluation = derivatives.plain_gradient(evaluate, params)
        return self.layout.flatten(gradient), float(evaluation.log_joint)

    def _remember(self) -> None:
        if self.path is None:
            return
        if 2 * self.layout.size * (len(self.path) + 1) > PATH_NUMBERS:
            self.path = None
            return
        gaussian = self._gaussian()
        self.path.append((gaussian.mean, gaussian.variance.sqrt()))
