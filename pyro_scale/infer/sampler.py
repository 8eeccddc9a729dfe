"""Samplers: kernels as inference classes in Pyro's manner."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torch import Tensor

from pyro_scale.core.schedules import Schedule
from pyro_scale.core.validation import as_count, as_flag, is_auto
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.data.sources import Data
from pyro_scale.diagnostics.step_size_bias import step_size_bias
from pyro_scale.distributed.ranks import Distributed, Ranks
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import ArgumentError, CallError
from pyro_scale.infer.method import Chain, Finished, asks
from pyro_scale.infer.sampler_outcome import check_step, posterior_of_step
from pyro_scale.infer.sampler_run import run_stages
from pyro_scale.infer.sampler_setup import run_config
from pyro_scale.infer.settings import settings_of
from pyro_scale.infer.sharded import begin_sharded, or_sharded
from pyro_scale.infer.stepwise import SteppedChain, Stepwise
from pyro_scale.kernels import Kernel
from pyro_scale.results.call_checks import unknown_argument
from pyro_scale.results.posterior import Posterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.budget import Budget
from pyro_scale.run.by_rank import check_same_call
from pyro_scale.run.config import Store
from pyro_scale.run.problem import Problem, as_log_posterior
from pyro_scale.run.resume import Journal
from pyro_scale.run.single_step import Stepping, batch_as_data
from pyro_scale.storage.files import FilePath

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Sampler(Stepwise):
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
        ranks = Ranks.from_group(distributed, mesh)
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
            config = run_config(
                self,
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
            budget = Budget.from_arguments(max_rows, config.num_samples, max_seconds, ranks)
            journal = Journal.open(checkpoint, checkpoint_every, resume, ranks)
            run_stages(self, data, config, budget, journal, seed, ranks, rows_by_rank)
        return self

    def begin(self, *args: Any, **kwargs: Any) -> Chain:
        """A chain at its start, for loops of your own; see `Stepwise.begin`."""
        if (chain := begin_sharded(self, args, kwargs)) is not None:
            return chain
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
        data = batch_as_data(self.model, self._num_data, args, kwargs)
        problem = self._prepare(data, self._num_data, 1, choose_seed(None))
        posterior = functools.partial(posterior_of_step, type(self).__name__)
        return SteppedChain(Stepping(problem, self.kernel), check_step, posterior)

    report = asks(Posterior.report)

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
        result = self.posterior.kept_draws
        plan = self._last.plan if isinstance(self._last, Finished) else None
        if plan is None:
            raise ArgumentError(
                "step_size_bias runs the sampler again, but step() keeps no data: use run"
            )
        if plan.kernel.adjusted:
            raise ArgumentError(
                f"step_size_bias: {type(self).__name__} accepts or rejects, so that no step size "
                "biases it: there is nothing to measure"
            )
        if num_samples is not None:
            num_samples = as_count("num_samples", num_samples)
        return step_size_bias(plan, result, num_samples)

    def _prepare(self, data: Data, num_data: int | None, num_chains: int, seed: int) -> Problem:
        log_posterior = as_log_posterior(self.model, num_data)
        starts = self._starts(num_chains, seed)
        return self._understand(log_posterior, data, self.kernel, starts, num_chains, seed)


def _count_or_auto(name: str, value: Any, least: int = 1) -> int | None:
    """A count; None where it is to be chosen."""
    if is_auto(value):
        return None
    return as_count(name, value, least=least, hint=", or 'auto'")
