"""Draws from the posterior of every data set, by a chain each."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.calibration.stack import Stack
from pyro_scale.calibration.stacked_groups import Kind, StackedGroups, start_at_modes
from pyro_scale.core.autocorrelation import autocorrelation_time, by_group
from pyro_scale.data.stacked import StackedBatches
from pyro_scale.engine.checkpoint import Checkpoint
from pyro_scale.engine.draws import Draws, Failure, Steps
from pyro_scale.kernels import Kernel
from pyro_scale.run.extend import every_second
from pyro_scale.tuning.adjust import adjust, first_lr, without_adjustment
from pyro_scale.tuning.choose import kernel_at_first
from pyro_scale.tuning.groups import Lengths, Limit
from pyro_scale.tuning.pilot import pilot
from pyro_scale.tuning.policy import (
    SIMULATIONS,
    SINGLE_ACCEPTANCE,
    SINGLE_PILOTS,
    SINGLE_WARM_UP,
    WARM_UP,
)
from pyro_scale.tuning.windows import NoStableStep, warm_up


@dataclass(frozen=True)
class Method:
    """A sampler, and what of it is to be chosen.

    Attributes:
        kernel: with stand-ins for what is chosen.
        lr: whether the step size is chosen.
        friction: whether the friction is.
        kind: of the coordinates; None where chains move in params.
        warmup_steps: of the run; None where they are to be chosen.
        thinning: of the run; None likewise.
    """

    kernel: Kernel
    lr: bool
    friction: bool
    kind: Kind | None
    warmup_steps: int | None
    thinning: int | None

    @property
    def adjusts(self) -> bool:
        """Whether the step size is chosen by the part of proposals that are accepted."""
        return self.lr and self.kernel.adjusted


@dataclass(frozen=True)
class Sampled:
    """What all chains return.

    Attributes:
        positions: params of the ranked draws, `[chains, draws, D]`; NaN after a chain broke.
        ess: effective draws before thinning, of the element that has fewest, `[chains]`.
        enough: how many of them are enough.
        failed: what became of chains that broke, by number.
        lengths: of the stages.
        steps: of each chain, by stage.
        facts: what else there is to say.
        program: how steps were run, in words.
    """

    positions: Tensor
    ess: Tensor
    enough: float
    failed: dict[int, str]
    lengths: Lengths
    steps: dict[str, int]
    facts: Mapping[str, Any]
    program: str


def sample(stack: Stack, method: Method, starts: Tensor, lengths: Lengths | None = None) -> Sampled:
    """Runs a chain on every data set.

    Args:
        stack: the data sets.
        method: the sampler.
        starts: where chains begin, or searches for modes, params `[chains, D]`.
        lengths: of the stages; None has these data sets decide.
    """
    # a chain that rejects all proposals would stay where it starts
    kernel = without_adjustment(method.kernel) if method.adjusts else method.kernel
    moving = kernel_at_first(kernel, method.lr, method.friction)
    groups = StackedGroups(stack, moving, starts, None, torch.ones(len(starts)), False)
    if method.kind is not None:
        groups = start_at_modes(stack, moving, starts, method.kind, method.lr)
    groups, shown, taken = _tune(groups, method, lengths)
    groups, draws = _sound_run(groups, method, shown.thinning)
    if method.thinning is None:
        allowed = SIMULATIONS.slow * stack.num_chains + (lengths is None)  # one of a pilot's may be
        groups, draws = _until_effective(groups, method, shown.thinning, draws, allowed)
    every = draws.positions.shape[1] // SIMULATIONS.ranked
    params, lr = draws.positions[:, every - 1 :: every], groups.kernel.columns(1)["lr"].flatten()[0]
    if groups.coordinates is not None:
        params = groups.coordinates.mapped("to_params", params.to(starts))
        lr = groups.coordinates.factor * lr
    return Sampled(
        positions=params.cpu(),
        ess=_effective(draws),
        # a thinning that is set is judged
        enough=SIMULATIONS.least_ess if method.thinning is None else 0,
        failed={each.chain: _why(each) for each in draws.failures},
        lengths=shown,
        steps={
            "warm-up": taken + (method.warmup_steps or 0),
            "draws": draws.num_steps - (method.warmup_steps or 0),
        },
        facts={"lr": _in_words(lr)},
        program=draws.program,
    )


def _tune(
    groups: StackedGroups, method: Method, lengths: Lengths | None
) -> tuple[StackedGroups, Lengths, int]:
    """Runs windows and pilots.  Returns the groups after them, the lengths of all stages, and the
    steps of each chain."""
    limit, shown, taken, time = Limit(math.inf, lambda: False, lengths), Lengths(), 0, 1.0
    if method.kind is not None or method.warmup_steps is None:
        with contextlib.suppress(NoStableStep):  # the run tells which chains break
            groups, window = warm_up(groups, limit, SINGLE_WARM_UP)
            shown = dataclasses.replace(shown, windows=window.number)
            taken, time = window.steps, window.time
    if method.lr:
        if method.adjusts:
            stable, lr = groups.lr, first_lr(groups.num_latents)
            kernel = dataclasses.replace(method.kernel, lr=lr)
            groups = dataclasses.replace(groups, kernel=kernel)
            groups, tried = adjust(groups, stable, limit, SINGLE_ACCEPTANCE)
        else:
            theory = groups.kernel.theory
            order = 1 if theory is None else theory.order
            groups, tried = pilot(groups, time, order, limit, SINGLE_PILOTS)
        shown = dataclasses.replace(shown, pilots=tried.number, pilot=tried.length)
        taken, time = taken + tried.steps, tried.time if math.isfinite(tried.time) else time
    thinning = method.thinning or max(1, math.ceil(SIMULATIONS.thinning * math.ceil(time)))
    if lengths is not None and method.thinning is None:
        thinning = lengths.thinning
    return groups, dataclasses.replace(shown, thinning=thinning), taken


def _until_effective(
    groups: StackedGroups, method: Method, thinning: int, draws: Draws, allowed: float
) -> tuple[StackedGroups, Draws]:
    """(Chains with the step sizes that they were run with; draws of which at most as many chains as
    allowed have too few effective ones): these go on at twice the thinning, again and again."""
    stack = groups.stack
    passes = draws.num_steps * stack.share_of_rows * stack.num_chains
    for _ in range(SIMULATIONS.doublings):
        ess = _effective(draws)
        # more steps mend nothing broken
        slow = torch.nonzero((ess < SIMULATIONS.least_ess) & (ess > 0))[:, 0]
        passes += thinning * SIMULATIONS.draws * stack.share_of_rows * len(slow)
        if len(slow) <= allowed or passes > SIMULATIONS.most_passes * stack.num_chains:
            break
        thinning *= 2
        last = partial(every_second, _some(draws, slow))
        own, more = _sound_run(groups.of(slow), method, thinning, last)
        draws = _replaced(draws, slow, more)
        if method.lr:
            groups = groups.with_lr(groups.lr.index_copy(0, slow, own.lr))
    return groups, draws


def _sound_run(
    groups: StackedGroups,
    method: Method,
    thinning: int,
    last: Callable[[StackedBatches], Checkpoint] | None = None,
) -> tuple[StackedGroups, Draws]:
    """(Chains with the step sizes that they were run with; their draws).

    A chain whose step size was chosen begins again at half of it, where it has broken or left the
    posterior.
    """
    draws = _run(groups, method, thinning, last)
    for _ in range(WARM_UP.halvings if method.lr else 0):
        places = torch.nonzero(~groups.are_sound(draws))[:, 0]
        if not len(places):
            break
        halves = groups.lr[places] / 2
        groups = groups.with_lr(groups.lr.index_copy(0, places, halves))
        own = groups.of(places)
        own = dataclasses.replace(own, positions=torch.zeros_like(own.positions))
        draws = _replaced(draws, places, _run(own, method, thinning))
    return groups, draws


def _run(
    groups: StackedGroups,
    method: Method,
    thinning: int,
    last: Callable[[StackedBatches], Checkpoint] | None = None,
) -> Draws:
    count = SIMULATIONS.draws if method.thinning is None else SIMULATIONS.ranked
    steps, where = Steps(count, method.warmup_steps or 0, thinning), groups.coordinates
    return groups.stack.run(groups.kernel, groups.positions, steps, coordinates=where, last=last)


def _replaced(draws: Draws, places: Tensor, own: Draws) -> Draws:
    """Draws of all chains, with others in the places of some of them."""

    def put(every: Tensor, some: Tensor) -> Tensor:
        return every.index_copy(0, places, some)

    numbers = places.tolist()
    failures = [each for each in draws.failures if each.chain not in numbers]
    failures += [dataclasses.replace(each, chain=numbers[each.chain]) for each in own.failures]
    return dataclasses.replace(
        draws,
        positions=put(draws.positions, own.positions),
        log_joint=put(draws.log_joint, own.log_joint),
        state=pytree.tree_map(put, draws.state, own.state),
        failures=failures,
        num_steps=max(draws.num_steps, own.num_steps),
    )


def _some(draws: Draws, places: Tensor) -> Draws:
    """Those of some chains, which have not broken, after as many steps as they took."""
    return dataclasses.replace(
        draws,
        positions=draws.positions[places],
        log_joint=draws.log_joint[places],
        state=pytree.tree_map(lambda leaf: leaf[places], draws.state),
        failures=[],
    )


def _effective(draws: Draws) -> Tensor:
    """Effective draws of each chain, `[chains]`: 1 of a chain that does not move."""
    ess = effective(torch.cat([draws.positions.double(), draws.log_joint[..., None]], -1))
    moves = (draws.positions != draws.positions[:, :1]).any(1).all(-1)
    return torch.where(moves, ess, ess.clamp(max=1.0))


def effective(series: Tensor) -> Tensor:
    """Effective draws of each chain, of the element that has fewest, of series `[chains, draws,
    elements]`; 0 of chains that broke."""
    sound = series.isfinite().all(-1).all(-1)
    series = torch.where(sound[:, None, None], series, 0.0)
    times = by_group(autocorrelation_time, series[:, None]).amax(1)
    return torch.where(sound, series.shape[1] / times, 0.0)


def _why(failure: Failure) -> str:
    return f"not finite after step {failure.step:,}, at site '{failure.site}' first"


def _in_words(lr: Tensor) -> str:
    """The step sizes of all chains."""
    least, most = float(lr.min()), float(lr.max())
    return f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
