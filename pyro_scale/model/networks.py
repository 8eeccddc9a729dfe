"""What is passed as a model and is none: networks, classes, guides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyro.contrib.easyguide import EasyGuide
from pyro.infer.autoguide import AutoGuide
from torch import nn

from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.model.init_strategies import WEIGHT
from pyro_scale.model.sites import Site

#: Packages whose modules have no Pyro statement.
_OF_NETWORKS = {"torch", "torchvision", "torchaudio", "timm", "transformers"}

_THREE_LINES = """
    net = ps.bayesianize(net)
    def model(x, y=None):
        return pyro.sample("y", dist.Normal(net(x), 1.0).to_event(1), obs=y)"""


def check_model(model: Any) -> None:
    """Refuses what cannot be a model, whatever it is called with.

    Raises:
        ArgumentError: it is not callable; a class, a guide.
        ModelError: a network.
    """
    if not callable(model):
        raise ArgumentError(
            f"model={model!r} is not callable: pass a Pyro model, a PyroModule or a LogPosterior"
        )
    if isinstance(model, type) and any("__call__" in vars(base) for base in model.__mro__):
        raise ArgumentError(
            f"model={model.__name__} is a class: pass an instance of it, {model.__name__}(...)"
        )
    if isinstance(model, AutoGuide | EasyGuide):
        raise ArgumentError(
            f"model is a guide ({type(model).__name__}): pass the model that it is of; VI makes a "
            "guide of its own, by structure="
        )
    if isinstance(model, nn.Module) and all(map(_is_plain, model.modules())):
        raise network_error(model)


def _is_plain(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in _OF_NETWORKS


def is_bare(sites: Iterable[Site]) -> bool:
    """Whether a run has no site but weights of bayesianized networks."""
    return all(WEIGHT in site.infer for site in sites)


def network_error(net: nn.Module) -> ModelError:
    """Of a network in a model's place."""
    net = getattr(net, "_orig_mod", net)
    return ModelError(
        f"{type(net).__name__} is a network: ps.bayesianize(net), and a model that observes its "
        f"output, such as{_THREE_LINES}",
        code="no-observation",
    )
