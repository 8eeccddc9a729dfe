"""The extended Kalman filter's steps as a compiled loop."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.compile.compiled import compile_loop
from pyro_scale.compile.cpp_loop import Inputs, Loop
from pyro_scale.compile.trace import trace
from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.rows import Arguments, Fixed
from pyro_scale.engine.executors import IS_FROZEN, is_close
from pyro_scale.engine.reuse import recall
from pyro_scale.kernels.ekf import EKFState

#: (State, lr, drift [D], a batch) -> (the state after it, its log likelihood).
Step: TypeAlias = Callable[[EKFState, Tensor, Tensor, Arguments], tuple[EKFState, Tensor]]

#: How far from a run's first state a step is compared with the loop, in sds.
_ELSEWHERE = 0.1
#: The most they may differ by: a part of the step, and roundings of what it comes from.
_TOLERANCE, _ROUNDINGS = 1e-3, 1e3
#: The same of the program of an earlier run, in roundings.
_OF_THE_SAME = 32


@dataclass(frozen=True)
class Program:
    """Steps on batches like one, in C++.

    Attributes:
        like: the batch.
        facts: what else the steps are for.
        loop: over steps whose state is (mean and sd `[1, 2 D]`, which are kept; the precision's
            elements, `[1, ...]`).
        constants: what a step reads besides its arguments.
        recall: gives them once more, or None where they have changed.
    """

    like: Arguments
    facts: Hashable
    loop: Loop
    constants: Sequence[Tensor]
    recall: Callable[[], list[Tensor] | None]

    def run(
        self, state: EKFState, lr: Tensor, drift: Tensor, batches: Arguments
    ) -> tuple[EKFState, Tensor, Tensor]:
        """(The state after some batches, whose rows are `[steps, B, ...]`; means and sds after each
        of them, `[steps, 2 D]`; their log likelihoods, `[steps]`)."""
        moved, path, log_lik, _ = self.loop.run(
            [leaf[None] for leaf in _leaves(state)],
            [leaf[None] for leaf in rows.leaves(batches)],
            [Fixed(lr), Fixed(drift)],
            self.constants,
            left=1,
            every=1,
            threads=1,
        )
        (mean_and_sd,), (precision,) = moved
        after = _state(mean_and_sd, precision, state.precision.shape)
        return after, path[0, :, 0], log_lik[0, :, 0]


class LastProgram:
    """The last program of an object, which serves its next run on batches alike."""

    def __init__(self) -> None:
        self._kept: Program | None = None

    def __reduce__(self) -> Any:
        return LastProgram, ()  # a copy compiles its own

    def like(self, batch: Arguments) -> Program | None:
        """The last one, if it takes such batches."""
        kept = self._kept
        return kept if kept is not None and rows.are_alike(kept.like, batch) else None

    def compile(
        self,
        step: Step,
        facts: Hashable,
        state: EKFState,
        lr: Tensor,
        drift: Tensor,
        batches: Arguments,
    ) -> None:
        """Has a program of steps from a state on: the last one, if it takes them, or a new one.

        Args:
            step: what is compiled.
            facts: what differs where a step of another run is another one.
            state, lr, drift: as at the first step.
            batches: the first ones, whose rows are `[steps, B, ...]`.

        Raises:
            RuntimeError: it computes something else than the step.
            Exception: whatever the model raises when it cannot be traced, and the compiler.
        """
        inputs, like = (state, lr, drift, batches), rows.take(batches, 0)
        last, self._kept = self.like(like), None
        if last is not None and last.facts == facts and (constants := last.recall()) is not None:
            again = dataclasses.replace(last, constants=constants)
            part = _OF_THE_SAME * torch.finfo(state.mean.dtype).eps
            with contextlib.suppress(RuntimeError):  # a matrix that cannot be factorized there
                if _agree(again, step, *inputs, part, _OF_THE_SAME):
                    self._kept = again
                    return
        program = _compile(step, facts, state, lr, drift, like)
        if not _agree(program, step, *inputs, _TOLERANCE, _ROUNDINGS):
            raise RuntimeError(IS_FROZEN)
        self._kept = program


def _compile(
    step: Step, facts: Hashable, state: EKFState, lr: Tensor, drift: Tensor, like: Arguments
) -> Program:
    leaves, structure = pytree.tree_flatten(like)
    places = [place for place, leaf in enumerate(leaves) if rows.is_rows(leaf)]

    def flat(mean_and_sd: Tensor, precision: Tensor, *others: Tensor) -> list[Tensor]:
        *given, lr, drift = others
        filled = list(leaves)
        for place, leaf in zip(places, given, strict=True):
            filled[place] = leaf
        before = _state(mean_and_sd, precision, state.precision.shape)
        after, log_lik = step(before, lr, drift, pytree.tree_unflatten(filled, structure))
        return [*_leaves(after), log_lik[None]]

    examples = [*_leaves(state), *rows.leaves(like), lr, drift]
    own = [each.detach().clone(memory_format=torch.contiguous_format) for each in examples]
    kinds = ("state", "state", *("per step" for _ in places), "fixed", "fixed")
    with exclusive:
        graph = trace(flat, own)
        loop = compile_loop(graph, Inputs(kinds, position=0), threads=None)
    constants = [constant.tensor for constant in graph.constants]
    return Program(like, facts, loop, constants, recall(graph.constants))


def _agree(
    program: Program,
    step: Step,
    state: EKFState,
    lr: Tensor,
    drift: Tensor,
    batches: Arguments,
    part: float,
    roundings: float,
) -> bool:
    """Whether a program takes the step, at another state, and mostly on another batch, than it was
    traced at: what leaves torch on the way (NumPy, lists) is not traced but frozen."""
    signs = torch.linspace(-1, 1, len(state.mean)).to(state.mean)
    state = state._replace(mean=state.mean + _ELSEWHERE * signs * state.sd)
    last = rows.take(batches, slice(-1, None))
    moved, _, log_lik = program.run(state, lr, drift, last)
    expected, log_lik_expected = step(state, lr, drift, rows.take(last, 0))
    compared = [(log_lik[0], log_lik_expected, log_lik_expected)]
    compared += [(a - b, e - b, b) for a, e, b in zip(moved, expected, state, strict=True)]
    return all(
        is_close(given, wanted, part, roundings * float(size.abs().max()))
        for given, wanted, size in compared
    )


def _leaves(state: EKFState) -> list[Tensor]:
    """A state as the loop has it."""
    return [torch.cat([state.mean, state.sd])[None], state.precision.reshape(1, -1)]


def _state(mean_and_sd: Tensor, precision: Tensor, shape: torch.Size) -> EKFState:
    mean, sd = mean_and_sd[0].chunk(2)
    return EKFState(mean, sd, precision.reshape(shape))
