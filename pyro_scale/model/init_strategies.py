"""Where latents start: functions from a site to a constrained value, as Pyro's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pyro.distributions as dist
import torch
from pyro.infer.autoguide.initialization import init_to_uniform
from torch import Tensor

from pyro_scale.model.transforms import bijection

#: The key of a site's `infer` dict that says which weight it is: (what has it, its name there).
WEIGHT = "pyro_scale_weight"


class Weights(Protocol):
    """What has weights to start from."""

    def weights(self) -> dict[str, Tensor]:
        """Its own."""
        ...

    def reset_weights(self) -> dict[str, Tensor]:
        """Others, drawn anew."""
        ...


def uniform(site: Any) -> Tensor:
    """Uniform in (-2, 2), unconstrained; for improper priors too, which cannot be drawn from."""
    fn = site["fn"]
    if not isinstance(fn, dist.ImproperUniform):
        return init_to_uniform(site)
    transform = bijection(fn.support)
    shape = transform.inverse_shape(fn.batch_shape + fn.event_shape)
    return transform(4 * torch.rand(shape) - 2)


def init_to_module(site: Any = None) -> Any:
    """An init strategy: weights of bayesianized modules start at the module's values.

    Other sites start uniformly in (-2, 2), unconstrained.
    """
    if site is None:
        return init_to_module
    if WEIGHT in site["infer"]:
        module, name = site["infer"][WEIGHT]
        return module.weights()[name].clone()
    return uniform(site)


def init_to_reset(fallback: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Weights of bayesianized modules start where `reset_parameters()` puts them."""
    drawn: dict[int, dict[str, Tensor]] = {}

    def init(site: Any) -> Tensor:
        if WEIGHT not in site["infer"]:
            return fallback(site)
        module, name = site["infer"][WEIGHT]
        if id(module) not in drawn:
            drawn[id(module)] = module.reset_weights()
        return drawn[id(module)][name]

    return init
