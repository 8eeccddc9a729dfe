"""The plan of a run, and its execution on the chains and rows that this process computes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyro_scale.data.batches import Batch, Batches, WholeData
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.loop import simulate
from pyro_scale.engine.plan import StepPlan
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.kernels import Kernel
from pyro_scale.model.other_batches import check_batch, is_checked
from pyro_scale.rng.streams import NoiseStream
from pyro_scale.run.config import RunConfig
from pyro_scale.run.frozen_features import with_frozen_features
from pyro_scale.run.problem import Problem
from pyro_scale.run.sharded.chain import run_chain


class Trajectory(NamedTuple):
    """The result of taking a plan's steps.

    Attributes:
        plan: the plan that was executed.
        problem: the plan's problem, with the features of a frozen base.
        batches: the minibatches of the steps.
        draws: the kept draws, and how the steps ended.
    """

    plan: RunPlan
    problem: Problem
    batches: Batches
    draws: Draws

    @property
    def diverged(self) -> bool:
        """True if a chain stopped for which the step size may be the cause: the first chain that
        stopped had a minibatch without NaN or infinite numbers.
        """
        return bool(self.draws.failures) and not self.draws.failures[0].bad_batch


@dataclass(frozen=True)
class RunPlan:
    """All decisions about a run, made before its first step.

    Attributes:
        problem: model, data and starts, before features of a frozen base are computed.
        columns: dict from the name of a hyperparameter to its value at every step, `[steps, ...]`.
        steps: the number of steps, and the steps after which a draw is kept.
        sampling: how the rows of minibatches are drawn.
        share_batches: whether all chains have the same minibatches.
        compile: whether to compile the step; "auto" compiles it if the run is long enough.
        progress: whether a progress bar is shown.
        earlier: cache of the programs that the same object has compiled before.
        choice: what tuning chose and why, numbers and text by name, for reports.
        extends: True if the run is to be continued at twice the thinning while draws are too
            dependent.
        finished: numbers of the chains that reached the end; empty before the run.
    """

    problem: Problem
    columns: Mapping[str, Tensor]
    steps: Steps
    sampling: Sampling
    share_batches: bool
    compile: bool | Literal["auto"]
    progress: bool
    earlier: Earlier
    choice: Mapping[str, Any] = field(default_factory=dict)
    extends: bool = False
    finished: tuple[int, ...] = ()

    @classmethod
    def from_config(
        cls,
        problem: Problem,
        config: RunConfig,
        steps: Steps,
        compile: bool | Literal["auto"],
        earlier: Earlier,
        choice: Mapping[str, Any],
    ) -> RunPlan:
        """The plan of a run of a problem with these arguments.

        Args:
            problem: model, data and starts.
            config: the arguments of `run`, after checks.
            steps: the number of steps, and the steps after which a draw is kept.
            compile: whether to compile the step; "auto" compiles it if the run is long enough.
            earlier: cache of the programs that the same object has compiled before.
            choice: what tuning chose and why (numbers and text by name), for reports; empty if
                nothing was tuned.
        """
        columns = problem.engine.kernel.columns(steps.total)
        how = config.sampling, config.share_batches, compile, config.progress
        return cls(problem, columns, steps, *how, earlier, choice)

    @property
    def kernel(self) -> Kernel:
        """The sampler's kernel of this plan, with its step size (halved, if a chain diverged)."""
        return self.problem.engine.kernel

    def halved(self, times: int, because: str = "a chain diverged") -> RunPlan:
        """A plan with half of this plan's step size.

        Args:
            times: number of halvings so far, for reports.
            because: why it is halved, for reports.
        """
        lr = self.kernel.lr / 2
        kernel = dataclasses.replace(self.kernel, lr=lr)
        how_often = f"{times} time{'s' * (times > 1)}"
        why = f"lr={lr:.2g}: halved {how_often}, as {because}, from what was chosen first"
        return dataclasses.replace(
            self,
            problem=self.problem.with_engine(kernel=kernel),
            columns=kernel.columns(self.steps.total),
            choice={**self.choice, "lr_choice": why},
        )

    def execute(
        self,
        title: str,
        seed: int | None = None,
        bar: Progress | None = None,
        chains: Sequence[int] | None = None,
        noise: NoiseStream | None = None,
        **how: Any,
    ) -> Trajectory:
        """Takes the steps of this process's chains, and returns the trajectory.

        Args:
            title: name of what runs, for the progress bar.
            seed: seed of all random numbers except the minibatches; None for the problem's seed.
            bar: a progress bar that is shown already; None for a new one.
            chains: numbers of the chains to move; None for this process's.
            noise: stream of the steps' standard normal numbers; None for that of the seed.
            how: arguments of `simulate`: the state to continue from, and storage for the draws.
        """
        problem = with_frozen_features(self.problem)
        num_chains = len(problem.positions)
        if problem.shares_rows:
            how["stop"] = None  # processes that sum their gradients have to take the same steps
        chains = problem.chains if chains is None else chains
        batches = problem.batches(num_chains, self.sampling, self.share_batches, chains)
        new_bar = bar or Progress(self.steps.total, title, self.progress)
        with contextlib.nullcontext(new_bar) if bar else new_bar as shown:
            if problem.shards:
                writer = how.get("checkpoints")
                draws = run_chain(problem, batches, self.columns, self.steps, shown, writer)
                return Trajectory(self, problem, batches, draws)
            engine, part = problem.limit_to_part(batches)
            plan = StepPlan(
                engine,
                problem.positions[list(chains)],
                part,
                self.columns,
                self.steps,
                problem.seed if seed is None else seed,
                self.compile,
                self.earlier,
                noise=noise,
                numbers=chains,
                num_chains=num_chains,
                agree=problem.agree_in_steps,
            )
            draws = simulate(plan, shown, inspect=_inspection(problem), **how)
        if problem.shares_rows and problem.data.batch_size is None:
            # temperatures are measured on all rows: a part of them is no random sample
            problem = dataclasses.replace(self.problem, base=problem.base)
            part = WholeData(problem.data.first())
        return Trajectory(self, problem, part, draws)


def _inspection(problem: Problem) -> Callable[[Tensor, Batch], None] | None:
    """A function of the chains' unconstrained params `[chains, D]` and a minibatch that raises if
    the minibatch breaks the rules of minibatch scaling at the first chain's params; None if there
    is nothing to check.

    The function skips its first call if an earlier run of the same model has checked the first
    minibatch.
    """
    log_posterior, layout = problem.log_posterior, problem.engine.layout
    if problem.features is not None or not is_checked(log_posterior.model_info):
        return None
    if problem.shares_rows:  # others would wait for a process that raises
        return None

    first, calls = problem.data.first(), itertools.count()
    skipped = 0 if problem.understood is None else 1

    def inspect(positions: Tensor, batch: Batch) -> None:
        if next(calls) >= skipped and bool(torch.isfinite(positions[0]).all()):
            check_batch(log_posterior, layout.unflatten(positions[0]), *batch.of_chain(0), first)

    return inspect
