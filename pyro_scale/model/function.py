"""A plain function as a Pyro model: flat priors, and one factor that is the whole density."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import pyro
import torch
from pyro.distributions import ImproperUniform, constraints
from torch import Tensor

from pyro_scale.errors import ModelError
from pyro_scale.model.init_strategies import WEIGHT


class _Start:
    """Where chains start: the values that came with the function, for all of them."""

    def __init__(self, values: Mapping[str, Tensor]):
        self._values = {name: torch.as_tensor(value).detach() for name, value in values.items()}

    def weights(self) -> dict[str, Tensor]:
        return self._values

    reset_weights = weights


def function_model(
    fn: Callable[[dict[str, Tensor], Any], Tensor], params: Mapping[str, Tensor], num_data: int
) -> Callable[..., None]:
    """The model of a log posterior per datum; its arguments are the function's batch."""
    start = _Start(params)

    def model(*args: Any, **kwargs: Any) -> None:
        values = {
            name: pyro.sample(
                name,
                ImproperUniform(constraints.real, (), value.shape),
                infer=cast(Any, {WEIGHT: (start, name)}),
            )
            for name, value in start.weights().items()
        }
        density = fn(values, kwargs or args)
        if not isinstance(density, Tensor) or density.dim() or not density.is_floating_point():
            got = f"shape {list(density.shape)}" if isinstance(density, Tensor) else repr(density)
            raise ModelError(
                f"the function returned {got}: it must return the log posterior per datum, a "
                "scalar tensor (the mean over the batch's rows of the log likelihood, plus the "
                "log prior over N)"
            )
        pyro.factor("log_posterior", num_data * density)

    return model
