"""Models on rows that have not been observed yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.rows import Arguments
from pyro_scale.model.program import Program
from pyro_scale.model.recorder import Simulator
from pyro_scale.model.sites import points_of_store


def observe_draws(program: Program, arguments: Arguments) -> tuple[Program, Arguments]:
    """(A model that takes observations beside its own arguments; both of them), the observations
    drawn from the prior by torch's generator: all sites whose shapes follow the rows.
    """
    count = rows.count(arguments) or 0
    others = torch.arange(count // 2) if count > 1 else torch.zeros(2 * count, dtype=torch.int64)
    with exclusive, torch.no_grad():
        here, elsewhere = (
            program.run(part, Simulator(store=points_of_store())).sites
            for part in (arguments, rows.take(arguments, others))
        )
    axes, drawn = {}, {}
    for name, site in here.items():
        if site.kind == "observed" and name in elsewhere:
            pairs = zip(site.value.shape, elsewhere[name].value.shape, strict=True)
            for axis in [axis for axis, (one, other) in enumerate(pairs) if one != other][:1]:
                axes[name], drawn[name] = axis, site.value.movedim(axis, 0).detach()

    def model(arguments: Arguments, observed: Mapping[str, Tensor]) -> Any:
        values = {name: value.movedim(0, axes[name]) for name, value in observed.items()}
        with poutine.condition(data=values):
            return rows.call(program.model, arguments)

    return Program(model), (arguments, drawn)
