"""The coupled run: the run again at half the step size, driven by the same noise.

It starts at the same positions, takes twice as many steps on the same noise path (each normal is
split in two), and draws its own batches by the same rule.  The two runs stay close, so their
difference has less variance than either.
"""

from __future__ import annotations

import dataclasses

import torch

from pyro_scale.diagnostics.divergence import message
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.errors import NonFiniteError
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.rng.streams import RefinedNoise
from pyro_scale.run.blame import broken_sites
from pyro_scale.run.run import RunPlan


def run_coupled(
    plan: RunPlan, result: PosteriorDraws, count: int
) -> tuple[PosteriorDraws, PosteriorDraws]:
    """The first `count` draws of the run and of the coupled run, of chains that finished in both.

    Raises:
        NonFiniteError: all chains of the coupled run became NaN or infinite.
    """
    draws = _run_at_half_step(plan, count)
    places = [i for i, chain in enumerate(plan.finished) if chain in draws.finished]
    short = dataclasses.replace(
        result,
        positions=result.positions[torch.tensor(places)[:, None], torch.arange(count)],
        sample_stats={k: v[places, :count] for k, v in result.sample_stats.items()},
    )
    chains = [plan.finished[place] for place in places]
    return short, dataclasses.replace(short, positions=draws.positions[chains])


def _run_at_half_step(plan: RunPlan, count: int) -> Draws:
    """The run at half the step, as far as so many draws."""
    problem, kernel = plan.problem, plan.kernel
    steps = Steps(count, 2 * plan.steps.warmup_steps, 2 * plan.steps.thinning)
    columns = {
        name: column.repeat_interleave(2, 0)[: steps.total] for name, column in plan.columns.items()
    }
    columns["lr"] = columns["lr"] / 2
    shape, positions = (kernel.normals, problem.engine.num_latents), problem.positions
    noise = RefinedNoise(
        problem.seed, range(len(positions)), shape, positions.dtype, positions.device
    )
    # batches of its own, as the seed is another
    other = dataclasses.replace(problem, seed=derived_seed(problem.seed, 0, Purpose.SHADOW))
    coupled = dataclasses.replace(plan, problem=other, columns=columns, steps=steps)
    title = f"{type(kernel).__name__} at half the step"
    draws = coupled.execute(
        title, seed=problem.seed, noise=noise
    ).draws  # momenta start as the run's
    if draws.error is not None:
        raise draws.error
    if not set(draws.finished) & set(plan.finished):
        raise NonFiniteError(message(draws, columns["lr"], broken_sites(other, draws)))
    return draws
