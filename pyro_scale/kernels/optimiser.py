"""Optimisers as pure functions: TorchOpt's as they are, torch.optim's made so."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torchopt
from torch import Tensor

from pyro_scale.core.exclusive import exclusive
from pyro_scale.errors import ArgumentError


class Optimiser(Protocol):
    """What TorchOpt's functional optimisers are."""

    def init(self, params: list[Tensor]) -> Any:
        """The state before the first step."""
        ...

    def update(
        self, updates: list[Tensor], state: Any, *, params: list[Tensor], inplace: bool
    ) -> tuple[list[Tensor], Any]:
        """(What is added to params, the next state), given gradients of a loss."""
        ...


class TorchOptim:
    """An optimiser of torch.optim as a pure function: its state goes in and comes out.

    Args:
        factory: params -> an optimiser, such as `lambda params: torch.optim.SGD(params, lr=0.1)`.
    """

    def __init__(self, factory: Callable[[list[Tensor]], torch.optim.Optimizer]):
        self._factory = factory

    def init(self, params: list[Tensor]) -> Any:
        return {}

    def update(
        self, updates: list[Tensor], state: Any, *, params: list[Tensor], inplace: bool = False
    ) -> tuple[list[Tensor], Any]:
        leaves = [torch.nn.Parameter(param.detach().clone()) for param in params]
        optimiser = self._factory(list(leaves))
        for leaf, gradient in zip(leaves, updates, strict=True):
            leaf.grad = gradient.detach().clone()
        if state:
            groups = optimiser.state_dict()["param_groups"]
            optimiser.load_state_dict({"state": copy.deepcopy(state), "param_groups": groups})
        try:
            optimiser.step()
        except TypeError as error:
            raise ArgumentError(
                f"optimiser: {type(optimiser).__name__} evaluates its objective several times a "
                "step, which minibatches do not allow; use Adam or SGD"
            ) from error
        moved = [leaf.detach() - param for leaf, param in zip(leaves, params, strict=True)]
        kept = optimiser.state_dict()["state"]
        return moved, {
            place: {name: torch.as_tensor(value) for name, value in entries.items()}
            for place, entries in kept.items()
        }


def as_optimiser(optimiser: Any) -> Optimiser:
    """What a user passed: one of TorchOpt's, or a factory of one of torch.optim's.

    Raises:
        ArgumentError: it is neither.
    """
    if optimiser is None:
        return torchopt.adam(1e-2)
    if isinstance(optimiser, torchopt.base.GradientTransformation):
        return optimiser
    if callable(optimiser):
        made = _tried(optimiser)
        if isinstance(made, torch.optim.Optimizer):
            return TorchOptim(optimiser)
    raise ArgumentError(
        f"optimiser={optimiser!r}: pass one of TorchOpt's functional ones, such as "
        "torchopt.adam(1e-2), or a factory, lambda params: torch.optim.Adam(params, lr=1e-2)"
    )


def begun(optimiser: Optimiser, params: list[Tensor]) -> Any:
    """The optimiser's first state, all of it tensors."""
    return torchopt.pytree.tree_map(torch.as_tensor, optimiser.init(params))


def stepped(
    optimiser: Optimiser, gradients: list[Tensor], state: Any, params: list[Tensor]
) -> tuple[list[Tensor], Any]:
    """(Params after a step uphill, the optimiser's next state)."""
    downhill = [-gradient for gradient in gradients]
    updates, state = optimiser.update(downhill, state, params=params, inplace=False)
    return [param + update for param, update in zip(params, updates, strict=True)], state


def is_pure(optimiser: Optimiser) -> bool:
    """Whether steps go through vmap and can be traced; some read their state's values."""

    def step(param: Tensor, state: Any) -> tuple[list[Tensor], Any]:
        return stepped(optimiser, [param], state, [param])

    if isinstance(optimiser, TorchOptim):
        return False
    params = torch.ones(2, 1)
    with exclusive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how fast operations are under vmap
        try:
            state = torch.vmap(lambda param: begun(optimiser, [param]))(params)
            torch.vmap(step)(params, state)
        except (RuntimeError, TypeError, ValueError):
            return False
    return True


def _tried(factory: Callable[..., Any]) -> Any:
    try:
        return factory([torch.nn.Parameter(torch.zeros(1))])
    except Exception as error:
        raise ArgumentError(f"optimiser: the factory failed on a parameter ({error})") from error
