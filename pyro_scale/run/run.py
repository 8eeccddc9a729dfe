"""The course of a run: what its steps depend on, and taking them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyro_scale.data.batches import Batch, Batches
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.loop import simulate
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.kernels import Kernel
from pyro_scale.model.other_batches import check_batch, is_checked
from pyro_scale.run.frozen_features import with_base_run
from pyro_scale.run.problem import Setup


class Taken(NamedTuple):
    """What came of a course's steps.

    Attributes:
        setup: with its frozen base run.
        batches: that the steps took.
        draws: what is left of them.
    """

    setup: Setup
    batches: Batches
    draws: Draws

    @property
    def diverged(self) -> bool:
        """Whether a chain broke, and not for what was in its batch."""
        return bool(self.draws.failures) and not self.draws.failures[0].bad_batch


@dataclass(frozen=True)
class Course:
    """How a run is run.

    Attributes:
        setup: what it starts from, before a frozen base is run.
        tape: the hyperparameters' values, step by step.
        steps: how many, and which are kept.
        sampling: how rows are drawn.
        share_batches: whether all chains have the same.
        compile: whether steps become one program.
        progress: whether a bar is shown.
        earlier: what the same object has compiled before.
        finished: the chains that reached the end, once they have.
    """

    setup: Setup
    tape: Mapping[str, Tensor]
    steps: Steps
    sampling: Sampling
    share_batches: bool
    compile: bool | Literal["auto"]
    progress: bool
    earlier: Earlier
    finished: tuple[int, ...] = ()

    @property
    def kernel(self) -> Kernel:
        """With the step size that is taken."""
        return self.setup.engine.kernel

    def halved(self, times: int) -> tuple[Course, dict[str, str]]:
        """(The course at half the step size, why in words), after chains have diverged."""
        lr = self.kernel.lr / 2
        kernel = dataclasses.replace(self.kernel, lr=lr)
        setup, tape = self.setup.with_engine(kernel=kernel), kernel.tape(self.steps.total)
        why = (
            f"lr={lr:.2g}: halved {times} times, as a chain diverged, from what the mode suggested"
        )
        return dataclasses.replace(self, setup=setup, tape=tape), {"lr_choice": why}

    def taken(self, title: str, seed: int | None = None, **how: Any) -> Taken:
        """Takes its steps.

        Args:
            title: of the progress bar.
            seed: of what is drawn besides batches; that of the setup by default.
            how: where it goes on from and where draws go, for `simulate`.
        """
        setup = with_base_run(self.setup)
        batches = setup.batches(len(setup.positions), self.sampling, self.share_batches)
        with Progress(self.steps.total, title, self.progress) as bar:
            draws = simulate(
                setup.engine,
                setup.positions,
                batches,
                self.tape,
                self.steps,
                setup.seed if seed is None else seed,
                self.compile,
                bar,
                self.earlier,
                inspect=_inspection(setup),
                **how,
            )
        return Taken(setup, batches, draws)


def _inspection(setup: Setup) -> Callable[[Tensor, Batch], None] | None:
    """Tries the rules on batches that the run meets, at the first chain's position."""
    known, layout = setup.log_posterior, setup.engine.layout
    if setup.features is not None or not is_checked(known.understanding):
        return None

    first = setup.data.first()

    def inspect(positions: Tensor, batch: Batch) -> None:
        if bool(torch.isfinite(positions[0]).all()):
            check_batch(known, layout.unflatten(positions[0]), *batch.of_chain(0), first)

    return inspect
