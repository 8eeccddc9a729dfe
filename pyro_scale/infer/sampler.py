"""Samplers: kernels as inference classes in Pyro's manner."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torch import Tensor

from pyro_scale.core.rows import DataLike, Model
from pyro_scale.core.schedules import Cyclical, Schedule
from pyro_scale.core.validation import AUTO, as_count, as_flag, is_auto
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.diagnostics.step_size_bias import judged_by_bias, step_size_bias
from pyro_scale.distributed.workers import Distributed, Workers
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import ArgumentError
from pyro_scale.infer.method import (
    Chain,
    Finished,
    InitStrategy,
    SteppedChain,
    Stepwise,
)
from pyro_scale.infer.own_loop import OwnLoop
from pyro_scale.infer.sampler_run import run_stages
from pyro_scale.infer.sampler_setup import (
    check_config,
    check_superchains,
    checked_sampling,
    run_problem,
)
from pyro_scale.infer.settings import count_or_auto, needs_all_rows, settings_of
from pyro_scale.infer.sharded import begin_sharded, or_sharded
from pyro_scale.kernels import Kernel
from pyro_scale.results.posterior import Posterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.budget import Budget
from pyro_scale.run.by_rank import Sharing, check_same_call
from pyro_scale.run.config import RunConfig, Store
from pyro_scale.run.resume import Journal
from pyro_scale.storage.files import FilePath

if TYPE_CHECKING:
    import pandas
    from torch.distributed.device_mesh import DeviceMesh


class Sampler(Stepwise):
    """A stochastic-gradient MCMC sampler on a Pyro model.

    Args:
        hyperparameters: hyperparameters of the sampler's kernel, such as `lr`: floats or schedules
            (step -> float), or for some kernels dicts of these by site; sites that a dict leaves
            out have the default, if there is one.
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        init_strategy: where chains start: one of Pyro's strategies, drawn anew for each chain
            (`init_to_uniform` by default), a dict of constrained tensors `[num_chains, ...]`, or
            a fit (`MAP`, `Laplace`, `VI`, `EKF`), from which starts are drawn.
        num_data: number of rows in all, N; None takes it from the data.
        compile: whether the steps become one compiled program.  `"auto"` compiles runs that
            are long enough to repay the few seconds that compilation takes: of 2,800 steps for a
            logistic regression (half as many with 251 chains), of 500 for a network of 12 layers; a
            resumed run is compiled if the interrupted one was.  False never
            compiles.
        control_variates: True finds the mode and replaces the minibatch gradient by its difference
            to the one at the mode.  A dict of constrained values by site is used as that point
            instead.  A step then needs two gradients of a batch.  `"auto"` uses control variates if
            the step size is chosen and steps take minibatches.
        precondition: the coordinates that chains move in.  `"auto"` whitens the posterior, so that
            lr and friction mean the same on every posterior: by a matrix up to 500 dimensions
            (`"dense"`), beyond by elements and the 48 directions that differ most from these
            (`"low_rank"`), by Kronecker factors of a network's weights (`"kron"`), or by elements
            alone (`"diag"`).  Whitening starts from the curvature at the mode, and is learned from
            the chains in windows of warm-up, before the run's own steps.  A fit (`Laplace`, `VI`)
            is the start instead, and the coordinates keep its structure.  None moves the
            parameters themselves; `"auto"` means None if lr or mass is a number.
        subtract_noise: whether the injected noise is reduced by the gradient noise of minibatches,
            estimated at the mode, element by element and not below zero.  Batches are then drawn
            with replacement.

    Whatever is `"auto"` is chosen at the start of a run, from its data, seed and draws alone; what
    is set is never changed.  `report()` says what was chosen and why, and how far to trust the
    draws.

    Raises:
        ArgumentError: a hyperparameter is out of its range.
        CallError: the kernel does not have a hyperparameter.
    """

    kernel_class: ClassVar[type[Kernel]]

    def __init__(
        self,
        model: Model,
        *,
        init_strategy: InitStrategy | Literal["auto"] = "auto",
        num_data: int | None = None,
        compile: bool | Literal["auto"] = "auto",
        precondition: Any = "auto",
        control_variates: bool | Mapping[str, Tensor] | Literal["auto"] = "auto",
        subtract_noise: bool = False,
        **hyperparameters: Any,
    ):
        starts: Any = None if is_auto(init_strategy) else init_strategy
        super().__init__(model, init_strategy=starts, num_data=num_data)
        self._earlier = Earlier()
        self.kernel, self._settings = settings_of(
            self,
            hyperparameters,
            precondition,
            control_variates,
            subtract_noise,
            starts is None,
            compile,
        )

    @classmethod
    def from_sgd(
        cls, model: Model, *, lr: float | Schedule, momentum: float = 0.0, **others: Any
    ) -> Self:
        """A sampler whose steps at temperature 0 are exactly those of `torch.optim.SGD` on the
        negative log joint divided by N, the number of rows of the data.

        Args:
            model: model as for the constructor.
            lr: SGD's learning rate, a float or a schedule.
            momentum: SGD's momentum; dampening is 0.
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
        data: DataLike,
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

        By default there are 1,000 draws of each of four chains, of which about a quarter is
        effective; `report()` says how many are.

        Args:
            data: a `DataLoader` (any iterable with `.dataset`), or the model's own arguments: a
                tensor, a tuple by position, a dict by name; None for a model without arguments.
                Tensors are rows.
            num_samples: draws to keep, per chain.
            warmup_steps: steps before the first draw.  `"auto"` takes steps until the chains agree
                and their coordinates fit the posterior.
            thinning: steps from one draw to the next.  `"auto"` takes a quarter of an
                autocorrelation time, so that of the default's 4,000 draws about 1,000 are
                effective; a report asks for 400.  It is doubled, at most seven times, while
                effective draws are fewer than a fifth of all, or chains disagree by more than
                chance explains.
                With shuffled batches, choose a number coprime with the steps of an epoch.
                Otherwise draws always fall at the same few places of an epoch, where minibatch
                noise differs from its average.
            num_chains: number of chains, each with its own start, noise and minibatches.
            superchains: how many groups the chains form; the chains of a group share a start.
                `diagnostics()` then has nested R-hat, which works for many short chains
                (Margossian et al. 2024).  Take 16 or more: with 4, starts that account for a
                fifth of the variance are detected in a third of runs.
            batch_size: rows a step, for tensors; None for all of them.  `"auto"` trains networks on
                batches of 128, and samples them on all rows if rows times weights are at most four
                million, else on 128.  For other models it takes all of up to 20,000 rows.  Of more
                rows it takes 64 to 1,024, with control variates, if lr is chosen and the model can
                be run on parts of the data: the fewest whose noise hardly heats the chains.  A
                loader has its own batch size.
            sampling: `"shuffle"` goes through the rows in a new order each epoch, `"replacement"`
                draws them anew at every step, `"symmetric"` goes through whole batches forwards and
                then backwards.  `"shuffle"` by default; `"replacement"` for SGNHT and with
                `subtract_noise`, which correct for noise that shuffled batches partly cancel.
            share_batches: gives all chains the same minibatches.  This saves loading, but
                correlates the chains, and R-hat and ESS do not detect it.
            seed: the same seed gives the same draws; drawn from torch's generator by default.
            progress: whether to show a progress bar.
            max_rows: gradients of single rows that all chains together may take, warm-up
                included, where lengths are `"auto"`: by default 200 passes through the data for
                each draw, and at least 200,000 a chain.  A quarter of them is for the search for
                modes.  The report says what was not reached.
            max_seconds: time after which the run ends, with the draws so far.  The number of draws
                then depends on the machine.
            checkpoint: a directory to write the run into, so that it survives a crash.
            checkpoint_every: seconds from one checkpoint to the next, the most that a crash costs.
            resume: the directory of an interrupted run, to continue it with the same call.  On one
                machine the draws are bit for bit those of an uninterrupted run.  A larger
                `num_samples` extends a finished run, unless its draws depend on its length: a
                network's, or with precondition=None, if lr is "auto"; or with store=False.
                Another model, other data or settings raise an error.  Model and data are compared
                by the log prior and log likelihood at two points; functions, and the rows of a
                loader outside its first batch and one batch from all over the data, cannot be
                compared.
            store: the path of a Zarr store, for draws that do not fit into memory.  It is written
                during the run and can be read meanwhile.  A crash or a full disk costs the draws
                of the last few seconds.  Processes that share the chains write one store, which
                must be visible to all.  False keeps no draws, only means, standard deviations and
                quantiles (`moments()`, `summary()`).
            memory_budget: bytes that draws may take in memory, half of the machine's by default;
                a run that needs more raises an error before it begins.
            distributed: `"auto"` shares the chains among the processes of torch's process group, or
                of torchrun; chain i has the same noise and batches on any number of processes.
                Rank 0 then has all draws, other ranks have those of their own chains;
                `diagnostics()`, `summary()` and `report()` describe all chains on every rank.
                `"all"` gives every rank all draws; `predict`, `log_likelihood` and `loo` then
                share the rows, and have to be called on every rank.  False ignores the group.
            mesh: torch's `DeviceMesh` of dimensions `("chain", "data")`, for batches or models that
                one process is too slow for.  The ranks along `"data"` move the same chains, each on
                its part of every batch, and sum their gradients at every step.
            rows_by_rank: whether every rank along `"data"` is called with its own rows, such as its
                part of a stream; by default every rank is called with all rows.  N is then the sum
                of the ranks' numbers of rows, which may differ; with `num_data`, each rank's rows
                stand for an equal part of N.  Every row counts alike.  lr must be a number;
                temperatures are not measured, and `loo` and `log_likelihood` are of this rank's
                rows.

        Returns:
            The sampler itself.

        Raises:
            ArgumentError, DataError: before the model is run.
            ModelError, SiteError, PlateError: before any step.
            NonFiniteError: a chain's state became NaN or infinite; the others have finished and
                `get_samples` holds their draws.  The message names a file for `ps.replay`, which
                finds the cause: in the checkpoint's directory, or in that of temporary files.
            FileError: a checkpoint or a store cannot be written or read, is of another run, or
                of one that is still running in another process.
            RankError: another process has failed or died, or has other data or arguments.

        Warns:
            BiasWarning: the chains have exploded, but are still finite.
            ConvergenceWarning: warm-up was shorter than five relaxation times, judged by the draws.
            PyroScaleWarning: the run was interrupted from the keyboard; it holds the draws so far.
        """
        workers = Workers.from_group(distributed, mesh)
        call = {
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
        with workers.together():
            check_same_call(workers, call)
            num_chains, lr = as_count("num_chains", num_chains), self.kernel.lr
            if superchains is not None:
                superchains = check_superchains(superchains, num_chains, self._init_strategy)
            config = RunConfig(
                num_samples=as_count("num_samples", num_samples),
                warmup_steps=count_or_auto("warmup_steps", warmup_steps, least=0),
                thinning=count_or_auto("thinning", thinning),
                keeps=lr.keeps if isinstance(lr, Cyclical) else None,
                num_chains=num_chains,
                superchains=superchains,
                batch_size=batch_size,
                sampling=checked_sampling(self, sampling, batch_size not in (None, AUTO)),
                share_batches=as_flag("share_batches", share_batches),
                store=store,
                memory_budget=memory_budget,
                progress=progress and workers.is_first,
            )
            check_config(self, config)
            workers.check(num_chains)
            if max_seconds is not None and workers.rows is not None:
                raise ArgumentError(
                    "max_seconds: ranks that share batches take the same steps, but their clocks "
                    "differ: leave it out, and pass max_rows= or the run's length"
                )
            budget = Budget.from_arguments(max_rows, config.num_samples, max_seconds)
            journal = Journal.open(checkpoint, checkpoint_every, resume)
            seed = workers.broadcast(choose_seed(journal.seed(seed)), "the choice of a seed")
            problem = run_problem(self, data, config, seed, Sharing(workers, rows_by_rank))
            run_stages(self, problem, config, budget, journal)
        return self

    def begin(self, *args: Any, **kwargs: Any) -> Chain:
        """A chain at its start, for your own loops: `step(*batch)` moves it, `posterior` is its
        state; see `Stepwise.begin`.

        Raises:
            ArgumentError: the sampler accepts or rejects proposals, or an option has to be chosen
                or measured from all rows.
        """
        if (chain := begin_sharded(self, args, kwargs)) is not None:
            return chain
        if self.kernel.adjusted:
            raise ArgumentError(
                f"step() sees one batch at a time, but {type(self).__name__} compares log joints "
                "of all rows: use run, or BAOA"
            )
        if needs_all_rows(self._settings):
            raise ArgumentError(
                "step() sees one batch at a time, but lr='auto' is chosen from all rows, and "
                "precondition, control_variates and subtract_noise need them: pass a number for lr "
                "and leave these out, or use run"
            )
        data = self._open_batch(args, kwargs)
        problem = self._analyze(data, self._num_data, self.kernel, 1, choose_seed(None))
        loop = OwnLoop(type(self).__name__)
        return SteppedChain(problem, self.kernel, loop.check, loop.posterior)

    def step_size_bias(self, *, num_samples: int | None = None) -> pandas.DataFrame:
        """The bias that the finite step size and minibatches cause: a DataFrame, one row a latent
        site.

        Runs the sampler again, at half the step size and with twice as many steps, from the same
        starts and with the same path of noise, and extrapolates the difference to a step of 0.  It
        does not detect what both runs have in common, such as a mode that both miss.  Of SGNHT's
        bias, which follows no power of lr if minibatch noise is unequal among elements, it detects
        between two fifths and all.  From then on, `report()` judges the step size by the result.

        Columns:

        - `mean_bias`: bias of the mean in posterior sds, to first order in lr, of the element where
          it is largest.  (For a site with a transform and a long step, it can come out half as
          large again.)
        - `sd_inflation`: the standard deviation, divided by its limit at small steps, of the
          element where this is furthest from 1; at most 10.
        - `mean_bias_mcse`, `sd_inflation_mcse`: their Monte Carlo standard errors; NaN with fewer
          than 50 draws.

        `.attrs` holds `seconds`, and the `order` of lr by which each site's sd was extrapolated (1
        where the noise of minibatches accounts for the difference).

        Args:
            num_samples: how many draws of each chain to compare, the first ones.  All by default,
                which takes twice the run's steps.

        Raises:
            NotRunError: nothing has been run, or the results are from a file.
            ArgumentError: the draws are those of `step()`; lr is `Cyclical`; temperature is 0;
                there are fewer draws; with this thinning, draws fall at few places of an epoch.
            NonFiniteError: all chains became NaN or infinite at half the step size.

        Warns:
            UserWarning: a bias is significantly more than 5% in a standard deviation, or 0.1
                posterior sds in a mean.

        Examples:
            >>> import torch, pyro, pyro.distributions as dist, pyro_scale as ps
            >>> def model():
            ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
            ...     pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(0.5))
            >>> sampler = ps.BAOA(model, lr=0.5)
            >>> length = {"num_samples": 500, "warmup_steps": 50, "thinning": 1}
            >>> table = sampler.run(None, **length, seed=0, progress=False).step_size_bias()
            >>> bool(abs(table.sd_inflation["x"] - 1) < 0.1)  # BAOA has none on a Gaussian
            True
        """
        result = self.posterior.kept_draws
        plan = self._last.plan if isinstance(self._last, Finished) else None
        if plan is None:
            raise ArgumentError(
                "step_size_bias runs the sampler again, but step() keeps no data: use run"
            )
        if plan.kernel.adjusted:
            raise ArgumentError(
                f"step_size_bias: {type(self).__name__} accepts or rejects proposals, so that no "
                "step size biases it: there is nothing to measure"
            )
        if num_samples is not None:
            num_samples = as_count("num_samples", num_samples)
        table = step_size_bias(plan, result, num_samples)
        if "report" in result.attrs:
            self._last = Finished(Posterior(judged_by_bias(result, table)), plan)
        return table
