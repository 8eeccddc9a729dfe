"""Chances of classes under Gaussian logits, by the probit approximation: logits are divided by
sqrt(1 + pi/8 times their variance) (MacKay 1992)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, OneHotCategorical
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pyro_scale.curvature import fisher
from pyro_scale.errors import ArgumentError
from pyro_scale.model.sites import Site
from pyro_scale.posterior.draws import in_chunks
from pyro_scale.posterior.gaussians import Fit

#: Axes of a Gaussian that are written out together.
_AXES = 256


def check_probit(sites: Sequence[Site]) -> None:
    """Refuses sites that are not of classes.

    Raises:
        ArgumentError: it names the site.
    """
    for site in sites:
        base = fisher.base_of(site.fn)
        if not isinstance(base, Bernoulli | Categorical | OneHotCategorical):
            raise ArgumentError(
                f"linearized='probit': site '{site.name}' is a {type(base).__name__}, and the "
                "approximation is for Bernoulli and Categorical ones: pass linearized=True"
            )


def shrink(logits: Tensor, variance: Tensor) -> Tensor:
    """The logits of the predictive distribution."""
    return logits / (1 + math.pi / 8 * variance).sqrt()


def sum_of_squares(change: Callable[[Tensor], Any], fit: Fit, start: int) -> Any:
    """The variances of what is linear in the params.

    Args:
        change: of a pytree of tensors with the params, [D].
        fit: of one of whose Gaussians they are the variances.
        start: of which.
    """
    center, size, total = fit.centers[start], len(fit.places), None
    axes = torch.arange(size).split(_AXES)
    noise = (torch.nn.functional.one_hot(some, size).to(center) for some in axes)
    for found in in_chunks(change, (fit.at(start, some) - center for some in noise)):
        own = pytree.tree_map(lambda x: x.square().sum(0), found)
        total = own if total is None else pytree.tree_map(torch.add, total, own)
    return total


class GivenLogits(TorchFunctionMode):
    """Remembers the logits that a softmax was given, of which `Categorical` keeps no more than
    logits - logsumexp(logits): what is common to all classes changes no chance, but it does change
    variances."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._given: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor, whose id it keeps

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name == "logsumexp":
            self._sums[id(out)] = out, args[0]
        elif name in ("sub", "__sub__"):
            _, summed = self._sums.get(id(args[1]), (None, None))
            if summed is args[0]:
                self._given[id(out)] = out, summed
        elif name == "expand" and id(args[0]) in self._given:
            _, given = self._given[id(args[0])]
            self._given[id(out)] = out, given
        return out

    def arguments(self, site: Site) -> dict[str, Tensor]:
        """The arguments of a site's distribution, with the logits that it was given."""
        base = fisher.base_of(site.fn)
        arguments = dict(fisher.own_arguments(base))
        if isinstance(base, Categorical | OneHotCategorical) and "logits" in arguments:
            logits = base.logits
            _, given = self._given.get(id(logits), (logits, logits))
            arguments["logits"] = given.expand_as(arguments["logits"])
        return arguments
