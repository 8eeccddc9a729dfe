"""Checks that a compiled program computes what the step computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.engine.executors import Program
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.engine.step import Engine

#: Where a program is compared with the step itself: about so far away.
_ELSEWHERE = 0.1
#: The most they may differ by: a part of what is compared (or so many roundings of the coarsest
#: site's), and roundings of what it comes from.
_TOLERANCE, _COARSE, _ROUNDINGS = 1e-3, 16, 1e3
#: Why a program computes something else than the step.
IS_FROZEN = (
    "compiled, it gives something else: what the model hands to NumPy or to lists on the way is "
    "frozen when it is compiled; keep to torch"
)
#: The same of a program of an earlier run, in roundings: where it is refused without need, nothing
#: is lost but the time of tracing the step again.
_OF_THE_SAME = 32


def check(
    program: Program, as_it_is: Program, engine: Engine, state: Any, block: StepInputs
) -> None:
    """Compares a program with the step that it was compiled from, without noise, which would hide
    a small gradient, at another state and batch than it was traced at.

    What leaves torch on the way (NumPy, lists) is not traced but frozen.

    Raises:
        RuntimeError: they differ by more than rounding, which a model may magnify.
    """
    last = _last(block)
    quiet = dataclasses.replace(last, noise=torch.zeros_like(last.noise))
    coarsest = max(torch.finfo(dtype).eps for dtype in engine.layout.dtypes)
    part = max(_TOLERANCE, _COARSE * coarsest)
    if not _agree(program, as_it_is, _elsewhere(engine, state, last), quiet, part, _ROUNDINGS):
        raise RuntimeError(IS_FROZEN)


def agrees(
    program: Program, as_it_is: Program, engine: Engine, state: Any, block: StepInputs
) -> bool:
    """Whether the program of an earlier run is still that of the step, to rounding, with noise, at
    a point where it was not looked at before."""
    last, part = _last(block), _OF_THE_SAME * torch.finfo(engine.layout.dtype).eps
    elsewhere = _elsewhere(engine, state, last)
    return _agree(program, as_it_is, elsewhere, last, part, _OF_THE_SAME)


def _last(block: StepInputs) -> StepInputs:
    """A block's last step."""
    return block.part(len(block) - 1, len(block))


def _elsewhere(engine: Engine, state: Any, step: StepInputs) -> Any:
    """Another state, as the seed has it."""
    moved = state.position.clone()
    moved[:, : engine.num_latents] += _ELSEWHERE * (1 + step.noise[:, 0].sum(1))
    return state._replace(position=moved)


def _agree(
    program: Program, as_it_is: Program, state: Any, step: StepInputs, part: float, roundings: float
) -> bool:
    """Whether two programs take a step alike, up to a part of how far it goes and roundings of
    where it comes from."""
    (one, mine), (other, theirs) = (p.run(state, step, 1, 1) for p in (program, as_it_is))
    compared = [(mine.last, theirs.last, mine.last)]
    leaves = [pytree.tree_leaves(each) for each in (state, one, other)]
    for before, after, expected in zip(*leaves, strict=True):
        compared.append((after - before, expected - before, before))
    return all(
        is_close(given, expected, part, roundings * float(size.abs().nan_to_num(0, 0).amax()))
        for given, expected, size in compared
    )


def is_close(actual: Tensor, expected: Tensor, part: float, roundings: float) -> bool:
    """Whether they differ by at most a part of the largest that is expected, and so many units of
    rounding."""
    eps = torch.finfo(actual.dtype).eps if actual.is_floating_point() else 0.0
    allowed = part * float(expected.abs().nan_to_num().amax()) + roundings * eps
    return torch.allclose(actual, expected, rtol=0, atol=allowed, equal_nan=True)
