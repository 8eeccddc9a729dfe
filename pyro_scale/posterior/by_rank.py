"""What reads rows again after a run, each rank some of them."""

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
from pyro_scale.distributed.ranks import ALONE, Ranks
from pyro_scale.distributed.shares import Share
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.rng.seeds import Purpose, choose_seed, derived_seed
from pyro_scale.run.by_rank import check_same_call
from pyro_scale.run.resume import digest_of, fingerprint

T = TypeVar("T")


@dataclass(frozen=True)
class Readers:
    """The processes that read, or this one by itself.

    Attributes:
        ranks: the processes.
        device: where what they read comes to be.
        seed: of what they draw; None for torch's generator.
    """

    ranks: Ranks
    device: torch.device
    seed: int | None = None

    @property
    def share(self) -> Share:
        """Which chunks of the rows this process reads."""
        return self.ranks.share

    def map(self, function: Callable[[Chunk], T], chunks: Iterable[Chunk]) -> list[tuple[T, Chunk]]:
        """(What a function makes of a chunk, the chunk without its rows) of all chunks, in order,
        on every rank.

        Each chunk has randomness of its own, so that ranks' draws are no copies of each other.

        Args:
            function: of a chunk, to a pytree of tensors.
            chunks: this process's share.
        """
        own = []
        for place, chunk in enumerate(chunks):
            with self._randomness(self.share.rank + place * self.share.world):
                own.append((function(chunk), chunk._replace(arguments=(), indices=None)))
        return self.gather(own)

    def gather(self, own: list[T]) -> list[T]:
        """The values of all ranks, in turn, on every rank, given those of this one's share."""
        return self.ranks.in_turn(own, "what is read", self.device)

    def _randomness(self, place: int) -> contextlib.AbstractContextManager[None]:
        if self.seed is None:
            return contextlib.nullcontext()
        return own_generator(derived_seed(self.seed, place, Purpose.PREDICTION))


@contextlib.contextmanager
def readers_of(
    result: PosteriorDraws, what: str, data: Data | Arguments, draws: bool = False, **asked: object
) -> Iterator[Readers]:
    """The ranks of the run, if each has all of its draws and their group is there; else this
    process.  What ends on one of them ends on all.

    Args:
        result: of the run.
        what: is called, in words.
        data: the rows that are read.
        draws: whether anything is drawn.
        asked: the call's other arguments.

    Raises:
        ArgumentError: another rank was called otherwise, or has other data.
        RankError: another rank has failed.
    """
    sites = result.log_posterior.model_info.sites
    ranks, device = result.ranks.if_there, sites[result.layout.names[0]].value.device
    if ranks.is_alone:
        yield Readers(ALONE, device)
        return
    with ranks.together():
        rows = digest_of(data) if isinstance(data, tuple | dict) else fingerprint(data)
        shape = list(result.positions.shape)
        facts = {name: repr(value) for name, value in asked.items()}
        check_same_call(ranks, {**facts, "data": rows, "draws": shape}, what)
        seed = choose_seed(None) if draws else None  # on all, whose generators thus stay alike
        yield Readers(ranks, device, ranks.of_first(seed, "the choice of a seed"))
