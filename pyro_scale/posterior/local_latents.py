"""After a run whose local latents were summed out: their draws, and the user's model to predict
with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.layout import Layout
from pyro_scale.core.memory import bytes_of, in_words
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.chunks import Chunk
from pyro_scale.data.sources import Data, TensorData
from pyro_scale.errors import ArgumentError, CallError, DataError
from pyro_scale.marginal.anchor import find_modes
from pyro_scale.marginal.grouped import GROUPS, PLACES, ROWS, SLOTS, USED, with_column
from pyro_scale.marginal.grouped_data import GroupedData
from pyro_scale.marginal.integrated import Integrated, column_of, integrated_of
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.transforms import bijection
from pyro_scale.posterior.draws import PosteriorDraws

#: Proposals of which one is a draw of a member's latents, and the degrees of freedom and the sds of
#: the t distribution that they are from.
_PROPOSALS, _FREEDOM, _WIDTH = 10, 2, 1.1
#: Proposals of all members that are computed together.
_AT_ONCE = 2**20


def draw_latents(
    result: PosteriorDraws, units: Arguments, modes: Tensor, seed: int
) -> dict[str, Tensor]:
    """Draws of the local latents of all members of some units, one given each draw of the globals:
    constrained values `[draws, members, ...]` by site.

    Each is the first of some proposals that is accepted, by rejection sampling whose bound is the
    largest importance weight among them.

    Args:
        result: draws of the globals.
        units: the units.
        modes: modes of their members' latents at the anchor, `[units, slots, d]`.
        seed: seed of the draws.

    Raises:
        ArgumentError: the draws do not fit into memory.
    """
    model = integrated_of(result.log_posterior)
    assert model is not None
    total = result.positions.shape[:2].numel()
    members = model.local.model.members(units).count
    needed = total * members * model.local.num_dims * result.layout.dtype.itemsize
    if needed > (available := bytes_of(torch.device("cpu")) // 2):
        raise ArgumentError(
            f"latents: {total:,} draws of {members:,} rows or groups take {in_words(needed)} of "
            f"memory, and {in_words(available)} are available: pass a smaller num_samples",
            code="memory",
        )
    size = max(1, _AT_ONCE * (rows.count(units) or 1) // (members * _PROPOSALS))
    parts = []
    with own_generator(seed), torch.no_grad():
        for start in range(0, len(modes), size):
            chunk: Any = rows.take((units, modes), slice(start, start + size))

            def draw(params: dict[str, Tensor], chunk: Any = chunk) -> dict[str, Tensor]:
                return _draw(model, result.log_posterior.constrain(params), *chunk)

            parts.append(result.over_draws(draw, random=True))
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def _draw(
    model: Integrated, values: Mapping[str, Tensor], units: Arguments, modes: Tensor
) -> dict[str, Tensor]:
    """One draw of the members' latents given the globals, constrained, `[members, ...]` by site."""
    around = model.gaussians(values, units, modes)
    shape = (_PROPOSALS, *around.center.shape)
    like = around.center
    chi2 = -2 * torch.rand(shape, dtype=like.dtype, device=like.device).log()  # of 2 degrees
    x = torch.randn(shape, dtype=like.dtype, device=like.device) * (_FREEDOM / chi2).sqrt()
    z = around.points(_WIDTH * x)
    log_joint = torch.vmap(lambda z: model.local.log_joint(values, z, units))(z)
    log_weights = log_joint + (_FREEDOM + 1) / 2 * (x.square() / _FREEDOM).log1p().sum(-1)
    log_weights = log_weights.nan_to_num(-torch.inf)
    is_accepted = torch.rand_like(log_weights).log() < log_weights - log_weights.amax(0)
    first = is_accepted.int().argmax(0)
    chosen = z.gather(0, first[None, :, None].expand(1, *like.shape))[0]
    sites = model.local.run(values, chosen, units)
    return {
        latent.name: sites[latent.name].value.movedim(latent.axis, 0)
        for latent in model.local.latents
    }


def latents(result: PosteriorDraws, seed: int) -> dict[str, Tensor]:
    """Draws of the local latents of the run's data: `[draws, rows or groups, ...]` by site, groups
    in the order of their labels."""
    data = _data_of(result)
    units, modes = _parts(data.arguments)
    drawn = draw_latents(result, units, modes, seed)
    if isinstance(data, GroupedData):
        return {name: value[:, data.members] for name, value in drawn.items()}
    return drawn


def _data_of(result: PosteriorDraws) -> TensorData:
    """The data of the run.

    Raises:
        ArgumentError: the posterior is from a file.
    """
    if not isinstance(result.data, TensorData):
        raise ArgumentError(
            "the posterior is from a file, which does not have the data that latents which were "
            "summed out are drawn from: draw them, and predict, before saving"
        )
    return result.data


def _parts(arguments: Any) -> tuple[Arguments, Tensor]:
    units, modes = arguments
    return units, modes


# ------------------------------------------------------------------ other rows


def with_modes(result: PosteriorDraws, data: TensorData) -> TensorData:
    """Other data of the same form as the run's, with the column of modes, those at the mean of the
    draws."""
    model = integrated_of(result.log_posterior)
    assert model is not None
    values = result.log_posterior.constrain(result.layout.unflatten(_mean(result)))
    members = model.local.model.members(data.arguments).count
    start = torch.zeros(members, model.local.num_dims).to(result.layout.dtype)
    modes, _, _ = find_modes(model.local, values, data.arguments, start)
    count = rows.count(data.arguments) or 1
    arguments: Any = data.arguments, column_of(modes, count)
    return dataclasses.replace(data, arguments=arguments, num_data=count)


def _mean(result: PosteriorDraws) -> Tensor:
    total = result.positions.shape[:2].numel()
    return torch.stack([block.sum(0) / total for block in result.blocks()]).sum(0)


def sharing_groups(data: Data) -> Tensor | None:
    """Where each group is among the members of all units, `[groups]`, if several share a unit; None
    where rows, or groups, are units."""
    if isinstance(data, GroupedData) and data.slots.shape[1] > 1:
        return data.members
    return None


def member_log_likelihood(result: PosteriorDraws, chunk: Chunk) -> dict[str, Tensor]:
    """log p(data | globals) of every member of a chunk of units at every draw, `[draws, members]`
    in nats, by the name of the observed sites."""
    model = integrated_of(result.log_posterior)
    assert model is not None
    units, modes = _parts(chunk.arguments)

    def of_draw(params: dict[str, Tensor]) -> dict[str, Tensor]:
        values = result.log_posterior.constrain(params)
        around = model.gaussians(values, units, modes)
        return {model.local.observed: model.log_marginal(values, units, around)}

    return result.over_draws(of_draw)


# ------------------------------------------------------------------ predictions


def to_predict(
    result: PosteriorDraws, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[PosteriorDraws, Arguments]:
    """What `predictive.predict` takes, to predict with the user's own model: (draws of the globals,
    with draws of the local latents of these rows' groups; the model's arguments). A group of the
    run has latents given its data, a new group or row has latents from their prior.

    Args:
        result: draws of the globals.
        args, kwargs: the rows to predict, as the user's model takes them.
    """
    model, data = integrated_of(result.log_posterior), _data_of(result)
    assert model is not None
    units, _ = _parts(data.arguments)
    example = rows.take(units, slice(0, 16))
    joint = LogPosterior(model.local.model, rows.count(example))
    joint.prepare(example)
    plain = dataclasses.replace(result, log_posterior=joint)
    if not isinstance(data, GroupedData):
        return plain, joint.bind(args, kwargs)
    arguments, labels = _as_one_unit(data, args, kwargs)
    places = data.grouped.places_of(labels)
    return _with_latents(plain, result, data, (arguments,), places), (arguments,)


def _as_one_unit(
    data: GroupedData, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """(The rows to predict as one unit; the labels of its groups)."""
    grouped = data.grouped
    by, is_dict = grouped.by, isinstance(grouped.groups, dict)
    names = set(grouped.groups) if is_dict else set()
    of_rows: Any = {name: v for name, v in kwargs.items() if name not in names}
    of_groups: Any = {name: v for name, v in kwargs.items() if name in names}
    if not isinstance(grouped.rows, dict) and not of_rows:
        num_rows = len(grouped.rows)
        of_rows, left_out = args[:num_rows], num_rows - len(args)
        if not is_dict:  # values of groups keep their places if y is left out
            of_groups = args[num_rows:]
            of_rows += (None,) * left_out if grouped.groups else ()
    elif args or not isinstance(grouped.rows, dict):
        raise CallError("predict: pass the model's arguments as they were passed to Grouped")
    labels, places = grouped.relabel(of_rows, by)
    of_rows = rows.tables_as_tensors(with_column(of_rows, by, places))
    if rows.count(of_rows) != len(places):
        raise DataError("predict: pass rows, and the group of each")
    of_groups = grouped.values_of(of_groups, labels)
    unit = {
        ROWS: rows.map_rows(lambda column: column[None], of_rows),
        GROUPS: rows.map_rows(lambda column: column[None], of_groups),
        PLACES: places[None],
        USED: torch.ones(1, len(places), dtype=torch.bool),
        SLOTS: torch.ones(1, len(labels), dtype=torch.bool),
    }
    return unit, labels


def _with_latents(
    plain: PosteriorDraws,
    result: PosteriorDraws,
    data: GroupedData,
    arguments: Arguments,
    places: Tensor,
) -> PosteriorDraws:
    """The draws with unconstrained values of the latents of some groups beside the globals.

    Args:
        plain: draws of the globals, with the user's model.
        result: draws of the globals, with the integrated model.
        data: data of the run.
        arguments: the rows to predict, as one unit.
        places: places of these rows' groups among those of the run; -1 for new groups.
    """
    model = integrated_of(result.log_posterior)
    assert model is not None
    names = [latent.name for latent in model.local.latents]

    def of_population(params: dict[str, Tensor]) -> dict[str, Tensor]:
        sites = plain.log_posterior.simulate(params, arguments).sites
        return {name: sites[name].value for name in names}

    values = plain.over_draws(of_population, random=True)
    seen = places >= 0
    if bool(seen.any()):
        unit_of, kept = data.units_of(places[seen])
        units, modes = _parts(rows.take(data.arguments, unit_of))
        seed = int(torch.randint(2**31, ()))
        drawn = draw_latents(result, units, modes, seed)
        for latent in model.local.latents:
            first = values[latent.name].movedim(1 + latent.axis, 1).clone()
            first[:, seen] = drawn[latent.name][:, kept]
            values[latent.name] = first.movedim(1, 1 + latent.axis)
    priors = plain.log_posterior.simulate(
        plain.layout.unflatten(plain.positions[0, 0]), arguments
    ).sites
    flat = [torch.cat(list(result.blocks()))]
    shapes, dtypes = list(result.layout.shapes), list(result.layout.dtypes)
    for name in names:
        unconstrained = bijection(priors[name].fn.support).inv(values[name])
        shapes.append(unconstrained.shape[1:])
        dtypes.append(unconstrained.dtype)
        flat.append(unconstrained.flatten(1).to(flat[0]))
    layout = Layout((*result.layout.names, *names), tuple(shapes), tuple(dtypes))
    positions = torch.cat(flat, 1).unflatten(0, tuple(result.positions.shape[:2]))
    return dataclasses.replace(plain, layout=layout, positions=positions)
