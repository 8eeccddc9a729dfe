"""Layers that normalize a row by itself, in place of BatchNorm."""

from __future__ import annotations

import copy
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.model.guards import describe

#: Layers that can replace BatchNorm.
Normalization = Literal["group", "filter_response"]

#: The most groups of channels (Wu and He 2018).
_MOST_GROUPS = 32
#: The fewest channels of a group: a group of one number would be normalized to 0.
_FEWEST_CHANNELS = 4


class FilterResponseNorm(nn.Module):
    """Filter response normalization (Singh and Krishnan 2020, equations 1 to 3), without the
    thresholded activation that they put after it.

    Every channel of every row is divided by its root mean square over the positions.

    Args:
        num_channels: number of channels of the input `[rows, channels, *positions]`.
        eps: constant that is added to the mean square.
    """

    def __init__(self, num_channels: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        """The normalized input, scaled and shifted by channel, of the input's shape `[rows,
        channels, *positions]`."""
        positions = tuple(range(2, x.dim()))
        mean_square = x.square().mean(positions, keepdim=True)
        shape = (-1,) + (1,) * len(positions)
        scaled = x * torch.rsqrt(mean_square + self.eps)
        return self.weight.view(shape) * scaled + self.bias.view(shape)

    def reset_parameters(self) -> None:
        """Sets all channels' scales to 1 and biases to 0, in place."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)


def replace_batchnorm(net: nn.Module, by: Normalization = "group") -> nn.Module:
    """A copy of a network with other normalization layers in place of BatchNorm, which in train
    mode makes the likelihood of a row depend on the other rows of its batch.

    The new layers keep the scales and biases of the old ones, but not their running statistics:
    train a pretrained network a little more, or keep its BatchNorm in `.eval()`.

    Args:
        net: any module; it is not changed.
        by: the new layers: `"group"`, GroupNorm in up to 32 groups of four channels or more, and in
            one group for BatchNorm1d, whose input may have one number per channel;
            `"filter_response"`, FilterResponseNorm, for layers with positions (convolutions).

    Raises:
        ArgumentError: `net` is no module, or `by` is unknown.
        ModelError: there is no BatchNorm, or one without positions is to be FilterResponseNorm.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8))
        >>> type(ps.replace_batchnorm(net)[1]).__name__
        'GroupNorm'
    """
    if not isinstance(net, nn.Module):
        raise ArgumentError(f"replace_batchnorm takes an nn.Module, not {type(net).__name__}")
    if by not in get_args(Normalization):
        raise ArgumentError(f"by={by!r}: pass one of {get_args(Normalization)}")
    if isinstance(net, nn.modules.batchnorm._BatchNorm):
        return _replacement("", net, by)
    net = copy.deepcopy(net)
    new: dict[int, nn.Module] = {}  # by the old layer's id: it may be used twice
    for path, module in list(net.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if id(module) not in new:
                new[id(module)] = _replacement(path, module, by)
            parent, _, name = path.rpartition(".")
            setattr(net.get_submodule(parent), name, new[id(module)])
    if not new:
        raise ModelError(f"{type(net).__name__} has no BatchNorm to be replaced")
    return net


def _replacement(path: str, old: nn.modules.batchnorm._BatchNorm, by: Normalization) -> nn.Module:
    channels = old.num_features
    new: nn.GroupNorm | FilterResponseNorm
    if by == "group":
        groups = 1 if isinstance(old, nn.BatchNorm1d) else _groups(channels)
        new = nn.GroupNorm(groups, channels, eps=old.eps, affine=old.affine)
    elif isinstance(old, nn.BatchNorm1d):
        raise ModelError(
            f"{describe(path, old)} may have one value per channel, which FilterResponseNorm "
            "reduces to its sign: pass by='group'"
        )
    else:
        new = FilterResponseNorm(channels)
    if old.affine:
        new.to(old.weight)
        new.load_state_dict({"weight": old.weight, "bias": old.bias})
        new.weight.requires_grad_(old.weight.requires_grad)
        new.bias.requires_grad_(old.bias.requires_grad)
    return new.train(old.training)


def _groups(channels: int) -> int:
    """The largest number of groups of equal size into which GroupNorm may divide this many
    channels: at most 32, of at least four channels each (of all channels if there are fewer)."""
    sizes = range(min(_FEWEST_CHANNELS, channels), channels + 1)
    return next(channels // n for n in sizes if channels % n == 0 and channels // n <= _MOST_GROUPS)
