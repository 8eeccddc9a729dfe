"""TorchOpt's optimizers whose learning rate is a schedule: step sizes are values of the step.

TorchOpt calls a schedule within each update, on a count in its state: Python that no compiled step
can call, and that vmap refuses where it asks for the count's value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torchopt
from torch import Tensor
from torchopt.base import ChainedGradientTransformation, GradientTransformation

from pyro_scale.core.schedules import Falling
from pyro_scale.errors import ArgumentError

#: A step's number -> what a chain's updates are multiplied by.
StepSize = Callable[[Any], Any]


@dataclass(frozen=True)
class Scheduled:
    """A chain of TorchOpt's with schedules in it.

    Attributes:
        links: the chain's, in order: transformations, and schedules of step sizes.
    """

    links: tuple[GradientTransformation | StepSize, ...]

    @property
    def schedules(self) -> list[StepSize]:
        """The schedules, in order."""
        return [link for link in self.links if not isinstance(link, GradientTransformation)]

    def step_sizes(self, steps: range) -> Tensor:
        """Every schedule's value at some steps in float64, `[steps, schedules]`.

        Raises:
            ArgumentError: a schedule gives no number.
        """
        return torch.stack([_values(schedule, steps) for schedule in self.schedules], dim=1)

    def over(self, num_steps: int) -> Scheduled:
        """A copy whose `Falling` step sizes are schedules that reach 0 after `num_steps`."""
        links = [link.over(num_steps) if isinstance(link, Falling) else link for link in self.links]
        return Scheduled(tuple(links))

    def at(self, step_sizes: Tensor) -> GradientTransformation:
        """The optimizer of a step, given its step sizes `[schedules]`."""
        sizes: Any = iter(step_sizes.unbind())  # TorchOpt's types know numbers alone
        return torchopt.chain(
            *(
                link
                if isinstance(link, GradientTransformation)
                else torchopt.transform.scale(next(sizes))
                for link in self.links
            )
        )


def find_schedules(optimizer: GradientTransformation) -> GradientTransformation | Scheduled:
    """An optimizer with its schedules laid open, or as it is if it has none."""
    scheduled = Scheduled(tuple(_links(optimizer)))
    return scheduled if scheduled.schedules else optimizer


def _links(optimizer: GradientTransformation) -> list[GradientTransformation | StepSize]:
    """A chain's links, for which TorchOpt has no name but those in its functions' closures."""
    if isinstance(optimizer, ChainedGradientTransformation):
        return [each for link in optimizer.transformations for each in _links(link)]
    code = _code(optimizer)
    if code is _FLAT:
        return _links(inspect.getclosurevars(optimizer.update).nonlocals["inner"])
    if code is _BY_SCHEDULE:
        return [inspect.getclosurevars(optimizer.update).nonlocals["step_size_fn"]]
    return [optimizer]


def _code(optimizer: GradientTransformation) -> Any:
    """What its update runs, the same for all that one function of TorchOpt's makes."""
    return getattr(optimizer.update, "__code__", None)


_FLAT = _code(torchopt.combine.chain_flat(torchopt.transform.scale(1.0)))
_BY_SCHEDULE = _code(torchopt.transform.scale_by_schedule(float))


def _values(schedule: StepSize, steps: range) -> Tensor:
    """A schedule's values at some steps: of all at once, if it is arithmetic on tensors, else one
    by one, as a function of a number or, as TorchOpt calls it, of a tensor."""
    counts = torch.tensor(steps)
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.vmap(schedule)(counts.double()).double().view(len(steps)),
        lambda: _one_by_one(schedule, steps),
        lambda: _one_by_one(schedule, counts),
    )
    for way in ways:
        try:
            return way()
        except Exception as error:  # whatever a function raises that is not meant for them
            failure = error
    raise ArgumentError(
        f"optimizer: the schedule of its lr must give a number at each step ({failure})"
    ) from failure


def _one_by_one(schedule: StepSize, counts: Iterable[Any]) -> Tensor:
    return torch.tensor([float(schedule(count)) for count in counts], dtype=torch.float64)
