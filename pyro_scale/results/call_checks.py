"""Error messages for wrong calls, with hints for users of Pyro, NumPyro and ArviZ."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.tables import is_table
from pyro_scale.data.loaders import worker_error
from pyro_scale.errors import CallError

F = TypeVar("F", bound=Callable[..., Any])

#: Advice for methods without checkpoints.
_KEPT = (
    "save(path), which keeps the results; another run starts from them by the constructor's "
    "init_strategy=load(path, model)"
)

#: Arguments of Pyro, NumPyro and ArviZ -> what to pass or call instead.
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

#: Attributes that users, or other libraries, look for in a posterior -> what to call instead.
OF_POSTERIOR = {
    "psis": "{name} gives draws and no density, so there are no importance weights: psis() is of "
    "VI, IVON, Laplace and EKF",
    "step_size_bias": "{name} has no step size that biases its draws",
    "num_chains": "arviz.from_pyro takes pyro.infer.MCMC: here call .to_arviz(), which has more",
    "run": "{name} is the result of a run: call run of its method, or of another one with "
    "init_strategy= this",
}
#: The same for a method.
OF_METHOD = OF_POSTERIOR | {
    "setup": "{name} is no kernel of pyro.infer.MCMC but runs by itself: "
    "ps.{name}(model, ...).run(data, num_samples=..., num_chains=...)",
    "step": "{name} takes no steps of its own: call run(data, ...)",
}


def missing_attribute(owner: Any, name: str, hints: Mapping[str, str]) -> AttributeError:
    """An AttributeError (returned, for the caller to raise) for an attribute that an object does
    not have. Its message is the hint on this name, such as what the attribute is called here,
    otherwise Python's own text.

    Args:
        owner: the object.
        name: name of the attribute.
        hints: messages by attribute's name, with "{name}" for the object's class.
    """
    kind = type(owner).__name__
    return AttributeError(
        hints.get(name, "'{name}' object has no attribute '{attribute}'").format(
            name=kind, attribute=name
        )
    )


def check_calls(function: F, base: Callable[..., Any] | None = None) -> F:
    """Decorates a public function, so that a call that does not match its signature raises a
    CallError that says what to write instead.

    The signature shows every argument with its default, also the arguments that `**options:
    Unpack[...]` stands for.

    Args:
        function: a public function or method.
        base: the function that receives the options, and has their defaults; None if there are
            none.
    """
    signature = _full_signature(function, base)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CallError(_explain(function, signature, args, kwargs, str(error))) from None
        _check_rows(function, signature, args)
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:  # torch raises errors of loader workers in the main thread
            if (dead := worker_error(error)) is None:
                raise
            for note in getattr(error, "__notes__", ()):
                dead.add_note(note)
            raise dead from error

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _full_signature(
    function: Callable[..., Any], base: Callable[..., Any] | None
) -> inspect.Signature:
    """The function's signature, with the single keyword arguments of `base` in place of `**options:
    Unpack[...]`; unchanged if there is no such argument."""
    signature = inspect.signature(function)
    *parameters, last = signature.parameters.values()
    if base is None or not str(last.annotation).startswith("Unpack["):
        return signature
    (options,) = get_args(get_type_hints(function)[last.name])
    of_base = inspect.signature(base).parameters
    parameters += [of_base[name] for name in options.__annotations__]
    return signature.replace(parameters=parameters)


def unknown_argument(method: Any, name: str, names: Iterable[str]) -> str:
    """A hint, as text, for an argument that does not exist: where to pass it, what to write
    instead, or the most similar name.

    Args:
        method: the inference method, or posterior, that was called; None for a function.
        name: the unknown argument.
        names: the arguments that exist.
    """
    names = [argument for argument in names if argument != "self"]
    run = getattr(type(method), "run", None)  # posteriors have none
    for function, place in ((run, "run()"), (type(method), "the constructor")) if run else ():
        parameter = inspect.signature(function).parameters.get(name)
        if parameter is not None and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            return f"pass it to {place}"
    if name in (elsewhere := ELSEWHERE | getattr(method, "elsewhere", {})):
        return f"here it is {elsewhere[name]}"
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}=?" if near else f"it takes {', '.join(names)}"


def _title(function: Callable[..., Any], owner: Any) -> str:
    """The function's name in messages, such as "BAOA.run"; "BAOA" for the constructor.

    Args:
        function: the function that was called.
        owner: the object whose method it is; None for a function.
    """
    if owner is None:
        return function.__name__
    is_constructor = function.__name__ == "__init__"
    return type(owner).__name__ + ("" if is_constructor else f".{function.__name__}")


def _check_rows(
    function: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...]
) -> None:
    """Raises if tensors or tables stand where another argument than `data` belongs, such as `y` in
    `run(x, y)`; does nothing for a function without an argument `data`.

    Raises:
        CallError: the message says how to pass several tensors.
    """
    if "data" not in signature.parameters:
        return
    for name, value in zip(signature.parameters, args, strict=False):
        leaves = pytree.tree_leaves(value)
        if name != "data" and any(rows.is_rows(leaf) or is_table(leaf) for leaf in leaves):
            owner = args[0] if "self" in signature.parameters else None
            raise CallError(
                f"{_title(function, owner)}: {name} is given rows: pass the model's arguments as "
                "one tuple or dict, data=(x, y)"
            )


def _explain(
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: str,
) -> str:
    """The message of the CallError for a call that does not match the signature.

    Args:
        function: the function that was called.
        signature: signature of the function.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        error: Python's own message.
    """
    parameters = signature.parameters
    owner = args[0] if "self" in parameters else None
    is_constructor, title = function.__name__ == "__init__", _title(function, owner)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = None if takes_any else next((n for n in kwargs if n not in parameters), None)
    if unknown is not None:
        kernel = getattr(owner, "kernel_class", None) if is_constructor else None
        if isinstance(kernel, type):
            fields = [field.name for field in dataclasses.fields(kernel)]
            hint = unknown_argument(owner, unknown, fields)
            return f"{title} has no hyperparameter '{unknown}'; it has {fields}: {hint}"
        hint = unknown_argument(owner, unknown, parameters)
        return f"{title} has no argument '{unknown}': {hint}"
    places = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) <= len(places):
        return f"{title}: {error}"
    if "data" in places:
        call = ", ".join(["(x, y)" if n == "data" else n for n in places if n != "self"][:2])
        hint = f"pass the model's arguments as one tuple or dict, {function.__name__}({call}, ...)"
    elif is_constructor and "structure" in parameters:
        hint = "all but the model are passed by name; a guide is made by structure="
    elif is_constructor:
        hint = "all but the model are passed by name, such as lr="
    else:
        hint = "pass the others by name"
    most, count = (len(x) - ("self" in parameters) for x in (places, args))
    return f"{title} takes {most} positional argument(s), not {count}: {hint}"
