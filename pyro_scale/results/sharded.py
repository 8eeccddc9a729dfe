"""The posterior of a sharded network: every process has its own part of the draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Never

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.data.loaders import check_tensors, to_device
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.model.transforms import bijection
from pyro_scale.posterior.predictive import spread_evenly
from pyro_scale.posterior.row_batches import data_axes
from pyro_scale.results.posterior import Posterior
from pyro_scale.rng.seeds import Purpose, choose_seed, derived_seed
from pyro_scale.run.sharded.chain import ShardedProblem, part_of

#: What is said where something would need whole weights.
_WHOLE_NOWHERE = (
    "the network is sharded, so no process has whole draws of it: there are get_samples(), whose "
    "weights are DTensors, and predict()"
)


class ShardedPosterior(Posterior):
    """What can be asked after a run of a sharded network, on all ranks together.

    Args:
        problem: what the chain started from.
        positions: this rank's part of the draws, unconstrained, `[draws, D]`.
        log_joint: of the steps that led to them, `[draws]`; of a fit, of all steps.
        spread: the Gaussian's sds, this rank's part, [D]; its mean is the one position.  None where
            the positions are the draws.
    """

    def __init__(
        self,
        problem: ShardedProblem,
        positions: Tensor,
        log_joint: Tensor,
        spread: Tensor | None = None,
    ):
        self.problem, self.positions = problem, positions
        self.log_joint, self.spread = log_joint, spread

    @property
    def draws(self) -> Never:
        """Refuses: no process has whole draws.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(_WHOLE_NOWHERE)

    @property
    def attrs(self) -> dict[str, Any]:
        """Facts of the run: none are kept."""
        return {}

    @property
    def size(self) -> str:
        """What there is, in words."""
        return "on a sharded network"

    @property
    def trace(self) -> Tensor:
        """The objective's estimate at every step, in nats, a total: `[1, steps]`."""
        return self.log_joint[None]

    def get_samples(
        self, num_samples: int | None = None, group_by_chain: bool = False
    ) -> dict[str, Any]:
        """Draws of the latent sites: of weights as DTensors `[draws, *shape]`, of other sites as
        tensors.

        Raises:
            ArgumentError: more draws than there are; of a Gaussian, no number of them.
        """
        positions = torch.stack(list(self._at(num_samples)))
        params = self.problem.layout.unflatten(positions)
        sites = self.problem.log_posterior.model_info.sites
        values: dict[str, Any] = {}
        for name in self.problem.log_posterior.latents:
            shard = self.problem.shards.get(name)
            if shard is None:
                value = bijection(sites[name].fn.support)(params[name])
                values[name] = value[None] if group_by_chain else value
            elif group_by_chain:
                raise ArgumentError("group_by_chain: a sharded network has one chain: leave it out")
            else:
                values[name] = shard.whole(params[name])
        return values

    def predict(
        self,
        /,
        *args: Any,
        num_samples: int | None = None,
        return_sites: Sequence[str] | None = None,
        batch_size: int | None = None,
        reduce: Any = None,
        interval: float | None = None,
        calibrate: Any = None,
        linearized: Any = False,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Draws of observed sites, `[draws, ...]`, of all rows on every rank, each of which has
        computed a part of the rows.

        Raises:
            DataError: no rows.
            ArgumentError: a site that has no value a row; an option that other models have alone.
        """
        if linearized:
            raise ArgumentError(_WHOLE_NOWHERE)
        others = {"batch_size": batch_size, "reduce": reduce, "interval": interval}
        for name, value in {**others, "calibrate": calibrate}.items():
            if value is not None:
                raise ArgumentError(
                    f"{name}={value!r}: predict has none of a sharded network: leave it out, and "
                    "pass some rows at a time"
                )
        return self._predict(
            self.problem.log_posterior.bind(args, kwargs), num_samples, return_sites
        )

    def _predict(
        self, arguments: Arguments, num_samples: int | None, return_sites: Sequence[str] | None
    ) -> dict[str, Tensor]:
        """Draws of observed sites at rows."""
        check_tensors(arguments)
        holders, log_posterior = self.problem.holders, self.problem.log_posterior
        count = rows.count(arguments)
        if not count:
            raise DataError("predict: the arguments have no rows")
        info = log_posterior.model_info
        axes = {**info.row_axes, **data_axes(info)}
        names = list(axes) if return_sites is None else list(return_sites)
        for name in names:
            if name not in axes:
                raise ArgumentError(
                    f"return_sites: of a sharded network, pass sites with a value a row: "
                    f"{sorted(axes)}"
                )
        own = part_of(holders, to_device(arguments, holders.device))
        has_none = not rows.count(own)
        if has_none:  # it has to call the network with the others
            own = rows.take(arguments, slice(0, 1))
        seed = derived_seed(holders.of_first(choose_seed(None)), holders.rows.rank, Purpose.INIT)
        kept: dict[str, list[Tensor]] = {name: [] for name in names}
        with own_generator(seed), torch.no_grad():
            for position in self._at(num_samples):
                params = self.problem.layout.unflatten(position.to(self.problem.position.device))
                drawn = log_posterior.simulate(params, own).sites
                for name in names:
                    by_row = drawn[name].value.movedim(axes[name], 0)
                    kept[name].append(by_row[: 0 if has_none else None].cpu())
        predicted = {name: torch.stack(values) for name, values in kept.items()}
        parts = holders.of_all(predicted, "predictions")
        return {
            name: torch.cat([part[name] for part in parts], 1).movedim(1, axes[name])
            for name in names
        }

    def _at(self, num_samples: int | None) -> Iterator[Tensor]:
        """This rank's part of so many draws, one at a time."""
        if self.spread is None:
            total = len(self.positions)
            chosen = spread_evenly(total, total if num_samples is None else num_samples)
            yield from self.positions[chosen]
            return
        if num_samples is None:
            raise ArgumentError(
                "num_samples: say how many draws of a sharded network are wanted; each takes as "
                "much memory as its weights"
            )
        noise = self.problem.noise(Purpose.APPROXIMATION, 1)
        for number in range(num_samples):
            latents = self.spread * noise.at(number)[0].to(self.spread)
            yield self.positions[0] + torch.nn.functional.pad(
                latents, (0, self.positions.shape[1] - len(latents))
            )

    def __getattr__(self, name: str) -> Never:
        """Refuses what needs whole draws."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise ArgumentError(_WHOLE_NOWHERE)
