"""Approximations found by a stochastic optimizer: MAP and variational inference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import warn, without_vmap_warnings
from pyro_scale.data.open import open_data
from pyro_scale.data.sources import Data
from pyro_scale.diagnostics.check_fit import check_fit
from pyro_scale.diagnostics.divergence import NOT_A_DENSITY, beyond_its_domain, where
from pyro_scale.distributed.ranks import ALONE, Ranks
from pyro_scale.engine.compile_step import check_compile
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.loop import simulate
from pyro_scale.engine.plan import StepPlan
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import ArgumentError, ConvergenceWarning, NonFiniteError
from pyro_scale.infer.approximation import Approximation, Structure
from pyro_scale.infer.method import Chain, Finished
from pyro_scale.infer.sharded import begin_sharded, or_sharded
from pyro_scale.infer.stepwise import SteppedChain, Stepwise
from pyro_scale.kernels.optimizer import is_pure
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.collect import facts_of
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.results.gaussian import GaussianPosterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.blame import broken_sites
from pyro_scale.run.by_rank import check_same, check_same_call, gather, warn_of_reading
from pyro_scale.run.frozen_features import with_frozen_features
from pyro_scale.run.own_rows import on_own_rows
from pyro_scale.run.problem import (
    Problem,
    as_log_posterior,
    check_rows_can_be_shared,
    module_device,
)
from pyro_scale.run.resume import digest_of, identity_of
from pyro_scale.run.single_step import Stepping, batch_as_data
from pyro_scale.tuning.early_stopping import EarlyStopping, got_worse, still_rises
from pyro_scale.tuning.geometry import whitened_by

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: The least steps of a window in which the objective is averaged.
_WINDOW = 100


class Optimized(Stepwise, Approximation):
    """What MAP and VI share."""

    #: What the objective is called.
    objective: ClassVar[str] = "log joint"

    def __init__(
        self,
        model: Any,
        kernel: Any,
        *,
        structure: Structure,
        init_strategy: Any,
        num_data: int | None,
        compile: bool | Literal["auto"],
        early_stopping: bool,
    ):
        super().__init__(model, structure=structure, init_strategy=init_strategy, num_data=num_data)
        check_compile(compile)
        self.kernel = kernel
        self._compile, self._early_stopping = compile, early_stopping
        self._earlier = Earlier()

    @or_sharded
    def run(
        self,
        data: Any,
        *,
        num_steps: int | None = None,
        num_epochs: int | None = None,
        batch_size: int | None = None,
        num_chains: int = 1,
        seed: int | None = None,
        progress: bool = True,
        mesh: DeviceMesh | None = None,
        rows_by_rank: bool = False,
    ) -> Self:
        """Takes `num_steps` steps from each start, or as many as `num_epochs` epochs have.

        Args:
            data: as for samplers: a `DataLoader`, or the model's own arguments.
            num_steps: steps; one of this and `num_epochs` is needed.
            num_epochs: passes through the data.
            batch_size: rows a step, for tensors; all of them by default.
            num_chains: starts, each with its own minibatches.
            seed: the same seed gives the same fit; drawn from torch's generator by default.
            progress: whether to show a progress bar.
            mesh: torch's, of dimensions `("chain", "data")`, as for samplers: starts are shared out
                along the first, the rows of every batch along the second.  Every rank then has the
                fit from all starts.  Without it, every process of a group takes all steps.
            rows_by_rank: whether each rank's data are rows of its own, as for samplers; its fit is
                then not compared with the posterior.

        Returns:
            The method itself.

        Raises:
            ArgumentError, DataError: before the model is run.
            ModelError, SiteError, PlateError: before any step.
            NonFiniteError: a start's state became NaN or infinite.
            RankError: another process has failed or died, or has other data or arguments.

        Warns:
            UserWarning: the objective was still rising at the end.
        """
        ranks = ALONE if mesh is None else Ranks.of("all", mesh)
        asked = {
            "num_steps": num_steps,
            "num_epochs": num_epochs,
            "num_chains": num_chains,
            "seed": seed,
            "rows_by_rank": rows_by_rank,
        }
        with ranks.together():
            check_same_call(ranks, asked)
            device, shows = module_device(self.model), progress and ranks.is_first
            opened = open_data(data, batch_size, self._num_data, device)
            num_data = opened.num_data
            if rows_by_rank:
                count, digest = opened.num_data or 1, digest_of(opened.first())
                num_data = ranks.own_rows(count, self._num_data, digest)
            self._run(opened, num_data, num_steps, num_epochs, num_chains, seed, shows, ranks)
        return self

    def _run(
        self,
        opened: Data,
        num_data: int | None,
        num_steps: int | None,
        num_epochs: int | None,
        num_chains: int,
        seed: int | None,
        progress: bool,
        ranks: Ranks,
    ) -> None:
        """As `run`, on one process or on some."""
        num_chains = as_count("num_chains", num_chains)
        check_length(num_steps, num_epochs)
        ranks.check(num_chains)
        seed = ranks.of_first(choose_seed(seed), "the choice of a seed")
        self._forget()
        problem = self._prepare(opened, num_data, num_chains, seed)
        problem = dataclasses.replace(problem, ranks=ranks)
        check_rows_can_be_shared(problem)
        warn_of_reading(problem)
        if not ranks.is_alone:
            check_same(ranks, identity_of(problem, self._attrs(), self.kernel.hyperparameters()))
        problem = with_frozen_features(problem)
        steps = Steps(count_steps(problem, num_steps, num_epochs), positions=False)
        stopping = None
        if self._early_stopping:
            stopping = EarlyStopping(
                max(count_steps(problem, None, 1), _WINDOW), problem.engine.layout.size
            )

        def stop(draws: Draws) -> bool:
            return all(ranks.of_all(stopping is not None and stopping.reached(draws), "a window"))

        title = f"{type(self).__name__}, {num_chains} start{'s' * (num_chains > 1)}"
        chains = problem.chains
        batches = problem.batches(num_chains, "shuffle", chains=chains)
        engine, batches = on_own_rows(problem, batches)
        with Progress(steps.total, title, progress, self.objective) as bar, without_vmap_warnings():
            plan = StepPlan(
                engine,
                problem.positions[list(chains)],
                batches,
                self.kernel.columns(steps.total),
                steps,
                seed,
                self._compile if self._is_pure else False,
                self._earlier,
                numbers=chains,
                num_chains=num_chains,
                agree=None if ranks.rows is None else ranks.rows.agree,
            )
            draws = simulate(
                plan,
                bar,
                stop=stop if stopping else None,
                check_every=stopping.window if stopping else None,
            )
        if draws.error is not None:
            raise draws.error
        draws = gather(draws, problem)
        check_failures(problem, draws, "start")
        rows = problem.data.batch_size or problem.log_posterior.num_data
        taken = draws.num_steps * num_chains * rows
        fit = self._finish(self._make_fit(problem, draws), problem, taken)
        self._last = Finished(GaussianPosterior(fit))
        if not self._ends_exactly:
            self._warn_of_the_trace(fit)
        if problem.has_all_rows:
            check_fit(fit, 3 * taken)  # gradients are worth 3

    def begin(self, *args: Any, **kwargs: Any) -> Chain:
        """The optimizer at its start, for loops of your own; see `Stepwise.begin`."""
        if (chain := begin_sharded(self, args, kwargs)) is not None:
            return chain
        data = batch_as_data(self.model, self._num_data, args, kwargs)
        stepping = Stepping(self._prepare(data, self._num_data, 1, choose_seed(None)), self.kernel)
        return SteppedChain(
            stepping,
            lambda problem, draws, _, batch: check_failures(problem, draws, "start", batch),
            self._posterior_of_step,
        )

    @property
    def trace(self) -> Tensor:
        """The objective's estimate at every step, in nats, a total: `[starts, steps]`."""
        return self.posterior.trace

    @property
    def converged(self) -> bool:
        """Whether every start's fit is where it is to be; see `GaussianPosterior.converged`."""
        return self.posterior.converged

    # ------------------------------------------------------------------ inside

    #: Whether the optimizer only brings it near to what is found otherwise.
    _ends_exactly = False
    #: In whose coordinates the optimizer moves.
    _preconditioner: Gaussian | None = None

    def _target(self, log_posterior: LogPosterior) -> LogPosterior:
        return log_posterior

    def _check(self, problem: Problem) -> None:
        """Refuses what does not fit into memory."""

    def _finish(self, fit: Fit, problem: Problem, taken: int) -> Fit:
        """The fit after the final steps of a method, by default none.

        Args:
            fit: where the optimizer ended.
            problem: of the run.
            taken: gradients of single rows that the run took, the worth of final steps.
        """
        return fit

    @property
    def _is_pure(self) -> bool:
        return is_pure(self.kernel.optimizer) if hasattr(self.kernel, "optimizer") else True

    def _prepare(self, data: Data, num_data: int | None, num_chains: int, seed: int) -> Problem:
        log_posterior = self._target(as_log_posterior(self.model, num_data))
        starts = self._starts(num_chains, seed)
        problem = self._understand(log_posterior, data, self.kernel, starts, num_chains, seed)
        self._check(problem)
        if self._preconditioner is not None:
            problem = whitened_by(problem, self._preconditioner)
        if self._is_pure:
            return problem
        one_by_one = dataclasses.replace(problem.engine, vectorized=False)
        return dataclasses.replace(problem, engine=one_by_one)

    def _make_fit(self, problem: Problem, draws: Draws) -> Fit:
        log_posterior, state = problem.log_posterior, draws.state
        values = self.kernel.values(draws.num_steps - 1)
        own = {**self._attrs(), "objective": self.objective}
        attrs = {**own, **facts_of(log_posterior, problem.seed), **times_of(draws)}
        places, gaussians = slice(0, problem.engine.num_latents), []
        if "temperature" in values:
            attrs["temperature"] = float(values["temperature"])
            gaussians = [
                self._gaussian(of_start, places, values["temperature"] / log_posterior.num_data)
                for of_start in _by_start(state)
            ]
        return Fit(
            log_posterior=log_posterior,
            data=problem.data,
            layout=problem.engine.layout,
            centers=problem.engine.to_params(state.position.detach()),
            sites=log_posterior.latents,
            gaussians=tuple(gaussians),
            seed=problem.seed,
            attrs=attrs,
            trace=draws.log_joint[:, : draws.num_steps],  # of a single step, its own
        )

    def _gaussian(self, state: Any, places: slice, temperature: Tensor) -> Gaussian:
        """The Gaussian over latents of one start's last state, at a temperature over N."""
        raise NotImplementedError

    def _attrs(self) -> dict[str, Any]:
        hypers = {
            name: "schedule" if callable(value) else float(value)
            for name, value in self.kernel.hyperparameters().items()
        }
        return {"method": type(self).__name__, "structure": self.structure, **hypers}

    def _posterior_of_step(
        self, problem: Problem, draws: Draws, values: Mapping[str, Tensor], batch: Arguments
    ) -> GaussianPosterior:
        """The fit after a single step."""
        return GaussianPosterior(self._make_fit(problem, draws).replaced(data=None), batch)

    def _warn_of_the_trace(self, fit: Fit) -> None:
        trace, size = fit.trace, fit.layout.size
        assert trace is not None
        num_steps = trace.shape[1]
        measured = fit.attrs.get("at_optimum")
        if measured is not None and all(measured):
            return
        if bool(got_worse(trace, size).any()):
            message = (
                f"fell over the {num_steps} steps, so the fit is worse than its start: lower "
                "the learning rate"
            )
        elif bool(still_rises(trace, size).any()):
            message = (
                f"still rose over the last quarter of the {num_steps} steps: take more "
                "steps, or a larger learning rate at first"
            )
        elif measured is not None:
            mean, sd = (max(fit.attrs[name]) for name in ("mean_offset", "sd_offset"))
            warn(
                ConvergenceWarning,
                f"not converged after {num_steps} steps: where the {self.objective} is "
                f"largest, some mean is {mean:.2g} sds away and some sd {100 * sd:.2g}%: take more "
                "steps, or let the learning rate fall to 0",
            )
            return
        else:
            return
        warn(ConvergenceWarning, f"the {self.objective} {message}")


def check_length(num_steps: int | None, num_epochs: int | None) -> None:
    """Checks that one of two ways of saying how long a run is was taken.

    Raises:
        ArgumentError: both, or neither.
    """
    if (num_steps is None) == (num_epochs is None):
        raise ArgumentError("pass one of num_steps and num_epochs, such as num_steps=5000")


def count_steps(problem: Problem, num_steps: int | None, num_epochs: int | None) -> int:
    """How many steps a run takes.

    Raises:
        ArgumentError: no count.
    """
    if num_epochs is None:
        return as_count("num_steps", num_steps)
    epoch = -(-problem.log_posterior.num_data // (problem.data.batch_size or 2**62))
    return epoch * as_count("num_epochs", num_epochs)


def check_failures(
    problem: Problem, draws: Draws, mover: str, batch: Arguments | None = None
) -> None:
    """Checks that nothing broke.

    Args:
        problem: what the run started from.
        draws: of the run.
        mover: what its chains are called.
        batch: of the last step, where that is none of the problem's.

    Raises:
        NonFiniteError: the first that did, and why.
    """
    if draws.failures:
        first = draws.failures[0]
        sites = broken_sites(problem, draws, batch)
        what = "the state became NaN or infinite"
        if first.error is not None:
            what = f"the model raised {first.error}"
        if first.in_density:
            what = NOT_A_DENSITY
        advice = "lower the optimizer's lr, scale the data, or start nearer to the mode"
        if beyond_its_domain(sites) and not first.bad_batch:
            advice = f"{beyond_its_domain(sites)}, or start nearer to the mode"
        raise NonFiniteError(
            f"{what}: {mover} {first.chain} at step {first.step}{where(first, sites)}. "
            f"{advice[0].upper()}{advice[1:]} (init_strategy=)"
        )


def times_of(draws: Draws) -> dict[str, Any]:
    """What a run took, as `attrs` has it."""
    return {
        "num_steps": draws.num_steps,
        "sampling_time": draws.seconds,
        "compile_time": draws.compile_seconds,
        "program": draws.program,
    }


def _by_start(state: Any) -> list[Any]:
    """The states of single starts."""
    starts = range(len(state.position))
    return [pytree.tree_map(lambda leaf, i=i: leaf[i], state) for i in starts]
