"""Takes TorchOpt's optimizers apart whose learning rate is a schedule (a function of the step's
number).

TorchOpt calls a schedule inside of `update`, with a counter from its state.  A compiled step cannot
call Python, and vmap fails if the schedule reads the counter's value.  So schedules are taken out
of the optimizer, and their values are inputs of each step, like those of hyperparameters.  TorchOpt
has no public attribute for an optimizer's parts; they are read from its functions' closures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_scale.core.schedules import Falling
from pyro_scale.errors import ArgumentError

if TYPE_CHECKING:
    from torchopt.base import GradientTransformation

#: A schedule: number of a step -> factor on the optimizer's updates.
StepSize = Callable[[Any], Any]


@dataclass(frozen=True)
class Scheduled:
    """An optimizer of TorchOpt (a chain of transformations of the gradient) whose learning-rate
    schedules are kept apart, so that their values can be inputs of a compiled step.

    Attributes:
        links: TorchOpt's transformations and the schedules (step -> factor), in the order in which
            they are applied.
    """

    links: tuple[GradientTransformation | StepSize, ...]

    @property
    def schedules(self) -> list[StepSize]:
        """A list of the optimizer's learning-rate schedules, functions from a step's number to a
        factor, in the order in which they are applied.
        """
        return [link for link in self.links if callable(link)]

    def step_sizes(self, steps: range) -> Tensor:
        """The factors (such as learning rates) that all schedules give at these steps, in float64,
        `[steps, schedules]`.

        Raises:
            ArgumentError: a schedule does not return a number.
        """
        return torch.stack([_values(schedule, steps) for schedule in self.schedules], dim=1)

    def over(self, num_steps: int) -> Scheduled:
        """A copy for a run of known length: schedules that are `Falling` reach 0 after `num_steps`
        steps.
        """
        links = [link.over(num_steps) if isinstance(link, Falling) else link for link in self.links]
        return Scheduled(tuple(links))

    def at(self, step_sizes: Tensor) -> GradientTransformation:
        """The TorchOpt optimizer of one step, in which each schedule is replaced by its factor at
        that step.

        Args:
            step_sizes: factors of the schedules at the step, `[schedules]`.
        """
        import torchopt

        sizes: Any = iter(step_sizes.unbind())  # TorchOpt's types allow only numbers
        return torchopt.chain(
            *(
                torchopt.transform.scale(next(sizes)) if callable(link) else link
                for link in self.links
            )
        )


def find_schedules(optimizer: GradientTransformation) -> GradientTransformation | Scheduled:
    """The optimizer as a `Scheduled`, which keeps its learning-rate schedules apart; the optimizer
    itself if it has no schedules.
    """
    scheduled = Scheduled(tuple(_links(optimizer)))
    return scheduled if scheduled.schedules else optimizer


def _links(optimizer: GradientTransformation) -> list[GradientTransformation | StepSize]:
    """The transformations and schedules that an optimizer consists of, in order; nested chains are
    flattened. An optimizer that is not a chain is the only link."""
    import torchopt

    if isinstance(optimizer, torchopt.base.ChainedGradientTransformation):
        return [link for part in optimizer.transformations for link in _links(part)]
    code = _code(optimizer)
    if code is _code(torchopt.combine.chain_flat(torchopt.transform.scale(1.0))):
        return _links(inspect.getclosurevars(optimizer.update).nonlocals["inner"])
    if code is _code(torchopt.transform.scale_by_schedule(float)):
        return [inspect.getclosurevars(optimizer.update).nonlocals["step_size_fn"]]
    return [optimizer]


def _code(optimizer: GradientTransformation) -> Any:
    """The code object of an optimizer's `update`, which tells by which function of TorchOpt the
    optimizer was made; None if there is none."""
    return getattr(optimizer.update, "__code__", None)


def _values(schedule: StepSize, steps: range) -> Tensor:
    """A schedule's factors at these steps, float64 `[steps]`.

    The schedule is called once for all steps if it is arithmetic on tensors; otherwise step by
    step, with numbers or, as TorchOpt does, with tensors.

    Raises:
        ArgumentError: the schedule fails, or does not return numbers.
    """
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
