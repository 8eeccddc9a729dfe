"""Sample and param statements of a model, as they happened in one run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor, nn
from torch.distributions import transform_to

from pyro_scale.errors import SiteError

Kind = Literal["latent", "observed", "factor", "deterministic", "enumerated", "subsample"]


@dataclass(frozen=True)
class Site:
    """One sample statement of a model, with its distribution and value in one run.

    Attributes:
        name: the site's name.
        kind: what the statement is for: a latent, an observation, ...
        fn: the site's distribution, with validation off.
        value: the site's value, in its support (constrained).
        scale: the user's `poutine.scale`, without the factors of plates.
        mask: the user's `poutine.mask`; None if there is none.
        plates: the plates around it, outermost first.
        infer: the site's `infer` dict.
        unconstrained: the value before the transform (latents only).
        log_det: log |det d value / d unconstrained|, a scalar (latents only).
        enum_dim: the dimension, negative and from the right, along which an enumerated site has its
            values; None for others.
        validates: whether its distribution, as the model made it, checks its values.
    """

    name: str
    kind: Kind
    fn: Any
    value: Tensor
    scale: float | Tensor
    mask: bool | Tensor | None
    plates: tuple[CondIndepStackFrame, ...]
    infer: dict[str, Any]
    unconstrained: Tensor | None = None
    log_det: Tensor | None = None
    enum_dim: int | None = None
    validates: bool = False

    @property
    def shape(self) -> torch.Size:
        """The shape of one value of the site: the distribution's batch shape followed by its event
        shape.
        """
        return self.fn.batch_shape + self.fn.event_shape


@dataclass(frozen=True)
class Point:
    """A `pyro.param` site or an unfrozen weight of a module: one tensor for all chains,
    point-estimated.

    Attributes:
        name: the param site's name.
        constraint: the constraint that is the value's support.
        unconstrained: the unconstrained value when the model was first run.
        parameter: the module's unconstrained parameter; None if the point belongs to no module.
    """

    name: str
    constraint: Any
    unconstrained: Tensor
    parameter: nn.Parameter | None

    def constrain(self, unconstrained: Tensor) -> Tensor:
        """The param's value in the support of its constraint, from an unconstrained value. The
        inverse of `unconstrain`.
        """
        value: Tensor = transform_to(self.constraint)(unconstrained)
        return value

    def unconstrain(self, value: Tensor) -> Tensor:
        """The param's unconstrained value, from a value in the support of its constraint. The
        inverse of `constrain`.
        """
        unconstrained: Tensor = transform_to(self.constraint).inv(value)
        return unconstrained


def points_of_store() -> dict[str, Point]:
    """All params that are in Pyro's param store at present, as points (constraint and unconstrained
    value), by name.
    """
    state = pyro.get_param_store().get_state()
    return {
        name: Point(
            name,
            state["constraints"][name],
            tensor.detach(),
            tensor if isinstance(tensor, nn.Parameter) else None,
        )
        for name, tensor in state["params"].items()
    }


def plate_scale(plates: tuple[CondIndepStackFrame, ...]) -> float:
    """The factor by which Pyro's plates multiply a site's log density: the product of full size
    over subsample size."""
    scale = 1.0
    for frame in plates:
        if frame.full_size is not None:
            scale = scale * frame.full_size / frame.size
    return scale


def without_imputation(name: str) -> str:
    """Advice for the end of a message, after a semicolon, on how to avoid the latent that Pyro
    makes for the missing values of a site with `obs_mask=`; an empty string if `name` is not such a
    latent's."""
    site = name.removesuffix("_unobserved")
    if site == name:
        return ""
    return (
        f"; or, as it comes from the obs_mask= of site '{site}', leave missing values out instead "
        f"of imputing them: with poutine.mask(mask=seen): pyro.sample('{site}', ..., obs=...)"
    )


def free_dim(sites: Mapping[str, Site]) -> int | None:
    """The first dimension (negative, from the right) to the left of all batch dimensions and plates
    of a run's sites: enumerated sites may use it and those further left for their values. None if
    no site is enumerated.
    """
    if not any(site.kind == "enumerated" for site in sites.values()):
        return None
    batch_dims = [len(site.fn.batch_shape) for site in sites.values() if site.kind != "subsample"]
    plate_dims = [-frame.dim for site in sites.values() for frame in site.plates if frame.dim]
    return -1 - max(batch_dims + plate_dims)


def layers(fn: Any) -> list[Any]:
    """A list of a distribution and the distributions that it wraps (by `base_dist`: `to_event`,
    `expand`, masks), from the outermost to the innermost."""
    inner = [fn]
    while hasattr(inner[-1], "base_dist"):
        inner.append(inner[-1].base_dist)
    return inner


def validates(fn: Any) -> bool:
    """Whether a distribution, and every one that it wraps, checks its values against the support
    (`validate_args`)."""
    return all(layer._validate_args for layer in layers(fn))


def without_validation(fn: Any) -> Any:
    """A copy of the distribution that never validates.

    Validation needs a tensor's truth value, which vmap and tracing cannot give. Switching it off
    globally does not reach distributions that were made before, nor those evaluated later.
    """
    parts = {
        name: without_validation(value)
        for name, value in vars(fn).items()
        if isinstance(value, torch.distributions.Distribution)
    }
    changed = {name: part for name, part in parts.items() if part is not vars(fn)[name]}
    if not changed and vars(fn).get("_validate_args") is False:
        return fn
    fn = copy.copy(fn)
    fn.__dict__.update(changed, _validate_args=False)
    return fn


def is_subsample(fn: Any) -> bool:
    """Whether a distribution is one that Pyro's plates use internally, to pick the rows of a
    subsample: it belongs to no site of the user's model.
    """
    return type(fn).__name__ == "_Subsample"


def base_distribution(fn: Any) -> Any:
    """The distribution inside all `to_event` wrappers and masks around `fn`; `fn` itself if there
    are none.
    """
    while isinstance(fn, torch.distributions.Independent | dist.MaskedDistribution):
        fn = fn.base_dist
    return fn


def is_discrete(msg: Any) -> bool:
    """Whether a latent's support is discrete; `msg` is Pyro's message about the sample statement.

    Raises:
        SiteError: the distribution has no support, or is a Delta.
    """
    fn = base_distribution(msg["fn"])
    if isinstance(fn, dist.Delta):
        raise SiteError(
            f"site '{msg['name']}': an unobserved Delta has nothing to infer: use "
            "pyro.deterministic(name, value)"
        )
    try:
        return bool(fn.support.is_discrete)
    except NotImplementedError:
        raise SiteError(
            f"site '{msg['name']}': {type(msg['fn']).__name__} has no support property, so its "
            "values cannot be transformed to unconstrained space; use a distribution that has one"
        ) from None


def kind_of(msg: Any) -> Kind:
    """The kind of a sample statement (latent, observed, factor, deterministic, subsample, ...);
    `msg` is Pyro's message about the statement.
    """
    fn = msg["fn"]
    if is_subsample(fn):
        return "subsample"
    if not msg["is_observed"]:
        return "enumerated" if is_discrete(msg) else "latent"
    # a site that poutine.reparam replaced is an observed, masked Delta, as is a deterministic one
    if isinstance(fn, dist.MaskedDistribution):
        if fn._mask is False and isinstance(fn.base_dist, dist.Delta):
            return "deterministic"
        fn = fn.base_dist
    return "factor" if isinstance(fn, dist.Unit) else "observed"
