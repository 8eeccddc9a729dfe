"""A network's outputs as the logits of classes: the model of all classifiers measured here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
from torch import Tensor


def classifier(net: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The Pyro model of a network's logits; what it predicts has a site `probs`."""

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = net(x)
        with pyro.plate("data", len(x)):
            pyro.deterministic("probs", logits.softmax(-1), event_dim=1)
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return model
