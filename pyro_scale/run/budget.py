"""The budget of a run: how many gradients of single rows of data it may compute, and how many
seconds it may take.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pyro_scale.core.validation import as_count
from pyro_scale.curvature.control_variates import ControlVariates
from pyro_scale.errors import ArgumentError
from pyro_scale.run.problem import Problem

#: Stages of a run that end at a part of its seconds.
Stage: TypeAlias = Literal["searches", "windows", "pilots", "draws"]
#: Passes through the data that a chain may take for each draw, if the user sets no budget; and the
#: least number of draws that this is computed for.
_PASSES_A_DRAW, _FEWEST_DRAWS = 200, 1_000
#: Where each stage of a run ends at the latest, as a part of the run's seconds. Checks of the draws
#: are left 20%.
_END: dict[Stage, float] = {"searches": 0.20, "windows": 0.40, "pilots": 0.55, "draws": 0.80}


@dataclass(frozen=True)
class Budget:
    """The work and the time that a run may take. Work is counted in gradients of single rows of
    data.

    Attributes:
        max_rows: largest number of gradients of single rows, of all chains together. None for a
            default: 200 passes through the data for each draw of each chain, and at least 200,000
            passes a chain.
        num_samples: number of draws of each chain.
        max_seconds: seconds from the start of the run; None for no limit.
        deadline: the end of these seconds on the monotonic clock; infinity without a limit.
        spent: number of gradients of single rows that have been computed so far.
    """

    max_rows: int | None
    num_samples: int
    max_seconds: float | None
    deadline: float
    spent: int = 0

    @classmethod
    def from_arguments(cls, max_rows: Any, num_samples: int, max_seconds: Any) -> Budget:
        """The budget of a run, from the arguments `max_rows`, `num_samples` and `max_seconds` of
        `Sampler.run` as the user passed them (None for a default, or no limit). The seconds count
        from this call.

        Raises:
            ArgumentError: `max_rows` is not a count, or `max_seconds` is not a positive number.
        """
        if max_rows is not None:
            max_rows = as_count("max_rows", max_rows)
        if max_seconds is None:
            return cls(max_rows, num_samples, None, math.inf)
        is_number = isinstance(max_seconds, int | float) and not isinstance(max_seconds, bool)
        if not is_number or not max_seconds > 0:
            raise ArgumentError(f"max_seconds={max_seconds!r}: pass a number of seconds above 0")
        deadline = time.monotonic() + max_seconds
        return cls(max_rows, num_samples, float(max_seconds), deadline)

    @property
    def is_over(self) -> bool:
        """Whether the seconds that the run may take have passed, by this process's clock; always
        False if there is no limit. The number of row gradients that are left is not considered."""
        return time.monotonic() > self.deadline

    def is_over_for(self, problem: Problem) -> bool:
        """True if the seconds that the run may take are over, by one process's clock. All
        processes of the problem must call this together, and get the same answer.
        """
        return self.max_seconds is not None and problem.broadcast(self.is_over, "the clock")

    @property
    def seconds_left(self) -> float:
        """The seconds that the run may still take, by this process's clock; at least 0, and
        infinite without a limit."""
        return max(0.0, self.deadline - time.monotonic())

    def until(self, stage: Stage, compile_seconds: float = 0.0) -> Budget:
        """A copy of the budget whose deadline is that of a stage: a fixed part of the run's seconds
        after its start. So seconds that a stage leaves go to the next ones, and to draws in the
        end. The limit on rows is that of the whole run.

        Args:
            stage: the stage.
            compile_seconds: time that compilation has taken so far, which is no stage's.
        """
        if self.max_seconds is None:
            return self
        of_stages = max(0.0, self.max_seconds - compile_seconds)
        return dataclasses.replace(self, deadline=self.deadline - (1 - _END[stage]) * of_stages)

    def after(self, passes: float, num_data: int) -> Budget:
        """A copy of the budget in which `passes` more passes through `num_data` rows of data are
        spent.
        """
        return dataclasses.replace(self, spent=self.spent + math.ceil(passes * num_data))

    def steps(self, problem: Problem) -> int:
        """The number of steps that each chain may still take before the budget of row gradients is
        used up; 0 if it is. The limit in seconds is not considered."""
        left = self.most_rows(problem) - self.spent
        return max(0, left) // (rows_a_step(problem) * len(problem.positions))

    def argument_for(self, problem: Problem, num_samples: float, steps: float) -> str:
        """The argument of a run, as text, with which each of its chains can take `steps` steps for
        `num_samples` draws, after what is spent: `max_rows` if the user set it, otherwise
        `num_samples`, with which the default grows."""
        rows = self.spent + steps * rows_a_step(problem) * len(problem.positions)
        if self.max_rows is not None:
            return f"max_rows={rounded_up(rows)}"
        rows_a_draw = self.most_rows(problem) / max(_FEWEST_DRAWS, self.num_samples)
        affordable = rows / rows_a_draw if rows > self.most_rows(problem) else 0
        return f"num_samples={rounded_up(max(num_samples, affordable))}"

    @property
    def of_tuning(self) -> Budget:
        """The budget from which tuning (the choice of step size, warm-up, thinning, ...) derives
        its limits: if the user set no number of rows, that of a run of 1,000 draws, whatever the
        number of draws is. A run that is later extended to more draws then makes the same choices.
        """
        if self.max_rows is not None:
            return self
        return dataclasses.replace(self, num_samples=_FEWEST_DRAWS)

    def most_rows(self, problem: Problem) -> int:
        """The number of gradients of single rows that all chains of the problem together may
        compute in the whole run, those that are spent already included: the user's `max_rows`, or a
        default."""
        if self.max_rows is not None:
            return self.max_rows
        passes = _PASSES_A_DRAW * max(_FEWEST_DRAWS, self.num_samples)
        rows = max(rows_a_step(problem), problem.log_posterior.num_data)
        return passes * len(problem.positions) * rows


def rounded_up(number: float) -> int:
    """The least integer of two digits and zeros that is not below a positive number: 1,300 for
    1,234."""
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def passes_of(problem: Problem, steps: int) -> float:
    """How many passes through all rows of the data the gradients of a run take, of all chains
    together; for reports of a run's cost.

    Args:
        problem: model, data and chains, which determine the rows of a step.
        steps: number of steps of each chain.
    """
    rows = len(problem.positions) * steps * rows_a_step(problem)
    return rows / problem.log_posterior.num_data


def rows_a_step(problem: Problem) -> int:
    """The number of gradients of single rows that one step of one chain computes, by which its cost
    is counted: the rows of a batch, times 2 or more with control variates."""
    density = problem.engine.density
    gradients = density.gradients_a_row if isinstance(density, ControlVariates) else 1
    return gradients * max(1, problem.data.batch_size or problem.log_posterior.num_data)
