"""Chains of NUTS side by side, one to a core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.rng import Purpose, derived_seed
from pyro_scale.engine.progress import Progress
from pyro_scale.exact.log_density import LogDensity
from pyro_scale.exact.nutpie_api import Chain, ChainDraws, Settings

#: Seconds for which one chain is waited for before the others are looked at.
_GLANCE = 0.02


class Draws(NamedTuple):
    """What all chains leave.

    Attributes:
        positions: `[chains, draws, D]`, as many of each chain as of the shortest.
        sample_stats: `[chains, draws]`, in ArviZ's names.
        interrupted: whether Control-C ended them.
    """

    positions: Tensor
    sample_stats: dict[str, Tensor]
    interrupted: bool


def sample(
    density: LogDensity,
    starts: Tensor,
    settings: Settings,
    seed: int,
    title: str,
    progress: bool,
) -> Draws:
    """Runs a chain from each start, at most one a core at a time.

    A chain depends on the seed and its number alone, whatever the others are.

    Args:
        density: what is sampled.
        starts: `[chains, D]`.
        settings: of each chain.
        seed: of the run.
        title: of the progress bar.
        progress: whether to show one.

    Raises:
        SiteError: a chain has no finite start.
        KeyboardInterrupt: before any draw after warm-up.
    """
    waiting, running, done = list(range(len(starts))), dict[int, Chain](), dict[int, ChainDraws]()
    places = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    interrupted = False
    with Progress(len(starts) * _length(settings), title, progress) as bar:
        try:
            while waiting or running:
                while waiting and len(running) < places:
                    number = waiting.pop(0)
                    own_seed = derived_seed(seed, number, Purpose.NOISE)
                    running[number] = Chain(density, starts[number], settings, own_seed)
                for number, chain in list(running.items()):
                    if chain.wait(_GLANCE):
                        done[number] = running.pop(number).draws()
                        bar.update(_length(settings))
        except KeyboardInterrupt:
            interrupted = True
            for number, chain in running.items():
                chain.stop()
                done[number] = chain.draws()
    if interrupted and min((len(d.positions) for d in done.values()), default=0) == 0:
        raise KeyboardInterrupt
    return _together([done[number] for number in sorted(done)], interrupted)


def _length(settings: Settings) -> int:
    return settings.warmup_steps + settings.num_samples


def _together(chains: Sequence[ChainDraws], interrupted: bool) -> Draws:
    count = min(len(chain.positions) for chain in chains)
    names = chains[0].sample_stats
    return Draws(
        torch.stack([chain.positions[:count] for chain in chains]),
        {n: torch.stack([chain.sample_stats[n][:count] for chain in chains]) for n in names},
        interrupted,
    )
