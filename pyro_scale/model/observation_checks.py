"""Checks of a model's observations: that there are some, and that their values are possible."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import ModelError, SiteError
from pyro_scale.model.init_strategies import WEIGHT
from pyro_scale.model.program import Program
from pyro_scale.model.recorder import Recorder
from pyro_scale.model.sites import Site, layers, points_of_store

#: Distributions of counts out of a total: their density is constant if the total is 0.
_COUNTS_OF_TOTALS = (
    dist.Binomial,
    dist.BetaBinomial,
    dist.Multinomial,
    dist.DirichletMultinomial,
)
_NAN_MASKED = dist.NanMaskedNormal, dist.NanMaskedMultivariateNormal
_PRIOR = "For draws of the prior: pyro.infer.Predictive(model, num_samples=1000)(...)"


def check_has_observation(
    program: Program, arguments: Arguments, sites: Mapping[str, Site], count: int | None
) -> None:
    """Checks that the model has an observed site or a factor.

    Args:
        program: runs the model.
        arguments: the first batch, as the model's arguments.
        sites: sites of a run on the batch.
        count: number of rows of the batch; None if it has none.

    Raises:
        ModelError: the model has none; the message names the site that looks like the data's, and
            what its `obs=` lacks.
    """
    if any(site.kind in ("observed", "factor") for site in sites.values()):
        return
    site = _likely_observation(sites, count)
    if site is None:
        fix = "give the likelihood's pyro.sample obs=, or add a pyro.factor"
    else:
        argument = _missing_argument(program, arguments, sites, site.name)
        where = f" in plate '{site.plates[-1].name}'" if site.plates else ""
        fix = f"site '{site.name}'{where} looks like the data's: give its pyro.sample obs="
        if argument is not None:
            fix = (
                f"the model's argument '{argument}', by which site '{site.name}'{where} would be "
                f"observed, is None: pass {argument} with the data"
            )
    raise ModelError(
        f"the model has no observed site and no factor, so it would learn nothing: {fix}. {_PRIOR}",
        code="no-observation",
    )


def _likely_observation(sites: Mapping[str, Site], count: int | None) -> Site | None:
    """The unobserved site that is most likely meant to be the data's: the last one in a plate of
    `count` elements (in any plate if `count` is None), otherwise the last one with a dimension of
    that size. Network weights are excluded. None if there is no such site."""

    def is_in_data_plate(site: Site) -> bool:
        sizes = {size for frame in site.plates for size in (frame.size, frame.full_size)}
        return bool(sizes) if count is None else count in sizes

    latents = [
        site
        for site in sites.values()
        if site.kind in ("latent", "enumerated") and WEIGHT not in site.infer
    ]
    in_plate = [site for site in latents if is_in_data_plate(site)]
    of_size = [site for site in latents if count is not None and count in site.value.shape]
    return next(reversed(in_plate or of_size), None)


def _missing_argument(
    program: Program, arguments: Arguments, sites: Mapping[str, Site], name: str
) -> str | None:
    """The name of the model's argument that is None and should hold a site's observations; None if
    there is none. It is found by running the model with the site's value as the argument.

    Args:
        program: runs the model.
        arguments: the first batch, as the model's arguments.
        sites: sites of a run on the batch.
        name: name of the unobserved site.
    """
    model: Any = program.model
    while isinstance(model, functools.partial) and isinstance(next(iter(model.args), 0), Messenger):
        model = model.args[1]  # poutine.condition(model, ...) and its like
    try:
        signature = inspect.signature(getattr(model, "forward", model))
        bound = rows.call(signature.bind, arguments)
    except (TypeError, ValueError):
        return None
    bound.apply_defaults()
    values = {site.name: site.unconstrained for site in sites.values()}
    latents = {name: value for name, value in values.items() if value is not None}
    for argument in [name for name, value in bound.arguments.items() if value is None]:
        run = Recorder(latents=latents, store=points_of_store())
        with contextlib.suppress(Exception), own_generator(), torch.no_grad():
            program.run({**bound.arguments, argument: sites[name].value}, run)
        if name in run.sites and run.sites[name].kind == "observed":
            return argument
    return None


def check_something_counts(runs: Iterable[Mapping[str, Site]]) -> None:
    """Checks that masks, or totals of 0, do not leave out everything that is observed.

    Args:
        runs: the sites of runs that together cover all rows.

    Raises:
        ModelError: they leave out everything; the message names a site and the reason.
    """
    last = None
    for sites in runs:
        observed = [site for site in sites.values() if site.kind in ("observed", "factor")]
        reasons = [reason for reason in map(why_left_out, observed) if reason]
        if len(reasons) < len(observed):
            return
        last = observed[-1].name, reasons[-1]
    if last is not None:
        site, reason = last
        raise ModelError(
            f"site '{site}': {reason}, and nothing else is observed, so the model would learn "
            f"nothing. {_PRIOR}",
            code="no-observation",
        )


def why_left_out(site: Site) -> str:
    """The reason, in words, why no element of an observed site counts (a mask, or totals of 0); an
    empty string if any element counts."""
    masks, totals = [site.mask], None
    for fn in layers(site.fn):
        masks.append(getattr(fn, "_mask", None))
        if isinstance(fn, _NAN_MASKED):
            masks.append(~site.value.isnan())
        if isinstance(fn, _COUNTS_OF_TOTALS):
            totals = torch.as_tensor(fn.total_count)
    if any(mask is not None and not bool(torch.as_tensor(mask).any()) for mask in masks):
        return "its mask leaves out every element (True keeps one)"
    return "all of its totals are 0" if totals is not None and not bool(totals.any()) else ""


def check_observations(sites: Mapping[str, Site], validated: Collection[str]) -> None:
    """Raises for observed values whose shape, dtype or value does not fit their distribution.

    Args:
        sites: sites of a run.
        validated: names of the sites whose values are checked against their support.
    """
    for site in _observed(sites):
        _check_event_shape(site)
    for site in _observed(sites):
        if site.name in validated and not bool(inside_support(site).all()):
            raise SiteError(outside_support(site), code="observed-value")
    for site in _observed(sites):
        _check_density(site)


def check_tensors(sites: Mapping[str, Site]) -> None:
    """Raises a `SiteError` for observed values that are not tensors: lists, numbers and arrays in
    the model."""
    for site in _observed(sites):
        if not isinstance(site.value, Tensor):
            raise SiteError(
                f"site '{site.name}': its obs= is a {type(site.value).__name__}: pass a tensor, "
                "torch.as_tensor(...)",
                code="observed-value",
            )


def inside_support(site: Site) -> Tensor:
    """Mask of the observed values that are in the support of their distribution, or are masked out;
    a single True if the shapes do not match or NaN marks missing values."""
    try:  # some constraints do not broadcast by themselves
        shape = torch.broadcast_shapes(site.value.shape, site.shape)
    except RuntimeError:  # evaluating the density raises the error
        return torch.as_tensor(True)
    inside = site.fn.support.check(site.value.expand(shape))
    for mask in (site.mask, getattr(site.fn, "_mask", None)):
        if mask is not None:
            inside = inside | ~torch.as_tensor(mask)
    return torch.as_tensor(True) if isinstance(_unwrap(site.fn), _NAN_MASKED) else inside


def outside_support(site: Site, where: str = "") -> str:
    """The message for an error about an observed site with values outside its support, or NaN.

    Args:
        site: the observed site.
        where: phrase that says where the first such value is; may be empty.
    """
    fn, value = _unwrap(site.fn), site.value
    if bool(torch.isnan(value).any()):
        what, advice = "NaN", "leave such rows out, or say with obs_mask= which are missing"
    else:
        what = f"outside the support of its {type(fn).__name__} ({site.fn.support})"
        advice = "check the data, or choose a likelihood that allows it"
    if site.mask is not None or bool((value == -100).any()):
        advice += "; masked values have to be allowed, too: clamp labels of -100 to 0"
    return f"site '{site.name}': an observed value{where} is {what}; {advice}"


def _check_event_shape(site: Site) -> None:
    """Raises a `SiteError` if observed values broadcast against an event of one element, so that
    each row is compared with all values."""
    fn, shape = site.fn, site.value.shape
    count = math.prod(shape[: max(0, len(shape) - len(fn.event_shape))])
    pairs = zip(reversed(fn.event_shape), reversed(shape), strict=False)
    if math.prod(fn.batch_shape) > count and any(one == 1 < many for one, many in pairs):
        raise SiteError(
            f"site '{site.name}': values of shape {list(shape)} meet a distribution of batch "
            f"shape {list(fn.batch_shape)} and event shape {list(fn.event_shape)}, which "
            "compares every row with all values: leave to_event out and drop the mean's last "
            "dimension (mean[:, 0]), or give the values one of size 1 (y[:, None])",
            code="plate",
        )


def _check_density(site: Site) -> None:
    """Checks that the log density of a site's observed values can be computed; if not, raises a
    `SiteError` that explains why.
    """
    try:
        site.fn.log_prob(site.value)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        advice = "check both (most likelihoods want y.float())"
        if "out of bounds" in str(error) or isinstance(error, IndexError):
            advice = "values are indices from 0 on, masked ones too: clamp labels of -100 to 0"
        raise SiteError(
            f"site '{site.name}': the log density of its {type(_unwrap(site.fn)).__name__} "
            f"fails on a value of shape {list(site.value.shape)} and dtype {site.value.dtype} "
            f"({error}); {advice}",
            code="observed-value",
        ) from error


def _observed(sites: Mapping[str, Site]) -> Iterator[Site]:
    return (site for site in sites.values() if site.kind == "observed")


def _unwrap(fn: Any) -> Any:
    while isinstance(fn, dist.Independent | dist.MaskedDistribution | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn
