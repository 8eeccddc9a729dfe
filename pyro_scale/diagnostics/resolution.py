"""The check that a dtype's spacing is fine enough for the draws.

Rounding to multiples of u adds u^2 / 12 to a variance: the error is uniform between -u / 2 and
u / 2, and nearly independent of the rounded value if u is no longer than the sd (Widrow, Kollar and
Liu 1996).  Draws of variance V had the variance V - u^2 / 12 before, so their sd is more than 5%
too large if u^2 / 12 > (1 - 1 / 1.05^2) V, that is from u = 1.11 sds on.

The state of a sampler is rounded at every step, and a move of less than u / 2 is lost.  For moves
of size m, rounding adds a fraction u^2 / (12 m^2) to their variance, so the same bound holds with m
in place of the sd.  The size of single moves is not recorded.  But k moves of size m lead at most
k m away, so two draws that are k steps and a distance d apart show that m >= d / k.  A sampler in
whitened coordinates, which are of order 1, loses no moves; only its draws are rounded, once.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import torch
from torch import Tensor

from pyro_scale.core.layout import Layout, dtype_name
from pyro_scale.core.validation import evenly
from pyro_scale.diagnostics.convergence import select_elements
from pyro_scale.diagnostics.policy import MIXING
from pyro_scale.diagnostics.report import Finding, Verdict
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.storage.lazy_draws import spread
from pyro_scale.tuning.policy import TOLERANCE

#: Largest fraction of the draws' variance that may be due to rounding.
_MOST_ROUNDED = 1 - 1 / (1 + TOLERANCE.sd) ** 2
#: Draws of each chain that are checked.
_CHECKED_DRAWS = 1000
#: Lengths of the directions along which derivatives are taken, and the largest difference between
#: the derivatives, divided by their lengths, relative to the largest of them.
_LENGTHS, _PROPORTIONAL = (1.0, math.e, math.e**2), 1e-2


def resolution(result: PosteriorDraws) -> list[Finding]:
    """Findings on sites, deterministic ones included, whose draws are constant, or rounded by too
    coarse a dtype. Empty if all is well or draws are few.

    A constant that depends on no latent is correct, and is no finding.

    Args:
        result: draws of a run above temperature 0.
    """
    if result.positions.shape[1] < MIXING.fewest_per_chain:
        return []
    dtypes = dict(zip(result.layout.names, result.layout.dtypes, strict=True))
    latents, findings = result.log_posterior.latents, []
    for name in result.shapes:
        values = select_elements(result, name)
        if not values.is_floating_point():
            continue
        dtype = dtypes.get(name, values.dtype)
        unconstrained = values[..., :0]  # none that differ from the values
        if name in dtypes and not (name in latents and result.log_posterior.is_unconstrained):
            unconstrained = _unconstrained(result, name)
        constant, rounding = _is_constant(values), _rounding(values, dtype)
        if bool(constant.any()) or bool((rounding > _MOST_ROUNDED).any()):
            chain = int(constant.any(1).int().argmax())
            depends = _depends_on_latents(result, name, chain)
            constant, rounding = constant & depends, torch.where(depends, rounding, 0)
        rounding = torch.cat([_rounding(unconstrained, dtype), rounding, rounding.new_zeros(1)])
        worst, steps = float(rounding.max()), f"of {dtype_name(dtype)}"
        if bool(_is_constant(unconstrained).any()) or bool(constant.any()):
            text = "an element is the same number in all draws of a chain"
            findings.append(_finding(name, "no", text, math.inf))
        elif worst > _MOST_ROUNDED:
            text = f"steps {steps} are {(12 * worst) ** 0.5:.2g} sds of the draws"
            findings.append(_finding(name, "no", text, worst / _MOST_ROUNDED))
        elif name in dtypes and _loses_moves(result, name):
            text = f"steps of the sampler may be as short as those {steps}"
            findings.append(_finding(name, "unknown", text, 1.0))
    return findings


def _finding(name: str, verdict: Verdict, text: str, severity: float) -> Finding:
    advice = "data without their mean, or the model and its data in float64 (x.double())"
    return Finding(name, "resolution", verdict, text, advice, severity)


def frozen_latents(result: PosteriorDraws) -> list[str]:
    """The names of latent sites with an unconstrained element that is the same in all draws of a
    chain; empty if there are none, draws are few, or the temperature is 0."""
    is_short = result.positions.shape[1] < MIXING.fewest_per_chain
    if is_short or result.attrs.get("temperature") == 0:
        return []
    latents = result.log_posterior.latents
    return [name for name in latents if bool(_is_constant(_unconstrained(result, name)).any())]


def _unconstrained(result: PosteriorDraws, name: str) -> Tensor:
    """Draws of a latent site in unconstrained space, for checks: `[chains, up to 1000 draws, up to
    200 elements]`, evenly spread over draws and elements."""
    places = spread(result.positions, _CHECKED_DRAWS)
    return result.unconstrained_elements(places, _columns(result, name))


def _columns(result: PosteriorDraws, name: str) -> Tensor:
    """Indices, among the D unconstrained params, of the elements of a latent site that are checked:
    up to 200, evenly spread."""
    place = result.layout.slices()[name]
    return place.start + evenly(place.stop - place.start, MIXING.elements)


def _is_constant(draws: Tensor) -> Tensor:
    """Whether an element is the same number in all draws of a chain, booleans `[chains, elements]`.

    Args:
        draws: draws of a site's elements, `[chains, draws, elements]`.
    """
    return (draws == draws[:, :1]).all(1)


def _rounding(draws: Tensor, dtype: torch.dtype) -> Tensor:
    """The fraction of each element's variance that rounding to a dtype causes, `[elements]`; 0 for
    elements that are constant.

    Args:
        draws: draws of a site's elements, `[chains, draws, elements]`.
        dtype: dtype to which the numbers are rounded.
    """
    wide = draws.double()
    variance = (wide - wide.mean(1, keepdim=True)).square().mean((0, 1))
    return torch.where(variance > 0, _added_variance(wide, dtype, variance) / variance, 0)


def _added_variance(draws: Tensor, dtype: torch.dtype, variance: Tensor) -> Tensor:
    """The variance that rounding to a dtype adds to each element, `[elements]`; an upper bound,
    which takes less time, if that is harmless for every element.

    Args:
        draws: draws in double precision, `[chains, draws, elements]`.
        dtype: dtype to which the numbers are rounded.
        variance: variance of each element, relative to which the addition is harmless or not.
    """
    info = torch.finfo(dtype)
    largest_spacing = info.eps * draws.abs().amax((0, 1)).clamp(min=info.tiny)
    bound = largest_spacing.square() / 12
    if bool((bound <= _MOST_ROUNDED * variance).all()):
        return bound
    return spacing(draws, dtype).square().mean((0, 1)) / 12


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from each number to the next larger one that `dtype` can represent, float64 in
    the shape of `values`; draws cannot differ by less."""
    exponent = values.double().abs().clamp(min=torch.finfo(dtype).tiny).frexp().exponent
    return torch.finfo(dtype).eps * torch.exp2(exponent.double() - 1)


def _loses_moves(result: PosteriorDraws, name: str) -> bool:
    """Whether rounding to the dtype may lose the moves of single steps, because some element of a
    latent site moves so little in a step. False for whitened runs, or if the draws' step numbers
    are not recorded."""
    step = result.sample_stats.get("step")
    if step is None or result.attrs.get("whitened") or step.shape[1] < 2:
        return False
    places = torch.arange(step.shape[1])[-_CHECKED_DRAWS:]
    draws = result.unconstrained_elements(places, _columns(result, name)).double()
    steps = step[:, places].diff(dim=1).double()[..., None]
    least = (draws.diff(dim=1) / steps).square().mean((0, 1))
    rounding = _added_variance(draws, result.layout.dtype, least)
    return bool((rounding > _MOST_ROUNDED * least).any())


def _depends_on_latents(result: PosteriorDraws, name: str, chain: int) -> Tensor:
    """Whether each checked element of a site (up to 200) depends on latents, `[elements]`.

    Found by derivatives in a random direction at a chain's last draw, in float64 if the model runs
    in it. A derivative is proportional to the direction's length; rounding is not, such as that of
    the diagonal of a correlation matrix. True if there is no derivative.

    Args:
        result: draws of a run.
        name: name of the site.
        chain: number of the chain among those that finished.
    """
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

        tangent = (length * direction).to(position)
        return torch.func.jvp(value, (position,), (tangent,))[1] / length

    in_float64 = replace(layout, dtypes=(torch.float64,) * len(layout.names))
    for precise in (in_float64, layout):
        with contextlib.suppress(Exception):  # a model may raise anything in float64
            slopes = torch.stack([slope(precise, length) for length in _LENGTHS])
            gap, largest = slopes.amax(0) - slopes.amin(0), slopes.abs().amax(0)
            return (largest != 0) & ~(gap > _PROPORTIONAL * largest)
    return torch.ones(len(chosen), dtype=torch.bool)
