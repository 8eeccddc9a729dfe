"""Optimizers as pure functions: those of TorchOpt, and wrappers around those of torch.optim."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.schedules import Falling
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels.hyperparameters import Hyperparameters, Values
from pyro_scale.kernels.scheduled import Scheduled, find_schedules


class Optimizer(Protocol):
    """Protocol of an optimizer that minimizes a loss and is a pair of pure functions, as in
    TorchOpt: `init` makes its state, `update` takes a step.
    """

    def init(self, params: list[Tensor]) -> Any:
        """The optimizer's state (such as running means of gradients) before the first step, for
        these params.
        """
        ...

    def update(
        self, updates: list[Tensor], state: Any, *, params: list[Tensor], inplace: bool
    ) -> tuple[list[Tensor], Any]:
        """(Changes to add to the params, next state), from the gradients of a loss.

        Args:
            updates: gradients of the loss with respect to each param.
            state: state of the optimizer, from `init` or the last `update`.
            params: tensors that are optimized.
            inplace: whether the gradients' memory may be overwritten.
        """
        ...


class TorchOptim:
    """An optimizer of torch.optim with TorchOpt's functional interface: `update` returns changes
    and the next state, and writes nothing in place.

    Args:
        factory: function from params to an optimizer, such as `lambda params:
            torch.optim.SGD(params, lr=0.1)`.
    """

    def __init__(self, factory: Callable[[list[Tensor]], torch.optim.Optimizer]):
        self._factory = factory

    def init(self, params: list[Tensor]) -> Any:
        return {}

    def update(
        self, updates: list[Tensor], state: Any, *, params: list[Tensor], inplace: bool = False
    ) -> tuple[list[Tensor], Any]:
        leaves = [torch.nn.Parameter(param.detach().clone()) for param in params]
        optimizer = self._factory(list(leaves))
        for leaf, gradient in zip(leaves, updates, strict=True):
            leaf.grad = gradient.detach().clone()
        if state:
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": copy.deepcopy(state), "param_groups": groups})
        try:
            optimizer.step()
        except TypeError as error:
            raise ArgumentError(
                f"optimizer: {type(optimizer).__name__} evaluates its objective several times a "
                "step, which minibatches do not allow; use Adam or SGD"
            ) from error
        moved = [leaf.detach() - param for leaf, param in zip(leaves, params, strict=True)]
        kept = optimizer.state_dict()["state"]
        return moved, {
            place: {name: torch.as_tensor(value) for name, value in entries.items()}
            for place, entries in kept.items()
        }


@dataclass(frozen=True, kw_only=True)
class Optimizing(Hyperparameters):
    """Base of methods that move params by an optimizer, such as MAP and variational inference.
    Among the hyperparameters of a step is then `step_sizes`: the values at that step of the
    optimizer's learning-rate schedules, if it has any.
    """

    optimizer: Optimizer | Scheduled

    def _columns(self, steps: range) -> dict[str, Tensor]:
        columns = super()._columns(steps)
        if isinstance(self.optimizer, Scheduled):
            columns["step_sizes"] = self.optimizer.step_sizes(steps)
        return columns

    def over(self, num_steps: int) -> Self:
        same = super().over(num_steps)
        if not isinstance(same.optimizer, Scheduled):
            return same
        return dataclasses.replace(same, optimizer=same.optimizer.over(num_steps))

    def optimizer_at(self, values: Values) -> Optimizer:
        """The optimizer to use at one step: if it has learning-rate schedules, with their values at
        this step; otherwise the same optimizer at all steps.

        Args:
            values: hyperparameters of the step by name; `step_sizes` has the schedules' values,
                `[schedules]`.
        """
        if isinstance(self.optimizer, Scheduled):
            return self.optimizer.at(values["step_sizes"])
        return self.optimizer


def as_optimizer(optimizer: Any) -> Optimizer | Scheduled:
    """The optimizer that a user's argument stands for: Adam with learning rate 0.01 for None; one
    of TorchOpt, with its schedules separated; or a wrapper of torch.optim's for a factory.

    Args:
        optimizer: optimizer of TorchOpt; or a function from params to one of torch.optim; or None.

    Raises:
        ArgumentError: the argument is none of these.
    """
    import torchopt

    if optimizer is None:
        return torchopt.adam(1e-2)
    if isinstance(optimizer, torchopt.base.GradientTransformation):
        return find_schedules(optimizer)
    if callable(optimizer):
        made = _try_factory(optimizer)
        if isinstance(made, torch.optim.Optimizer):
            return TorchOptim(optimizer)
    raise ArgumentError(
        f"optimizer={optimizer!r}: pass one of TorchOpt's functional ones, such as "
        "torchopt.adam(1e-2), or a factory, lambda params: torch.optim.Adam(params, lr=1e-2)"
    )


def falling_adam(early_stopping: bool) -> Scheduled:
    """Adam whose learning rate falls to 0: from 0.01 at the start to 0 at the end of a run.

    Args:
        early_stopping: whether the run may end early; the rate is then 0.01 / (1 + step / 1,000),
            as the length is not known.
    """
    import torchopt

    falling = Falling(-1e-2)  # downhill
    schedule = falling.__call__ if early_stopping else falling
    return Scheduled((torchopt.transform.scale_by_adam(), schedule))


def init_optimizer(optimizer: Optimizer, params: list[Tensor]) -> Any:
    """The optimizer's state before the first step, as a pytree of tensors."""
    import torchopt

    return torchopt.pytree.tree_map(torch.as_tensor, optimizer.init(params))


def ascend(
    optimizer: Optimizer, gradients: list[Tensor], state: Any, params: list[Tensor]
) -> tuple[list[Tensor], Any]:
    """Moves params by one step of an optimizer, so that a function increases. Returns (params after
    the step, the optimizer's next state).

    Args:
        optimizer: optimizer that minimizes; it receives the negative gradients.
        gradients: gradient of the function to maximize, for each param.
        state: state of the optimizer.
        params: params before the step.
    """
    downhill = [-gradient for gradient in gradients]
    updates, state = optimizer.update(downhill, state, params=params, inplace=False)
    return [param + update for param, update in zip(params, updates, strict=True)], state


def is_pure(optimizer: Optimizer | Scheduled) -> bool:
    """Whether an optimizer's step is a pure function of tensors, so that it can be vmapped over
    chains and traced; tries a step to find out. False for optimizers of torch.optim, and for those
    that read numbers out of their state.
    """
    if isinstance(optimizer, Scheduled):
        return is_pure(optimizer.at(torch.ones(len(optimizer.schedules))))

    def step(param: Tensor, state: Any) -> tuple[list[Tensor], Any]:
        return ascend(optimizer, [param], state, [param])

    if isinstance(optimizer, TorchOptim):
        return False
    params = torch.ones(2, 1)
    with exclusive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how fast operations are under vmap
        try:
            state = torch.vmap(lambda param: init_optimizer(optimizer, [param]))(params)
            torch.vmap(step)(params, state)
        except (RuntimeError, TypeError, ValueError):
            return False
    return True


def _try_factory(factory: Callable[..., Any]) -> Any:
    try:
        return factory([torch.nn.Parameter(torch.zeros(1))])
    except Exception as error:
        raise ArgumentError(f"optimizer: the factory failed on a parameter ({error})") from error
