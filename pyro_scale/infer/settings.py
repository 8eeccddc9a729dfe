"""A sampler's arguments, checked, and which of them are to be chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from torch import Tensor

from pyro_scale.core.validation import AUTO, as_flag, is_auto
from pyro_scale.engine.choose_executor import check_compile
from pyro_scale.errors import ArgumentError
from pyro_scale.infer.precondition import as_precondition
from pyro_scale.kernels import Kernel
from pyro_scale.tuning.plan import Settings

#: The hyperparameters that can be chosen.
_CHOSEN = ("lr", "friction")

Anchor: TypeAlias = bool | Mapping[str, Tensor] | Literal["auto"]


def settings_of(
    name: str,
    kernel_class: type[Kernel],
    hyperparameters: dict[str, Any],
    precondition: Any,
    control_variates: Anchor,
    subtract_noise: bool,
    starts: bool,
    compile: bool | Literal["auto"],
) -> tuple[Kernel, Settings]:
    """(The kernel, with stand-ins where a hyperparameter is to be chosen; what was asked for).

    Args:
        name: of the method.
        kernel_class: its kernel's.
        hyperparameters: that were passed, all of them the kernel's.
        precondition: as the user passed it, like the others that follow but for `starts`.
        starts: whether chains' starts are to be chosen.

    Raises:
        ArgumentError: a value that means nothing, or nothing beside another one.
    """
    check_compile(compile)
    _check_anchor(control_variates)
    subtract_noise = as_flag("subtract_noise", subtract_noise)
    hyperparameters = {"lr": AUTO, **hyperparameters}
    chosen = _chosen_of(kernel_class, hyperparameters)
    _check_noise(name, kernel_class, control_variates, subtract_noise)
    coordinates = as_precondition(precondition, kernel_class, hyperparameters, chosen)
    if kernel_class.adjusted and "lr" in chosen and coordinates is None:
        raise ArgumentError(
            f"lr='auto': {name} finds it in whitened coordinates: leave precondition and mass out, "
            "or pass a number for lr"
        )
    has_anchor = control_variates
    if is_auto(control_variates) and (
        kernel_class.adjusted or "lr" not in chosen or subtract_noise
    ):
        has_anchor = False
    defaults = {field.name: field.default for field in dataclasses.fields(kernel_class)}
    defaults["lr"] = 1.0  # until it is chosen
    kernel = kernel_class(**hyperparameters | {each: defaults[each] for each in chosen})
    if coordinates is None:  # where the friction is the kernel's default
        chosen.discard("friction")
    return kernel, Settings(
        name=name,
        chosen=frozenset(chosen),
        precondition=coordinates,
        control_variates=has_anchor,
        subtract_noise=subtract_noise,
        starts=starts,
        compile=compile,
    )


def _chosen_of(kernel_class: type[Kernel], hyperparameters: Mapping[str, Any]) -> set[str]:
    """The hyperparameters that are `"auto"`."""
    for name, value in hyperparameters.items():
        also = " or 'auto'" if name in _CHOSEN else ""
        if isinstance(value, str) and not (also and value == AUTO):
            raise ArgumentError(f"{name}={value!r}: pass a number{also}")
    chosen = {name for name, value in hyperparameters.items() if is_auto(value)}
    if "lr" in chosen and kernel_class.theory is None:
        raise ArgumentError(
            f"lr='auto': {kernel_class.__name__} has no theory to choose by; pass a number"
        )
    return chosen


def _check_anchor(control_variates: Anchor) -> None:
    is_one = isinstance(control_variates, bool | Mapping) and control_variates != {}
    if not (is_auto(control_variates) or is_one):
        raise ArgumentError(
            f"control_variates={control_variates!r}: pass True, False, 'auto' or a dict of "
            "constrained values"
        )


def _check_noise(
    name: str, kernel_class: type[Kernel], control_variates: Anchor, subtract_noise: bool
) -> None:
    """Refuses to take off noise that there is not, or twice."""
    anchored, theory = bool(control_variates) and not is_auto(control_variates), kernel_class.theory
    if kernel_class.adjusted and (subtract_noise or anchored):
        asked = "subtract_noise" if subtract_noise else "control_variates"
        raise ArgumentError(
            f"{asked}: {name} takes all rows at every step, whose gradients have no noise: leave "
            "it out, or use BAOA"
        )
    if not subtract_noise:
        return
    if theory is None:
        raise ArgumentError(f"subtract_noise: {kernel_class.__name__} has no theory")
    if not theory.heated:
        raise ArgumentError(f"subtract_noise: {name} adapts to the noise of minibatches itself")
    if anchored:
        raise ArgumentError("subtract_noise: control_variates leave no noise to subtract")
