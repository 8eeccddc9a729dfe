"""The posterior of a sharded network: every process has its own part of the draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Never

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments, DataLike
from pyro_scale.data.loaders import check_tensors, to_device
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.kernels import IVON
from pyro_scale.model.transforms import bijection
from pyro_scale.posterior.predictive import spread_evenly
from pyro_scale.posterior.row_batches import data_axes
from pyro_scale.results.posterior import Posterior
from pyro_scale.rng.seeds import Purpose, choose_seed, derived_seed
from pyro_scale.run.problem import Problem
from pyro_scale.run.sharded.chain import noise_of

#: The error for results that need whole weights.
_NO_WHOLE_DRAWS = (
    "the network is sharded, so no process has whole draws of it: there are get_samples(), whose "
    "weights are DTensors, and predict()"
)


class ShardedPosterior(Posterior):
    """The posterior of a sharded network, of which every process holds its part; every method has
    to be called in all processes.

    Args:
        problem: the analyzed model, with this process's part of the params.
        draws: this process's part of the chain's draws; for a fit, of its last state alone.
    """

    def __init__(self, problem: Problem, draws: Draws):
        self.problem = problem
        has_draws = draws.positions.shape[2] > 0
        state = draws.state
        self.positions = draws.positions[0] if has_draws else state.position.detach().cpu()
        self.log_joint = draws.log_joint[0]
        self._sds: Tensor | None = None  # of a fit: its position is a Gaussian's mean
        kernel = problem.engine.kernel
        if isinstance(kernel, IVON):
            values = kernel.at(max(0, draws.num_steps - 1), problem.log_posterior.num_data)
            curvature = state.curvature[0, : problem.engine.num_latents]
            self._sds = torch.sqrt(values["temperature"].to(curvature) / curvature).cpu()

    @property
    def layout(self) -> Layout:
        """Order and shapes of the sites in this process's part of an unconstrained draw, `[D]`; a
        sharded weight has the shape of this process's part."""
        return self.problem.engine.layout

    @property
    def draws(self) -> Never:
        """Always raises an error: no process has whole draws of a sharded network.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(_NO_WHOLE_DRAWS)

    @property
    def attrs(self) -> dict[str, Any]:
        """Facts of the run by name: an empty dict, since none are kept for sharded networks."""
        return {}

    @property
    def size(self) -> str:
        """The text "on a sharded network", for `repr`, in place of N and the number of draws that
        other posteriors show."""
        return "on a sharded network"

    @property
    def trace(self) -> Tensor:
        """The objective's estimate at every step, in nats, a total over all rows: `[1, steps]`."""
        return self.log_joint[None]

    def get_samples(
        self,
        num_samples: int | None = None,
        group_by_chain: bool = False,
        local: bool = False,
    ) -> dict[str, Any]:
        """Constrained draws of the latent sites, by site: of sharded weights as DTensors `[draws,
        *shape]`, of other sites as tensors.

        Args:
            num_samples: number of draws, evenly thinned; all by default. Required for a fit, whose
                draws are new ones.
            group_by_chain: whether to return `[1, draws, ...]`, which only models without sharded
                weights can.
            local: False; no latents are summed out of sharded networks.

        Raises:
            ArgumentError: more draws are requested than there are; or no number of draws, for a fit
                with a Gaussian.
        """
        positions = torch.stack(list(self._positions(num_samples)))
        params = self.layout.unflatten(positions)
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
        calibrate: DataLike = None,
        linearized: Any = False,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Posterior predictive draws of observed sites, `[draws, ...]` by site, for all rows, on
        every process; each process computes a part of the rows.

        Args:
            *args: arguments of the model, with the rows to predict.
            num_samples: number of posterior draws to use; all by default.
            return_sites: names of sites with a value for each row; all of them by default.
            batch_size: not available for sharded networks; None.
            reduce: not available for sharded networks; None.
            interval: not available for sharded networks; None.
            calibrate: not available for sharded networks; None.
            linearized: not available for sharded networks; False.
            **kwargs: keyword arguments of the model.

        Raises:
            DataError: the arguments have no rows.
            ArgumentError: a site does not have a value for each row; or an option is not available
                for sharded networks.
        """
        if linearized:
            raise ArgumentError(_NO_WHOLE_DRAWS)
        others = {"batch_size": batch_size, "reduce": reduce, "interval": interval}
        for name, value in {**others, "calibrate": calibrate}.items():
            if value is not None:
                raise ArgumentError(
                    f"{name}={value!r}: predict has none for a sharded network: leave it out, and "
                    "pass fewer rows at a time"
                )
        arguments = self.problem.log_posterior.bind(args, kwargs)
        check_tensors(arguments)
        if not rows.count(arguments):
            raise DataError("predict: the arguments have no rows")
        axes = self._row_axes(return_sites)
        predicted = self._predict_part(arguments, axes, num_samples)

        def join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            return {
                name: torch.cat([part[name] for part in parts], 1).movedim(1, axis)
                for name, axis in axes.items()
            }

        return self.problem.reduce(join, predicted, "predictions")

    def _row_axes(self, return_sites: Sequence[str] | None) -> dict[str, int]:
        """The dimension of rows of each site that is predicted, by name.

        Args:
            return_sites: names of the sites; None for all sites with a value for each row.

        Raises:
            ArgumentError: a site does not have a value for each row.
        """
        info = self.problem.log_posterior.model_info
        axes = {**info.row_axes, **data_axes(info)}
        names = axes if return_sites is None else return_sites
        if any(name not in axes for name in names):
            raise ArgumentError(
                f"return_sites: for a sharded network, pass sites with a value for each row: "
                f"{sorted(axes)}"
            )
        return {name: axes[name] for name in names}

    def _predict_part(
        self, arguments: Arguments, axes: Mapping[str, int], num_samples: int | None
    ) -> dict[str, Tensor]:
        """Posterior predictive draws for this process's rows, by site, `[draws, rows, ...]`.

        Args:
            arguments: the model's arguments with all rows.
            axes: dict from a site to predict to its dimension of rows.
            num_samples: number of posterior draws to use; None for all.
        """
        problem, device = self.problem, self.problem.positions.device
        part = problem.take_part(to_device(arguments, device))
        has_none = not rows.count(part)
        if has_none:  # the process has to call the network with the others
            part = rows.take(arguments, slice(0, 1))
        seed = problem.broadcast(choose_seed(None), "the choice of a seed")
        kept: dict[str, list[Tensor]] = {name: [] for name in axes}
        with own_generator(derived_seed(seed, problem.process, Purpose.INIT)), torch.no_grad():
            for position in self._positions(num_samples):
                params = self.layout.unflatten(position.to(device))
                drawn = problem.log_posterior.simulate(params, part).sites
                for name, axis in axes.items():
                    by_row = drawn[name].value.movedim(axis, 0)
                    kept[name].append(by_row[: 0 if has_none else None].cpu())
        return {name: torch.stack(values) for name, values in kept.items()}

    def _positions(self, num_samples: int | None) -> Iterator[Tensor]:
        """Yields this process's part of draws in unconstrained space, one vector of params a draw:
        kept draws of a chain, evenly thinned, or new draws of a Gaussian.

        Args:
            num_samples: number of draws; None for all kept ones.

        Raises:
            ArgumentError: None for a Gaussian, or more draws than there are.
        """
        if self._sds is None:
            total = len(self.positions)
            chosen = spread_evenly(total, total if num_samples is None else num_samples)
            yield from self.positions[chosen]
            return
        if num_samples is None:
            raise ArgumentError(
                "num_samples: pass the number of draws; each takes as much memory as the weights "
                "of the sharded network"
            )
        noise = noise_of(self.problem, Purpose.APPROXIMATION, 1)
        for number in range(num_samples):
            latents = self._sds * noise.at(number)[0].to(self._sds)
            yield self.positions[0] + torch.nn.functional.pad(
                latents, (0, self.positions.shape[1] - len(latents))
            )

    def __getattr__(self, name: str) -> Never:
        """Never returns: an unknown attribute is a result that needs whole draws, which no process
        has.

        Raises:
            ArgumentError: for public names.
            AttributeError: for names that begin with an underscore.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        raise ArgumentError(_NO_WHOLE_DRAWS)
