"""Reads rows after a run, shared out among its processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.chunks import Chunk
from pyro_scale.data.sources import Data
from pyro_scale.distributed.shares import Share
from pyro_scale.distributed.workers import ALONE, Workers
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.rng.seeds import Purpose, choose_seed, derived_seed
from pyro_scale.run.by_rank import check_same_call
from pyro_scale.run.resume import digest_of, fingerprint

T = TypeVar("T")


@dataclass(frozen=True)
class Readers:
    """The processes that together read rows of data after a run, each some chunks of them; or this
    process alone.

    Attributes:
        workers: the processes.
        device: device of the results that they exchange.
        seed: seed of the random numbers of all chunks; None to draw from torch's generator as it
            is.
    """

    workers: Workers
    device: torch.device
    seed: int | None = None

    @property
    def share(self) -> Share:
        """The rule by which this process picks its chunks when the processes divide the rows of the
        data among them."""
        return self.workers.share

    def map(self, function: Callable[[Chunk], T], chunks: Iterable[Chunk]) -> list[tuple[T, Chunk]]:
        """Applies a function to the chunks of rows and gathers the results of all processes.

        Each chunk has its own seed, so that draws of different processes are independent.

        Args:
            function: function of a chunk that returns a pytree of tensors.
            chunks: the chunks that this process reads.

        Returns:
            A list of (the function's value, the chunk without its rows) for the chunks of all
            processes, in the data's order, on every process.
        """
        results = []
        for place, chunk in enumerate(chunks):
            with self._seeded(self.share.number(place)):
                results.append((function(chunk), chunk._replace(arguments=(), indices=None)))
        return self.gather(results)

    def gather(self, results: list[T]) -> list[T]:
        """The results of all processes in the order of the chunks, on every process.

        Args:
            results: the results of this process, one for each of its chunks.
        """
        return self.workers.gather_shares(results, "what is read", self.device)

    def _seeded(self, place: int) -> contextlib.AbstractContextManager[None]:
        if self.seed is None:
            return contextlib.nullcontext()
        return own_generator(derived_seed(self.seed, place, Purpose.PREDICTION))


@contextlib.contextmanager
def readers_of(
    result: PosteriorDraws,
    what: str,
    data: Data | Arguments,
    draws: bool = False,
    **arguments: object,
) -> Iterator[Readers]:
    """Context that yields the processes by which rows are read: all processes of the run, if
    each has all of its draws and their process group exists; otherwise this process alone. An
    error in one process ends all.

    Args:
        result: draws and facts of the run.
        what: name of the call, for messages.
        data: the rows that are read.
        draws: whether random numbers are drawn.
        arguments: options of the call, which must be the same on all ranks.

    Raises:
        ArgumentError: another rank has made another call, or has other data.
        RankError: another rank has failed.
    """
    sites = result.log_posterior.model_info.sites
    workers = Workers.that_are_left() if result.read_together else ALONE
    device = sites[result.layout.names[0]].value.device
    if workers.is_alone:
        yield Readers(ALONE, device)
        return
    with workers.together():
        rows = digest_of(data) if isinstance(data, tuple | dict) else fingerprint(data)
        shape = list(result.positions.shape)
        facts = {name: repr(value) for name, value in arguments.items()}
        check_same_call(workers, {**facts, "data": rows, "draws": shape}, what)
        # on all ranks, so that their generators stay the same
        seed = choose_seed(None) if draws else None
        yield Readers(workers, device, workers.broadcast(seed, "the choice of a seed"))
