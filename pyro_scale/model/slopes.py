"""Finds latents that a likelihood depends on without a gradient: `.detach()` and the like cut it,
and every method here follows gradients."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pyro_scale.core.exclusive import own_generator, raise_if_from_handler
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
    """Observed sites and factors that depend on latents although the likelihood's gradient by
    these is 0.

    Args:
        log_posterior: the model, after its preflight.
        params: unconstrained, where to look.
        arguments: one batch.

    Returns:
        Site -> these latents, by name.  A site is left out where no slope of it is known: at steps
        and kinks, with too little precision, where the model does not run at other params.
    """
    likelihood = _Likelihood(log_posterior, arguments)
    cut: dict[str, list[str]] = {}
    try:
        here, slopes = likelihood.slopes(params)
        flat = {name: _direction(slope) for name, slope in slopes.items() if (slope == 0).any()}
        names = list(flat)
        for latents in [names[i::_GROUPS] for i in range(min(_GROUPS, len(names)))]:
            along = {name: flat[name] for name in latents}
            for site in likelihood.sites_without_gradient(params, along, here):
                cut.setdefault(site, []).extend(latents)
    except Exception as error:
        raise_if_from_handler(error)
    return cut


class _Likelihood:
    """The log densities of observed sites and factors on one batch."""

    def __init__(self, log_posterior: LogPosterior, arguments: Arguments):
        self._log_posterior, self._arguments = log_posterior, arguments
        self._indices = log_posterior.first_indices()

    def slopes(self, params: Params) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(Log density by site; its total's gradient by latent, 0 where nothing leads there)."""
        with own_generator(), torch.enable_grad():
            free = {name: value.detach().requires_grad_() for name, value in params.items()}
            sites = self._log_posterior.run(free, self._arguments, self._indices).sites
            every = terms_of(sites).items()
            terms = {name: term.log_prob.sum() for name, term in every if not term.is_prior}
            total = torch.stack([*terms.values()]).sum() if terms else torch.zeros(())
            gradients: tuple[Tensor | None, ...] = (None,) * len(free)
            if total.requires_grad:
                gradients = torch.autograd.grad(total, list(free.values()), allow_unused=True)
        slopes = {
            name: torch.zeros_like(value) if gradient is None else gradient
            for (name, value), gradient in zip(params.items(), gradients, strict=True)
        }
        return {name: term.detach() for name, term in terms.items()}, slopes

    def sites_without_gradient(
        self, params: Params, along: dict[str, Tensor], here: dict[str, Tensor]
    ) -> list[str]:
        """Names of sites that have a slope along a direction, where the total has no gradient.

        Args:
            params: unconstrained, where to look.
            along: the direction, of the latents that move.
            here: log density by site at `params`.
        """
        sides: list[dict[str, Tensor]] = []
        for step in (sign * step for step in _STEPS for sign in (1, -1)):
            moved = {name: params[name] + step * way for name, way in along.items()}
            there, slopes = self.slopes({**params, **moved})
            if not sides and all(torch.equal(there[name], term) for name, term in here.items()):
                return []  # nothing depends on them
            if any(bool(slopes[name][way != 0].any()) for name, way in along.items()):
                return []  # a kink, at which torch's gradient is one of many
            sides.append(there)
        ups, downs = sides[::2], sides[1::2]
        return [
            name
            for name, term in here.items()
            if _has_slope(
                [
                    (step, float(up[name]), float(down[name]))
                    for step, up, down in zip(_STEPS, ups, downs, strict=True)
                ],
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
