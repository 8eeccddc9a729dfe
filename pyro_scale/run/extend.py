"""Extends a finished run to twice its thinning (steps from one draw to the next).

Every second draw stays, and as many new ones are added, so the number of draws is unchanged: the
same draws as of a run that was planned with twice the thinning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.mixing import FAMILY_WISE, mixing_and_chance
from pyro_scale.core.validation import evenly
from pyro_scale.data.batches import Batches
from pyro_scale.engine.checkpoint import Checkpoint, RunState
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.run.run import Trajectory

#: Least effective draws per draw, bulk and tail, of draws that are independent enough.
_LEAST_ESS = 0.2
#: Draws of each chain below which they are not checked; a run that tuned itself makes as many even
#: if its time is over.
FEWEST_DRAWS = 100
#: Elements of a position that are checked.
_MOST_ELEMENTS = 1000


def is_enough(trajectory: Trajectory) -> bool:
    """Whether a finished run need not be continued at a larger thinning: for every element there
    are at least 0.2 effective draws per draw, bulk and tail, and chance explains how far chains
    disagree. Also True with fewer than 100 draws a chain, which do not tell, or if no chain reached
    the end."""
    draws, finished = trajectory.draws, trajectory.draws.finished
    latents = trajectory.problem.engine.num_latents
    if draws.positions.shape[1] < FEWEST_DRAWS or not (finished or trajectory.problem.is_split):
        return True
    chosen = evenly(latents, _MOST_ELEMENTS)
    kept = draws.positions[finished][..., chosen]
    if trajectory.problem.is_split:
        return trajectory.problem.reduce(_are_enough, kept, "draws to check")
    return _are_enough([kept])


def _are_enough(of_processes: list[Tensor]) -> bool:
    """True if, in every element, draws are independent enough (at least 0.2 effective draws per
    draw, bulk and tail) and chains do not disagree significantly.

    Args:
        of_processes: draws `[chains, draws, elements]` of each process, which are joined along
            chains.
    """
    kept = torch.cat(of_processes)
    _, bulk, tail, chance = mixing_and_chance(kept)
    too_few = torch.minimum(bulk, tail) < _LEAST_ESS * kept.shape[:2].numel()
    disagree = chance < FAMILY_WISE / max(1, kept.shape[2])
    return not bool((too_few | disagree).any())


def cut_short(trajectory: Trajectory) -> Trajectory:
    """The result of a run (trajectory) without the unused room for draws that were planned but not
    made, if the run ended early. Unchanged if it reached its end, or if draws went into a store or
    moments."""
    draws = trajectory.draws
    kept = trajectory.plan.steps.kept_before(draws.num_steps)
    if draws.num_steps >= trajectory.plan.steps.total or not draws.positions.shape[2]:
        return trajectory
    return trajectory._replace(draws=draws.first(kept))


def extended(
    trajectory: Trajectory, title: str, stop: Callable[[Draws], bool] | None = None
) -> Trajectory:
    """Continues a finished run to twice its steps after warm-up, and returns the trajectory with as
    many draws as before, at twice the thinning.

    Args:
        trajectory: a finished run.
        title: name of what runs, for the progress bar.
        stop: function of the draws so far, which ends the run when it returns True; None to run to
            the end.
    """
    plan, draws = trajectory.plan, trajectory.draws
    steps = Steps(plan.steps.num_samples, plan.steps.warmup_steps, 2 * plan.steps.thinning)
    plan = dataclasses.replace(
        plan, steps=steps, columns=plan.problem.engine.kernel.columns(steps.total)
    )
    last = every_second(draws, trajectory.batches)
    longer = plan.execute(title, last=last, stop=stop)
    longer.draws.seconds += draws.seconds
    longer.draws.compile_seconds += draws.compile_seconds
    return longer


def every_second(draws: Draws, batches: Batches) -> Checkpoint:
    """The checkpoint from which a finished run continues at twice its thinning. The checkpoint has
    every second draw, beginning with the second.

    Args:
        draws: the draws of the finished run.
        batches: the minibatches of its steps.
    """
    alive = torch.ones(len(draws.positions), dtype=torch.bool)
    alive[[failure.chain for failure in draws.failures]] = False
    run_state = RunState(
        draws.num_steps, pytree.tree_leaves(draws.state), alive, tuple(draws.failures)
    )
    return Checkpoint(
        number=0,
        parts=(),
        facts={},
        run_state=run_state,
        batches=batches.position(draws.num_steps),
        positions=draws.positions[:, 1::2],
        log_joint=draws.log_joint[:, 1::2],
        kinetic=None,
        look_every=1,
        program=draws.program,
    )
