"""Selects a network's weights by name, by module or by kind of module."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from pyro_scale.errors import ArgumentError

#: A shell-style pattern of names, one of the network's modules or weights, or a class of modules.
Choice = str | nn.Module | nn.Parameter | type[nn.Module]

#: The most names that a message shows.
_MOST_SHOWN = 8


def select(
    net: nn.Module,
    include: Choice | Iterable[Choice] | None,
    exclude: Choice | Iterable[Choice] | None,
) -> list[str]:
    """The names of the weights that are included and not excluded, in the network's order.

    Tied weights have one name in the result, the first; each of their names selects them.

    Args:
        net: the network.
        include: patterns of names, modules, weights or classes of modules to include; None for all
            weights with `requires_grad`.
        exclude: patterns of names, modules, weights or classes of modules to leave out; None for
            none.

    Raises:
        ArgumentError: no weight matches one of these, or no weight remains.
    """
    if include is None:
        chosen = {id(weight) for weight in net.parameters() if weight.requires_grad}
        if not chosen:
            raise ArgumentError(
                f"bayesianize: all weights of {type(net).__name__} are frozen "
                "(requires_grad=False): say with include= which of them are to be Bayesian"
            )
    else:
        chosen = set(_matches(net, "include", include))
    if exclude is not None:
        chosen -= set(_matches(net, "exclude", exclude))
    if not chosen:
        raise ArgumentError("bayesianize: include and exclude leave no weight to be Bayesian about")
    return [name for name, weight in net.named_parameters() if id(weight) in chosen]


def _matches(net: nn.Module, argument: str, choices: Choice | Iterable[Choice]) -> Iterator[int]:
    """Yields `id(weight)` of the weights that match any of the user's choices (patterns of names,
    modules, weights, classes of modules).

    Args:
        net: the network.
        argument: name of the user's argument, for messages.
        choices: one choice or several.

    Raises:
        ArgumentError: a choice matches no weight, or is none of these.
    """
    single = isinstance(choices, str | nn.Module | type | Tensor)
    listed: Any = choices if isinstance(choices, Iterable) and not single else [choices]
    for choice in listed:
        paths = list(_match(net, argument, choice))
        if not paths:
            what = choice if isinstance(choice, type) else type(choice)
            shown = f"'{choice}'" if isinstance(choice, str) else what.__name__
            raise ArgumentError(f"{argument}: no weight is in {shown}; {_names(net)}")
        yield from paths


def _match(net: nn.Module, argument: str, choice: Choice) -> Iterable[int]:
    """`id(weight)` of each weight that matches one choice; empty if there are none.

    Args:
        net: the network.
        argument: name of the user's argument, for messages.
        choice: a pattern of names, a module, a weight or a class of modules.
    """
    if isinstance(choice, str):
        named = net.named_parameters(remove_duplicate=False)
        return [id(weight) for name, weight in named if _is_named(name, choice)]
    if isinstance(choice, nn.Module):
        if not any(choice is module for module in net.modules()):
            raise ArgumentError(
                f"{argument}: this {type(choice).__name__} is no part of the "
                f"{type(net).__name__}: pass one of net.modules(), or a pattern of names"
            )
        return [id(weight) for weight in choice.parameters()]
    if isinstance(choice, nn.Parameter):
        return [id(weight) for weight in net.parameters() if weight is choice]
    if isinstance(choice, type) and issubclass(choice, nn.Module):
        modules = (module for module in net.modules() if isinstance(module, choice))
        return [id(weight) for module in modules for weight in module.parameters()]
    raise ArgumentError(
        f"{argument}={str(choice)[:100]}: pass patterns of names ('head', '*.bias'), modules of "
        "the network, or classes of modules (nn.LayerNorm)"
    )


def _is_named(name: str, pattern: str) -> bool:
    """Whether a shell-style pattern matches a weight's name, or the name of a module that contains
    the weight (`"head"` matches `"head.0.bias"`)."""
    prefixes = itertools.accumulate(name.split("."), "{}.{}".format)
    return any(fnmatchcase(prefix, pattern) for prefix in prefixes)


def _names(net: nn.Module) -> str:
    """A phrase for messages with the first names of a network's weights, and their number if not
    all are shown."""
    names = [name for name, _ in net.named_parameters(remove_duplicate=False)]
    more = "" if len(names) <= _MOST_SHOWN else f", ... ({len(names)} in all)"
    return f"its weights are {', '.join(names[:_MOST_SHOWN])}{more}"
