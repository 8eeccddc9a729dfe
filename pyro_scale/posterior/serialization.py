"""Converts results to the contents of a file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout, dtype_name
from pyro_scale.core.online_moments import Totals
from pyro_scale.core.rows import Arguments, Model
from pyro_scale.data.loaders import to_device
from pyro_scale.errors import FileError
from pyro_scale.marginal.integrated import integrated_of
from pyro_scale.marginal.summed import examine_integrated, rebuild, to_rebuild
from pyro_scale.model.fingerprint import first_difference, model_fingerprint
from pyro_scale.model.init_strategies import InitFunction
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.draws import PosteriorDraws, SampleTotals
from pyro_scale.run.measurements import (
    GradientNoise,
    Kinetic,
    Measurements,
    VirialTemperature,
)
from pyro_scale.run.problem import as_log_posterior, module_device
from pyro_scale.storage.lazy_draws import Positions, StoredPositions
from pyro_scale.storage.zarr_store import DrawStore

#: Relative difference of a batch's log densities that is taken for rounding: products on another
#: device may have fewer digits (TF32).
_LOG_DENSITY_TOL = 1e-3


def contents_of(result: PosteriorDraws, arguments: Arguments) -> dict[str, Any]:
    """What the file of a run contains, tensors and plain values by name: the model's sites and a
    batch to check it by, the draws with their statistics, measurements and facts.

    Args:
        result: draws and facts of the run.
        arguments: the batch on which the model was analyzed.
    """
    measurements = result.measurements
    noise, virial = measurements.gradient_noise, measurements.virial
    kinetic = measurements.kinetic
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
    """What a file contains about the model, by name: `prepare_model` and `layout_of` read it.

    Args:
        log_posterior: the model, after its preflight.
        layout: indices of each site's elements among all D unconstrained parameters.
        arguments: the batch on which the model was analyzed.
    """
    start, integrated = _start(log_posterior), integrated_of(log_posterior)
    return {
        "summed": None if integrated is None else to_rebuild(integrated),
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
    """Names, shapes and dtypes of the sites in an unconstrained draw `[D]`, in order, from a file's
    contents.

    Raises:
        ValueError: the contents have unknown dtypes.
    """
    dtypes = tuple(getattr(torch, name) for name in contents["dtypes"])
    if not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
        raise ValueError(f"{contents['dtypes']} are not dtypes")
    shapes = tuple(torch.Size(shape) for shape in contents["shapes"])
    return Layout(tuple(contents["names"]), shapes, dtypes)


def draws_of(contents: Mapping[str, Any], log_posterior: LogPosterior) -> PosteriorDraws:
    """The draws, measurements and facts of a run from a file's contents. The result has no data of
    the run (`data` is None).

    Args:
        contents: contents of the file, by name.
        log_posterior: the model, from `prepare_model`.

    Raises:
        FileError: the store that the file refers to has other draws.
        ValueError: shapes in the file do not fit together.
    """
    noise, virial, kinetic = (contents[k] for k in ("gradient_noise", "virial", "kinetic"))
    layout = layout_of(contents)
    result = PosteriorDraws(
        log_posterior=log_posterior,
        data=None,
        layout=layout,
        positions=_positions(contents, layout),
        online=_totals(contents["running"]),
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
    """Raises if tensors read from a file contradict each other: draws without D columns, a number
    of chains other than that of their numbers, statistics of other draws.

    Raises:
        ValueError: the message says which tensor.
    """
    shape, size = tuple(result.positions.shape), result.layout.size
    if len(shape) != 3 or shape[2] != size:
        raise ValueError(f"draws of shape {list(shape)}, of {size} elements each")
    if result.chains is not None and len(result.chains) != shape[0]:
        raise ValueError(f"{shape[0]} chains, of which {len(result.chains)} have numbers")
    for name, values in result.sample_stats.items():
        if result.online is None and tuple(values.shape) != shape[:2]:
            raise ValueError(f"'{name}' of shape {list(values.shape)} beside draws {list(shape)}")


def _plain_layout(layout: Layout) -> dict[str, list[Any]]:
    """The sites' names, shapes and dtypes, each a list in the order of the sites, as a dict with
    the keys `names`, `shapes` and `dtypes`."""
    return {
        "names": list(layout.names),
        "shapes": [list(shape) for shape in layout.shapes],
        "dtypes": [dtype_name(dtype) for dtype in layout.dtypes],
    }


def _plain_draws(result: PosteriorDraws) -> dict[str, Any]:
    """The draws as plain values by name: the draws themselves, or a reference to the store that has
    them; and their moments if draws were not kept."""
    positions, online, totals = result.positions, result.online, None
    if isinstance(positions, StoredPositions):
        store = {
            "path": str(positions.store.path.absolute()),
            "run": positions.store.run,
            "chains": positions.chains,
            "count": positions.count,
        }
        return {"positions": None, "store": store, "running": None}
    if online is not None:
        totals = {"totals": online.totals.state(), **_plain_layout(online.layout)}
    return {"positions": positions, "store": None, "running": totals}


def _positions(contents: Mapping[str, Any], layout: Layout) -> Positions:
    """The unconstrained draws in a file, `[chains, draws, D]`, or in the store to which it refers.

    Args:
        contents: contents of the file, by name.
        layout: indices of each site's elements in a draw `[D]`.

    Raises:
        FileError: the store is missing, or has draws of another run.
    """
    reference = contents["store"]
    if reference is None:
        return cast(Tensor, contents["positions"])
    store = DrawStore.open(reference["path"])
    if store.run != reference["run"] or store.count < reference["count"]:
        raise FileError(f"the store '{reference['path']}' does not hold the draws of the file")
    return StoredPositions(store, layout, reference["chains"], reference["count"])


def _totals(contents: Mapping[str, Any] | None) -> SampleTotals | None:
    """The moments of a run that kept no draws, from their plain values in a file; None (also as the
    argument) for a run that kept draws."""
    if contents is None:
        return None
    return SampleTotals(Totals.from_state(contents["totals"]), layout_of(contents))


# ------------------------------------------------------------------ the model


def prepare_model(contents: Mapping[str, Any], model: Model) -> LogPosterior:
    """The user's model, analyzed on the batch in the file at the values in the file, as it was in
    the run.

    Args:
        contents: contents of the file, by name.
        model: what the user passed, which should be the model of the run.

    Raises:
        FileError: the model fails on the batch, or is not the model of the run; the message lists
            what differs.
    """
    arguments = to_device(contents["arguments"], device_of(contents, model))
    errors: list[Exception] = []
    # after single steps, N may be known from the model's plate only; it is compared below
    for num_data in (contents["num_data"], None):
        log_posterior = as_log_posterior(model, num_data)
        try:
            if summed := contents.get("summed"):
                units = cast(tuple[Arguments, Any], arguments)[0]
                integrated = rebuild(log_posterior.model, summed, units)
                log_posterior = log_posterior.of_model(integrated, num_data, examine_integrated)
            init = _init_at(contents["start_values"], log_posterior.default_init(0))
            log_posterior.prepare(arguments, init)
            break
        except Exception as error:  # of any kind that the user's model raises
            errors.append(error)
    else:
        raise FileError(
            f"the model does not run on the file's batch ({type(errors[0]).__name__}: "
            f"{errors[0]}): pass the model that was run"
        ) from errors[0]
    differences = _differences(contents, log_posterior)
    if differences:
        raise FileError(
            f"the model is not the one of the file ({'; '.join(differences)}): pass the model that "
            "was run"
        )
    return log_posterior


def device_of(contents: Mapping[str, Any], model: Model) -> torch.device:
    """The device for a file's tensors: that of the model's modules; otherwise that of the run if
    this machine has it; otherwise the CPU."""
    device_of_model, device_of_run = module_device(model), torch.device(contents["device"])
    if device_of_model is not None:
        return device_of_model
    try:
        return torch.empty(0, device=device_of_run).device
    except (RuntimeError, AssertionError):  # AssertionError if torch was built without it
        return torch.device("cpu")


def _init_at(values: Mapping[str, Tensor], default: InitFunction) -> InitFunction:
    """An initialization strategy that starts sites at these values, in the model's dtypes; sites
    without a value of their shape start where `default` puts them."""

    def init(site: Any) -> Tensor:
        start = default(site)
        value = values.get(site["name"])
        return start if value is None or value.shape != start.shape else value.to(start)

    return init


def _start(log_posterior: LogPosterior) -> dict[str, Tensor]:
    """The unconstrained values at which the model was analyzed, by site: latents and
    point-estimated params."""
    sites = log_posterior.model_info.sites
    latents = {name: sites[name].unconstrained for name in log_posterior.latents}
    points = {name: point.unconstrained for name, point in log_posterior.points.items()}
    return {name: value for name, value in (latents | points).items() if value is not None}


def _differences(contents: Mapping[str, Any], log_posterior: LogPosterior) -> list[str]:
    """What differs between the model that the user passed and that of a file, as phrases for an
    error message: sites, shapes, dtypes, N or log densities. An empty list if nothing does.

    Args:
        contents: contents of the file, by name.
        log_posterior: the user's model, analyzed on the batch in the file.
    """
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
    return lines or _value_differences(contents, log_posterior)


def _describe(values: Mapping[str, Tensor], latents: Any) -> dict[str, str]:
    """A dict from each site to a phrase such as "a latent [3] of float32": kind, shape and dtype of
    its value, to compare the model of a file with another one."""
    return {
        name: f"a {'latent' if name in latents else 'param'} {list(value.shape)} "
        f"of {dtype_name(value.dtype)}"
        for name, value in values.items()
    }


def _value_differences(contents: Mapping[str, Any], log_posterior: LogPosterior) -> list[str]:
    """What differs in numbers between the model that the user passed and that of a file, as phrases
    for an error message: sites whose constrained value at the same unconstrained one differs; if
    there are none, the first site whose log density on the file's batch differs. An empty list if
    nothing does.

    Args:
        contents: contents of the file, by name.
        log_posterior: the user's model, analyzed on the batch in the file.
    """
    device = device_of(contents, log_posterior)
    start = {name: value.to(device) for name, value in contents["start"].items()}
    values = log_posterior.constrain(start)
    lines = [
        f"'{name}' has another support or transform"
        for name, value in contents["start_values"].items()
        if not _close(values[name].cpu(), value)
    ]
    then = contents.get("log_densities")
    if lines or then is None:  # files of earlier versions have no log densities
        return lines
    now = _log_densities(log_posterior, start, to_device(contents["arguments"], device))
    line = first_difference(then, now, _LOG_DENSITY_TOL)
    return [] if line is None else [f"of the file's batch {line}"]


def _log_densities(
    log_posterior: LogPosterior, start: Mapping[str, Tensor], arguments: Arguments
) -> dict[str, float]:
    """The log prior and log likelihood of a batch, at the start and near it: numbers that tell
    models apart.

    Args:
        log_posterior: the model, after its preflight.
        start: unconstrained values by site.
        arguments: the batch on which the model was analyzed.
    """
    indices = log_posterior.first_indices()
    return model_fingerprint(log_posterior.with_jacobian(), start, arguments, indices)


def _close(now: Tensor, then: Tensor) -> bool:
    """Whether two tensors agree up to what rounding on different machines explains: the norm of
    their difference is at most the square root of the dtype's epsilon, times the norm of `then`."""
    tolerance: float = torch.finfo(then.dtype).eps ** 0.5
    return bool((now - then).double().norm() <= tolerance * then.double().norm())
