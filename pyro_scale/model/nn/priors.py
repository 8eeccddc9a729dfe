"""Priors of a network's weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn

from pyro_scale.errors import ArgumentError

#: What `bayesianize` takes for a prior.
WeightPrior = str | torch.distributions.Distribution | Callable[[str, Tensor], Any]


def weight_decay(decay: float, num_data: int) -> dist.Normal:
    """The prior whose mode is what training with weight decay finds: Normal(0, 1/sqrt(N decay)).

    An optimizer's `weight_decay` adds decay/2 |w|² to the mean loss over rows, in nats; N times
    that is the prior's negative log density.  That is so for SGD's and for Adam's, and not for
    AdamW's, which is no part of the loss.

    Args:
        decay: the optimizer's `weight_decay`, above 0.
        num_data: N, the rows that it was trained on.

    Raises:
        ArgumentError: a value that is not above 0.

    Examples:
        >>> import pyro_scale as ps
        >>> float(ps.weight_decay(1e-4, num_data=10_000).scale)
        1.0
    """
    for name, value in {"decay": decay, "num_data": num_data}.items():
        if not value > 0:
            raise ArgumentError(f"weight_decay: {name}={value!r} must be above 0")
    return dist.Normal(0.0, (decay * num_data) ** -0.5)


def priors_of(net: nn.Module, names: list[str], prior: WeightPrior) -> dict[str, Any]:
    """Each weight's prior, of its shape, dtype and device.

    Raises:
        ArgumentError: `prior` is no prior, or what it gives for a weight does not fit it.
    """
    owners = {
        f"{path}.{name}".lstrip("."): module
        for path, module in net.named_modules(remove_duplicate=False)
        for name, _ in module.named_parameters(recurse=False)
    }
    priors = {}
    for name in names:
        weight = net.get_parameter(name)
        given = _given(owners[name], name, weight, prior)
        priors[name] = _fit_to(name, weight, given, prior)
    return priors


def prior_of_shard(net: nn.Module, name: str, prior: WeightPrior, local: Tensor) -> Any:
    """The prior of a part of a sharded weight, of the part's shape, dtype and device.

    Raises:
        ArgumentError: `prior` is no prior, or not the same one for all elements.
    """
    owner = net.get_submodule(name.rpartition(".")[0])
    weight = net.get_parameter(name)
    like = torch.empty(weight.shape, dtype=weight.dtype, device="meta")  # it is whole nowhere
    try:
        given = _given(owner, name, like, prior)
    except (RuntimeError, NotImplementedError) as error:
        raise ArgumentError(
            f"prior={prior!r} reads the values of '{name}', which is sharded, so that they are "
            f"nowhere as a whole ({error}): use its shape alone"
        ) from error
    shape = getattr(given, "batch_shape", torch.Size()) + getattr(given, "event_shape", ())
    if shape:
        raise ArgumentError(
            f"the prior of '{name}' has shape {list(shape)}: the weight is sharded, so pass one of "
            "a scalar, which is every element's"
        )
    return _fit_to(name, local, given, prior)


def _given(owner: nn.Module, name: str, weight: Tensor, prior: WeightPrior) -> Any:
    """What a user has passed for a weight."""
    if isinstance(prior, str):
        return _describe(prior)(owner, name, weight)
    if isinstance(prior, torch.distributions.Distribution):
        return prior
    return prior(name, weight.detach()) if callable(prior) else None


def kaiming(owner: nn.Module, name: str, weight: Tensor) -> dist.Normal:
    """Matrices and kernels: Normal(0, sqrt(2 / fan in)), which keeps the scale of what goes
    through a layer with ReLU (He et al. 2015, equation 10).  Scales of normalization layers:
    Normal(1, 1).  Biases, embeddings and all else: Normal(0, 1)."""
    own_name, normalizes = name.rpartition(".")[2], "Norm" in type(owner).__name__
    if normalizes and own_name == "weight":
        return dist.Normal(1.0, 1.0)
    embeds = isinstance(owner, nn.Embedding | nn.EmbeddingBag)
    if weight.dim() < 2 or normalizes or embeds or "bias" in own_name:
        return dist.Normal(0.0, 1.0)
    return dist.Normal(0.0, math.sqrt(2 / _fan_in(owner, weight)))


def unit(owner: nn.Module, name: str, weight: Tensor) -> dist.Normal:
    """Normal(0, 1), in which a weight is in the unit of its layer's input."""
    return dist.Normal(0.0, 1.0)


_NAMED = {"kaiming": kaiming, "unit": unit}


def _describe(prior: str) -> Callable[[nn.Module, str, Tensor], dist.Normal]:
    if prior not in _NAMED:
        raise ArgumentError(
            f"prior={prior!r}: pass one of {list(_NAMED)}, a distribution, or a function of a "
            "weight's name and the weight"
        )
    return _NAMED[prior]


def _fan_in(owner: nn.Module, weight: Tensor) -> float:
    """How many inputs a unit of a layer has, on average."""
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):  # [in, out / groups, kernel]
        reached = weight[0, 0].numel() / math.prod(owner.stride)
        return max(1.0, weight.shape[0] // owner.groups * reached)
    if type(owner).__name__ == "Conv1D":  # of Hugging Face: a linear layer's, transposed
        return weight.shape[0]
    return weight[0].numel()


def _fit_to(name: str, weight: Tensor, given: Any, prior: WeightPrior) -> Any:
    """A prior as one of the weight's shape, dtype and device."""
    if not isinstance(given, TorchDistributionMixin):
        source = f" gave {given!r} for '{name}'" if callable(prior) else ""
        raise ArgumentError(
            f"prior={prior!r}{source}: pass a distribution of Pyro's, such as dist.Normal(0.0, "
            "1.0), 'kaiming' or 'unit', or a function that returns a distribution for a weight's "
            "name and the weight"
        )
    shape = given.batch_shape + given.event_shape
    if shape == weight.shape and given.event_shape == shape:
        return _at(given, weight)
    if given.event_shape or shape not in (torch.Size(), weight.shape):
        raise ArgumentError(
            f"the prior of '{name}' has shape {list(shape)}: pass one of a scalar, which expands "
            f"to the weight's shape, {list(weight.shape)}, or one of that shape"
        )
    return _at(given, weight).expand(weight.shape).to_event(weight.dim())


def _at(given: Any, weight: Tensor) -> Any:
    """A distribution with its arguments in a weight's dtype and on its device."""
    if isinstance(given, dist.Independent):
        return _at(given.base_dist, weight).to_event(given.reinterpreted_batch_ndims)
    arguments = {name: getattr(given, name, None) for name in given.arg_constraints}
    moved = {n: v.to(weight.detach()) for n, v in arguments.items() if isinstance(v, Tensor)}
    try:
        return type(given)(**moved)
    except (TypeError, ValueError):  # a distribution whose constructor takes other arguments
        return given
