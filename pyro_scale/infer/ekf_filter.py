"""The extended Kalman filter's loop over batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_scale.compile.compiled import section_on, why_not
from pyro_scale.core import rows
from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import warn
from pyro_scale.data.sources import Data, blocks_in_order
from pyro_scale.errors import CompileWarning, NonFiniteError
from pyro_scale.fullbatch.chunks import Chunk, split
from pyro_scale.infer.ekf_program import LastProgram
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
#: Steps of a block, after which a run shows its progress and can be interrupted; and bytes of its
#: batches.
_MOST_STEPS, _BLOCK_BYTES = 256, 2**25


class Settings(NamedTuple):
    """How a filter absorbs; see `EKF`."""

    structure: str
    curvature: RowKind
    lr: float
    transition_sd: float | Mapping[str, Any]


class Filter:
    """A filter at work.

    Attributes:
        log_posterior: the model, understood.
        layout: of the latents.
        data: what it began with.
        num_steps: how many batches it has absorbed.
        program: what runs its steps, in words.
        compile_seconds: how long it took to have that.
    """

    def __init__(
        self,
        settings: Settings,
        log_posterior: LogPosterior,
        data: Data,
        layout: Layout,
        state: EKFState,
        drift: Tensor,
        seed: int,
    ):
        self.log_posterior, self.layout, self.data = log_posterior, layout, data
        self.num_steps, self.program, self.compile_seconds = 0, "eager", 0.0
        self._settings, self._state, self._drift, self._seed = settings, state, drift, seed
        self._lr = state.mean.new_tensor(settings.lr)
        self._step = Step(log_posterior, layout, settings.curvature, bool(drift.any()))
        self._compiled: LastProgram | None = None
        self._log_lik: list[Tensor] = []
        self._path: list[Tensor] | None = []

    # ------------------------------------------------------------------ steps

    def takes_rows(self, batch: Arguments) -> bool:
        """Whether a batch is rows that the model takes as they are."""
        return self.log_posterior.model_info.own_plate is None and rows.count(batch) is not None

    def absorb_all(self, data: Data, last: LastProgram | None) -> Iterator[Tensor]:
        """Goes through the data, and gives the log likelihoods of some steps at a time; where steps
        are to be compiled, by the last run's program if that is the same."""
        first = data.first()
        if not self.takes_rows(first):
            for chunk in split(self.log_posterior, data.in_order(data.batch_size)):
                yield self.absorb_chunk(chunk)
            return
        each = sum(leaf.nbytes for leaf in (*rows.leaves(first), self._state.precision))
        most = 1 if last is None else max(1, min(_MOST_STEPS, _BLOCK_BYTES // each))
        for batches in blocks_in_order(data, data.batch_size, most):
            if last is not None and self.num_steps == 0:
                self.compile(batches, last)
            yield self.absorb(batches)

    def compile(self, batches: Arguments, last: LastProgram) -> None:
        """Has steps on batches like these, whose rows are `[steps, B, ...]`, run by a compiled
        loop from now on, by the last run's if that is the same.

        Warns:
            CompileWarning: they cannot be compiled.
        """
        begun = time.perf_counter()
        try:
            self._step.check_is_traceable(self._state, rows.take(batches, 0))
            facts = self.layout, self._settings.structure, self._step.curvature, self._step.drifts
            inputs = self._state, self._lr, self._drift, batches
            last.compile(self._step.on_rows, (facts, torch.get_num_threads()), *inputs)
            self._compiled, self.program = last, "compiled loop"
        except Exception as error:  # of the model, of make_fx, of Inductor, of the C++ compiler
            raise_if_from_handler(error)
            reason = why_not(error)
            warn(
                CompileWarning,
                f"the filter's steps could not be compiled ({reason}; torch {torch.__version__}), "
                "so every step runs the model's Python, which takes milliseconds; compile=False "
                "silences this",
                code=section_on(reason),
            )
        self.compile_seconds = time.perf_counter() - begun

    def absorb(self, batches: Arguments) -> Tensor:
        """Some batches, whose rows are `[steps, B, ...]`, one after another; returns their log
        likelihoods, each at the mean before it, `[steps]`."""
        program = None if self._compiled is None else self._compiled.like(rows.take(batches, 0))
        if program is not None:
            state, path, log_lik = program.run(self._state, self._lr, self._drift, batches)
            if _is_finite(state):
                self._remember(state, path, log_lik)
                return log_lik
        # of a state that is not finite, this finds the step
        steps, size = rows.leaves(batches)[0].shape[:2]
        parts = (rows.take(batches, place) for place in range(steps))
        return torch.cat([self.absorb_chunk(Chunk(p, None, slice(None), size)) for p in parts])

    def absorb_chunk(self, chunk: Chunk) -> Tensor:
        """One batch; returns its log likelihood at the mean before it, `[1]`."""
        seed = derived_seed(self._seed, self.num_steps, Purpose.CURVATURE)
        try:
            state, log_lik = self._step(self._state, self._lr, self._drift, chunk, seed)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            state = self._state._replace(mean=self._state.mean * torch.nan)
        if not _is_finite(state):
            raise NonFiniteError(
                f"step {self.num_steps}: the filter's state became NaN or infinite: "
                + (
                    rows.to_clean(chunk.arguments)
                    or "scale the data, which are finite there, or give the sites tighter priors"
                )
            )
        self._remember(state, torch.cat([state.mean, state.sd])[None], log_lik[None])
        return log_lik[None]

    def _remember(self, state: EKFState, path: Tensor, log_lik: Tensor) -> None:
        self._state, self.num_steps = state, self.num_steps + len(log_lik)
        self._log_lik.append(log_lik.double().cpu())
        if 2 * self.layout.size * self.num_steps > PATH_NUMBERS:
            self._path = None
        if self._path is not None:
            self._path.append(path)

    # ------------------------------------------------------------------ what it knows

    @property
    def log_lik(self) -> Tensor:
        """Each step's log likelihood, `[steps]`."""
        return torch.cat([torch.empty(0, dtype=torch.float64), *self._log_lik])

    @property
    def path(self) -> tuple[Tensor, Tensor] | None:
        """Means and sds after each step, `[steps, D]`; None once there are too many."""
        if self._path is None:
            return None
        mean, sd = torch.cat(self._path).chunk(2, dim=1)
        return mean, sd

    def fit(self, attrs: dict[str, Any]) -> Fit:
        """What it knows now."""
        gaussian = self._state.gaussian
        facts = {
            "method": "EKF",
            "objective": "log_lik",
            **self._settings._asdict(),
            "num_steps": self.num_steps,
        }
        points = {name: p.unconstrained for name, p in self.log_posterior.points.items()}
        layout = Layout.from_tensors({**self.layout.unflatten(gaussian.mean), **points})
        center = layout.flatten({**self.layout.unflatten(gaussian.mean), **points})
        return Fit(
            log_posterior=self.log_posterior,
            data=self.data,
            layout=layout,
            centers=center[None],
            sites=self.layout.names,
            gaussians=(gaussian,),
            seed=self._seed,
            attrs={
                **facts,
                "program": self.program,
                **attrs,
                **facts_of(self.log_posterior, self._seed),
            },
            trace=self.log_lik[None],
        )


def _is_finite(state: EKFState) -> bool:
    return bool(torch.isfinite(state.mean).all() & torch.isfinite(state.precision).all())


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
