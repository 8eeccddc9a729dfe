"""Predictive uncertainty, split into noise of the data and doubt of the posterior."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.special import entr

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks


class Uncertainty(NamedTuple):
    """A predictive uncertainty and its two parts, tensors of one shape.

    Attributes:
        total: of the posterior predictive distribution; the sum of the parts.
        aleatoric: the part that stays when the parameters are known.
        epistemic: the part that comes from not knowing the parameters.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def uncertainty(probs: Tensor) -> Uncertainty:
    """Entropies of a classifier's predictions, in nats.

        total      H(E p), the entropy of the mean over draws
        aleatoric  E H(p), the mean over draws of the entropies
        epistemic  H(E p) - E H(p), the mutual information of label and parameters

    as in Depeweg et al. (2018) and Duffield et al. (2025), equation 2.  All are at least 0 and at
    most the log of the number of classes.

    Args:
        probs: each draw's probabilities, `[draws, ..., classes]`; they may be 0.

    Returns:
        Tensors `[...]`, in nats.

    Raises:
        ArgumentError: no draws dimension, or what does not sum to 1 over the classes.

    Examples:
        Two draws that are certain of different classes, and two that know of a fair coin:

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
    exact = probs.double()  # the difference of the two may be far smaller than they are
    parts = of_entropies(exact.mean(0), entr(exact).sum(-1).mean(0))
    return Uncertainty(*(part.to(probs.dtype) for part in parts))


def of_entropies(probs: Tensor, entropy: Tensor) -> Uncertainty:
    """The same, given the means over draws of the probabilities `[..., classes]` and of their
    entropies `[...]`."""
    total = entr(probs).sum(-1)
    # an entropy is concave, so only rounding makes the difference negative
    return Uncertainty(total, entropy, (total - entropy).clamp(min=0))


def variance(means: Tensor, variances: Tensor) -> Uncertainty:
    """Variances of a regression's predictions, by the law of total variance.

        aleatoric  E v, the mean over draws of the variances
        epistemic  Var m, the variance over draws of the means
        total      their sum, the posterior predictive variance

    The variance over draws divides by their number, so that the total is that of the mixture of
    the draws, exactly.

    Args:
        means: each draw's predictive mean, `[draws, ...]`.
        variances: each draw's predictive variance, of the same shape.

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
