"""An `nn.Module` as a `PyroModule` in which chosen weights have a prior."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, Self, cast, get_args

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pyro_scale.distributed.shards import is_sharded
from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.model.guards import describe
from pyro_scale.model.init_strategies import WEIGHT
from pyro_scale.model.nn.priors import WeightPrior, priors_of
from pyro_scale.model.nn.selection import Choice, select
from pyro_scale.model.nn.sharded import ShardedModule
from pyro_scale.model.program import call_with

#: What happens to the weights that have no prior.
Rest = Literal["frozen", "point"]


def bayesianize(
    net: nn.Module,
    prior: WeightPrior = "unit",
    include: Choice | Iterable[Choice] | None = None,
    exclude: Choice | Iterable[Choice] | None = None,
    rest: Rest = "frozen",
) -> BayesianModule | ShardedModule:
    """A copy of a network that draws chosen weights from a prior whenever it is called. Call it
    once in a model, outside of the data's plate.

    Its sites have the names of `net.named_parameters()`; tied weights are one site. Chain 0 of a
    sampler starts at the module's values, and other chains where `reset_parameters()` of its
    layers puts the chosen weights. `init_to_module` starts all chains at the module's values:
    use it for pretrained networks and their adapters.

    The copy has the network's mode (train or eval) and copies of its buffers. Call `.eval()` on
    either if there is dropout or BatchNorm: in train mode, both raise an error when the model first
    sees data. BatchNorm in train mode makes the likelihood of a row depend on the other rows of its
    batch; `replace_batchnorm` replaces it by a layer that does not.

    An Embedding's row at its `padding_idx` stays as it is: it has a prior like the others, but
    the network does not see its draws.

    A network that `torch.distributed.fsdp.fully_shard` has split among processes is not copied:
    it is changed itself, and each process draws its part of every weight. Its priors are the same
    for all elements of a weight, and other weights are frozen.

    Args:
        net: any module; it is not changed.
        prior: `"unit"`, Normal(0, 1) (the default: the scale of a weight is the unit of its
            layer's input); `"kaiming"`, Normal(0, sqrt(2 / fan in)) for matrices and kernels,
            Normal(1, 1) for the scales of normalization layers and Normal(0, 1) for the rest; a
            distribution of a scalar, which expands to each weight's shape (`weight_decay` gives
            the one that corresponds to an optimizer's weight decay); or a function of a weight's
            name and the weight that returns such a distribution, or one of the weight's shape.
        include: which weights: shell-style patterns of names or of names of modules (`"head"`,
            `"*.bias"`, `"*lora_*"`), modules or weights of `net`, classes of modules, or a list
            of these; all with `requires_grad` by default.
        exclude: which of the included weights are left out, in the same forms; None for none.
        rest: `"frozen"`, or `"point"` to estimate the other weights that have `requires_grad`
            along with the draws, as a `pyro.param`.

    Raises:
        ArgumentError: `net` is no module, no weight matches a choice, or the prior does not fit
            a weight.
        ModelError: a submodule cannot be made Bayesian; it is named.

    Examples:
        >>> import torch, pyro.distributions as dist, pyro_scale as ps
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> last_layer = ps.bayesianize(net, prior=dist.Normal(0.0, 0.5), include="2")
        >>> list(last_layer.priors())
        ['2.weight', '2.bias']
    """
    if not isinstance(net, nn.Module):
        raise ArgumentError(f"bayesianize takes an nn.Module, not {type(net).__name__}")
    wrapped = nn.DataParallel, nn.parallel.DistributedDataParallel
    for name, module in net.named_modules():
        if isinstance(module, wrapped):
            place = f"net.{name}" if name else "net"
            raise ArgumentError(
                f"{place} is a {type(module).__name__}, whose copies would not have the weights "
                f"that are drawn: pass {place}.module in its place"
            )
    if next(net.parameters(), None) is None:
        raise ModelError(f"{type(net).__name__} has no parameters to be Bayesian about")
    if rest not in get_args(Rest):
        raise ArgumentError(f"rest={rest!r}: pass one of {get_args(Rest)}")
    names = select(net, include, exclude)
    _check_layer(net, names)
    if any(is_sharded(weight) for weight in net.parameters()):
        if rest == "point":
            raise ArgumentError("rest='point': of a sharded network, the rest is frozen")
        return ShardedModule(net, prior, names)
    return BayesianModule(_copy_weights(net), prior, names, rest)


class BayesianModule(PyroModule):
    """A network that draws its chosen weights from their priors, as Pyro sample sites, whenever it
    is called: the result of `bayesianize`.

    Args:
        net: the network, which is used as it is and not copied.
        prior: the user's prior of the weights: a name, a distribution of a scalar, or a function of
            a weight's name and the weight (see `bayesianize`).
        names: names of the weights that have a prior.
        rest: what happens to the other weights: `"frozen"`, or `"point"` to estimate them along
            with the draws.
    """

    def __init__(self, net: nn.Module, prior: WeightPrior, names: list[str], rest: Rest):
        super().__init__()
        self.net = net
        self._prior, self._names = prior, names
        self._priors = priors_of(net, names, prior)
        others = {n: weight for n, weight in net.named_parameters() if n not in set(names)}
        for weight in others.values():
            weight.requires_grad_(rest == "point" and weight.requires_grad)
        self._points = [name for name, weight in others.items() if weight.requires_grad]
        self._padding = _padding_of(net, names)
        self.training = net.training  # its submodules are in modes of their own

    def priors(self) -> dict[str, Any]:
        """The prior of each chosen weight, by the weight's name: distributions of the weights'
        shapes.
        """
        return dict(self._priors)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the network with its chosen weights drawn as Pyro sample sites, and returns the
        network's output. A weight's padding row, if it has one, stays as it is."""
        drawn = {
            name: pyro.sample(
                self._pyro_get_fullname(name), prior, infer=cast(Any, {WEIGHT: (self, name)})
            )
            for name, prior in self._priors.items()
        }
        for name, row in self._padding.items():
            weight = self._weight(name).detach()
            padding = (torch.arange(len(weight), device=weight.device) == row)[:, None]
            drawn[name] = torch.where(padding, weight, drawn[name])
        points = {
            name: pyro.param(self._pyro_get_fullname(name), self._weight(name))
            for name in self._points
        }
        return call_with(self._net, drawn | points, args, kwargs)

    def weights(self) -> dict[str, Tensor]:
        """The present values of the chosen weights in the network itself (not draws), by name,
        detached: where chain 0 starts.
        """
        return {name: self._weight(name).detach() for name in self._names}

    def reset_weights(self) -> dict[str, Tensor]:
        """New starting values of the chosen weights, by name: drawn by the layers'
        `reset_parameters()`, or the network's own values for layers without that method. The
        network is not changed.
        """
        net = copy.deepcopy(self._net)
        for module in reversed(list(net.modules())):  # outer modules last, as they are built
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if callable(reset):
                _reset(module, reset)
        return {name: net.get_parameter(name).detach() for name in self._names}

    def extra_repr(self) -> str:
        """The numbers of weights that have a prior, are point-estimated, and are frozen, for
        `repr`.
        """
        sizes = {name: weight.numel() for name, weight in self._net.named_parameters()}
        bayesian, points = (sum(map(sizes.__getitem__, n)) for n in (self._names, self._points))
        frozen = sum(sizes.values()) - bayesian - points
        return f"weights: {bayesian:,} Bayesian, {points:,} points, {frozen:,} frozen"

    def _weight(self, name: str) -> Tensor:
        """The weight of this name in the network, or the tensor that `functional_call` has put in
        its place for the time of a call."""
        return operator.attrgetter(name)(self._net)

    @property
    def _net(self) -> nn.Module:
        # reading self.net would make a pyro.param of every weight
        net = self._modules["net"]
        assert net is not None
        return net

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Applies `fn` to the weights as `nn.Module` does (`.to`, `.double()`), and makes the
        priors anew for their device and dtype. Returns this module."""
        moved = super()._apply(fn, recurse)
        self._priors = priors_of(self._net, self._names, self._prior)
        return moved


def _reset(module: nn.Module, reset: Callable[[], object]) -> None:
    """Calls a module's `reset_parameters` such that parametrized weights are reset, too: the
    tensors that they are computed from are set to match.

    Args:
        module: a layer of a network, changed in place.
        reset: its method that draws new weights.
    """
    if not parametrize.is_parametrized(module):
        reset()
        return
    with torch.no_grad(), parametrize.cached():
        reset()
        names = list(cast(Any, module.parametrizations))
        computed = {name: getattr(module, name).clone() for name in names}
    with torch.no_grad():
        for name, value in computed.items():
            setattr(module, name, value)


def _check_layer(net: nn.Module, names: list[str]) -> None:
    """Raises for the first submodule whose weights cannot be drawn: a ScriptModule, a compiled
    network, a PyroModule, or weights without shape or values, among others.

    Args:
        net: the network.
        names: names of the weights that are to have a prior.

    Raises:
        ModelError: there is such a submodule, which the message names.
    """
    for path, module in net.named_modules():
        label = describe(path, module)
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{label} is a ScriptModule, which cannot be called with other weights: pass the "
                "nn.Module that it was made from"
            )
        if hasattr(module, "_orig_mod"):
            raise ModelError(
                f"{label} has been through torch.compile: pass the network before it (its "
                "_orig_mod); samplers compile the whole step by themselves"
            )
        weights = {
            f"{path}.{name}".lstrip("."): w for name, w in module.named_parameters(recurse=False)
        }
        if any(isinstance(w, nn.parameter.UninitializedParameter) for w in weights.values()):
            raise ModelError(f"{label} has no shapes yet: call the network on a batch first")
        if isinstance(module, PyroModule):
            raise ModelError(
                f"{label} is a PyroModule, which has its priors by PyroSample: bayesianize the "
                "plain networks in it, or call it in a model as it is"
            )
        chosen = {name: weight for name, weight in weights.items() if name in names}
        for name, weight in chosen.items():
            if not weight.is_floating_point() or weight.is_meta:
                kind = "has no values" if weight.is_meta else f"is of {weight.dtype}"
                raise ModelError(
                    f"{label}: weight '{name}' {kind}, and cannot have a prior; leave it out with "
                    "exclude=, or load it in floating point"
                )
        if chosen and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check_embedding(label, module)


def _check_embedding(label: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.max_norm is not None:
        raise ModelError(
            f"{label} has max_norm={module.max_norm}, which writes to its weights when it is "
            "called: set max_norm=None, or leave it out with exclude="
        )
    if module.sparse:
        raise ModelError(f"{label} has sparse gradients: set sparse=False")
    if module.scale_grad_by_freq:
        raise ModelError(
            f"{label} scales its gradient by the tokens' counts in a batch, which is the gradient "
            "of no density: set scale_grad_by_freq=False"
        )


def _copy_weights(net: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(net)
    except Exception as error:  # a module's own attributes may raise anything
        innermost_first = list(net.named_modules())[::-1]  # the network itself is the last
        culprit = next(describe(p, m) for p, m in innermost_first if not _can_be_copied(m))
        raise ModelError(
            f"{culprit} cannot be copied ({error}); of torch.nn.utils.weight_norm and "
            "spectral_norm, use those in torch.nn.utils.parametrizations"
        ) from error


def _can_be_copied(module: nn.Module) -> bool:
    try:
        copy.deepcopy(module)
    except Exception:
        return False
    return True


def _padding_of(net: nn.Module, names: list[str]) -> dict[str, int]:
    """A dict from the name of each chosen Embedding weight that has a `padding_idx` to that index:
    the weight's row there is not drawn and stays as it is. Tied weights are left out, and their
    `padding_idx` is set to None: the other module that shares the weight uses that row as an
    ordinary one, so the row has a gradient.
    """
    count = Counter(id(weight) for _, weight in net.named_parameters(remove_duplicate=False))
    paddings = {}
    for path, module in net.named_modules():
        name = f"{path}.weight".lstrip(".")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and name in names:
            row = module.padding_idx
            if count[id(module.weight)] > 1:
                module.padding_idx = None  # of the copy
            elif row is not None:
                paddings[name] = row
    return paddings
