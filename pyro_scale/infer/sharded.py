"""`run` and `begin` of methods on a network that is sharded over processes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pyro_scale.core.rows import Arguments
from pyro_scale.core.schedules import Cyclical
from pyro_scale.core.validation import AUTO, as_count, is_auto
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.open import open_data
from pyro_scale.data.sources import Data, TensorData
from pyro_scale.distributed.shards import workers_of
from pyro_scale.distributed.workers import Workers
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import ArgumentError
from pyro_scale.infer.method import Finished
from pyro_scale.infer.sampler_setup import check_config, checked_sampling
from pyro_scale.kernels import Hyperparameters, Kernel
from pyro_scale.model.nn.sharded import ShardedModule
from pyro_scale.results.sharded import ShardedPosterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.by_rank import check_same, check_same_call
from pyro_scale.run.config import RunConfig, check_memory
from pyro_scale.run.problem import Problem, as_log_posterior
from pyro_scale.run.resume import choose_directory, digest_of, identity_of
from pyro_scale.run.run import RunPlan
from pyro_scale.run.sharded.chain import (
    ShardedChain,
    check_kernel,
    check_other_batches,
    prepare_sharded,
    sharded_network,
)
from pyro_scale.run.sharded.checkpoint import ShardedCheckpoints
from pyro_scale.storage.files import locked

F = TypeVar("F", bound=Callable[..., Any])

#: Arguments of `run` that sharded networks do not have -> their only value.
_ONLY_VALUE = {
    "num_chains": 1,
    "superchains": None,
    "share_batches": False,
    "max_rows": None,
    "max_seconds": None,
    "store": None,
    "distributed": "auto",
    "mesh": None,
    "rows_by_rank": False,
}

#: Arguments of `run` that may differ among ranks, or are compared in another way.
_MAY_DIFFER = {"self", "data", "progress", "memory_budget"}


def or_sharded(run: F) -> F:
    """Decorates a method's `run`: if the model calls a network whose weights are sharded over
    processes, the call goes to `run_sharded` with the same arguments, otherwise to the original
    `run`."""
    signature = inspect.signature(run)

    @functools.wraps(run)
    def either(method: Any, *args: Any, **kwargs: Any) -> Any:
        if not ShardedModule.alive:
            return run(method, *args, **kwargs)
        bound = signature.bind(method, *args, **kwargs)
        bound.arguments.setdefault("num_chains", 1)  # in place of other models' default
        bound.apply_defaults()
        _, data, *_ = bound.args
        batch_size = bound.arguments["batch_size"]
        opened = open_data(data, None if is_auto(batch_size) else batch_size, method._num_data)
        network = sharded_network(method.model, opened.first())
        if network is None:
            return run(method, *args, **kwargs)
        if is_auto(batch_size) and not hasattr(data, "dataset"):
            raise ArgumentError(
                "batch_size='auto': for a sharded network, pass the number of rows of a step, or "
                "None for all"
            )
        run_sharded(method, network, opened, bound.arguments)
        return method

    return either  # type: ignore[return-value]


@without_vmap_warnings()
def run_sharded(
    method: Any, network: ShardedModule, data: Data, arguments: Mapping[str, Any]
) -> None:
    """Runs a method on a model with a sharded network, on all ranks together, and stores its
    posterior in the method.

    Args:
        method: the sampler or approximation.
        network: the first sharded network that the model calls.
        data: data of the run, the same on all ranks.
        arguments: arguments of the call of `run`, by name.

    Raises:
        ArgumentError: the method, an option or an argument is not available for sharded networks.
    """
    for name, only in _ONLY_VALUE.items():
        if arguments.get(name, only) != only:
            raise ArgumentError(
                f"{name}={arguments[name]!r}: a sharded network has one chain, which all of "
                f"its ranks move: pass {name}={only!r}"
            )
    _check_method(method)
    config = _config_of(method, arguments) if isinstance(method.kernel, Kernel) else None
    steps = _steps_of_optimizer(method, data, arguments) if config is None else config.steps
    assert steps is not None
    workers, seed = workers_of(network.shards.values()), arguments["seed"]
    others = {name: str(value) for name, value in arguments.items() if name not in _MAY_DIFFER}
    check_same_call(workers, {**others, "batch_size": data.batch_size, "num_data": data.num_data})
    path, resumes = choose_directory(
        arguments.get("checkpoint"), arguments.get("checkpoint_every", 0.0), arguments.get("resume")
    )
    checkpoints = None
    if path is not None:
        checkpoints = ShardedCheckpoints(path, arguments["checkpoint_every"], workers, resumes)
        seed = checkpoints.seed if seed is None else seed
    seed = workers.broadcast(choose_seed(seed), "the choice of a seed")
    kernel = method.kernel.over(steps.total)
    problem = _prepare(method, network, data, kernel, seed, workers)
    sampling = "shuffle" if config is None else config.sampling
    if config is not None:
        check_memory(problem.positions, steps.num_samples, config.memory_budget)
    facts = {
        "method": type(method).__name__,
        "warmup_steps": steps.warmup_steps,
        "thinning": steps.thinning,
        "sampling": sampling,
    }
    facts = identity_of(problem, facts, method.kernel.hyperparameters())
    check_same(problem, {**facts, "first batch": digest_of(data.first())})
    check_other_batches(problem)
    shows = arguments["progress"] and workers.is_first
    plan = RunPlan(
        problem, kernel.columns(steps.total), steps, sampling, False, False, shows, Earlier()
    )
    title = f"{type(method).__name__}, sharded"
    with contextlib.ExitStack() as stack:
        if checkpoints is not None:
            checkpoints.check_same_run(facts, steps.num_samples)
            if workers.is_first:
                stack.enter_context(locked(checkpoints.directory))
        trajectory = plan.execute(title, checkpoints=checkpoints)
    method._last = Finished(ShardedPosterior(problem, trajectory.draws))


class ShardedSteps:
    """A chain of a sharded network, as `begin` returns it: the caller moves it step by step, on all
    ranks together."""

    def __init__(self, problem: Problem):
        self._kernel = problem.engine.kernel
        self._chain = ShardedChain(problem, self._kernel.values(0))

    @without_vmap_warnings()
    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes one step on this rank's rows of a batch, given as the model's own arguments;
        returns the estimate of the log joint before the step, in nats."""
        chain = self._chain
        arguments = chain.problem.log_posterior.bind(args, kwargs)
        return chain.step(arguments, self._kernel.values(chain.count))

    @property
    def posterior(self) -> ShardedPosterior:
        """The posterior of the state after the latest step, of which this rank has its part: one
        draw of a sampler, or the fit of an approximation."""
        problem = self._chain.problem
        draws = Draws.allocate(problem.positions, Steps(0, positions=False))
        draws.state, draws.num_steps = self._chain.state, self._chain.count
        return ShardedPosterior(problem, draws)


def begin_sharded(
    method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ShardedSteps | None:
    """A chain at its start that can be moved step by step, if the model calls a sharded network;
    None otherwise.

    Args:
        method: the sampler or approximation.
        args: this rank's rows of a batch, as the model's own arguments by position.
        kwargs: the batch's arguments by name.

    Raises:
        ArgumentError: the method or an option is not available for sharded networks.
    """
    arguments: Arguments = as_log_posterior(method.model, None).bind(args, kwargs)
    network = sharded_network(method.model, arguments)
    if network is None:
        return None
    with without_vmap_warnings():
        _check_method(method)
        workers = workers_of(network.shards.values())
        seed = workers.broadcast(choose_seed(None), "the choice of a seed")
        data = TensorData(arguments, None)
        return ShardedSteps(_prepare(method, network, data, method.kernel, seed, workers))


def _prepare(
    method: Any,
    network: ShardedModule,
    data: Data,
    kernel: Hyperparameters,
    seed: int,
    workers: Workers,
) -> Problem:
    """The analyzed model with its chain's start, of which this rank holds its part.

    Args:
        method: the sampler or approximation.
        network: the sharded network.
        data: data of the run.
        kernel: sampler's or optimizer's kernel with its schedules.
        seed: seed of the run, the same on all ranks.
        workers: processes that share the network.
    """
    log_posterior = as_log_posterior(method.model, method._num_data or data.num_data)
    if not isinstance(kernel, Kernel):
        log_posterior = method._target(log_posterior)
    init = method._init_strategy
    return prepare_sharded(log_posterior, data, kernel, init, seed, network, workers)


def _check_method(method: Any) -> None:
    """Raises if a method or its options are not available for sharded networks: each process moves
    only its part of the params, there is one chain, and gradients of all rows are not computed.

    Raises:
        ArgumentError: the message names the method or the option.
    """
    name, kernel = type(method).__name__, method.kernel
    check_kernel(name, kernel)
    if not isinstance(kernel, Kernel):
        if method.structure != "diag":
            raise ArgumentError(
                f"structure={method.structure!r}: for sharded networks, {name} has 'diag' only"
            )
        if method._preconditioner is not None:
            raise ArgumentError(f"precondition: {name} has none for sharded networks: leave it out")
        return
    settings = method._settings
    if "lr" in settings.chosen:
        raise ArgumentError(
            f"lr='auto': to choose it, {name} needs gradients of all rows and several chains, "
            "which a sharded network does not have: pass a number, such as lr=0.01"
        )
    for option in ("precondition", "control_variates", "subtract_noise"):
        if getattr(settings, option):
            raise ArgumentError(f"{option}: {name} has none for sharded networks: leave it out")
    for option in settings.chosen:
        raise ArgumentError(f"{option}='auto': for a sharded network, pass a number")


def _config_of(sampler: Any, arguments: Mapping[str, Any]) -> RunConfig:
    """The arguments of a sampler's `run`, checked, for a sharded network.

    Raises:
        ArgumentError: an argument is out of range, or a length is "auto".
    """
    for name in ("warmup_steps", "thinning"):
        if is_auto(arguments[name]):
            raise ArgumentError(
                f"{name}='auto': for a sharded network, pass a number: to choose it, several "
                "chains are needed"
            )
    batch_size, lr = arguments["batch_size"], sampler.kernel.lr
    has_batches = batch_size not in (None, AUTO)
    config = RunConfig(
        num_samples=as_count("num_samples", arguments["num_samples"]),
        warmup_steps=as_count("warmup_steps", arguments["warmup_steps"], least=0),
        thinning=as_count("thinning", arguments["thinning"]),
        keeps=lr.keeps if isinstance(lr, Cyclical) else None,
        num_chains=arguments["num_chains"],
        superchains=None,
        batch_size=batch_size,
        sampling=checked_sampling(sampler, arguments["sampling"], has_batches),
        share_batches=arguments["share_batches"],
        store=None,
        memory_budget=arguments["memory_budget"],
        progress=arguments["progress"],
    )
    check_config(sampler, config)
    return config


def _steps_of_optimizer(method: Any, data: Data, arguments: Mapping[str, Any]) -> Steps:
    """The number of steps of the `run` of an approximation on a sharded network, from `num_steps`
    or `num_epochs`.

    Raises:
        ArgumentError: both or neither are passed, one is out of range, or early stopping is on.
    """
    num_steps, num_epochs = arguments["num_steps"], arguments["num_epochs"]
    if (num_steps is None) == (num_epochs is None):
        raise ArgumentError("pass one of num_steps and num_epochs, such as num_steps=5000")
    if method._early_stopping:
        raise ArgumentError("early_stopping: sharded networks have none: leave it out")
    if num_epochs is not None:
        if data.num_data is None:
            raise ArgumentError("num_epochs: N is unknown: pass num_data=N")
        epoch = -(-data.num_data // (data.batch_size or data.num_data))
        num_steps = epoch * as_count("num_epochs", num_epochs)
    return Steps(as_count("num_steps", num_steps), positions=False)
