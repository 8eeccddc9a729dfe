"""Scores of predictive class probabilities: accuracy, log score and Brier score."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import one_hot

from pyro_scale.metrics import checks


def accuracy(probs: Tensor, labels: Tensor) -> Tensor:
    """The accuracy: the fraction of rows whose most probable class (the first one, with ties) is
    the label.

    Args:
        probs: posterior predictive probabilities, the mean over draws, `[rows, classes]`.
        labels: class numbers from 0, integers `[rows]`.

    Returns:
        A scalar in [0, 1].

    Raises:
        ArgumentError: probabilities that have a draws dimension or do not sum to 1; labels that are
            not integers, out of range, or not one for each row.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> probs = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.7, 0.3], [0.9, 0.1]])
        >>> ps.metrics.accuracy(probs, torch.tensor([0, 1, 1, 0]))
        tensor(0.7500)
    """
    labels = checks.classes(probs, labels)
    return (probs.argmax(-1) == labels).to(probs.dtype).mean()


def nll(probs: Tensor, labels: Tensor) -> Tensor:
    """The mean negative log predictive probability of the labels, in nats per row; infinite if a
    label has probability 0.

    Args:
        probs: posterior predictive probabilities, the mean over draws, `[rows, classes]`.
        labels: class numbers from 0, integers `[rows]`.

    Returns:
        A scalar, at least 0.

    Raises:
        ArgumentError: as `accuracy`.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> ps.metrics.nll(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([1, 0]))
        tensor(0.3466)
    """
    labels = checks.classes(probs, labels)
    return -probs.gather(1, labels[:, None]).log().mean()


def brier(probs: Tensor, labels: Tensor) -> Tensor:
    """The Brier score: the mean over rows of the squared distance between the vector of
    probabilities and the one-hot label.

    Summed over all classes, as in Brier (1950): between 0 and 2, and for two classes twice the
    squared error of one probability.

    Args:
        probs: posterior predictive probabilities, the mean over draws, `[rows, classes]`.
        labels: class numbers from 0, integers `[rows]`.

    Returns:
        A scalar in [0, 2].

    Raises:
        ArgumentError: as `accuracy`.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> ps.metrics.brier(torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([1, 0]))
        tensor(1.2500)
    """
    labels = checks.classes(probs, labels)
    return (probs - one_hot(labels, probs.shape[1])).square().sum(-1).mean()
