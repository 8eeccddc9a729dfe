"""A run's shadow: the run again at half the step, close beside it.

The shadow starts where the run did, takes twice as many steps on the same path of noise (each
normal split in two), and batches of its own with the law of the run's.  So the two move together,
and their difference scatters less than either.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from pyro_scale.core.randomness import Purpose, RefinedNoise, derived_seed
from pyro_scale.drive.draws import Draws, Steps
from pyro_scale.drive.indices import Sampling
from pyro_scale.drive.progress import Progress
from pyro_scale.drive.simulate import simulate
from pyro_scale.errors import NonFiniteError
from pyro_scale.infer.base import with_base_run
from pyro_scale.infer.divergence import message
from pyro_scale.infer.result import Result
from pyro_scale.infer.setup import Setup
from pyro_scale.kernels import Kernel


@dataclass(frozen=True)
class Course:
    """How a run was run, for one that repeats it.

    Attributes:
        setup: what it started from, before a frozen base was run.
        kernel: with the step size that was taken.
        steps: how many, and which were kept.
        sampling: how rows were drawn.
        share_batches: whether all chains had the same.
        compile: whether steps became one program.
        progress: whether a bar was shown.
        finished: the chains that reached the end.
    """

    setup: Setup
    kernel: Kernel
    steps: Steps
    sampling: Sampling
    share_batches: bool
    compile: bool | Literal["auto"]
    progress: bool
    finished: tuple[int, ...]


def with_shadow(course: Course, result: Result, count: int) -> tuple[Result, Result]:
    """So many first draws of the run, and the shadow's, of chains that finished in both.

    Raises:
        NonFiniteError: all of the shadow's chains became NaN or infinite.
    """
    draws = _shadow(course, count)
    places = [i for i, chain in enumerate(course.finished) if chain in draws.finished]
    short = dataclasses.replace(
        result,
        positions=result.positions[torch.tensor(places)[:, None], torch.arange(count)],
        sample_stats={k: v[places, :count] for k, v in result.sample_stats.items()},
    )
    chains = [course.finished[place] for place in places]
    return short, dataclasses.replace(short, positions=draws.positions[chains])


def _shadow(course: Course, count: int) -> Draws:
    """The run at half the step, as far as so many draws."""
    engine = dataclasses.replace(course.setup.engine, kernel=course.kernel)
    setup = with_base_run(dataclasses.replace(course.setup, engine=engine))
    positions, seed = setup.positions, setup.seed
    steps = Steps(count, 2 * course.steps.warmup_steps, 2 * course.steps.thinning)
    tape = {
        name: column.repeat_interleave(2, 0)[: steps.total]
        for name, column in course.kernel.tape(course.steps.total).items()
    }
    tape["lr"] = tape["lr"] / 2
    shape = (course.kernel.normals, engine.num_latents)
    noise = RefinedNoise(seed, len(positions), shape, positions.dtype, positions.device)
    other = dataclasses.replace(setup, seed=derived_seed(seed, 0, Purpose.SHADOW))
    batches = other.batches(len(positions), course.sampling, course.share_batches)
    title = f"{type(course.kernel).__name__} at half the step"
    with Progress(steps.total, title, course.progress) as bar:
        draws = simulate(
            setup.engine, positions, batches, tape, steps, seed, course.compile, bar, noise=noise
        )
    if draws.error is not None:
        raise draws.error
    if not set(draws.finished) & set(course.finished):
        raise NonFiniteError(message(draws, tape["lr"]))
    return draws
