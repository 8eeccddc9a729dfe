"""Nested R-hat, which tells whether many short chains have forgotten their starts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks


class Variances(NamedTuple):
    """The variance of draws, split into parts between superchains, between chains and within
    chains, for nested R-hat: tensors `[...]`, a number for each element of a draw.

    Attributes:
        superchains: variance between the means of superchains (groups of chains with the same
            start).
        chains: mean variance between the means of a superchain's chains; 0 for superchains of one
            chain.
        draws: mean variance between the draws of a chain; 0 for chains of one draw.
    """

    superchains: Tensor
    chains: Tensor
    draws: Tensor

    @property
    def nested_r_hat(self) -> Tensor:
        """Nested R-hat of the draws, `[...]`: sqrt(1 + superchains / (chains + draws))."""
        return (1 + self.superchains / (self.chains + self.draws)).sqrt()


def nested_r_hat(draws: Tensor, superchains: int) -> Tensor:
    """Nested R-hat of chains in superchains, groups of chains with the same start.

    sqrt(1 + B / W), with B the variance of the superchains' means, and W the mean over superchains
    of the variance between their chains' means plus that within chains (Margossian et al. 2024).
    R-hat asks whether each chain is long enough to estimate the mean.  Nested R-hat asks only
    whether the starts are forgotten, which many short chains can show, even with one draw each.  If
    they are, it is about sqrt(1 + 1/M) for M chains of one draw in a superchain, and less with more
    draws.

    Args:
        draws: draws, `[chains, draws, ...]`, with the chains of a superchain next to each other.
        superchains: number of superchains, K.

    Returns:
        Nested R-hat of each element, `[...]`, at least 1.

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
    return split_variance(draws, superchains).nested_r_hat


def split_variance(draws: Tensor, superchains: int) -> Variances:
    """The variance of draws, split into parts between superchains, between chains and within
    chains, `[...]` each.

    Args:
        draws: draws, `[chains, draws, ...]`, with the chains of a superchain next to each other.
        superchains: number of superchains, groups of as many chains each with the same start.
    """
    chains, count = len(draws) // superchains, draws.shape[1]
    grouped = draws.unflatten(0, (superchains, chains))
    means = grouped.mean(2)
    between = means.mean(1).var(0)
    return Variances(
        superchains=between,
        chains=means.var(1).mean(0) if chains > 1 else 0 * between,
        draws=grouped.var(2).mean((0, 1)) if count > 1 else 0 * between,
    )
