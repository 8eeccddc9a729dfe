"""One chain of a network that is sharded over processes: each has some elements of its state.

A rank's position is its parts of the weights and all of the other latents, in the model's order.
Kernels are functions of elements, so they move it as any other position.  What ranks have to add
up, gradients over rows and log joints over elements, is in the density; and noise is drawn where
it is needed, as the numbers that the element has in a chain that one process moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import warn
from pyro_scale.data.batches import Batch
from pyro_scale.data.loaders import to_device
from pyro_scale.distributed.shards import Holders, Shard
from pyro_scale.engine.step import Engine
from pyro_scale.errors import ArgumentError, DataError, ModelWarning, NonFiniteError
from pyro_scale.kernels import BAOA, IVON, MAP, SGHMC, SGLD, Hyperparameters
from pyro_scale.model.init_strategies import init_to_module, uniform
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.model_info import model_warnings
from pyro_scale.model.nn.sharded import (
    NetworkFoundError,
    ShardedModule,
    looking,
    shards_of,
)
from pyro_scale.model.preflight import draw_latents
from pyro_scale.model.program import Program
from pyro_scale.rng.seeds import Purpose
from pyro_scale.rng.streams import ShardNoise
from pyro_scale.run.initialize import init_of, with_all_sites
from pyro_scale.run.sharded.density import ShardedDensity

#: Kernels that are functions of each element by itself.
ELEMENTWISE = SGLD, SGHMC, BAOA, IVON, MAP


def sharded_network(model: Any, arguments: Arguments) -> ShardedModule | None:
    """The first sharded network that a model calls, found without calling it; None where there is
    none, or the model fails before, as it then will again."""
    if not ShardedModule.alive:
        return None
    model = model.model if isinstance(model, LogPosterior) else model
    with own_generator(0), looking():
        try:
            draw_latents(Program(model), arguments, uniform, {})
        except NetworkFoundError as found:
            return found.network
        except Exception:
            return None
    return None


@dataclass(frozen=True)
class ShardedProblem:
    """What a chain of a sharded network starts from.

    Attributes:
        log_posterior: the model, understood.
        engine: moves the chain.
        holders: the ranks that have the network.
        shards: of the sites that are weights.
        position: where it starts, this rank's part, [D].
        seed: of the run.
    """

    log_posterior: LogPosterior
    engine: Engine
    holders: Holders
    shards: Mapping[str, Shard]
    position: Tensor
    seed: int

    @property
    def layout(self) -> Layout:
        """Of this rank's part of a position."""
        return self.engine.layout

    @property
    def weights(self) -> Mapping[str, tuple[ShardedModule, str]]:
        """The sites that are parts of weights: (the network, the weight's name in it)."""
        return shards_of(self.log_posterior.model_info.sites)

    def write(self, position: Tensor) -> None:
        """Puts a position into the networks."""
        params, networks = self.layout.unflatten(position.detach()), self.weights
        for module in {module for module, _ in networks.values()}:
            module.write({w: params[n] for n, (owner, w) in networks.items() if owner is module})

    def noise(self, purpose: Purpose, normals: int) -> ShardNoise:
        """Normals for this rank's latents."""
        places, size = [], 0
        for name in self.log_posterior.latents:
            shape = self.layout.shapes[self.layout.names.index(name)]
            shard = self.shards.get(name)
            places.append((size + (shard.first if shard else 0), shape.numel()))
            size += (shard.shape if shard else shape).numel()
        like = self.position
        shape_of_all = (normals, size)
        return ShardNoise(self.seed, shape_of_all, places, like.dtype, like.device, purpose)


def check_kernel(name: str, kernel: Hyperparameters) -> None:
    """Refuses methods that look at all elements at once.

    Raises:
        ArgumentError: it names those that do not.
    """
    if not isinstance(kernel, ELEMENTWISE):
        names = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise ArgumentError(f"{name} does not move sharded networks: use one of {names}")
    for hyper, value in kernel.hyperparameters().items():
        if isinstance(value, Mapping) and any(isinstance(each, Tensor) for each in value.values()):
            raise ArgumentError(
                f"{hyper}: of a sharded network, pass a number a site, not a tensor"
            )


def prepare(
    log_posterior: LogPosterior,
    network: ShardedModule,
    batch: Arguments,
    kernel: Hyperparameters,
    init_strategy: Any,
    seed: int | None,
    choose_seed: Any,
) -> ShardedProblem:
    """Understands a model on a batch, of which ranks may have different rows.

    Raises:
        ModelError, SiteError, PlateError: what is wrong with the model.
        ArgumentError: starts of weights, a model that takes its rows by itself.
    """
    holders = Holders.of(network.shards.values())
    seed = holders.of_first(choose_seed(seed))
    first = _agree_on_rows(holders, batch)
    init = init_of(log_posterior, _check_starts(init_strategy, network), 0, 1)
    log_posterior.prepare(first, init, seed)
    info = log_posterior.model_info
    if holders.is_first:
        for warning in model_warnings(info):
            warn(ModelWarning, warning)
    if info.own_plate is not None:
        raise ArgumentError(
            f"the model subsamples by itself in plate '{info.own_plate}', so ranks cannot take "
            "parts of its batches: pass batches, and write the plate with subsample_size=len(x)"
        )
    weights = shards_of(info.sites)
    shards = {name: module.shards[weight] for name, (module, weight) in weights.items()}
    Holders.of(shards.values())  # of all networks that the model calls
    start = log_posterior.start(first, seed, init=init)
    params = {name: point.unconstrained for name, point in log_posterior.points.items()}
    replicated = {n: v.cpu() for n, v in (start | params).items() if n not in shards}
    like = next(iter(start[name] for name in shards))
    replicated = {n: v.to(like.device) for n, v in holders.of_first(replicated).items()}
    values = {n: start[n] if n in shards else replicated[n] for n in (*start, *params)}
    layout = Layout.from_tensors(values)
    counted = {
        n: torch.full_like(v, 1 / (holders.copies if n in shards else holders.rows.world))
        for n, v in values.items()
    }
    density = ShardedDensity(
        log_posterior,
        holders,
        weights,
        layout.flatten(counted).double(),
        rows.take(first, slice(0, 1)),
    )
    kernel = with_all_sites(kernel, layout)
    engine = Engine(kernel, density, layout, Layout.from_tensors(start).size, vectorized=False)
    return ShardedProblem(log_posterior, engine, holders, shards, layout.flatten(values), seed)


class ShardedChain:
    """A chain that all ranks move together, a step at a time.

    Args:
        problem: what it starts from.
        kernel: the method's, with its schedules.
    """

    def __init__(self, problem: ShardedProblem, kernel: Hyperparameters):
        self.problem, self._kernel = problem, kernel
        self._noise = problem.noise(Purpose.NOISE, kernel.normals)  # type: ignore[attr-defined]
        momentum = problem.noise(Purpose.MOMENTUM, 1).at(0)
        self.state: Any = problem.engine.init(problem.position[None], momentum, kernel.values(0))
        self.count = 0

    def step(self, arguments: Arguments) -> float:
        """Takes a step on this rank's rows of a batch; the estimate of the log joint before it.

        Raises:
            NonFiniteError: on all ranks, if the log joint or its gradient is so on any; the state
                stays as it was.
        """
        noise, values = self._noise.at(self.count)[None], self._kernel.values(self.count)
        arguments = to_device(arguments, self.problem.holders.device)
        batch = Batch(arguments, per_chain=False)
        state, evaluation = self.problem.engine.step(self.state, batch, noise, values)
        log_joint = float(evaluation.log_joint[0])
        if not torch.isfinite(torch.tensor(log_joint)):
            raise NonFiniteError(
                f"the state, the log joint or its gradient became NaN or infinite at step "
                f"{self.count}: lower lr, or scale the data"
            )
        self.state, self.count = state, self.count + 1
        self.problem.write(self.state.position[0])
        return log_joint


def part_of(holders: Holders, batch: Arguments) -> Arguments:
    """This rank's rows of a batch that all ranks have; there may be none."""
    count = rows.count(batch)
    if count is None:
        raise DataError("the data are no rows, which ranks could share out: pass tensors of rows")
    rank, world = holders.rows.rank, holders.rows.world
    return rows.take(batch, slice(rank * count // world, (rank + 1) * count // world))


def _agree_on_rows(holders: Holders, batch: Arguments) -> Arguments:
    """The batch of the first rank that has the most rows, for all of them."""
    counts = holders.of_all(rows.count(batch), "how many rows they have")
    if None in counts or not any(counts):
        raise DataError("the data are no rows, which ranks could share out: pass tensors of rows")
    place = counts.index(max(counts))
    mine = to_device(batch, torch.device("cpu")) if holders.rows.rank == place else None
    return to_device(holders.of_all(mine, "the first batch")[place], holders.device)


def _check_starts(init_strategy: Any, network: ShardedModule) -> Any:
    """Weights start where they are: what is drawn would depend on how they are shared out."""
    is_of_others = isinstance(init_strategy, dict) and not any(
        name.endswith(weight) for name in init_strategy for weight in network.shards
    )
    if init_strategy is None or init_strategy is init_to_module or is_of_others:
        return init_strategy
    raise ArgumentError(
        "init_strategy: the weights of a sharded network start at its own values: leave it out, or "
        "pass a dict of other sites"
    )
