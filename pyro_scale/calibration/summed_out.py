"""Fits to many data sets with local latents summed out.

A data set then consists of units with one more column, the modes of their latents at the data set's
own anchor, and all data sets are a stack of the integrated model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.calibration.chains import Sampled
from pyro_scale.calibration.fitters import Fitter, in_one_line
from pyro_scale.calibration.simulations import AT_ONCE, Generator
from pyro_scale.calibration.stack import Stack
from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.data.open import open_data
from pyro_scale.data.sources import TensorData
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import PlateError, PyroScaleError, SiteError
from pyro_scale.kernels import Hyperparameters
from pyro_scale.marginal.anchor import Anchor, find_anchor
from pyro_scale.marginal.grouped_data import open_rows
from pyro_scale.marginal.integrated import Integrated, column_of
from pyro_scale.marginal.local_sites import LocalSites
from pyro_scale.marginal.summed import examine_integrated, start_around
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.transforms import bijection
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.local_latents import latents
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.problem import Problem, prepare
from pyro_scale.tuning.groups import Lengths


@dataclass(frozen=True)
class SummedOut:
    """Fits a method to many data sets with their local latents summed out, and draws these latents
    given each draw of the globals.

    Nodes are placed at each data set's own anchor. Data sets that are fitted together have as many
    nodes as the one that needs most.

    Attributes:
        generator: the user's model with its data.
        local: the local latents.
        batch_size: rows or groups of a step; None for all.
        fitter_of: function from the analyzed integrated model on a data set, and a stack of such
            data sets, to the fitter of the method under test.
    """

    generator: Generator
    local: LocalSites
    batch_size: int | None
    fitter_of: Callable[[Problem, Stack], Fitter]
    has_lengths: bool
    _examined: dict[int, LogPosterior] = field(default_factory=dict)

    most_at_once = AT_ONCE

    def fit(self, stack: Stack, lengths: Lengths | None) -> Sampled:
        """Draws of all latents from the posterior of each data set of the user's model."""
        data_sets, anchors, failed = self._place(stack)
        model = max((anchor.model for anchor in anchors.values()), key=lambda model: model.count)
        leaves = [pytree.tree_leaves(data.arguments) for data in data_sets]
        tables = {str(i): torch.stack([one[i] for one in leaves]) for i in self._varying}
        integrated, fitter = self._prepare(model, data_sets[0], tables, stack)
        layout, seeds = integrated.layout, stack.seeds
        starts = torch.zeros(stack.num_chains, layout.size, dtype=layout.dtype)
        for number, anchor in anchors.items():
            starts[number] = layout.flatten(start_around(anchor, seeds[number], 0))
        sampled = fitter.fit(integrated.with_data(tables, seeds, starts), lengths)
        sampled.positions[list(failed)] = torch.nan
        log_posterior = integrated.log_posterior.of_model(
            model, integrated.num_data, examine_integrated
        )
        log_posterior.prepare(data_sets[0].arguments)
        joint = [
            self._add_latents(
                PosteriorDraws(log_posterior, data, layout, positions[None], {}),
                stack,
                derived_seed(seed, 0, Purpose.SIMULATION, 4),
            )
            for data, positions, seed in zip(data_sets, sampled.positions, seeds, strict=True)
        ]
        return dataclasses.replace(
            sampled,
            positions=torch.stack(joint),
            failed=sampled.failed | failed,
            facts={**sampled.facts, "nodes": model.num_nodes},
        )

    @property
    def _varying(self) -> list[int]:
        """Indices, among the flattened arguments of the integrated model, of tensors that differ
        between data sets: those of the user's model come first, the modes last."""
        return [*self.generator.varying, -1]

    def _place(self, stack: Stack) -> tuple[list[TensorData], dict[int, Anchor], dict[int, str]]:
        """(The data sets in units, with the modes of their latents; their anchors, by number;
        reasons of those that have none, by number)."""
        data_sets, anchors, failed = list[TensorData](), dict[int, Anchor](), dict[int, str]()
        for number, seed in enumerate(stack.seeds):
            _, tables = stack.arguments(torch.tensor(number))
            opened = open_rows(self.generator.data_set(tables), self.batch_size)
            data = cast(TensorData, opened)
            count = rows.count(data.arguments) or 1
            try:
                anchor = find_anchor(self.local, data.arguments, seed, self._examined)
                anchors[number], arguments = anchor, anchor.arguments
            except PyroScaleError as error:
                failed[number] = in_one_line(error)
                if len(failed) == stack.num_chains:  # the call is wrong, not the data
                    raise
                members = self.local.model.members(data.arguments).count
                anywhere = torch.zeros(members, self.local.num_dims)
                arguments = data.arguments, column_of(anywhere, count)
            data_sets.append(dataclasses.replace(data, arguments=arguments, num_data=count))
        return data_sets, anchors, failed

    def _prepare(
        self, model: Integrated, first: TensorData, tables: Mapping[str, Tensor], stack: Stack
    ) -> tuple[Stack, Fitter]:
        """(A stack of the integrated model; the fitter of the method).

        Args:
            model: the integrated model.
            first: the first data set with its modes.
            tables: tensors that differ between data sets, `[data sets, units, ...]`.
            stack: the stack of the user's model.
        """
        varying = self._varying
        leaves, structure = pytree.tree_flatten(first.arguments)
        for i in varying:
            leaves[i] = None

        def stacked(shared: Arguments, own: Mapping[str, Tensor]) -> None:
            leaves, structure = pytree.tree_flatten(shared)
            for i in varying:
                leaves[i] = own[str(i)]
            model(*pytree.tree_unflatten(leaves, structure))

        shared = pytree.tree_unflatten(leaves, structure)
        arguments = shared, {name: table[0] for name, table in tables.items()}
        data = open_data(arguments, first.batch_size)
        log_posterior = LogPosterior(stacked, first.num_data)
        problem = prepare(log_posterior, data, Hyperparameters(), None, 1, stack.seeds[0])
        integrated = dataclasses.replace(
            stack,
            log_posterior=problem.log_posterior,
            layout=problem.engine.layout,
            shared=shared,
            tables=tables,
            batch_size=first.batch_size,
            vectorized=problem.engine.vectorized,
            earlier=Earlier(),
            columns=(),
        )
        return integrated, self.fitter_of(problem, integrated)

    def _add_latents(self, draws: PosteriorDraws, stack: Stack, seed: int) -> Tensor:
        """Draws of all latents of one data set, unconstrained, `[draws, D]`; NaN after its chain
        broke.

        Args:
            draws: draws of the globals, with the integrated model and its data.
            stack: the stack of the user's model.
            seed: seed of the draws of local latents.
        """
        positions = torch.cat(list(draws.blocks()))
        if not bool(positions.isfinite().all()):
            return positions.new_full((len(positions), stack.layout.size), torch.nan)
        params = draws.layout.unflatten(positions)
        drawn = latents(draws, seed)
        sites = stack.log_posterior.model_info.sites
        for latent in self.local.latents:
            value = drawn[latent.name].movedim(1, 1 + latent.axis)
            params[latent.name] = bijection(sites[latent.name].fn.support).inv(value)
        return torch.vmap(stack.layout.flatten)(params)


def check_data_sets(generator: Generator) -> None:
    """Raises if a data set in units would not be the one that was drawn: observations have to be
    among the model's arguments, and every member of the groups' plate has to be a group.

    Args:
        generator: the user's model with its data; nothing is checked if no latents are summed out.

    Raises:
        SiteError: an observation is not among the model's arguments.
        PlateError: the plate of the groups has other members than the groups.
    """
    if generator.summed is None:
        return
    for name, place in generator.places.items():
        if place.leaf is None:
            raise SiteError(
                f"site '{name}': its observations are not among the model's arguments, where each "
                "data set of sbc has its own: pass them as an argument"
            )
    if generator.grouped is None:
        return
    num_groups = generator.grouped.num_groups
    for latent in generator.summed.latents:
        value = generator.log_posterior.model_info.sites[latent.name].value
        if value.shape[latent.axis] != num_groups:
            raise PlateError(
                f"site '{latent.name}': its plate has {value.shape[latent.axis]} members, and the "
                f"data have {num_groups} groups: sbc draws a value for each group, so give the "
                "plate their number"
            )
