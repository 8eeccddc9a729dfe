"""Whether draws are finer than the steps of their dtype.

Rounding to steps of u adds u^2 / 12 to a variance: an error that is uniform between -u / 2 and
u / 2 and nearly independent of what is rounded, once a step is no longer than the sd (Widrow,
Kollar and Liu 1996).  Of draws of variance V, V - u^2 / 12 was there before, so their sd is more
than 5% too large where u^2 / 12 > (1 - 1 / 1.05^2) V, that is from u = 1.11 sds on.

A sampler's state is rounded at every step, and one that moves by less than half of u does not
move.  With moves m the rounding adds the part u^2 / (12 m^2) to their variance: the same bound, of
moves in the place of sds.  It is not measured at each step; but k steps of sd m end at most k m
from where they began, so draws that are d apart, k steps after each other, tell that m >= d / k.
Where the sampler moves in whitened coordinates, which are of order 1, the state's steps are short
enough, and its draws are rounded once.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import torch
from torch import Tensor

from pyro_scale.core.layout import Layout, dtype_name
from pyro_scale.core.validation import evenly
from pyro_scale.diagnostics.convergence import some_elements
from pyro_scale.diagnostics.policy import MIXING
from pyro_scale.diagnostics.run_report import Finding, Verdict
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.storage.lazy_draws import spread
from pyro_scale.tuning.policy import TOLERANCE

#: The part of draws' variance that may come from rounding.
_MOST_ROUNDED = 1 - 1 / (1 + TOLERANCE.sd) ** 2
#: Draws of a chain that are looked at.
_DRAWS_SEEN = 1000
#: Lengths along which derivatives are taken, and by how much of the largest they may differ.
_LENGTHS, _PROPORTIONAL = (1.0, math.e, math.e**2), 1e-2


def resolution(result: PosteriorDraws) -> list[Finding]:
    """What there is to say of sites, deterministic ones too, whose draws are rounded or constant.

    A constant that no latent has an influence on is right as it is.

    Args:
        result: of a run, not at temperature 0.
    """
    if result.positions.shape[1] < MIXING.fewest_each:
        return []
    dtypes = dict(zip(result.layout.names, result.layout.dtypes, strict=True))
    found = []
    for name in result.shapes:
        values = some_elements(result, name)
        if not values.is_floating_point():
            continue
        dtype = dtypes.get(name, values.dtype)
        own = _unconstrained(result, name) if name in dtypes else values[..., :0]
        still, rounding = _is_constant(values), _rounding(values, dtype)
        if bool(still.any()) or bool((rounding > _MOST_ROUNDED).any()):
            chain = int(still.any(1).int().argmax())
            depends = _depends(result, name, chain)
            still, rounding = still & depends, torch.where(depends, rounding, 0)
        if bool(_is_constant(own).any()) or bool(still.any()):
            found.append(
                _finding(name, "no", "an element is the same number in all draws of a chain")
            )
            continue
        widest = float(torch.cat([_rounding(own, dtype), rounding, rounding.new_zeros(1)]).max())
        if widest > _MOST_ROUNDED:
            told = f"steps of {dtype_name(dtype)} are {(12 * widest) ** 0.5:.2g} sds of the draws"
            found.append(_finding(name, "no", told))
        elif name in dtypes and _rounds_moves(result, name):
            told = f"steps of the sampler may be as short as those of {dtype_name(dtype)}"
            found.append(_finding(name, "unknown", told))
    return found


def _finding(name: str, verdict: Verdict, told: str) -> Finding:
    advice = "data without their mean, or the model and its data in float64 (x.double())"
    return Finding(name, "resolution", verdict, told, advice)


def frozen_latents(result: PosteriorDraws) -> list[str]:
    """Latents with an unconstrained element that is the same in all draws of a chain."""
    if result.attrs.get("temperature") == 0 or result.positions.shape[1] < MIXING.fewest_each:
        return []
    latents = result.log_posterior.latents
    return [name for name in latents if bool(_is_constant(_unconstrained(result, name)).any())]


def _unconstrained(result: PosteriorDraws, name: str) -> Tensor:
    """Some draws of some elements of a latent, `[chains, some, elements]`."""
    places = spread(result.positions, _DRAWS_SEEN)
    return result.unconstrained_elements(places, _columns(result, name))


def _columns(result: PosteriorDraws, name: str) -> Tensor:
    place = result.layout.slices()[name]
    return place.start + evenly(place.stop - place.start, MIXING.elements)


def _is_constant(draws: Tensor) -> Tensor:
    """Which elements of which chains are, `[chains, elements]`."""
    return (draws == draws[:, :1]).all(1)


def _rounding(draws: Tensor, dtype: torch.dtype) -> Tensor:
    """The part of each element's variance that rounding to a dtype has added, `[elements]`; 0 of
    constants."""
    wide = draws.double()
    added = spacing(wide, dtype).square().mean((0, 1)) / 12
    variance = (wide - wide.mean(1, keepdim=True)).square().mean((0, 1))
    return torch.where(variance > 0, added / variance, 0)


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """From each value to the next one that a dtype has."""
    exponent = values.double().abs().clamp(min=torch.finfo(dtype).tiny).frexp().exponent
    return torch.finfo(dtype).eps * torch.exp2(exponent.double() - 1)


def _rounds_moves(result: PosteriorDraws, name: str) -> bool:
    """Whether a sampler's moves in a latent's own coordinates may be lost in rounding."""
    step = result.sample_stats.get("step")
    if step is None or result.attrs.get("whitened") or step.shape[1] < 2:
        return False
    places = torch.arange(step.shape[1])[-_DRAWS_SEEN:]
    draws = result.unconstrained_elements(places, _columns(result, name)).double()
    steps = step[:, places].diff(dim=1).double()[..., None]
    least = (draws.diff(dim=1) / steps).square().mean((0, 1))
    rounding = spacing(draws, result.layout.dtype).square().mean((0, 1)) / 12
    return bool((rounding > _MOST_ROUNDED * least).any())


def _depends(result: PosteriorDraws, name: str, chain: int) -> Tensor:
    """Which elements of a site latents have an influence on, `[elements]`: by derivatives in a
    random direction at a chain's last draw, in float64 if the model runs in it.  They are
    proportional to the direction's length, where rounding is not: that of the ones of a correlation
    matrix.  True where there is no derivative."""
    layout, log_posterior = result.layout, result.log_posterior
    position = result.positions[chain, -1].double()
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(position.shape, generator=generator, dtype=torch.float64)
    chosen = evenly(result.shapes[name].numel(), MIXING.elements)

    def slope(layout: Layout, length: float) -> Tensor:
        def value(position: Tensor) -> Tensor:
            sites = log_posterior.run(
                layout.unflatten(position),
                log_posterior.model_info.example,
                log_posterior.first_indices(),
            ).sites
            return sites[name].value.reshape(-1)[chosen]

        away = (length * direction).to(position)
        return torch.func.jvp(value, (position,), (away,))[1] / length

    for each in (replace(layout, dtypes=(torch.float64,) * len(layout.names)), layout):
        with contextlib.suppress(Exception):  # whatever a model says that does not run in float64
            slopes = torch.stack([slope(each, length) for length in _LENGTHS])
            spread, largest = slopes.amax(0) - slopes.amin(0), slopes.abs().amax(0)
            return (largest != 0) & ~(spread > _PROPORTIONAL * largest)
    return torch.ones(len(chosen), dtype=torch.bool)
