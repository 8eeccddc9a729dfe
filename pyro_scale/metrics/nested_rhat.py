"""Nested R-hat: whether many short chains have forgotten where they started."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks


class Variances(NamedTuple):
    """What draws' variance is made of, tensors of one shape.

    Attributes:
        superchains: between the superchains' means.
        chains: between chains' means within a superchain, on average; 0 for one chain each.
        draws: between draws within a chain, on average; 0 for one draw each.
    """

    superchains: Tensor
    chains: Tensor
    draws: Tensor


def nested_r_hat(draws: Tensor, superchains: int) -> Tensor:
    """Nested R-hat of chains of which groups, the superchains, have a start in common.

    sqrt(1 + B / W), B the variance of the superchains' means, W the mean over superchains of the
    variance between their chains' means plus that within chains (Margossian et al. 2024).  R-hat
    asks whether each chain is long enough to give the mean; this asks only whether the starts are
    forgotten, which many short chains can show, of one draw even.  Where they are forgotten it is
    about sqrt(1 + 1/M) for M chains a superchain of one draw, and less the more draws there are.

    Args:
        draws: `[chains, draws, ...]`, the chains of a superchain next to each other.
        superchains: how many there are, K.

    Returns:
        `[...]`, at least 1.

    Raises:
        ArgumentError: K below 2, or that does not divide the number of chains; chains of one draw
            in superchains of one chain; NaN or infinite draws.

    Examples:
        Two starts, two chains from each of them, three draws; the second start is not forgotten:

        >>> import torch, pyro_scale as ps
        >>> draws = torch.tensor([[0., 1., 2.], [1., 2., 0.], [9., 8., 7.], [7., 8., 9.]])
        >>> ps.metrics.nested_r_hat(draws, superchains=2)
        tensor(5.0498)
    """
    checks.floating(draws=draws)
    if draws.dim() < 2:
        raise ArgumentError(
            f"draws has shape {checks.shape(draws)}: pass [chains, draws, ...], draws[:, None] of "
            "one draw a chain"
        )
    checks.finite(draws=draws)
    if type(superchains) is not int or superchains < 2 or len(draws) % superchains:
        raise ArgumentError(
            f"superchains={superchains!r} of {len(draws)} chains: pass how many groups of as many "
            "chains each share a start, 2 or more"
        )
    if len(draws) == superchains and draws.shape[1] == 1:
        raise ArgumentError(
            f"superchains={superchains}: one draw of one chain has no variance; pass more draws, "
            "or more chains that share a start"
        )
    return r_hat_of(variances(draws, superchains))


def r_hat_of(parts: Variances) -> Tensor:
    """Nested R-hat, given what the variance is made of."""
    return (1 + parts.superchains / (parts.chains + parts.draws)).sqrt()


def variances(draws: Tensor, superchains: int) -> Variances:
    """The parts that nested R-hat is made of, for the same arguments."""
    chains, count = len(draws) // superchains, draws.shape[1]
    grouped = draws.unflatten(0, (superchains, chains))
    means = grouped.mean(2)
    between = means.mean(1).var(0)
    return Variances(
        superchains=between,
        chains=means.var(1).mean(0) if chains > 1 else 0 * between,
        draws=grouped.var(2).mean((0, 1)) if count > 1 else 0 * between,
    )
