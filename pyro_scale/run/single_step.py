"""Single steps of one chain, on batches that the caller passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.data.open import open_data
from pyro_scale.data.sources import Data
from pyro_scale.engine.chains import Chains
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.executors import eager
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.errors import DataError
from pyro_scale.run.problem import Problem, as_log_posterior, module_device


def batch_as_data(
    model: Any, num_data: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Data:
    """A batch that a user passes to `step` or `begin`, as the data of a problem.

    Args:
        model: the user's.
        num_data: N; None if the model says it.
        args: the batch, as the model's own arguments.
        kwargs: likewise.

    Raises:
        DataError: a tensor is a single value, beside others that are rows.
    """
    arguments = as_log_posterior(model, None).bind(args, kwargs)
    check_rows(arguments)
    return open_data(arguments, None, num_data, module_device(model))


def check_rows(arguments: Arguments) -> None:
    """Checks that no tensor is a single row without the dimension of rows: the columns of others
    would count as rows.

    Raises:
        DataError: a tensor is a single value, beside others that are rows.
    """
    if rows.count(arguments) is not None:
        for name, leaf in rows.named_leaves(arguments):
            if isinstance(leaf, Tensor) and leaf.dim() == 0:
                raise DataError(
                    f"argument {name} is a single value, the others are rows: one row is "
                    "step(x[i : i + 1], y[i : i + 1]); bind constants with functools.partial",
                    code="not-rows",
                )


class Stepping:
    """A chain that is moved one step at a time, on batches that the caller passes.

    Args:
        problem: of one chain.
        kernel: the method's kernel, with its schedules.
    """

    def __init__(self, problem: Problem, kernel: Any):
        self.problem, self._kernel = problem, kernel
        self._chains = Chains(problem.engine, problem.positions, kernel.values(0), problem.seed)

    def step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Draws, Mapping[str, Tensor]]:
        """Takes the next step.

        Args:
            args: a batch, as the model's own arguments.
            kwargs: likewise.

        Returns:
            (the state as one draw, the hyperparameters' values at all steps so far).

        Raises:
            DataError: the batch has no rows.
        """
        problem, chains = self.problem, self._chains
        arguments = problem.log_posterior.bind(args, kwargs)
        check_rows(arguments)
        if rows.count(arguments) == 0:
            raise DataError("step: the batch has no rows; leave it out")
        count, batches = chains.count, problem.batches_of(args, kwargs)
        values = {name: value[None] for name, value in self._kernel.values(count).items()}
        noise = chains.noise.span(count, count + 1)
        columns = StepInputs(count, values, noise, batches.take(count, count + 1))
        steps = Steps(num_samples=1, warmup_steps=count)
        draws = Draws.allocate(problem.positions, steps)
        chains.recent.forget()  # earlier steps had other batches
        chains.move(eager(problem.engine, batches), batches, columns, steps, draws)
        draws.failures, draws.last_steps = list(chains.failures), chains.last_steps
        draws.state, draws.num_steps = chains.state, count + 1
        return draws, {k: v.expand(count + 1, *v.shape[1:]) for k, v in values.items()}
