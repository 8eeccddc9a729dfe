"""Explains failed calls: the object is not a model, or the arguments do not fit the model.

Causes are tested: a message blames an argument only if the model runs once that argument is left
out, unpacked or converted.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive, own_generator
from pyro_scale.core.layout import dtype_name
from pyro_scale.core.rows import Arguments, Model
from pyro_scale.errors import ArgumentError, CallError, DataError, ModelError, PyroScaleError
from pyro_scale.model.init_strategies import WEIGHT, InitFunction
from pyro_scale.model.program import Program
from pyro_scale.model.recorder import Recorder
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import terms_of

#: Packages whose modules have no Pyro statement.
_NETWORK_PACKAGES = {"torch", "torchvision", "torchaudio", "timm", "transformers"}
#: A dtype -> the method that converts a tensor to it.
_CASTS = {
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "long",
}
_THREE_LINES = """
    net = ps.bayesianize(net)
    def model(x, y=None):
        return pyro.sample("y", dist.Normal(net(x), 1.0).to_event(1), obs=y)"""


def check_model(model: Model) -> None:
    """Raises for an object that cannot be a model, whatever its arguments.

    Raises:
        ArgumentError: the object is not callable, or is a class or a guide.
        ModelError: the object is a network without Pyro statements.
    """
    if not callable(model):
        raise ArgumentError(
            f"model={model!r} is not callable: pass a Pyro model, a PyroModule or a LogPosterior"
        )
    if isinstance(model, type) and any("__call__" in vars(base) for base in model.__mro__):
        raise ArgumentError(
            f"model={model.__name__} is a class: pass an instance of it, {model.__name__}(...)"
        )
    # importing `pyro.contrib` takes long; whoever passes an EasyGuide has imported it
    easy = sys.modules.get("pyro.contrib.easyguide")
    if isinstance(model, AutoGuide if easy is None else AutoGuide | easy.EasyGuide):
        raise ArgumentError(
            f"model is a guide ({type(model).__name__}): pass the model that it is of; VI makes a "
            "guide of its own, by structure="
        )
    if isinstance(model, nn.Module) and all(
        type(module).__module__.partition(".")[0] in _NETWORK_PACKAGES for module in model.modules()
    ):
        raise _network_error(model)


def explain_first_call(
    model: Model, arguments: Arguments, error: Exception, init: InitFunction
) -> PyroScaleError | None:
    """The error that explains why a model's first call failed; None if no cause is found. Returns
    the error and does not raise it.

    Args:
        model: the user's model.
        arguments: the arguments of the call.
        error: the exception that the call raised.
        init: initialization strategy of the latents when the call is repeated.
    """
    if isinstance(model, nn.Module) and _is_network(model, arguments, init):
        return _network_error(model)
    inner = _only_argument(arguments)
    if inner is not None and _runs(model, inner, init):
        return nested_error()
    original = getattr(model, "_orig_mod", getattr(model, "_torchdynamo_orig_callable", None))
    if original is not None and _runs(original, arguments, init):
        return ModelError(
            "torch.compile fails on this model, which runs without it: pass the model itself; its "
            "steps are compiled by the library"
        )
    if isinstance(error, PyroScaleError) and error.__cause__ is None:
        return None  # with a cause set, it passes on torch's error
    return _signature_error(model, arguments, error) or _dtype_error(model, arguments, error, init)


def explain_later_call(
    model: Model,
    arguments: Arguments,
    example: Arguments,
    error: Exception,
    init: InitFunction,
) -> PyroScaleError | None:
    """The error that explains why a later call failed: arguments that do not match the signature,
    or have other dtypes than before; None if that is not the cause.

    Args:
        model: the user's model.
        arguments: the arguments of the call.
        example: arguments on which the model ran.
        error: the exception that the call raised.
        init: initialization strategy of the latents when the call is repeated.
    """
    if misfit := _signature_error(model, arguments, error):
        return misfit
    dtypes = {name: leaf.dtype for name, leaf in rows.named_rows(example)}
    if all(dtypes.get(name) == leaf.dtype for name, leaf in rows.named_rows(arguments)):
        return None
    return _dtype_error(model, arguments, error, init)


# ------------------------------------------------------------------ a network as the model


def _is_network(model: nn.Module, arguments: Arguments, init: InitFunction) -> bool:
    """Whether a module is a network without Pyro statements of its own: its only sites, if any, are
    weights. To test this, the module is called with all arguments, or with the first ones if it
    takes fewer."""
    for count in range(len(arguments), 0, -1):
        part: Arguments = (
            dict(islice(arguments.items(), count))
            if isinstance(arguments, dict)
            else arguments[:count]
        )
        recorder = Recorder()
        if _runs(model, part, init, recorder):
            return all(WEIGHT in site.infer for site in recorder.sites.values())
    return False


def _network_error(net: nn.Module) -> ModelError:
    net = getattr(net, "_orig_mod", net)
    return ModelError(
        f"{type(net).__name__} is a network: ps.bayesianize(net), and a model that observes its "
        f"output, such as{_THREE_LINES}",
        code="no-observation",
    )


# ------------------------------------------------------------------ arguments in a container


def nested_error() -> CallError:
    """The error to raise if the model's arguments were passed in one tuple, list or dict."""
    return CallError(
        "the model's arguments were passed in one tuple, list or dict, but it takes them one by "
        "one: write predict(x), step(x, y) and init(seed, x, y), and run((x, y), ...)"
    )


def any_holds_rows(arguments: Arguments) -> bool:
    """Whether one of the model's arguments is a tuple, list or dict that contains tensors of
    rows.
    """
    return any(map(_holds_rows, _values(arguments)))


def _values(arguments: Arguments) -> list[Any]:
    return list(arguments.values() if isinstance(arguments, dict) else arguments)


def _holds_rows(value: Any) -> bool:
    is_container = isinstance(value, tuple | list | Mapping)
    return is_container and any(map(rows.is_rows, pytree.tree_leaves(value)))


def _only_argument(arguments: Arguments) -> Arguments | None:
    """The content of the model's only argument, as arguments, if that is a tuple, list or dict that
    contains tensors of rows; None in other cases."""
    values = _values(arguments)
    if len(values) != 1 or not _holds_rows(values[0]):
        return None
    return rows.as_arguments(values[0])


# ------------------------------------------------------------------ arguments of a signature


def _signature_error(model: Model, arguments: Arguments, error: Exception) -> CallError | None:
    """The error that says that the arguments do not match the model's signature; None if they
    match, or `error`, which the call raised, is not a TypeError."""
    if not isinstance(error, TypeError):
        return None
    try:
        signature = inspect.signature(getattr(model, "forward", model))
    except (TypeError, ValueError):
        return None
    try:
        rows.call(signature.bind, arguments)
    except TypeError as misfit:
        return CallError(f"the model, which takes {signature}: {misfit}")
    return None


def argument_name(model: Model, arguments: Arguments, place: str) -> str:
    """A name for messages of a tensor among the model's arguments, by the parameters of the model's
    signature, such as `x` or `x['age']`; `place` itself if the model has no signature.

    Args:
        model: the user's model.
        arguments: the model's arguments.
        place: the tensor's path among the arguments, as `rows.named_leaves` writes it, such as
            `0['age']`.
    """
    if isinstance(arguments, dict):
        return place.replace("'", "", 2)
    number, bracket, tail = place.partition("[")
    try:
        names = list(inspect.signature(getattr(model, "forward", model)).parameters)
    except (TypeError, ValueError):
        return place
    return names[int(number)] + bracket + tail if int(number) < len(names) else place


# ------------------------------------------------------------------ dtypes


def _dtype_error(
    model: Model, arguments: Arguments, error: Exception, init: InitFunction
) -> DataError | None:
    """The error that says which arguments have the wrong dtype, and how to convert them; None if
    converting them does not make the model run. Returns the error and does not raise it. Arguments
    as for `explain_first_call`."""
    failed = Recorder()
    # a matrix that cannot be factorized: higher precision may help, but the dtype is not the cause
    is_numerical = isinstance(error, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
    if is_numerical or _runs(model, arguments, init, failed):
        return None
    named, structure = rows.named_leaves(arguments), pytree.tree_structure(arguments)
    for dtypes in islice(_conversions(model, [leaf for _, leaf in named]), 64):
        leaves = [leaf.to(dtypes[i]) if i in dtypes else leaf for i, (_, leaf) in enumerate(named)]
        recorder = Recorder()
        converted = pytree.tree_unflatten(leaves, structure)
        if not dtypes or not _runs(model, converted, init, recorder):
            continue
        sites = [site.name for site in recorder.sites.values() if site.kind != "subsample"]
        site = next((name for name in sites if name not in failed.sites), None)
        where = f" on the way to site '{site}'" if site else f" at site {_failing_site(failed)}"
        names = {i: argument_name(model, arguments, named[i][0]) for i in dtypes}
        clash = " and ".join(f"{n} is {dtype_name(named[i][1].dtype)}" for i, n in names.items())
        fix = ", ".join(f"{name}.{_CASTS[dtypes[i]]}()" for i, name in names.items())
        first, dtype = next(iter(dtypes.items()))
        otherwise = ""
        if named[first][1].dtype == torch.float64 and dtype == torch.get_default_dtype():
            otherwise = ", or call torch.set_default_dtype(torch.float64) before the model is made"
        return DataError(
            f"argument {clash}, where the model needs {dtype_name(dtype)}{where} "
            f"({str(error.__cause__ or error).strip().splitlines()[0]}): pass {fix}{otherwise}",
            code="not-rows",
        )
    return None


def _conversions(model: Model, leaves: list[Any]) -> Iterator[dict[int, torch.dtype]]:
    """Yields conversions of dtype to try, as dicts from the index of a tensor in `leaves` to its
    new dtype: first of single tensors, then of all floating-point tensors, then of all tensors.

    Args:
        model: the user's model, whose weights' dtypes are tried, too.
        leaves: the tensors among the model's arguments, in order.
    """
    module = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    weights = module.parameters() if isinstance(module, nn.Module) else ()
    of_weights = [weight.dtype for weight in weights if weight.dtype in _CASTS]
    default = torch.get_default_dtype()
    floats = list(dict.fromkeys([default, *of_weights, torch.float32, torch.float64]))
    tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    for dtype in (*floats, torch.int64):
        yield from ({place: dtype} for place, leaf in tensors.items() if leaf.dtype != dtype)
    for dtype in floats:
        others = [place for place, leaf in tensors.items() if leaf.dtype != dtype]
        yield {place: dtype for place in others if tensors[place].is_floating_point()}
        yield dict.fromkeys(others, dtype)


def _failing_site(recorder: Recorder) -> str:
    """The quoted name of the first recorded site whose density cannot be evaluated; if there is
    none, of the last site; '?' without sites."""
    for site in recorder.sites.values():
        if not _has_density(site):
            return f"'{site.name}'"
    return f"'{next(reversed(recorder.sites), '?')}'"


def _has_density(site: Site) -> bool:
    try:
        site.fn.log_prob(site.value)
    except Exception:
        return False
    return True


def _runs(
    model: Model,
    arguments: Arguments,
    init: InitFunction,
    recorder: Recorder | None = None,
) -> bool:
    """Whether the model runs on these arguments with latents from `init`, and all log densities can
    be evaluated.

    Args:
        model: the user's model.
        arguments: the model's arguments.
        init: initialization strategy of the latents.
        recorder: recorder of the run, which has the sites up to an error; None for a new one.
    """
    recorder = recorder or Recorder()
    try:
        with exclusive, own_generator(), torch.no_grad(), InitMessenger(init):
            Program(model).run(arguments, recorder)
            terms_of(recorder.sites)
    except Exception:
        return False
    return True
