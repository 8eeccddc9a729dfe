"""Latents with elements that a mask leaves out and nothing depends on: these have no density.

Pyro's `obs_mask=` makes such latents: in `y_unobserved`, the elements that were observed. Such
elements are not params; the latent's value is assembled from the params of the other elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import transform_to

from pyro_scale.model.sites import Site, base_distribution
from pyro_scale.model.terms import align
from pyro_scale.model.transforms import bijection, is_real


class Kept(NamedTuple):
    """The elements of a latent that are unconstrained parameters, for a latent some of whose
    elements are left out by masks and so do not count.

    Attributes:
        places: indices of the k params among all elements of the latent, flattened, `[k]`.
        shape: shape of all elements: the batch shape, with `to_event` undone.
    """

    places: Tensor
    shape: torch.Size

    @classmethod
    def from_mask(cls, mask: Tensor) -> Kept:
        """A `Kept` with the elements at which a boolean mask is True. The mask has the shape of all
        the latent's elements (its batch shape).
        """
        return cls(mask.flatten().nonzero()[:, 0], mask.shape)

    @property
    def mask(self) -> Tensor:
        """A boolean mask of the shape of all the latent's elements: True at those that are params,
        False at those that masks leave out.
        """
        mask = torch.zeros(self.shape.numel(), dtype=torch.bool, device=self.places.device)
        return mask.index_fill(0, self.places, True).reshape(self.shape)


def element_mask(site: Site) -> Tensor | None:
    """All masks around a site (`poutine.mask`, `.mask()`) combined into one boolean tensor: True at
    elements that count, of the batch shape that its distribution has with `to_event` undone. None
    if no mask is a tensor.
    """
    fn: Any = site.fn
    shape = base_distribution(fn).batch_shape
    masks = [(site.mask, len(fn.batch_shape))]
    while isinstance(fn, dist.Independent | dist.MaskedDistribution):
        masks.append((getattr(fn, "_mask", None), len(fn.batch_shape)))
        fn = fn.base_dist
    tensors = [align(mask, len(shape) - dims) for mask, dims in masks if isinstance(mask, Tensor)]
    if not tensors:
        return None
    return torch.stack([mask.expand(shape) for mask in tensors]).all(0)


def without_nan(site: Site) -> Site:
    """A copy of a site whose NaN values under a mask are replaced by a value in the support: the
    gradient of a log density at NaN is NaN, even if the density is multiplied by 0. The site itself
    if it has no mask."""
    mask, event = element_mask(site), len(base_distribution(site.fn).event_shape)
    if mask is None or not site.value.is_floating_point():
        return site
    left_out = ~align(mask, event) & site.value.isnan()
    possible = torch.zeros_like(site.value)
    with contextlib.suppress(NotImplementedError):  # a support without a transform: counts
        possible = transform_to(site.fn.support)(possible)
    return replace(site, value=torch.where(left_out, possible, site.value))


def leave_out(sites: dict[str, Site], kept: Mapping[str, Kept]) -> None:
    """Reduces latents among a run's sites to the elements that are params, in place:
    `unconstrained` is `[k, ...]` afterwards. A latent without any such element becomes a
    deterministic site.
    """
    for name, elements in kept.items():
        site = sites[name]
        if len(elements.places):
            params = take_apart(site.fn, elements, site.value)
            sites[name] = replace(site, unconstrained=params)
        else:
            sites[name] = replace(site, kind="deterministic", unconstrained=None)


def put_together(fn: Any, kept: Kept, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
    """(Value, log |det d value / d params|) of a latent of which masks leave out some elements,
    from its k params. Elements that are not params get the value at the origin of unconstrained
    space.

    Args:
        fn: the latent's distribution.
        kept: the k elements that are params.
        unconstrained: the params, `[k, ...]`.

    Returns:
        (Value, log |det d value / d params|, a scalar).
    """
    base, event = base_distribution(fn), unconstrained.shape[1:]
    transform = bijection(base.support)
    blank = unconstrained.new_zeros((kept.shape.numel(), *event))
    elements = blank.index_put((kept.places,), unconstrained).reshape(kept.shape + event)
    value = transform(elements)
    if is_real(base.support):
        return value, unconstrained.new_zeros(())
    log_dets = transform.log_abs_det_jacobian(elements, value)
    return value, log_dets.reshape(kept.shape.numel())[kept.places].sum()


def take_apart(fn: Any, kept: Kept, value: Tensor) -> Tensor:
    """The unconstrained params `[k, ...]` of a latent of which masks leave out some elements, from
    its constrained value. The inverse of `put_together`.

    Args:
        fn: the latent's distribution.
        kept: the k elements that are params.
        value: the latent's value, with all elements.
    """
    unconstrained = bijection(base_distribution(fn).support).inv(value)
    event = unconstrained.shape[len(kept.shape) :]
    return unconstrained.reshape(kept.shape.numel(), *event)[kept.places]


def empty_params(fn: Any) -> Tensor:
    """Empty params `[0, ...]` for a latent of which masks leave out every element, with the event
    shape, dtype and device of its distribution `fn` in unconstrained space."""
    base = base_distribution(fn)
    shape = bijection(base.support).inverse_shape(base.batch_shape + base.event_shape)
    tensors = [value for value in vars(base).values() if isinstance(value, Tensor)]
    like = next((value for value in tensors if value.is_floating_point()), torch.zeros(()))
    return like.new_zeros((0, *shape[len(base.batch_shape) :]))
