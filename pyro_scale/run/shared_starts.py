"""Superchains: groups of chains that share a start."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.validation import as_count
from pyro_scale.errors import ArgumentError
from pyro_scale.run.problem import Problem


def check_superchains(superchains: Any, num_chains: int, init_strategy: Any) -> int:
    """How many groups of chains share a start.

    Raises:
        ArgumentError: they do not divide the chains into groups of two or more; a dict of starts
            that differ within a group.
    """
    superchains = as_count("superchains", superchains, least=2)
    each, left = divmod(num_chains, superchains)
    if left or each < 2:
        raise ArgumentError(
            f"superchains={superchains} of num_chains={num_chains}: each needs as many chains as "
            f"the others, two or more; pass num_chains={superchains * max(2, each + bool(left))}"
        )
    if isinstance(init_strategy, dict):
        for name, value in init_strategy.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (num_chains,):
                continue  # which is refused with the model's own shapes
            starts = value.unflatten(0, (superchains, each))
            if not torch.equal(starts, starts[:, :1].expand_as(starts)):
                raise ArgumentError(
                    f"init_strategy['{name}']: chains of a superchain share their start, but these "
                    f"differ; pass each {each} times, starts.repeat_interleave({each}, dim=0)"
                )
    return superchains


def with_shared_starts(problem: Problem, superchains: int) -> Problem:
    """The problem whose chains start where the first of their superchain does."""
    each = len(problem.positions) // superchains
    first = problem.positions[::each]
    return dataclasses.replace(problem, positions=first.repeat_interleave(each, dim=0))
