"""Checks a sampler's arguments, and finds which of them are to be chosen."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.validation import AUTO, as_count, as_flag, is_auto
from pyro_scale.engine.compile_step import check_compile
from pyro_scale.errors import ArgumentError, CallError, NotRunError
from pyro_scale.infer.approximation import fit_of
from pyro_scale.kernels import Kernel
from pyro_scale.results.call_checks import unknown_argument
from pyro_scale.tuning.choice import Precondition, Settings

if TYPE_CHECKING:
    from pyro_scale.infer.sampler import Sampler

#: The hyperparameters that can be "auto".
_CHOSEN = ("lr", "friction")

#: The argument `control_variates`: whether to use them, constrained values by site of the point
#: (anchor) to use, or `"auto"`.
Anchor: TypeAlias = bool | Mapping[str, Tensor] | Literal["auto"]


def settings_of(
    sampler: Sampler,
    hyperparameters: dict[str, Any],
    precondition: Any,
    control_variates: Anchor,
    subtract_noise: bool,
    starts: bool,
    compile: bool | Literal["auto"],
) -> tuple[Kernel, Settings]:
    """Checks the arguments of a sampler's constructor, and returns them as a sampler's kernel and
    settings.

    Args:
        sampler: the sampler, for its name and kernel class.
        hyperparameters: hyperparameters that the user passed, by name.
        precondition: coordinates of the chains, as the user passed them to `Sampler`.
        control_variates: value of this argument of `Sampler`.
        subtract_noise: value of this argument of `Sampler`.
        starts: whether the run is to choose the chains' starts.
        compile: value of this argument of `Sampler`.

    Returns:
        (The sampler's kernel, in which a hyperparameter that is `"auto"` has a placeholder until a
        run chooses it; the checked settings, which name those hyperparameters).

    Raises:
        ArgumentError: a value is out of range, or cannot be combined with another one.
        CallError: the kernel does not have a hyperparameter.
    """
    name, kernel_class = type(sampler).__name__, sampler.kernel_class
    defaults = {field.name: field.default for field in dataclasses.fields(kernel_class)}
    for argument in hyperparameters:
        if argument not in defaults:
            hint = unknown_argument(sampler, argument, defaults)
            raise CallError(
                f"{name} has no hyperparameter '{argument}'; it has {list(defaults)}: {hint}"
            )
    check_compile(compile)
    _check_anchor(control_variates)
    subtract_noise = as_flag("subtract_noise", subtract_noise)
    hyperparameters = {"lr": AUTO, **hyperparameters}
    chosen = _chosen_of(kernel_class, hyperparameters)
    _check_noise(name, kernel_class, control_variates, subtract_noise)
    coordinates = as_precondition(precondition, kernel_class, hyperparameters, chosen)
    if kernel_class.adjusted and "lr" in chosen and coordinates is None:
        raise ArgumentError(
            f"lr='auto': {name} chooses it in whitened coordinates: leave precondition and mass "
            "out, or pass a number for lr"
        )
    has_anchor = control_variates
    if is_auto(control_variates) and (
        kernel_class.adjusted or "lr" not in chosen or subtract_noise
    ):
        has_anchor = False
    defaults["lr"] = 1.0  # until it is chosen
    kernel = kernel_class(**hyperparameters | {argument: defaults[argument] for argument in chosen})
    if coordinates is None:  # here, "auto" friction means the kernel's default
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


def needs_all_rows(settings: Settings) -> bool:
    """Whether a run has to choose or measure something on all rows before its first step
    (lr="auto", a preconditioner, control variates or subtracted noise); then a sampler cannot be
    moved by single batches with `step`."""
    return bool(
        "lr" in settings.chosen
        or settings.precondition is not None
        or settings.control_variates
        or settings.subtract_noise
    )


def _chosen_of(kernel_class: type[Kernel], hyperparameters: Mapping[str, Any]) -> set[str]:
    """Names of the hyperparameters whose value is `"auto"`, which a run is to choose; an empty set
    if the user set all.

    Raises:
        ArgumentError: a hyperparameter is a text other than `"auto"`, or cannot be chosen; or lr is
            `"auto"` and the kernel class has no theory by which it could be chosen.
    """
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
    """Raises unless `control_variates` is a bool, `"auto"`, or a non-empty dict with the point
    (values by site) at which control variates are expanded.

    Raises:
        ArgumentError: the value is of another kind.
    """
    is_one = isinstance(control_variates, bool | Mapping) and control_variates != {}
    if not (is_auto(control_variates) or is_one):
        raise ArgumentError(
            f"control_variates={control_variates!r}: pass True, False, 'auto' or a dict of "
            "constrained values"
        )


def _check_noise(
    name: str, kernel_class: type[Kernel], control_variates: Anchor, subtract_noise: bool
) -> None:
    """Raises if `subtract_noise` or control variates make no sense for the sampler: if there is no
    minibatch noise to remove, or both would remove it.

    Args:
        name: name of the sampler, for messages.
        kernel_class: class of the sampler's kernel.
        control_variates: value of this argument of `Sampler`.
        subtract_noise: value of this argument of `Sampler`.

    Raises:
        ArgumentError: the message names the argument.
    """
    anchored, theory = bool(control_variates) and not is_auto(control_variates), kernel_class.theory
    if kernel_class.adjusted and (subtract_noise or anchored):
        argument = "subtract_noise" if subtract_noise else "control_variates"
        raise ArgumentError(
            f"{argument}: {name} takes all rows at every step, whose gradients have no noise: "
            "leave it out, or use BAOA"
        )
    if not subtract_noise:
        return
    if theory is None:
        raise ArgumentError(f"subtract_noise: {kernel_class.__name__} has no theory")
    if not theory.heated:
        raise ArgumentError(f"subtract_noise: {name} adapts to the noise of minibatches itself")
    if anchored:
        raise ArgumentError("subtract_noise: control_variates leave no noise to subtract")


#: A fit with a Gaussian, in the words of error messages.
A_FIT = "a fit of all sites that has been run (Laplace, VI, EKF)"
#: The kinds of coordinates.
_KINDS = "auto", "dense", "kron", "low_rank", "diag"


def as_precondition(
    precondition: Any,
    kernel_class: type[Kernel],
    hyperparameters: Mapping[str, Any],
    chosen: set[str],
) -> Precondition:
    """The checked value of `precondition`: `"auto"`, another kind of coordinates as text, the
    Gaussian of a fit, or None if chains move in the params themselves.

    Args:
        precondition: what the user passed.
        kernel_class: class of the sampler's kernel.
        hyperparameters: hyperparameters that the user passed, by name.
        chosen: names of the hyperparameters that a run chooses.

    Raises:
        ArgumentError: `precondition` has none of these values, or other arguments have no meaning
            in such coordinates.
    """
    by_site = [name for name, value in hyperparameters.items() if isinstance(value, Mapping)]
    has_mass = hyperparameters.get("mass", 1.0) != 1.0 or "mass" in by_site
    if is_auto(precondition):
        by_hand = "lr" not in chosen or has_mass or by_site or not kernel_class.whitens
        return None if by_hand else AUTO
    if precondition is None:
        return None
    if not kernel_class.whitens:
        raise ArgumentError(
            f"precondition: {kernel_class.__name__} has a preconditioner of its own; leave it out"
        )
    if has_mass or by_site:
        raise ArgumentError(
            f"precondition={precondition!r} moves chains in other coordinates than the sites', "
            f"where {'mass' if has_mass else by_site[0]} has no meaning: leave one of them out"
        )
    if precondition in _KINDS[1:]:
        return precondition
    gaussian = gaussian_of(precondition)
    if gaussian is None:
        kinds = ", ".join(map(repr, _KINDS))
        raise ArgumentError(f"precondition={precondition!r}: pass {kinds}, None, or {A_FIT}")
    return gaussian


def gaussian_of(value: Any) -> Gaussian | None:
    """The Gaussian of a fit of all sites (that of its first start), in float64; None for any other
    value, a fit that has not been run, or a fit of some sites only.

    Raises:
        ArgumentError: the fit's temperature is 0.
    """
    fit = None
    with contextlib.suppress(NotRunError):
        fit = fit_of(value)
    if fit is None or not fit.gaussians:
        return None
    if fit.temperature == 0:
        raise ArgumentError(
            "precondition: at temperature 0 the fit has no spread, hence no scales for "
            "coordinates: pass fit.at_temperature(1), or a fit at another temperature"
        )
    has_all_sites = fit.sites == tuple(fit.log_posterior.latents)
    return fit.gaussians[0].double() if has_all_sites else None


def count_or_auto(name: str, value: Any, least: int = 1) -> int | None:
    """The value of the argument `name` as an int, or None if it is `"auto"`.

    Raises:
        ArgumentError: the value is neither `"auto"` nor a count of at least `least`; the message
            names the argument.
    """
    return None if is_auto(value) else as_count(name, value, least=least, hint=", or 'auto'")
