"""Draws from the posterior of every data set, by one chain each."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.calibration.stack import Stack, find_starts
from pyro_scale.calibration.stacked_chains import Kind, StackedChains, start_at_modes
from pyro_scale.core.mixing import autocorrelation_time, by_group
from pyro_scale.data.stacked import StackedBatches
from pyro_scale.engine.checkpoint import Checkpoint
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.kernels import Kernel
from pyro_scale.model.init_strategies import InitFunction
from pyro_scale.run.extend import every_second
from pyro_scale.tuning.adjust import adjust, first_lr, without_adjustment
from pyro_scale.tuning.groups import Lengths, Limit
from pyro_scale.tuning.pilot import pilot
from pyro_scale.tuning.policy import (
    SIMULATIONS,
    SINGLE_ACCEPTANCE,
    SINGLE_PILOTS,
    SINGLE_WARM_UP,
    WARM_UP,
)
from pyro_scale.tuning.stable_lr import kernel_for_whitened
from pyro_scale.tuning.windows import NoStableStep, warm_up


@dataclass(frozen=True)
class Sampled:
    """Draws from the posteriors of many data sets, one chain each, and how they were made.

    Attributes:
        positions: unconstrained parameters of the draws to rank, `[data sets, draws, D]`; NaN after
            a chain broke.
        ess: effective draws of each chain's slowest element, before thinning, `[data sets]`.
        enough: number of effective draws; a simulation with fewer counts as slow.
        failed: reasons of failure, by number of the data set.
        lengths: numbers of steps of the warm-up, of pilots (short runs from which the step size is
            tuned) and of thinning, to use for further data sets.
        steps: dict from the name of a stage, such as warm-up, to the number of steps of each chain
            in it.
        facts: further settings and measurements, by name, for the attribute `attrs` of the result.
        program: phrase that says how steps were executed, such as whether they were compiled.
    """

    positions: Tensor
    ess: Tensor
    enough: float
    failed: dict[int, str]
    lengths: Lengths = field(default_factory=Lengths)
    steps: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    program: str = "one by one"


@dataclass(frozen=True)
class Stacked:
    """Fits a sampler to many data sets: one chain on each, moved by the same compiled steps.

    Attributes:
        kernel: sampler, with placeholders for hyperparameters that are tuned.
        lr: True if the step size is tuned; chains then move in whitened coordinates.
        friction: True if the friction is tuned.
        kind: "dense" if coordinates are whitened by the whole covariance, "diag" if by the sds
            alone; None if chains move in the unconstrained parameters themselves.
        warmup_steps: steps before the first draw; None to tune them.
        thinning: steps from one draw to the next; None to tune them.
        init: one of Pyro's init functions, for the starts; None for the library's default.
    """

    kernel: Kernel
    lr: bool
    friction: bool
    kind: Kind | None
    warmup_steps: int | None
    thinning: int | None
    init: InitFunction | None = None

    most_at_once = 500

    @property
    def has_lengths(self) -> bool:
        is_set = self.warmup_steps is not None and self.thinning is not None
        return self.kind is not None or not is_set

    @property
    def chooses_acceptance(self) -> bool:
        """True if the step size is tuned by the acceptance rate, which is the case for samplers
        that accept or reject proposals.
        """
        return self.lr and self.kernel.adjusted

    def fit(self, stack: Stack, lengths: Lengths | None) -> Sampled:
        starts = find_starts(stack, self.init)
        # a chain that rejects all proposals would stay where it starts
        kernel = without_adjustment(self.kernel) if self.chooses_acceptance else self.kernel
        kernel = kernel_for_whitened(kernel, self.lr, self.friction)
        if self.kind is None:
            chains = StackedChains(stack, kernel, starts)
        else:
            chains = start_at_modes(stack, kernel, starts, self.kind, self.lr)
        chains, lengths_used, warmup_steps = _tune(chains, self, lengths)
        chains, draws = _run_until_sound(chains, self, lengths_used.thinning)
        if self.thinning is None:
            # while lengths are determined, one more chain may be slow
            allowed = SIMULATIONS.slow * stack.num_chains + (lengths is None)
            chains, draws = _extend_slow(chains, self, lengths_used.thinning, draws, allowed)
        every = draws.positions.shape[1] // SIMULATIONS.ranked
        lr = chains.kernel.columns(1)["lr"].flatten()[0]
        if chains.whitening is not None:
            lr = chains.lr_factor * lr
        set_steps = self.warmup_steps or 0
        return Sampled(
            positions=chains.to_params(draws.positions[:, every - 1 :: every].to(starts)).cpu(),
            ess=_effective_draws(draws),
            # with a set thinning, autocorrelation is part of what is tested
            enough=SIMULATIONS.least_ess if self.thinning is None else 0,
            failed={
                failure.chain: (
                    f"not finite after step {failure.step:,}, at site '{failure.site}' first"
                )
                for failure in draws.failures
            },
            lengths=lengths_used,
            steps={"warm-up": warmup_steps + set_steps, "draws": draws.num_steps - set_steps},
            facts={"lr": _in_words(lr)},
            program=draws.program,
        )


def _tune(
    chains: StackedChains, method: Stacked, lengths: Lengths | None
) -> tuple[StackedChains, Lengths, int]:
    """Warms up one chain on each data set, and tunes the chains' step sizes, unless the user set
    them.

    Args:
        chains: chains at their starts.
        method: sampler and settings.
        lengths: numbers of steps of the stages (warm-up windows, pilots, thinning); None to
            determine them on these chains.

    Returns:
        (The chains after the warm-up, with their step sizes; the lengths of all stages; the number
        of steps that each chain took).
    """
    limit, used, total, time = Limit(math.inf, lambda: False, lengths), Lengths(), 0, 1.0
    if method.kind is not None or method.warmup_steps is None:
        with contextlib.suppress(NoStableStep):  # the run tells which chains break
            chains, window = warm_up(chains, limit, SINGLE_WARM_UP)
            used = dataclasses.replace(used, windows=window.number)
            total, time = window.steps, window.time
    if method.lr:
        if method.chooses_acceptance:
            stable = chains.lr
            kernel = dataclasses.replace(method.kernel, lr=first_lr(chains.num_latents))
            chains = dataclasses.replace(chains, kernel=kernel)
            chains, tried = adjust(chains, stable, limit, SINGLE_ACCEPTANCE)
        else:
            theory = chains.kernel.theory
            order = 1 if theory is None else theory.order
            chains, tried = pilot(chains, time, order, limit, SINGLE_PILOTS)
        used = dataclasses.replace(used, pilots=tried.number, pilot=tried.length)
        total, time = total + tried.steps, tried.time if math.isfinite(tried.time) else time
    thinning = method.thinning or max(1, math.ceil(SIMULATIONS.thinning * math.ceil(time)))
    if lengths is not None and method.thinning is None:
        thinning = lengths.thinning
    return chains, dataclasses.replace(used, thinning=thinning), total


def _extend_slow(
    chains: StackedChains, method: Stacked, thinning: int, draws: Draws, allowed: float
) -> tuple[StackedChains, Draws]:
    """Continues the chains that have too few effective draws at twice their thinning, again and
    again, until at most `allowed` chains have too few or passes through the data reach a limit.

    Args:
        chains: chains before the run.
        method: sampler and settings.
        thinning: steps from one draw to the next in the run so far.
        draws: draws of all chains in the run so far.
        allowed: number of chains that may have too few effective draws.

    Returns:
        (The chains with the step sizes of their runs, the draws of all chains).
    """
    stack = chains.stack
    passes = draws.num_steps * stack.share_of_rows * stack.num_chains
    for _ in range(SIMULATIONS.doublings):
        ess = _effective_draws(draws)
        # more steps do not help broken chains, which have 0
        slow = torch.nonzero((ess < SIMULATIONS.least_ess) & (ess > 0))[:, 0]
        passes += thinning * SIMULATIONS.draws * stack.share_of_rows * len(slow)
        if len(slow) <= allowed or passes > SIMULATIONS.most_passes * stack.num_chains:
            break
        thinning *= 2
        last = partial(every_second, _select_draws(draws, slow))
        extended, longer = _run_until_sound(chains.select(slow), method, thinning, last)
        draws = _replace_draws(draws, slow, longer)
        if method.lr:
            chains = chains.with_lr(chains.lr.index_copy(0, slow, extended.lr))
    return chains, draws


def _run_until_sound(
    chains: StackedChains,
    method: Stacked,
    thinning: int,
    last: Callable[[StackedBatches], Checkpoint] | None = None,
) -> tuple[StackedChains, Draws]:
    """Takes the chains' steps and returns their draws. If step sizes are tuned, chains whose draws
    are not sound (not finite, or outside of the posterior) are run again at half their step size,
    from the center of their coordinates, up to a few times.

    Args:
        chains: chains before the run.
        method: sampler and settings.
        thinning: steps from one draw to the next.
        last: function from the chains' batches to a checkpoint to continue from; None to start
            anew.

    Returns:
        (The chains with the step sizes of their runs, the draws).
    """
    draws = _run(chains, method, thinning, last)
    for _ in range(WARM_UP.halvings if method.lr else 0):
        broken = torch.nonzero(~chains.are_sound(draws))[:, 0]
        if not len(broken):
            break
        chains = chains.with_lr(chains.lr.index_copy(0, broken, chains.lr[broken] / 2))
        restarted = chains.select(broken)
        centers = torch.zeros_like(restarted.positions)
        restarted = dataclasses.replace(restarted, positions=centers)
        draws = _replace_draws(draws, broken, _run(restarted, method, thinning))
    return chains, draws


def _run(
    chains: StackedChains,
    method: Stacked,
    thinning: int,
    last: Callable[[StackedBatches], Checkpoint] | None = None,
) -> Draws:
    count = SIMULATIONS.draws if method.thinning is None else SIMULATIONS.ranked
    return chains.simulate(Steps(count, method.warmup_steps or 0, thinning), last=last)


def _replace_draws(draws: Draws, chains: Tensor, new: Draws) -> Draws:
    """A copy of the draws of all chains, in which those of the chains with these numbers are
    replaced.

    Args:
        draws: draws of all chains.
        chains: numbers of the chains to replace, int64 `[n]`.
        new: draws of these n chains, in this order.
    """

    def put(table: Tensor, entries: Tensor) -> Tensor:
        return table.index_copy(0, chains, entries)

    numbers = chains.tolist()
    failures = [failure for failure in draws.failures if failure.chain not in numbers]
    failures += [dataclasses.replace(one, chain=numbers[one.chain]) for one in new.failures]
    return dataclasses.replace(
        draws,
        positions=put(draws.positions, new.positions),
        log_joint=put(draws.log_joint, new.log_joint),
        state=pytree.tree_map(put, draws.state, new.state),
        failures=failures,
        num_steps=max(draws.num_steps, new.num_steps),
    )


def _select_draws(draws: Draws, chains: Tensor) -> Draws:
    """A copy of `draws` with some of the chains only, in the order of `chains` (their numbers,
    int64 `[n]`); none of these may have failed."""
    return dataclasses.replace(
        draws,
        positions=draws.positions[chains],
        log_joint=draws.log_joint[chains],
        state=pytree.tree_map(lambda leaf: leaf[chains], draws.state),
        failures=[],
    )


def _effective_draws(draws: Draws) -> Tensor:
    """The effective number of draws of each chain, `[chains]`: the least over its elements and the
    log joint; 0 for a chain with NaN or infinite draws, at most 1 for one of which an element does
    not move."""
    ess = effective_size(torch.cat([draws.positions.double(), draws.log_joint[..., None]], -1))
    moves = (draws.positions != draws.positions[:, :1]).any(1).all(-1)
    return torch.where(moves, ess, ess.clamp(max=1.0))


def effective_size(series: Tensor) -> Tensor:
    """Effective number of draws of each chain's slowest element, `[chains]`; 0 for chains with NaN
    or infinite numbers.

    Args:
        series: draws, `[chains, draws, elements]`.
    """
    sound = series.isfinite().all(-1).all(-1)
    series = torch.where(sound[:, None, None], series, 0.0)
    times = by_group(autocorrelation_time, series[:, None]).amax(1)
    return torch.where(sound, series.shape[1] / times, 0.0)


def _in_words(lr: Tensor) -> str:
    """The range of the chains' step sizes `lr`, `[chains]`, as text for the result, such as "0.1 to
    0.3"; one number if all are equal."""
    least, most = float(lr.min()), float(lr.max())
    return f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
