"""Draws of families for which torch's own samplers take longer than the network before them."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor

_BERNOULLI = dist.Bernoulli, torch.distributions.Bernoulli
_CATEGORICAL = dist.Categorical, torch.distributions.Categorical
_WRAPPERS = torch.distributions.Independent, MaskedDistribution


def draw(fn: Any) -> Tensor | None:
    """A draw from torch's generator, by one uniform number and the distribution function; None of
    families that torch draws as fast.

    The uniform numbers have 24 bits at least, so a chance is right to 6e-8.

    Args:
        fn: a distribution, of which it is one draw, `batch_shape + event_shape`.
    """
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    with torch.no_grad():
        if type(fn) in _BERNOULLI:
            return (_uniform(fn.probs) < fn.probs).to(fn.probs)
        if type(fn) in _CATEGORICAL:
            probs = class_probs(fn)
            below = probs.cumsum(-1, dtype=_at_least_single(probs))
            place = _uniform(below[..., -1]) * below[..., -1]  # the last is 1 but for rounding
            return (place[..., None] >= below[..., :-1]).sum(-1)
    return None


def class_probs(fn: Any) -> Tensor:
    """A Categorical's probabilities, `[..., classes]`: of logits, which it holds normalized, ten
    times as fast as the softmax of them once more."""
    probs: Tensor = fn.probs if "probs" in vars(fn) else fn.logits.exp()
    return probs


def _uniform(like: Tensor) -> Tensor:
    return torch.rand(like.shape, dtype=_at_least_single(like), device=like.device)


def _at_least_single(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
