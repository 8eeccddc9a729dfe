"""The plan of a run, and its execution on this process's chains and rows."""

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
from pyro_scale.distributed.data_parallel import DataParallel
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.loop import simulate
from pyro_scale.engine.plan import StepPlan
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.engine.step import Engine
from pyro_scale.kernels import Kernel
from pyro_scale.model.other_batches import check_batch, is_checked
from pyro_scale.rng.streams import NoiseStream
from pyro_scale.run.config import RunConfig
from pyro_scale.run.frozen_features import with_frozen_features
from pyro_scale.run.problem import Problem
from pyro_scale.run.sharded.chain import run_chain


class Trajectory(NamedTuple):
    """The result of executing a plan.

    Attributes:
        plan: that was executed.
        problem: the plan's, with the features of a frozen base.
        batches: of the steps.
        draws: the states that were kept, and how the steps ended.
    """

    plan: RunPlan
    problem: Problem
    batches: Batches
    draws: Draws

    @property
    def diverged(self) -> bool:
        """Whether a chain broke for another reason than NaN or infinite numbers in its batch."""
        return bool(self.draws.failures) and not self.draws.failures[0].bad_batch


@dataclass(frozen=True)
class RunPlan:
    """All decisions about a run, made before its first step.

    Attributes:
        problem: model, data and starts, before a frozen base is run.
        columns: the hyperparameters' values at every step.
        steps: how many steps there are, and which are kept.
        sampling: how rows are drawn.
        share_batches: whether all chains have the same batches.
        compile: whether steps become one program.
        progress: whether a bar is shown.
        earlier: programs that the same object has compiled before.
        choice: what was chosen and why, in words and numbers.
        extends: whether the run continues at twice the thinning while draws are too dependent.
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
    def from_config(
        cls,
        problem: Problem,
        config: RunConfig,
        steps: Steps,
        compile: bool | Literal["auto"],
        earlier: Earlier,
        choice: Mapping[str, Any],
    ) -> RunPlan:
        """The plan of a run with these arguments on a problem."""
        columns = problem.engine.kernel.columns(steps.total)
        how = config.sampling, config.share_batches, compile, config.progress
        return cls(problem, columns, steps, *how, earlier, choice)

    @property
    def kernel(self) -> Kernel:
        """The kernel, with the step size that is taken."""
        return self.problem.engine.kernel

    def halved(self, times: int) -> RunPlan:
        """The plan at half its step size, after chains have diverged `times` times."""
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
        noise: NoiseStream | None = None,
        **how: Any,
    ) -> Trajectory:
        """Takes the steps of this process's chains.

        Args:
            title: of the progress bar.
            seed: of all draws except batches; by default the problem's.
            bar: the progress bar, if there is one already.
            chains: the numbers of the chains to move; by default this process's.
            noise: of the steps; by default that of the seed.
            how: the state to continue from, and where draws go; see `simulate`.
        """
        problem = with_frozen_features(self.problem)
        workers, num_chains = problem.workers, len(problem.positions)
        if workers.rows is not None:
            how["stop"] = None  # ranks that sum their gradients have to take the same steps
        chains = problem.chains if chains is None else chains
        batches = problem.batches(num_chains, self.sampling, self.share_batches, chains)
        new_bar = bar or Progress(self.steps.total, title, self.progress)
        with contextlib.nullcontext(new_bar) if bar else new_bar as shown:
            if problem.shards:
                writer = how.get("checkpoints")
                draws = run_chain(problem, batches, self.columns, self.steps, shown, writer)
                return Trajectory(self, problem, batches, draws)
            engine, part = on_own_rows(problem, batches)
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
                agree=None if workers.rows is None else workers.rows.agree,
            )
            draws = simulate(plan, shown, inspect=_inspection(problem), **how)
        if workers.rows is not None and problem.data.batch_size is None:
            # temperatures are measured on all rows: a part of them is no random sample
            problem = dataclasses.replace(self.problem, base=problem.base)
            part = WholeData(problem.data.first())
        return Trajectory(self, problem, part, draws)


def on_own_rows(problem: Problem, batches: Batches) -> tuple[Engine, Batches]:
    """(The engine that moves chains, their batches): on this process's rows of every batch, if
    batches are shared out."""
    rows, engine = problem.workers.rows, problem.engine
    if rows is None:
        return engine, batches
    density = DataParallel(engine.density, rows.weight(problem.batch_size), rows.group)
    # vmap does not support sums over processes
    engine = dataclasses.replace(engine, density=density, vectorized=False)
    return engine, batches.of_rows(problem.part)


def _inspection(problem: Problem) -> Callable[[Tensor, Batch], None] | None:
    """A function that checks the rules of minibatch scaling on batches of the run, at the first
    chain's position; None where there is nothing to check.

    The first batch is left out if an earlier run of the same model has checked it.
    """
    log_posterior, layout = problem.log_posterior, problem.engine.layout
    if problem.features is not None or not is_checked(log_posterior.model_info):
        return None
    if problem.workers.rows is not None:  # others would wait for a rank that raises
        return None

    first, calls = problem.data.first(), itertools.count()
    skipped = 0 if problem.understood is None else 1

    def inspect(positions: Tensor, batch: Batch) -> None:
        if next(calls) >= skipped and bool(torch.isfinite(positions[0]).all()):
            check_batch(log_posterior, layout.unflatten(positions[0]), *batch.of_chain(0), first)

    return inspect
