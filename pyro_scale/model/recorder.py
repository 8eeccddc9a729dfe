"""Runs a Pyro model once and records every site.

The recorder is the outermost effect handler: by the time it sees a site, the user's own
handlers (condition, scale, mask, reparam, plates) have done their work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import Transform, constraints, transform_to

from pyro_scale.errors import CannotDrawError, SiteError
from pyro_scale.model.draws import cannot_draw, draw
from pyro_scale.model.init_strategies import WEIGHT
from pyro_scale.model.masked_latents import (
    Kept,
    empty_params,
    put_together,
    take_apart,
    without_nan,
)
from pyro_scale.model.site_checks import check_enumerated, check_mask, check_weights
from pyro_scale.model.sites import (
    Point,
    Site,
    base_distribution,
    is_discrete,
    is_subsample,
    kind_of,
    plate_scale,
    points_of_store,
    validates,
    without_validation,
)
from pyro_scale.model.transforms import bijection, is_real

#: Most dimensions of a tensor in torch, minus a few that arithmetic needs.
_MOST_DIMS = 60


class LatentShapeChanged(SiteError):
    """A latent's shape differs from that of the value that is passed for it.

    Attributes:
        name: the site's name.
        value_shape: shape of the value that was passed.
        site_shape: shape of the site's distribution in this run.
    """

    name: str
    value_shape: torch.Size
    site_shape: torch.Size

    @classmethod
    def from_shapes(
        cls, name: str, value_shape: torch.Size, site_shape: torch.Size
    ) -> LatentShapeChanged:
        """The error about a latent whose shape depends on the data, with a message that gives both
        shapes.

        Args:
            name: the site's name.
            value_shape: shape of the value that was passed.
            site_shape: shape of the site's distribution in this run.
        """
        error = cls(
            f"site '{name}': its shape depends on the data ({list(value_shape)} on the first "
            f"batch, {list(site_shape)} now); a latent must have one shape for every batch: take "
            "the size from a constant instead of from the batch"
        )
        error.name, error.value_shape, error.site_shape = name, value_shape, site_shape
        return error


class Recorder(Messenger):
    """A Pyro effect handler that gives a model its latents, params and indices of rows, and records
    what happens at each site.

    Args:
        latents: unconstrained values of all latents by site; None if latents come from outer
            handlers (an initialization) or from their priors.
        points: values of `pyro.param` sites by name; other such sites take their values from their
            modules, from `store`, or from the param statement.
        indices: indices of the rows for subsampling plates, by the plate's name. Other subsampling
            plates take their first rows, since the batch that is passed in is the subsample.
        enum_dim: the first free dimension (negative) for enumerated sites; None to sample these
            sites.
        store: params in Pyro's param store before the run, by name.
        kept: for latents with elements that masks leave out, the elements that are params.

    Attributes:
        sites: every sample site of the run, by name.
        points: every param site of the run that is estimated, by name.
        drawn: names of the sites whose values a `Simulator` drew.
    """

    def __init__(
        self,
        *,
        latents: Mapping[str, Tensor] | None = None,
        points: Mapping[str, Point] | None = None,
        indices: Mapping[str, Tensor] | None = None,
        enum_dim: int | None = None,
        store: Mapping[str, Point] | None = None,
        kept: Mapping[str, Kept] | None = None,
    ):
        super().__init__()
        self._kept = kept or {}
        self._latents, self.given_points = latents, points or {}
        self._indices, self._store = indices or {}, store or {}
        self._enum_dim = enum_dim
        self._jacobians: dict[str, tuple[Tensor, Tensor]] = {}
        self._enum_dims: dict[str, int] = {}
        self.drawn: set[str] = set()
        self.sites: dict[str, Site] = {}
        self.points: dict[str, Point] = {}

    # ------------------------------------------------------------------ values of sites

    def _pyro_sample(self, msg: Any) -> None:
        if is_subsample(msg["fn"]):
            if msg["value"] is None:
                msg["value"] = self._subsample(msg["name"], msg["fn"])
        elif msg["is_observed"] or msg["value"] is not None:
            return
        elif is_discrete(msg):
            self._enumerate(msg)
        else:
            check_weights(msg)
            transform = _transform(msg)
            if self._is_left_out(msg["name"]):
                msg["value"], _ = self._put_together(msg, empty_params(msg["fn"]))
                msg["done"] = True
            elif self._latents is not None:
                self._constrain(msg, transform, self._latents)

    def _subsample(self, plate: str, fn: Any) -> Tensor:
        if plate in self._indices:
            return self._indices[plate]
        size = fn.size if fn.subsample_size is None else fn.subsample_size
        return torch.arange(size, device=fn.device)

    def _enumerate(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if self._enum_dim is None:
            try:
                msg["value"] = fn.sample().detach()
            except NotImplementedError:
                check_enumerated(name, fn, msg["infer"])
                raise
            return
        check_enumerated(name, fn, msg["infer"])
        if -self._enum_dim > _MOST_DIMS:
            raise SiteError(
                f"site '{name}': there are more enumerated sites than a tensor has dimensions; "
                "sum them out by hand (the forward algorithm, for a Markov chain)",
                code="discrete-latent",
            )
        support = fn.enumerate_support(expand=False)
        inner = (1,) * (-self._enum_dim - 1)
        msg["value"] = support.reshape(support.shape[:1] + inner + fn.event_shape)
        self._enum_dims[name] = self._enum_dim
        self._enum_dim -= 1

    def _constrain(self, msg: Any, transform: Transform, latents: Mapping[str, Tensor]) -> None:
        name, fn = msg["name"], msg["fn"]
        if name not in latents:
            raise SiteError(
                f"site '{name}': it was not there on the first batch; every batch must have the "
                "same latent sites (or was its observation left out: obs=None?)"
            )
        unconstrained, log_det = latents[name], None
        if name in self._kept:
            value, log_det = self._put_together(msg, unconstrained)
        else:
            value = transform(unconstrained)
        nesting = -1 - max(self._enum_dims.values(), default=-_MOST_DIMS)
        if value.dim() - len(fn.event_shape) > nesting:
            raise SiteError(
                f"site '{name}': its support depends on an enumerated site; sum that site out by "
                "hand, or give this one a fixed support",
                code="discrete-latent",
            )
        site_shape = fn.batch_shape + fn.event_shape
        if value.shape != site_shape and not self._enum_dims:
            raise LatentShapeChanged.from_shapes(name, value.shape, site_shape)
        # the identity transform: its log determinant is 0
        if log_det is None and is_real(fn.support):
            log_det = unconstrained.new_zeros(())
        elif log_det is None:
            log_det = transform.log_abs_det_jacobian(unconstrained, value).sum()
        self._jacobians[name] = unconstrained, log_det
        msg["value"] = value

    def _is_left_out(self, name: str) -> bool:
        """Whether masks leave out all elements of the latent with this name, so that it has no
        params.
        """
        return name in self._kept and not len(self._kept[name].places)

    def _put_together(self, msg: Any, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        """(The value, log |det d value / d params|) of a latent with elements that masks leave out;
        `msg` is Pyro's message about it, `unconstrained` its params `[k, ...]`.

        Raises:
            LatentShapeChanged: the latent's batch shape is not that of the first run.
        """
        name, fn, kept = msg["name"], msg["fn"], self._kept[msg["name"]]
        if base_distribution(fn).batch_shape != kept.shape:
            value_shape = kept.shape + unconstrained.shape[1:]
            raise LatentShapeChanged.from_shapes(name, value_shape, fn.batch_shape + fn.event_shape)
        value, log_det = put_together(fn, kept, unconstrained)
        others = self._left_out_values(msg, value)
        if others is not None:
            mask = kept.mask.reshape(kept.shape + (1,) * (value.dim() - len(kept.shape)))
            value = torch.where(mask, value, others.to(value))
        return value, log_det

    def _left_out_values(self, msg: Any, value: Tensor) -> Tensor | None:
        """Values for the elements of a latent that masks leave out, of the shape of `value`: with
        Pyro's `obs_mask=`, the observed ones. None to leave the latent's value as it is."""
        observed = self.sites.get(msg["name"].removesuffix("_unobserved") + "_observed")
        if observed is None or observed.kind != "observed" or observed.value.shape != value.shape:
            return None
        return observed.value

    # ------------------------------------------------------------------ records

    def _pyro_post_sample(self, msg: Any) -> None:
        name, kind = msg["name"], kind_of(msg)
        if self._latents is None and kind != "subsample":
            check_mask(msg)
        if kind == "latent" and self._is_left_out(name):
            kind = "deterministic"
        if name in self.sites:
            fix = "rename one"
            if WEIGHT in msg["infer"]:
                fix = (
                    "call the network once, on torch.cat of its inputs; if there are two, make "
                    "them attributes of one PyroModule"
                )
            raise SiteError(f"site '{name}': two sites have this name; {fix}")
        unconstrained, log_det = self._jacobians.get(name, (None, None))
        if kind == "latent" and unconstrained is None:
            unconstrained = bijection(msg["fn"].support).inv(msg["value"])
            if name in self._kept:
                unconstrained = take_apart(msg["fn"], self._kept[name], msg["value"])
        self.sites[name] = Site(
            name=name,
            kind=kind,
            fn=msg["fn"] if kind == "subsample" else without_validation(msg["fn"]),
            value=msg["value"],
            scale=msg["scale"] / plate_scale(msg["cond_indep_stack"]),
            mask=msg["mask"],
            plates=msg["cond_indep_stack"],
            infer=msg["infer"],
            unconstrained=unconstrained,
            log_det=log_det,
            enum_dim=self._enum_dims.get(name),
            validates=kind != "subsample" and validates(msg["fn"]),
        )
        if kind == "observed":
            self.sites[name] = without_nan(self.sites[name])

    # ------------------------------------------------------------------ params

    def _pyro_param(self, msg: Any) -> None:
        """Answers a `pyro.param` statement of the model with the constrained value of its point
        (the estimated parameter), and records the point. Pyro's param store is never written to.
        """
        name = msg["name"]
        point = self.given_points[name] if name in self.given_points else self._find_param(msg)
        if point.parameter is None or point.parameter.requires_grad:
            self.points[name] = point
        value: Any = point.constrain(point.unconstrained)
        value = value.view_as(value)  # attributes set on it must not reach the caller's tensor
        value.unconstrained = lambda: point.unconstrained
        msg["value"], msg["done"] = value, True

    def _find_param(self, msg: Any) -> Point:
        """The point of a param statement that the model reaches for the first time: from its
        module, from Pyro's param store, or from the statement's initial value."""
        name, declared = msg["name"], msg["args"][1] if len(msg["args"]) > 1 else None
        if isinstance(declared, nn.Parameter):
            return Point(name, constraints.real, declared.detach(), declared)
        scope = points_of_store()  # a PyroParam has just put its own tensor into the store
        if name in scope:
            return scope[name]
        if name in self._store:
            return dataclasses.replace(self._store[name], parameter=None)
        constrained = declared() if callable(declared) else declared
        if constrained is None:
            raise SiteError(f"param '{name}' has no value: give pyro.param an initial one")
        constraint = msg["kwargs"].get("constraint", constraints.real)
        return Point(name, constraint, transform_to(constraint).inv(constrained.detach()), None)


class Simulator(Recorder):
    """A recorder that draws data: each observation is replaced by a draw from the likelihood, and
    so is every site without a value in `latents`.

    Args:
        drawn: values of an earlier simulation by site, which are used instead of new draws; None to
            draw all anew.
        others: arguments of `Recorder`.
    """

    def __init__(self, *, drawn: Mapping[str, Tensor] | None = None, **others: Any):
        super().__init__(**others)
        self._earlier_draws = drawn or {}

    def _pyro_sample(self, msg: Any) -> None:
        if is_subsample(msg["fn"]):
            super()._pyro_sample(msg)
        elif msg["is_observed"]:
            if kind_of(msg) == "observed":
                observed = msg["value"]
                msg["is_observed"], msg["value"], msg["done"] = False, None, False
                self._draw(msg, observed)
        elif self._latents is not None and msg["name"] in self._latents:
            self._constrain(msg, _transform(msg), self._latents)
        else:
            self._draw(msg)

    def _left_out_values(self, msg: Any, value: Tensor) -> Tensor | None:
        drawn = draw(msg["fn"])
        return msg["fn"].sample() if drawn is None else drawn

    def _draw(self, msg: Any, observed: Tensor | None = None) -> None:
        self.drawn.add(msg["name"])
        value = self._earlier_draws.get(msg["name"])
        if value is None:
            value = draw(msg["fn"], observed)
        if value is None:
            try:
                value = msg["fn"](*msg["args"], **msg["kwargs"])
            except NotImplementedError as error:
                raised = CannotDrawError(cannot_draw(msg["name"], msg["fn"], error))
                raised.missing = {msg["name"]: torch.full(msg["fn"].shape(), torch.nan)}
                raise raised from error
        msg["value"], msg["done"] = value, True

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] in self.drawn:
            msg["is_observed"] = True
        super()._pyro_post_sample(msg)


class Reader(Simulator):
    """A simulator that keeps the observed values. Every other site has its value in `latents`, that
    of an earlier simulation, or a new draw: for values of sites given the data.
    """

    def _pyro_sample(self, msg: Any) -> None:
        if is_subsample(msg["fn"]) or not msg["is_observed"]:
            super()._pyro_sample(msg)


def _transform(msg: Any) -> Transform:
    """The bijection from unconstrained space to the support of a latent's distribution; `msg` is
    Pyro's message about the latent.

    Raises:
        SiteError: there is no such map.
    """
    name, fn = msg["name"], msg["fn"]
    try:
        return bijection(fn.support)
    except NotImplementedError:
        raise SiteError(
            f"site '{name}': there is no smooth transform from unconstrained space to the support "
            f"of its {type(fn).__name__} ({fn.support}); use another distribution, or sample its "
            "unconstrained coordinates and transform them in the model"
        ) from None
