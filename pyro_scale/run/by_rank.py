"""Shares a run out among processes: checks that all were called with the same model, data and
arguments, and combines the draws of the chains that they moved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.warn import warn
from pyro_scale.data.batches import Batches
from pyro_scale.data.sources import Data, OwnSubsamples
from pyro_scale.data.stream import StreamData
from pyro_scale.distributed.workers import RankFailure, Workers
from pyro_scale.engine.checkpoint import differences
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import ArgumentError, PyroScaleWarning, RankError
from pyro_scale.run.parts import Part
from pyro_scale.run.problem import Problem
from pyro_scale.run.resume import differences_of_runs, digest_of
from pyro_scale.run.run import Trajectory

#: Why a process has no posterior although the run has finished.
NO_DRAWS = "has no draws on this rank, as all of its chains have stopped"


@dataclass(frozen=True)
class Sharing:
    """How a run is shared out among processes.

    Attributes:
        workers: the processes.
        rows_by_rank: whether each process was called with its own rows.
    """

    workers: Workers
    rows_by_rank: bool

    def num_rows(self, data: Data, num_data: int | None, needs_all: bool = False) -> int | None:
        """N, the number of rows that the run stands for; None if only the model can say it.

        Args:
            data: the data that this process was called with.
            num_data: N as the user passed it; None if it was left out.
            needs_all: whether an option of the sampler needs all rows in one process.

        Raises:
            ArgumentError: an option needs all rows, and every process has its own.
        """
        if not self.rows_by_rank:
            return data.num_data
        if needs_all:
            raise ArgumentError(
                "rows_by_rank=True: lr='auto', precondition, control_variates and subtract_noise "
                "need all rows, which no rank has: pass a number for lr and leave these out"
            )
        return self.workers.use_rows_by_rank(data.num_data or 1, num_data, digest_of(data.first()))

    def share_out(self, problem: Problem) -> Problem:
        """The problem whose chains, or rows of minibatches, these processes share.

        Raises:
            ArgumentError: minibatches are to be divided, and cannot be.

        Warns:
            PyroScaleWarning: every process reads all rows of a stream.
        """
        problem = dataclasses.replace(problem, workers=self.workers)
        check_rows_can_be_shared(problem)
        warn_of_reading(problem)
        return problem


def check_rows_can_be_shared(problem: Problem) -> None:
    """Raises if rows of minibatches are to be shared out among ranks, but minibatches of this
    problem cannot be divided.

    Raises:
        ArgumentError: the model subsamples by itself, or the device mesh is of another device than
            the model.
    """
    shared, device = problem.workers.rows, problem.positions.device.type
    if shared is not None and shared.device != device:
        raise ArgumentError(
            f"mesh: it is of {shared.device} devices, and the model is on {device}: pass "
            f"init_device_mesh('{device}', ...), or move the model and the data"
        )
    plate = problem.log_posterior.model_info.own_plate
    if shared is not None and isinstance(problem.data, OwnSubsamples):
        raise ArgumentError(
            f"mesh: the model subsamples by itself in plate '{plate}', so ranks cannot take parts "
            "of its batches: pass batch_size=, and write the plate with subsample_size=len(x)"
        )


def gather(draws: Draws, problem: Problem) -> Draws:
    """The draws of all chains of a run, sent by the processes that moved the chains, on every rank;
    unchanged if every process moved all chains.

    Args:
        draws: the draws of this rank's chains.
        problem: model, data and starts of the run, with its processes.
    """
    if not problem.is_split:
        return draws
    parts = problem.workers.gather((problem.chains, draws), "the draws")
    return join(parts, range(len(problem.positions)))


def gather_trajectory(trajectory: Trajectory) -> Trajectory:
    """The result of a run (trajectory) with the draws of all chains, on ranks that keep all draws:
    rank 0, or every rank with `distributed="all"`. On other ranks the argument itself, which has
    the draws of their own chains."""
    plan, problem, _, draws = trajectory
    if not problem.is_split:
        return trajectory
    workers, num_chains = problem.workers, len(problem.positions)
    collect = workers.gather if workers.keeps_all else workers.gather_at_first
    parts = collect((problem.chains, draws), "the draws")
    if parts is None:
        return trajectory
    batches = _batches_after(trajectory, range(num_chains))
    return Trajectory(plan, problem, batches, join(parts, range(num_chains)))


def join_parts(trajectories: Sequence[Trajectory], parts: Sequence[Part]) -> Trajectory:
    """The result of a run (trajectory) for all chains of this process, joined from the results of
    its groups of chains, each of which ran and wrote checkpoints by itself.

    Args:
        trajectories: one trajectory for each group.
        parts: the groups, in the same order.
    """
    if len(trajectories) == 1:
        return trajectories[0]
    pairs = zip(parts, trajectories, strict=True)
    draws = [(part.chains, trajectory.draws) for part, trajectory in pairs]
    last = trajectories[-1]
    chains = last.problem.chains
    return last._replace(batches=_batches_after(last, chains), draws=join(draws, chains))


def _batches_after(trajectory: Trajectory, chains: range) -> Batches:
    """The minibatches of these chains from the step on at which the run ended, so that measurements
    after the run see rows which the draws have not."""
    plan, problem, batches, draws = trajectory
    sampling, share = plan.sampling, plan.share_batches
    after = problem.batches(len(problem.positions), sampling, share, chains)
    if problem.data.batch_size is not None:
        after = problem.limit_to_part(after)[1]
    after.seek(plan.steps.total, batches.position(draws.num_steps))
    return after


def align(trajectory: Trajectory) -> Trajectory:
    """Makes the ranks of a run agree on where it ended, and returns the trajectory, changed in
    place: the number of steps is that of the rank which came least far, and if an error ended the
    run on one rank, the draws of every rank have an error as their attribute `error`. A rank whose
    chains have all stopped does not limit the others."""
    draws, workers = trajectory.draws, trajectory.problem.workers
    if workers.is_alone:
        return trajectory
    failure = None if draws.error is None else RankFailure.from_error(draws.error)
    state = draws.num_steps, bool(draws.finished), failure
    states = workers.gather(state, "the end of its steps")
    reached = [steps for steps, is_alive, _ in states if is_alive] or [s for s, _, _ in states]
    failed = [(rank, failure) for rank, (_, _, failure) in enumerate(states) if failure is not None]
    if failed and draws.error is None:
        rank, failure = failed[0]
        is_interrupt = failure.kind is KeyboardInterrupt
        draws.error = KeyboardInterrupt() if is_interrupt else failure.as_error(rank)
    draws.num_steps = min(reached)
    return trajectory


def check_same_call(
    workers: Workers, arguments: Mapping[str, Any], what: str = "the beginning of a run"
) -> None:
    """Raises unless all ranks have called a method with the same arguments; all of them have to
    call this.

    Args:
        workers: the processes.
        arguments: arguments of this rank's call, by name.
        what: the call in words, for error messages.

    Raises:
        ArgumentError: arguments differ. The message names the first rank whose arguments differ
            from rank 0's, and these arguments.
    """
    calls = workers.gather(dict(arguments), what)
    for rank, call in enumerate(calls):
        lines = differences(calls[0], call)
        if lines:
            raise ArgumentError(
                f"rank {rank} was called otherwise than rank 0 ({'; '.join(lines)}): make the same "
                "call on every rank"
            )


def check_same(problem: Problem, facts: Mapping[str, Any]) -> None:
    """Raises unless all processes of a run have the same model, data and arguments, judged by facts
    that identify the run.

    Args:
        problem: model, data and starts of the run, with its processes.
        facts: settings, data and model of the run as this rank sees them, from `identity_of`.

    Raises:
        RankError: they differ. The message names the first rank that differs from rank 0, and what
            differs.
    """
    by_rank = problem.workers.gather(dict(facts), "the facts of the run")
    for rank, facts_of_rank in enumerate(by_rank):
        lines = differences_of_runs(by_rank[0], facts_of_rank)
        if lines:
            raise RankError(
                f"rank {rank} is on another run than rank 0 ({'; '.join(lines)}): pass the same "
                "data, model and arguments on every rank.  Seed random data and starts "
                "(torch.manual_seed), and use no DistributedSampler: ranks choose their own "
                "batches from all rows"
            )


def warn_of_reading(problem: Problem) -> None:
    """Warns if every rank reads all rows of a stream although a rank needs a part of them only.

    Warns:
        PyroScaleWarning: the loader cannot be read by index, and there are several ranks.
    """
    world = problem.workers.world
    if world > 1 and isinstance(problem.data, StreamData) and problem.has_all_rows:
        warn(
            PyroScaleWarning,
            f"the loader cannot be read by index, so each of {world} ranks reads all rows and "
            f"drops those of the others: rows are read {world} times.  Pass a map-style data set, "
            "or each rank's own rows with mesh= and rows_by_rank=True",
        )


def join(parts: Sequence[tuple[Sequence[int], Draws]], chains: Sequence[int]) -> Draws:
    """The draws of all groups of chains as one `Draws`; the chains are in the order of `chains`.
    Groups with different numbers of draws are cut to the smallest.

    Args:
        parts: for each group, (numbers of its chains, their draws).
        chains: numbers of all chains, in the order of the result.
    """
    place = {chain: i for i, chain in enumerate(chains)}
    kept = min(draws.log_joint.shape[1] for _, draws in parts)
    cut = [draws.first(kept) for _, draws in parts]
    places = [[place[chain] for chain in numbers] for numbers, _ in parts]

    def combine(*leaves: Tensor) -> Tensor:
        combined = leaves[0].new_empty(len(chains), *leaves[0].shape[1:])
        for target, leaf in zip(places, leaves, strict=True):
            combined[target] = leaf.to(combined.device)
        return combined

    kinetic = [draws.kinetic for draws in cut if draws.kinetic is not None]
    failures = [
        dataclasses.replace(failure, chain=target[failure.chain])
        for target, draws in zip(places, cut, strict=True)
        for failure in draws.failures
    ]
    return dataclasses.replace(
        cut[0],
        positions=combine(*(draws.positions for draws in cut)),
        log_joint=combine(*(draws.log_joint for draws in cut)),
        kinetic=combine(*kinetic) if len(kinetic) == len(cut) else None,
        failures=sorted(failures, key=lambda failure: (failure.step, failure.chain)),
        last_steps={
            target[chain]: steps
            for target, draws in zip(places, cut, strict=True)
            for chain, steps in draws.last_steps.items()
        },
        state=pytree.tree_map(combine, *(draws.state for draws in cut)),
        compile_seconds=max(draws.compile_seconds for draws in cut),
        seconds=max(draws.seconds for draws in cut),
        num_steps=min(draws.num_steps for draws in cut),
        error=next((draws.error for draws in cut if draws.error is not None), None),
    )
