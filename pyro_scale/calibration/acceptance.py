"""The step size of chains that accept or reject, each by the part of its own proposals."""

from __future__ import annotations

import dataclasses
import math

import torch

from pyro_scale.calibration.stack import Stack
from pyro_scale.calibration.warm_up import Lengths, Warm, last_positions, mixing_of
from pyro_scale.engine.draws import Steps
from pyro_scale.kernels import Kernel
from pyro_scale.rng.seeds import Purpose
from pyro_scale.tuning.adjust import first_lr, next_lr
from pyro_scale.tuning.policy import PILOTS, SINGLE_ACCEPTANCE, WARM_UP


def adjust_steps(stack: Stack, warm: Warm, kernel: Kernel, lengths: Lengths | None) -> Warm:
    """Chains with a step size at which about nine in ten proposals are accepted.

    Args:
        stack: the data sets.
        warm: chains after windows of a kernel that does not adjust.
        kernel: that does.
        lengths: how many pilots, and how long; None goes on until most chains have settled.
    """
    assert warm.coordinates is not None
    size = warm.positions.shape[1]
    stable = float(warm.kernel.lr) * warm.coordinates.factor
    kernel = dataclasses.replace(kernel, lr=first_lr(size))
    factor = (2 * stable / float(kernel.lr)).clamp(max=1.0)
    length = max(PILOTS.least, math.ceil(SINGLE_ACCEPTANCE.times * warm.lengths.thinning))
    length = length if lengths is None else lengths.pilot
    every = max(1, length // SINGLE_ACCEPTANCE.draws)
    for number in range(SINGLE_ACCEPTANCE.most if lengths is None else lengths.pilots):
        coordinates = dataclasses.replace(warm.coordinates, factor=factor)
        warm = dataclasses.replace(warm, kernel=kernel, coordinates=coordinates)
        steps = Steps(length // every, 0, every)
        draws = stack.run(kernel, warm.positions, steps, (Purpose.PILOT, number), coordinates)
        accepted = (draws.state.accepted.double() / draws.num_steps).tolist()
        changes = torch.tensor([next_lr(1.0, part) for part in accepted], dtype=factor.dtype)
        times, _ = mixing_of(draws.positions.double().nan_to_num())
        thinning = math.ceil(float(times.quantile(0.95)) * every)
        warm = dataclasses.replace(warm, positions=last_positions(stack, warm, draws))
        warm = warm.after(length, pilots=number + 1, pilot=length, thinning=thinning)
        settled = (changes < SINGLE_ACCEPTANCE.settled) & (changes > 1 / SINGLE_ACCEPTANCE.settled)
        if lengths is None and float(settled.double().mean()) >= WARM_UP.most_chains:
            break
        factor = factor * changes
    return warm
