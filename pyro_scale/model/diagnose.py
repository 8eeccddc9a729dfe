"""Diagnoses of a model after its preflight, by evaluating it: densities that are not finite,
gradients that are cut off, priors that are improper, latents that are centered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_scale.core.exclusive import own_generator, raise_if_from_handler
from pyro_scale.core.rows import Arguments
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.masked_latents import element_mask
from pyro_scale.model.recorder import Recorder
from pyro_scale.model.sites import Site, is_subsample, layers
from pyro_scale.model.terms import terms_of

#: Characters of an error's message that are shown.
_MOST_CHARACTERS = 300
#: Steps to either side for slopes by finite differences.
_STEPS = 1e-1, 1e-2, 1e-3
#: A slope counts if two steps agree to this relative error,
_AGREEMENT = 0.05
#: and if it is at least this many rounding errors from 0.
_ROUNDINGS = 100.0
#: The most groups of latents that are moved separately.
_GROUPS = 8
#: Distance by which a latent is moved in unconstrained space, to see which terms depend on it.
_MOVE = 0.5


# ---------------------------------------------------------------------- not finite


def find_broken_site(
    log_posterior: LogPosterior,
    params: Mapping[str, Tensor],
    arguments: Arguments,
    indices: Tensor | None = None,
    validate: bool = False,
) -> tuple[str | None, str]:
    """The first site whose log density is NaN or infinite or cannot be evaluated, and why.

    Args:
        log_posterior: the model, after its preflight.
        params: unconstrained values by site, at which to look.
        arguments: a batch, as the model's arguments.
        indices: indices `[B]` of the rows, for a model that subsamples by itself; random if None.
        validate: whether Pyro's and torch's validation are on.

    Returns:
        (The site, None if all are finite; "NaN", "infinite", or the error that the model raised).
    """
    evaluated: list[str] = []
    recorder = partial(_DensityRecorder, evaluated=evaluated)
    try:
        run = log_posterior.run(params, arguments, indices, recorder, validate)
        terms = terms_of(run.sites)
    except Exception as error:  # the user's model may raise anything
        sites = log_posterior.model_info.sites
        left = [n for n, s in sites.items() if s.kind != "subsample" and n not in evaluated]
        return next(iter(left or evaluated), None), error_in_short(error)
    for name, term in terms.items():
        if not bool(torch.isfinite(term.log_prob).all()):
            return name, nan_or_infinite(term.log_prob)
    return None, ""


def nan_or_infinite(values: Tensor) -> str:
    """The word "NaN" if one of the values is NaN, otherwise "infinite", for messages about values
    that are not all finite."""
    return "NaN" if bool(values.isnan().any()) else "infinite"


def error_in_short(error: Exception) -> str:
    """An error's class and message on one line, for messages; the error's own message is cut to 300
    characters.
    """
    text = " ".join(format(error).split())
    return f"{type(error).__name__}: {text[:_MOST_CHARACTERS]}"


class _DensityRecorder(Recorder):
    """A recorder that evaluates each site's log density as soon as the model reaches the site, so
    that the first site that fails is known.

    Args:
        evaluated: list to which the names of sites whose log density could be evaluated are added.
        others: arguments of `Recorder`.
    """

    def __init__(self, *, evaluated: list[str], **others: Any):
        super().__init__(**others)
        self._evaluated = evaluated

    def _pyro_post_sample(self, msg: Any) -> None:
        is_plate = is_subsample(msg["fn"])
        if not is_plate:
            msg["fn"].log_prob(msg["value"])
        super()._pyro_post_sample(msg)
        if not is_plate:
            self._evaluated.append(msg["name"])


# ---------------------------------------------------------------------- gradients that are cut off


def cut_gradients(
    log_posterior: LogPosterior, params: Params, arguments: Arguments
) -> dict[str, list[str]]:
    """Observed sites and factors that depend on latents although the gradient of the likelihood
    with respect to these latents is 0, because of `.detach()`, NumPy and the like.

    Args:
        log_posterior: the model, after its preflight.
        params: unconstrained values of all latents, at which to look.
        arguments: one batch, as the model's arguments.

    Returns:
        Dict from a site's name to the names of these latents. A site is left out if its slope
        cannot be computed: at steps and kinks, in too low a precision, or if the model does not run
        at other params.
    """
    cut: dict[str, list[str]] = {}
    try:
        terms, slopes = _likelihood_slopes(log_posterior, params, arguments)
        flat = {name: _direction(slope) for name, slope in slopes.items() if (slope == 0).any()}
        names = list(flat)
        for latents in [names[i::_GROUPS] for i in range(min(_GROUPS, len(names)))]:
            direction = {name: flat[name] for name in latents}
            for site in _sloping_sites(log_posterior, params, arguments, direction, terms):
                cut.setdefault(site, []).extend(latents)
    except Exception as error:
        raise_if_from_handler(error)
    return cut


def _likelihood_slopes(
    log_posterior: LogPosterior, params: Params, arguments: Arguments
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Log densities of the observed sites and factors, and the gradient of their sum.

    Returns:
        (Log density of each observed site and factor, summed over its elements, by site; gradient
        of the sum of all, unscaled, by latent).
    """
    with own_generator(), torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        sites = log_posterior.run(leaves, arguments, log_posterior.first_indices()).sites
        all_terms = terms_of(sites).items()
        terms = {name: term.log_prob.sum() for name, term in all_terms if not term.is_prior}
        total = torch.stack([*terms.values()]).sum() if terms else torch.zeros(())
        gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if total.requires_grad:
            gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    slopes = {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(params.items(), gradients, strict=True)
    }
    return {name: term.detach() for name, term in terms.items()}, slopes


def _sloping_sites(
    log_posterior: LogPosterior,
    params: Params,
    arguments: Arguments,
    direction: Params,
    terms: Params,
) -> list[str]:
    """The observed sites and factors whose log density changes smoothly along a direction in which
    the gradient of their sum is 0. Empty if none depends on these latents, or if the gradient is
    not 0 nearby (a kink).

    Args:
        log_posterior: the model.
        params: unconstrained values of all latents, at which to look.
        arguments: one batch, as the model's arguments.
        direction: by latent that is moved, the direction of its elements.
        terms: log density by site at `params`.
    """
    sides: list[dict[str, Tensor]] = []
    for step in (sign * step for step in _STEPS for sign in (1, -1)):
        moved = {name: params[name] + step * way for name, way in direction.items()}
        side, slopes = _likelihood_slopes(log_posterior, {**params, **moved}, arguments)
        if not sides and all(torch.equal(side[name], term) for name, term in terms.items()):
            return []  # nothing depends on them
        if any(bool(slopes[name][way != 0].any()) for name, way in direction.items()):
            return []  # a kink: torch returns one of many subgradients
        sides.append(side)
    ups, downs = sides[::2], sides[1::2]
    return [
        name
        for name, term in terms.items()
        if _has_slope(
            [(float(up[name]), float(down[name])) for up, down in zip(ups, downs, strict=True)],
            torch.finfo(term.dtype).eps,
        )
    ]


def _direction(slope: Tensor) -> Tensor:
    """A direction in which to move a latent, to see whether the likelihood depends on it although
    autograd says that it does not; of the shape of `slope` (the likelihood's gradient
    with respect to that latent): between 0.5 and 1.5 at elements where the gradient is 0, and 0
    elsewhere. The numbers differ, so that sums and differences of moved elements both change.
    """
    turns = torch.arange(slope.numel(), device=slope.device, dtype=slope.dtype)
    return torch.where(slope == 0, (1 + torch.cos(2 * turns) / 2).reshape(slope.shape), 0.0)


def _has_slope(sides: list[tuple[float, float]], eps: float) -> bool:
    """Whether two successive step sizes of `_STEPS` give the same nonzero slope by central
    differences.

    Args:
        sides: for every step size, the function's values (one step up, one step down).
        eps: machine epsilon of the values.
    """
    slopes = [(up - down) / (2 * step) for step, (up, down) in zip(_STEPS, sides, strict=True)]
    errors = [
        eps * max(abs(up), abs(down)) / step for step, (up, down) in zip(_STEPS, sides, strict=True)
    ]
    return any(
        abs(one - other) <= _AGREEMENT * abs(other) and abs(other) > _ROUNDINGS * error
        for (one, other), error in zip(pairwise(slopes), errors[1:], strict=True)
    )


# ---------------------------------------------------------------------- priors


def improper_latents(
    log_posterior: LogPosterior, params: Params, arguments: Arguments
) -> list[str]:
    """The names of latents whose prior does not integrate to one: an `ImproperUniform`, or one that
    a mask leaves out for some elements or all. Priors by `pyro.factor` are not examined.

    Args:
        log_posterior: the model, after its preflight.
        params: unconstrained values of all latents.
        arguments: a batch, as the model's arguments.
    """
    with torch.no_grad():
        sites = log_posterior.run(params, arguments, log_posterior.first_indices()).sites
    kept = log_posterior.model_info.kept
    return [n for n in log_posterior.latents if n not in kept and _is_improper(sites[n])]


def _is_improper(site: Site) -> bool:
    mask = element_mask(site)
    if site.mask is False or (mask is not None and not bool(mask.all())):
        return True
    return any(
        isinstance(fn, dist.ImproperUniform) or getattr(fn, "_mask", None) is False
        for fn in layers(site.fn)
    )


def centered_latents(
    log_posterior: LogPosterior, params: Params, arguments: Arguments
) -> dict[str, list[str]]:
    """The latents whose prior scale depends on other latents: a dict from a latent's name to the
    names of these others; empty if there are none.

    With little data such a pair makes a funnel, which no step size fits (Betancourt and Girolami,
    Hamiltonian Monte Carlo for hierarchical models, 2015).

    Args:
        log_posterior: the model, after its preflight.
        params: unconstrained values of all latents.
        arguments: a batch, as the model's arguments.
    """
    latents, indices = list(log_posterior.latents), log_posterior.first_indices()
    with torch.no_grad():
        scales = _scales(log_posterior.run(params, arguments, indices).sites, latents)

        def changed_by(moved: Params) -> list[str]:
            run = log_posterior.run({**params, **moved}, arguments, indices)
            moved_scales = _scales(run.sites, latents).items()
            return [name for name, scale in moved_scales if not torch.equal(scale, scales[name])]

        # by different lengths, so that no two changes cancel
        moves = {name: _MOVE * (1 + place / len(latents)) for place, name in enumerate(latents)}
        parents: dict[str, list[str]] = {}
        if changed_by({name: params[name] + move for name, move in moves.items()}):
            for parent in latents:
                for name in changed_by({parent: params[parent] + _MOVE}):
                    if name != parent:
                        parents.setdefault(name, []).append(parent)
    return parents


def how_to_non_center(site: str, parents: list[str]) -> str:
    """Advice, as a sentence, on how to non-center the latent `site`, whose prior's scale depends on
    the latents `parents`."""
    names = " and ".join(f"'{parent}'" for parent in parents)
    return (
        f"a non-centered '{site}', whose prior's scale is {names}: pyro.poutine.reparam(model, "
        f"{{'{site}': LocScaleReparam(0.0)}}), from pyro.infer.reparam"
    )


def _scales(sites: Mapping[str, Site], latents: Iterable[str]) -> dict[str, Tensor]:
    """A dict from latent to the scale of its prior, a tensor, for those of the named latents whose
    distributions have a location and a scale; others are left out.
    """
    scales = {}
    for name in latents:
        inner: Any = next((fn for fn in layers(sites[name].fn) if hasattr(fn, "scale")), None)
        if hasattr(inner, "loc") and isinstance(inner.scale, Tensor):
            scales[name] = inner.scale
    return scales
