"""The settings that tuning may choose, and the choices that it made."""

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

#: Coordinates of chains: whitened by a matrix, by Kronecker factors, by elements and a few
#: directions, by elements, or by a given Gaussian; None for params themselves.
Precondition: TypeAlias = Literal["auto", "dense", "kron", "low_rank", "diag"] | Gaussian | None
#: Whether there are control variates, or constrained values of their anchor.
Anchor: TypeAlias = bool | Mapping[str, Tensor] | Literal["auto"]
#: Runs chains: (problem, steps, seed, hyperparameter columns, further arguments of the engine's
#: `simulate`) -> draws.
Simulate: TypeAlias = Callable[..., Draws]


@dataclass(frozen=True)
class Settings:
    """A sampler's settings that concern what is chosen.

    Attributes:
        name: name of the method.
        chosen: names of the hyperparameters that are chosen.
        precondition: coordinates of the chains.
        control_variates: whether there are any, or where their anchor is, or `"auto"`.
        subtract_noise: whether gradient noise is subtracted from the injected noise.
        starts: whether chains' starts are chosen.
        compile: whether steps are compiled.
    """

    name: str
    chosen: frozenset[str]
    precondition: Precondition
    control_variates: Anchor
    subtract_noise: bool
    starts: bool
    compile: bool | Literal["auto"]

    @property
    def chooses_lr(self) -> bool:
        """Whether the step size is chosen."""
        return "lr" in self.chosen

    @property
    def chooses_friction(self) -> bool:
        """Whether the friction is chosen."""
        return "friction" in self.chosen


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        problem: chains in their stationary distribution, with kernel and geometry.
        steps: of the run; it has no warm-up if that was chosen and is over.
        passes: passes through the data, by stage.
        reasons: the reason of each choice, in words.
        chooses_lr: whether the step size was chosen.
        warmup_steps: steps of each chain in warm-up; None if their number was set.
        modes: modes of the posterior; None if they were not searched for.
        window: the last window of warm-up; None if chains were trained.
        pilot: the pilots of the step size; None if it was set.
        trained: steps of the optimizer; None if chains were not trained.
        heat: relative rise of the temperature by minibatches, in the direction where it is largest;
            None if it is not known.
    """

    problem: Problem
    steps: Steps
    passes: Mapping[str, float]
    reasons: Mapping[str, str]
    chooses_lr: bool
    warmup_steps: int | None
    modes: Modes | None = None
    window: Window | None = None
    pilot: Pilot | None = None
    trained: int | None = None
    heat: float | None = None

    @property
    def attrs(self) -> dict[str, Any]:
        """Facts for the run's `attrs`."""
        attrs: dict[str, Any] = {"thinning": self.steps.thinning}
        if self.chooses_lr:
            attrs["lr_choice"] = self.reasons["step size"]
        if self.trained is not None:
            attrs["trained_steps"] = self.trained
        if self.warmup_steps is not None:
            attrs["warmup_steps"] = self.warmup_steps
        return attrs | {f"passes_{stage}": round(n, 2) for stage, n in self.passes.items()}

    def reasons_at(self, thinning: int) -> dict[str, str]:
        """The reasons, for a run that ended with this thinning."""
        reasons = dict(self.reasons)
        if thinning != self.steps.thinning:
            reasons["thinning"] = (
                f"{thinning} steps from one draw to the next, as draws {self.steps.thinning} steps "
                "apart depended on each other"
            )
        return reasons


def lr_in_words(kernel: Kernel) -> str:
    """The step size of a kernel, which may be a number, a schedule or a dict by site, for users."""
    lr = kernel.hyperparameters()["lr"]
    if callable(lr):
        return "lr, a schedule"
    return "lr by site" if isinstance(lr, Mapping) else f"lr={float(lr):.3g}"
