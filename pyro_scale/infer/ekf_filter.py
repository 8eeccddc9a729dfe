"""The extended Kalman filter's steps on a model, and these steps as a compiled loop."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.compile.compiled import compile_loop, section_on, why_not
from pyro_scale.compile.cpp_loop import Inputs, Loop
from pyro_scale.compile.trace import trace
from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive, raise_if_from_handler
from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments, Fixed
from pyro_scale.core.warn import warn
from pyro_scale.curvature.chunks import Chunk, split
from pyro_scale.curvature.ggn import Curvature, RowKind
from pyro_scale.data.sources import Data, blocks_in_order
from pyro_scale.engine.executors import IS_FROZEN, is_close
from pyro_scale.engine.reuse import recall
from pyro_scale.errors import CompileWarning, ModelError, NonFiniteError, NotRunError
from pyro_scale.kernels.ekf import EKFState, absorb, predict
from pyro_scale.model import derivatives
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.scaling import Evaluation
from pyro_scale.posterior.collect import facts_of
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.results.gaussian import GaussianPosterior
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.single_step import check_rows

#: Most numbers of the path that are kept: 256 MiB of float64.
PATH_NUMBERS = 2**25
#: The most steps of a block, and bytes of its batches.  After a block, the progress bar moves and
#: the run can be interrupted.
_MOST_STEPS, _BLOCK_BYTES = 256, 2**25
#: Distance, in sds, from the first state to the state at which the loop is compared with a step.
_ELSEWHERE = 0.1
#: The largest difference of a new loop from a step: relative to the step, and in roundings of the
#: state.
_TOLERANCE, _ROUNDINGS = 1e-3, 1e3
#: The largest difference of an earlier run's loop from a step, in roundings.
_OF_THE_SAME = 32


class Rates(NamedTuple):
    """How much a batch counts, and how far the params walk before it.

    Attributes:
        lr: power of the likelihood, 0-d.
        drift: variances of the params' walk, [D].
    """

    lr: Tensor
    drift: Tensor


class Filter:
    """A filter that absorbs one batch after another.

    Args:
        step: of the filter, on the analyzed model.
        data: the data that the filter began with.
        start: the Gaussian before the first batch.
        rates: of every step.
        seed: of the curvature's draws.
        facts: the settings, for `Fit.attrs`.
        other_target: why the Gaussian is not meant to be the model's posterior; empty if it is.

    Attributes:
        num_steps: how many batches have been absorbed.
        programs: keeps the compiled loop, where steps are to be compiled; None where not.
        compile_seconds: how long compilation took.
    """

    def __init__(
        self,
        step: Step,
        data: Data,
        start: Gaussian,
        rates: Rates,
        seed: int,
        facts: Mapping[str, Any],
        other_target: str,
    ):
        self.log_posterior, self.layout, self.data = step.log_posterior, step.layout, data
        self.num_steps, self.compile_seconds = 0, 0.0
        self.programs: LastProgram | None = None
        self._step, self._state = step, EKFState.from_gaussian(start)
        self._rates, self._seed = rates, seed
        self._facts, self._other_target = facts, other_target
        self._program: Program | None = None
        self._log_lik: list[Tensor] = []
        self._path: list[Tensor] | None = []
        self._posterior: GaussianPosterior | None = None

    # ------------------------------------------------------------------ steps

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Absorbs one batch; returns its log likelihood at the mean before it, in nats."""
        if self.log_posterior.model_info.own_plate is not None:
            raise ModelError(
                "the model subsamples by itself, so that a step does not say which rows are new: "
                "pass batches to a model of batches"
            )
        arguments = self.log_posterior.bind(args, kwargs)
        check_rows(arguments)
        if rows.count(arguments) is not None:
            return float(self._absorb(rows.map_rows(lambda leaf: leaf[None], arguments)))
        (chunk,) = split(self.log_posterior, [arguments])
        return float(self._absorb_chunk(chunk))

    def absorb_all(self, data: Data) -> Iterator[Tensor]:
        """Absorbs all batches of the data in their order; yields the log likelihoods of a few steps
        at a time, `[steps]`."""
        first = data.first()
        if self.log_posterior.model_info.own_plate is not None or rows.count(first) is None:
            for chunk in split(self.log_posterior, data.in_order(data.batch_size)):
                yield self._absorb_chunk(chunk)
            return
        most = 1
        if self.programs is not None:
            nbytes = sum(leaf.nbytes for leaf in (*rows.leaves(first), self._state.precision))
            most = max(1, min(_MOST_STEPS, _BLOCK_BYTES // nbytes))
        for batches in blocks_in_order(data, data.batch_size, most):
            yield self._absorb(batches)

    def _compile(self, programs: LastProgram, batches: Arguments) -> None:
        """Compiles the steps on batches like these, whose rows are `[steps, B, ...]`.

        Warns:
            CompileWarning: they cannot be compiled.
        """
        begun = time.perf_counter()
        try:
            self._step.check_is_traceable(self._state, rows.take(batches, 0))
            self._program = programs.compile(self._step, self._state, self._rates, batches)
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

    def _absorb(self, batches: Arguments) -> Tensor:
        """Absorbs batches, whose rows are `[steps, B, ...]`, one after another; returns their log
        likelihoods, each at the mean before it, `[steps]`."""
        if self.num_steps == 0 and self.programs is not None:
            self._compile(self.programs, batches)
        if self._program is not None and self._program.takes(rows.take(batches, 0)):
            state, path, log_lik = self._program.run(self._state, self._rates, batches)
            if _is_finite(state):
                self._remember(state, path, log_lik)
                return log_lik
        # if the state is not finite, single steps find where that began
        steps, size = rows.leaves(batches)[0].shape[:2]
        parts = (rows.take(batches, place) for place in range(steps))
        return torch.cat([self._absorb_chunk(Chunk(p, None, slice(None), size)) for p in parts])

    def _absorb_chunk(self, chunk: Chunk) -> Tensor:
        """Absorbs one batch; returns its log likelihood at the mean before it, `[1]`."""
        seed = derived_seed(self._seed, self.num_steps, Purpose.CURVATURE)
        try:
            state, log_lik = self._step(self._state, self._rates, chunk, seed)
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
        self._posterior = None
        self._log_lik.append(log_lik.double().cpu())
        if 2 * self.layout.size * self.num_steps > PATH_NUMBERS:
            self._path = None
        if self._path is not None:
            self._path.append(path)

    # ------------------------------------------------------------------ results

    @property
    def log_lik(self) -> Tensor:
        """Log likelihood of each batch at the mean before it, in nats, `[steps]`."""
        return torch.cat([torch.empty(0, dtype=torch.float64), *self._log_lik])

    @property
    def path(self) -> tuple[Tensor, Tensor] | None:
        """Means and sds after each step, `[steps, D]`; None if there are too many to keep."""
        if self._path is None:
            return None
        mean, sd = torch.cat(self._path).chunk(2, dim=1)
        return mean, sd

    def fit(self, times: Mapping[str, float]) -> Fit:
        """The Gaussian after the latest step, with what the run took in its `attrs`."""
        gaussian = self._state.gaussian
        points = {name: p.unconstrained for name, p in self.log_posterior.points.items()}
        params = {**self.layout.unflatten(gaussian.mean), **points}
        layout, is_compiled = Layout.from_tensors(params), self._program is not None
        return Fit(
            log_posterior=self.log_posterior,
            data=self.data,
            layout=layout,
            centers=layout.flatten(params)[None],
            sites=self.layout.names,
            gaussians=(gaussian,),
            seed=self._seed,
            attrs={
                "method": "EKF",
                "objective": "log_lik",
                **self._facts,
                "num_steps": self.num_steps,
                "program": "compiled loop" if is_compiled else "eager",
                **times,
                **facts_of(self.log_posterior, self._seed),
            },
            trace=self.log_lik[None],
            other_target=self._other_target,
        )

    def finish(self, times: Mapping[str, float]) -> Fit:
        """The fit of a whole run, which `posterior` holds, with the data, until the next step."""
        fit = self.fit(times)
        self._posterior = GaussianPosterior(fit)
        return fit

    @property
    def posterior(self) -> GaussianPosterior:
        """The Gaussian after the latest step.

        Raises:
            NotRunError: no batch has been absorbed.
        """
        if self._posterior is None:
            if not self.num_steps:
                raise NotRunError("the filter has absorbed nothing yet: call step(*batch) first")
            fit = self.fit({}).replaced(data=None)
            self._posterior = GaussianPosterior(fit, self.data.first())
        return self._posterior


def _is_finite(state: EKFState) -> bool:
    return bool(torch.isfinite(state.mean).all() & torch.isfinite(state.precision).all())


@dataclass(frozen=True)
class Step:
    """A step of the filter on a model.

    Attributes:
        log_posterior: the analyzed model.
        layout: of the latents.
        curvature: which curvature of the likelihood is absorbed.
        drifts: whether any param walks at random between batches.
    """

    log_posterior: LogPosterior
    layout: Layout
    curvature: RowKind
    drifts: bool

    def __call__(
        self, state: EKFState, rates: Rates, chunk: Chunk, seed: int = 0
    ) -> tuple[EKFState, Tensor]:
        """(The state after a batch, the batch's log likelihood at the mean before it).

        Args:
            state: before the batch.
            rates: of the step.
            chunk: the batch; without rows, the params only walk.
            seed: of the curvature's draws.
        """
        if self.drifts:
            state = predict(state, rates.drift)
        if chunk.num_rows == 0:
            return state, state.mean.new_zeros(())
        params = self.layout.unflatten(state.mean)
        gradient, log_lik = self._gradient(params, chunk)
        curvature, total = self._curvature(seed), torch.zeros_like(state.precision)
        run = curvature.observe(params, chunk.arguments, chunk.indices, keep=chunk.keep)
        for block in run.blocks():
            block.add_to(total)
        return absorb(state, gradient, total, rates.lr), log_lik

    def on_rows(self, state: EKFState, rates: Rates, batch: Arguments) -> tuple[EKFState, Tensor]:
        """The same step, on a batch that is given as the model's arguments."""
        return self(state, rates, Chunk(batch, None, slice(None), rows.count(batch) or 0))

    def check_is_traceable(self, state: EKFState, batch: Arguments) -> None:
        """Checks that every step of a compiled loop can be the same program.

        Raises:
            RuntimeError: the state is not on a CPU, or the curvature is estimated from draws.
        """
        if state.mean.device.type != "cpu":
            raise RuntimeError(f"the model is on {state.mean.device}, and loops are for processors")
        for note in self._curvature(0).notes(self.layout.unflatten(state.mean), batch):
            raise RuntimeError(f"the curvature is estimated, of {note}")

    def _curvature(self, seed: int) -> Curvature:
        return Curvature(self.log_posterior, self.curvature, seed=seed)

    def _gradient(self, params: Params, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """(Gradient of the chunk's log likelihood, [D]; the log likelihood)."""

        def evaluate(params: Params) -> Evaluation:
            evaluation = self.log_posterior(params, chunk.arguments, chunk.indices)
            return evaluation._replace(log_joint=evaluation.log_lik[chunk.keep].sum())

        try:
            gradient, evaluation = derivatives.gradient(evaluate, params)
        except (RuntimeError, NotImplementedError):  # a model that functorch does not take
            gradient, evaluation = derivatives.plain_gradient(evaluate, params)
        return self.layout.flatten(gradient), evaluation.log_joint


# ---------------------------------------------------------------------- the compiled loop


@dataclass(frozen=True)
class Program:
    """Steps in C++, on batches of one shape.

    Attributes:
        example: a batch of that shape.
        facts: other values that the steps depend on.
        loop: over steps whose state is (mean and sd `[1, 2 D]`, which are kept; the precision's
            elements, `[1, ...]`).
        constants: what a step reads besides its arguments.
        recall: returns the constants again, or None if they have changed.
    """

    example: Arguments
    facts: Hashable
    loop: Loop
    constants: Sequence[Tensor]
    recall: Callable[[], list[Tensor] | None]

    def __reduce__(self) -> Any:
        return type(None), ()  # None in copies, which compile their own

    def takes(self, batch: Arguments) -> bool:
        """Whether the batch has the example's shapes."""
        return rows.are_alike(self.example, batch)

    def run(
        self, state: EKFState, rates: Rates, batches: Arguments
    ) -> tuple[EKFState, Tensor, Tensor]:
        """(The state after the batches, whose rows are `[steps, B, ...]`; means and sds after each
        of them, `[steps, 2 D]`; their log likelihoods, `[steps]`)."""
        moved, path, log_lik, _ = self.loop.run(
            [leaf[None] for leaf in _leaves(state)],
            [leaf[None] for leaf in rows.leaves(batches)],
            [Fixed(rates.lr), Fixed(rates.drift)],
            self.constants,
            left=1,
            every=1,
            threads=1,
        )
        (mean_and_sd,), (precision,) = moved
        after = _state(mean_and_sd, precision, state.precision.shape)
        return after, path[0, :, 0], log_lik[0, :, 0]

    def agrees_with(
        self,
        step: Step,
        state: EKFState,
        rates: Rates,
        batches: Arguments,
        tolerance: float,
        roundings: float,
    ) -> bool:
        """Whether the program takes the step, at another state than it was traced at, and usually
        on another batch: what leaves torch in the model (NumPy, lists) is not traced but frozen.

        Args:
            step, state, rates, batches: as for `LastProgram.compile`.
            tolerance: largest difference, relative to the step.
            roundings: largest difference, in roundings of the state.
        """
        signs = torch.linspace(-1, 1, len(state.mean)).to(state.mean)
        state = state._replace(mean=state.mean + _ELSEWHERE * signs * state.sd)
        last = rows.take(batches, slice(-1, None))
        moved, _, log_lik = self.run(state, rates, last)
        expected, expected_log_lik = step.on_rows(state, rates, rows.take(last, 0))
        compared = [(log_lik[0], expected_log_lik, expected_log_lik)]
        compared += [(a - b, e - b, b) for a, e, b in zip(moved, expected, state, strict=True)]
        return all(
            is_close(actual, target, tolerance, roundings * float(size.abs().max()))
            for actual, target, size in compared
        )


class LastProgram:
    """Keeps the latest program of an `EKF`, for its next run on batches of the same shape."""

    program: Program | None = None

    def compile(self, step: Step, state: EKFState, rates: Rates, batches: Arguments) -> Program:
        """The program of steps from this state on: the latest one if it takes them, else a new one.

        Args:
            step: what is compiled.
            state, rates: as at the first step.
            batches: the first ones, whose rows are `[steps, B, ...]`.

        Raises:
            RuntimeError: the program computes something else than the step.
            Exception: whatever the model raises when it cannot be traced, and the compiler.
        """
        example, structure = rows.take(batches, 0), state.precision.dim()
        facts = step.layout, structure, step.curvature, step.drifts, torch.get_num_threads()
        last, self.program = self.program, None
        is_same = last is not None and last.takes(example) and last.facts == facts
        if last is not None and is_same and (constants := last.recall()) is not None:
            again = dataclasses.replace(last, constants=constants)
            tolerance = _OF_THE_SAME * torch.finfo(state.mean.dtype).eps
            with contextlib.suppress(RuntimeError):  # a matrix that cannot be factorized there
                if again.agrees_with(step, state, rates, batches, tolerance, _OF_THE_SAME):
                    self.program = again
                    return again
        program = _compile(step, facts, state, rates, example)
        if not program.agrees_with(step, state, rates, batches, _TOLERANCE, _ROUNDINGS):
            raise RuntimeError(IS_FROZEN)
        self.program = program
        return program


def _compile(
    step: Step, facts: Hashable, state: EKFState, rates: Rates, batch: Arguments
) -> Program:
    leaves, structure = pytree.tree_flatten(batch)
    places = [place for place, leaf in enumerate(leaves) if rows.is_rows(leaf)]

    def flat_step(mean_and_sd: Tensor, precision: Tensor, *others: Tensor) -> list[Tensor]:
        *row_leaves, lr, drift = others
        filled = list(leaves)
        for place, leaf in zip(places, row_leaves, strict=True):
            filled[place] = leaf
        before = _state(mean_and_sd, precision, state.precision.shape)
        after, log_lik = step.on_rows(
            before, Rates(lr, drift), pytree.tree_unflatten(filled, structure)
        )
        return [*_leaves(after), log_lik[None]]

    inputs = [*_leaves(state), *rows.leaves(batch), *rates]
    examples = [x.detach().clone(memory_format=torch.contiguous_format) for x in inputs]
    kinds = ("state", "state", *("per step" for _ in places), "fixed", "fixed")
    with exclusive:
        graph = trace(flat_step, examples)
        loop = compile_loop(graph, Inputs(kinds, position=0), threads=None)
    constants = [constant.tensor for constant in graph.constants]
    return Program(batch, facts, loop, constants, recall(graph.constants))


def _leaves(state: EKFState) -> list[Tensor]:
    """The state's tensors as the loop takes them."""
    return [torch.cat([state.mean, state.sd])[None], state.precision.reshape(1, -1)]


def _state(mean_and_sd: Tensor, precision: Tensor, shape: torch.Size) -> EKFState:
    """The state of the loop's tensors."""
    mean, sd = mean_and_sd[0].chunk(2)
    return EKFState(mean, sd, precision.reshape(shape))
