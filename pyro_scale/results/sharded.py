"""The posterior of a sharded network: every process has its own part of the draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.posterior.sharded import ShardedDraws
from pyro_scale.results.posterior import Posterior

#: What is said where something would need whole weights.
WHOLE_NOWHERE = (
    "the network is sharded, so no process has whole draws of it: there are get_samples(), whose "
    "weights are DTensors, and predict()"
)


class ShardedPosterior(Posterior):
    """What can be asked after a run of a sharded network, on all ranks together.

    Args:
        shards: this rank's part of the draws.
    """

    def __init__(self, shards: ShardedDraws):
        self.shards = shards

    @property
    def draws(self) -> Never:
        """Refuses: no process has whole draws.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(WHOLE_NOWHERE)

    @property
    def attrs(self) -> dict[str, Any]:
        """Facts of the run."""
        return self.shards.attrs

    @property
    def size(self) -> str:
        """What there is, in words."""
        return "on a sharded network"

    @property
    def trace(self) -> Tensor:
        """The objective's estimate at every step, in nats, a total: `[1, steps]`."""
        return self.shards.log_joint[None]

    def get_samples(
        self, num_samples: int | None = None, group_by_chain: bool = False
    ) -> dict[str, Any]:
        """Draws of the latent sites: of weights as DTensors `[draws, *shape]`, of other sites as
        tensors.

        Raises:
            ArgumentError: more draws than there are; of a Gaussian, no number of them.
        """
        return self.shards.samples(num_samples, group_by_chain)

    def predict(
        self,
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
            ArgumentError: an option that other models have alone.
        """
        if linearized:
            raise ArgumentError(WHOLE_NOWHERE)
        others = {"batch_size": batch_size, "reduce": reduce, "interval": interval}
        for name, value in {**others, "calibrate": calibrate}.items():
            if value is not None:
                raise ArgumentError(
                    f"{name}={value!r}: predict has none of a sharded network: leave it out, and "
                    "pass some rows at a time"
                )
        arguments = self.shards.problem.log_posterior.bind(args, kwargs)
        return self.shards.predict(arguments, num_samples, return_sites)

    def __getattr__(self, name: str) -> Never:
        """Refuses what needs whole draws."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise ArgumentError(WHOLE_NOWHERE)
