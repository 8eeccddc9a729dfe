"""The chain of a sharded network (whose weights are divided among processes): its start, its steps,
its run.

A rank's position is a vector of its parts of the weights and of all other latents, in the model's
order. Samplers' kernels compute each element independently, so they move such a vector like any
other. Sums over ranks (of gradients over rows of data, of log joints over elements) are computed by
the density. The random numbers of an element are the same as in a chain that one process moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments, Model
from pyro_scale.core.warn import warn
from pyro_scale.data.batches import Batch, Batches, batches_from
from pyro_scale.data.loaders import to_device
from pyro_scale.data.sources import Data
from pyro_scale.distributed.shards import common_mesh
from pyro_scale.distributed.workers import Workers
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.step import Engine
from pyro_scale.errors import ArgumentError, DataError, ModelWarning, NonFiniteError
from pyro_scale.kernels import BAOA, IVON, MAP, SGHMC, SGLD, Hyperparameters
from pyro_scale.model.init_strategies import init_to_module, uniform
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.model_info import model_warnings
from pyro_scale.model.nn.sharded import NetworkFoundError, ShardedModule, looking, shards_of
from pyro_scale.model.other_batches import check_batch, is_checked
from pyro_scale.model.program import Program
from pyro_scale.rng.seeds import Purpose
from pyro_scale.rng.streams import ShardNoise
from pyro_scale.run.initialize import ChainStarts, init_of, with_all_sites
from pyro_scale.run.problem import NO_ROWS, OTHER_BATCHES, Problem
from pyro_scale.run.sharded.density import ShardedDensity

if TYPE_CHECKING:
    from pyro_scale.run.sharded.checkpoint import ShardedCheckpoints

#: Kernels that compute each element of a position by itself.
ELEMENTWISE = SGLD, SGHMC, BAOA, IVON, MAP


def sharded_network(model: Model, arguments: Arguments) -> ShardedModule | None:
    """The first sharded network that a model calls; None if it calls none, or fails before.

    The model is run with these arguments until it calls a sharded network; that network is not
    evaluated.
    """
    if not ShardedModule.alive:
        return None
    model = model.model if isinstance(model, LogPosterior) else model
    with own_generator(0), looking():
        try:
            Program(model).draw_latents(arguments, uniform, {})
        except NetworkFoundError as error:
            return error.network
        except Exception:
            return None
    return None


def check_kernel(name: str, kernel: Hyperparameters) -> None:
    """Raises if a sampler cannot move a rank's part of a position by itself.

    Args:
        name: name of the sampler, for the message.
        kernel: the sampler's kernel, with its hyperparameters.

    Raises:
        ArgumentError: the kernel needs all elements at once, or a hyperparameter is a tensor with
            an entry for each element of a site.
    """
    if not isinstance(kernel, ELEMENTWISE):
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ArgumentError(f"{name} does not move sharded networks: use one of {names}")
    for hyper, value in kernel.hyperparameters().items():
        if isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values()):
            raise ArgumentError(
                f"{hyper}: for a sharded network, pass a number for each site, not a tensor"
            )


def prepare_sharded(
    log_posterior: LogPosterior,
    data: Data,
    kernel: Hyperparameters,
    init_strategy: ChainStarts,
    seed: int,
    network: ShardedModule,
    workers: Workers,
) -> Problem:
    """The problem of one chain of a sharded network, which all ranks move together, after the
    model's preflight.

    Args:
        log_posterior: the model.
        data: the data; the first batch may have other rows on every rank.
        kernel: the sampler's kernel.
        init_strategy: the init strategy as the user passed it: None, `init_to_module`, or a dict of
            starts of sites that are no weights of the network.
        seed: the run's seed, the same on all ranks.
        network: the first sharded network that the model calls.
        workers: the processes that have parts of the network.

    Raises:
        ModelError, SiteError, PlateError: the model breaks a rule; the message says which.
        ArgumentError: the user passed starts of weights, or the model subsamples by itself.
    """
    assert workers.rows is not None
    first = _largest_batch(workers, data.first())
    init = init_of(log_posterior, _check_starts(init_strategy, network), 0, 1)
    log_posterior.prepare(first, init, seed)
    info = log_posterior.model_info
    if workers.is_first:
        for warning in model_warnings(info):
            warn(ModelWarning, warning)
    if info.own_plate is not None:
        raise ArgumentError(
            f"the model subsamples by itself in plate '{info.own_plate}', so ranks cannot take "
            "parts of its batches: pass batches, and write the plate with subsample_size=len(x)"
        )
    weights = shards_of(info.sites)
    shards = {name: module.shards[weight] for name, (module, weight) in weights.items()}
    common_mesh(shards.values())
    copies = next(iter(shards.values())).copies
    latents = log_posterior.start(first, seed, init=init)
    values = latents | {name: point.unconstrained for name, point in log_posterior.points.items()}
    device = latents[next(iter(shards))].device
    others = {name: value.cpu() for name, value in values.items() if name not in shards}
    for name, value in workers.broadcast(others, "the start").items():
        values[name] = value.to(device)
    layout = Layout.from_tensors(values)
    counts = {
        name: torch.full_like(value, 1 / (copies if name in shards else workers.world))
        for name, value in values.items()
    }
    density = ShardedDensity(
        log_posterior,
        workers.rows,
        weights,
        copies,
        layout.flatten(counts).double(),
        stand_in=rows.take(first, slice(0, 1)),
    )
    kernel, num_latents = with_all_sites(kernel, layout), Layout.from_tensors(latents).size
    engine = Engine(kernel, density, layout, num_latents, vectorized=False)
    start = layout.flatten(values)[None]
    return Problem(log_posterior, data, engine, start, seed, workers=workers, shards=shards)


def check_other_batches(problem: Problem) -> None:
    """Raises if the rules of minibatch scaling do not hold on batches from all over the data, at
    the chain's start.

    Raises:
        PlateError: a row's term of the log joint, or a constant, depends on the other rows of the
            batch.
    """
    log_posterior, data = problem.log_posterior, problem.data
    if data.batch_size is None or not is_checked(log_posterior.model_info):
        return
    params = problem.engine.layout.unflatten(problem.positions[0])
    with torch.no_grad():
        for batch, indices in data.spread(OTHER_BATCHES):
            check_batch(log_posterior, params, batch, indices, data.first())


def noise_of(problem: Problem, purpose: Purpose, normals: int) -> ShardNoise:
    """A stream of standard normal numbers for this rank's latents, `[normals, latents]` at each
    step: the same numbers as a single process would draw for these latents.

    Args:
        problem: the chain's problem.
        purpose: use of the numbers; streams of different purposes are independent.
        normals: number of standard normal vectors that a step needs.
    """
    layout, places, size = problem.engine.layout, [], 0
    for name in problem.log_posterior.latents:
        shape = layout.shapes[layout.names.index(name)]
        shard = problem.shards.get(name)
        places.append((size + (shard.first if shard else 0), shape.numel()))
        size += (shard.shape if shard else shape).numel()
    like = problem.positions
    return ShardNoise(problem.seed, (normals, size), places, like.dtype, like.device, purpose)


class ShardedChain:
    """A chain of a sharded network that all ranks move together, one step at a time.

    Args:
        problem: the chain's problem.
        values: hyperparameters at step 0, by name.
    """

    def __init__(self, problem: Problem, values: Mapping[str, Tensor]):
        self.problem = problem
        self._noise = noise_of(problem, Purpose.NOISE, problem.engine.kernel.normals)
        momentum = noise_of(problem, Purpose.MOMENTUM, 1).at(0)
        self.state: Any = problem.engine.init(problem.positions, momentum, values)
        self.count = 0

    @property
    def position(self) -> Tensor:
        """This rank's part of the chain's unconstrained params after the latest step, a copy on the
        CPU, `[1, D]`."""
        position: Tensor = self.state.position.detach().cpu()
        return position

    def step(self, arguments: Arguments, values: Mapping[str, Tensor]) -> float:
        """Takes a step and writes the new weights into the network.

        Args:
            arguments: the model's arguments, with this rank's rows of the minibatch.
            values: hyperparameters of the step, by name.

        Returns:
            The log joint before the step, estimated from the minibatch of all ranks, in nats.

        Raises:
            NonFiniteError: on all ranks, if the log joint or its gradient is not finite on one of
                them. The state stays as it was.
        """
        noise, batch = self._noise.at(self.count)[None], Batch(arguments, per_chain=False)
        state, evaluation = self.problem.engine.step(self.state, batch, noise, values)
        if not bool(torch.isfinite(evaluation.log_joint).all()):
            raise NonFiniteError(
                f"the state, the log joint or its gradient became NaN or infinite at step "
                f"{self.count}: lower lr, or scale the data"
            )
        self.state, self.count = state, self.count + 1
        self._write()
        return float(evaluation.log_joint[0])

    def _write(self) -> None:
        """Writes the chain's weights after the latest step into this rank's parts of the networks,
        which evaluate the model at the next step."""
        problem = self.problem
        params = problem.engine.layout.unflatten(self.state.position[0].detach())
        networks = shards_of(problem.log_posterior.model_info.sites)
        for module in {module for module, _ in networks.values()}:
            module.write({w: params[n] for n, (owner, w) in networks.items() if owner is module})


def run_chain(
    problem: Problem,
    batches: Batches,
    columns: Mapping[str, Tensor],
    steps: Steps,
    bar: Progress,
    checkpoints: ShardedCheckpoints | None,
) -> Draws:
    """Takes the steps of a sharded network's chain, from its start or from a checkpoint. Returns
    this rank's part of the draws.

    Args:
        problem: the chain's problem.
        batches: minibatches with the rows of all ranks, the same on all ranks.
        columns: dict from the name of a hyperparameter to its value at every step.
        steps: the number of steps, and the steps after which a draw is kept.
        bar: bar that shows the steps taken.
        checkpoints: writer of the run's checkpoints; None to write none.

    Raises:
        NonFiniteError: the state became NaN or infinite.
    """
    assert problem.workers.rows is not None
    draws = Draws.allocate(problem.positions, steps)
    chain = ShardedChain(problem, {name: column[0] for name, column in columns.items()})
    if checkpoints is not None:
        checkpoints.restore(chain, batches, draws)
        bar.go_to(chain.count)
    while chain.count < steps.total:
        step = chain.count
        (batch,) = batches_from(batches, step, 1)
        arguments = problem.take_part(batch.of_chain(0)[0])
        log_joint = chain.step(arguments, {n: column[step] for n, column in columns.items()})
        place = steps.kept_before(step)
        if int(steps.kept[place]) == step:
            draws.log_joint[0, place] = log_joint
            if steps.positions:
                draws.positions[0, place] = chain.position[0]
        bar.update(1, log_joint)
        if checkpoints is not None and (checkpoints.due or chain.count == steps.total):
            checkpoints.write(chain, batches, draws, steps.kept_before(chain.count))
    draws.state, draws.num_steps = chain.state, chain.count
    if not problem.workers.rows.agree(bool(torch.isfinite(chain.state.position).all())):
        raise NonFiniteError("the state became NaN or infinite at the last step: lower lr")
    return draws


def _largest_batch(workers: Workers, batch: Arguments) -> Arguments:
    """The largest of the minibatches that the ranks pass, returned on all ranks; among minibatches
    of the same size, that of the lowest rank.

    Raises:
        DataError: a rank's minibatch has no tensors of rows, or no rank has a row.
    """
    assert workers.rows is not None
    count = rows.count(batch)
    counts = workers.gather(-1 if count is None else count, "the number of rows")
    if min(counts) < 0 or not any(counts):
        raise DataError(NO_ROWS)
    place = counts.index(max(counts))
    mine = to_device(batch, torch.device("cpu")) if workers.rank == place else ()
    largest = workers.gather(mine, "the first batch")[place]
    return to_device(largest, torch.device(workers.rows.device))


def _check_starts(init_strategy: ChainStarts, network: ShardedModule) -> ChainStarts:
    """The init strategy that the user passed, unchanged, after a check: the weights of a sharded
    network can start only at their present values.

    Raises:
        ArgumentError: the init strategy sets weights of the network.
    """
    is_of_others = isinstance(init_strategy, dict) and not any(
        name.endswith(weight) for name in init_strategy for weight in network.shards
    )
    if init_strategy is None or init_strategy is init_to_module or is_of_others:
        return init_strategy
    raise ArgumentError(
        "init_strategy: the weights of a sharded network start at its own values: leave it out, or "
        "pass a dict of other sites"
    )
