"""Checks of a model's sites: names, latents, masks, log densities.

Checks of observed values are in `observation_checks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import ModelError, SiteError
from pyro_scale.model.classify import close
from pyro_scale.model.init_strategies import WEIGHT
from pyro_scale.model.sites import Site, plate_scale, without_imputation
from pyro_scale.model.terms import Term

#: Advice if the log density is not finite although the data are.
FINITE_DATA = (
    "no argument of the model is NaN or infinite there: start elsewhere (init_strategy=), or scale "
    "the data"
)


class NotFiniteStartError(SiteError):
    """Raised if a log density is NaN or infinite at the latent values where the model was started.
    Callers catch it to try another start, where it may be finite.
    """

    code = "not-finite"


def check_names(sites: Mapping[str, Site]) -> None:
    """Raises for sites or plates whose names collide with ArviZ's dimensions ("chain", "draw"), or
    cannot be file names.

    Raises:
        SiteError: there is such a name.
    """
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
    """Checks that every latent has at least one element. Returns None if so.

    Raises:
        SiteError: a latent has no elements; the message names it.
    """
    for site in sites.values():
        # a process's part of a small weight may be empty
        if site.kind == "latent" and not site.value.numel() and WEIGHT not in site.infer:
            raise SiteError(
                f"site '{site.name}': it has the shape {list(site.value.shape)}, no elements: "
                "leave it out where there is nothing to infer"
            )


def check_starts(sites: Mapping[str, Site], chain: int = 0) -> None:
    """Checks that no latent starts outside its support, or on its edge, where the unconstrained
    value is not finite. Returns None if so; `chain` is the chain's number, for the message.

    Raises:
        SiteError: a latent starts there.
    """
    for site in sites.values():
        if site.unconstrained is not None and not bool(torch.isfinite(site.unconstrained).all()):
            raise SiteError(
                f"site '{site.name}': chain {chain} starts off its support ({site.fn.support}), "
                "or on its edge; change init_strategy"
            )


def check_enumerated(name: str, fn: Any, infer: Mapping[str, Any]) -> None:
    """Raises for a discrete latent that is not marked to be summed out, or cannot be.

    Args:
        name: the site's name.
        fn: the site's distribution.
        infer: the site's `infer` dict.

    Raises:
        SiteError: the latent is not marked, or its values cannot be enumerated.
    """
    instead = without_imputation(name)
    enumerates = infer.get("enumerate") == "parallel"
    if enumerates and fn.has_enumerate_support:
        return
    if enumerates or (instead and not fn.has_enumerate_support):
        why = (
            f"a {type(fn).__name__} cannot be enumerated, because its support is infinite; "
            "marginalize it by hand, or use a Categorical over its first values"
        )
    elif instead:
        why = (
            "obs_mask= makes a discrete latent of missing values, which has no gradient; have it "
            'summed out by pyro.infer.config_enumerate(model, "parallel")'
        )
    else:
        why = (
            'a discrete latent has no gradient; give it infer={"enumerate": "parallel"} to have '
            "it summed out, or marginalize it by hand (if it is an observation, pass its data: it "
            "was called with obs=None)"
        )
    raise SiteError(f"site '{name}': {why}{instead}", code="discrete-latent")


def check_mask(msg: Any) -> None:
    """Raises a `SiteError` for a mask that does not broadcast to the batch shape of the site's
    values; `msg` is Pyro's message about the site."""
    fn, mask, value = msg["fn"], msg["mask"], msg["value"]
    if not isinstance(mask, Tensor):
        return
    batch = value.shape[: max(0, value.dim() - len(fn.event_shape))]
    try:
        batch = torch.broadcast_shapes(fn.batch_shape, batch)
        fits = torch.broadcast_shapes(mask.shape, batch) == batch
    except RuntimeError:
        fits = False
    if not fits:
        raise SiteError(
            f"site '{msg['name']}': its mask has shape {list(mask.shape)}, and its values have "
            f"{list(batch)}: pass one boolean for each of them"
        )


def check_weights(msg: Any) -> None:
    """Raises a `SiteError` for a bayesianized network that is called inside a plate; `msg` is
    Pyro's message about one of its weights."""
    plates = [frame.name for frame in msg["cond_indep_stack"] if frame.vectorized]
    if WEIGHT in msg["infer"] and plates:
        raise SiteError(
            f"site '{msg['name']}': the network is called inside of plate '{plates[0]}', which "
            "gives every row weights of its own: call it before `with pyro.plate(...)`"
        )


def check_imputations(sites: Mapping[str, Site]) -> None:
    """Raises a `SiteError` for a site that has `obs_mask=` and no `obs=`: Pyro makes two latents of
    it."""
    for site in sites.values():
        name = site.name.removesuffix("_observed")
        is_masked = name != site.name and f"{name}_unobserved" in sites and name in sites
        if is_masked and site.kind != "observed":
            raise SiteError(
                f"site '{name}': it was called with obs_mask= and without obs=: pass obs= too, or "
                "leave obs_mask= out",
                code="no-observation",
            )


def check_local_latents(
    sites: Mapping[str, Site], own_plate: str | None, others: Sequence[Mapping[str, Site]]
) -> None:
    """Raises for latents with one value for every row of the data, which minibatches cannot update.

    Args:
        sites: sites of a run on the batch.
        own_plate: the plate that the model subsamples by itself; None if there is none.
        others: the sites of runs on other rows: a plate whose size differs between the runs is the
            data's.

    Raises:
        SiteError: there is such a latent.
    """
    data_plates = {own_plate}
    if own_plate is None:
        for name, site in sites.items():
            for plates in [other[name].plates for other in others if name in other]:
                sizes = {frame.name: frame.size for frame in reversed(plates)}
                data_plates |= {
                    frame.name
                    for frame in site.plates
                    if frame.size != sizes.get(frame.name, frame.size)
                }
    for site in sites.values():
        for frame in site.plates if site.kind == "latent" else ():
            if frame.name in data_plates:
                where = f"inside the data's plate '{frame.name}'"
            elif plate_scale(site.plates) != 1:
                where = f"in subsampled plate '{frame.name}'"
            else:
                continue
            raise SiteError(local_message(site.name, where), code="local-latent")


def local_message(name: str, where: str) -> str:
    """The message for an error about a latent with one value for every row.

    Args:
        name: the latent's name.
        where: phrase that says where the latent is, such as "inside the data's plate 'data'".
    """
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


def check_terms(terms: Mapping[str, Term], arguments: Arguments = ()) -> None:
    """Raises for log densities that are NaN or infinite at the start.

    Args:
        terms: terms of a run at the start, by name.
        arguments: the batch, which the message names if NaN or infinite numbers in it are the
            cause.

    Raises:
        NotFiniteStartError: there is such a density.
    """
    for term in terms.values():
        if not bool(torch.isfinite(term.log_prob).all()):
            what = "NaN" if bool(torch.isnan(term.log_prob).any()) else "infinite"
            raise NotFiniteStartError(
                f"site '{term.name}': its log density is {what} on the first batch, at the start; "
                + (rows.to_clean(arguments) or FINITE_DATA)
            )


def check_no_random_draws(
    terms: Mapping[str, Term], again: Mapping[str, Term], drew: bool, module: str | None = None
) -> None:
    """Raises for a model that draws random numbers outside of its sample sites.

    Args:
        terms: terms of one run, by name.
        again: terms of another run on the same batch, at the same latent values.
        drew: whether one of the runs drew from torch's generator; also an error if all terms agree.
        module: phrase that names the module that drew; None if it is not known.

    Raises:
        ModelError: the terms differ, or a run drew.
    """
    advice = (
        f"so {module or 'something in the model'} draws at random: call .eval() on modules with "
        "dropout, and make every random draw a pyro.sample site"
    )
    if not drew:
        advice = (
            "and torch's generator has not moved: the model keeps something from call to call (a "
            "counter, a cache, a running mean), or draws by NumPy, random or a generator of its "
            "own: pass what changes as data, and make every random draw a pyro.sample site"
        )
    name = first_differing_term(terms, again)
    if name is not None:
        raise ModelError(
            f"site '{name}': two evaluations at the same latent values differ, {advice}",
            code="random-likelihood",
        )
    if drew:
        raise ModelError(
            f"an evaluation moves torch's random generator, {advice}", code="random-likelihood"
        )


def first_differing_term(terms: Mapping[str, Term], others: Mapping[str, Term]) -> str | None:
    """The name of the first term of a run that is missing in another run, or whose log density
    differs there by more than rounding; None if all agree. Terms that only the other run has are
    not compared.
    """
    for name, term in terms.items():
        if name not in others or not close(term.log_prob, others[name].log_prob, roundings=64):
            return name
    return None
