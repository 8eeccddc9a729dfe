"""Finds latents that a likelihood depends on without a gradient: `.detach()` and the like cut it,
and every method here follows gradients."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.terms import terms_of

#: Steps to either side, for the slope by differences: it is known where two steps agree to this
#: part of it, and where it is so many rounding errors from 0.
_STEPS, _AGREE, _ERRORS = (1e-1, 1e-2, 1e-3), 0.05, 100.0
#: Groups of latents that are moved one after another, at most.
_GROUPS = 8


def cut_gradients(
    log_posterior: LogPosterior, params: Params, arguments: Arguments
) -> dict[str, list[str]]:
    """Sites whose log density depends on latents by which its gradient is 0.

    Args:
        log_posterior: the model, after its preflight.
        params: unconstrained, where to look.
        arguments: one batch.

    Returns:
        Such a site, a factor or an observed one -> these latents.  None where no slope is known:
        steps, kinks, too little precision.
    """
    indices = log_posterior.first_indices()

    def likelihoods(params: Params) -> dict[str, Tensor]:
        terms = terms_of(log_posterior.run(params, arguments, indices).sites)
        return {name: term.log_prob.sum() for name, term in terms.items() if not term.is_prior}

    with own_generator(), torch.enable_grad():
        free = {name: value.detach().requires_grad_() for name, value in params.items()}
        here = likelihoods(free)
        is_flat = {name: _flat_elements(total, free) for name, total in here.items()}
    cut: dict[str, list[str]] = {}
    for name, flat in is_flat.items():
        for latents in [list(flat)[i::_GROUPS] for i in range(min(_GROUPS, len(flat)))]:

            def moved(step: float, site: str = name, along: list[str] = latents) -> float:
                others = {latent: params[latent] + step * is_flat[site][latent] for latent in along}
                return float(likelihoods({**params, **others})[site])

            with own_generator(), torch.no_grad():
                if moved(_STEPS[0]) == float(here[name]):
                    continue
                pairs = [(step, moved(step), moved(-step)) for step in _STEPS]
            if _has_slope(pairs, torch.finfo(here[name].dtype).eps):
                cut.setdefault(name, []).extend(latents)
    return cut


def _flat_elements(total: Tensor, params: Params) -> dict[str, Tensor]:
    """Latent -> 1 or -1, in turn, at the elements by which the gradient is 0, if there are some."""
    slopes: tuple[Tensor | None, ...] = (None,) * len(params)
    if total.requires_grad:
        slopes = torch.autograd.grad(
            total, list(params.values()), retain_graph=True, allow_unused=True
        )
    signs = {}
    for (name, value), slope in zip(params.items(), slopes, strict=True):
        flat = torch.ones_like(value) if slope is None else (slope == 0).to(value)
        if bool(flat.any()):
            turns = torch.arange(value.numel(), device=value.device).reshape(value.shape)
            signs[name] = flat * (1 - turns % 2 * 2)
    return signs


def _has_slope(pairs: list[tuple[float, float, float]], eps: float) -> bool:
    """Whether two steps agree about a slope that is not 0."""
    slopes = [(up - down) / (2 * step) for step, up, down in pairs]
    errors = [eps * max(abs(up), abs(down)) / step for step, up, down in pairs]
    return any(
        abs(one - other) <= _AGREE * abs(other) and abs(other) > _ERRORS * error
        for (one, other), error in zip(pairwise(slopes), errors[1:], strict=True)
    )
