"""Approximations found by a stochastic optimizer: MAP and variational inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypedDict

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.rows import Arguments, DataLike, Model
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import warn, without_vmap_warnings
from pyro_scale.data.batches import Batches
from pyro_scale.data.sources import Data
from pyro_scale.diagnostics.approximation import check_fit
from pyro_scale.diagnostics.divergence import NOT_A_DENSITY, beyond_its_domain, where
from pyro_scale.distributed.workers import ALONE, Workers
from pyro_scale.engine.compile_step import check_compile
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.loop import simulate
from pyro_scale.engine.plan import StepPlan
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import ArgumentError, ConvergenceWarning, NonFiniteError
from pyro_scale.infer.approximation import Approximation, Structure
from pyro_scale.infer.method import Chain, Finished, InitStrategy, SteppedChain, Stepwise
from pyro_scale.infer.sharded import begin_sharded, or_sharded
from pyro_scale.kernels.optimizer import is_pure
from pyro_scale.posterior.collect import facts_of
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.results.gaussian import GaussianPosterior
from pyro_scale.results.posterior import Posterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.blame import broken_sites
from pyro_scale.run.by_rank import Sharing, check_same, check_same_call, gather
from pyro_scale.run.frozen_features import with_frozen_features
from pyro_scale.run.problem import Problem
from pyro_scale.run.resume import identity_of
from pyro_scale.tuning.early_stopping import EarlyStopping, got_worse, still_rises
from pyro_scale.tuning.geometry import whitened_by

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: The fewest steps of a window of early stopping.
_WINDOW = 100


class Options(TypedDict, total=False):
    """The keyword arguments that `MAP`, `VI` and `IVON` have in common, for type checkers;
    `Optimized` says what they are."""

    init_strategy: InitStrategy
    num_data: int | None
    compile: bool | Literal["auto"]


class Stochastic(Stepwise):
    """Base class of methods whose chains (starts or particles) are moved by a stochastic optimizer:
    `MAP`, `VI`, `IVON` and `SVGD`."""

    #: Name of the objective, in reports and warnings.
    objective: ClassVar[str] = "log joint"
    #: Name of a chain, in titles and errors.
    mover: ClassVar[str] = "start"

    def _set_kernel(self, kernel: Any, compile: bool | Literal["auto"]) -> None:
        check_compile(compile)
        self.kernel, self._compile, self._earlier = kernel, compile, Earlier()

    @property
    def _is_pure(self) -> bool:
        """Whether the optimizer is a pure function of tensors, so that its steps can be compiled
        and vmapped over starts. Optimizers of torch.optim, and those that branch on numbers of
        their state, are not."""
        return is_pure(self.kernel.optimizer)

    def _simulate(
        self,
        problem: Problem,
        batches: Batches,
        steps: Steps,
        progress: bool,
        stopping: EarlyStopping | None = None,
    ) -> Draws:
        """Takes the optimizer's steps from the starts of this process until the end or early
        stopping.

        Args:
            problem: the analyzed model with the starts.
            batches: minibatches of the steps.
            steps: number of steps.
            progress: whether to show a progress bar.
            stopping: rule of early stopping; None for none.

        Returns:
            The last states of all starts, also those of other processes, and the objective at every
            step.

        Raises:
            NonFiniteError: a chain's state became NaN or infinite.
        """
        num_chains = len(problem.positions)

        def stop(draws: Draws) -> bool:
            return problem.agree(stopping is not None and stopping.reached(draws), "a window")

        title = f"{type(self).__name__}, {num_chains} {self.mover}{'s' * (num_chains > 1)}"
        engine, batches = problem.limit_to_part(batches)
        with Progress(steps.total, title, progress, self.objective) as bar, without_vmap_warnings():
            plan = StepPlan(
                engine,
                problem.positions[list(problem.chains)],
                batches,
                self.kernel.columns(steps.total),
                steps,
                problem.seed,
                self._compile if self._is_pure else False,
                self._earlier,
                numbers=problem.chains,
                num_chains=num_chains,
                agree=problem.agree_in_steps,
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
        self._check_draws(problem, draws)
        return draws

    def _begin(self, problem: Problem) -> SteppedChain:
        """The chain that `begin` returns: the optimizer at the problem's starts, whose `step` the
        caller calls for each batch."""

        def check(problem: Problem, draws: Draws, _: Any, batch: Arguments) -> None:
            self._check_draws(problem, draws, batch)

        return SteppedChain(problem, self.kernel, check, self._posterior_of_step)

    def _posterior_of_step(
        self, problem: Problem, draws: Draws, values: Mapping[str, Tensor], batch: Arguments
    ) -> Posterior:
        """The posterior of the states at which the user's call of `step` arrived; subclasses say
        what it is made of.

        Args:
            problem: the analyzed model.
            draws: states after the step.
            values: hyperparameters of the step, by name.
            batch: the first batch that the user passed to `step`, on which the posterior runs the
                model where it needs data.
        """
        raise NotImplementedError

    def _check_draws(self, problem: Problem, draws: Draws, batch: Arguments | None = None) -> None:
        """Raises if the state of any chain became NaN or infinite, or the model failed.

        Args:
            problem: the analyzed model of the run.
            draws: states of the run, with the failures.
            batch: batch of a single step, as the model's arguments; None if the batches are the
                run's.

        Raises:
            NonFiniteError: the message says where and why the first broken chain failed.
        """
        if not draws.failures:
            return
        first, sites = draws.failures[0], broken_sites(problem, draws, batch)
        what = "the state became NaN or infinite"
        if first.error is not None:
            what = f"the model raised {first.error}"
        if first.in_density:
            what = NOT_A_DENSITY
        advice = "lower the optimizer's lr, scale the data, or start nearer to the mode"
        if beyond_its_domain(sites) and not first.bad_batch:
            advice = f"{beyond_its_domain(sites)}, or start nearer to the mode"
        raise NonFiniteError(
            f"{what}: {self.mover} {first.chain} at step {first.step}{where(first, sites)}. "
            f"{advice[0].upper()}{advice[1:]} (init_strategy=)"
        )


class Optimized(Stochastic, Approximation):
    """Base class of approximations that a stochastic optimizer finds: `MAP`, `VI` and `IVON`.

    Args:
        init_strategy: where params, or means, start: one of Pyro's strategies, a dict of
            constrained tensors `[num_chains, ...]`, or another fit.
        num_data: number of rows in all, N; None takes it from the data.
        compile: whether steps are compiled, as for samplers.
    """

    #: Whether the run ends with exact steps, so that the optimizer need only come near.
    _ends_exactly = False
    #: Gaussian in whose coordinates the optimizer moves; None for the params themselves.
    _preconditioner: Gaussian | None = None

    def __init__(
        self,
        model: Model,
        kernel: Any,
        *,
        structure: Structure,
        early_stopping: bool = False,
        init_strategy: InitStrategy = None,
        num_data: int | None = None,
        compile: bool | Literal["auto"] = "auto",
    ):
        super().__init__(model, structure=structure, init_strategy=init_strategy, num_data=num_data)
        self._set_kernel(kernel, compile)
        self._early_stopping = early_stopping

    @or_sharded
    def run(
        self,
        data: DataLike,
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
            data: a `DataLoader`, or the model's own arguments, as for samplers.
            num_steps: steps from each start; pass this or `num_epochs`.
            num_epochs: passes through the data.
            batch_size: rows a step, for tensors; all of them by default.
            num_chains: number of starts, each with its own minibatches.
            seed: the same seed gives the same fit; drawn from torch's generator by default.
            progress: whether to show a progress bar.
            mesh: torch's `DeviceMesh` of dimensions `("chain", "data")`, as for samplers: starts
                are shared along the first, the rows of every batch along the second.  Every rank
                then has the fit from all starts.  Without it, every process of a group takes all
                steps.
            rows_by_rank: whether every rank is called with its own rows, as for samplers; the fit
                is then not compared with the posterior.

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
        workers = ALONE if mesh is None else Workers.from_group("all", mesh)
        call = {
            "num_steps": num_steps,
            "num_epochs": num_epochs,
            "num_chains": num_chains,
            "seed": seed,
            "rows_by_rank": rows_by_rank,
        }
        with workers.together():
            check_same_call(workers, call)
            opened, sharing = self._open(data, batch_size), Sharing(workers, rows_by_rank)
            num_data = sharing.num_rows(opened, self._num_data)
            num_chains = as_count("num_chains", num_chains)
            check_length(num_steps, num_epochs)
            workers.check(num_chains)
            seed = workers.broadcast(choose_seed(seed), "the choice of a seed")
            self._forget()
            problem = self._prepare(opened, num_data, num_chains, seed)
            problem = self._shared_out(problem, sharing)
            steps = Steps(count_steps(problem, num_steps, num_epochs), positions=False)
            batches = problem.batches(num_chains, "shuffle", chains=problem.chains)
            stopping, shows = self._stopping(problem), progress and workers.is_first
            draws = self._simulate(problem, batches, steps, shows, stopping)
            rows = problem.data.batch_size or problem.log_posterior.num_data
            num_gradients = draws.num_steps * num_chains * rows
            fit = self._finish(self._make_fit(problem, draws), problem, num_gradients)
            self._last = Finished(GaussianPosterior(fit))
            if not self._ends_exactly:
                self._warn_of_trace(fit)
            if problem.has_all_rows:
                check_fit(fit, 3 * num_gradients)  # a gradient costs 3 evaluations
        return self

    def begin(self, *args: Any, **kwargs: Any) -> Chain:
        """The optimizer at its start, for your own loops: `step(*batch)` takes a step, `posterior`
        is the fit so far; see `Stepwise.begin`."""
        if (chain := begin_sharded(self, args, kwargs)) is not None:
            return chain
        data = self._open_batch(args, kwargs)
        return self._begin(self._prepare(data, self._num_data, 1, choose_seed(None)))

    @property
    def trace(self) -> Tensor:
        """The objective's estimate at every step, in nats, as a total over all rows: `[starts,
        steps]`."""
        return self.posterior.trace

    @property
    def converged(self) -> bool:
        """Whether every start of the last run has converged, as a bool; see
        `GaussianPosterior.converged` for the criterion."""
        return self.posterior.converged

    # ------------------------------------------------------------------ inside

    def _check(self, problem: Problem) -> None:
        """Raises if the method's matrices do not fit into memory, before the first step; does
        nothing here, for subclasses with matrices to implement."""

    def _finish(self, fit: Fit, problem: Problem, num_gradients: int) -> Fit:
        """The fit after the final steps of a method, which use all rows; by default there are none,
        and the fit is unchanged.

        Args:
            fit: the fit where the optimizer ended.
            problem: the analyzed model of the run.
            num_gradients: number of gradients of single rows that the run took; final steps may
                take as many.
        """
        return fit

    def _prepare(self, data: Data, num_data: int | None, num_chains: int, seed: int) -> Problem:
        """The analyzed model on the data, with starts, in the coordinates of `precondition`.

        Args:
            data: data of the run.
            num_data: number of rows in all, N; None if the model's plate says it.
            num_chains: number of starts.
            seed: seed of the run.
        """
        problem = self._analyze(data, num_data, self.kernel, num_chains, seed)
        self._check(problem)
        if self._preconditioner is not None:
            problem = whitened_by(problem, self._preconditioner)
        return problem if self._is_pure else problem.with_engine(vectorized=False)

    def _stopping(self, problem: Problem) -> EarlyStopping | None:
        """The rule that ends a run early, which compares windows of at least an epoch of steps;
        None if the user did not pass `early_stopping=True`."""
        if not self._early_stopping:
            return None
        window = max(count_steps(problem, None, 1), _WINDOW)
        return EarlyStopping(window, problem.engine.layout.size)

    def _shared_out(self, problem: Problem, sharing: Sharing) -> Problem:
        """The problem of this process, which takes part of the rows or chains if there are several
        processes. If a part of the model is frozen, features computed by that part replace the
        rows. Raises unless all processes have the same model, data and arguments."""
        problem = sharing.share_out(problem)
        if not problem.is_alone:
            hyperparameters = self.kernel.hyperparameters()
            check_same(problem, identity_of(problem, self._attrs(), hyperparameters))
        return with_frozen_features(problem)

    def _make_fit(self, problem: Problem, draws: Draws) -> Fit:
        """The fit that the optimizer's last states give: centers and Gaussians of all starts, and
        the objective at every step."""
        log_posterior, state = problem.log_posterior, draws.state
        values = self.kernel.values(draws.num_steps - 1)
        attrs = {
            **self._attrs(),
            "objective": self.objective,
            **facts_of(log_posterior, problem.seed),
            **times_of(draws),
        }
        places, gaussians = slice(0, problem.engine.num_latents), list[Gaussian]()
        if "temperature" in values:
            attrs["temperature"] = float(values["temperature"])
            over_n = values["temperature"] / log_posterior.num_data
            for start in range(len(state.position)):
                of_start = pytree.tree_map(lambda leaf, start=start: leaf[start], state)
                gaussians.append(self._gaussian(of_start, places, over_n))
        return Fit(
            log_posterior=log_posterior,
            data=problem.data,
            layout=problem.engine.layout,
            centers=problem.engine.to_params(state.position.detach()),
            sites=log_posterior.latents,
            gaussians=tuple(gaussians),
            seed=problem.seed,
            attrs=attrs,
            trace=draws.log_joint[:, : draws.num_steps],
        )

    def _gaussian(self, state: Any, places: slice, temperature: Tensor) -> Gaussian:
        """The Gaussian over the latents at one start's last state; subclasses with a Gaussian
        implement this.

        Args:
            state: state of the optimizer's kernel at one start.
            places: slice of the D unconstrained elements that are latents.
            temperature: temperature divided by N.
        """
        raise NotImplementedError

    def _attrs(self) -> dict[str, Any]:
        """The method's name, structure and hyperparameters (floats; a schedule is the word
        "schedule"), by name, for `Fit.attrs`."""
        hyperparameters = {
            name: "schedule" if callable(value) else float(value)
            for name, value in self.kernel.hyperparameters().items()
        }
        return {"method": type(self).__name__, "structure": self.structure, **hyperparameters}

    def _posterior_of_step(
        self, problem: Problem, draws: Draws, values: Mapping[str, Tensor], batch: Arguments
    ) -> GaussianPosterior:
        return GaussianPosterior(self._make_fit(problem, draws).replaced(data=None), batch)

    def _warn_of_trace(self, fit: Fit) -> None:
        """Warns if the objective fell or still rose over the run, or if the fit is known to be off
        the optimum.

        Warns:
            ConvergenceWarning: the message says what to change.
        """
        trace, size, attrs = fit.trace, fit.layout.size, fit.attrs
        assert trace is not None
        num_steps, is_measured = trace.shape[1], "at_optimum" in attrs
        if is_measured and all(attrs["at_optimum"]):
            return
        if bool(got_worse(trace, size).any()):
            warn(
                ConvergenceWarning,
                f"the {self.objective} fell over the {num_steps} steps, so the fit is worse than "
                "its start: lower the learning rate",
            )
        elif bool(still_rises(trace, size).any()):
            warn(
                ConvergenceWarning,
                f"the {self.objective} still rose over the last quarter of the {num_steps} steps: "
                "take more steps, or a larger learning rate at first",
            )
        elif is_measured:
            warn(
                ConvergenceWarning,
                f"not converged after {num_steps} steps: where the {self.objective} is largest, "
                f"some mean is {max(attrs['mean_offset']):.2g} sds away and some sd "
                f"{100 * max(attrs['sd_offset']):.2g}%: take more steps, or let the learning rate "
                "fall to 0",
            )


def check_length(num_steps: int | None, num_epochs: int | None) -> None:
    """Raises unless exactly one of `num_steps` and `num_epochs` is set.

    Raises:
        ArgumentError: both are None, or neither is.
    """
    if (num_steps is None) == (num_epochs is None):
        raise ArgumentError("pass one of num_steps and num_epochs, such as num_steps=5000")


def count_steps(problem: Problem, num_steps: int | None, num_epochs: int | None) -> int:
    """The number of steps of a run: `num_steps`, or the steps of `num_epochs` passes through the
    data if that is not None.

    Args:
        problem: the analyzed model with N and the batch size.
        num_steps: number of steps; not used if `num_epochs` is set.
        num_epochs: number of epochs.

    Raises:
        ArgumentError: the number is not a count.
    """
    if num_epochs is None:
        return as_count("num_steps", num_steps)
    num_data = problem.log_posterior.num_data
    epoch = -(-num_data // (problem.data.batch_size or num_data))
    return epoch * as_count("num_epochs", num_epochs)


def times_of(draws: Draws) -> dict[str, Any]:
    """Facts about a run by name, for the posterior's `attrs`: the number of steps (`num_steps`),
    seconds of the steps (`sampling_time`) and of compilation (`compile_time`), and how the steps
    ran (`program`, such as "eager")."""
    return {
        "num_steps": draws.num_steps,
        "sampling_time": draws.seconds,
        "compile_time": draws.compile_seconds,
        "program": draws.program,
    }
