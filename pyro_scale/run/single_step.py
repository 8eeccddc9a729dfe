"""Takes single steps with one chain, on minibatches that the caller passes (`begin` and `step` of a
sampler).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments, Model
from pyro_scale.data.open import open_data
from pyro_scale.data.sources import Data
from pyro_scale.engine.chains import Chains
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.executors import eager
from pyro_scale.engine.inputs import StepInputs
from pyro_scale.errors import DataError
from pyro_scale.run.problem import Problem, as_log_posterior, module_device


def batch_as_data(
    model: Model, num_data: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Data:
    """The data of a problem that consist of one minibatch, which a user passes to `step` or
    `begin`.

    Args:
        model: the user's model.
        num_data: N, the number of rows of the whole data; None if the model's plate gives it.
        args: the minibatch, as the model's positional arguments.
        kwargs: the model's keyword arguments.

    Raises:
        DataError: a tensor is a single value, beside others that are rows.
    """
    arguments = as_log_posterior(model, None).bind(args, kwargs)
    check_rows(arguments)
    return open_data(arguments, None, num_data, module_device(model))


def check_rows(arguments: Arguments) -> None:
    """Raises if a tensor has no dimension of rows although others have: it is a single row, and the
    columns of the others would count as rows.

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
    """A chain that is moved one step at a time, on minibatches that the caller passes.

    Args:
        problem: model and start of the one chain.
        kernel: the sampler's kernel, with its schedules of hyperparameters.
    """

    def __init__(self, problem: Problem, kernel: Any):
        self.problem, self._kernel = problem, kernel
        self._chains = Chains(problem.engine, problem.positions, kernel.values(0), problem.seed)

    def step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Draws, Mapping[str, Tensor], Arguments]:
        """Takes the next step of the chain.

        Args:
            args: a minibatch, as the model's positional arguments.
            kwargs: the model's keyword arguments.

        Returns:
            (The new state as one draw; hyperparameters by name, `[steps so far, ...]`, each with
            its present value at all of these steps; the minibatch, as arguments by name).

        Raises:
            DataError: the minibatch has no rows.
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
        values = {k: v.expand(count + 1, *v.shape[1:]) for k, v in values.items()}
        return draws, values, arguments
