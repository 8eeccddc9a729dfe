"""Methods on sharded networks: what their `run` and `step` hand over to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.errors import ArgumentError
from pyro_scale.kernels import IVON, Kernel
from pyro_scale.model.nn.sharded import ShardedModule
from pyro_scale.posterior.sharded import ShardedDraws
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.problem import as_log_posterior
from pyro_scale.run.sharded import (
    ShardedChain,
    check_kernel,
    prepare,
    sharded_network,
)

#: What is said where something would need whole weights.
WHOLE_NOWHERE = (
    "the network is sharded, so no process has whole draws of it: there are get_samples(), whose "
    "weights are DTensors, and predict()"
)


class ShardedSteps:
    """A chain of a sharded network that is moved step by step, and its latest draw."""

    def __init__(self, chain: ShardedChain):
        self.chain = chain

    @property
    def draws(self) -> ShardedDraws:
        """The state as a draw, or as a fit."""
        return draws_of(self.chain, self.chain.state.position.detach().cpu(), torch.empty(0))


def step_sharded(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """A step of a model with a sharded network on a batch of this rank's own; None for others.

    Raises:
        ArgumentError: a method or an option that sharded networks do not have.
    """
    arguments = as_log_posterior(method.model, None).bind(args, kwargs)
    if method._sharded is None:
        network = None if method._stepping else sharded_network(method.model, arguments)
        if network is None:
            return None
        method._sharded = ShardedSteps(start(method, network, arguments, None))
    return method._sharded.chain.step(arguments)


@without_vmap_warnings()
def start(
    method: Any, network: ShardedModule, arguments: Arguments, seed: int | None
) -> ShardedChain:
    """A method's chain, before its first step.

    Raises:
        ArgumentError: a method or an option that sharded networks do not have.
    """
    name, kernel = type(method).__name__, method.kernel
    check_kernel(name, kernel)
    if isinstance(kernel, Kernel):
        _check_settings(name, method._settings)
    elif method.structure != "diag":
        raise ArgumentError(
            f"structure={method.structure!r}: {name} has 'diag' of sharded networks"
        )
    log_posterior = as_log_posterior(method.model, method._num_data)
    if not isinstance(kernel, Kernel):
        log_posterior = method._target(log_posterior)
    problem = prepare(
        log_posterior, network, arguments, kernel, method._init_strategy, seed, choose_seed
    )
    return ShardedChain(problem, problem.engine.kernel)


def draws_of(chain: ShardedChain, positions: Tensor, log_joint: Tensor) -> ShardedDraws:
    """What a chain leaves."""
    problem, spread = chain.problem, None
    if isinstance(problem.engine.kernel, IVON):
        values = problem.engine.kernel.at(max(0, chain.count - 1), problem.log_posterior.num_data)
        curvature = chain.state.curvature[0, : problem.engine.num_latents]
        spread = torch.sqrt(values["temperature"].to(curvature) / curvature).cpu()
    return ShardedDraws(problem, positions, log_joint, spread)


def predict_sharded(
    draws: ShardedDraws,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_samples: int | None,
    return_sites: Sequence[str] | None,
    others: dict[str, Any],
) -> dict[str, Tensor]:
    """What `predict` gives of a sharded network.

    Raises:
        ArgumentError: an option that it does not have there.
    """
    for name, value in others.items():
        if value is not None:
            raise ArgumentError(
                f"{name}={value!r}: predict has none of a sharded network: leave it out, and pass "
                "some rows at a time"
            )
    arguments = draws.problem.log_posterior.bind(args, kwargs)
    return draws.predict(arguments, num_samples, return_sites)


def _check_settings(name: str, settings: Any) -> None:
    for what in sorted(settings.chosen):
        raise ArgumentError(
            f"{what}='auto': {name} chooses it by gradients of all rows and by trial runs, which a "
            f"sharded network has not: pass a number, such as {what}=0.01"
        )
    for what in ("precondition", "control_variates", "subtract_noise"):
        if getattr(settings, what):
            raise ArgumentError(f"{what}: {name} has none for sharded networks: leave it out")
