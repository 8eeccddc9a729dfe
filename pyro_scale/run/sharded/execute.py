"""Runs the chain of a sharded network: warm-up, thinning, draws, checkpoints."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.data.batches import Batches
from pyro_scale.data.sources import Data
from pyro_scale.engine.draws import Steps
from pyro_scale.engine.progress import Progress
from pyro_scale.errors import NonFiniteError
from pyro_scale.model.other_batches import check_batch, is_checked
from pyro_scale.run.sharded.chain import ShardedChain, ShardedProblem, part_of
from pyro_scale.run.sharded.checkpoint import ShardedCheckpoints

#: Batches besides the first on which the rules are tried before a run.
_OTHER_BATCHES = 2


class Kept(NamedTuple):
    """What a run keeps on this rank.

    Attributes:
        positions: this rank's part of the draws, in the processor's memory, `[draws, D]`.
        log_joint: of the steps that led to them, `[draws]`.
    """

    positions: Tensor
    log_joint: Tensor


def check_data(problem: ShardedProblem, data: Data) -> None:
    """Tries on other batches the rules that were found on the first one.

    Raises:
        PlateError: what was taken for a row's, or for a constant, depends on the other rows.
    """
    log_posterior = problem.log_posterior
    if data.batch_size is None or not is_checked(log_posterior.model_info):
        return
    params = problem.layout.unflatten(problem.position)
    with torch.no_grad():
        for batch, indices in data.spread(_OTHER_BATCHES):
            check_batch(log_posterior, params, batch, indices, data.first())


def execute(
    chain: ShardedChain,
    batches: Batches,
    steps: Steps,
    bar: Progress,
    checkpoints: ShardedCheckpoints | None = None,
) -> Kept:
    """Takes all steps, from where the chain is.

    Raises:
        NonFiniteError: the state became NaN or infinite.
    """
    holders, position = chain.problem.holders, chain.problem.position
    size = len(position) if steps.positions else 0
    kept = Kept(
        torch.empty(steps.num_samples, size, dtype=position.dtype),
        torch.empty(steps.num_samples, dtype=torch.float64),
    )
    if checkpoints is not None:
        checkpoints.restore(chain, batches, kept)
        bar.go_to(chain.count)
    while chain.count < steps.total:
        step = chain.count
        changing = pytree.tree_map(lambda leaf: leaf[:, 0], batches.take(step, step + 1))
        arguments, _ = batches.batch(batches.fixed, changing).of_chain(0)
        log_joint = chain.step(part_of(holders, arguments))
        place = steps.kept_before(step)
        if int(steps.kept[place]) == step:
            kept.log_joint[place] = log_joint
            if steps.positions:
                kept.positions[place] = chain.state.position[0].cpu()
        bar.update(1, log_joint)
        if checkpoints is not None and (checkpoints.due or chain.count == steps.total):
            checkpoints.write(chain, batches, kept, steps.kept_before(chain.count))
    broken = torch.tensor(not bool(torch.isfinite(chain.state.position).all()))
    if int(holders.total(broken.long())):
        raise NonFiniteError("the state became NaN or infinite at the last step: lower lr")
    return kept
