"""Draws data sets from a model: observations at given latents, in place of those of the user's
data.
"""

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

from pyro_scale.calibration.observed_sites import ObservedSite
from pyro_scale.calibration.stack import take_one
from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments, DataLike
from pyro_scale.core.validation import evenly
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.errors import ArgumentError, DataError, ModelError, SiteError
from pyro_scale.marginal.grouped import Grouped
from pyro_scale.marginal.local_sites import LocalSites
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.observation_checks import inside_support
from pyro_scale.model.sites import Site
from pyro_scale.posterior.chunked_vmap import vmap_in_chunks
from pyro_scale.posterior.row_batches import data_axes
from pyro_scale.rng.seeds import Purpose, derived_seed

#: Number of data sets that are drawn with one seed, always: so a data set does not depend on how
#: many are drawn.
AT_ONCE = 20
#: Rows or groups whose latents are ranked, if these are summed out.
_MOST_RANKED = 5


@dataclass(frozen=True)
class Generator:
    """A model from which data sets are drawn, and data like those that the model draws.

    Attributes:
        log_posterior: log posterior of the model, after its checks on the data.
        arguments: the data, as the model's arguments.
        places: dict from each observed site to the converter of its observations, which knows in
            which of the model's arguments they are.
        covariates: dict from a name to the index, among the flattened arguments, of a tensor whose
            rows are drawn anew for each data set, with replacement; empty if all data sets share
            the covariates.
        grouped: the rows by group, as the user passed them; None for rows without groups.
        summed: the local latents, if fits sum them out; None otherwise.
    """

    log_posterior: LogPosterior
    arguments: Arguments
    places: Mapping[str, ObservedSite]
    covariates: Mapping[str, int] = field(default_factory=dict)
    grouped: Grouped | None = None
    summed: LocalSites | None = None

    @classmethod
    def from_model(cls, log_posterior: LogPosterior, arguments: Arguments) -> Generator:
        """The generator for a model; checks that data sets can be drawn from the model.

        Args:
            log_posterior: log posterior of the model.
            arguments: the data, as the model's arguments.

        Raises:
            SiteError: a site cannot be drawn.
            ModelError: the model has params, which have no prior, or takes subsamples by itself.
            DataError: there are no observations.
        """
        log_posterior.prepare(arguments)
        _check_model(log_posterior)
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
            name: ObservedSite.from_site(site, axes.get(name) if has_rows else None, leaves)
            for name, site in observed.items()
        }
        generator = cls(log_posterior, arguments, places)
        generator._check_order_of_draws()
        return generator

    def with_resampled_covariates(self) -> Generator:
        """A copy that draws the rows of covariates anew for each data set, with replacement.

        Raises:
            ArgumentError: observations and covariates are in one tensor.
        """
        if any(place.part is not None for place in self.places.values()):
            raise ArgumentError(
                "resample=True: observations are a part of a tensor that holds covariates too: "
                "pass them as tensors of their own"
            )
        observed = {place.leaf for place in self.places.values()}
        leaves = pytree.tree_leaves(self.arguments)
        drawn = [i for i, leaf in enumerate(leaves) if rows.is_rows(leaf) and i not in observed]
        return dataclasses.replace(self, covariates={f"argument {i}": i for i in drawn})

    @property
    def num_rows(self) -> int:
        """Number of rows of the data; 1 if the model's arguments contain no rows."""
        return rows.count(self.arguments) or 1

    @property
    def latents(self) -> tuple[str, ...]:
        """Names of the latent sites."""
        return self.log_posterior.latents

    def stacked_model(self) -> Callable[..., Any]:
        """The model as a function of two arguments: the arguments that all data sets share
        (`shared_arguments`), and a dict of one data set's observations and covariates by name,
        `[rows, ...]`.
        """
        run, places, covariates = self.log_posterior.model, self.places, self.covariates

        def simulated(shared: Arguments, tables: Mapping[str, Tensor]) -> Any:
            values = {name: place.to_value(tables[name]) for name, place in places.items()}
            leaves, structure = pytree.tree_flatten(shared)
            for name, place in places.items():
                if place.leaf is not None and place.part is None:
                    leaves[place.leaf] = place.to_leaf(values[name])
            for name, leaf in covariates.items():
                leaves[leaf] = tables[name]
            with poutine.condition(data=values):
                return rows.call(run, pytree.tree_unflatten(leaves, structure))

        return simulated

    def shared_arguments(self) -> Arguments:
        """The model's arguments that are the same for all data sets, in the structure of all
        arguments, with None in place of tensors that differ (observations, resampled covariates).
        """
        varying = {place.leaf for place in self.places.values() if place.part is None}
        varying |= set(self.covariates.values())
        leaves, structure = pytree.tree_flatten(self.arguments)
        kept = [None if i in varying else leaf for i, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(kept, structure)

    def fill_arguments(self, tables: Mapping[str, Tensor]) -> Arguments:
        """The model's arguments, as a user passes them, for one data set; `tables` are its
        observations and covariates by name, `[rows, ...]`."""
        leaves, structure = pytree.tree_flatten(self.arguments)
        for name, place in self.places.items():
            if place.leaf is not None:
                leaves[place.leaf] = place.fill_leaf(leaves[place.leaf], tables[name])
        for name, leaf in self.covariates.items():
            leaves[leaf] = tables[name]
        return pytree.tree_unflatten(leaves, structure)

    def data_set(self, tables: Mapping[str, Tensor]) -> DataLike | Grouped:
        """One data set as a user passes it to a method; `tables` as for `fill_arguments`."""
        arguments = self.fill_arguments(tables)
        return arguments if self.grouped is None else self.grouped.with_rows(arguments)

    def select_ranked(self, latents: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The latents that are ranked: all, but of one that fits sum out those of a few rows or
        groups, spread over the data, each by a name like `z[12]`.

        Args:
            latents: constrained values of one draw, by site.
        """
        selected = dict(latents)
        for latent in () if self.summed is None else self.summed.latents:
            value = selected.pop(latent.name)
            for i in evenly(value.shape[latent.axis], _MOST_RANKED).tolist():
                selected[f"{latent.name}[{i}]"] = value.select(latent.axis, i)
        return selected

    @property
    def varying(self) -> list[int]:
        """Indices, among the flattened arguments, of tensors that differ between data sets."""
        leaves = {place.leaf for place in self.places.values()} | set(self.covariates.values())
        return sorted(leaf for leaf in leaves if leaf is not None)

    def prior_draws(self, count: int, seed: int) -> dict[str, Tensor]:
        """Draws of the unconstrained latents from their priors, by site, `[count, ...]`."""
        numbers = range(-(-count // AT_ONCE))
        seeds = [derived_seed(seed, 0, Purpose.SIMULATION, number) for number in numbers]
        parts = [self.log_posterior.prior_draws(self.arguments, AT_ONCE, s) for s in seeds]
        return {n: torch.cat([part[n] for part in parts])[:count] for n in self.latents}

    def draw(
        self, params: Mapping[str, Tensor], seed: int, start: int = 0, stop: int | None = None
    ) -> dict[str, Tensor]:
        """Draws data sets start, ..., stop - 1, each at its own latents: observations by site, and
        covariates by name, `[data sets, rows, ...]`.

        Args:
            params: unconstrained latents of all data sets, by site, `[count, ...]`.
            seed: seed from which the seeds of data sets follow.
            start: number of the first data set.
            stop: one more than the number of the last; None for all of `params`.
        """
        count, parts = len(next(iter(params.values()))), []
        stop, first = count if stop is None else stop, start // AT_ONCE
        for number in range(first, -(-stop // AT_ONCE)):
            places = torch.arange(number * AT_ONCE, (number + 1) * AT_ONCE).clamp(max=count - 1)
            block_seed = derived_seed(seed, 1, Purpose.SIMULATION, number)
            block = {name: value[places] for name, value in params.items()}
            parts.append(self._draw_block(block, block_seed))
        kept = slice(start - first * AT_ONCE, stop - first * AT_ONCE)
        return {name: torch.cat([part[name] for part in parts])[kept] for name in parts[0]}

    def observations(self) -> dict[str, Tensor]:
        """Observations of the generator's own data, by site, `[rows, ...]`."""
        sites = self.log_posterior.model_info.sites
        return {n: p.to_table(sites[n].value, self.num_rows) for n, p in self.places.items()}

    def with_rows_twice(self) -> Generator:
        """A copy whose data have every row twice, one copy of the rows after the other: as many
        rows as the data and a new data set together, for posterior SBC."""
        twice = rows.map_rows(lambda leaf: torch.cat([leaf, leaf]), self.arguments)
        leaves = pytree.tree_leaves(self.arguments)
        places = {
            name: place.with_rows_twice(None if place.leaf is None else leaves[place.leaf])
            for name, place in self.places.items()
        }
        return dataclasses.replace(self, arguments=twice, places=places)

    def check_support(
        self, params: Mapping[str, Tensor], tables: Mapping[str, Tensor], start: int
    ) -> None:
        """Raises an error if data sets contain observations that the model cannot draw.

        Args:
            params: unconstrained latents, by site, `[data sets, ...]`.
            tables: observations, by site, `[data sets, rows, ...]`.
            start: number of the first data set, for the message.

        Raises:
            SiteError: observations are outside of a site's support.
        """
        numbers = torch.arange(len(next(iter(tables.values()))))

        def is_inside(number: Tensor) -> dict[str, Tensor]:
            table = {name: take_one(stacked, number) for name, stacked in tables.items()}
            latents = {name: take_one(value, number) for name, value in params.items()}
            sites = self.log_posterior.run(latents, self.fill_arguments(table)).sites
            return {
                name: inside_support(
                    dataclasses.replace(sites[name], value=place.to_value(table[name]))
                ).all()
                for name, place in self.places.items()
            }

        parts = list(vmap_in_chunks(is_inside, [numbers]))
        for name in self.places:
            outside = torch.nonzero(~torch.cat([part[name] for part in parts]))[:, 0]
            if len(outside):
                raise SiteError(
                    f"site '{name}': the observations of simulation {start + int(outside[0])} are "
                    "outside of its support: simulator= draws what the fitted model cannot"
                )

    def _draw_block(self, params: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
        """Draws one data set at each of the latents `[data sets, ...]`, all with one seed:
        observations by site, and covariates by name, `[data sets, rows, ...]`."""
        count, num_rows = len(next(iter(params.values()))), self.num_rows
        leaves, structure = pytree.tree_flatten(self.arguments)
        with own_generator(seed), torch.no_grad(), without_vmap_warnings():
            covariates = {}
            if self.covariates:
                chosen = torch.randint(num_rows, (count, num_rows))
                covariates = {name: leaves[i][chosen] for name, i in self.covariates.items()}

            def draw_one(
                latents: dict[str, Tensor], covariates: dict[str, Tensor]
            ) -> dict[str, Tensor]:
                mixed = list(leaves)
                for name, i in self.covariates.items():
                    mixed[i] = covariates[name]
                arguments = pytree.tree_unflatten(mixed, structure)
                sites = self.log_posterior.simulate(latents, arguments).sites
                return {name: sites[name].value for name in self.places}

            try:
                values = torch.vmap(draw_one, randomness="different")(dict(params), covariates)
            # vmap does not support the model or a sampler
            except (RuntimeError, NotImplementedError):
                one_by_one = [
                    draw_one(
                        {name: value[i] for name, value in params.items()},
                        {name: value[i] for name, value in covariates.items()},
                    )
                    for i in range(count)
                ]
                values = {n: torch.stack([one[n] for one in one_by_one]) for n in self.places}
        observed = {
            name: torch.stack([place.to_table(value, num_rows) for value in values[name]])
            for name, place in self.places.items()
        }
        return observed | covariates

    def _check_order_of_draws(self) -> None:
        """Raises an error if observations depend on other observations, as in an autoregression:
        observed sites are drawn one by one while the others have the values of the user's data,
        which would not be a draw from the model then.

        Raises:
            SiteError: the distribution of a site depends on observations.
        """
        params = self.prior_draws(AT_ONCE, 0)
        tables, others = self.draw(params, 0), self.draw(params, 1)
        arguments = self.fill_arguments({name: table[0] for name, table in others.items()})
        again = dataclasses.replace(self, arguments=arguments).draw(params, 0)
        for name, table in tables.items():
            if not torch.equal(table.nan_to_num(), again[name].nan_to_num()):
                raise SiteError(
                    f"site '{name}': its distribution depends on observations, so no data set "
                    "can be drawn from the model as it is called: write it for observations that "
                    "are None, one step after another, and pass that as simulator="
                )


def _check_model(log_posterior: LogPosterior) -> None:
    """Raises an error if data sets cannot be drawn from a model.

    Raises:
        ModelError: the model has params, which have no prior, or takes subsamples by itself.
        SiteError: a site cannot be drawn.
    """
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
    """Whether a site's distribution can be sampled, and, if the site is latent, gives a finite
    draw."""
    if site.kind == "observed" and isinstance(site.fn, Delta):
        return True
    try:
        with own_generator(0), torch.no_grad():
            drawn = site.fn.sample()
    except NotImplementedError:
        return False
    return bool(torch.isfinite(drawn).all()) or site.kind == "observed"
