"""TorchOpt's optimizers whose learning rate is a schedule.

TorchOpt calls a schedule inside of `update`, with a counter from its state.  A compiled step cannot
call Python, and vmap fails if the schedule reads the counter's value.  So schedules are taken out
of the optimizer, and their values are inputs of each step, like those of hyperparameters.  TorchOpt
has no public attribute for an optimizer's parts; they are read from its functions' closures.
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

#: Number of a step -> factor of the optimizer's updates.
StepSize = Callable[[Any], Any]


@dataclass(frozen=True)
class Scheduled:
    """A chain of TorchOpt's transformations, some of which multiply by a schedule.

    Attributes:
        links: transformations and schedules, in order.
    """

    links: tuple[GradientTransformation | StepSize, ...]

    @property
    def schedules(self) -> list[StepSize]:
        """The schedules, in order."""
        return [link for link in self.links if not isinstance(link, GradientTransformation)]

    def step_sizes(self, steps: range) -> Tensor:
        """Values of all schedules at steps, in float64, `[steps, schedules]`.

        Raises:
            ArgumentError: a schedule does not return a number.
        """
        return torch.stack([_values(schedule, steps) for schedule in self.schedules], dim=1)

    def over(self, num_steps: int) -> Scheduled:
        """A copy whose `Falling` schedules reach 0 after `num_steps` steps."""
        links = [link.over(num_steps) if isinstance(link, Falling) else link for link in self.links]
        return Scheduled(tuple(links))

    def at(self, step_sizes: Tensor) -> GradientTransformation:
        """The optimizer of one step, with the schedules' values `[schedules]`."""
        sizes: Any = iter(step_sizes.unbind())  # TorchOpt's types allow only numbers
        return torchopt.chain(
            *(
                link
                if isinstance(link, GradientTransformation)
                else torchopt.transform.scale(next(sizes))
                for link in self.links
            )
        )


def find_schedules(optimizer: GradientTransformation) -> GradientTransformation | Scheduled:
    """The optimizer with its schedules taken out; unchanged if it has none."""
    scheduled = Scheduled(tuple(_links(optimizer)))
    return scheduled if scheduled.schedules else optimizer


def _links(optimizer: GradientTransformation) -> list[GradientTransformation | StepSize]:
    """Links of an optimizer that may be a chain."""
    if isinstance(optimizer, ChainedGradientTransformation):
        return [link for part in optimizer.transformations for link in _links(part)]
    code = _code(optimizer)
    if code is _FLAT:
        return _links(inspect.getclosurevars(optimizer.update).nonlocals["inner"])
    if code is _BY_SCHEDULE:
        return [inspect.getclosurevars(optimizer.update).nonlocals["step_size_fn"]]
    return [optimizer]


def _code(optimizer: GradientTransformation) -> Any:
    """Code of an optimizer's update, which identifies the function of TorchOpt that made it."""
    return getattr(optimizer.update, "__code__", None)


_FLAT = _code(torchopt.combine.chain_flat(torchopt.transform.scale(1.0)))
_BY_SCHEDULE = _code(torchopt.transform.scale_by_schedule(float))


def _values(schedule: StepSize, steps: range) -> Tensor:
    """A schedule's values at steps, `[steps]`: at once if it is arithmetic on tensors, else one by
    one, from numbers or, as TorchOpt does, from tensors."""
    counts = torch.tensor(steps)
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.vmap(schedule)(counts.double()).double().view(len(steps)),
        lambda: _one_by_one(schedule, steps),
        lambda: _one_by_one(schedule, counts),
    )
    for way in ways:
        try:
            return way()
        except Exception as error:  # whatever a user's function raises
            failure = error
    raise ArgumentError(
        f"optimizer: the schedule of its lr must give a number at each step ({failure})"
    ) from failure


def _one_by_one(schedule: StepSize, counts: Iterable[Any]) -> Tensor:
    return torch.tensor([float(schedule(count)) for count in counts], dtype=torch.float64)
