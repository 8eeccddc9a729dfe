"""From a model and its data to the model with local latents summed out, and the data with a column
by which its nodes are placed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments, Model
from pyro_scale.data.sources import Data, TensorData
from pyro_scale.errors import ArgumentError, DataError, PlateError, PyroScaleError, SiteError
from pyro_scale.marginal.anchor import Anchor, find_anchor
from pyro_scale.marginal.grouped import SLOTS
from pyro_scale.marginal.grouped_data import GroupedData
from pyro_scale.marginal.integrated import Integrated
from pyro_scale.marginal.local_sites import LocalSites, check_places, find_plate, recognize
from pyro_scale.marginal.units import UnitModel
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.model_info import ModelInfo
from pyro_scale.model.preflight import examine_model
from pyro_scale.model.program import Program
from pyro_scale.rng.seeds import Purpose, generator

T = TypeVar("T")

#: Units on which a model is examined.
_EXAMPLE = 16
#: Sds of the Gaussian at the anchor by which chains start apart.
_DISPERSION = 2.0


class Marginal:
    """What `marginalize` returns: a Pyro model, marked for an inference class to sum its local
    latents out. A call of it is a call of the user's model.

    Args:
        model: the user's model.
        names: names of the local latents; empty for all that there are.
    """

    def __init__(self, model: Model, names: tuple[str, ...]):
        self.model, self.names = model, names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's model."""
        return self.model(*args, **kwargs)


def marginalize(model: Model, *names: str) -> Marginal:
    """A Pyro model whose local latents are summed out: every inference class runs it on the other
    latents, whose posterior is the exact one up to the error of the nodes, which is checked.

    A latent of every row is in the data's plate; for one of every group, run it on `Grouped` data.

    Args:
        model: a Pyro model.
        names: the local latents; all that there are by default.

    Raises (when it is run on data):
        ArgumentError: `names` are not the model's local latents.
        SiteError: they cannot be summed out.

    Examples:
        >>> import torch, pyro, pyro.distributions as dist, pyro_scale as ps
        >>> def model(y):
        ...     tau = pyro.sample("tau", dist.HalfNormal(1.0))
        ...     with pyro.plate("rows", len(y)):
        ...         z = pyro.sample("z", dist.Normal(0.0, tau))
        ...         pyro.sample("y", dist.Poisson(z.exp()), obs=y)
        >>> nuts = ps.NUTS(ps.marginalize(model, "z"))
        >>> run = nuts.run(torch.tensor([0.0, 3.0, 1.0, 5.0]), seed=0, progress=False)
        >>> list(run.get_samples())
        ['tau']
    """
    if not callable(model):
        raise ArgumentError(f"marginalize: a {type(model).__name__} is not a Pyro model")
    if not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"marginalize: names are {names}: pass marginalize(model, 'z', 'w')")
    return Marginal(model, names)


def user_model(model: Model) -> Model:
    """The user's model, of what `marginalize` returned; other models are unchanged."""
    return model.model if isinstance(model, Marginal) else model


class Summed(NamedTuple):
    """A model with its local latents summed out.

    Attributes:
        log_posterior: the integrated model.
        data: the data with the column of modes.
        anchor: where the nodes are placed.
    """

    log_posterior: LogPosterior
    data: TensorData
    anchor: Anchor


def is_summed(model: Model | LogPosterior, data: Data | None) -> bool:
    """Whether the user asks for local latents to be summed out, by `marginalize` or `Grouped`."""
    model = model.model if isinstance(model, LogPosterior) else model
    return isinstance(model, Marginal) or isinstance(data, GroupedData)


def check_not_summed(model: Model | LogPosterior, data: Data | None, what: str) -> None:
    """Raises for a method that cannot run with latents summed out.

    Args:
        model: the user's model.
        data: the data, if there are any yet.
        what: name of the method.

    Raises:
        ArgumentError: the user asks for it.
    """
    if is_summed(model, data):
        raise ArgumentError(
            f"{what}: it cannot sum local latents out (marginalize, Grouped), as their nodes need "
            "all data: use run of NUTS, BAOA, Laplace or VI"
        )


def starts_around(
    anchor: Anchor, log_posterior: LogPosterior, data: Data, num_chains: int, seed: int
) -> dict[str, Tensor]:
    """Constrained values of the globals where chains start, `[num_chains, ...]` by site: around the
    anchor, twice as far apart as the posterior."""
    log_posterior.prepare(data.first())
    starts = [start_around(anchor, seed, chain) for chain in range(num_chains)]
    values = [log_posterior.constrain(start) for start in starts]
    return {name: torch.stack([one[name] for one in values]) for name in anchor.layout.names}


def start_around(anchor: Anchor, seed: int, chain: int) -> dict[str, Tensor]:
    """Unconstrained globals where a chain starts, by site."""
    source = generator(seed, chain, Purpose.INIT, 1)
    noise = torch.randn(anchor.layout.size, generator=source, dtype=torch.float64)
    position = anchor.gaussian.sample(_DISPERSION * noise).to(anchor.layout.dtype)
    return anchor.layout.unflatten(position)


def with_summed(
    analyze: Callable[[LogPosterior, Data, Anchor | None], T],
    log_posterior: LogPosterior,
    data: Data,
    seed: int,
) -> T:
    """The result of `analyze` on the model and its data; with local latents summed out, if the user
    asks for that by `marginalize` or `Grouped`, or if minibatches need it.

    Args:
        analyze: function of a log posterior, its data, and the anchor of its nodes (None if nothing
            was summed out).
        log_posterior: the user's model, before its preflight.
        data: the data.
        seed: seed of the search for the anchor.

    Raises:
        DataError: the data are not in memory; and what `sum_out` raises.
    """
    refusal = None
    if not is_summed(log_posterior, data):
        try:
            return analyze(log_posterior, data, None)
        except SiteError as error:
            is_batch = data.batch_size is not None and isinstance(data, TensorData)
            if error.code != "local-latent" or not is_batch:
                raise
            refusal = error
    if not isinstance(data, TensorData):
        raise DataError(
            "local latents are summed out with a column that is added to the data, which have to "
            "be in memory: pass tensors, or Grouped(loader, by=...)"
        )
    return analyze(*sum_out(log_posterior.renew(None), data, seed, refusal))


def sum_out(
    log_posterior: LogPosterior, data: TensorData, seed: int, refusal: SiteError | None = None
) -> Summed:
    """The model with its local latents summed out, and the data with the column of modes.

    Args:
        log_posterior: the user's model, before its preflight.
        data: rows, or units of groups.
        seed: seed of the sample of units by which the search for the anchor begins.
        refusal: the error of a run with the latents, which is raised if none is local.

    Raises:
        ArgumentError: the latents that the user names are not the local ones.
        SiteError, PlateError: the model has no local latents, or they cannot be summed out.
    """
    local = local_sites(log_posterior.model, data, seed, refusal)
    with _named_rows(data):
        anchor = find_anchor(local, data.arguments, seed)
    num_data = rows.count(data.arguments)
    integrated = dataclasses.replace(data, arguments=anchor.arguments, num_data=num_data)
    return Summed(
        log_posterior.of_model(anchor.model, num_data, examine_integrated), integrated, anchor
    )


def local_sites(
    asked: Model, data: TensorData, seed: int, refusal: SiteError | None = None
) -> LocalSites:
    """The local latents of a user's model. Arguments and errors as for `sum_out`."""
    model = user_model(asked)
    names = () if model is asked else cast(Marginal, asked).names
    unit_model, example = _unit_model(model, data)
    with _named_rows(data), _named_failures(unit_model):
        # says what is wrong with the model, whatever its local latents
        LogPosterior(unit_model, rows.count(example)).prepare(example)
        local = recognize(unit_model, example, seed)
        if local is not None and isinstance(data, GroupedData):
            check_places(local, data.arguments, seed)
    if local is None:
        raise refusal or SiteError(
            "no latent of the model is local: none has a value for every "
            + (
                "row; for one of every group, pass Grouped(rows, by=...) as the data"
                if unit_model.by is None
                else "group; run it without marginalize or Grouped"
            ),
            code="local-latent",
        )
    found = [latent.name for latent in local.latents]
    if names and set(names) != set(found):
        raise ArgumentError(
            f"marginalize: the local latents of the model are {found}, not {list(names)}; all of "
            "them are summed out"
        )
    return local


def examine_integrated(program: Program, arguments: Arguments, *others: Any) -> ModelInfo:
    """The preflight of an integrated model, of which two units are enough where only its globals
    matter: they depend on no data."""
    info = examine_model(program, arguments, *others)
    two = rows.map_rows(torch.clone, rows.take(info.example, slice(0, 2)))  # no views of all units
    model = cast(Integrated, program.model)
    units, _ = cast(tuple[Arguments, Tensor], two)
    row_work = model.num_nodes * model.local.model.members(units).rows_of_unit
    return dataclasses.replace(info, example=two, row_work=row_work)


def to_rebuild(integrated: Integrated) -> dict[str, Any]:
    """What `rebuild` needs to know besides the user's model, as plain values by name."""
    model = integrated.local.model
    return {
        "by": model.by,
        "plate": model.plate,
        "count": integrated.count,
        "is_far": integrated.is_far,
        "description": integrated.description,
        "unseen_bias": integrated.unseen_bias,
    }


def rebuild(model: Model, known: dict[str, Any], units: Arguments) -> Integrated:
    """The integrated model of an earlier run, from the user's model.

    Args:
        model: the user's model.
        known: what `to_rebuild` returned in that run.
        units: a batch of its units.

    Raises:
        SiteError, PlateError: the model has no local latents that can be summed out.
    """
    local = recognize(UnitModel(user_model(model), known["by"], known["plate"]), units, seed=0)
    if local is None:
        raise SiteError("no latent of the model is local", code="local-latent")
    return Integrated(
        local, known["count"], known["is_far"], known["description"], known["unseen_bias"]
    )


def _unit_model(model: Model, data: TensorData) -> tuple[UnitModel, Arguments]:
    """(The model of batches of units; a few units to examine it on)."""
    count = rows.count(data.arguments)
    if count is None:
        raise ArgumentError("the model's arguments hold no rows, so that no latent is local")
    example = rows.take(data.arguments, slice(0, min(_EXAMPLE, count)))
    if not isinstance(data, GroupedData):
        return UnitModel(model), example
    grouped = data.grouped
    labels = grouped.labels
    sizes = {grouped.num_groups}
    if labels.dtype.kind in "iu":
        sizes.add(int(labels.max()) + 1)
    fullest = int((data.slots >= 0).sum(1).argmax())
    one: Any = rows.take(data.arguments, slice(fullest, fullest + 1))
    sizes.add(int(one[0][SLOTS].sum()))
    without_plate = UnitModel(model, grouped.by)
    with _named_failures(without_plate):
        plate = find_plate(without_plate, one, sizes, grouped.num_groups)
    return UnitModel(model, grouped.by, plate), example


@contextmanager
def _named_failures(model: UnitModel) -> Iterator[None]:
    """Names the likely cause if the user's model raises an error on some of the groups."""
    try:
        yield
    except PyroScaleError:
        raise
    except Exception as error:
        if model.by is None:
            raise
        if model.plate is None:
            raise PlateError(
                f"the model fails on the rows of a few groups ({type(error).__name__}: {error}): "
                "all sizes but the number of groups have to follow its arguments, as in "
                f"pyro.plate('data', len(x)), and by={model.by!r} has to be the groups' column"
            ) from error
        raise PlateError(
            f"the model fails on a batch of whole groups, in which plate '{model.plate}' has the "
            f"batch's groups as members ({type(error).__name__}: {error}). If by={model.by!r} is "
            "the groups' column, a tensor with a value for every group has to be an argument of "
            "the model: pass it in Grouped(..., groups=)"
        ) from error


@contextmanager
def _named_rows(data: TensorData) -> Iterator[None]:
    """Names the row and the group whose numbers are NaN if a log density is not finite."""
    try:
        yield
    except PyroScaleError as error:
        where = data.grouped.to_clean() if isinstance(data, GroupedData) else ""
        if error.code not in ("not-finite", "observed-value") or not where:
            raise
        site = str(error).partition(": ")[0]
        raise DataError(
            f"{site}: its log density is not finite, as {where}", code=error.code
        ) from None
