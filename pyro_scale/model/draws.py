"""Draws from distributions whose torch samplers are slow or raise errors."""

from __future__ import annotations

import copy
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_scale.model.sites import base_distribution

_BERNOULLI = dist.Bernoulli, torch.distributions.Bernoulli
_CATEGORICAL = dist.Categorical, torch.distributions.Categorical
_MULTINOMIAL = dist.Multinomial, torch.distributions.Multinomial


def draw(fn: Any, observed: Tensor | None = None) -> Tensor | None:
    """One draw from a distribution of a family that torch draws slowly (Bernoulli, Categorical), or
    whose totals differ by row (Multinomial, DirichletMultinomial); None for other families.

    Uses torch's generator. Bernoulli and Categorical compare one uniform number with the
    distribution function; it has 24 bits at least, so probabilities are right to 6e-8.

    Args:
        fn: a distribution; the draw has its shape, `batch_shape + event_shape`.
        observed: observed counts, from which a `Multinomial` takes its totals, as its density does;
            None if there are none.
    """
    fn = base_distribution(fn)
    with torch.no_grad():
        if type(fn) in _BERNOULLI:
            return (_uniform(fn.probs) < fn.probs).to(fn.probs)
        if type(fn) in _CATEGORICAL:
            probs = class_probs(fn)
            below = probs.cumsum(-1, dtype=_at_least_single(probs))
            place = _uniform(below[..., -1]) * below[..., -1]  # the last is 1 up to rounding
            return (place[..., None] >= below[..., :-1]).sum(-1)
        if type(fn) is dist.DirichletMultinomial:
            totals = fn.total_count if observed is None else _totals(fn, observed)
            return _counts(totals, torch._sample_dirichlet(fn.concentration))  # vmap takes it
        if type(fn) in _MULTINOMIAL and observed is not None:
            return _counts(_totals(fn, observed), fn.probs)
    return None


def draws(fn: Any, count: int, observed: Tensor | None = None) -> Tensor:
    """`count` independent draws from a distribution of any family, `[count, *batch_shape,
    *event_shape]`.

    Args:
        fn: the distribution.
        count: number of draws.
        observed: observed counts, from which a `Multinomial` takes its totals, as its density does;
            None if there are none.
    """
    if isinstance(base_distribution(fn), (dist.DirichletMultinomial, *_MULTINOMIAL)):
        counts = draw(fn.expand(torch.Size((count, *fn.batch_shape))), observed)
        if counts is not None:
            return counts
    return fn.sample((count,))


def with_totals(base: Any, observed: Tensor) -> Any:
    """A copy of a Multinomial or DirichletMultinomial whose totals are those of observed counts,
    since its density ignores `total_count`: rows may have different totals. Other distributions are
    returned as they are.

    Args:
        base: the distribution.
        observed: observed counts, `[..., classes]`.
    """
    if isinstance(base, (dist.DirichletMultinomial, *_MULTINOMIAL)):
        base = copy.copy(base)
        base.total_count = observed.sum(-1).expand(base.batch_shape)
    return base


def cannot_draw(site: str, fn: Any, error: NotImplementedError) -> str:
    """The message for the error about a site that cannot be simulated, because its distribution has
    no `sample` method; `error` is what `sample` raised.
    """
    why = f" ({error})" if str(error) else ""
    family = type(base_distribution(fn)).__name__
    return f"site '{site}': a {family} cannot be drawn{why}: give its class a sample() method"


def class_probs(fn: Any) -> Tensor:
    """A Categorical's probabilities, `[..., classes]`. Its logits are normalized, so their exp is
    enough, and ten times as fast as the softmax of `fn.probs`."""
    probs: Tensor = fn.probs if "probs" in vars(fn) else fn.logits.exp()
    return probs


def _totals(fn: Any, observed: Tensor) -> Tensor:
    """Totals of observed counts, summed over classes; the distribution's `total_count` where a
    count is NaN, as under a mask: torch's binomial never returns from NaN."""
    totals = observed.sum(-1)
    return torch.where(totals.isnan(), fn.total_count, totals)


def _counts(totals: Tensor, probs: Tensor) -> Tensor:
    """Multinomial draws `[..., classes]` from totals `[...]` and probabilities `[..., classes]`,
    each with its own total: class by class, binomial conditional on the earlier classes."""
    remaining = totals + torch.zeros_like(probs[..., 0])
    tails = probs.flip(-1).cumsum(-1).flip(-1)
    columns = []
    for prob, tail in zip(probs.unbind(-1)[:-1], tails.unbind(-1)[:-1], strict=True):
        chance = torch.where(tail > 0, prob / tail, 0).clamp(0, 1)
        columns.append(torch.binomial(remaining, chance))
        remaining = remaining - columns[-1]
    return torch.stack([*columns, remaining], -1)


def _uniform(like: Tensor) -> Tensor:
    return torch.rand(like.shape, dtype=_at_least_single(like), device=like.device)


def _at_least_single(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
