"""Finds latents that a likelihood depends on without a gradient: `.detach()` and the like cut it,
and every method here follows gradients."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.core.signals import raise_if_from_handler
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
    """Sites whose log density depends on latents by which no gradient of the likelihood is.

    Args:
        log_posterior: the model, after its preflight.
        params: unconstrained, where to look.
        arguments: one batch.

    Returns:
        Such a site, a factor or an observed one -> these latents.  None where no slope is known:
        steps, kinks, too little precision, a model that does not run elsewhere.
    """
    likelihood = _Likelihood(log_posterior, arguments)
    cut: dict[str, list[str]] = {}
    try:
        here, slopes = likelihood.slopes(params)
        flat = {name: _direction(slope) for name, slope in slopes.items() if (slope == 0).any()}
        names = list(flat)
        for latents in [names[i::_GROUPS] for i in range(min(_GROUPS, len(names)))]:
            along = {name: flat[name] for name in latents}
            for site in likelihood.sloping_sites(params, along, here):
                cut.setdefault(site, []).extend(latents)
    except Exception as error:
        raise_if_from_handler(error)
    return cut


class _Likelihood:
    """The log densities of observed sites and factors on one batch."""

    def __init__(self, log_posterior: LogPosterior, arguments: Arguments):
        self._log_posterior, self._arguments = log_posterior, arguments
        self._indices = log_posterior.first_indices()

    def _terms(self, params: Params) -> dict[str, Tensor]:
        run = self._log_posterior.run(params, self._arguments, self._indices)
        terms = terms_of(run.sites).items()
        return {name: term.log_prob.sum() for name, term in terms if not term.is_prior}

    def slopes(self, params: Params) -> tuple[dict[str, float], dict[str, Tensor]]:
        """(Log density by site; its total's gradient by latent, 0 where nothing leads there)."""
        with own_generator(), torch.enable_grad():
            free = {name: value.detach().requires_grad_() for name, value in params.items()}
            terms = self._terms(free)
            total = torch.stack([*terms.values()]).sum() if terms else torch.zeros(())
            gradients: tuple[Tensor | None, ...] = (None,) * len(free)
            if total.requires_grad:
                gradients = torch.autograd.grad(total, list(free.values()), allow_unused=True)
        found = {
            name: torch.zeros_like(value) if slope is None else slope
            for (name, value), slope in zip(params.items(), gradients, strict=True)
        }
        return {name: float(term.detach()) for name, term in terms.items()}, found

    def sloping_sites(
        self, params: Params, along: dict[str, Tensor], here: dict[str, float]
    ) -> list[str]:
        """Sites whose slope along a direction is known and is not 0, though no gradient is."""

        def moved(step: float) -> dict[str, Tensor]:
            return {**params, **{name: params[name] + step * way for name, way in along.items()}}

        with own_generator(), torch.no_grad():
            ahead = self._terms(moved(_STEPS[0]))
            if {name: float(term) for name, term in ahead.items()} == here:
                return []
            pairs = [(s, self._terms(moved(s)), self._terms(moved(-s))) for s in _STEPS]
        for step in (step * sign for step in _STEPS for sign in (1, -1)):
            _, slopes = self.slopes(moved(step))
            if any(bool(slopes[name][way != 0].any()) for name, way in along.items()):
                return []  # at a kink the gradient is one of many
        return [
            name
            for name, term in ahead.items()
            if _has_slope(
                [(step, float(up[name]), float(down[name])) for step, up, down in pairs],
                torch.finfo(term.dtype).eps,
            )
        ]


def _direction(slope: Tensor) -> Tensor:
    """Steps of one sign and several sizes where a gradient is 0: neither sums nor differences of
    elements stay as they are."""
    turns = torch.arange(slope.numel(), device=slope.device, dtype=slope.dtype)
    return torch.where(slope == 0, (1 + torch.cos(2 * turns) / 2).reshape(slope.shape), 0.0)


def _has_slope(pairs: list[tuple[float, float, float]], eps: float) -> bool:
    """Whether two steps agree about a slope that is not 0."""
    slopes = [(up - down) / (2 * step) for step, up, down in pairs]
    errors = [eps * max(abs(up), abs(down)) / step for step, up, down in pairs]
    return any(
        abs(one - other) <= _AGREE * abs(other) and abs(other) > _ERRORS * error
        for (one, other), error in zip(pairwise(slopes), errors[1:], strict=True)
    )
