"""Finds the site whose log density made a chain NaN or infinite, by repeating its last step."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.rows import Arguments
from pyro_scale.engine.draws import Draws
from pyro_scale.engine.step import Target, to_params
from pyro_scale.engine.step_recorder import RecordedStep
from pyro_scale.model.diagnose import find_broken_site
from pyro_scale.run.problem import Problem

#: Distances from 0, in units of the farthest start: beyond the first, the step size may have thrown
#: the chain out; beyond the second, log densities overflow and no site is blamed.
_FAR, _FARTHEST = 5.0, 1e6
#: Advice on a site whose log density is not finite at values that chains visit.
WITHIN = (
    "give the latents that it depends on distributions whose supports end there, or clamp what it "
    "takes of them"
)


class Broken(NamedTuple):
    """The site whose log density made a chain non-finite.

    Attributes:
        site: name of the site whose log density is not finite.
        finding: what the site's log density is, for error messages: "NaN", "infinite", or the text
            of the error that the model raised.
        is_far: True if the chain is so far from its start that a too large step size may be the
            cause.
    """

    site: str
    finding: str
    is_far: bool


class Watched:
    """A log posterior on one minibatch, as a sampler's kernel sees it, that records where it was
    evaluated.

    Attributes:
        position: unconstrained parameters [D] at the last evaluation; once a gradient is not
            finite, those of the first such evaluation.
        gradient: gradient [D], at `position`, of the log joint divided by N, the number of rows of
            the data; NaN if the evaluation raised an error.
    """

    def __init__(self, target: Target, position: Tensor):
        self._target, self.position = target, position
        self.gradient = torch.zeros_like(position)

    @property
    def num_data(self) -> int:
        """N, the number of rows of the whole data."""
        return self._target.num_data

    def grad(self, position: Tensor) -> tuple[Tensor, Evaluation]:
        """The gradient of the wrapped log posterior, unchanged. As long as gradients have been
        finite, the position and the gradient are also stored as attributes.

        Returns:
            (Gradient [D], at a position [D], of the log joint divided by N, the number of rows of
            the data; the model's evaluation with the log joint in nats).
        """
        is_sound = bool(torch.isfinite(self.gradient).all())
        if is_sound:
            self.position, self.gradient = position, torch.full_like(position, torch.nan)
        gradient, evaluation = self._target.grad(position)
        if is_sound:
            self.gradient = gradient
        return gradient, evaluation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def broken_sites(
    problem: Problem, draws: Draws, batch: Arguments | None = None
) -> dict[int, Broken]:
    """A dict from the number of a chain that stopped to the site whose log density made the chain
    non-finite, for error messages.

    Chains are left out whose last step was not recorded, or for which no single site is found. The
    dict is empty if the run used features of a frozen base, as the recorded rows are these
    features.

    Args:
        problem: model, data and starts of the run.
        draws: the draws of the run, with its failures.
        batch: the model's arguments at the last step, if they are not from the problem's data; None
            if they are.
    """
    if problem.features is not None:
        return {}
    broken = {}
    for failure in draws.failures:
        steps = draws.last_steps.get(failure.chain)
        site = None
        with contextlib.suppress(Exception):  # its error would hide the chain's own error
            site = _broken_site(problem, steps[-1], batch) if steps else None
        if site is not None:
            broken[failure.chain] = site
    return broken


def _broken_site(problem: Problem, step: RecordedStep, batch: Arguments | None) -> Broken | None:
    engine, device = problem.engine, problem.positions.device
    state, values, noise, arguments, indices = pytree.tree_map_only(
        Tensor,
        lambda leaf: leaf.to(device),
        (step.state, step.values, step.noise, step.arguments, step.indices),
    )
    if arguments is None:
        arguments = batch or problem.data.first()
    position = state["position"]
    target = Target(
        engine.density, engine.layout, arguments, indices, engine.vectorized, engine.whitening
    )
    watched = Watched(target, position)
    with contextlib.suppress(Exception):  # of the model, or of a kernel that moves all chains
        state = type(engine.kernel.init(position, values, position))(**state)
        engine.kernel.update(state, watched, watched.own(values), engine.pad(noise))
    params = to_params(engine.whitening, watched.position)
    distance = float(params.abs().max() / (1 + problem.positions.abs().max()))
    if not distance <= _FARTHEST:
        return None
    site, finding = find_broken_site(
        problem.log_posterior, engine.layout.unflatten(params), arguments, indices
    )
    return None if site is None else Broken(site, finding, distance > _FAR)
