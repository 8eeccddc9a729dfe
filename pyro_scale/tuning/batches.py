"""How many rows a step takes, before anything else is known of a model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from pyro_scale.data.sources import Data, TensorData
from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.policy import TRAINING
from pyro_scale.tuning.training import is_network, is_small


def prepare_in_batches(
    prepare: Callable[[Data], Problem],
    data: Data,
    in_batches_of: Callable[[int], Data],
    tunes: bool,
) -> Problem:
    """The model on its data: in batches where it has many rows, and takes some at a time.

    Args:
        prepare: understands the model on some data.
        data: as they come: whole, or in a loader's batches.
        in_batches_of: the same, so many rows at a time.
        tunes: whether control variates and step size are to be chosen, too; if not, tensors are
            taken whole.
    """
    if data.batch_size is not None:  # a loader's
        return prepare(data)
    problem = None
    if tunes and (data.num_data or 0) > TRAINING.few_rows:
        problem = _prepared(prepare, in_batches_of, TRAINING.batch)
    problem = problem or prepare(data)
    num_data = problem.log_posterior.num_data
    size = TRAINING.network_batch
    if tunes and is_network(problem) and not is_small(problem) and num_data > size:
        problem = _prepared(prepare, in_batches_of, size) or problem
    # a model that subsamples by itself has batches of its own
    is_plain = isinstance(problem.data, TensorData)
    return dataclasses.replace(problem, chooses_batches=is_plain)


def _prepared(
    prepare: Callable[[Data], Problem], in_batches_of: Callable[[int], Data], size: int
) -> Problem | None:
    """The problem in batches of a size; None for a model of all rows together."""
    with contextlib.suppress(ModelError, ArgumentError):
        return prepare(in_batches_of(size))
    return None
