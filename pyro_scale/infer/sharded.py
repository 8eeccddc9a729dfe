"""Methods on sharded networks: what their `run` and `step` hand over to."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from pyro_scale.core.rows import Arguments
from pyro_scale.core.schedules import Cyclical
from pyro_scale.core.validation import as_count, is_auto
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.open import open_data
from pyro_scale.data.row_sampler import Sampling
from pyro_scale.data.sources import Data
from pyro_scale.distributed.shards import Holders
from pyro_scale.engine.draws import Steps
from pyro_scale.engine.progress import Progress
from pyro_scale.errors import ArgumentError
from pyro_scale.infer.method import Finished
from pyro_scale.infer.sampler_setup import checked_sampling
from pyro_scale.kernels import IVON, Kernel
from pyro_scale.model.nn.sharded import ShardedModule
from pyro_scale.results.sharded import ShardedPosterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.by_rank import check_same, check_same_call
from pyro_scale.run.config import check_memory
from pyro_scale.run.problem import as_log_posterior
from pyro_scale.run.resume import digest_of
from pyro_scale.run.sharded.chain import ShardedChain, check_kernel, prepare, sharded_network
from pyro_scale.run.sharded.checkpoint import facts_of, open_checkpoints
from pyro_scale.run.sharded.execute import check_data, execute

F = TypeVar("F", bound=Callable[..., Any])


class ShardedSteps:
    """A chain of a sharded network that is moved step by step."""

    def __init__(self, chain: ShardedChain):
        self.chain = chain

    @without_vmap_warnings()
    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes one step on a batch of this rank's own, given as the model's own arguments."""
        return self.chain.step(self.chain.problem.log_posterior.bind(args, kwargs))

    @property
    def posterior(self) -> ShardedPosterior:
        """The state as a draw, or as a fit."""
        position = self.chain.state.position.detach().cpu()
        return posterior_of(self.chain, position, torch.empty(0))


def or_sharded(run: F) -> F:
    """A method's `run` that hands models with a sharded network over to `run_sharded`."""
    signature = inspect.signature(run)

    @functools.wraps(run)
    def either(method: Any, *args: Any, **kwargs: Any) -> Any:
        if not ShardedModule.alive:
            return run(method, *args, **kwargs)
        asked = signature.bind(method, *args, **kwargs)
        asked.arguments.setdefault("num_chains", 1)  # in place of what is usual elsewhere
        asked.apply_defaults()
        _, data, *_ = asked.args
        batch_size = asked.arguments["batch_size"]
        size = None if is_auto(batch_size) else batch_size
        opened = open_data(data, size, method._num_data)
        network = sharded_network(method.model, opened.first())
        if network is None:
            return run(method, *args, **kwargs)
        if is_auto(batch_size) and not hasattr(data, "dataset"):
            raise ArgumentError(
                "batch_size='auto': of a sharded network, pass a number of rows a step, or None "
                "for all"
            )
        run_sharded(method, network, opened, asked.arguments)
        return method

    return either  # type: ignore[return-value]


#: Arguments of `run` that sharded networks do not have -> the one value that they may be.
_ONE_VALUE = {
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


@without_vmap_warnings()
def run_sharded(method: Any, network: ShardedModule, data: Data, asked: Mapping[str, Any]) -> None:
    """Runs a method on a model with a sharded network, on all ranks together.

    Raises:
        ArgumentError: a method, an option or an argument that sharded networks do not have.
    """
    name = type(method).__name__
    for argument, only in _ONE_VALUE.items():
        if asked.get(argument, only) != only:
            raise ArgumentError(
                f"{argument}={asked[argument]!r}: a sharded network has one chain, which all of "
                f"its ranks move: pass {argument}={only!r}"
            )
    steps, seed = _steps_of(method, data, asked), asked["seed"]
    holders = Holders.of(network.shards.values())
    check_same_call(holders, _call_of(asked, data, steps))
    where, last, checkpoints = asked.get("checkpoint"), asked.get("resume"), None
    if where is not None or last is not None:
        every = asked["checkpoint_every"]
        checkpoints = open_checkpoints(where, last, every, holders)
        seed = checkpoints.seed if seed is None else seed
    chain = start(method, network, data.first(), seed, data.num_data, steps.total)
    problem, sampling = chain.problem, "shuffle"
    if steps.positions:
        sampling = checked_sampling(method, asked["sampling"], True)
        check_memory(problem.position[None], steps.num_samples, asked["memory_budget"])
    facts = {
        "method": name,
        "warmup_steps": steps.warmup_steps,
        "thinning": steps.thinning,
        "sampling": sampling,
        **facts_of(problem, data, method.kernel),
    }
    check_same(holders, {**facts, "first batch": digest_of(data.first())})
    check_data(problem, data)
    batches = data.batches(problem.seed, 1, cast(Sampling, sampling))
    title, shown = f"{name}, sharded", asked["progress"] and holders.is_first
    with contextlib.ExitStack() as stack:
        if checkpoints is not None:
            checkpoints.check_same_run(facts, steps.num_samples)
            stack.enter_context(checkpoints.locked())
        bar = stack.enter_context(Progress(steps.total, title, shown))
        kept = execute(chain, batches, steps, bar, checkpoints)
    positions = kept.positions if steps.positions else chain.state.position.detach().cpu()
    method._last = Finished(posterior_of(chain, positions, kept.log_joint))


def _call_of(asked: Mapping[str, Any], data: Data, steps: Steps) -> dict[str, Any]:
    """What ranks have to agree on before any of them waits for the others."""
    given = {name: asked.get(name) for name in ("seed", "checkpoint", "resume")}
    return {
        **{name: value if value is None else str(value) for name, value in given.items()},
        "num_samples": steps.num_samples,
        "warmup_steps": steps.warmup_steps,
        "thinning": steps.thinning,
        "batch_size": data.batch_size,
        "num_data": data.num_data,
    }


def _steps_of(method: Any, data: Data, asked: Mapping[str, Any]) -> Steps:
    """How many steps there are and which are kept."""
    if not isinstance(method.kernel, Kernel):
        num_steps, num_epochs = asked["num_steps"], asked["num_epochs"]
        if (num_steps is None) == (num_epochs is None):
            raise ArgumentError("pass one of num_steps and num_epochs, such as num_steps=5000")
        if method._early_stopping:
            raise ArgumentError("early_stopping: not of sharded networks: leave it out")
        if num_epochs is not None:
            if data.num_data is None:
                raise ArgumentError("num_epochs: N is unknown: pass num_data=N")
            epoch = -(-data.num_data // (data.batch_size or data.num_data))
            num_steps = epoch * as_count("num_epochs", num_epochs)
        return Steps(as_count("num_steps", num_steps), positions=False)
    for argument in ("warmup_steps", "thinning"):
        if is_auto(asked[argument]):
            raise ArgumentError(
                f"{argument}='auto': of a sharded network, pass a number: what is chosen is chosen "
                "by what several chains have in common"
            )
    lr = method.kernel.lr
    return Steps(
        as_count("num_samples", asked["num_samples"]),
        as_count("warmup_steps", asked["warmup_steps"], least=0),
        as_count("thinning", asked["thinning"]),
        lr.keeps if isinstance(lr, Cyclical) else None,
    )


def begin_sharded(
    method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ShardedSteps | None:
    """A chain at its start, of a model with a sharded network; None for others.

    Args:
        method: the sampler or approximation.
        args: a batch of this rank's own, as the model's own arguments.
        kwargs: likewise.

    Raises:
        ArgumentError: a method or an option that sharded networks do not have.
    """
    arguments = as_log_posterior(method.model, None).bind(args, kwargs)
    network = sharded_network(method.model, arguments)
    if network is None:
        return None
    with without_vmap_warnings():
        return ShardedSteps(start(method, network, arguments, None))


def start(
    method: Any,
    network: ShardedModule,
    arguments: Arguments,
    seed: int | None,
    num_data: int | None = None,
    num_steps: int | None = None,
) -> ShardedChain:
    """A method's chain before its first step.

    Args:
        method: the sampler or approximation.
        network: the sharded network of its model.
        arguments: the first batch.
        seed: of the run; None draws one.
        num_data: N, if the data say it.
        num_steps: the length of the run, at whose end falling step sizes are 0; None if it is not
            known, as for `step`.

    Raises:
        ArgumentError: a method or an option that sharded networks do not have.
    """
    name, kernel = type(method).__name__, method.kernel
    check_kernel(name, kernel)
    if num_steps is not None:
        kernel = kernel.over(num_steps)
    if isinstance(kernel, Kernel):
        _check_settings(name, method._settings)
    elif method.structure != "diag":
        raise ArgumentError(
            f"structure={method.structure!r}: {name} has 'diag' of sharded networks"
        )
    elif method._preconditioner is not None:
        raise ArgumentError(f"precondition: {name} has none for sharded networks: leave it out")
    log_posterior = as_log_posterior(method.model, method._num_data or num_data)
    if not isinstance(kernel, Kernel):
        log_posterior = method._target(log_posterior)
    problem = prepare(
        log_posterior, network, arguments, kernel, method._init_strategy, seed, choose_seed
    )
    return ShardedChain(problem, problem.engine.kernel)


def posterior_of(chain: ShardedChain, positions: Tensor, log_joint: Tensor) -> ShardedPosterior:
    """What a chain leaves."""
    problem, spread = chain.problem, None
    if isinstance(problem.engine.kernel, IVON):
        values = problem.engine.kernel.at(max(0, chain.count - 1), problem.log_posterior.num_data)
        curvature = chain.state.curvature[0, : problem.engine.num_latents]
        spread = torch.sqrt(values["temperature"].to(curvature) / curvature).cpu()
    return ShardedPosterior(problem, positions, log_joint, spread)


def _check_settings(name: str, settings: Any) -> None:
    if "lr" in settings.chosen:
        raise ArgumentError(
            f"lr='auto': {name} chooses it by gradients of all rows and by runs of several chains, "
            "which a sharded network has not: pass a number, such as lr=0.01"
        )
    for what in ("precondition", "control_variates", "subtract_noise"):
        if getattr(settings, what):
            raise ArgumentError(f"{what}: {name} has none for sharded networks: leave it out")
    for what in settings.chosen:
        raise ArgumentError(f"{what}='auto': of a sharded network, pass a number")
