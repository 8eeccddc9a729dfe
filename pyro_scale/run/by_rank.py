"""Draws of the chains of several processes, brought together; and whether these are on one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.warn import warn
from pyro_scale.data.batches import Batches
from pyro_scale.data.stream import StreamData
from pyro_scale.distributed.ranks import code_of
from pyro_scale.engine.checkpoint import differences
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import ArgumentError, PyroScaleError, PyroScaleWarning, RankError
from pyro_scale.run.own_rows import on_own_rows
from pyro_scale.run.parts import Part
from pyro_scale.run.problem import Problem
from pyro_scale.run.resume import differences_of_runs
from pyro_scale.run.run import Trajectory


def gather(draws: Draws, problem: Problem) -> Draws:
    """The draws of all chains, on every rank.

    Args:
        draws: of this rank's chains.
        problem: of the run.
    """
    if not problem.is_split:
        return draws
    parts = problem.ranks.of_all((problem.chains, draws), "the draws")
    return join(parts, range(len(problem.positions)))


def gather_trajectory(trajectory: Trajectory) -> Trajectory:
    """The trajectory of all chains, on the ranks that keep all draws; on others that of their
    own."""
    plan, problem, _, draws = trajectory
    if not problem.is_split:
        return trajectory
    ranks, num_chains = problem.ranks, len(problem.positions)
    tell = ranks.of_all if ranks.keeps_all else ranks.at_first
    parts = tell((problem.chains, draws), "the draws")
    if parts is None:
        return trajectory
    batches = _batches_of(range(num_chains), trajectory)
    return Trajectory(plan, problem, batches, join(parts, range(num_chains)))


def together(trajectories: Sequence[Trajectory], parts: Sequence[Part]) -> Trajectory:
    """The trajectory of this process's chains, from those of its parts."""
    if len(trajectories) == 1:
        return trajectories[0]
    of_parts = zip(parts, trajectories, strict=True)
    draws = [(part.chains, trajectory.draws) for part, trajectory in of_parts]
    last = trajectories[-1]
    chains = last.problem.chains
    return last._replace(batches=_batches_of(chains, last), draws=join(draws, chains))


def _batches_of(chains: range, trajectory: Trajectory) -> Batches:
    """The batches of some chains, where those of the trajectory's own have come to: what is
    measured afterwards goes on with them."""
    plan, problem, batches, draws = trajectory
    sampling, share = plan.sampling, plan.share_batches
    whole = problem.batches(len(problem.positions), sampling, share, chains)
    if problem.data.batch_size is not None:
        whole = on_own_rows(problem, whole)[1]
    whole.seek(plan.steps.total, batches.position(draws.num_steps))
    return whole


def in_step(trajectory: Trajectory) -> Trajectory:
    """The trajectory up to the step that all ranks have reached, and with what ended one of them.

    A rank whose chains have all stopped holds the others up at nothing.
    """
    draws, ranks = trajectory.draws, trajectory.problem.ranks
    if ranks.is_alone:
        return trajectory
    own = draws.error
    error = None if own is None else (type(own), format(own), code_of(own))
    told = ranks.of_all((draws.num_steps, bool(draws.finished), error), "the end of its steps")
    reached = [steps for steps, is_alive, _ in told if is_alive] or [s for s, _, _ in told]
    errors = [(rank, error) for rank, (_, _, error) in enumerate(told) if error is not None]
    if errors and draws.error is None:
        rank, (kind, why, code) = errors[0]
        if kind is KeyboardInterrupt:
            draws.error = KeyboardInterrupt()
        elif issubclass(kind, PyroScaleError):
            draws.error = kind(f"rank {rank}: {why}", code=code)
        else:
            draws.error = RankError(f"rank {rank}: {kind.__name__}: {why}")
    draws.num_steps = min(reached)
    return trajectory


class Telling(Protocol):
    """Processes that tell each other what they have."""

    def of_all(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, by rank; `what` it is, in words."""
        ...


def check_same_call(
    ranks: Telling, arguments: Mapping[str, Any], what: str = "the beginning of a run"
) -> None:
    """Refuses ranks that were called otherwise than rank 0.

    Args:
        ranks: the processes.
        arguments: of this one's call.
        what: was called, in words.

    Raises:
        ArgumentError: it names the first such rank, and what differs.
    """
    told = ranks.of_all(dict(arguments), what)
    for rank, other in enumerate(told):
        lines = differences(told[0], other)
        if lines:
            raise ArgumentError(
                f"rank {rank} was called otherwise than rank 0 ({'; '.join(lines)}): make the same "
                "call on every rank"
            )


def check_same(ranks: Telling, facts: Mapping[str, Any]) -> None:
    """Refuses ranks that are on another run than rank 0.

    Args:
        ranks: the processes.
        facts: of the run of this one.

    Raises:
        RankError: it names the first such rank, and what differs.
    """
    told = ranks.of_all(dict(facts), "the facts of the run")
    for rank, other in enumerate(told):
        lines = differences_of_runs(told[0], other)
        if lines:
            raise RankError(
                f"rank {rank} is on another run than rank 0 ({'; '.join(lines)}): every process "
                "needs the same data, model and arguments; seed what draws them "
                "(torch.manual_seed), and share no data set out by DistributedSampler: ranks "
                "take their own batches of all of it"
            )


def warn_of_reading(problem: Problem) -> None:
    """Says what it costs that a stream is read by every rank.

    Warns:
        PyroScaleWarning: it is.
    """
    world = problem.ranks.world
    if world > 1 and isinstance(problem.data, StreamData) and problem.has_all_rows:
        warn(
            PyroScaleWarning,
            f"the loader cannot be read by index, so each of {world} ranks reads all rows and "
            f"drops those of the others: {world} times the reading.  Pass a map-style data set, or "
            "each rank's own rows with mesh= and rows_by_rank=True",
        )


def join(parts: Sequence[tuple[Sequence[int], Draws]], chains: Sequence[int]) -> Draws:
    """The draws of some parts' chains as those of one run.

    Args:
        parts: the numbers of each one's chains, and their draws.
        chains: the numbers of all of them, in the order that they get.
    """
    place = {chain: i for i, chain in enumerate(chains)}
    kept = min(draws.log_joint.shape[1] for _, draws in parts)
    cut = [draws.first(kept) for _, draws in parts]
    places = [[place[chain] for chain in numbers] for numbers, _ in parts]

    def together(*leaves: Tensor) -> Tensor:
        whole = leaves[0].new_empty(len(chains), *leaves[0].shape[1:])
        for own, leaf in zip(places, leaves, strict=True):
            whole[own] = leaf.to(whole.device)
        return whole

    kinetic = [draws.kinetic for draws in cut if draws.kinetic is not None]
    failures = [
        dataclasses.replace(failure, chain=own[failure.chain])
        for own, draws in zip(places, cut, strict=True)
        for failure in draws.failures
    ]
    return dataclasses.replace(
        cut[0],
        positions=together(*(draws.positions for draws in cut)),
        log_joint=together(*(draws.log_joint for draws in cut)),
        kinetic=together(*kinetic) if len(kinetic) == len(cut) else None,
        failures=sorted(failures, key=lambda failure: (failure.step, failure.chain)),
        last_steps={
            own[chain]: steps
            for own, draws in zip(places, cut, strict=True)
            for chain, steps in draws.last_steps.items()
        },
        state=pytree.tree_map(together, *(draws.state for draws in cut)),
        compile_seconds=max(draws.compile_seconds for draws in cut),
        seconds=max(draws.seconds for draws in cut),
        num_steps=min(draws.num_steps for draws in cut),
        error=next((draws.error for draws in cut if draws.error is not None), None),
    )
