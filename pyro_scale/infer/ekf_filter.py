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
from pyro_scale.core.evaluation import Evaluation
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
from pyro_scale.posterior.collect import facts_of
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.results.gaussian import GaussianPosterior
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.single_step import check_rows

#: Largest number of means and sds that are kept, over all steps: 256 MiB of float64.
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
    """Settings of a filter's step, as tensors.

    Attributes:
        lr: power of the batch's likelihood, 0-d; 1 is Bayes' rule.
        drift: variances of the params' random walk before a batch, `[D]`, for D unconstrained
            params in all.
    """

    lr: Tensor
    drift: Tensor


class Filter:
    """An extended Kalman filter in progress: a Gaussian over the latents that absorbs one batch
    after another.

    Args:
        step: step of the filter, on the analyzed model.
        data: data with which the filter was made; the fit refers to them.
        start: Gaussian before the first batch.
        rates: likelihood power and random-walk variances of every step.
        seed: seed of the curvature's draws.
        facts: settings of the EKF, for `Fit.attrs`.
        other_target: why the Gaussian is not meant to be the model's posterior; empty if it is.

    Attributes:
        num_steps: number of batches that have been absorbed.
        programs: where the compiled loop is kept between runs, if steps are to be compiled; None to
            run every step eagerly.
        compile_seconds: seconds that compilation took; 0 without compilation.
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
        """Absorbs one batch, given as the model's own arguments; returns the batch's log
        likelihood, in nats, at the mean before the step.

        Raises:
            ModelError: the model subsamples by itself.
            NonFiniteError: the Gaussian became NaN or infinite.
        """
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
        """Absorbs all batches of the data in their order, each once; yields log likelihoods
        `[steps]` of the batches, in nats, after every few steps."""
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
        """Compiles the filter's steps, or takes the compiled loop of an earlier run, if possible;
        otherwise warns, and steps run eagerly.

        Args:
            programs: keeper of the compiled loop.
            batches: the first batches, as the model's arguments, whose rows are `[steps, B, ...]`.

        Warns:
            CompileWarning: the steps cannot be compiled.
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
        """Absorbs several batches of equal size, one after another; returns the log likelihood of
        each at the mean before its step, in nats, `[steps]`.

        Args:
            batches: the batches, as the model's arguments, whose rows are `[steps, B, ...]`.

        Raises:
            NonFiniteError: the Gaussian became NaN or infinite.
        """
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
        """Absorbs one batch by an eager step; returns the batch's log likelihood at the mean before
        the step, in nats, `[1]`.

        Raises:
            NonFiniteError: the Gaussian became NaN or infinite; the message says at which step.
        """
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
        """Log likelihood of each absorbed batch at the mean before its step, in nats, `[steps]`."""
        return torch.cat([torch.empty(0, dtype=torch.float64), *self._log_lik])

    @property
    def path(self) -> tuple[Tensor, Tensor] | None:
        """(Means, sds) of the Gaussian after each step, in unconstrained space, each `[steps, D]`,
        for D latent elements in all; None if they are too many to keep."""
        if self._path is None:
            return None
        mean, sd = torch.cat(self._path).chunk(2, dim=1)
        return mean, sd

    def fit(self, times: Mapping[str, float]) -> Fit:
        """The Gaussian after the latest step as a `Fit`, like those of other approximations, with
        the settings of the filter and the batches' log likelihoods.

        Args:
            times: seconds that parts of the run took, by name, for the fit's `attrs`.
        """
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
        """The Gaussian at the end of a run over all data, as a fit. It also becomes `posterior`,
        which then keeps the run's data; after single steps, `posterior` keeps only a batch.

        Args:
            times: seconds that parts of the run took, by name, for the fit's `attrs`.
        """
        fit = self.fit(times)
        self._posterior = GaussianPosterior(fit)
        return fit

    @property
    def posterior(self) -> GaussianPosterior:
        """The posterior after the latest step: a Gaussian in unconstrained space.

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
    """One step of the extended Kalman filter on a model: a function from the filter's state and a
    batch to the next state.

    Attributes:
        log_posterior: the analyzed model.
        layout: order and shapes of the latents in the state's vectors.
        curvature: kind of the likelihood's curvature: "ggn", "monte_carlo" or "empirical_fisher".
        drifts: True if the covariance grows between batches, as some param does a random walk.
    """

    log_posterior: LogPosterior
    layout: Layout
    curvature: RowKind
    drifts: bool

    def __call__(
        self, state: EKFState, rates: Rates, chunk: Chunk, seed: int = 0
    ) -> tuple[EKFState, Tensor]:
        """(The filter's state after a batch; the batch's log likelihood at the mean before the
        step, in nats, 0-d).

        Args:
            state: state of the filter before the batch.
            rates: likelihood power and random-walk variances.
            chunk: the batch; without rows, only the random walk is applied, and the log likelihood
                is 0.
            seed: seed of the curvature's draws.
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
        """(The filter's state after a batch; the batch's log likelihood at the mean before the
        step, in nats, 0-d), as calling the step returns them, but for a batch that is the model's
        arguments instead of a `Chunk`. This is the function that is compiled."""
        return self(state, rates, Chunk(batch, None, slice(None), rows.count(batch) or 0))

    def check_is_traceable(self, state: EKFState, batch: Arguments) -> None:
        """Raises if the steps cannot be compiled into a loop in which every step does the same.

        Args:
            state: state of the filter.
            batch: a batch, as the model's arguments.

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
        """(Gradient of the chunk's log likelihood with respect to the D latent elements, `[D]`; the
        log likelihood, in nats, 0-d), as sums over the chunk's rows."""

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
    """The filter's steps, compiled to a loop in C++, for batches of one shape.

    Attributes:
        example: a batch of that shape, as the model's arguments.
        facts: other facts that the compiled code depends on (layout, structure, curvature, random
            walk, number of threads), compared before the loop is used again.
        loop: the compiled loop. Its state consists of mean and sd together, `[1, 2 D]`, of which
            every step's is returned, and the elements of the precision, `[1, ...]`.
        constants: tensors that a step reads besides its arguments.
        recall: function that returns the constants again; None if one of them has changed.
    """

    example: Arguments
    facts: Hashable
    loop: Loop
    constants: Sequence[Tensor]
    recall: Callable[[], list[Tensor] | None]

    def __reduce__(self) -> Any:
        return type(None), ()  # None in copies, which compile their own

    def takes(self, batch: Arguments) -> bool:
        """Whether the tensors of a batch (the model's arguments) have the shapes and dtypes, and
        its other arguments the values, for which the loop was compiled; otherwise the step must run
        eagerly."""
        return rows.are_alike(self.example, batch)

    def run(
        self, state: EKFState, rates: Rates, batches: Arguments
    ) -> tuple[EKFState, Tensor, Tensor]:
        """(The filter's state after the batches; means and sds after each step, `[steps, 2 D]`; log
        likelihoods of the batches, in nats, `[steps]`).

        Args:
            state: state of the filter before the batches.
            rates: likelihood power and random-walk variances.
            batches: batches, as the model's arguments, whose rows are `[steps, B, ...]`.
        """
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
        """Whether the compiled loop computes the same as an eager step of the filter does, up to
        rounding; checked before the loop is used.

        Compares the two on the last batch, at another state than the one at which the loop was
        traced. A part of the model outside torch (NumPy, lists) is constant in the loop, which
        shows as a difference.

        Args:
            step: step of the filter, which runs eagerly.
            state: state of the filter before the first batch.
            rates: likelihood power and random-walk variances.
            batches: batches, as the model's arguments, whose rows are `[steps, B, ...]`.
            tolerance: largest difference, relative to the change that a step makes.
            roundings: largest difference, in units of the state's rounding.
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
    """Keeps the compiled loop of an `EKF`, so that its next run on batches of the same shape need
    not compile again."""

    program: Program | None = None

    def compile(self, step: Step, state: EKFState, rates: Rates, batches: Arguments) -> Program:
        """A compiled loop for these steps: the kept one if it still computes the same, otherwise a
        new one, which is then kept.

        Args:
            step: step of the filter that is compiled.
            state: state of the filter before the first batch.
            rates: likelihood power and random-walk variances.
            batches: the first batches, as the model's arguments, whose rows are `[steps, B, ...]`.

        Raises:
            RuntimeError: the loop does not compute the same as the step.
            Exception: whatever the model raises when it cannot be traced, or the compiler.
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
    """The filter's state as the tensors of the compiled loop: [mean and sd together, `[1, 2 D]`;
    elements of the precision, `[1, ...]`]."""
    return [torch.cat([state.mean, state.sd])[None], state.precision.reshape(1, -1)]


def _state(mean_and_sd: Tensor, precision: Tensor, shape: torch.Size) -> EKFState:
    """The filter's state from the tensors of the compiled loop; the inverse of `_leaves`.

    Args:
        mean_and_sd: means and sds in one row, `[1, 2 D]`.
        precision: elements of the precision in one row, `[1, ...]`.
        shape: shape of the precision: `[D]` if diagonal, `[D, D]` if dense.
    """
    mean, sd = mean_and_sd[0].chunk(2)
    return EKFState(mean, sd, precision.reshape(shape))
