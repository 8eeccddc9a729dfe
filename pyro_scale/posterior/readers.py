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
    """The processes that read rows together after a run, or this process alone.

    Attributes:
        workers: the processes.
        device: of their results.
        seed: of their random numbers; None for torch's generator.
    """

    workers: Workers
    device: torch.device
    seed: int | None = None

    @property
    def share(self) -> Share:
        """This process's share of the chunks of rows."""
        return self.workers.share

    def map(self, function: Callable[[Chunk], T], chunks: Iterable[Chunk]) -> list[tuple[T, Chunk]]:
        """(The function's value, the chunk without its rows) for all chunks in order, on every
        process.

        Each chunk has its own seed, so that draws of different processes are independent.

        Args:
            function: of a chunk; returns a pytree of tensors.
            chunks: this process's share.
        """
        results = []
        for place, chunk in enumerate(chunks):
            with self._seeded(self.share.number(place)):
                results.append((function(chunk), chunk._replace(arguments=(), indices=None)))
        return self.gather(results)

    def gather(self, results: list[T]) -> list[T]:
        """The results of all processes in their original order, on every process.

        Args:
            results: of this process's share.
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
    """A block in which rows are read: by all ranks of the run, if each has all of its draws and
    their process group exists; otherwise by this process.  An error on one rank ends all.

    Args:
        result: of the run.
        what: is called, in words, for messages.
        data: the rows that are read.
        draws: whether random numbers are drawn.
        arguments: of the call, which have to be the same on all ranks.

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
