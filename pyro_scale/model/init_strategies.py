"""Where latents start: functions from a site to a constrained value, in Pyro's manner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.infer.autoguide.initialization import init_to_uniform
from torch import Tensor

from pyro_scale.model.transforms import bijection

#: An initialization in Pyro's manner: site -> constrained value.
InitFunction = Callable[[Any], Tensor]

#: The key of a site's `infer` dict that marks the weight of a network: (module, the weight's name
#: in it). The module has `weights()`, its values by name, and `reset_weights()`, new draws of them.
WEIGHT = "pyro_scale_weight"


def uniform(site: Any) -> Tensor:
    """A site's constrained starting value, uniform in (-2, 2) in unconstrained space; for improper
    priors, too."""
    fn = site["fn"]
    if not isinstance(fn, dist.ImproperUniform):
        return init_to_uniform(site)
    transform = bijection(fn.support)
    shape = transform.inverse_shape(fn.batch_shape + fn.event_shape)
    return transform(4 * torch.rand(shape) - 2)


def init_to_module(site: Any = None) -> Any:
    """An initialization strategy: weights of bayesianized modules start at the module's values, and
    other sites uniformly in (-2, 2) in unconstrained space. Called with a site, returns the site's
    constrained value; called without one, returns itself."""
    if site is None:
        return init_to_module
    if WEIGHT in site["infer"]:
        module, name = site["infer"][WEIGHT]
        return module.weights()[name].clone()
    return uniform(site)


def init_to_reset(fallback: InitFunction) -> InitFunction:
    """An initialization strategy: weights of bayesianized modules start at new draws by the layers'
    `reset_parameters()`, and other sites where the strategy `fallback` puts them. The weights of
    one module are drawn together, once for each call of `init_to_reset`."""
    drawn: dict[int, dict[str, Tensor]] = {}

    def init(site: Any) -> Tensor:
        if WEIGHT not in site["infer"]:
            return fallback(site)
        module, name = site["infer"][WEIGHT]
        if id(module) not in drawn:
            drawn[id(module)] = module.reset_weights()
        return drawn[id(module)][name]

    return init
