"""An `nn.Module` as a `PyroModule` whose weights have a prior."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide.initialization import init_to_uniform
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.model.transforms import bijection

#: The key of a site's `infer` dict that says which module's weight it is: (module, name).
WEIGHT = "pyro_scale_weight"


def bayesianize(net: nn.Module, prior: Any = None) -> PyroModule:
    """A copy of a network that draws all its weights from a prior whenever it is called.

    Its sites are named as in `net.named_parameters()`.  Chains of a sampler start at the
    module's values (chain 0) and at `reset_parameters()` of it (the others); `init_to_module`
    starts all of them at the module's values.

    Args:
        net: any module; it is not changed.  Call `.eval()` first if it has dropout or BatchNorm.
        prior: a distribution of a scalar, which expands to each weight's shape; Normal(0, 1) by
            default, in which a weight is in the unit of its layer's input.

    Raises:
        ArgumentError: `net` is no module, or the prior is not of a scalar.
        ModelError: the module has no parameters.

    Example:
        >>> import torch, pyro.distributions as dist, pyro_scale as ps
        >>> net = ps.bayesianize(torch.nn.Linear(2, 1), prior=dist.Normal(0.0, 0.5))
        >>> sorted(name for name, _ in net.priors())
        ['bias', 'weight']
    """
    if not isinstance(net, nn.Module):
        raise ArgumentError(f"bayesianize takes an nn.Module, not {type(net).__name__}")
    prior = dist.Normal(0.0, 1.0) if prior is None else prior
    if not isinstance(prior, torch.distributions.Distribution):
        raise ArgumentError(f"prior={prior!r}: pass a distribution, such as dist.Normal(0.0, 1.0)")
    if prior.batch_shape or prior.event_shape:
        shape = list(prior.batch_shape + prior.event_shape)
        raise ArgumentError(
            f"the prior has shape {shape}: pass one of a scalar, which expands to each weight's "
            "shape"
        )
    if next(net.parameters(), None) is None:
        raise ModelError(f"{type(net).__name__} has no parameters to be Bayesian about")
    return BayesianModule(net, prior)


class BayesianModule(PyroModule):
    """What `bayesianize` returns."""

    def __init__(self, net: nn.Module, prior: Any):
        super().__init__()
        self.net = copy.deepcopy(net)
        self._prior = prior

    def priors(self) -> list[tuple[str, Any]]:
        """Each weight's name and prior."""
        return [
            (name, self._prior.expand(weight.shape).to_event(weight.dim()))
            for name, weight in self._net.named_parameters()
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the network with its weights drawn."""
        weights = {
            name: pyro.sample(
                self._pyro_get_fullname(name), prior, infer=cast(Any, {WEIGHT: (self, name)})
            )
            for name, prior in self.priors()
        }
        return torch.func.functional_call(self._net, weights, args, kwargs)

    def weights(self) -> dict[str, Tensor]:
        """The module's own weights."""
        return {name: weight.detach() for name, weight in self._net.named_parameters()}

    def reset_weights(self) -> dict[str, Tensor]:
        """Weights as `reset_parameters()` draws them; layers without it keep theirs."""
        net = copy.deepcopy(self._net)
        for module in net.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        return {name: weight.detach() for name, weight in net.named_parameters()}

    @property
    def _net(self) -> nn.Module:
        # reading self.net would make a pyro.param of every weight
        net = self._modules["net"]
        assert net is not None
        return net


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
