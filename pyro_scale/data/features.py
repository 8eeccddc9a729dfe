"""Batches whose rows pass through a function, such as the frozen layers of a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments, PerStep, Source
from pyro_scale.data.batches import Batch, Batches
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.data.sources import Data, TensorData

#: Arguments of a batch -> its features, tensors `[B, ...]`.
Features = Callable[[Arguments], tuple[Tensor, ...]]


def table_of(data: TensorData, features: Features, batch_size: int) -> TensorData:
    """The features of all rows (such as outputs of a network's frozen layers), computed now and
    kept in memory as a data set in place of the rows: one tensor `[N, ...]` for each feature.

    Args:
        data: the rows.
        features: function from a batch's arguments to its features, a tuple of tensors `[B, ...]`.
        batch_size: B, the only batch size at which `features` is called.
    """
    num_rows = rows.count(data.arguments) or 0
    parts = []
    for start in range(0, num_rows, batch_size):
        begin = min(start, num_rows - batch_size)  # the last block overlaps the one before
        block = features(rows.take(data.arguments, slice(begin, begin + batch_size)))
        parts.append([feature[start - begin :].clone() for feature in block])
    table = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    return TensorData(table, data.num_data, data.batch_size)


@dataclass(frozen=True)
class FeatureData:
    """Data whose minibatches are features of rows (such as outputs of a network's frozen layers),
    computed whenever a minibatch is read.

    Attributes:
        data: the rows.
        features: function from a batch's arguments to its features, a tuple of tensors `[B, ...]`.
    """

    data: Data
    features: Features

    def batches(
        self, seed: int, num_chains: int, sampling: Sampling, chains: Sequence[int] | None = None
    ) -> Batches:
        batches = self.data.batches(seed, num_chains, sampling, chains)
        return FeatureBatches(batches, self.features)


@dataclass(frozen=True)
class FeatureBatches:
    """Minibatches of features (such as outputs of a network's frozen layers), computed from
    minibatches of rows when they are taken.

    Attributes:
        batches: minibatches of rows.
        features: function from a batch's arguments to its features, a tuple of tensors `[B, ...]`.
        fixed: empty, since no part of the features is shared by all steps.
    """

    batches: Batches
    features: Features
    fixed: Any = ()

    def of_rows(self, part: slice) -> FeatureBatches:
        return FeatureBatches(self.batches.of_rows(part), self.features)

    def take(self, start: int, stop: int, out: Any = None) -> Any:
        changing = self.batches.take(start, stop)
        steps = [self._of_step(changing, place) for place in range(stop - start)]
        return [torch.stack(column, 1) for column in zip(*steps, strict=True)]

    def batch(self, fixed: Any, changing: Any) -> Batch:
        return Batch(tuple(changing), per_chain=True)

    def sources(self, changing: Any) -> list[Source]:
        return [PerStep(leaf) for leaf in changing]

    def position(self, step: int) -> Any:
        return self.batches.position(step)

    def seek(self, step: int, position: Any) -> None:
        self.batches.seek(step, position)

    def _of_step(self, changing: Any, place: int) -> list[Tensor]:
        """The features of one step's minibatches: a list with a tensor `[chains, B, ...]` for each
        feature.

        Args:
            changing: indices or rows of several steps, `[chains, steps, ...]`, as `take` of the
                minibatches of rows returns them.
            place: index of the step among these steps.
        """
        drawn = pytree.tree_map(lambda leaf: leaf[:, place], changing)
        batch = self.batches.batch(self.batches.fixed, drawn)
        chains = range(len(batch.tensors[0]))
        features = [self.features(batch.of_chain(chain)[0]) for chain in chains]
        return [torch.stack(column) for column in zip(*features, strict=True)]
