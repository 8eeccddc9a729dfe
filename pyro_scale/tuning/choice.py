"""What is to be chosen, and what was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.kernels import Kernel
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.modes import Modes
from pyro_scale.tuning.pilot import Pilot
from pyro_scale.tuning.windows import Window

#: What chains move in: coordinates whitened by a matrix, by Kronecker factors, by elements and a
#: few directions, or by elements; or latents themselves.
Precondition: TypeAlias = Literal["auto", "dense", "kron", "low_rank", "diag"] | Gaussian | None

#: Runs chains: (problem, steps, seed, values of each step, ... for `simulate`) -> draws.
Simulate = Callable[..., Draws]


def lr_in_words(kernel: Kernel) -> str:
    """The step size of a kernel, which may be a number, a schedule or a dict by site, for users."""
    lr = kernel.hyperparameters()["lr"]
    if callable(lr):
        return "lr, a schedule"
    return "lr by site" if isinstance(lr, Mapping) else f"lr={float(lr):.3g}"


@dataclass(frozen=True)
class Asked:
    """What is to be chosen.

    Attributes:
        lr: whether the step size is.
        friction: whether the friction is.
        precondition: the geometry.
        starts: whether chains' starts are.
        anchor: whether there are control variates, or where their anchor is.
        subtract_noise: whether gradient noise is taken off the injected noise.
        num_samples: draws of each chain.
        warmup_steps: steps before the first; None where they are to be chosen.
        thinning: steps from one draw to the next; None likewise.
    """

    lr: bool
    friction: bool
    precondition: Precondition
    starts: bool
    anchor: bool | Mapping[str, Tensor]
    subtract_noise: bool
    num_samples: int
    warmup_steps: int | None
    thinning: int | None


@dataclass(frozen=True)
class Choice:
    """What was chosen, and how.

    Attributes:
        problem: chains in their stationary law, with kernel and geometry.
        steps: of the run; where warm-up was chosen it is over.
        modes: of the posterior, where they were looked for.
        window: the last of warm-up; None where chains were trained.
        pilot: of the step size, where it was chosen.
        passes: gradients of rows that it took, over N, by stage.
        attrs: numbers and words for the run's facts.
        reasons: of each choice, in words.
        trained: steps of an optimizer that each chain's start took; None where posteriors have a
            geometry.
        heat: what minibatches add to the temperature at most, over it, by the gradients of all
            rows; None where that is not known.
    """

    problem: Problem
    steps: Steps
    modes: Modes | None
    window: Window | None
    pilot: Pilot | None
    passes: Mapping[str, float]
    attrs: Mapping[str, Any]
    reasons: Mapping[str, str]
    trained: int | None = None
    heat: float | None = None

    def reasons_at(self, thinning: int) -> dict[str, str]:
        """The reasons, for a run that ended with so many steps from one draw to the next."""
        reasons = dict(self.reasons)
        if thinning != self.steps.thinning:
            reasons["thinning"] = (
                f"{thinning} steps from one draw to the next, as draws {self.steps.thinning} steps "
                "apart depended on each other"
            )
        return reasons
