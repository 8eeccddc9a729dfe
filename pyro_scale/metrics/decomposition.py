"""Predictive uncertainty, split into aleatoric and epistemic parts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.special import entr

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks


class Uncertainty(NamedTuple):
    """Predictive uncertainty and its two parts, tensors of one shape.

    Attributes:
        total: uncertainty of the posterior predictive distribution, the sum of the parts.
        aleatoric: the part that remains if the parameters are known.
        epistemic: the part due to unknown parameters.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def uncertainty(probs: Tensor) -> Uncertainty:
    """The uncertainty of a classifier's predictions, by entropies in nats.

        total      H(E p), the entropy of the mean over draws
        aleatoric  E H(p), the mean over draws of the entropies
        epistemic  H(E p) - E H(p), the mutual information of label and parameters

    as in Depeweg et al. (2018) and Duffield et al. (2025), equation 2.  Each is between 0 and the
    log of the number of classes.

    Args:
        probs: probabilities of each draw, `[draws, ..., classes]`; they may be 0.

    Returns:
        Tensors `[...]`, in nats.

    Raises:
        ArgumentError: no draws dimension, or probabilities that do not sum to 1 over the classes.

    Examples:
        For the first row, two draws are certain of different classes; for the second, both draws
        give a half to each class:

        >>> import torch, pyro_scale as ps
        >>> certain, fair = torch.eye(2), torch.full((2, 2), 0.5)
        >>> ps.metrics.uncertainty(torch.stack([certain, fair], 1)).total
        tensor([0.6931, 0.6931])
        >>> ps.metrics.uncertainty(torch.stack([certain, fair], 1)).epistemic
        tensor([0.6931, 0.0000])
    """
    checks.floating(probs=probs)
    if probs.dim() < 2 or len(probs) == 0:
        raise ArgumentError(
            f"probs has shape {checks.shape(probs)}: pass [draws, ..., classes], of at least one "
            "draw; .softmax(-1) of logits, torch.stack([1 - p, p], -1) of Bernoulli probabilities p"
        )
    checks.distributions(probs)
    exact = probs.double()  # the difference of two entropies may be far smaller than they are
    parts = of_entropies(exact.mean(0), entr(exact).sum(-1).mean(0))
    return Uncertainty(*(part.to(probs.dtype) for part in parts))


def of_entropies(probs: Tensor, entropy: Tensor) -> Uncertainty:
    """The uncertainty of a classifier's predictions, tensors `[...]` in nats, from means over
    draws.

    Args:
        probs: mean over draws of the probabilities, `[..., classes]`.
        entropy: mean over draws of the entropy of the probabilities, in nats, `[...]`.
    """
    total = entr(probs).sum(-1)
    # entropy is concave, so only rounding makes the difference negative
    return Uncertainty(total, entropy, (total - entropy).clamp(min=0))


def variance(means: Tensor, variances: Tensor) -> Uncertainty:
    """The uncertainty of a regression's predictions, by the law of total variance.

        aleatoric  E v, the mean over draws of the variances
        epistemic  Var m, the variance over draws of the means
        total      their sum, the posterior predictive variance

    The variance over draws divides by their number, so the total is exactly the variance of the
    mixture of the draws' distributions.

    Args:
        means: predictive mean of each draw, `[draws, ...]`.
        variances: predictive variance of each draw, of the same shape.

    Returns:
        Tensors `[...]`, in squared units of the means.

    Raises:
        ArgumentError: different shapes, no draws, or negative variances.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> ps.metrics.variance(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 1.5]))
        Uncertainty(total=tensor(2.), aleatoric=tensor(1.), epistemic=tensor(1.))
    """
    checks.floating(means=means, variances=variances)
    if means.shape != variances.shape or means.dim() == 0 or len(means) == 0:
        raise ArgumentError(
            f"means has shape {checks.shape(means)} and variances {checks.shape(variances)}: pass "
            "[draws, ...] for both, of at least one draw, variances.expand_as(means) where all "
            "rows have the same"
        )
    if (variances < 0).any():
        raise ArgumentError("variances has negative values: pass variances, not their logs")
    aleatoric, epistemic = variances.mean(0), means.var(0, correction=0)
    return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)
