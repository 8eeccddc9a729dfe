"""Where the data sets of simulations come from: the prior, a posterior, or another model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyro_scale.calibration.simulations import Generator
from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.rng.seeds import Purpose, generator


class Truth(Protocol):
    """True params, and observations drawn from them.

    Attributes:
        fitted: the model that is fitted, on rows like those of each data set.
    """

    @property
    def fitted(self) -> Generator: ...

    def params(self, count: int, seed: int) -> dict[str, Tensor]:
        """Unconstrained latents of the fitted model, `[count, ...]`."""
        ...

    def observed(
        self, params: Mapping[str, Tensor], start: int, stop: int, seed: int
    ) -> dict[str, Tensor]:
        """Observations of data sets start ... stop - 1, by site, `[data sets, rows, ...]`."""
        ...


@dataclass(frozen=True)
class FromPrior:
    """Latents from the prior, data from the model (Talts et al. 2018).

    Attributes:
        fitted: the model that is fitted.
        drawn_by: the model that data are drawn from, the same one or another.
    """

    fitted: Generator
    drawn_by: Generator

    @classmethod
    def of(cls, fitted: Generator, drawn_by: Generator) -> FromPrior:
        """It checks that both have the same sites.

        Raises:
            ArgumentError: a site that only one of them has.
        """
        for what, own, others in (
            ("latent", fitted.latents, drawn_by.latents),
            ("observed", tuple(fitted.places), tuple(drawn_by.places)),
        ):
            for name in set(own) ^ set(others):
                raise ArgumentError(
                    f"simulator: {what} site '{name}' is in only one of the two models: write both "
                    "with the same sites"
                )
        known, others_known = (m.log_posterior.model_info.sites for m in (fitted, drawn_by))
        for name in fitted.latents:
            one, other = known[name], others_known[name]
            if one.value.shape != other.value.shape or str(one.fn.support) != str(other.fn.support):
                raise ArgumentError(
                    f"simulator: latent site '{name}' has a different shape or support than in the "
                    "model that is fitted"
                )
        return cls(fitted, drawn_by)

    def params(self, count: int, seed: int) -> dict[str, Tensor]:
        drawn = self.drawn_by.prior_draws(count, seed)
        return {name: drawn[name] for name in self.fitted.latents}

    def observed(
        self, params: Mapping[str, Tensor], start: int, stop: int, seed: int
    ) -> dict[str, Tensor]:
        drawn = self.drawn_by.draw(params, seed, start, stop)
        if self.drawn_by is not self.fitted:
            own = {name: value[start:stop] for name, value in params.items()}
            self.fitted.check_support(own, drawn, start)
        return drawn


@dataclass(frozen=True)
class FromPosterior:
    """Latents from the posterior of the data, and more data from these: the posterior of both
    together is what is tested (Saeilynoja et al. 2025).

    Attributes:
        fitted: the model, on the data's rows twice.
        drawn_by: the model on the data.
        data: the observations, by site, `[rows, ...]`.
        draws: of the posterior, unconstrained, `[draws, ...]`.
    """

    fitted: Generator
    drawn_by: Generator
    data: Mapping[str, Tensor]
    draws: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: Generator, draws: Mapping[str, Tensor]) -> FromPosterior:
        """It doubles the rows.

        Raises:
            ModelError: latents belong to rows, or the data are one joint density.
        """
        info = model.log_posterior.model_info
        local = [n for n, rule in info.scaling.rules.items() if rule.role == "rows"]
        for name in local:
            if name in model.latents:
                raise ModelError(
                    f"sbc(method='posterior'): latent '{name}' has a value for each row, and new "
                    "rows would need new ones: use method='prior'"
                )
        if info.whole_only:
            raise ModelError(
                "sbc(method='posterior'): the data are one joint density, to which no rows can be "
                "added: use method='prior'"
            )
        return cls(model.doubled(), model, model.observations(), draws)

    def params(self, count: int, seed: int) -> dict[str, Tensor]:
        there = len(next(iter(self.draws.values())))
        source = generator(seed, 4, Purpose.SIMULATION)
        chosen = torch.randperm(there, generator=source)[:count]
        if count > there:  # the first ones are the same, however many there are
            more = torch.randint(there, (count - there,), generator=source)
            chosen = torch.cat([chosen, more])
        return {name: self.draws[name][chosen] for name in self.fitted.latents}

    def observed(
        self, params: Mapping[str, Tensor], start: int, stop: int, seed: int
    ) -> dict[str, Tensor]:
        drawn = self.drawn_by.draw(params, seed, start, stop)
        return {
            name: torch.cat([self.data[name].to(new).expand_as(new), new], 1)
            for name, new in drawn.items()
        }
