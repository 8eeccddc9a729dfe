"""Suggestions for arguments that people know from Pyro, NumPyro and ArviZ."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, get_args, get_type_hints

from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.tables import is_table
from pyro_scale.data.loaders import worker_error
from pyro_scale.errors import CallError

F = TypeVar("F", bound=Callable[..., Any])

#: What a method without checkpoints has.
_KEPT = (
    "save(path), which keeps the results; another run starts from them by the constructor's "
    "init_strategy=load(path, model)"
)

#: An argument elsewhere -> what there is here.
ELSEWHERE = {
    "num_warmup": "warmup_steps=, in steps of the sampler",
    "warmup": "warmup_steps=, in steps of the sampler",
    "burnin": "warmup_steps=, in steps of the sampler",
    "thin": "thinning=",
    "step_size": "lr=",
    "learning_rate": "lr=",
    "optim": "optimizer=, such as torchopt.adam(1e-2)",
    "optimiser": "optimizer=, such as torchopt.adam(1e-2)",
    "lr": "optimizer=torchopt.adam(lr)",
    "loss": "nothing: the ELBO is what VI raises",
    "guide": "structure='diag' or 'dense': VI makes its own guide, which fit.guide() gives",
    "num_steps": "num_samples=, warmup_steps= and thinning=: steps are warmup_steps + "
    "num_samples * thinning",
    "num_epochs": "num_samples=, warmup_steps= and thinning=, in steps",
    "checkpoint": _KEPT,
    "resume": _KEPT,
    "prob": "arviz.summary(fit.to_arviz(), ...), whose interval it is",
    "hdi_prob": "arviz.summary(fit.to_arviz(), ...), whose interval it is",
    "ci_prob": "arviz.summary(fit.to_arviz(), ...), whose interval it is",
    "device": "the model's and the data's: move both there, net.to(device) and x.to(device)",
    "rng_key": "seed=",
    "progress_bar": "progress=",
    "disable_progbar": "progress=False",
}

#: An attribute that other libraries look for -> what to call instead.
ATTRIBUTES = {
    "setup": "{name} is no kernel of pyro.infer.MCMC but runs by itself: "
    "ps.{name}(model, ...).run(data, num_samples=..., num_chains=...)",
    "report": "{name} chooses nothing to report: summary() has what it found",
    "step": "{name} takes no steps of its own: call run(data, ...)",
    "psis": "{name} gives draws and no density, so there are no importance weights: psis() is of "
    "VI, IVON, Laplace and EKF",
    "step_size_bias": "{name} takes no steps whose size is felt in the draws",
    "num_chains": "arviz.from_pyro takes pyro.infer.MCMC: here call .to_arviz(), which has more",
}


def check_calls(function: F, base: Callable[..., Any] | None = None) -> F:
    """A function whose calls are compared with its signature first.

    Its signature shows every argument, with its default: those that `**options: Unpack[...]` stands
    for are the base's.

    Args:
        function: of the library's, or a method.
        base: what it passes these on to.
    """
    signature = _in_full(function, base)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CallError(_explain(function, signature, args, kwargs, str(error))) from None
        _check_places(function, signature, args)
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:  # torch tells the main thread of workers, wherever it is
            if (dead := worker_error(error)) is None:
                raise
            for note in getattr(error, "__notes__", ()):
                dead.add_note(note)
            raise dead from error

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _in_full(function: Callable[..., Any], base: Callable[..., Any] | None) -> inspect.Signature:
    """The signature, with a base's keywords in place of `**options: Unpack[...]`."""
    signature = inspect.signature(function)
    *own, last = signature.parameters.values()
    if base is None or not str(last.annotation).startswith("Unpack["):
        return signature
    (options,) = get_args(get_type_hints(function)[last.name])
    of_base = inspect.signature(base).parameters
    return signature.replace(parameters=[*own, *(of_base[n] for n in options.__annotations__)])


def unknown_argument(method: Any, name: str, names: Iterable[str]) -> str:
    """What to write for an argument that a function, or a method's constructor, does not have.

    Args:
        method: whose it is; None of a function.
        name: the argument.
        names: what there is.
    """
    names = [each for each in names if each != "self"]
    run = getattr(type(method), "run", None)  # which posteriors have not
    for other, place in ((run, "run()"), (type(method), "the constructor")) if run else ():
        its = inspect.signature(other).parameters.get(name)
        if its is not None and its.kind not in (its.VAR_POSITIONAL, its.VAR_KEYWORD):
            return f"pass it to {place}"
    if name in (elsewhere := ELSEWHERE | getattr(method, "elsewhere", {})):
        return f"here it is {elsewhere[name]}"
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}=?" if near else f"it takes {', '.join(names)}"


def _title(function: Callable[..., Any], self: Any) -> str:
    if self is None:
        return function.__name__
    own = function.__name__ == "__init__"
    return type(self).__name__ + ("" if own else f".{function.__name__}")


def _check_places(
    function: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...]
) -> None:
    """Refuses the model's arguments one by one, where data are one argument."""
    if "data" not in signature.parameters:
        return
    for name, value in zip(signature.parameters, args, strict=False):
        leaves = pytree.tree_leaves(value)
        if name != "data" and any(rows.is_rows(leaf) or is_table(leaf) for leaf in leaves):
            self = args[0] if "self" in signature.parameters else None
            raise CallError(
                f"{_title(function, self)}: {name} is given rows: pass the model's arguments as "
                "one tuple or dict, data=(x, y)"
            )


def _explain(
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: str,
) -> str:
    parameters = signature.parameters
    self = args[0] if "self" in parameters else None
    own, title = function.__name__ == "__init__", _title(function, self)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    kernel = getattr(self, "kernel_class", None) if own else None
    for name in kwargs:
        if takes_any or name in parameters:
            continue
        if isinstance(kernel, type):
            fields = [field.name for field in dataclasses.fields(kernel)]
            hint = unknown_argument(self, name, fields)
            return f"{title} has no hyperparameter '{name}'; it has {fields}: {hint}"
        return f"{title} has no argument '{name}': {unknown_argument(self, name, parameters)}"
    places = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(places):
        if "data" in places:
            call = ", ".join(["(x, y)" if n == "data" else n for n in places if n != "self"][:2])
            hint = (
                f"pass the model's arguments as one tuple or dict, {function.__name__}({call}, ...)"
            )
        elif own and "structure" in parameters:
            hint = "all but the model are passed by name; a guide is made by structure="
        elif own:
            hint = "all but the model are passed by name, such as lr="
        else:
            hint = "pass the others by name"
        count, given = (len(each) - ("self" in parameters) for each in (places, args))
        return f"{title} takes {count} positional argument(s), not {given}: {hint}"
    return f"{title}: {error}"
