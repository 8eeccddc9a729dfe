"""Checks of the arguments of metrics, which raise an ArgumentError that names the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError

#: Largest distance of a sum of probabilities from 1: the root of float32's precision, because
#: float64 often holds results of float32.  Logits are much further from 1.
_SUM_TOLERANCE = 3e-4


def floating(**tensors: Tensor) -> None:
    """Raises an ArgumentError unless all arguments are tensors of float32 or float64: half
    precision would lose differences of entropies, and integers are no probabilities."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(
                f"{name} is a {type(value).__name__}: pass a tensor, torch.as_tensor({name})"
            )
        if value.dtype not in (torch.float32, torch.float64):
            raise ArgumentError(f"{name} is {value.dtype}: pass float32 or float64, {name}.float()")


def finite(**tensors: Tensor) -> None:
    """Raises an ArgumentError for an argument that is empty, or contains NaN or infinite
    numbers."""
    for name, value in tensors.items():
        if value.numel() == 0:
            raise ArgumentError(f"{name} is empty, {shape(value)}: pass at least one row")
        if not value.isfinite().all():
            raise ArgumentError(f"{name} has NaN or infinite values: leave their rows out")


def distributions(probs: Tensor) -> None:
    """Raises an ArgumentError unless `probs` are probabilities of classes, `[..., classes]`: float,
    at least 0, with sum 1 over the last dimension."""
    floating(probs=probs)
    totals = probs.sum(-1)
    if not ((totals - 1).abs() <= _SUM_TOLERANCE).all() or (probs < 0).any():
        raise ArgumentError(
            "probs must be >= 0 and sum to 1 over the classes, its last dimension, but sums lie in "
            f"[{float(totals.min()):.4g}, {float(totals.max()):.4g}]: take .softmax(-1) of logits, "
            "torch.stack([1 - p, p], -1) of Bernoulli probabilities p"
        )


def classes(probs: Tensor, labels: Tensor) -> Tensor:
    """The labels as int64 `[rows]`, after checks.

    Args:
        probs: predictive probabilities, `[rows, classes]`.
        labels: class numbers from 0, integers `[rows]`.

    Raises:
        ArgumentError: probabilities that have a draws dimension or do not sum to 1; labels that are
            not integers, out of range, or not one for each row.
    """
    floating(probs=probs)
    if probs.dim() == 3:
        raise ArgumentError(
            f"probs has shape {shape(probs)}, one prediction a draw: pass [rows, classes], "
            "the posterior predictive probabilities probs.mean(0)"
        )
    if probs.dim() != 2 or probs.numel() == 0:
        raise ArgumentError(
            f"probs has shape {shape(probs)}: pass [rows, classes], of at least one row, "
            "torch.stack([1 - p, p], -1) of Bernoulli probabilities p [rows]"
        )
    distributions(probs)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise ArgumentError(f"labels is {kind}: pass a tensor of class numbers, labels.long()")
    if labels.shape != probs.shape[:1]:
        raise ArgumentError(
            f"labels has shape {shape(labels)}: pass one class number a row, [{len(probs)}]"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= probs.shape[1]:
        raise ArgumentError(
            f"labels lie in [{low}, {high}], but probs has the classes 0 to {probs.shape[1] - 1}: "
            "count classes from 0, and leave rows of other classes out"
        )
    return labels.long()


def shape(value: Tensor) -> list[int]:
    """The shape of a tensor as a list, as messages show it."""
    return list(value.shape)
