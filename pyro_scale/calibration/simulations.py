"""Data sets drawn from a model, and the latents that each of them was drawn from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions import Delta
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.calibration.stack import take_one
from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.errors import ArgumentError, DataError, ModelError, SiteError
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.observation_checks import inside_support
from pyro_scale.model.sites import Site
from pyro_scale.posterior.chunked_vmap import vmap_in_chunks
from pyro_scale.posterior.row_batches import data_axes
from pyro_scale.rng.seeds import Purpose, derived_seed

#: Data sets that are drawn at a time, by a seed of their own: the same, however many there are.
AT_ONCE = 20


@dataclass(frozen=True)
class Place:
    """Where a site's observations are.

    Attributes:
        axis: of their rows; None for an observation without rows, which is then repeated in each.
        leaf: which of the arguments' leaves holds them too; None where none does.
        dtype: of that leaf, or of the observations.
        missing: which of them are not observed, where some are NaN.
        part: the places of the observations in that leaf, flat, where it holds more than them.
    """

    axis: int | None
    leaf: int | None
    dtype: torch.dtype
    missing: Tensor | None
    part: Tensor | None = None

    def as_rows(self, value: Tensor, num_rows: int) -> Tensor:
        """Drawn values with their rows first."""
        if self.missing is not None:
            value = torch.where(self.missing, torch.nan, value)
        if self.axis is None:
            return value.expand(num_rows, *value.shape)
        return value.movedim(self.axis, 0)

    def as_leaf(self, value: Tensor) -> Tensor:
        """A value as the argument holds it: classes and counts may be of another dtype there."""
        both_real = self.dtype.is_floating_point and value.is_floating_point()
        return value if both_real else value.to(self.dtype)

    def as_value(self, table: Tensor) -> Tensor:
        """The site's value, by its rows."""
        return table[0] if self.axis is None else table.movedim(0, self.axis)

    def in_leaf(self, leaf: Tensor, table: Tensor) -> Tensor:
        """The leaf with other observations."""
        value = self.as_value(table).to(self.dtype)
        if self.part is None:
            return value
        return leaf.flatten().scatter(0, self.part.flatten(), value.flatten()).view(leaf.shape)

    def doubled(self, leaf: Tensor | None) -> Place:
        """That of every row twice."""
        part = self.part
        if part is not None and leaf is not None and self.axis is not None:
            part = torch.cat([part, part + leaf.numel()], self.axis)
        return dataclasses.replace(self, missing=None, part=part)


@dataclass(frozen=True)
class Generator:
    """A model that draws data like those that it is given.

    Attributes:
        log_posterior: of the model, understood on the data.
        arguments: the data, as the model takes them.
        places: of each observed site.
        covariates: the leaves of the arguments whose rows each data set draws anew, with
            replacement, by name; none where all data sets have the same.
    """

    log_posterior: LogPosterior
    arguments: Arguments
    places: Mapping[str, Place]
    covariates: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, log_posterior: LogPosterior, arguments: Arguments) -> Generator:
        """The generator of a model, which it checks.

        Raises:
            SiteError: a site that cannot be drawn, by name.
            ModelError: params, which all data sets would share, or subsamples of its own.
            DataError: there are no observations.
        """
        log_posterior.prepare(arguments)
        _check(log_posterior)
        sites = log_posterior.model_info.sites
        observed = {name: site for name, site in sites.items() if site.kind == "observed"}
        if not observed:
            raise DataError(
                "sbc: the model observes nothing: pass the data that it is run on, observations "
                "included"
            )
        axes = data_axes(log_posterior.model_info, apart=True)
        leaves = pytree.tree_leaves(arguments)
        has_rows = rows.count(arguments) is not None
        places = {
            name: _place(site, axes.get(name) if has_rows else None, leaves)
            for name, site in observed.items()
        }
        generator = cls(log_posterior, arguments, places)
        generator._check_that_data_are_drawn()
        return generator

    def resampling(self) -> Generator:
        """The same with covariates drawn anew for each data set.

        Raises:
            ArgumentError: observations and covariates are in one tensor.
        """
        if any(place.part is not None for place in self.places.values()):
            raise ArgumentError(
                "resample=True: observations are a part of a tensor that holds covariates too: "
                "pass them as tensors of their own"
            )
        held = {place.leaf for place in self.places.values()}
        leaves = pytree.tree_leaves(self.arguments)
        drawn = [i for i, leaf in enumerate(leaves) if rows.is_rows(leaf) and i not in held]
        return dataclasses.replace(self, covariates={f"argument {i}": i for i in drawn})

    def with_arguments(self, arguments: Arguments) -> Generator:
        """The same on other rows."""
        return dataclasses.replace(self, arguments=arguments)

    @property
    def num_rows(self) -> int:
        """Rows of the data; 1 where the model takes none."""
        return rows.count(self.arguments) or 1

    @property
    def latents(self) -> tuple[str, ...]:
        """The sites that are drawn from their priors."""
        return self.log_posterior.latents

    def model(self) -> Callable[..., Any]:
        """The model of (what all data sets have, what each has of its own by site), each a pytree
        of rows."""
        run, places, covariates = self.log_posterior.model, self.places, self.covariates

        def simulated(arguments: Arguments, own: Mapping[str, Tensor]) -> Any:
            values = {name: place.as_value(own[name]) for name, place in places.items()}
            leaves, structure = pytree.tree_flatten(arguments)
            for name, place in places.items():
                if place.leaf is not None and place.part is None:
                    leaves[place.leaf] = place.as_leaf(values[name])
            for name, leaf in covariates.items():
                leaves[leaf] = own[name]
            with poutine.condition(data=values):
                return rows.call(run, pytree.tree_unflatten(leaves, structure))

        return simulated

    def shared(self) -> Arguments:
        """The arguments that all data sets have in common: None in place of the others."""
        held = {place.leaf for place in self.places.values() if place.part is None}
        held |= set(self.covariates.values())
        leaves, structure = pytree.tree_flatten(self.arguments)
        kept = [None if i in held else leaf for i, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(kept, structure)

    def given(self, own: Mapping[str, Tensor]) -> Arguments:
        """The arguments as a user passes them, of a data set with these rows of its own."""
        leaves, structure = pytree.tree_flatten(self.arguments)
        for name, place in self.places.items():
            if place.leaf is not None:
                leaves[place.leaf] = place.in_leaf(leaves[place.leaf], own[name])
        for name, leaf in self.covariates.items():
            leaves[leaf] = own[name]
        return pytree.tree_unflatten(leaves, structure)

    def prior_draws(self, count: int, seed: int) -> dict[str, Tensor]:
        """Unconstrained latents from their priors, `[count, ...]`."""
        numbers = range(-(-count // AT_ONCE))
        seeds = [derived_seed(seed, 0, Purpose.SIMULATION, number) for number in numbers]
        parts = [self.log_posterior.prior_draws(self.arguments, AT_ONCE, own) for own in seeds]
        return {n: torch.cat([part[n] for part in parts])[:count] for n in self.latents}

    def draw(
        self, params: Mapping[str, Tensor], seed: int, start: int = 0, stop: int | None = None
    ) -> dict[str, Tensor]:
        """Data sets at unconstrained latents `[count, ...]`: what each has of its own, by site,
        `[..., rows, ...]`.

        Args:
            params: of all data sets.
            seed: of all.
            start, stop: the numbers of the data sets that are wanted; all by default.
        """
        count, parts = len(next(iter(params.values()))), []
        stop, first = count if stop is None else stop, start // AT_ONCE
        for number in range(first, -(-stop // AT_ONCE)):
            places = torch.arange(number * AT_ONCE, (number + 1) * AT_ONCE).clamp(max=count - 1)
            own = derived_seed(seed, 1, Purpose.SIMULATION, number)
            parts.append(self._draw({name: value[places] for name, value in params.items()}, own))
        wanted = slice(start - first * AT_ONCE, stop - first * AT_ONCE)
        return {name: torch.cat([part[name] for part in parts])[wanted] for name in parts[0]}

    def observations(self) -> dict[str, Tensor]:
        """Those of the data, by site, `[rows, ...]`."""
        sites = self.log_posterior.model_info.sites
        return {n: p.as_rows(sites[n].value, self.num_rows) for n, p in self.places.items()}

    def doubled(self) -> Generator:
        """The same on every row twice."""
        twice = rows.map_rows(lambda leaf: torch.cat([leaf, leaf]), self.arguments)
        leaves = pytree.tree_leaves(self.arguments)
        places = {
            name: place.doubled(None if place.leaf is None else leaves[place.leaf])
            for name, place in self.places.items()
        }
        return dataclasses.replace(self, arguments=twice, places=places)

    def check_support(
        self, params: Mapping[str, Tensor], observed: Mapping[str, Tensor], start: int
    ) -> None:
        """Refuses observations that the model could not have drawn at the latents of theirs.

        Args:
            params: of the data sets, `[data sets, ...]`.
            observed: their observations.
            start: the number of the first.

        Raises:
            SiteError: it names the site and the data set.
        """
        numbers = torch.arange(len(next(iter(observed.values()))))

        def inside(number: Tensor) -> dict[str, Tensor]:
            own = {name: take_one(table, number) for name, table in observed.items()}
            here = {name: take_one(value, number) for name, value in params.items()}
            sites = self.log_posterior.run(here, self.given(own)).sites
            return {
                name: inside_support(
                    dataclasses.replace(sites[name], value=place.as_value(own[name]))
                ).all()
                for name, place in self.places.items()
            }

        parts = list(vmap_in_chunks(inside, [numbers]))
        for name in self.places:
            outside = torch.nonzero(~torch.cat([part[name] for part in parts]))[:, 0]
            if len(outside):
                raise SiteError(
                    f"site '{name}': the observations of simulation {start + int(outside[0])} are "
                    "outside of its support: simulator= draws what the fitted model cannot"
                )

    def _draw(self, params: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
        count, num_rows = len(next(iter(params.values()))), self.num_rows
        leaves, structure = pytree.tree_flatten(self.arguments)
        with own_generator(seed), torch.no_grad(), without_vmap_warnings():
            covariates = {}
            if self.covariates:
                chosen = torch.randint(num_rows, (count, num_rows))
                covariates = {name: leaves[i][chosen] for name, i in self.covariates.items()}

            def one(own: dict[str, Tensor], covariates: dict[str, Tensor]) -> dict[str, Tensor]:
                mixed = list(leaves)
                for name, i in self.covariates.items():
                    mixed[i] = covariates[name]
                arguments = pytree.tree_unflatten(mixed, structure)
                sites = self.log_posterior.simulate(own, arguments).sites
                return {name: sites[name].value for name in self.places}

            try:
                drawn = torch.vmap(one, randomness="different")(dict(params), covariates)
            except (RuntimeError, NotImplementedError):  # a model, or a sampler, that vmap refuses
                every = [one(_entry(params, i), _entry(covariates, i)) for i in range(count)]
                drawn = {name: torch.stack([each[name] for each in every]) for name in self.places}
        observed = {
            name: torch.stack([place.as_rows(value, num_rows) for value in drawn[name]])
            for name, place in self.places.items()
        }
        return observed | covariates

    def _check_that_data_are_drawn(self) -> None:
        """Checks that no observation depends on other observations, as in an autoregression:
        drawn one by one given the data, they would not be a draw of the model.

        Raises:
            SiteError: it names the site.
        """
        params = self.prior_draws(AT_ONCE, 0)
        once = self.draw(params, 0)
        other = self.draw(params, 1)
        again = self.with_arguments(
            self.given({name: table[0] for name, table in other.items()})
        ).draw(params, 0)
        for name, table in once.items():
            if not torch.equal(table.nan_to_num(), again[name].nan_to_num()):
                raise SiteError(
                    f"site '{name}': its distribution depends on observations, so no data set "
                    "can be drawn from the model as it is called: write it for observations that "
                    "are None, one step after another, and pass that as simulator="
                )


def _check(log_posterior: LogPosterior) -> None:
    info = log_posterior.model_info
    if log_posterior.points:
        name = next(iter(log_posterior.points))
        raise ModelError(
            f"sbc: '{name}' is a param, which has no prior to draw from: give it one "
            "(pyro.sample), or keep it fixed"
        )
    if info.own_plate is not None:
        raise ModelError(
            f"sbc: plate '{info.own_plate}' takes subsamples by itself, but a data set has all "
            "rows: leave subsample_size out and pass batch_size="
        )
    for site in info.sites.values():
        if site.kind == "factor":
            raise SiteError(
                f"site '{site.name}' is a pyro.factor, from which no data can be drawn: write it "
                "as an observation of a distribution"
            )
        if site.kind in ("latent", "observed") and not _can_be_drawn(site):
            what = "an improper prior" if site.kind == "latent" else "a distribution without draws"
            raise SiteError(
                f"site '{site.name}': {type(site.fn).__name__} is {what}, so no data set can "
                "be drawn: give it a proper distribution, or pass simulator="
            )


def _can_be_drawn(site: Site) -> bool:
    if site.kind == "observed" and isinstance(site.fn, Delta):
        return True
    try:
        with own_generator(0), torch.no_grad():
            drawn = site.fn.sample()
    except NotImplementedError:
        return False
    return bool(torch.isfinite(drawn).all()) or site.kind == "observed"


def _place(site: Site, from_right: int | None, leaves: list[Any]) -> Place:
    """Where a site's rows are, and its values among the arguments."""
    axis = None if from_right is None else site.value.dim() + from_right
    equal = [i for i, each in enumerate(leaves) if _is_same(each, site.value)]
    held = [i for i, each in enumerate(leaves) if _is_in(each, site.value)]
    both = [i for i in equal if i in held]  # a covariate may be equal to them, too
    leaf = next(iter([*reversed(both), *reversed(equal), *held]), None)
    part = None
    if leaf is not None and leaf not in equal:
        part = _part(leaves[leaf], site.value)
    dtype = site.value.dtype if leaf is None else leaves[leaf].dtype
    missing = torch.isnan(site.value)
    return Place(axis, leaf, dtype, missing if bool(missing.any()) else None, part)


def _is_in(leaf: Any, value: Tensor) -> bool:
    """Whether a value is a view of a leaf."""
    if not isinstance(leaf, Tensor) or not leaf.is_contiguous() or leaf.dtype != value.dtype:
        return False
    if leaf.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
        return False
    if not leaf.numel() or not value.numel():
        return False
    places = _part(leaf, value)
    return bool(places.min() >= 0) and bool(places.max() < leaf.numel())


def _part(leaf: Tensor, value: Tensor) -> Tensor:
    """The places of a view in a leaf that lies in one piece, flat."""
    places = torch.full(value.shape, int(value.storage_offset() - leaf.storage_offset()))
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        along = torch.arange(size) * stride
        places = places + along.view(-1, *[1] * (value.dim() - dim - 1))
    return places


def _is_same(leaf: Any, value: Tensor) -> bool:
    if not isinstance(leaf, Tensor) or leaf.shape != value.shape:
        return False
    return torch.allclose(leaf.to(value), value, rtol=0, atol=0, equal_nan=True)


def _entry(tables: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    return {name: table[number] for name, table in tables.items()}
