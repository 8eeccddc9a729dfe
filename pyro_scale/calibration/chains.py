"""Draws from the posterior of every data set, by a chain each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.calibration.acceptance import adjust_steps
from pyro_scale.calibration.stack import Stack
from pyro_scale.calibration.warm_up import (
    Kind,
    Lengths,
    Warm,
    are_sound,
    move_in_windows,
    of_each,
    shorten_steps,
    start_at_modes,
)
from pyro_scale.core.autocorrelation import autocorrelation_time
from pyro_scale.data.stacked import StackedBatches
from pyro_scale.engine.checkpoint import Checkpoint
from pyro_scale.engine.draws import Draws, Failure, Steps
from pyro_scale.kernels import Kernel
from pyro_scale.run.extend import every_second
from pyro_scale.tuning.adjust import without_adjustment
from pyro_scale.tuning.choose import longest_lr
from pyro_scale.tuning.policy import SIMULATIONS, STEP_SIZE, WARM_UP


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
    kernel, adjusts = method.kernel, method.lr and method.kernel.adjusted
    # a chain that rejects all proposals would stay where it starts
    moving: Kernel = without_adjustment(kernel) if adjusts else kernel
    if method.friction and hasattr(moving, "friction"):
        moving = dataclasses.replace(moving, friction=STEP_SIZE.friction)  # type: ignore[call-arg]
    if method.lr:
        moving = dataclasses.replace(moving, lr=longest_lr(moving))
    warm = Warm(moving, starts, None, Lengths(), 0)
    if method.kind is not None:
        warm = start_at_modes(stack, moving, starts, method.kind)
    if method.kind is not None or method.warmup_steps is None:
        adapts = method.kind is not None
        warm = move_in_windows(stack, warm, lengths, adapts, method.lr)
    if adjusts:
        warm = adjust_steps(stack, warm, kernel, lengths)
    elif method.lr:
        order = 1 if moving.theory is None else moving.theory.order
        warm = shorten_steps(stack, warm, order, lengths)
    thinning = method.thinning or max(1, math.ceil(SIMULATIONS.thinning * warm.lengths.thinning))
    if lengths is not None and method.thinning is None:
        thinning = lengths.thinning
    warm, draws = _sound_run(stack, warm, method, thinning)
    if method.thinning is None:
        allowed = SIMULATIONS.slow * stack.num_chains + (lengths is None)  # one of a pilot's may be
        warm, draws = _until_effective(stack, warm, method, thinning, draws, allowed)
    every = draws.positions.shape[1] // SIMULATIONS.ranked
    params = draws.positions[:, every - 1 :: every]
    if warm.coordinates is not None:
        params = warm.coordinates.mapped("to_params", params.to(starts)).cpu()
    factor = torch.ones(stack.num_chains) if warm.coordinates is None else warm.coordinates.factor
    first_lr = warm.kernel.columns(1)["lr"].flatten()[0]
    return Sampled(
        positions=params,
        ess=_effective(draws),
        # a thinning that is set is judged
        enough=SIMULATIONS.least_ess if method.thinning is None else 0,
        failed={each.chain: _why(each) for each in draws.failures},
        lengths=dataclasses.replace(warm.lengths, thinning=thinning),
        steps={
            "warm-up": warm.steps + (method.warmup_steps or 0),
            "draws": draws.num_steps - (method.warmup_steps or 0),
        },
        facts={"lr": _in_words(factor * first_lr)},
        program=draws.program,
    )


def _until_effective(
    stack: Stack, warm: Warm, method: Method, thinning: int, draws: Draws, allowed: float
) -> tuple[Warm, Draws]:
    """(Chains with the step sizes that they were run with; draws of which at most as many chains as
    allowed have too few effective ones): these go on at twice the thinning, again and again."""
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
        own, more = _sound_run(stack.of(slow), warm.of(slow), method, thinning, last)
        warm, draws = warm.with_factors(slow, own), _replaced(draws, slow, more)
    return warm, draws


def _sound_run(
    stack: Stack,
    warm: Warm,
    method: Method,
    thinning: int,
    last: Callable[[StackedBatches], Checkpoint] | None = None,
) -> tuple[Warm, Draws]:
    """(Chains with the step sizes that they were run with; their draws).

    A chain whose step size was chosen begins again at half of it, where it has broken or left the
    posterior.
    """
    draws = _run(stack, warm, method, thinning, last)
    for _ in range(WARM_UP.halvings):
        places = torch.nonzero(~are_sound(stack, warm, draws))[:, 0]
        if not method.lr or not len(places) or warm.coordinates is None:
            break
        factor = warm.coordinates.factor.clone()
        factor[places] /= 2
        coordinates = dataclasses.replace(warm.coordinates, factor=factor)
        warm = dataclasses.replace(warm, coordinates=coordinates)
        own = warm.of(places)
        own = dataclasses.replace(own, positions=torch.zeros_like(own.positions))
        draws = _replaced(draws, places, _run(stack.of(places), own, method, thinning))
    return warm, draws


def _run(
    stack: Stack,
    warm: Warm,
    method: Method,
    thinning: int,
    last: Callable[[StackedBatches], Checkpoint] | None = None,
) -> Draws:
    count = SIMULATIONS.draws if method.thinning is None else SIMULATIONS.ranked
    steps = Steps(count, method.warmup_steps or 0, thinning)
    return stack.run(warm.kernel, warm.positions, steps, coordinates=warm.coordinates, last=last)


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
    return effective(torch.cat([draws.positions.double(), draws.log_joint[..., None]], -1))


def effective(series: Tensor) -> Tensor:
    """Effective draws of each chain, of the element that has fewest, of series `[chains, draws,
    elements]`; 0 of chains that broke."""
    sound = series.isfinite().all(-1).all(-1)
    series = torch.where(sound[:, None, None], series, 0.0)
    times = of_each(autocorrelation_time, series).amax(1)
    return torch.where(sound, series.shape[1] / times, 0.0)


def _why(failure: Failure) -> str:
    return f"not finite after step {failure.step:,}, at site '{failure.site}' first"


def _in_words(lr: Tensor) -> str:
    """The step sizes of all chains."""
    least, most = float(lr.min()), float(lr.max())
    return f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
