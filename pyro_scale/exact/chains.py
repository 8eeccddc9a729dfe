"""Chains of NUTS side by side, one to a core."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.engine.progress import Progress
from pyro_scale.exact.log_density import LogDensity
from pyro_scale.exact.nutpie_api import Chain, ChainDraws, Settings
from pyro_scale.rng.seeds import Purpose, derived_seed

#: Seconds for which one chain is waited for before the others are looked at.
_GLANCE = 0.02


class Draws(NamedTuple):
    """What all chains leave.

    Attributes:
        numbers: of the chains in `positions`: those that have finished.  If Control-C came before
            any had, those with draws after warm-up.
        positions: `[chains, draws, D]`, as many of each as of the shortest of these.
        sample_stats: `[chains, draws]`, in ArviZ's names.
        unfinished: the other draws after warm-up, chain by chain, `[n, D]`.
        is_broken: whether the log density was not finite where a trajectory diverged after
            warm-up.
        interrupted: whether Control-C ended them.
    """

    numbers: list[int]
    positions: Tensor
    sample_stats: dict[str, Tensor]
    unfinished: Tensor
    is_broken: bool
    interrupted: bool


def sample(
    density: LogDensity,
    by_pointer: bool,
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
        by_pointer: whether nutpie takes machine code.
        starts: `[chains, D]`.
        settings: of each chain.
        seed: of the run.
        title: of the progress bar.
        progress: whether to show one.

    Raises:
        SiteError: a chain has no finite start.
        KeyboardInterrupt: before any draw after warm-up.
        BaseException: what a signal handler raised, as it is.
    """
    seeds = [derived_seed(seed, number, Purpose.NOISE) for number in range(len(starts))]
    length = len(starts) * _length(settings)
    with Progress(length, title, progress) as bar:
        densities = [density] * len(starts)
        return _sample(densities, by_pointer, starts, settings, seeds, bar)


def sample_each(
    densities: Sequence[LogDensity],
    by_pointer: bool,
    starts: Tensor,
    settings: Settings,
    seeds: Sequence[int],
    bar: Progress,
) -> Draws:
    """The first chain of a run of each density, with a seed of its own.

    Raises:
        KeyboardInterrupt: not all have finished.
    """
    own = [derived_seed(seed, 0, Purpose.NOISE) for seed in seeds]
    draws = _sample(densities, by_pointer, starts, settings, own, bar)
    if draws.interrupted:
        raise KeyboardInterrupt
    return draws


def _sample(
    densities: Sequence[LogDensity],
    by_pointer: bool,
    starts: Tensor,
    settings: Settings,
    seeds: Sequence[int],
    bar: Progress,
) -> Draws:
    """Runs a chain of each density, with a seed of its own."""
    waiting, running, done = list(range(len(starts))), dict[int, Chain](), dict[int, ChainDraws]()
    stopped: dict[int, ChainDraws] = {}
    places = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    length, interrupted = _length(settings), False
    try:
        while waiting or running:
            while waiting and len(running) < places:
                number = waiting.pop(0)
                how = by_pointer, starts[number], settings, seeds[number]
                running[number] = Chain(densities[number], *how)
            for number, chain in list(running.items()):
                draws = chain.wait(_GLANCE)
                if draws is not None:
                    done[number] = draws
                    del running[number]
            _show(bar, running, len(done) * length)
    except KeyboardInterrupt:
        interrupted = True
        stopped = _stop(running)
    except BaseException:
        _stop(running)
        raise
    if not done and not stopped:
        raise KeyboardInterrupt
    return _together(done, stopped, interrupted)


def _stop(running: Mapping[int, Chain]) -> dict[int, ChainDraws]:
    """Ends chains; those with draws after warm-up, which a second Control-C does not lose."""
    with _uninterrupted():
        stopped = {number: chain.stop() for number, chain in running.items()}
    return {n: draws for n, draws in stopped.items() if draws is not None and len(draws.positions)}


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignores Control-C, which reaches the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _show(bar: Progress, running: Mapping[int, Chain], num_done: int) -> None:
    """How far each chain is: draws, divergences and step size."""
    chains = {number: chain.progress for number, chain in sorted(running.items())}
    bar.go_to(num_done + sum(each.num_draws for each in chains.values()))
    bar.show(
        "; ".join(
            f"chain {number}: {each.num_draws} draws, {each.num_divergences} divergent, step size "
            f"{each.step_size}"
            for number, each in chains.items()
        )
    )


def _length(settings: Settings) -> int:
    return settings.warmup_steps + settings.num_samples


def _together(
    done: Mapping[int, ChainDraws], stopped: Mapping[int, ChainDraws], interrupted: bool
) -> Draws:
    """Finished chains side by side, else all that have draws, and what is left over."""
    chains = done or stopped
    count = min(len(chain.positions) for chain in chains.values())
    rest = [chain.positions[count:] for chain in chains.values()]
    if done:
        rest += [stopped[number].positions for number in sorted(stopped)]
    numbers = sorted(chains)
    names = chains[numbers[0]].sample_stats
    return Draws(
        numbers,
        torch.stack([chains[number].positions[:count] for number in numbers]),
        {n: torch.stack([chains[c].sample_stats[n][:count] for c in numbers]) for n in names},
        torch.cat(rest),
        any(chain.is_broken for chain in [*done.values(), *stopped.values()]),
        interrupted,
    )
