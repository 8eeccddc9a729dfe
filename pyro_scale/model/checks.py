"""Checks for what makes a model unfit for minibatches, each named by its site."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import ModelError, SiteError
from pyro_scale.model.classify import close
from pyro_scale.model.init_strategies import WEIGHT
from pyro_scale.model.recorder import Recorder
from pyro_scale.model.sites import Site, plate_scale, without_imputation
from pyro_scale.model.terms import Term


def check_names(sites: Mapping[str, Site]) -> None:
    """Sites and plates that would be lost among ArviZ's dimensions."""
    names = {*sites, *(frame.name for site in sites.values() for frame in site.plates)}
    for name in sorted({"chain", "draw"} & names):
        raise SiteError(
            f"'{name}' is the name of a site or plate here, and of a dimension of every result; "
            "rename it"
        )
    for name in sorted(names):
        if name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise SiteError(
                f"site or plate {name!r}: results are files whose variables have these names, "
                "which must not be empty or dots alone, nor hold slashes; rename it"
            )


def check_latent_sizes(sites: Mapping[str, Site]) -> None:
    """Latents without elements, of which there is nothing to infer."""
    for site in sites.values():
        # a rank's part of a small weight may be empty
        if site.kind == "latent" and not site.value.numel() and WEIGHT not in site.infer:
            raise SiteError(
                f"site '{site.name}': it has the shape {list(site.value.shape)}, no elements: "
                "leave it out where there is nothing to infer"
            )


def check_starts(sites: Mapping[str, Site], chain: int = 0) -> None:
    """Latents that start off their support, or on its edge."""
    for site in sites.values():
        if site.unconstrained is not None and not bool(torch.isfinite(site.unconstrained).all()):
            raise SiteError(
                f"site '{site.name}': chain {chain} starts off its support ({site.fn.support}), "
                "or on the edge of it; change init_strategy"
            )


def check_observations(sites: Mapping[str, Site], validated: Collection[str]) -> None:
    """Observations outside of their support, of sites that are to be validated."""
    for site in sites.values():
        if site.name not in validated or site.kind != "observed":
            continue
        if not bool(inside_support(site).all()):
            raise SiteError(outside_support(site), code="observed-value")


def outside_support(site: Site, where: str = "") -> str:
    """What to say of a site some of whose observed values are outside of its support.

    Args:
        site: an observed one.
        where: the first of them, in words.
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


def check_values(sites: Mapping[str, Site]) -> None:
    """Observed values that are no tensors: lists, numbers and arrays that a model makes."""
    for site in sites.values():
        if site.kind == "observed" and not isinstance(site.value, Tensor):
            raise SiteError(
                f"site '{site.name}': its obs= is a {type(site.value).__name__}: pass a tensor, "
                "torch.as_tensor(...)",
                code="observed-value",
            )


def check_imputations(sites: Mapping[str, Site]) -> None:
    """Sites with `obs_mask=` and without `obs=`, of which Pyro makes two latents."""
    for site in sites.values():
        name = site.name.removesuffix("_observed")
        is_of_mask = name != site.name and f"{name}_unobserved" in sites and name in sites
        if is_of_mask and site.kind != "observed":
            raise SiteError(
                f"site '{name}': it was called with obs_mask= and without obs=: pass obs= too, or "
                "leave obs_mask= out",
                code="no-observation",
            )


def check_event_shapes(sites: Mapping[str, Site]) -> None:
    """Values that meet an event of one element, where every row would be compared with them all."""
    for site in sites.values():
        if site.kind != "observed":
            continue
        fn, shape = site.fn, site.value.shape
        rows = math.prod(shape[: max(0, len(shape) - len(fn.event_shape))])
        pairs = zip(reversed(fn.event_shape), reversed(shape), strict=False)
        if math.prod(fn.batch_shape) > rows and any(one == 1 < many for one, many in pairs):
            raise SiteError(
                f"site '{site.name}': values of shape {list(shape)} meet a distribution of batch "
                f"shape {list(fn.batch_shape)} and event shape {list(fn.event_shape)}, which "
                "compares every row with all values: leave to_event out and drop the mean's last "
                "dimension (mean[:, 0]), or give the values one of size 1 (y[:, None])",
                code="plate",
            )


def check_densities(sites: Mapping[str, Site]) -> None:
    """Observations whose log density cannot be computed at all."""
    for site in sites.values():
        if site.kind != "observed":
            continue
        try:
            site.fn.log_prob(site.value)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            advice = "check both (most likelihoods want y.float())"
            if "out of bounds" in str(error) or isinstance(error, IndexError):
                advice = "values are places, from 0 on; masked ones, too: clamp labels of -100 to 0"
            raise SiteError(
                f"site '{site.name}': the log density of its {type(_unwrap(site.fn)).__name__} "
                f"fails on a value of shape {list(site.value.shape)} and dtype {site.value.dtype} "
                f"({error}); {advice}",
                code="observed-value",
            ) from error


#: What to try where the log density is not finite, and the data are.
FINITE_DATA = (
    "no argument of the model is NaN or infinite there: start elsewhere (init_strategy=), or scale "
    "the data"
)


class NotFiniteStartError(SiteError):
    """A log density is NaN or infinite where the model was started; it may not be elsewhere."""

    code = "not-finite"


def check_terms(terms: Mapping[str, Term], arguments: Arguments = ()) -> None:
    """NaN or infinite log densities, on a batch that may be the reason."""
    for term in terms.values():
        if not bool(torch.isfinite(term.log_prob).all()):
            what = "NaN" if bool(torch.isnan(term.log_prob).any()) else "infinite"
            raise NotFiniteStartError(
                f"site '{term.name}': its log density is {what} on the first batch, at the start; "
                + (rows.to_clean(arguments) or FINITE_DATA)
            )


def check_no_random_draws(
    terms: Mapping[str, Term], again: Mapping[str, Term], drew: bool, by: str | None = None
) -> None:
    """Terms that differ between two runs on the same batch at the same latent values.

    Args:
        terms: of one run.
        again: of the other.
        drew: whether one of them drew from torch's generator, which can go without a difference.
        by: what drew, in words, if that is a module.
    """
    advice = (
        f"so {by or 'something in the model'} draws at random: call .eval() on modules with "
        "dropout, and make every random draw a pyro.sample site"
    )
    if not drew:
        advice = (
            "and torch's generator has not moved: the model keeps something from call to call (a "
            "counter, a cache, a running mean), or draws by NumPy, random or a generator of its "
            "own: pass what changes as data, and make every random draw a pyro.sample site"
        )
    name = differing(terms, again)
    if name is not None:
        raise ModelError(
            f"site '{name}': two evaluations at the same latent values differ, {advice}",
            code="random-likelihood",
        )
    if drew:
        raise ModelError(
            f"an evaluation moves torch's random generator, {advice}", code="random-likelihood"
        )


def differing(terms: Mapping[str, Term], again: Mapping[str, Term]) -> str | None:
    """The first of a run's terms that another run does not have, or not the same."""
    for name, term in terms.items():
        if name not in again or not close(term.log_prob, again[name].log_prob, roundings=64):
            return name
    return None


def check_local_latents(
    sites: Mapping[str, Site],
    own_plate: str | None,
    runs: list[Recorder],
) -> None:
    """Latents that there is one of for every row."""
    data_plates = {own_plate} | {
        frame.name
        for site in sites.values()
        for frame in site.plates
        for run in runs
        if own_plate is None
        and (other := run.sites.get(site.name)) is not None
        and frame.size != next((f.size for f in other.plates if f.name == frame.name), frame.size)
    }
    for site in sites.values():
        for frame in site.plates:
            if site.kind == "latent" and frame.name in data_plates:
                raise SiteError(
                    local_message(site.name, f"inside the data's plate '{frame.name}'"),
                    code="local-latent",
                )
            if site.kind == "latent" and plate_scale(site.plates) != 1:
                raise SiteError(
                    local_message(site.name, f"in subsampled plate '{frame.name}'"),
                    code="local-latent",
                )


def local_message(name: str, where: str) -> str:
    """What to do about a latent of which there is one for every row."""
    instead = without_imputation(name)
    if instead:
        return (
            f"site '{name}': obs_mask= makes a latent of every missing value, {where}, and these "
            "would need all rows at every step: pass the whole data (batch_size=None)" + instead
        )
    return (
        f"site '{name}': a latent {where}, one for every row, would need all rows at every step. "
        "If it is an observation, pass its data (it was called with obs=None); else pass the "
        "whole data without batch_size, marginalize it by hand, sum it out with "
        'infer={"enumerate": "parallel"} if it is discrete, or give it a fixed number of groups'
    )


def inside_support(site: Site) -> Tensor:
    """Whether each observed value is possible, or masked out."""
    try:  # some constraints do not broadcast by themselves
        shape = torch.broadcast_shapes(site.value.shape, site.shape)
    except RuntimeError:  # the density will say so
        return torch.as_tensor(True)
    inside = site.fn.support.check(site.value.expand(shape))
    for mask in (site.mask, getattr(site.fn, "_mask", None)):
        if mask is not None:
            inside = inside | ~torch.as_tensor(mask)
    if isinstance(_unwrap(site.fn), dist.NanMaskedNormal | dist.NanMaskedMultivariateNormal):
        return torch.as_tensor(True)
    return inside


def _unwrap(fn: Any) -> Any:
    while isinstance(fn, dist.Independent | dist.MaskedDistribution | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn
