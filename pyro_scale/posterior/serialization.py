"""Converts results to the contents of a file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout, dtype_name
from pyro_scale.core.online_moments import Totals
from pyro_scale.core.rows import Arguments
from pyro_scale.data.loaders import to_device
from pyro_scale.errors import FileError
from pyro_scale.model.fingerprint import first_difference, model_fingerprint
from pyro_scale.model.init_strategies import InitFunction
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.online import SampleTotals
from pyro_scale.run.measurements import (
    GradientNoise,
    Kinetic,
    Measurements,
    VirialTemperature,
)
from pyro_scale.run.problem import as_log_posterior, module_device
from pyro_scale.storage.lazy_draws import Positions, StoredPositions
from pyro_scale.storage.zarr_store import DrawStore

#: By how much the log densities of a batch may differ on another machine or device, whose products
#: may have fewer digits (TF32).
_ROUNDING = 1e-3


def contents_of(result: PosteriorDraws, arguments: Arguments) -> dict[str, Any]:
    """What is kept of a run.

    Args:
        result: of the run.
        arguments: the batch that the model was understood on.
    """
    noise, kinetic = result.measurements.gradient_noise, result.measurements.kinetic
    virial = result.measurements.virial
    return {
        **model_contents(result.log_posterior, result.layout, arguments),
        **_plain_draws(result),
        "sample_stats": result.sample_stats,
        "attrs": result.attrs,
        "gradient_noise": None if noise is None else dict(vars(noise)),
        "virial": None if virial is None else virial.parts,
        "kinetic": kinetic and {"measured": kinetic.measured, "expected": kinetic.expected},
        "chains": result.chains,
        "unfinished": result.unfinished,
    }


def model_contents(
    log_posterior: LogPosterior, layout: Layout, arguments: Arguments
) -> dict[str, Any]:
    """What `understood` and `layout_of` need.

    Args:
        log_posterior: the model, understood.
        layout: of its positions.
        arguments: the batch that it was understood on.
    """
    start = _start(log_posterior)
    return {
        "num_data": log_posterior.num_data,
        "arguments": arguments,
        "device": str(rows.device(arguments) or "cpu"),
        "latents": list(log_posterior.latents),
        "start": start,
        "start_values": log_posterior.constrain(start),
        "log_densities": _log_densities(log_posterior, start, arguments),
        **_plain_layout(layout),
    }


def layout_of(contents: Mapping[str, Any]) -> Layout:
    """Where each tensor lies in a position."""
    dtypes = tuple(getattr(torch, name) for name in contents["dtypes"])
    if not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
        raise ValueError(f"{contents['dtypes']} are no dtypes")
    shapes = tuple(torch.Size(shape) for shape in contents["shapes"])
    return Layout(tuple(contents["names"]), shapes, dtypes)


def draws_of(contents: Mapping[str, Any], log_posterior: LogPosterior) -> PosteriorDraws:
    """The draws of a run again, without its data.

    Args:
        contents: of a file.
        log_posterior: the model, as `understood` gives it.
    """
    noise, virial, kinetic = (contents[k] for k in ("gradient_noise", "virial", "kinetic"))
    layout = layout_of(contents)
    result = PosteriorDraws(
        log_posterior=log_posterior,
        data=None,
        layout=layout,
        positions=_positions(contents, layout),
        online=_running(contents["running"]),
        sample_stats=contents["sample_stats"],
        attrs=contents["attrs"],
        measurements=Measurements(
            gradient_noise=None if noise is None else GradientNoise(**noise),
            virial=None if virial is None else VirialTemperature(virial),
            kinetic=None if kinetic is None else Kinetic.of(**kinetic),
        ),
        chains=contents["chains"],
        unfinished=contents.get("unfinished"),
    )
    _check_shapes(result)
    return result


def _check_shapes(result: PosteriorDraws) -> None:
    """Raises a ValueError where a file's tensors do not belong together."""
    shape, size = tuple(result.positions.shape), result.layout.size
    if len(shape) != 3 or shape[2] != size:
        raise ValueError(f"draws of shape {list(shape)}, of {size} elements each")
    if result.chains is not None and len(result.chains) != shape[0]:
        raise ValueError(f"{shape[0]} chains, of which {len(result.chains)} have numbers")
    for name, values in result.sample_stats.items():
        if result.online is None and tuple(values.shape) != shape[:2]:
            raise ValueError(f"'{name}' of shape {list(values.shape)} beside draws {list(shape)}")


def _plain_layout(layout: Layout) -> dict[str, list[Any]]:
    return {
        "names": list(layout.names),
        "shapes": [list(shape) for shape in layout.shapes],
        "dtypes": [dtype_name(dtype) for dtype in layout.dtypes],
    }


def _plain_draws(result: PosteriorDraws) -> dict[str, Any]:
    """The draws, where they are, or what they came to."""
    positions, online, kept = result.positions, result.online, None
    if isinstance(positions, StoredPositions):
        where = {
            "path": str(positions.store.path.absolute()),
            "run": positions.store.run,
            "chains": positions.chains,
            "count": positions.count,
        }
        return {"positions": None, "store": where, "running": None}
    if online is not None:
        kept = {"totals": online.totals.state(), **_plain_layout(online.layout)}
    return {"positions": positions, "store": None, "running": kept}


def _positions(contents: Mapping[str, Any], layout: Layout) -> Positions:
    """The draws of a file, or those in the store that it speaks of.

    Raises:
        FileError: the store is not there, or is of another run.
    """
    held = contents["store"]
    if held is None:
        return cast(Tensor, contents["positions"])
    store = DrawStore.opened(held["path"])
    if store.run != held["run"] or store.count < held["count"]:
        raise FileError(f"the store '{held['path']}' does not hold the draws of the file")
    return StoredPositions(store, layout, held["chains"], held["count"])


def _running(held: Mapping[str, Any] | None) -> SampleTotals | None:
    if held is None:
        return None
    return SampleTotals(Totals.from_state(held["totals"]), layout_of(held))


def understood(contents: Mapping[str, Any], model: Any) -> LogPosterior:
    """The model, understood on the file's batch at the file's values, as it was in the run.

    Raises:
        FileError: the model does not run there, or is another one; it lists what differs.
    """
    outcome = _try_model(contents, model, contents["num_data"])
    if isinstance(outcome, Exception):
        # in single steps only a plate may have said N; it is compared below
        again = _try_model(contents, model, None)
        outcome = outcome if isinstance(again, Exception) else again
    if isinstance(outcome, Exception):
        raise FileError(
            f"the model does not run on the file's batch ({type(outcome).__name__}: {outcome}): "
            "pass the model that was run"
        ) from outcome
    log_posterior = outcome
    differences = _differences(contents, log_posterior)
    if differences:
        raise FileError(
            f"the model is not the one of the file ({'; '.join(differences)}): pass the model that "
            "was run"
        )
    return log_posterior


def _try_model(
    contents: Mapping[str, Any], model: Any, num_data: int | None
) -> LogPosterior | Exception:
    """The model understood, or what is in the way."""
    log_posterior = as_log_posterior(model, num_data)
    arguments = to_device(contents["arguments"], device_of(contents, model))
    init = _init_at(contents["start_values"], log_posterior.default_init(0))
    try:
        log_posterior.prepare(arguments, init)
    except Exception as error:  # of whatever kind the user's model raises
        return error
    return log_posterior


def device_of(contents: Mapping[str, Any], model: Any) -> torch.device:
    """Where a file's tensors belong: where the model is, or else where they were, if this machine
    has that."""
    own, saved = module_device(model), torch.device(contents["device"])
    if own is not None:
        return own
    try:
        return torch.empty(0, device=saved).device
    except (RuntimeError, AssertionError):  # the latter where torch was built without it
        return torch.device("cpu")


def _init_at(values: Mapping[str, Tensor], default: InitFunction) -> InitFunction:
    """An initialization at values, in the model's own dtypes, as far as their shapes are its."""

    def init(site: Any) -> Tensor:
        own = default(site)
        value = values.get(site["name"])
        return own if value is None or value.shape != own.shape else value.to(own)

    return init


def _start(log_posterior: LogPosterior) -> dict[str, Tensor]:
    """Where the model was understood: unconstrained latents and points."""
    sites = log_posterior.model_info.sites
    latents = {name: sites[name].unconstrained for name in log_posterior.latents}
    points = {name: point.unconstrained for name, point in log_posterior.points.items()}
    return {name: value for name, value in (latents | points).items() if value is not None}


def _differences(contents: Mapping[str, Any], log_posterior: LogPosterior) -> list[str]:
    """What is not as it was when the file was written, in words."""
    values = log_posterior.constrain(_start(log_posterior))
    then = _describe(contents["start_values"], contents["latents"])
    now = _describe(values, log_posterior.latents)
    lines = [
        f"'{name}' is {then.get(name, 'not')} in the file, {now.get(name, 'not')} in the model"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]
    if log_posterior.num_data != contents["num_data"]:
        lines.append(f"N is {contents['num_data']} in the file, {log_posterior.num_data} here")
    return lines or _moved_sites(contents, log_posterior) or _other_density(contents, log_posterior)


def _describe(values: Mapping[str, Tensor], latents: Any) -> dict[str, str]:
    return {
        name: f"a {'latent' if name in latents else 'param'} {list(value.shape)} "
        f"of {dtype_name(value.dtype)}"
        for name, value in values.items()
    }


def _moved_sites(contents: Mapping[str, Any], log_posterior: LogPosterior) -> list[str]:
    """Sites whose value is another one at the same unconstrained value."""
    device = device_of(contents, log_posterior)
    start, then = contents["start"], contents["start_values"]
    now = log_posterior.constrain({name: value.to(device) for name, value in start.items()})
    return [
        f"'{name}' has another support or transform"
        for name, value in then.items()
        if not _close(now[name].cpu(), value)
    ]


def _log_densities(
    log_posterior: LogPosterior, start: Mapping[str, Tensor], arguments: Arguments
) -> dict[str, float]:
    """Those of the batch that the model was understood on."""
    indices = log_posterior.first_indices()
    return model_fingerprint(log_posterior.with_jacobian(), start, arguments, indices)


def _other_density(contents: Mapping[str, Any], log_posterior: LogPosterior) -> list[str]:
    """What to say where the same sites have other densities on the file's batch."""
    then = contents.get("log_densities")
    if then is None:  # a file of an earlier version
        return []
    device = device_of(contents, log_posterior)
    start = {name: value.to(device) for name, value in contents["start"].items()}
    now = _log_densities(log_posterior, start, to_device(contents["arguments"], device))
    line = first_difference(then, now, _ROUNDING)
    return [] if line is None else [f"of the file's batch {line}"]


def _close(now: Tensor, then: Tensor) -> bool:
    """Equal to half of the dtype's digits: another machine may round differently."""
    tolerance: float = torch.finfo(then.dtype).eps ** 0.5
    return bool((now - then).double().norm() <= tolerance * then.double().norm())
