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

#: A prior as a user passes it to `bayesianize`.
WeightPrior = str | torch.distributions.Distribution | Callable[[str, Tensor], Any]


def weight_decay(decay: float, num_data: int) -> dist.Normal:
    """The prior that weight decay in training corresponds to: Normal(0, 1/sqrt(N decay)). The
    trained weights are a mode of the posterior with this prior.

    An optimizer's `weight_decay` adds decay/2 |w|² to the mean loss over rows, in nats; N times
    that is the prior's negative log density. This holds for the `weight_decay` of SGD and Adam,
    but not for that of AdamW, which is not part of the loss.

    Args:
        decay: the optimizer's `weight_decay`, above 0.
        num_data: N, the number of rows of the training data.

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
    """The priors of a network's chosen weights, by name: distributions of each weight's shape (as
    one event), dtype and device.

    Args:
        net: the network.
        names: names of the weights, as in `net.named_parameters()`.
        prior: the user's prior: a name such as "unit", a distribution of a scalar, or a function of
            a weight's name and the weight that returns a distribution (see `bayesianize`).

    Raises:
        ArgumentError: `prior` is not a prior, or the distribution that it returns does not fit a
            weight.
    """
    owners = {
        f"{path}.{name}".lstrip("."): module
        for path, module in net.named_modules(remove_duplicate=False)
        for name, _ in module.named_parameters(recurse=False)
    }
    priors = {}
    for name in names:
        weight = net.get_parameter(name)
        distribution = _distribution(owners[name], name, weight, prior)
        priors[name] = _fit_to(name, weight, distribution, prior)
    return priors


def prior_of_shard(net: nn.Module, name: str, prior: WeightPrior, local: Tensor) -> Any:
    """The prior of this process's part of a sharded weight: a distribution of the part's shape,
    dtype and device.

    Args:
        net: the sharded network.
        name: the weight's name.
        prior: the user's prior: a name such as "unit", a distribution of a scalar, or a function of
            a weight's name and the weight that returns a distribution (see `bayesianize`).
        local: the part of the weight that this process holds.

    Raises:
        ArgumentError: `prior` is not a prior, or is not the same for all elements of the weight.
    """
    owner = net.get_submodule(name.rpartition(".")[0])
    weight = net.get_parameter(name)
    # no process holds the whole weight
    like = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    try:
        distribution = _distribution(owner, name, like, prior)
    except (RuntimeError, NotImplementedError) as error:
        raise ArgumentError(
            f"prior={prior!r} reads the values of '{name}', which is sharded, so that they are "
            f"nowhere as a whole ({error}): use its shape alone"
        ) from error
    shape = getattr(distribution, "batch_shape", torch.Size())
    shape += getattr(distribution, "event_shape", ())
    if shape:
        raise ArgumentError(
            f"the prior of '{name}' has shape {list(shape)}: the weight is sharded, so pass one of "
            "a scalar, which is every element's"
        )
    return _fit_to(name, local, distribution, prior)


def _distribution(owner: nn.Module, name: str, weight: Tensor, prior: WeightPrior) -> Any:
    """The distribution that the user's `prior=` gives for one weight, before it is expanded to the
    weight's shape; None if `prior` is no prior.

    Args:
        owner: the module that has the weight.
        name: the weight's name in the network.
        weight: the weight.
        prior: the user's `prior=`.

    Raises:
        ArgumentError: `prior` is an unknown name.
    """
    if isinstance(prior, str):
        if prior not in _NAMED:
            raise ArgumentError(
                f"prior={prior!r}: pass one of {list(_NAMED)}, a distribution, or a function of a "
                "weight's name and the weight"
            )
        return _NAMED[prior](owner, name, weight)
    if isinstance(prior, torch.distributions.Distribution):
        return prior
    return prior(name, weight.detach()) if callable(prior) else None


def kaiming(owner: nn.Module, name: str, weight: Tensor) -> dist.Normal:
    """The prior `"kaiming"` of one weight, a distribution of a scalar. For matrices and convolution
    kernels, Normal(0, sqrt(2 / fan in)), with which a layer with ReLU keeps the scale of its input
    (He et al. 2015, equation 10). For scales of normalization layers, Normal(1, 1). For biases,
    embeddings and all else, Normal(0, 1)."""
    last_name, normalizes = name.rpartition(".")[2], "Norm" in type(owner).__name__
    if normalizes and last_name == "weight":
        return dist.Normal(1.0, 1.0)
    embeds = isinstance(owner, nn.Embedding | nn.EmbeddingBag)
    if weight.dim() < 2 or normalizes or embeds or "bias" in last_name:
        return dist.Normal(0.0, 1.0)
    return dist.Normal(0.0, math.sqrt(2 / _fan_in(owner, weight)))


def unit(owner: nn.Module, name: str, weight: Tensor) -> dist.Normal:
    """The prior `"unit"` of one weight, Normal(0, 1), whatever the weight: the scale of a weight is
    the unit of its layer's input."""
    return dist.Normal(0.0, 1.0)


_NAMED = {"kaiming": kaiming, "unit": unit}


def _fan_in(owner: nn.Module, weight: Tensor) -> float:
    """The number of inputs of one unit of a layer, on average where the number differs between
    units (strided transposed convolutions)."""
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):  # [in, out / groups, kernel]
        reached = weight[0, 0].numel() / math.prod(owner.stride)
        return max(1.0, weight.shape[0] // owner.groups * reached)
    if type(owner).__name__ == "Conv1D":  # Hugging Face's: a linear layer's weight, transposed
        return weight.shape[0]
    return weight[0].numel()


def _fit_to(name: str, weight: Tensor, distribution: Any, prior: WeightPrior) -> Any:
    """A prior expanded to a weight's shape (all dimensions one event), in its dtype and on its
    device.

    Args:
        name: the weight's name, for messages.
        weight: the weight.
        distribution: distribution of a scalar, or of the weight's shape.
        prior: the user's `prior=` that gave the distribution, for messages.

    Raises:
        ArgumentError: it is not a Pyro distribution, or has another shape.
    """
    if not isinstance(distribution, TorchDistributionMixin):
        source = f" gave {distribution!r} for '{name}'" if callable(prior) else ""
        raise ArgumentError(
            f"prior={prior!r}{source}: pass a distribution of Pyro's, such as dist.Normal(0.0, "
            "1.0), 'kaiming' or 'unit', or a function that returns a distribution for a weight's "
            "name and the weight"
        )
    shape = distribution.batch_shape + distribution.event_shape
    if shape == weight.shape and distribution.event_shape == shape:
        return _at(distribution, weight)
    if distribution.event_shape or shape not in (torch.Size(), weight.shape):
        raise ArgumentError(
            f"the prior of '{name}' has shape {list(shape)}: pass one of a scalar, which expands "
            f"to the weight's shape, {list(weight.shape)}, or one of that shape"
        )
    return _at(distribution, weight).expand(weight.shape).to_event(weight.dim())


def _at(distribution: Any, weight: Tensor) -> Any:
    """A copy of a distribution whose arguments have the dtype and device of a weight; the
    distribution itself if its constructor takes other arguments."""
    if isinstance(distribution, dist.Independent):
        return _at(distribution.base_dist, weight).to_event(distribution.reinterpreted_batch_ndims)
    arguments = {name: getattr(distribution, name, None) for name in distribution.arg_constraints}
    moved = {n: v.to(weight.detach()) for n, v in arguments.items() if isinstance(v, Tensor)}
    try:
        return type(distribution)(**moved)
    except (TypeError, ValueError):  # a distribution whose constructor takes other arguments
        return distribution
