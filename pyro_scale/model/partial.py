"""Latents of which a mask leaves elements out that nothing depends on: these have no density.

Pyro's `obs_mask=` makes such a latent: of `y_unobserved`, the elements that were observed.  They
are no params: the value is put together from those of the other elements.
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
    """The elements of a latent that are params.

    Attributes:
        places: where they are, of all elements one after another, `[k]`.
        shape: of all elements: the batch shape, with `to_event` undone.
    """

    places: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, mask: Tensor) -> Kept:
        """Those where a mask is True."""
        return cls(mask.flatten().nonzero()[:, 0], mask.shape)

    @property
    def mask(self) -> Tensor:
        """True at their places, of the elements' shape."""
        mask = torch.zeros(self.shape.numel(), dtype=torch.bool, device=self.places.device)
        return mask.index_fill(0, self.places, True).reshape(self.shape)


def element_mask(site: Site) -> Tensor | None:
    """Which elements of a site masks keep, in the shape of `base_distribution`'s batch; None if no
    tensor is among the masks."""
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
    """A site with possible values in the place of NaN that masks leave out: 0 times the slope of a
    log density at NaN would be NaN."""
    mask, event = element_mask(site), len(base_distribution(site.fn).event_shape)
    if mask is None or not site.value.is_floating_point():
        return site
    left_out = ~align(mask, event) & site.value.isnan()
    possible = torch.zeros_like(site.value)
    with contextlib.suppress(NotImplementedError):  # a support without a transform, as of counts
        possible = transform_to(site.fn.support)(possible)
    return replace(site, value=torch.where(left_out, possible, site.value))


def leave_out(sites: dict[str, Site], kept: Mapping[str, Kept]) -> None:
    """Leaves elements that are no params out of the latents of a run."""
    for name, each in kept.items():
        site = sites[name]
        if len(each.places):
            own = take_apart(site.fn, each, site.value)
            sites[name] = replace(site, unconstrained=own)
        else:
            sites[name] = replace(site, kind="deterministic", unconstrained=None)


def put_together(fn: Any, kept: Kept, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
    """(A latent's value, log |d value / d unconstrained|) from its params `[k, ...]`; the other
    elements are where unconstrained space has its origin."""
    base, event = base_distribution(fn), unconstrained.shape[1:]
    transform = bijection(base.support)
    blank = unconstrained.new_zeros((kept.shape.numel(), *event))
    flat = blank.index_put((kept.places,), unconstrained)
    everything = flat.reshape(kept.shape + event)
    value = transform(everything)
    if is_real(base.support):
        return value, unconstrained.new_zeros(())
    log_dets = transform.log_abs_det_jacobian(everything, value)
    return value, log_dets.reshape(kept.shape.numel())[kept.places].sum()


def no_params(fn: Any) -> Tensor:
    """The params `[0, ...]` of a latent of which masks leave out all elements."""
    base = base_distribution(fn)
    shape = bijection(base.support).inverse_shape(base.batch_shape + base.event_shape)
    floats = [
        each
        for each in vars(base).values()
        if isinstance(each, Tensor) and each.is_floating_point()
    ]
    like = floats[0] if floats else torch.zeros(())
    return like.new_zeros((0, *shape[len(base.batch_shape) :]))


def take_apart(fn: Any, kept: Kept, value: Tensor) -> Tensor:
    """A latent's params `[k, ...]`, from its value."""
    unconstrained = bijection(base_distribution(fn).support).inv(value)
    event = unconstrained.shape[len(kept.shape) :]
    return unconstrained.reshape(kept.shape.numel(), *event)[kept.places]
