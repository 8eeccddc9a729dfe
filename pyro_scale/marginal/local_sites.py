"""Which latents of a model belong to a row or group, and the log density of each member."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import PlateError, SiteError
from pyro_scale.marginal.units import Members, UnitModel
from pyro_scale.model.classify import close
from pyro_scale.model.init_strategies import uniform
from pyro_scale.model.program import Program
from pyro_scale.model.recorder import Recorder
from pyro_scale.model.sites import Site, free_dim
from pyro_scale.model.terms import Term, aligned_scale, terms_of
from pyro_scale.model.transforms import bijection, is_real

#: Advice where local latents cannot be summed out.
SAMPLE_ALL = (
    "sample all latents together: NUTS on all rows, without Grouped, marginalize or batches"
)
#: Most continuous dimensions of a member's latents: the nodes are a grid.
MOST_DIMS = 3
#: Distance of the second latents at which a model is compared, unconstrained.
_SHIFT = 0.71


@dataclass(frozen=True)
class LocalLatent:
    """A latent with a value for every member.

    Attributes:
        name: the site's name.
        dim: the members' dimension, negative, among those of its batch shape.
        batch_dims: number of dimensions of its batch shape.
        shape: shape of one member's unconstrained value.
    """

    name: str
    dim: int
    batch_dims: int
    shape: torch.Size

    @property
    def axis(self) -> int:
        """The members' axis of the site's value, counted from the left."""
        return self.batch_dims + self.dim

    @property
    def size(self) -> int:
        """The number of unconstrained elements of one member."""
        return math.prod(self.shape)

    def unconstrained(self, z: Tensor) -> Tensor:
        """The site's unconstrained value, from those of the members, `[n, size]`."""
        return z.reshape(-1, *self.shape).movedim(0, self.axis)


class _AtValues(Recorder):
    """A recorder of a run at values of the globals and unconstrained values of the local latents.

    Args:
        values: constrained values of the globals and params, by site.
        others: arguments of `Recorder`.
    """

    def __init__(self, values: Mapping[str, Tensor], **others: Any):
        super().__init__(**others)
        self._values = values

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self._values and not msg["is_observed"]:
            msg["value"], msg["done"] = self._values[msg["name"]], True
        else:
            super()._pyro_sample(msg)

    def _pyro_param(self, msg: Any) -> None:
        if msg["name"] in self._values:
            msg["value"], msg["done"] = self._values[msg["name"]], True
        else:
            super()._pyro_param(msg)


@dataclass(frozen=True)
class LocalSites:
    """The local latents of a model, and the log density of each member (row or group) given values
    of the global latents.

    Attributes:
        model: the model of batches of units.
        latents: the local latents, in the model's order.
        dims: the rows' or members' dimension, negative, of each local term, by its name.
        hidden: names of all sites that follow the batch, and of their plates.
        observed: a name for the members' log likelihood: the observed sites'.
        enum_dim: the first free dimension for enumerated sites; None without these.
    """

    model: UnitModel
    latents: tuple[LocalLatent, ...]
    dims: Mapping[str, int]
    hidden: frozenset[str]
    observed: str
    enum_dim: int | None

    @property
    def num_dims(self) -> int:
        """d, the number of unconstrained elements of a member's latents."""
        return sum(latent.size for latent in self.latents)

    @property
    def names(self) -> str:
        """A phrase with the names of the local latents, for messages."""
        return " and ".join(f"'{latent.name}'" for latent in self.latents)

    @property
    def unit(self) -> str:
        """What has a local latent, for messages: "row" or "group"."""
        return "row" if self.model.by is None else "group"

    def split(self, z: Tensor) -> dict[str, Tensor]:
        """The unconstrained values of the local latents by site, from all members' `[n, d]`."""
        parts = z.split([latent.size for latent in self.latents], dim=-1)
        pairs = zip(self.latents, parts, strict=True)
        return {latent.name: latent.unconstrained(part) for latent, part in pairs}

    def run(
        self, values: Mapping[str, Tensor], z: Tensor, arguments: Arguments
    ) -> Mapping[str, Site]:
        """The sites of a run at values of the globals and local latents `[n, d]`."""
        recorder = _AtValues(values, latents=self.split(z), enum_dim=self.enum_dim)
        return Program(self.model).run(arguments, recorder).sites

    def terms(
        self, values: Mapping[str, Tensor], z: Tensor, arguments: Arguments
    ) -> dict[str, Tensor]:
        """Log densities of every member `[n]` in nats, by term: latents' priors, in unconstrained
        space, and observations.

        Args:
            values: constrained values of the globals and params.
            z: unconstrained local latents, `[n, d]`.
            arguments: a batch of units.
        """
        members, sites = self.model.members(arguments), self.run(values, z, arguments)
        result = {}
        for name, term in terms_of(sites).items():
            if name in self.dims:
                log_prob = term.log_prob * aligned_scale(term, term.log_prob)
                if term.is_prior and term.site is not None:
                    log_prob = log_prob + _log_det(term.site)
                result[name] = self._of_members(term, log_prob, members)
        return result

    def log_joint(self, values: Mapping[str, Tensor], z: Tensor, arguments: Arguments) -> Tensor:
        """log p(data, z | globals) of every member, `[n]` in nats; arguments as for `terms`."""
        return torch.stack(list(self.terms(values, z, arguments).values())).sum(0)

    def _of_members(self, term: Term, log_prob: Tensor, members: Members) -> Tensor:
        first = _by_member(log_prob, self.dims[term.name])
        if self.model.plate in [frame.name for frame in term.plates]:
            return first
        return members.add_up(first)


def _by_member(log_prob: Tensor, dim: int) -> Tensor:
    """Sums over all dimensions but that of the rows or members, `[rows or members]`."""
    first = log_prob.movedim(dim, 0)
    return first.reshape(len(first), -1).sum(1)


def _log_det(site: Site) -> Tensor | float:
    """log |d value / d unconstrained| of a latent, by batch element; 0 for the identity."""
    if site.unconstrained is None or is_real(site.fn.support):
        return 0.0
    return bijection(site.fn.support).log_abs_det_jacobian(site.unconstrained, site.value)


# ---------------------------------------------------------------------- recognition


def recognize(model: UnitModel, example: Arguments, seed: int) -> LocalSites | None:
    """The local latents of a model, from runs on a batch of units and on its two halves, each at
    two sets of values. None if there are none.

    Args:
        model: the model of batches of units.
        example: a few units, as its arguments.
        seed: seed of the values.

    Raises:
        SiteError, PlateError: a member depends on other members, or has too many latents.
    """
    count = rows.count(example) or 1
    order = torch.arange(count) if count > 1 else torch.zeros(2, dtype=torch.int64)
    whole = rows.take(example, order)
    halves = [rows.take(example, part) for part in order.tensor_split(2)]
    program = Program(model)
    with own_generator(seed), torch.no_grad():
        drawn = [program.draw_latents(whole, uniform, {}) for _ in range(2)]
        part = program.draw_latents(halves[0], uniform, {})
    full = drawn[0].sites
    dims = _following(
        {n: s.fn.batch_shape for n, s in full.items() if s.kind != "subsample"},
        {n: s.fn.batch_shape for n, s in part.sites.items() if s.kind != "subsample"},
    )
    latents = []
    for name in dims:
        site = full[name]
        if site.kind == "enumerated" and model.plate in [frame.name for frame in site.plates]:
            raise SiteError(
                f"site '{name}': a discrete latent of every group is not summed out over the "
                "group's rows: pass data with one row for every group, and its observations as "
                "columns; discrete latents of a row are enumerated",
                code="local-latent",
            )
        if site.kind == "latent" and site.unconstrained is not None:
            latents.append(_local_latent(model, site, dims[name]))
    if not latents:
        return None
    plates = {frame.name for name in dims for frame in full[name].plates}
    hidden = frozenset(dims) | plates
    local = LocalSites(model, tuple(latents), {}, hidden, "log_lik", free_dim(full))
    term_dims = _following(
        _term_shapes(local, drawn[0], whole), _term_shapes(local, part, halves[0])
    )
    priors = {latent.name for latent in latents}
    observed = "+".join(name for name in term_dims if name not in priors)
    local = replace(local, dims=term_dims, observed=observed or local.observed)
    _check_sizes(local, full)
    for run in drawn:
        _check_independent(local, run, whole, halves)
    return local


def _check_sizes(local: LocalSites, sites: Mapping[str, Site]) -> None:
    """Raises if no latent is global, or a member has too many."""
    if not any(site.kind == "latent" and site.name not in local.hidden for site in sites.values()):
        raise SiteError(
            f"site {local.names}: every latent of the model is one of each row or group, so that "
            "none is left to infer: sample those that all share outside of their plate",
            code="local-latent",
        )
    if local.num_dims > MOST_DIMS:
        raise SiteError(
            f"site {local.names}: a {local.unit} has {local.num_dims} continuous latents, and at "
            f"most {MOST_DIMS} are summed out by nodes; {SAMPLE_ALL}",
            code="local-latent",
        )


def globals_of(local: LocalSites, run: Recorder) -> dict[str, Tensor]:
    """The constrained values of the globals in a run, by site."""
    sites = run.sites.values()
    return {s.name: s.value for s in sites if s.kind == "latent" and s.name not in local.hidden}


def _following(full: Mapping[str, torch.Size], part: Mapping[str, torch.Size]) -> dict[str, int]:
    """The dimension (negative) of each site that differs between a batch and a part of it."""
    dims = {}
    for name, shape in full.items():
        other = part.get(name)
        if other is None or len(other) != len(shape):
            raise PlateError(f"site '{name}': it is not in every batch, or changes its dimensions")
        follow = [i - len(shape) for i in range(len(shape)) if shape[i] != other[i]]
        if len(follow) > 1:
            raise PlateError(f"site '{name}': dimensions {follow} of its shape follow the batch")
        if follow:
            dims[name] = follow[0]
    return dims


def _term_shapes(local: LocalSites, run: Recorder, arguments: Arguments) -> dict[str, torch.Size]:
    """Shapes of the terms at the values of a run, with enumerated sites summed out, by name."""
    with torch.no_grad():
        sites = local.run(globals_of(local, run), _latents_of(local, run), arguments)
    return {name: term.log_prob.shape for name, term in terms_of(sites).items()}


def _local_latent(model: UnitModel, site: Site, dim: int) -> LocalLatent:
    assert site.unconstrained is not None
    if model.by is not None and model.plate not in [frame.name for frame in site.plates]:
        raise SiteError(
            f"site '{site.name}': a latent of every row, inside of groups whose latents are "
            f"summed out, too; {SAMPLE_ALL}",
            code="local-latent",
        )
    batch_dims = len(site.fn.batch_shape)
    shape = site.unconstrained.movedim(batch_dims + dim, 0).shape[1:]
    return LocalLatent(site.name, dim, batch_dims, shape)


def _latents_of(local: LocalSites, run: Recorder) -> Tensor:
    """The members' unconstrained latents in a run, `[n, d]`."""
    parts = []
    for latent in local.latents:
        value = run.sites[latent.name].unconstrained
        assert value is not None
        first = value.movedim(latent.axis, 0)
        parts.append(first.reshape(len(first), -1))
    return torch.cat(parts, 1)


def draw_from_prior(local: LocalSites, values: Mapping[str, Tensor], units: Arguments) -> Tensor:
    """A draw, always the same, of the members' unconstrained latents from their prior given the
    globals, `[n, d]`.

    Args:
        local: the local part of the model.
        values: constrained values of the globals, by site.
        units: a batch of units.
    """

    def at_values(site: Any) -> Tensor:
        return values[site["name"]] if site["name"] in values else site["fn"].sample()

    with own_generator(0):
        return _latents_of(local, Program(local.model).draw_latents(units, at_values, {}))


def _check_independent(
    local: LocalSites, run: Recorder, whole: Arguments, halves: list[Arguments]
) -> None:
    """Raises if a member's densities depend on other members, or a global on local latents."""
    values, z = globals_of(local, run), _latents_of(local, run)
    with torch.no_grad():
        terms = local.terms(values, z, whole)
        parts = z.split([local.model.members(half).count for half in halves])
        of_halves = [
            local.terms(values, part, half) for part, half in zip(parts, halves, strict=True)
        ]
        outside = [
            {
                name: term.log_prob
                for name, term in terms_of(local.run(values, at, whole)).items()
                if name not in local.dims
            }
            for at in (z, z + _SHIFT)
        ]
    for name, log_prob in terms.items():
        joined = torch.cat([half[name] for half in of_halves])
        if not close(log_prob, joined):
            raise _depends_on_others(local, name)
    for name, log_prob in outside[0].items():
        if not close(log_prob, outside[1][name]):
            raise SiteError(
                f"site '{name}': its density depends on {local.names}, of which every row or group "
                f"has one, and it is outside of their plate; {SAMPLE_ALL}",
                code="local-latent",
            )


def check_places(local: LocalSites, units: Arguments, seed: int) -> None:
    """Raises if the density of a group changes with its place in a batch, as it does where the
    model indexes a tensor that is not among its arguments by the group column.

    Args:
        local: the local part of a model of groups.
        units: all units, as places in a batch may be any of theirs.
        seed: seed of the values.

    Raises:
        SiteError: it does.
    """
    count = rows.count(units) or 1
    few: Any = rows.take(units, slice(0, 2))
    with own_generator(seed), torch.no_grad():
        run = Program(local.model).draw_latents(few, uniform, {})
        values = globals_of(local, run)
        z = torch.zeros(local.model.members(units).count, local.num_dims)
        terms = local.terms(values, z, units)
        backwards = local.terms(values, z, rows.take(units, torch.arange(count).flip(0)))
    for name, log_prob in terms.items():
        again = backwards[name].unflatten(0, (count, -1)).flip(0).flatten()
        if not close(log_prob.nan_to_num(), again.nan_to_num()):  # data are looked at later
            raise _depends_on_others(local, name)


def _depends_on_others(local: LocalSites, name: str) -> SiteError:
    """A `SiteError` to raise: the density of a row or group at the site `name` depends on other
    rows or groups."""
    values_of_groups = (
        "a tensor with a value for every group has to be an argument of the model, which "
        "Grouped(..., groups=) passes along; if there is none, "
    )
    return SiteError(
        f"site '{name}': the density of a {local.unit} depends on other {local.unit}s, or "
        f"on their latents, so {local.names} cannot be summed out one by one; "
        f"{values_of_groups if local.unit == 'group' else ''}{SAMPLE_ALL}",
        code="local-latent",
    )


# ---------------------------------------------------------------------- the plate of the groups


def find_plate(model: UnitModel, example: Arguments, sizes: set[int], num_groups: int) -> str:
    """The name of the plate of the groups: that of a latent, with as many members as there are
    groups.

    Args:
        model: the model of batches of units.
        example: one unit.
        sizes: sizes that the plate may have: the number of groups, or the largest label plus one.
        num_groups: number of groups, for the message.

    Raises:
        PlateError: there is none, or there are several.
    """
    with own_generator(0), torch.no_grad():
        sites = Program(model).draw_latents(example, uniform, {}).sites.values()
    frames = {f.name: f.size for s in sites if s.kind in ("latent", "enumerated") for f in s.plates}
    names = [name for name, size in frames.items() if size in sizes]
    names = names or [name for name, size in frames.items() if size >= num_groups]
    if len(names) == 1:
        return names[0]
    if names:
        raise PlateError(
            f"plates {names} all have as many members as there are groups ({num_groups:,}), so it "
            "is not known which is the groups'"
        )
    listed = ", ".join(f"'{name}' has {size:,}" for name, size in frames.items())
    raise PlateError(
        f"no latent is in a plate of the {num_groups:,} groups ({listed or 'there is no plate'}): "
        "put the groups' latents into pyro.plate('groups', num_groups)"
    )
