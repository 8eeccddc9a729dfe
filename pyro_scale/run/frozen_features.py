"""Runs the frozen base of a network (its first layers, whose weights are not sampled) once for
every row of data, instead of at every step.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.core.memory import bytes_of
from pyro_scale.data.batches import batches_from
from pyro_scale.data.features import FeatureData, table_of
from pyro_scale.data.sources import Data, TensorData
from pyro_scale.model.frozen import FrozenBase, NoBase, frozen_base
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.run.initialize import first_evaluation
from pyro_scale.run.problem import Problem

#: Batches on which base and rest together are compared with the whole model.
_OTHERS = 3
#: The fraction of memory that the features of all rows may take.
_SHARE = 0.25


def with_frozen_features(problem: Problem) -> Problem:
    """The problem with an engine that reads features of the rows, instead of the rows, where
    features are outputs of the network's frozen base. Steps then run the rest of the network only.
    The problem is unchanged without a frozen base; if the base cannot be separated, only the
    attribute `base`, a phrase for reports, says so.

    Features of all rows are computed once if the data are tensors and the features fit into a
    quarter of memory; otherwise they are computed for each minibatch.
    """
    log_posterior, engine = problem.log_posterior, problem.engine
    if not log_posterior.model_info.is_frozen:
        return problem
    if (
        not isinstance(engine.density, LogPosterior)
        or log_posterior.model_info.own_plate is not None
    ):
        return dataclasses.replace(problem, base="run at every step")
    arguments = rows.take(problem.data.first(), problem.part)
    start = engine.layout.unflatten(problem.positions[0])
    drawn = batches_from(problem.batches(1, "shuffle").of_rows(problem.part), 0, _OTHERS)
    others = [batch.of_chain(0)[0] for batch in drawn]
    try:
        base = frozen_base(engine.density, start, arguments, others)
        first = base.features(arguments)
        source, words = _compute_features(problem.data, base, first)
    except NoBase as reason:
        return dataclasses.replace(problem, base=f"run at every step: {reason}")
    engine = dataclasses.replace(engine, density=base, vectorized=True)
    per_chain = problem.data.batch_size is not None
    engine, _ = first_evaluation(engine, problem.positions, first, per_chain)
    return dataclasses.replace(problem, engine=engine, features=source, base=words)


def _compute_features(
    data: Data, base: FrozenBase, first: tuple[Tensor, ...]
) -> tuple[TensorData | FeatureData, str]:
    """(Features of all rows, the outputs of the network's frozen base, as data that replace the
    rows in steps; a phrase for reports on when features are computed: once, or for each minibatch).

    Args:
        data: the data of the run.
        base: the network's frozen base.
        first: features of the first batch, which give the size of a row's features.

    Raises:
        NoBase: sizes inside of the model change with the number of rows.
    """
    size = rows.count(first) or 1
    in_bytes = sum(leaf.nbytes for leaf in first) / size * base.num_data
    # all rows at every step are in memory anyway
    fits = data.batch_size is None or in_bytes <= _SHARE * bytes_of(first[0].device)
    if isinstance(data, TensorData) and fits:
        try:
            return table_of(data, base.features, size), "run once for every row"
        except Exception as error:  # of operations, on tensors of other sizes
            raise_if_from_handler(error)
            raise NoBase("sizes inside of the model change from batch to batch") from error
    return FeatureData(data, base.features), "run once for every batch"
