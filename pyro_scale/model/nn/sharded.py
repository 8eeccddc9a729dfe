"""Networks sharded over ranks by `fully_shard`, as a `PyroModule` whose weights have priors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_scale.core.exclusive import exclusive
from pyro_scale.distributed.shards import Shard
from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.model.init_strategies import WEIGHT
from pyro_scale.model.nn.priors import WeightPrior, prior_of_shard
from pyro_scale.model.sites import Site


class NetworkFoundError(Exception):
    """Raised inside of `looking` by a sharded network that a model calls, to end the model there.

    Args:
        network: the network that was called.
    """

    def __init__(self, network: ShardedModule):
        super().__init__("a sharded network")
        self.network = network


class ShardedModule(PyroModule):
    """A sharded network as a model: the result of `bayesianize` for a network with sharded weights.

    Each chosen weight is a site.  On each rank, the site's value is the rank's part of the weight,
    and its prior is the prior of that part.  A call writes the parts into the network and calls the
    network; all ranks have to call together.  With gradients enabled, the parts stay in the
    network, as the backward pass needs them; otherwise the former weights are restored.
    `backward()` leaves the likelihood's gradient in the network's parameters, where `fully_shard`
    puts it (see `gradients`), and not in the sites' values.

    Args:
        net: the network, which is not copied.
        prior: the user's `prior=`, as for `bayesianize`.
        names: names of the weights that have a prior; the other weights are frozen.

    Raises:
        ArgumentError: a weight is not sharded along its first dimension, or a prior is not the
            same for all elements of a weight.
    """

    #: All instances. If there are none, models need not be checked for calls of sharded networks.
    alive: ClassVar[weakref.WeakSet[ShardedModule]] = weakref.WeakSet()
    #: Whether calls end the model (`looking`), and whether they may have gradients (`stepping`).
    is_looked_for: ClassVar[bool] = False
    is_stepped: ClassVar[bool] = False

    def __init__(self, net: nn.Module, prior: WeightPrior, names: list[str]):
        super().__init__()
        self.net = net
        self._names = names
        for name, weight in net.named_parameters():
            weight.requires_grad_(name in set(names))
        self.shards = {name: Shard.from_weight(name, net.get_parameter(name)) for name in names}
        self._priors = {
            name: _checked(name, prior_of_shard(net, name, prior, local))
            for name, local in self._parts().items()
        }
        _check_padding(net, names)
        self.training = net.training
        ShardedModule.alive.add(self)

    def priors(self) -> dict[str, Any]:
        """The prior of this rank's part of each chosen weight, by the weight's name: distributions
        of the parts' shapes.
        """
        return dict(self._priors)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the network with this rank's parts of the chosen weights drawn as Pyro sample
        sites, and returns the network's output.

        Raises:
            ModelError: gradients are enabled outside of a sampler's step.
            NetworkFoundError: the call is inside of `looking`.
        """
        if ShardedModule.is_looked_for:
            raise NetworkFoundError(self)
        if torch.is_grad_enabled() and not ShardedModule.is_stepped:
            raise ModelError(
                "the network is sharded, so its gradients are nowhere as a whole: use run or step "
                "of BAOA, SGHMC, SGLD, IVON or MAP"
            )
        drawn = {
            name: pyro.sample(
                self._pyro_get_fullname(name), prior, infer=cast(Any, {WEIGHT: (self, name)})
            )
            for name, prior in self._priors.items()
        }
        with self._at(drawn):
            return self._net(*args, **kwargs)

    def weights(self) -> dict[str, Tensor]:
        """The present values of the chosen weights in the network (not draws), by name: copies of
        this rank's part of each.
        """
        return {name: part.detach().clone() for name, part in self._parts().items()}

    def reset_weights(self) -> dict[str, Tensor]:
        """Copies of this rank's parts of the chosen weights, by name, unchanged: initializers need
        a whole weight, which no rank has."""
        return self.weights()

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Overwrites this rank's parts of weights in the network.

        Args:
            values: new values of the parts, by the weight's name.
        """
        parts = self._parts()
        with torch.no_grad():
            for name, value in values.items():
                parts[name].copy_(value)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that `backward()` has left in the network's parameters: this rank's part of
        each, averaged over ranks, by the weight's name; zeros where there is none. Clears these
        gradients."""
        gradients = {}
        for name, part in self._parts().items():
            weight: Any = self._net.get_parameter(name)
            gradient = None if weight.grad is None else weight.grad.to_local()
            gradients[name] = torch.zeros_like(part) if gradient is None else gradient
            weight.grad = None
        return gradients

    def extra_repr(self) -> str:
        """The number of weights that have a prior, in all and on this rank, for `repr`."""
        bayesian = sum(shard.shape.numel() for shard in self.shards.values())
        local = sum(shard.local_shape.numel() for shard in self.shards.values())
        return f"weights: {bayesian:,} Bayesian, {local:,} of them on this rank"

    @contextlib.contextmanager
    def _at(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Context in which the network has these values as this rank's parts of its weights. The
        former weights are restored afterwards, except with gradients enabled: the backward pass
        needs the new ones."""
        before = None if torch.is_grad_enabled() else self.weights()
        self.write({name: value.detach() for name, value in values.items()})
        try:
            yield
        finally:
            if before is not None:
                self.write(before)

    def _parts(self) -> dict[str, Tensor]:
        """This rank's parts of the chosen weights by name, not copied: writing to them changes the
        network. Frees the whole weights that a call has gathered from other ranks."""
        for module in self._net.modules():
            reshard = getattr(module, "reshard", None)
            if callable(reshard):
                reshard()
        with torch.no_grad():
            return {n: cast(Any, self._net.get_parameter(n)).to_local() for n in self._names}

    @property
    def _net(self) -> nn.Module:
        # reading self.net would make a pyro.param of every weight
        net = self._modules["net"]
        assert net is not None
        return net


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Context in which a call of a sharded network raises `NetworkFoundError` and computes nothing:
    run a model inside it to find out whether it calls one, before any rank waits for another.
    """
    with exclusive:
        ShardedModule.is_looked_for = True
        try:
            yield
        finally:
            ShardedModule.is_looked_for = False


@contextlib.contextmanager
def stepping() -> Iterator[None]:
    """Context for a sampler's step, in which models may call sharded networks with gradients
    enabled. `backward()` then leaves the gradients in the networks' parameters, where
    `ShardedModule.gradients` reads them.
    """
    before, ShardedModule.is_stepped = ShardedModule.is_stepped, True
    try:
        yield
    finally:
        ShardedModule.is_stepped = before


def shards_of(sites: Mapping[str, Site]) -> dict[str, tuple[ShardedModule, str]]:
    """The sites that are parts of sharded weights: a dict from the site's name to (the sharded
    network, the weight's name in it)."""
    weights = {name: site.infer[WEIGHT] for name, site in sites.items() if WEIGHT in site.infer}
    return {name: pair for name, pair in weights.items() if isinstance(pair[0], ShardedModule)}


def _checked(name: str, prior: Any) -> Any:
    """The prior itself, if its support is all real numbers, so that unconstrained values are the
    weights.

    Raises:
        ArgumentError: the prior has another support.
    """
    if prior.support is not constraints.real and getattr(
        prior.support, "base_constraint", None
    ) not in (constraints.real,):
        raise ArgumentError(
            f"the prior of '{name}' is on {prior.support}: for a sharded network, it has to be on "
            "all real numbers"
        )
    return prior


def _check_padding(net: nn.Module, names: list[str]) -> None:
    for path, module in net.named_modules():
        name = f"{path}.weight".lstrip(".")
        is_padded = isinstance(module, nn.Embedding) and module.padding_idx is not None
        if is_padded and name in names:
            raise ArgumentError(
                f"'{name}' has a padding_idx, whose row is fixed, which sharded networks cannot "
                "do: leave the weight out with exclude=, or set padding_idx=None"
            )
