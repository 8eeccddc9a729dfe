"""Results on disk: tensors and plain values under a header of ours that holds their SHA-256.

torch does not notice when a byte of its files has changed, and most such files load, with other
numbers in them.  So nothing is given to it whose hash is not the one in the header.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.drive.sources import to_device
from pyro_scale.errors import ArgumentError, FileError
from pyro_scale.infer.gradients import GradientNoise
from pyro_scale.infer.result import Result
from pyro_scale.infer.setup import as_log_posterior, module_device
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.preflight import InitFunction

#: Where a file is, as users say it.
FilePath = str | os.PathLike[str]

#: Of what follows the header; another number, another way to read it.
_FORMAT = 1
_HEADER = re.compile(
    rb"Pyro Scale results, format (\d{1,9}), (\d{1,19}) bytes, SHA-256 ([0-9a-f]{64})\n"
)

# ---------------------------------------------------------------------- bytes


def write(path: FilePath, contents: Mapping[str, Any]) -> None:
    """Writes a file, as a whole or not at all: one that was there stays until the new one is
    complete.

    Args:
        path: where to.
        contents: by name: tensors, strings, numbers, booleans and None, in tuples, lists and
            dicts.

    Raises:
        ArgumentError: the path is none.
        FileError: something else is among the contents, or the file cannot be written.
    """
    target = _as_path(path)
    saved = io.BytesIO()
    torch.save({name: _plain(value, name) for name, value in contents.items()}, saved)
    body = saved.getbuffer()
    digest = hashlib.sha256(body).hexdigest()
    header = f"Pyro Scale results, format {_FORMAT}, {len(body)} bytes, SHA-256 {digest}\n"
    target = Path(os.path.realpath(target))  # what a link points to, not the link
    temporary = target.with_name(f".pyro-scale-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(header.encode())
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise FileError(
            f"'{target}' cannot be written ({error.strerror or error}): pass a file in a directory "
            "that is there and can be written to"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read(path: FilePath) -> dict[str, Any]:
    """What `write` wrote, its tensors in the processor's memory.

    Raises:
        ArgumentError: the path is none.
        FileError: there is no such file, it is not one of ours or of another format, or it is not
            as it was written.
    """
    target = _as_path(path)
    try:
        found = target.read_bytes()
    except OSError as error:
        raise FileError(f"'{target}' cannot be read ({error.strerror or error})") from error
    header = _HEADER.match(found)
    if header is None:
        raise FileError(
            f"'{target}' does not begin as a file of Pyro Scale's does: pass one that save(path) "
            "wrote"
        )
    form, size, digest = header.groups()
    if int(form) != _FORMAT:
        raise FileError(
            f"'{target}' has format {int(form)}, but this version of Pyro Scale reads format "
            f"{_FORMAT}: read it with the version that wrote it"
        )
    body = memoryview(found)[header.end() :]
    if len(body) != int(size):
        state = "was cut off" if len(body) < int(size) else "has something after its end"
        raise FileError(
            f"'{target}' {state}: {len(body)} bytes follow the header, not {int(size)}; take "
            "another copy"
        )
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise FileError(
            f"'{target}' is damaged: its contents do not have the SHA-256 that it says; take "
            "another copy"
        )
    try:
        return torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as error:  # of another version of torch
        raise FileError(
            f"'{target}' is whole, but torch {torch.__version__} cannot read it "
            f"({type(error).__name__}): read it with the version that wrote it"
        ) from error


def _as_path(path: FilePath) -> Path:
    if not isinstance(path, str | Path | os.PathLike) or "\0" in os.fspath(path):
        raise ArgumentError(f"path={path!r}: pass a str or a Path")
    return Path(path)


def _plain(value: Any, name: str) -> Any:
    """The value with its tensors as they are to be written.

    Raises:
        FileError: it is, or holds, something else than tensors and plain values.
    """
    if isinstance(value, Tensor):
        return _plain_tensor(value, name)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list):
        return type(value)(_plain(each, f"{name}[{i}]") for i, each in enumerate(value))
    if type(value) is dict and all(type(key) in (int, str) for key in value):
        return {key: _plain(each, f"{name}[{key!r}]") for key, each in value.items()}
    raise _not_plain(value, name)


def _plain_tensor(value: Tensor, name: str) -> Tensor:
    detached = value.detach()
    if type(detached) is not Tensor or value.layout is not torch.strided or value.is_meta:
        raise _not_plain(value, name)
    here = detached.cpu()
    # a view would take all that it is a view of into the file
    is_part = here.untyped_storage().nbytes() > here.numel() * here.element_size()
    return here.clone() if is_part else here


def _not_plain(value: Any, name: str) -> FileError:
    return FileError(
        f"{name} is a {type(value).__name__}, which cannot be saved: a file holds dense tensors, "
        "strings and numbers, in tuples, lists and dicts; bind other arguments of a model with "
        "functools.partial(model, name=value) before it is run"
    )


# ---------------------------------------------------------------------- a run


def contents_of(result: Result, arguments: Arguments) -> dict[str, Any]:
    """What is kept of a run.

    Args:
        result: of the run.
        arguments: the batch that the model was understood on.
    """
    known, noise = result.log_posterior, result.gradient_noise
    start = _start(known)
    return {
        "num_data": known.num_data,
        "arguments": arguments,
        "device": str(rows.device(arguments) or "cpu"),
        "latents": list(known.latents),
        "start": start,
        "start_values": known.constrain(start),
        "names": list(result.layout.names),
        "shapes": [list(shape) for shape in result.layout.shapes],
        "dtypes": [_dtype_name(dtype) for dtype in result.layout.dtypes],
        "positions": result.positions,
        "sample_stats": result.sample_stats,
        "attrs": result.attrs,
        "gradient_noise": None if noise is None else dict(vars(noise)),
    }


def result_of(contents: Mapping[str, Any], log_posterior: LogPosterior) -> Result:
    """The run again, without its data.

    Args:
        contents: of a file.
        log_posterior: the model, as `understood` gives it.
    """
    noise = contents["gradient_noise"]
    layout = Layout(
        tuple(contents["names"]),
        tuple(torch.Size(shape) for shape in contents["shapes"]),
        tuple(getattr(torch, name) for name in contents["dtypes"]),
    )
    return Result(
        log_posterior=log_posterior,
        data=None,
        layout=layout,
        positions=contents["positions"],
        sample_stats=contents["sample_stats"],
        attrs=contents["attrs"],
        gradient_noise=None if noise is None else GradientNoise(**noise),
    )


def understood(contents: Mapping[str, Any], model: Any) -> LogPosterior:
    """The model, understood on the file's batch at the file's values, as it was in the run.

    Raises:
        FileError: the model does not run there, or is another one; it lists what differs.
    """
    found = _tried(contents, model, contents["num_data"])
    if isinstance(found, Exception):
        # in single steps only a plate may have said N; it is compared below
        again = _tried(contents, model, None)
        found = found if isinstance(again, Exception) else again
    if isinstance(found, Exception):
        raise FileError(
            f"the model does not run on the file's batch ({type(found).__name__}: {found}): pass "
            "the model that was run"
        ) from found
    differences = _differences(contents, found)
    if differences:
        raise FileError(
            f"the model is not the one of the file ({'; '.join(differences)}): pass the model that "
            "was run"
        )
    return found


def _tried(
    contents: Mapping[str, Any], model: Any, num_data: int | None
) -> LogPosterior | Exception:
    """The model understood, or what is in the way."""
    log_posterior = as_log_posterior(model, num_data)
    arguments = to_device(contents["arguments"], _device(contents, model))
    init = _init_at(contents["start_values"], log_posterior.default_init(0))
    try:
        log_posterior.prepare(arguments, init)
    except Exception as error:  # of whatever kind the user's model raises
        return error
    return log_posterior


def _device(contents: Mapping[str, Any], model: Any) -> torch.device:
    """Where the model is, or else where the batch was, if this machine has that."""
    own, saved = module_device(model), torch.device(contents["device"])
    if own is not None:
        return own
    try:
        return torch.empty(0, device=saved).device
    except (RuntimeError, AssertionError):  # the latter where torch was built without it
        return torch.device("cpu")


def _init_at(values: Mapping[str, Tensor], default: InitFunction) -> InitFunction:
    """An initialisation at values, in the model's own dtypes, as far as their shapes are its."""

    def init(site: Any) -> Tensor:
        own = default(site)
        value = values.get(site["name"])
        return own if value is None or value.shape != own.shape else value.to(own)

    return init


def _start(log_posterior: LogPosterior) -> dict[str, Tensor]:
    """Where the model was understood: unconstrained latents and points."""
    sites = log_posterior.understanding.sites
    latents = {name: sites[name].unconstrained for name in log_posterior.latents}
    points = {name: point.unconstrained for name, point in log_posterior.points.items()}
    return {name: value for name, value in (latents | points).items() if value is not None}


def _differences(contents: Mapping[str, Any], log_posterior: LogPosterior) -> list[str]:
    """What is not as it was when the file was written, in words."""
    values = log_posterior.constrain(_start(log_posterior))
    then = _described(contents["start_values"], contents["latents"])
    now = _described(values, log_posterior.latents)
    found = [
        f"'{name}' is {then.get(name, 'not')} in the file, {now.get(name, 'not')} in the model"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]
    if log_posterior.num_data != contents["num_data"]:
        found.append(f"N is {contents['num_data']} in the file, {log_posterior.num_data} here")
    return found or _moved(contents, log_posterior)


def _described(values: Mapping[str, Tensor], latents: Any) -> dict[str, str]:
    return {
        name: f"a {'latent' if name in latents else 'param'} {list(value.shape)} "
        f"of {_dtype_name(value.dtype)}"
        for name, value in values.items()
    }


def _moved(contents: Mapping[str, Any], log_posterior: LogPosterior) -> list[str]:
    """Sites whose value is another one at the same unconstrained value."""
    device = _device(contents, log_posterior)
    start, then = contents["start"], contents["start_values"]
    now = log_posterior.constrain({name: value.to(device) for name, value in start.items()})
    return [
        f"'{name}' has another support or transform"
        for name, value in then.items()
        if not _close(now[name].cpu(), value)
    ]


def _close(now: Tensor, then: Tensor) -> bool:
    """Equal to half of the dtype's digits: another machine may round differently."""
    tolerance: float = torch.finfo(then.dtype).eps ** 0.5
    return bool((now - then).double().norm() <= tolerance * then.double().norm())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
