"""Which site's log density made a chain NaN or infinite: its last step is taken again."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.rows import Arguments
from pyro_scale.engine.draws import Draws
from pyro_scale.engine.step import Target, to_params
from pyro_scale.engine.step_recorder import RecordedStep
from pyro_scale.model.diagnose import find_broken_site
from pyro_scale.run.problem import Problem

#: How much farther out than all starts a chain is that a long step has thrown out, where log
#: densities overflow; and from where on no site is looked for.
_FAR, _FARTHEST = 5.0, 1e6
#: What to do about a site whose log density ends at values that chains visit.
WITHIN = (
    "give the latents that it depends on distributions whose supports end there, or clamp what it "
    "takes of them"
)


class Broken(NamedTuple):
    """Where a chain stopped.

    Attributes:
        site: whose log density is not finite there.
        finding: what it is.
        is_far: whether the chain is so far out that the step size may be the cause.
    """

    site: str
    finding: str
    is_far: bool


class Watched:
    """A target that remembers where it was asked for a gradient, and the answer: the last one, or
    the first that is not finite."""

    def __init__(self, target: Target, position: Tensor):
        self._target, self.position = target, position
        self.gradient = torch.zeros_like(position)

    @property
    def num_data(self) -> int:
        """N."""
        return self._target.num_data

    def grad(self, position: Tensor) -> tuple[Tensor, Any]:
        """As the target's."""
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
    """The site whose log density broke each failed chain, by the chain's number.

    Chains are left out that have run away, whose last step was not recorded, or whose rows are
    features of a frozen base.

    Args:
        problem: what the run started from.
        draws: what it kept.
        batch: of the last step, where that is none of the problem's.
    """
    if problem.features is not None:
        return {}
    broken = {}
    for failure in draws.failures:
        steps = draws.last_steps.get(failure.chain)
        found = None
        with contextlib.suppress(Exception):  # whatever is in the way, the chain's error goes first
            found = _broken_site(problem, steps[-1], batch) if steps else None
        if found is not None:
            broken[failure.chain] = found
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
    with contextlib.suppress(Exception):  # what the model raises; a kernel that moves all chains
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
