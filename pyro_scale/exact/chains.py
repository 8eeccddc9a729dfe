"""NUTS chains in parallel, one per core."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pyro_scale.engine.progress import Progress
from pyro_scale.errors import ArgumentError
from pyro_scale.exact.log_density import LogDensity
from pyro_scale.exact.nutpie_api import Chain, ChainDraws, Settings
from pyro_scale.rng.seeds import Purpose, derived_seed

#: What ended chains early.
EndedBy = Literal["Control-C", "time"] | None
#: Number of seconds to wait for one chain before looking at the next.
_WAIT_SECONDS = 0.02


class Draws(NamedTuple):
    """The draws of NUTS chains after warm-up.

    Attributes:
        numbers: numbers of the chains in `positions`: those that finished.  If the run was ended
            before any finished, those with draws after warm-up.
        positions: unconstrained draws, `[chains, draws, D]`; all chains are cut to the shortest of
            them.
        sample_stats: sample statistics by ArviZ's names, `[chains, draws]`.
        unfinished: all other draws after warm-up, chain by chain, `[n, D]`.
        is_broken: whether the log density was not finite where a trajectory diverged after warm-up.
        ended_by: what ended the chains early, "Control-C" or "time"; None if nothing did.
    """

    numbers: list[int]
    positions: Tensor
    sample_stats: dict[str, Tensor]
    unfinished: Tensor
    is_broken: bool
    ended_by: EndedBy


def sample(
    densities: Sequence[LogDensity],
    starts: Tensor,
    settings: Settings,
    seeds: Sequence[int],
    bar: Progress,
    deadline: float = math.inf,
) -> Draws:
    """Runs one NUTS chain of each density, in parallel, at most one per core at a time; all at a
    time if there is a deadline.

    A chain depends on its density, start and seed alone, whatever the others are.

    Args:
        densities: log density for each chain.
        starts: unconstrained parameters at which chains start, `[chains, D]`.
        settings: settings of every chain.
        seeds: seed of each chain.
        bar: progress bar, which shows the draws of all chains.
        deadline: time on the monotonic clock at which chains are ended.

    Raises:
        SiteError: the log density is not finite at a chain's start.
        ArgumentError: the deadline came before any draw after warm-up.
        KeyboardInterrupt: Control-C was pressed before any draw after warm-up.
        BaseException: what a signal handler raised, as it is.
    """
    waiting, running, done = list(range(len(starts))), dict[int, Chain](), dict[int, ChainDraws]()
    stopped: dict[int, ChainDraws] = {}
    places = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    places = places if deadline == math.inf else len(starts)
    ended_by: EndedBy = None
    try:
        while waiting or running:
            while waiting and len(running) < places:
                number = waiting.pop(0)
                start, seed = starts[number], seeds[number]
                running[number] = Chain(densities[number], start, settings, seed)
            for number, chain in list(running.items()):
                draws = chain.wait(_WAIT_SECONDS)
                if draws is not None:
                    done[number] = draws
                    del running[number]
            _show(bar, running, len(done) * settings.length)
            if running and time.monotonic() > deadline:
                ended_by, stopped = "time", _stop(running)
                break
    except KeyboardInterrupt:
        ended_by, stopped = "Control-C", _stop(running)
    except BaseException:
        _stop(running)
        raise
    if not done and not stopped:
        if ended_by == "time":
            raise ArgumentError(
                f"max_seconds were over before the {settings.warmup_steps} draws of warm-up: pass "
                "more, or fewer warmup_steps"
            )
        raise KeyboardInterrupt
    return _together(done, stopped, ended_by)


def sample_each(
    densities: Sequence[LogDensity],
    starts: Tensor,
    settings: Settings,
    seeds: Sequence[int],
    bar: Progress,
) -> Draws:
    """Runs one NUTS chain for each density (one density for each data set, say), and returns all of
    their draws. Each chain is the same as the first chain of a run of its density alone, with that
    run's seed.

    Args:
        densities: log density for each chain.
        starts: unconstrained parameters at which chains start, `[chains, D]`.
        settings: settings of every chain.
        seeds: seed of each run.
        bar: progress bar, which shows the draws of all chains.

    Raises:
        KeyboardInterrupt: Control-C was pressed before all chains had finished.
    """
    draws = sample(densities, starts, settings, [chain_seed(seed, 0) for seed in seeds], bar)
    if draws.ended_by is not None:
        raise KeyboardInterrupt
    return draws


def chain_seed(seed: int, number: int) -> int:
    """The seed of one chain's random numbers, derived from the run's seed and the chain's
    number.
    """
    return derived_seed(seed, number, Purpose.NOISE)


def _stop(running: Mapping[int, Chain]) -> dict[int, ChainDraws]:
    """Ends chains that are still running. Returns a dict from the chain's number to its draws after
    warm-up, without chains that have none. A second Control-C does not lose them.
    """
    with _uninterrupted():
        stopped = {number: chain.stop() for number, chain in running.items()}
    return {n: draws for n, draws in stopped.items() if draws is not None and len(draws.positions)}


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Context in which Control-C is ignored.  Control-C reaches the main thread only, so in other
    threads the context does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _show(bar: Progress, running: Mapping[int, Chain], num_done: int) -> None:
    """Shows every running chain's draws, divergences and step size in the progress bar.

    Args:
        bar: progress bar.
        running: chains that run, by number.
        num_done: number of draws of finished chains, warm-up included.
    """
    chains = {number: chain.progress for number, chain in sorted(running.items())}
    bar.go_to(num_done + sum(chain.num_draws for chain in chains.values()))
    bar.show(
        "; ".join(
            f"chain {number}: {chain.num_draws} draws, {chain.num_divergences} divergent, step "
            f"size {chain.step_size}"
            for number, chain in chains.items()
        )
    )


def _together(
    done: Mapping[int, ChainDraws], stopped: Mapping[int, ChainDraws], ended_by: EndedBy
) -> Draws:
    """Puts the draws of single chains together: those of finished chains, or of all chains with
    draws if none finished, cut to the same length. Draws that do not fit go into `unfinished`.

    Args:
        done: draws of finished chains, by number.
        stopped: draws of chains that were ended early, by number.
        ended_by: what ended them.
    """
    chains = done or stopped
    count = min(len(chain.positions) for chain in chains.values())
    unfinished = [chain.positions[count:] for chain in chains.values()]
    if done:
        unfinished += [stopped[number].positions for number in sorted(stopped)]
    numbers = sorted(chains)
    names = chains[numbers[0]].sample_stats
    return Draws(
        numbers,
        torch.stack([chains[number].positions[:count] for number in numbers]),
        {n: torch.stack([chains[c].sample_stats[n][:count] for c in numbers]) for n in names},
        torch.cat(unfinished),
        any(chain.is_broken for chain in [*done.values(), *stopped.values()]),
        ended_by,
    )
