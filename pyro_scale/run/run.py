"""The plan of a run, and its execution."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyro_scale.data.batches import Batch, Batches
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.loop import simulate
from pyro_scale.engine.plan import StepPlan
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.kernels import Kernel
from pyro_scale.model.other_batches import check_batch, is_checked
from pyro_scale.run.config import RunConfig
from pyro_scale.run.frozen_features import with_frozen_features
from pyro_scale.run.own_rows import measurable, on_own_rows
from pyro_scale.run.problem import Problem


class Trajectory(NamedTuple):
    """What came of a plan's steps.

    Attributes:
        plan: whose steps they are.
        problem: the plan's, with its frozen features.
        batches: that the steps took.
        draws: what is left of them, and how they ended.
    """

    plan: RunPlan
    problem: Problem
    batches: Batches
    draws: Draws

    @property
    def diverged(self) -> bool:
        """Whether a chain broke, and not for what was in its batch."""
        return bool(self.draws.failures) and not self.draws.failures[0].bad_batch


@dataclass(frozen=True)
class RunPlan:
    """How a run is run.

    Attributes:
        problem: what it starts from, before a frozen base is run.
        columns: the hyperparameters' values, step by step.
        steps: how many, and which are kept.
        sampling: how rows are drawn.
        share_batches: whether all chains have the same.
        compile: whether steps become one program.
        progress: whether a bar is shown.
        earlier: what the same object has compiled before.
        choice: what was chosen and why, in words and numbers.
        extends: whether it goes on at twice the thinning while draws are too dependent.
        finished: the chains that reached the end, once they have.
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
    def of(
        cls,
        problem: Problem,
        config: RunConfig,
        steps: Steps,
        compile: bool | Literal["auto"],
        earlier: Earlier,
        choice: Mapping[str, Any],
    ) -> RunPlan:
        """The plan of a run on a problem, as it was asked for."""
        columns = problem.engine.kernel.columns(steps.total)
        how = config.sampling, config.share_batches, compile, config.progress
        return cls(problem, columns, steps, *how, earlier, choice)

    @property
    def kernel(self) -> Kernel:
        """With the step size that is taken."""
        return self.problem.engine.kernel

    def halved(self, times: int) -> RunPlan:
        """The plan at half the step size, after chains have diverged that often."""
        lr = self.kernel.lr / 2
        kernel = dataclasses.replace(self.kernel, lr=lr)
        why = (
            f"lr={lr:.2g}: halved {times} times, as a chain diverged, from what the mode suggested"
        )
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
        **how: Any,
    ) -> Trajectory:
        """Takes the steps of this process's chains.

        Args:
            title: of the progress bar.
            seed: of what is drawn besides batches; that of the problem by default.
            bar: one that is there already.
            chains: the numbers of those that are moved; this process's by default.
            how: where it goes on from and where draws go, for `simulate`.
        """
        problem = with_frozen_features(self.problem)
        ranks, num_chains = problem.ranks, len(problem.positions)
        if ranks.rows is not None:
            how["stop"] = None  # ranks that sum their gradients have to take the same steps
        chains = problem.chains if chains is None else chains
        batches = problem.batches(num_chains, self.sampling, self.share_batches, chains)
        engine, own_batches = on_own_rows(problem, batches)
        own = bar or Progress(self.steps.total, title, self.progress)
        with contextlib.nullcontext(own) if bar else own as shown:
            plan = StepPlan(
                engine,
                problem.positions[list(chains)],
                own_batches,
                self.columns,
                self.steps,
                problem.seed if seed is None else seed,
                self.compile,
                self.earlier,
                noise=how.pop("noise", None),
                numbers=chains,
                num_chains=num_chains,
                agree=None if ranks.rows is None else ranks.rows.agree,
            )
            draws = simulate(plan, shown, inspect=_inspection(problem), **how)
        return Trajectory(self, *measurable(self.problem, problem, own_batches), draws)


def _inspection(problem: Problem) -> Callable[[Tensor, Batch], None] | None:
    """Tries the rules on batches that the run meets, at the first chain's position; not on the
    first where an earlier run of the same model has done so."""
    log_posterior, layout = problem.log_posterior, problem.engine.layout
    if problem.features is not None or not is_checked(log_posterior.model_info):
        return None
    if problem.ranks.rows is not None:  # what one rank raised, the others would wait for
        return None

    first, calls = problem.data.first(), itertools.count()
    left_out = 0 if problem.understood is None else 1

    def inspect(positions: Tensor, batch: Batch) -> None:
        if next(calls) >= left_out and bool(torch.isfinite(positions[0]).all()):
            check_batch(log_posterior, layout.unflatten(positions[0]), *batch.of_chain(0), first)

    return inspect
