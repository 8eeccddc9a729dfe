"""Sources of the true parameters and data sets of simulations: the prior, a posterior, or another
model.

Both classes have the attribute `fitted`, the model that is fitted, and two methods. `params(count,
seed)` draws unconstrained latents of the fitted model, by site, `[count, ...]`. `observed(params,
start, stop, seed)` draws the observations of data sets start, ..., stop - 1, by site, `[data sets,
rows, ...]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pyro_scale.calibration.simulations import Generator
from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.rng.seeds import Purpose, generator


@dataclass(frozen=True)
class FromPrior:
    """Draws latents from the prior, and data from the model (Talts et al. 2018).

    Attributes:
        fitted: model that is fitted, with data like those that it draws.
        drawn_by: model that latents and data are drawn from: the same or another one.
    """

    fitted: Generator
    drawn_by: Generator

    @classmethod
    def from_models(cls, fitted: Generator, drawn_by: Generator) -> FromPrior:
        """The source of simulations that fits one model to data of the same or another model;
        checks that both have the same sites.

        Args:
            fitted: model to fit, with data like those that it draws.
            drawn_by: model that latents and data are drawn from.

        Raises:
            ArgumentError: a site is in only one of the models, or has different shapes or supports.
        """
        for kind, names, other_names in (
            ("latent", fitted.latents, drawn_by.latents),
            ("observed", tuple(fitted.places), tuple(drawn_by.places)),
        ):
            for name in set(names) ^ set(other_names):
                raise ArgumentError(
                    f"simulator: {kind} site '{name}' is in only one of the two models: write both "
                    "with the same sites"
                )
        sites, other_sites = (m.log_posterior.model_info.sites for m in (fitted, drawn_by))
        for name in fitted.latents:
            one, other = sites[name], other_sites[name]
            if one.value.shape != other.value.shape or str(one.fn.support) != str(other.fn.support):
                raise ArgumentError(
                    f"simulator: latent site '{name}' has a different shape or support than in the "
                    "model that is fitted"
                )
        return cls(fitted, drawn_by)

    def params(self, count: int, seed: int) -> dict[str, Tensor]:
        draws = self.drawn_by.prior_draws(count, seed)
        return {name: draws[name] for name in self.fitted.latents}

    def observed(
        self, params: Mapping[str, Tensor], start: int, stop: int, seed: int
    ) -> dict[str, Tensor]:
        tables = self.drawn_by.draw(params, seed, start, stop)
        if self.drawn_by is not self.fitted:
            latents = {name: value[start:stop] for name, value in params.items()}
            self.fitted.check_support(latents, tables, start)
        return tables


@dataclass(frozen=True)
class FromPosterior:
    """Draws latents from the posterior of the data, and new data from these latents.  What is
    tested is the posterior of the data and the new data together (Saeilynoja et al. 2025).

    Attributes:
        fitted: model on data that have every row twice.
        drawn_by: model on the data.
        data: observations of the data, by site, `[rows, ...]`.
        draws: unconstrained posterior draws, by site, `[draws, ...]`.
    """

    fitted: Generator
    drawn_by: Generator
    data: Mapping[str, Tensor]
    draws: Mapping[str, Tensor]

    @classmethod
    def from_draws(cls, model: Generator, draws: Mapping[str, Tensor]) -> FromPosterior:
        """The source of simulations for a model and draws of its posterior; checks that rows can be
        added to the model's data.

        Args:
            model: model on the data.
            draws: unconstrained posterior draws, by site, `[draws, ...]`.

        Raises:
            ModelError: a latent has a value for each row, or the data have one joint density.
        """
        info = model.log_posterior.model_info
        for name, rule in info.scaling.rules.items():
            if rule.role == "rows" and name in model.latents:
                raise ModelError(
                    f"sbc(method='posterior'): latent '{name}' has a value for each row, and new "
                    "rows would need new ones: use method='prior'"
                )
        if info.whole_only:
            raise ModelError(
                "sbc(method='posterior'): the data are one joint density, to which no rows can be "
                "added: use method='prior'"
            )
        return cls(model.with_rows_twice(), model, model.observations(), draws)

    def params(self, count: int, seed: int) -> dict[str, Tensor]:
        num_draws = len(next(iter(self.draws.values())))
        source = generator(seed, 4, Purpose.SIMULATION)
        chosen = torch.randperm(num_draws, generator=source)[:count]
        if count > num_draws:  # the first ones do not depend on the count
            more = torch.randint(num_draws, (count - num_draws,), generator=source)
            chosen = torch.cat([chosen, more])
        return {name: self.draws[name][chosen] for name in self.fitted.latents}

    def observed(
        self, params: Mapping[str, Tensor], start: int, stop: int, seed: int
    ) -> dict[str, Tensor]:
        tables = self.drawn_by.draw(params, seed, start, stop)
        return {
            name: torch.cat([self.data[name].to(new).expand_as(new), new], 1)
            for name, new in tables.items()
        }


Truth: TypeAlias = FromPrior | FromPosterior
