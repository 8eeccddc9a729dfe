"""Compares gradients with slopes: `.detach()`, `.item()` and the like cut gradients, and every
method here follows gradients."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.terms import terms_of

#: Steps to either side, of every element, for the slope by differences: it is known where two
#: steps agree to this part of it.
_STEPS, _AGREE = (1e-1, 1e-2, 1e-3), 0.02
#: Part of the slope by which the derivative must differ, and by how many rounding errors.
_WRONG, _ERRORS = 0.1, 100.0
#: Groups of latents that are moved one after another, at most.
_GROUPS = 8


def cut_gradients(
    log_posterior: LogPosterior, params: Params, arguments: Arguments
) -> dict[str, list[str]]:
    """Sites whose log density has another slope than its gradient says.

    Args:
        log_posterior: the model, after its preflight.
        params: unconstrained, where to look.
        arguments: one batch.

    Returns:
        Such a site -> the latents along which that is so.  None where no slope is known: steps,
        kinks, too little precision.
    """
    cut: dict[str, list[str]] = {}
    names = list(params)
    for latents in [names[i::_GROUPS] for i in range(min(_GROUPS, len(names)))]:
        for name in _cut_along(latents, log_posterior, params, arguments):
            cut.setdefault(name, []).extend(latents)
    return cut


def _cut_along(
    latents: list[str], log_posterior: LogPosterior, params: Params, arguments: Arguments
) -> list[str]:
    signs = {
        name: torch.arange(params[name].numel()).reshape(params[name].shape).to(params[name])
        for name in latents
    }
    indices = log_posterior.first_indices()

    def totals(step: float | Tensor) -> dict[str, Tensor]:
        moved = {name: params[name] + step * (sign % 2 * 2 - 1) for name, sign in signs.items()}
        terms = terms_of(log_posterior.run({**params, **moved}, arguments, indices).sites)
        return {name: term.log_prob.sum() for name, term in terms.items()}

    with own_generator(), torch.no_grad():
        pairs = [(step, totals(step), totals(-step)) for step in _STEPS]
    with own_generator(), torch.enable_grad():
        step = torch.zeros((), dtype=params[latents[0]].dtype, requires_grad=True)
        here = totals(step)
        derivatives = {name: _derivative(total, step) for name, total in here.items()}
    return [
        name
        for name, derivative in derivatives.items()
        if _differs(
            derivative,
            [(size, float(up[name]), float(down[name])) for size, up, down in pairs],
            torch.finfo(here[name].dtype).eps,
        )
    ]


def _derivative(total: Tensor, step: Tensor) -> float:
    """By autograd; 0 where nothing leads back to the step."""
    if not total.requires_grad:
        return 0.0
    (slope,) = torch.autograd.grad(total, step, retain_graph=True, allow_unused=True)
    return 0.0 if slope is None else float(slope)


def _differs(derivative: float, pairs: list[tuple[float, float, float]], eps: float) -> bool:
    """Whether two steps agree about a slope that is not the derivative."""
    slopes = [(up - down) / (2 * step) for step, up, down in pairs]
    errors = [eps * max(abs(up), abs(down)) / step for step, up, down in pairs]
    for (one, other), error in zip(pairwise(slopes), errors[1:], strict=True):
        agree = abs(one - other) <= _AGREE * abs(other)
        if agree and abs(other) > _ERRORS * error:
            return abs(other - derivative) > max(_WRONG * abs(other), _ERRORS * error)
    return False
