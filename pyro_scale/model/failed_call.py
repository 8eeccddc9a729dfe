"""Why a model cannot be called with the arguments that it is given: each cause is tried.

What is blamed has been left out, unpacked or converted, and the model then ran.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.layout import dtype_name
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import CallError, DataError, ModelError, PyroScaleError
from pyro_scale.model.networks import is_bare, network_error
from pyro_scale.model.recorder import Recorder

#: A dtype -> what makes a tensor be of it.
_CASTS = {
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "long",
}

#: Runs a model on arguments under a recorder, and evaluates what it has recorded.
Attempt = Callable[[Callable[..., Any], Arguments, Recorder], Any]


def explain(
    model: Callable[..., Any], arguments: Arguments, error: Exception, attempt: Attempt
) -> PyroScaleError | None:
    """The error to raise in place of what a model's first call raised; None if no cause is found.

    Args:
        model: the user's.
        arguments: as given.
        error: what the call has raised.
        attempt: calls it again.
    """
    if isinstance(model, nn.Module) and _is_network(model, arguments, attempt):
        return network_error(model)
    if (unpacked := _unpacked(arguments)) is not None and _runs(attempt, model, unpacked):
        return nested_error()
    original = getattr(model, "_orig_mod", getattr(model, "_torchdynamo_orig_callable", None))
    if original is not None and _runs(attempt, original, arguments):
        return ModelError(
            "torch.compile fails on this model, which runs without it: pass the model itself; its "
            "steps are compiled by the library"
        )
    if isinstance(error, PyroScaleError) and error.__cause__ is None:
        return None  # else it passes on what torch has raised
    if isinstance(error, TypeError) and (told := _misfit(model, arguments)):
        return CallError(f"the model, which takes {told}")
    return explain_dtypes(model, arguments, error, attempt)


def explain_later(
    model: Callable[..., Any],
    arguments: Arguments,
    known: Arguments,
    error: Exception,
    attempt: Attempt,
) -> PyroScaleError | None:
    """The same of a later call, when arguments are known that the model has run on.

    Args:
        model: the user's.
        arguments: as given.
        known: arguments that the model has run on.
        error: what the call has raised.
        attempt: calls it again.
    """
    if isinstance(error, TypeError) and (told := _misfit(model, arguments)):
        return CallError(f"the model, which takes {told}")
    dtypes = {name: leaf.dtype for name, leaf in rows.named_rows(known)}
    if all(dtypes.get(name) == leaf.dtype for name, leaf in rows.named_rows(arguments)):
        return None
    return explain_dtypes(model, arguments, error, attempt)


def nested_error() -> CallError:
    """Of arguments in a tuple too many."""
    return CallError(
        "the model is given its arguments in one tuple, list or dict, and takes them one by one: "
        "write predict(x), step(x, y) and init(seed, x, y), as it is called, and run((x, y), ...)"
    )


def holds_rows(value: Any) -> bool:
    """Whether it is a tuple, list or dict with tensors of rows in it."""
    is_container = isinstance(value, tuple | list | Mapping)
    return is_container and any(map(rows.is_rows, pytree.tree_leaves(value)))


def explain_dtypes(
    model: Callable[..., Any], arguments: Arguments, error: Exception, attempt: Attempt
) -> DataError | None:
    """Which arguments are of a dtype that the model cannot take, if it runs once they are
    converted.  Otherwise as for `explain`."""
    failed = Recorder()
    if _is_numerical(error) or _runs(attempt, model, arguments, failed):
        return None
    named, structure = rows.named_leaves(arguments), pytree.tree_structure(arguments)
    for targets in islice(_conversions(model, [leaf for _, leaf in named]), 64):
        leaves = [leaf.to(to) if to else leaf for (_, leaf), to in zip(named, targets, strict=True)]
        recorder = Recorder()
        if not _runs(attempt, model, pytree.tree_unflatten(leaves, structure), recorder):
            continue
        sites = [site.name for site in recorder.sites.values() if site.kind != "subsample"]
        site = next((name for name in sites if name not in failed.sites), None)
        where = f" on the way to site '{site}'" if site else f" at site {_last(failed)}"
        changed = [
            (argument_name(model, arguments, name), leaf.dtype, to)
            for (name, leaf), to in zip(named, targets, strict=True)
            if to
        ]
        clash = " and ".join(f"{n} is {dtype_name(own)}" for n, own, _ in changed)
        fix = ", ".join(f"{n}.{_CASTS[to]}()" for n, _, to in changed)
        wanted, own = changed[0][2], changed[0][1]
        otherwise = ""
        if own == torch.float64 and wanted == torch.get_default_dtype():
            otherwise = ", or call torch.set_default_dtype(torch.float64) before the model is made"
        return DataError(
            f"argument {clash}, where the model needs {dtype_name(wanted)}{where} "
            f"({str(error.__cause__ or error).strip().splitlines()[0]}): pass {fix}{otherwise}",
            code="not-rows",
        )
    return None


def _conversions(
    model: Callable[..., Any], leaves: list[Any]
) -> Iterator[list[torch.dtype | None]]:
    """What each leaf may be converted to: one of them, then all of them."""
    default = torch.get_default_dtype()
    module = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    weights = module.parameters() if isinstance(module, nn.Module) else ()
    own = [weight.dtype for weight in weights if weight.dtype in _CASTS]
    floats = list(dict.fromkeys([default, *own, torch.float32, torch.float64]))
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for target in (*floats, torch.int64):
        for place in tensors:
            if leaves[place].dtype != target:
                yield [target if at == place else None for at in range(len(leaves))]
    for target in floats:
        for only_floats in (True, False):
            yield [
                target
                if isinstance(leaf, Tensor)
                and leaf.dtype != target
                and (leaf.is_floating_point() or not only_floats)
                else None
                for leaf in leaves
            ]


def _is_numerical(error: Exception) -> bool:
    """Whether a matrix could not be factorized, which more digits might mend."""
    return isinstance(error, torch.linalg.LinAlgError)  # type: ignore[attr-defined]


def _runs(
    attempt: Attempt,
    model: Callable[..., Any],
    arguments: Arguments,
    recorder: Recorder | None = None,
) -> bool:
    try:
        attempt(model, arguments, recorder or Recorder())
    except Exception:
        return False
    return True


def _is_network(model: nn.Module, arguments: Arguments, attempt: Attempt) -> bool:
    """Whether it runs on all arguments, or the first of them, without a site but its weights'."""
    if isinstance(arguments, dict):
        parts: list[Arguments] = [
            dict(islice(arguments.items(), n)) for n in range(len(arguments), 0, -1)
        ]
    else:
        parts = [arguments[:n] for n in range(len(arguments), 0, -1)]
    for part in parts:
        recorder = Recorder()
        if _runs(attempt, model, part, recorder):
            return is_bare(recorder.sites.values())
    return False


def _unpacked(arguments: Arguments) -> Arguments | None:
    """What the only argument holds."""
    values = list(arguments.values()) if isinstance(arguments, dict) else list(arguments)
    if len(values) != 1 or not holds_rows(values[0]):
        return None
    return rows.as_arguments(values[0])


def _misfit(model: Callable[..., Any], arguments: Arguments) -> str | None:
    """How arguments do not fit a signature."""
    try:
        signature = inspect.signature(getattr(model, "forward", model))
    except (TypeError, ValueError):
        return None
    try:
        if isinstance(arguments, dict):
            signature.bind(**arguments)
        else:
            signature.bind(*arguments)
    except TypeError as error:
        return f"{signature}: {error}"
    return None


def _last(recorder: Recorder) -> str:
    """The site whose density cannot be evaluated."""
    for site in recorder.sites.values():
        try:
            site.fn.log_prob(site.value)
        except Exception:
            return f"'{site.name}'"
    return f"'{next(reversed(recorder.sites), '?')}'"


def argument_name(model: Callable[..., Any], arguments: Arguments, name: str) -> str:
    """An argument's name in the model, where it is known by its place."""
    if isinstance(arguments, dict):
        return name.replace("'", "", 2)
    place, bracket, rest = name.partition("[")
    try:
        names = list(inspect.signature(getattr(model, "forward", model)).parameters)
    except (TypeError, ValueError):
        return name
    return names[int(place)] + bracket + rest if int(place) < len(names) else name
