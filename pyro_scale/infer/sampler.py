"""Samplers: kernels as inference classes in Pyro's manner."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.schedules import Cyclical, Schedule
from pyro_scale.core.validation import AUTO, as_count, as_flag, is_auto
from pyro_scale.core.warn import warn, without_vmap_warnings
from pyro_scale.data.open import open_data
from pyro_scale.data.row_sampler import Sampling, check_sampling
from pyro_scale.data.sources import Data
from pyro_scale.diagnostics import crash_dump
from pyro_scale.diagnostics.divergence import all_stopped, explosion, message
from pyro_scale.diagnostics.post_run import as_measured_by_first, measure
from pyro_scale.diagnostics.run_report import Report
from pyro_scale.diagnostics.step_size_bias import step_size_bias
from pyro_scale.diagnostics.verdict import report
from pyro_scale.distributed.ranks import Distributed, Ranks
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import (
    ArgumentError,
    BiasWarning,
    CallError,
    FileError,
    NonFiniteError,
    PyroScaleWarning,
    VerdictWarning,
)
from pyro_scale.infer.call_checks import unknown_argument
from pyro_scale.infer.method import Method
from pyro_scale.infer.settings import settings_of
from pyro_scale.infer.sharded import or_sharded, step_sharded
from pyro_scale.kernels import Kernel
from pyro_scale.posterior.collect import collect, warn_of_short_warmup
from pyro_scale.posterior.moment_sink import ToMoments
from pyro_scale.posterior.sinks import ToDisk, sink_for
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.blame import broken_sites
from pyro_scale.run.budget import Budget, passes_of
from pyro_scale.run.by_rank import (
    check_same,
    check_same_call,
    gather_trajectory,
    warn_of_reading,
)
from pyro_scale.run.config import RunConfig, Store
from pyro_scale.run.execute import execute
from pyro_scale.run.limits import check_equal_weights, check_length, check_memory
from pyro_scale.run.problem import (
    Problem,
    as_log_posterior,
    check_can_adjust,
    check_rows_can_be_shared,
    module_device,
)
from pyro_scale.run.resume import Journal, digest_of, identity_of
from pyro_scale.run.run import RunPlan, Trajectory
from pyro_scale.run.shared_starts import check_superchains, with_shared_starts
from pyro_scale.run.single_step import Stepping, batch_as_data
from pyro_scale.storage.files import FilePath
from pyro_scale.tuning.adjust import acceptance_rate
from pyro_scale.tuning.batches import prepare_in_batches
from pyro_scale.tuning.choice import Choice
from pyro_scale.tuning.plan import is_trained, plan_run

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Sampler(Method):
    """A stochastic-gradient MCMC sampler on a Pyro model.

    Args:
        hyperparameters: the kernel's, each a float or a schedule (step -> float), or where the
            kernel says so a dict of them by site; sites left out have the default, if there is one.
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        init_strategy: where chains start: one of Pyro's, drawn anew for each chain
            (`init_to_uniform` by default), a dict of constrained tensors `[num_chains, ...]`, or
            a fit (`MAP`, `Laplace`, `VI`, `EKF`), from which they are drawn.
        num_data: N, which overrides what the data say.
        compile: whether the steps become one compiled program: `"auto"` compiles runs of at
            least 3,000 steps (1,500 of 251 chains), which repay the few seconds
            that it takes, and goes on with a run from its checkpoints as that was run; False
            never does.
        control_variates: True finds the mode and replaces the minibatch gradient by its
            difference to the one at the mode.  A dict of constrained values by site names that
            point.  A step then needs two gradients of a batch.  `"auto"` does so where the step
            size is chosen and steps take minibatches.
        precondition: the coordinates that chains move in.  `"auto"` whitens the posterior, by a
            matrix up to 500 dimensions (`"dense"`), by elements and the 48 directions that stand
            out beyond (`"low_rank"`), by Kronecker factors of a network's weights (`"kron"`), or by
            elements alone (`"diag"`): first by the curvature at the mode, then by what chains see
            in windows of warm-up, which come before the run's own steps.  So lr and friction mean
            the same on every posterior.  A fit (`Laplace`, `VI`) gives its Gaussian to begin with,
            whose structure the coordinates keep.  None moves parameters themselves, and is what
            `"auto"` means where lr or mass is a number.
        subtract_noise: whether the injected noise is reduced by the gradient noise of minibatches,
            estimated at the mode; by element, and not below zero.  Batches are then drawn with
            replacement.

    Whatever is `"auto"` is chosen at the start of a run, by its data, seed and draws alone; what is
    set is never changed.  `report()` says what was chosen and why, and how far to trust the draws.

    Raises:
        ArgumentError: a hyperparameter that the kernel does not have, or out of its range.
    """

    kernel_class: ClassVar[type[Kernel]]
    #: How the run was run, and what was chosen before it.
    _plan: RunPlan | None = None
    _choice: Choice | None = None

    def __init__(
        self,
        model: Any,
        *,
        init_strategy: Any = "auto",
        num_data: int | None = None,
        compile: bool | Literal["auto"] = "auto",
        precondition: Any = "auto",
        control_variates: bool | Mapping[str, Tensor] | Literal["auto"] = "auto",
        subtract_noise: bool = False,
        **hyperparameters: Any,
    ):
        starts = None if is_auto(init_strategy) else init_strategy
        super().__init__(model, init_strategy=starts, num_data=num_data)
        self._earlier = Earlier()
        fields = [field.name for field in dataclasses.fields(self.kernel_class)]
        for name in hyperparameters:
            if name not in fields:
                hint = unknown_argument(self, name, fields)
                raise CallError(
                    f"{type(self).__name__} has no hyperparameter '{name}'; it has {fields}: {hint}"
                )
        self.kernel, self._settings = settings_of(
            type(self).__name__,
            self.kernel_class,
            hyperparameters,
            precondition,
            control_variates,
            subtract_noise,
            starts is None,
            compile,
        )

    @classmethod
    def from_sgd(
        cls, model: Any, *, lr: float | Schedule, momentum: float = 0.0, **others: Any
    ) -> Self:
        """The sampler that is `torch.optim.SGD` at temperature 0, step for step, on the negative
        log joint over N: the mean loss over rows, plus the prior's over N.

        Args:
            model: as ever.
            lr: SGD's learning rate, a float or a schedule.
            momentum: SGD's; dampening is 0.
            others: the constructor's other arguments.

        Raises:
            ArgumentError: the method is not SGD at temperature 0, or a value is out of range.
        """
        if not isinstance(momentum, int | float):
            raise ArgumentError(f"momentum={momentum!r}: pass a number")
        same = cls.kernel_class.from_sgd(lr, momentum)
        for name in others:
            if name in same:
                raise ArgumentError(f"{name}: from_sgd sets it; leave it out")
        return cls(model, **same, **others)

    @or_sharded
    @without_vmap_warnings()
    def run(
        self,
        data: Any,
        *,
        num_samples: int = 1000,
        warmup_steps: int | Literal["auto"] = "auto",
        thinning: int | Literal["auto"] = "auto",
        num_chains: int = 4,
        superchains: int | None = None,
        batch_size: int | Literal["auto"] | None = "auto",
        sampling: Sampling | None = None,
        share_batches: bool = False,
        seed: int | None = None,
        progress: bool = True,
        max_rows: int | None = None,
        max_seconds: float | None = None,
        checkpoint: FilePath | None = None,
        checkpoint_every: float = 60.0,
        resume: FilePath | None = None,
        store: Store = None,
        memory_budget: int | None = None,
        distributed: Distributed = "auto",
        mesh: DeviceMesh | None = None,
        rows_by_rank: bool = False,
    ) -> Self:
        """Runs `warmup_steps + num_samples * thinning` steps and keeps every thinning-th state
        after warm-up.

        With nothing but data, that is 1,000 nearly independent draws of each of four chains, as
        far as `report()` can tell.

        Args:
            data: a `DataLoader` (any iterable with `.dataset`), or the model's own arguments: a
                tensor, a tuple by position, a dict by name; None for a model without arguments.
                Tensors are rows.
            num_samples: draws to keep, per chain.
            warmup_steps: steps before the first that may be kept.  `"auto"` goes on until chains
                agree and have the geometry that they are run with.
            thinning: steps from one draw to the next.  `"auto"` takes an autocorrelation time, and
                twice as many, up to seven times, while effective draws are under half of all.
                With shuffled batches, choose a number
                coprime with the steps of an epoch.  Otherwise draws always fall at the same few
                places of an epoch, where minibatch noise differs from its average.
            num_chains: chains, each with its own start, noise and minibatches.
            superchains: how many groups the chains form; the chains of a group share a start.
                `diagnostics()` then has nested R-hat, which works for many short chains
                (Margossian et al. 2024).  Take 16 or more: with 4, starts that account for a
                fifth of the variance are detected in a third of runs.
            batch_size: rows a step, for tensors; None for all of them.  `"auto"` trains
                networks on 128; it samples them on all where rows times weights are at most four
                million, else on 128.  Of other models it takes all of up to 20,000.  Of more it
                takes 64 to 1,024 if lr is chosen and the model stands it: as few as hardly heat,
                with control variates.  A loader has its own.
            sampling: `"shuffle"` goes through the rows in a new order each epoch,
                `"replacement"` draws them anew at every step, `"symmetric"` goes through whole
                batches forwards and then backwards.  `"shuffle"` by default; `"replacement"` for
                SGNHT and with `subtract_noise`, as what shuffling cancels is not there to correct.
            share_batches: gives all chains the same minibatches.  This saves loading, but
                correlates the chains, and R-hat and ESS do not detect it.
            seed: the same seed gives the same draws; drawn from torch's generator by default.
            progress: whether to show a progress bar.
            max_rows: gradients of single rows that all chains together may take, warm-up
                included, where lengths are `"auto"`: by default 200 passes through the data for
                each draw, and 200,000 a chain at least.  A quarter of them is for the search for
                modes.  What is not reached by then is in the report.
            max_seconds: after which the run ends, with the draws that there are; where it ends
                then depends on the machine.
            checkpoint: a directory to write the run into, so that it survives a crash.
            checkpoint_every: seconds from one checkpoint to the next: what a crash costs at most.
            resume: the directory of an interrupted run, to continue it with the same call.  On one
                machine the draws are bit for bit those of an uninterrupted run.  A larger
                `num_samples` extends a finished run (not of a network or with
                precondition=None where lr is "auto", nor with store=False, which depend on its
                length).  Another model, other data or settings are refused,
                by the log prior and log likelihood at two points; functions, and a loader's rows
                beyond its first batch and one from all over the data, cannot be compared.
            store: the path of a Zarr store, for draws that do not fit into memory.  It is written
                during the run and can be read meanwhile.  A crash or a full disk costs the draws
                of the last few seconds.  Processes that share the chains out write one store,
                which all must see.  False keeps no draws, only means, standard deviations and
                quantiles (`moments()`, `summary()`).
            memory_budget: bytes that draws may take in memory, half of the machine's by default;
                a run that needs more is refused before it begins.
            distributed: `"auto"` shares the chains out among the processes of torch's process
                group, or of torchrun; chain i has the same noise and batches on any number of
                them.  Rank 0 then has all draws, others those of their own chains;
                `diagnostics()`, `summary()` and `report()` tell of all chains on every rank.
                `"all"` gives every rank all draws; `predict`, `log_likelihood` and `loo` then
                share rows out, and have to be called on every rank.  False ignores the group.
            mesh: torch's, of dimensions `("chain", "data")`: the ranks along `"data"` move the same
                chains, each on its part of every batch, and sum their gradients at every step.
                For batches or models that one process is too slow for.
            rows_by_rank: whether the data that each rank along `"data"` is called with are rows of
                its own, such as its part of a stream; by default every rank is called with all
                rows.  N is then the sum of their numbers, which may differ; with `num_data`, each
                rank's rows stand for an equal part of these.  Every row counts alike.  It takes a
                number for lr; temperatures are not measured, and `loo` and `log_likelihood` are of
                this rank's rows.

        Returns:
            The sampler itself.

        Raises:
            ArgumentError, DataError: before the model is run.
            ModelError, SiteError, PlateError: before any step.
            NonFiniteError: a chain's state became NaN or infinite; the others have finished and
                `get_samples` holds their draws.  It names a file for `ps.replay`, which says why:
                in the checkpoint's directory, or else in the system's for temporary files.
            FileError: a checkpoint or a store cannot be written or read, is of another run, or
                of one that is still running in another process.
            RankError: another process has failed or died, or has other data or arguments.

        Warns:
            BiasWarning: the chains have exploded, but are still finite.
            ConvergenceWarning: warm-up was under five relaxation times, judged by the draws.
            PyroScaleWarning: the run was interrupted from the keyboard; it holds the draws so far.
        """
        ranks = Ranks.of(distributed, mesh)
        asked = {
            "num_samples": num_samples,
            "warmup_steps": warmup_steps,
            "thinning": thinning,
            "num_chains": num_chains,
            "seed": seed,
            "max_rows": max_rows,
            "max_seconds": max_seconds,
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "resume": None if resume is None else str(resume),
            "store": str(store) if isinstance(store, os.PathLike) else store,
            "rows_by_rank": rows_by_rank,
        }
        with ranks.together():
            check_same_call(ranks, asked)
            config = self._config(
                num_samples=as_count("num_samples", num_samples),
                warmup_steps=_count_or_auto("warmup_steps", warmup_steps, least=0),
                thinning=_count_or_auto("thinning", thinning),
                num_chains=as_count("num_chains", num_chains),
                superchains=superchains,
                batch_size=batch_size,
                sampling=sampling,
                share_batches=as_flag("share_batches", share_batches),
                store=store,
                memory_budget=memory_budget,
                progress=progress and ranks.is_first,
            )
            ranks.check(config.num_chains)
            if max_seconds is not None and ranks.rows is not None:
                raise ArgumentError(
                    "max_seconds: ranks that share batches out take the same steps, and have "
                    "clocks of their own: leave it out, and pass max_rows= or the run's length"
                )
            budget = Budget.of(max_rows, config.num_samples, max_seconds, ranks)
            journal = Journal.open(checkpoint, checkpoint_every, resume, ranks)
            self._run(data, config, budget, journal, seed, ranks, rows_by_rank)
        return self

    def _run(
        self,
        data: Any,
        config: RunConfig,
        budget: Budget,
        journal: Journal,
        seed: int | None,
        ranks: Ranks,
        rows_by_rank: bool,
    ) -> None:
        """The stages of a run."""
        seed = journal.seed(seed)
        chosen = choose_seed(seed)
        seed = ranks.of_first(chosen, "the choice of a seed") if seed is None else chosen
        problem = self._problem(data, config, seed, ranks, rows_by_rank)
        facts = self._facts(problem, config, journal)
        with sink_for(config.store, problem, config.num_samples, journal.last is not None) as sink:
            self._result = self._stepping = self._plan = None
            self._why_none, self._choice = Method._why_none, None
            plan, self._choice = plan_run(problem, config, self._settings, self._earlier, budget)
            if self._choice is not None:
                spent = sum(self._choice.passes.values())
                budget = budget.after(spent, problem.log_posterior.num_data)
            name, may_halve = type(self).__name__, "lr" in self._settings.chosen
            trajectory = execute(plan, name, may_halve, budget, journal, facts, sink)
            trajectory = gather_trajectory(trajectory)
            error = self._collect(trajectory, config, sink)
        if trajectory.problem.is_split and not ranks.keeps_all:
            self._share(ranks)
            if not ranks.has_all and self._result is None:
                self._why_none = "has no draws on this rank, as all of its chains have stopped"
        if ranks.has_all or not trajectory.problem.is_split:
            self._report(trajectory, error, journal, sink)

    # ------------------------------------------------------------------ the stages of a run

    def _config(
        self, *, superchains: int | None, sampling: Sampling | None, **asked: Any
    ) -> RunConfig:
        """What was asked for; it refuses arguments."""
        num_chains, kernel = asked["num_chains"], self.kernel
        if superchains is not None:
            superchains = check_superchains(superchains, num_chains, self._init_strategy)
        config = RunConfig(
            superchains=superchains,
            sampling=self._sampling(sampling, asked["batch_size"] not in (None, AUTO)),
            keeps=kernel.lr.keeps if isinstance(kernel.lr, Cyclical) else None,
            **asked,
        )
        steps = config.steps
        if steps is None:
            self._check_constant()
        chooses = "lr" in self._settings.chosen or self._settings.precondition is not None
        if chooses and callable(kernel.hyperparameters()["temperature"]):
            raise ArgumentError(
                "temperature is a schedule, but lr='auto' and precondition are chosen at one "
                "temperature: pass a number for lr, and precondition=None"
            )
        least = Steps(config.num_samples, config.warmup_steps or 0, config.thinning or 1)
        length = least.warmup_steps + least.num_samples * least.thinning
        check_length(config.num_samples, num_chains, length)
        columns = kernel.columns((steps or least).total)  # which refuses values out of range
        if config.store is False and steps is not None:
            check_equal_weights(kernel.lr, columns["lr"][steps.kept])
        return config

    def _check_constant(self) -> None:
        """Refuses schedules in runs whose length is not known.

        Raises:
            ArgumentError: it names the hyperparameter.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self.kernel)}
        for name, value in self.kernel.hyperparameters().items():
            parts = value.values() if isinstance(value, Mapping) else [value]
            if value is not defaults[name] and any(callable(part) for part in parts):
                raise ArgumentError(
                    f"{name} is a schedule, which needs to know how long the run is: pass "
                    "warmup_steps= and thinning= as numbers"
                )

    def _problem(
        self, data: Any, config: RunConfig, seed: int, ranks: Ranks, rows_by_rank: bool
    ) -> Problem:
        """The model on the data, understood, with chains at their starts; it refuses models."""
        device, adjusted = module_device(self.model), self.kernel.adjusted
        size = None if config.batch_size == AUTO else config.batch_size
        first = open_data(data, size, self._num_data, device)
        num_data = self._num_rows(first, ranks) if rows_by_rank else first.num_data

        def in_batches_of(size: int | None) -> Data:
            return open_data(data, size, self._num_data, device)

        def prepare(opened: Data) -> Problem:
            return self._prepare(opened, num_data, config.num_chains, seed)

        if config.batch_size == AUTO:
            whitens = self._settings.precondition is not None
            tunes = "lr" in self._settings.chosen and whitens and not adjusted
            problem = prepare_in_batches(prepare, first, in_batches_of, tunes)
        else:
            is_all = adjusted and size is not None and size == first.num_data
            problem = prepare(in_batches_of(None) if is_all else first)
        problem = dataclasses.replace(problem, ranks=ranks)
        check_rows_can_be_shared(problem)
        warn_of_reading(problem)
        if adjusted:
            check_can_adjust(problem, type(self).__name__)
        if config.superchains is not None:
            problem = with_shared_starts(problem, config.superchains)
        if config.store is None:
            kept = slice(None) if ranks.has_all else list(problem.chains)
            check_memory(problem.positions[kept], config.num_samples, config.memory_budget)
        return problem

    def _num_rows(self, own: Data, ranks: Ranks) -> int | None:
        """N, where each rank has rows of its own.

        Raises:
            ArgumentError: something is chosen, for which all rows are needed.
        """
        needs_all = self._settings.control_variates or self._settings.subtract_noise
        if "lr" in self._settings.chosen or self._settings.precondition or needs_all:
            raise ArgumentError(
                "rows_by_rank=True: lr='auto', precondition, control_variates and subtract_noise "
                "look at all rows, and no rank has them: pass a number for lr and leave these out"
            )
        return ranks.own_rows(own.num_data or 1, self._num_data, digest_of(own.first()))

    def _facts(self, problem: Problem, config: RunConfig, journal: Journal) -> dict[str, Any]:
        """What has to be alike for one run to go on with another; it refuses to where it is not."""
        if journal.path is None and problem.ranks.is_alone:
            return {}
        store = config.store
        kept = "nowhere" if store is False else "memory" if store is None else "a store"
        about = {"method": type(self).__name__, "draws in": kept, **config.facts}
        facts = identity_of(problem, about, self._asked_hyperparameters(), self._numbers_of_fit())
        trains = is_trained(problem, self._settings, config.steps is None)
        by_length = trains or (
            "lr" in self._settings.chosen and self._settings.precondition is None
        )
        if by_length or store is False:  # which depend on the run's length
            facts["num_samples"] = config.num_samples
        own = {"draws": config.num_samples, **self._size_of_starts(problem)}
        check_same(problem.ranks, {**facts, **own})
        journal.check_same_run(facts, config.num_samples)
        return facts

    def _numbers_of_fit(self) -> dict[str, float]:
        """Two weighted sums over the elements of a fit that was passed as preconditioner, by which
        another fit is noticed at `resume`; empty without one."""
        fit = self._settings.precondition
        if not isinstance(fit, Gaussian):
            return {}
        factors = torch.arange(1, len(fit.mean) + 1).to(fit.mean).sin()
        return {
            "mean of the precondition": float(factors @ fit.mean),
            "variance of the precondition": float(factors @ fit.variance.log()),
        }

    def _size_of_starts(self, problem: Problem) -> dict[str, str]:
        """What tells a start or a preconditioner from others that were drawn or fitted, but for
        rounding."""
        sizes = {"starts": problem.positions}
        fit = self._settings.precondition
        if fit is not None and not isinstance(fit, str):
            sizes |= {"precondition.mean": fit.mean, "precondition.sd": fit.variance.sqrt()}
        return {name: f"{float(value.double().norm()):.4g}" for name, value in sizes.items()}

    def _collect(
        self, trajectory: Trajectory, config: RunConfig, sink: ToDisk | ToMoments | None
    ) -> BaseException | None:
        """Makes results of a run's draws, if there are any; what ended the run, or was in the way
        of its results."""
        plan, problem, _, draws = trajectory
        self.kernel = plan.kernel
        kept = len(draws.kept_steps)
        if isinstance(sink, ToDisk):
            there = sink.store.count if sink.store.path.exists() else 0
            kept = min(kept, there)  # the disk may be full
        if not draws.finished or not kept:
            return draws.error
        facts = config.facts
        if self._choice is not None:
            facts["passes_draws"] = round(passes_of(problem, draws.num_steps), 2)
        # last, as a run that went on has more steps between draws than were chosen
        lengths = {"num_samples": kept, "thinning": plan.steps.thinning}
        whitened = {"whitened": int(plan.problem.engine.whitening is not None)}
        attrs = {**self._attrs(), **facts, **plan.choice, **lengths, **whitened}
        if plan.kernel.adjusted:
            attrs["acceptance_rate"] = acceptance_rate(draws)
        self._plan = dataclasses.replace(plan, finished=tuple(draws.finished))
        # at once: what is found out about it can be interrupted
        self._result = collect(problem, draws, plan.columns, attrs, sink)
        if problem.ranks.keeps_all and problem.has_all_rows:
            self._result = dataclasses.replace(self._result, ranks=problem.ranks)
        if trajectory.problem.is_split and not problem.ranks.has_all:
            self._plan = None
            return draws.error  # the rest is found out by rank 0, which has all draws
        self._result, error = measure(trajectory, self._result, _on_average(plan, draws))
        all_measure = problem.ranks.keeps_all or not problem.is_split
        if problem.ranks.rows is not None and all_measure:  # each on rows of its own
            self._result = as_measured_by_first(self._result, problem.ranks)
        if not isinstance(sink, ToMoments):
            try:
                found = report(self._result, self._choice, config.num_samples)
                attrs = self._result.attrs | {"report": found.to_json()}
                self._result = dataclasses.replace(self._result, attrs=attrs)
            except (Exception, KeyboardInterrupt) as raised:  # the data may be gone
                error = error or raised
        error = draws.error or error
        if isinstance(sink, ToDisk):
            try:
                sink.describe(self._result)
            except FileError as raised:
                error = error or raised
        return error

    def _share(self, ranks: Ranks) -> None:
        """Gives what rank 0 has found out about all chains to the others."""
        told = None
        if ranks.is_first and self._result is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tables = {"summary": self.summary(), "diagnostics": self.diagnostics()}
            told = self._result.attrs, tables
        told = ranks.of_first(told, "what all chains have come to")
        if not ranks.is_first and self._result is not None and told is not None:
            attrs, tables = told
            self._result = dataclasses.replace(self._result, attrs=attrs, tables=tables)

    def _report(
        self,
        trajectory: Trajectory,
        error: BaseException | None,
        journal: Journal,
        sink: ToDisk | ToMoments | None,
    ) -> None:
        """Raises what went wrong, or warns of it."""
        plan, problem, _, draws = trajectory
        if error is not None:
            self._end_early(draws, error, journal.hint)
        if draws.failures:
            replay = crash_dump.written(problem, type(self).__name__, draws, journal.path)
            sites = broken_sites(problem, draws)
            told = message(draws, plan.columns["lr"], sites, replay, self._held_by)
            if self._result is None:
                path = sink.store.path if isinstance(sink, ToDisk) else None
                self._why_none = all_stopped(path, told)
            raise NonFiniteError(told)
        if explosion_message := explosion(self._results()):
            warn(BiasWarning, explosion_message, code="exploded")
        elif self._choice is not None:
            found = self.report() if "report" in self._results().attrs else None
            is_known = self._results().attrs.get("temperature") == 0  # by who asked for it
            if found is not None and found.verdict != "yes" and not is_known:
                warn(
                    VerdictWarning,
                    f"{found.headline}; report() says more",
                    code="ensemble" if found.verdict == "ensemble" else "verdict",
                )
        else:
            values, warmup_steps = _on_average(plan, draws), plan.steps.warmup_steps
            warn_of_short_warmup(problem, self._results(), values, warmup_steps)

    def _end_early(self, draws: Draws, error: BaseException, hint: str) -> None:
        """Raises what ended a run before its time, or warns of it where that was the user."""
        result = self._result
        kept = 0 if result is None else len(result.sample_stats["step"][0])
        held = f"{self._held_by} holds the {kept} draws a chain until then" if kept else "no draws"
        lost = len(draws.kept_steps) - kept if draws.finished else 0  # the disk may be full
        more = f", {lost} more could not be written" if lost else ""
        message = f"after {draws.num_steps} steps; {held}{more}{hint}"
        if self._result is None or not isinstance(error, KeyboardInterrupt):
            error.add_note(f"{type(self).__name__}: {message}")
            raise error
        warn(PyroScaleWarning, f"interrupted {message}")

    @property
    def _held_by(self) -> str:
        """Which method gives the results."""
        return "moments()" if self._result and self._result.online else "get_samples()"

    def _asked_hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters as they were asked for, before any was chosen."""
        asked = dict(self.kernel.hyperparameters())
        asked |= dict.fromkeys(self._settings.chosen, AUTO)
        precondition = self._settings.precondition
        kind = precondition if isinstance(precondition, str) else type(precondition).__name__
        return asked | {
            "precondition": kind,
            "control_variates": self._settings.control_variates,
            "subtract_noise": self._settings.subtract_noise,
        }

    def _sampling(self, sampling: Sampling | None, in_batches: bool) -> Sampling:
        """How rows are drawn: as given, or as the method needs it."""
        if sampling is None:
            return "replacement" if self._settings.subtract_noise else self.kernel.sampling
        check_sampling(sampling)
        if sampling != "replacement" and self._settings.subtract_noise:
            raise ArgumentError(
                f"subtract_noise with sampling='{sampling}' would take off noise that batches in "
                "that order cancel themselves: leave sampling out, or pass 'replacement'"
            )
        if sampling != "replacement" and self.kernel.sampling == "replacement" and in_batches:
            warn(
                BiasWarning,
                f"{type(self).__name__} with sampling='{sampling}' makes the posterior too narrow: "
                "its thermostat cools for noise that batches in that order cancel themselves; "
                "leave sampling out",
                code="too-narrow",
            )
        return sampling

    @without_vmap_warnings()
    def step(self, *args: Any, **kwargs: Any) -> float:
        """Moves one chain by one step on a batch, given as the model's own arguments.

        For loops of your own.  `num_data` is needed, unless the model's plate says it; the seed
        is drawn from torch's generator at the first step.  `get_samples` holds the latest state.

        Returns:
            The log joint's estimate from the batch, in nats, at the state before the step.

        Raises:
            ArgumentError: an option that needs the whole data.
            NonFiniteError: the state became NaN or infinite.
        """
        if (log_joint := step_sharded(self, args, kwargs)) is not None:
            return log_joint
        if self.kernel.adjusted:
            raise ArgumentError(
                f"step() sees one batch at a time, but {type(self).__name__} compares log joints "
                "of all rows: use run, or BAOA"
            )
        needs_all = (
            self._settings.control_variates
            or self._settings.subtract_noise
            or self._settings.precondition
        )
        if "lr" in self._settings.chosen or needs_all:
            raise ArgumentError(
                "step() sees one batch at a time, but lr='auto' is chosen from the whole data, and "
                "precondition, control_variates and subtract_noise need it: pass a number for lr "
                "and leave these out, or use run"
            )
        if self._stepping is None:
            data = batch_as_data(self.model, self._num_data, args, kwargs)
            problem = self._prepare(data, self._num_data, 1, choose_seed(None))
            self._stepping = Stepping(problem, self.kernel)
        draws, values = self._stepping.step(args, kwargs)
        if draws.failures:
            problem = self._stepping.problem
            sites = broken_sites(problem, draws, problem.log_posterior.bind(args, kwargs))
            raise NonFiniteError(message(draws, values["lr"], sites))
        result = collect(self._stepping.problem, draws, values, self._attrs())
        self._result, self._plan = dataclasses.replace(result, data=None), None
        return float(draws.log_joint)

    def report(self) -> Report:
        """What the run chose and why, how far to trust its draws, and what to do if not.

        `str(report)` is the text, `.verdict` is `"yes"`, `"no"`, `"unknown"` or
        `"ensemble"`, `.to_frame()` has a row for each site and check.

        Raises:
            NotRunError: nothing has been run.
            ArgumentError: draws of `step()`, or that were not kept.
        """
        attrs = self._draws().attrs
        if "report" not in attrs:
            raise ArgumentError(
                "report: there are no checks of draws of step(), or that were not kept; "
                "diagnostics() tells what is known"
            )
        return Report.from_json(attrs["report"])

    def step_size_bias(self, *, num_samples: int | None = None) -> Any:
        """How far the run is off because its step is finite and its batches are small: a
        DataFrame, one row a latent site.

        Runs the sampler once more, at half the step and with twice as many, from the same starts
        and on the same path of noise, and extrapolates the difference to a step of 0.  What both
        have in common, such as a mode that they miss, it does not see; and of SGNHT's bias, which
        follows no power of lr where minibatch noise is unequal among elements, between two fifths
        and all.

        Columns: `mean_bias`, what is too much in the mean of the element where that is most, in
        posterior sds, to first order in lr (of a site with a transform it comes out up to half as
        large again where the step is long); `sd_inflation`, the standard deviation over what it
        would be at ever smaller steps, of the element where that is furthest from 1 (it is taken
        to be at most 10); `mean_bias_mcse` and `sd_inflation_mcse`, their Monte Carlo standard
        errors, NaN where draws are under 50.  `.attrs` holds the `order` of lr by which each
        site's sd was extrapolated (1 where the noise of minibatches accounts for the difference),
        and `seconds`.

        Args:
            num_samples: how many of the draws of each chain to compare, the first ones; all by
                default, which takes twice the run's steps.

        Raises:
            NotRunError: nothing has been run, or the results are from a file.
            ArgumentError: the draws are of `step()`; lr is `Cyclical`; temperature is 0; there are
                not so many draws; thinning takes them at few places of an epoch.
            NonFiniteError: all chains became NaN or infinite at half the step.

        Warns:
            UserWarning: a bias is known to be more than 5% in a standard deviation, or 0.1
                posterior sds in a mean.

        Examples:
            >>> import torch, pyro, pyro.distributions as dist, pyro_scale as ps
            >>> def model():
            ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
            ...     pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(0.5))
            >>> sampler = ps.BAOA(model, lr=0.5)
            >>> how = {"num_samples": 500, "warmup_steps": 50, "thinning": 1, "seed": 0}
            >>> table = sampler.run(None, **how, progress=False).step_size_bias()
            >>> bool(abs(table.sd_inflation["x"] - 1) < 0.1)  # of a Gaussian BAOA has none
            True
        """
        result = self._draws()
        if self._plan is None:
            raise ArgumentError(
                "step_size_bias runs the sampler again, but step() keeps no data: use run"
            )
        if self._plan.kernel.adjusted:
            raise ArgumentError(
                f"step_size_bias: {type(self).__name__} accepts or rejects, so that no step size "
                "biases it: there is nothing to measure"
            )
        if num_samples is not None:
            num_samples = as_count("num_samples", num_samples)
        return step_size_bias(self._plan, result, num_samples)

    def _prepare(self, data: Data, num_data: int | None, num_chains: int, seed: int) -> Problem:
        log_posterior = as_log_posterior(self.model, num_data)
        starts = self._starts(num_chains, seed)
        return self._understand(log_posterior, data, self.kernel, starts, num_chains, seed)

    def _attrs(self) -> dict[str, Any]:
        hyperparameters = {
            name: {site: _in_words(value) for site, value in hyper.items()}
            if isinstance(hyper, Mapping)
            else _in_words(hyper)
            for name, hyper in self.kernel.hyperparameters().items()
        }
        return {"method": type(self).__name__, **hyperparameters}


def _on_average(plan: RunPlan, draws: Draws) -> dict[str, Tensor]:
    """The hyperparameters' values, over the draws."""
    return {name: column[draws.kept_steps].mean(0) for name, column in plan.columns.items()}


def _count_or_auto(name: str, value: Any, least: int = 1) -> int | None:
    """A count; None where it is to be chosen."""
    if is_auto(value):
        return None
    return as_count(name, value, least=least, hint=", or 'auto'")


def _in_words(hyper: Any) -> float | str:
    if callable(hyper):
        return "schedule"
    return "tensor" if isinstance(hyper, Tensor) else float(hyper)
