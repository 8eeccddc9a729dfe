"""What moves the chains of a process that has some rows of every batch."""

from __future__ import annotations

import dataclasses

from pyro_scale.data.batches import Batches, WholeData
from pyro_scale.distributed.data_parallel import DataParallel
from pyro_scale.engine.step import Engine
from pyro_scale.run.problem import Problem


def on_own_rows(problem: Problem, batches: Batches) -> tuple[Engine, Batches]:
    """(What moves the chains, their batches), on this process's rows where batches are shared
    out."""
    own, engine = problem.ranks.rows, problem.engine
    if own is None:
        return engine, batches
    density = DataParallel(engine.density, own.weight(problem.batch_size), own.group)
    # a sum over processes is nothing that vmap knows
    engine = dataclasses.replace(engine, density=density, vectorized=False)
    return engine, batches.of_rows(problem.part)


def measurable(whole: Problem, taken: Problem, batches: Batches) -> tuple[Problem, Batches]:
    """(The problem, the batches) that temperatures are measured on after steps: the ones that the
    steps took, as a part of a random batch is one, too; but a part of all rows is no sample of
    them.

    Args:
        whole: the problem before a frozen base was run.
        taken: whose engine may take the features of this process's rows.
        batches: of this process's rows.
    """
    if taken.ranks.rows is None or taken.data.batch_size is not None:
        return taken, batches
    return dataclasses.replace(whole, base=taken.base), WholeData(whole.data.first())
