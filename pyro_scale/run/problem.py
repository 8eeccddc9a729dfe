"""The problem of a run: the model after its preflight, the data, and the chains' starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments, Model
from pyro_scale.core.thread_count import Arithmetic, choose_threads
from pyro_scale.core.warn import warn
from pyro_scale.curvature.chunks import chunks_of, is_row_wise
from pyro_scale.data.batches import Batches, OwnIndices, SharedBatches, WholeData
from pyro_scale.data.features import FeatureData
from pyro_scale.data.loaders import to_device
from pyro_scale.data.row_sampler import RowIndices, Sampling
from pyro_scale.data.sources import Data, OwnSubsamples, TensorData
from pyro_scale.distributed.data_parallel import DataParallel
from pyro_scale.distributed.shards import Shard
from pyro_scale.distributed.workers import ALONE, Workers
from pyro_scale.engine.draws import Draws
from pyro_scale.engine.step import Engine
from pyro_scale.errors import ArgumentError, DataError, ModelWarning
from pyro_scale.kernels import Hyperparameters
from pyro_scale.marginal.anchor import Anchor
from pyro_scale.marginal.summed import starts_around, with_summed
from pyro_scale.model.diagnose import cut_gradients
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.model_info import model_warnings
from pyro_scale.model.observation_checks import check_something_counts
from pyro_scale.model.other_batches import check_batches, check_supports
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.initialize import ChainInits, ChainStarts, init_of, initialize
from pyro_scale.run.understood import Understood

Item = TypeVar("Item")
T = TypeVar("T")

#: The error for data of which processes cannot take parts.
NO_ROWS = "the data have no rows that ranks could share out: pass tensors of rows"
#: Batches besides the first on which the rules of minibatch scaling are checked before a run.
OTHER_BATCHES = 2


@dataclass(frozen=True)
class Problem:
    """Model, data and starts of a run, with the engine that moves its chains.

    Attributes:
        log_posterior: the model after its preflight.
        data: the model's data.
        engine: the engine, which defines a step of the chains.
        positions: the chains' starts, unconstrained, `[chains, D]`.
        seed: the run's seed.
        features: features of the rows, computed by a frozen base, which the engine reads in place
            of `data`; None if it reads `data`.
        base: a phrase for reports that says how a network's frozen base (layers that are not
            sampled) is run; "none" without one.
        chooses_batches: True if tuning chooses the batch size, False if the user has set it.
        workers: the processes among which chains, or rows of minibatches, are shared out.
        understood: the preflight (checks of the model before a run) of an earlier run with the same
            model and data, which this run reuses; None without one.
        shards: this rank's parts of weights, by site, if a network is sharded over ranks; empty
            otherwise.
        anchor: where the nodes are placed, over which local latents are summed out; None if none
            are.
    """

    log_posterior: LogPosterior
    data: Data
    engine: Engine
    positions: Tensor
    seed: int
    features: TensorData | FeatureData | None = None
    base: str = "none"
    chooses_batches: bool = False
    workers: Workers = ALONE
    understood: Understood | None = None
    shards: Mapping[str, Shard] = field(default_factory=dict)
    anchor: Anchor | None = None

    @property
    def chains(self) -> range:
        """The numbers of the chains that this process moves.

        These are all chains if the model has point-estimated parameters, as those move by the mean
        gradient of all chains.
        """
        num_chains = len(self.positions)
        return range(num_chains) if self.engine.has_points else self.workers.chains(num_chains)

    @property
    def is_alone(self) -> bool:
        """Whether one process does the whole run."""
        return self.workers.is_alone

    @property
    def is_first(self) -> bool:
        """Whether this is the process that does what is done once, such as warning; True for a lone
        process."""
        return self.workers.is_first

    @property
    def process(self) -> int:
        """The number of this process, from 0."""
        return self.workers.rank

    @property
    def is_split(self) -> bool:
        """True if chains are shared out among processes, so that this process moves only some of
        them.
        """
        return len(self.chains) < len(self.positions)

    def numbers(self, count: int) -> Sequence[int]:
        """The chain numbers that belong to `count` chains, for tensors whose first dimension is
        chains: 0, 1, ... if `count` is the number of all chains of the run, otherwise the numbers
        of the chains that this process moves."""
        return range(count) if count == len(self.positions) else self.chains

    @property
    def draws_differ(self) -> bool:
        """True if the first process gets the draws of all chains, and the others only those of the
        chains that they move; False if each gets all."""
        return self.is_split and not self.workers.keeps_all

    @property
    def kept_chains(self) -> Sequence[int]:
        """The numbers of the chains whose draws this process gets."""
        has_all = self.is_first or not self.draws_differ
        return range(len(self.positions)) if has_all else self.chains

    @property
    def read_together(self) -> bool:
        """True if several processes get all draws and have all rows, and share the rows out after
        the run."""
        return self.workers.read_together

    @property
    def is_writer(self) -> bool:
        """Whether this process writes checkpoints for its chains; of several processes that move
        the same chains, one does."""
        if not self.is_split:
            return self.workers.is_first
        return self.workers.rows is None or self.workers.rows.rank == 0

    @property
    def has_all_rows(self) -> bool:
        """True if this process was called with all rows of the data; False if each process was
        called with other rows.
        """
        return self.workers.has_all_rows

    @property
    def shares_rows(self) -> bool:
        """Whether this process computes only a part of the rows of every minibatch, and takes steps
        together with the processes that compute the others."""
        return self.workers.rows is not None

    @property
    def agree_in_steps(self) -> Callable[[bool], bool] | None:
        """A function that says whether a condition holds on all processes that take steps together;
        None if rows are not shared out."""
        return None if self.workers.rows is None else self.workers.rows.agree

    def take_part(self, batch: Arguments) -> Arguments:
        """The model's arguments with this process's rows of a minibatch that all processes have;
        possibly with no rows.

        Raises:
            DataError: the minibatch has no tensors of rows.
        """
        count = rows.count(batch)
        if count is None:
            raise DataError(NO_ROWS)
        shared = self.workers.rows
        return batch if shared is None else rows.take(batch, shared.part_of(count))

    @property
    def part(self) -> slice:
        """The slice of every minibatch's rows whose gradient this process computes; `slice(None)`,
        all rows, if processes do not share minibatches."""
        shared = self.workers.rows
        return slice(None) if shared is None else shared.of(self.batch_size)

    def limit_to_part(self, batches: Batches) -> tuple[Engine, Batches]:
        """(The engine that moves the chains; their minibatches), limited to this process's rows of
        every minibatch if rows are shared out; both unchanged otherwise."""
        shared, engine = self.workers.rows, self.engine
        if shared is None:
            return engine, batches
        density = DataParallel(engine.density, shared.weight(self.batch_size), shared.group)
        # vmap does not support sums over processes
        engine = dataclasses.replace(engine, density=density, vectorized=False)
        return engine, batches.of_rows(self.part)

    def map(self, function: Callable[[Item], T], items: Iterable[Item], what: str) -> list[T]:
        """The results function(item) for all items, in their order, on every process; each process
        computes some of them and all exchange the results.

        Args:
            function: function of an item that returns a pytree of tensors.
            items: the items, the same on all processes.
            what: name of the results in error messages.
        """
        return self.workers.map(function, items, what, self.positions.device)

    def agree(self, holds: bool, what: str) -> bool:
        """Whether `holds` is True on all processes, the same on each; all of them must call this.
        Used to end loops together.

        Args:
            holds: this process's condition.
            what: name of the condition in error messages.
        """
        return self.workers.agree(holds, what)

    def broadcast(self, value: T, what: str) -> T:
        """Rank 0's value, on all processes; all of them must call this. `what` is the value's name
        in error messages."""
        return self.workers.broadcast(value, what)

    def reduce(self, function: Callable[[list[Item]], T], value: Item, what: str) -> T:
        """The value of `function` at the list of all processes' values, such as their sum. Rank 0
        computes it and sends it to all; all processes have to call this.

        Args:
            function: function of a list with one value for each process.
            value: this process's value.
            what: name of the values in error messages.
        """
        return self.workers.reduce(function, value, what)

    def least(self, count: int) -> int:
        """Publishes this process's count, and returns the smallest count that processes have
        published so far, 0 if one has published none. No process waits."""
        return self.workers.least(count)

    @property
    def batch_size(self) -> int:
        """The number of rows whose gradient a step takes: B, or N if steps take all rows."""
        if self.data.batch_size is None and isinstance(self.data, TensorData):
            return rows.count(self.data.arguments) or self.log_posterior.model_info.batch_size
        return self.data.batch_size or self.log_posterior.model_info.batch_size

    def in_batches_of(self, size: int | None) -> Problem:
        """A copy of the problem whose steps take minibatches of `size` rows; None for all rows.
        Only for data that are tensors."""
        assert isinstance(self.data, TensorData)
        return dataclasses.replace(self, data=dataclasses.replace(self.data, batch_size=size))

    def batches(
        self,
        num_chains: int,
        sampling: Sampling,
        share: bool = False,
        chains: Sequence[int] | None = None,
    ) -> Batches:
        """An endless source of the minibatches that the steps of these chains take; rows are
        replaced by features if a frozen base was run.

        Args:
            num_chains: number of chains of the run.
            sampling: how the rows of minibatches are drawn, such as "shuffle" or "replacement".
            share: whether all chains have the same minibatches.
            chains: numbers of the chains whose minibatches are returned; None for all chains.
        """
        source, chains = self.features or self.data, chains or range(num_chains)
        seed, shared = self.seed, self.workers.rows
        # otherwise ranks would draw the same places
        if shared is not None and not self.has_all_rows:
            seed = derived_seed(seed, shared.rank, Purpose.BATCHES)
        if share:
            return SharedBatches(source.batches(seed, 1, sampling), len(chains))
        return source.batches(seed, num_chains, sampling, chains)

    def with_engine(self, **changes: Any) -> Problem:
        """A copy of the problem whose engine has some attributes replaced, such as `kernel=` or
        `vectorized=`."""
        return dataclasses.replace(self, engine=dataclasses.replace(self.engine, **changes))

    def with_lr(self, lr: float) -> Problem:
        """A copy of the problem whose sampler's kernel has the step size `lr`."""
        return self.with_engine(kernel=dataclasses.replace(self.engine.kernel, lr=lr))

    def moved_to(self, draws: Draws, chains: list[int]) -> Problem:
        """A copy of the problem in which some chains start at the last of their draws, to go on
        from there; the other chains' starts are unchanged.

        Args:
            draws: draws of all chains.
            chains: indices of the chains that are moved.
        """
        positions = self.positions.clone()
        positions[chains] = draws.positions[chains, -1].to(positions)
        return dataclasses.replace(self, positions=positions)

    def epoch(self, sampling: Sampling) -> int | None:
        """The number of minibatches that pass through all rows once; None if there are no such
        epochs, because rows are drawn with replacement or every step has all rows.

        Args:
            sampling: how the rows of minibatches are drawn, such as "shuffle" or "replacement".
        """
        size = self.data.batch_size
        if size is None or sampling == "replacement":
            return None
        return max(1, self.log_posterior.num_data // size)

    def batches_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batches:
        """Minibatches for one step of one chain, from model arguments that the user passes as a
        minibatch. If the model subsamples by itself, the arguments are all rows, and their indices
        are drawn."""
        arguments = self.log_posterior.bind(args, kwargs)
        if isinstance(self.data, OwnSubsamples):
            data = self.data
            indices = RowIndices(self.seed, range(1), data.num_data, data.batch_size, "shuffle")
            return OwnIndices(arguments, indices)
        return WholeData(to_device(arguments, module_device(self.log_posterior)))


def prepare(
    log_posterior: LogPosterior,
    data: Data,
    kernel: Hyperparameters,
    init_strategy: ChainStarts,
    num_chains: int,
    seed: int,
    must_be_usable: bool = True,
    earlier: Understood | None = None,
) -> Problem:
    """The problem of a run: model, data and starts. Runs the preflight (the checks of the model
    before a run) and finds every chain's start.

    Args:
        log_posterior: the model.
        data: the data of the run.
        kernel: the sampler's kernel; `Hyperparameters()` for methods that take no steps.
        init_strategy: the init strategy as the user passed it: None, a function, or a dict of
            starts by site.
        num_chains: number of chains.
        seed: the run's seed.
        must_be_usable: whether the log joint has to be finite at the starts; False for methods that
            do not use them.
        earlier: the preflight of an earlier run, or None. If model and data are the same, checks on
            other batches are not repeated.

    Raises:
        ModelError, SiteError, PlateError: the model breaks a rule; the message says which.
        ArgumentError: a dict of starts does not fit the model or the number of chains.
    """

    def build(log_posterior: LogPosterior, data: Data, anchor: Anchor | None) -> Problem:
        starts, known = init_strategy, earlier
        if anchor is not None:
            known = None
            if init_strategy is None:
                starts = starts_around(anchor, log_posterior, data, num_chains, seed)
        problem = _prepare(
            log_posterior, data, kernel, starts, num_chains, seed, must_be_usable, known
        )
        return dataclasses.replace(problem, anchor=anchor)

    return with_summed(build, log_posterior, data, seed)


def _prepare(
    log_posterior: LogPosterior,
    data: Data,
    kernel: Hyperparameters,
    init_strategy: ChainStarts,
    num_chains: int,
    seed: int,
    must_be_usable: bool,
    earlier: Understood | None,
) -> Problem:
    """The problem of a run, of which no latents are to be summed out any more. Arguments as for
    `prepare`."""
    arguments = data.first()
    reused = None if earlier is None else earlier.reuse(log_posterior, data)
    log_posterior = reused or log_posterior
    functions = [init_of(log_posterior, init_strategy, c, num_chains) for c in range(num_chains)]
    drawn = log_posterior.prepare(arguments, functions[0], seed)
    for warning in model_warnings(log_posterior.model_info):
        warn(ModelWarning, warning)
    data = _data_for(log_posterior, data)
    per_chain = data.batch_size is not None
    inits = ChainInits(init_strategy, functions)
    engine, positions = initialize(
        log_posterior, kernel, arguments, inits, seed, per_chain, drawn, must_be_usable
    )
    params = engine.layout.unflatten(positions[0])
    check_values(log_posterior, data, params)
    if reused is None:
        check_other_batches(log_posterior, data, params)
        if must_be_usable:
            _warn_of_cut_gradients(log_posterior, params, arguments)
    if positions.device.type == "cpu":
        choose_threads(lambda: arithmetic(log_posterior, params, arguments).total)
    understood = None if reused is None else earlier
    return Problem(log_posterior, data, engine, positions, seed, understood=understood)


def arithmetic(
    log_posterior: LogPosterior, params: Mapping[str, Tensor], arguments: Arguments
) -> Arithmetic:
    """The counted arithmetic of one evaluation of the log posterior on a batch, without its
    gradient."""
    with own_generator(), torch.no_grad(), Arithmetic() as counted:
        log_posterior(params, arguments, log_posterior.first_indices())
    return counted


def _warn_of_cut_gradients(
    log_posterior: LogPosterior, params: Mapping[str, Tensor], arguments: Arguments
) -> None:
    for name, latents in cut_gradients(log_posterior, params, arguments).items():
        along = " and ".join(f"'{latent}'" for latent in latents[:3])
        warn(
            ModelWarning,
            f"site '{name}': its log density depends on {along}, and its gradient does not: "
            "something between them cuts gradients, such as .detach(), .item(), .data, float() or "
            "torch.no_grad(). Methods follow gradients, so draws will be wrong unless you intend "
            "this",
            code="cut-gradient",
        )


def check_all_rows(log_posterior: LogPosterior, data: Data, params: Mapping[str, Tensor]) -> None:
    """Raises if rows from all over the data, not only those of the first batch, break the rules of
    minibatch scaling or have impossible values.

    Raises:
        SiteError: an observed value is outside of its support; the message names the row.
        PlateError: a row's term of the log joint, or a constant, depends on the other rows of the
            batch.
    """
    data = _data_for(log_posterior, data)
    check_values(log_posterior, data, params)
    check_other_batches(log_posterior, data, params)


def check_values(log_posterior: LogPosterior, data: Data, params: Mapping[str, Tensor]) -> None:
    """Raises if an observed value is outside of its support, or a mask leaves all rows out. Looks
    at all rows of data in tensors that are read in minibatches; does nothing for other data.

    Args:
        log_posterior: the model, after its preflight.
        data: the data of the run.
        params: unconstrained parameters by site, at which the model is run.

    Raises:
        SiteError: the message names the site and the row.
    """
    is_batch = data.batch_size is not None
    if is_batch and isinstance(data, TensorData) and is_row_wise(log_posterior):
        check_supports(log_posterior, params, chunks_of(log_posterior, data))
        check_something_counts(
            log_posterior.run(params, chunk.arguments, chunk.indices).sites
            for chunk in chunks_of(log_posterior, data)
        )


def check_other_batches(
    log_posterior: LogPosterior, data: Data, params: Mapping[str, Tensor]
) -> None:
    """Raises if the rules of minibatch scaling do not hold on two further batches, whose rows are
    from all over the data; does nothing if every step has all rows.

    Raises:
        PlateError: a row's term of the log joint, or a constant, depends on the other rows of the
            batch.
    """
    if data.batch_size is not None:
        check_batches(log_posterior, params, data.first(), data.spread(OTHER_BATCHES))


def check_can_adjust(problem: Problem, name: str) -> None:
    """Raises if a method cannot accept or reject proposals on this problem: it needs the log joint
    of all rows, and chains that share no parameters.

    Args:
        problem: model, data and starts of the run.
        name: name of the method, for the message.

    Raises:
        ArgumentError: steps take minibatches, or the model has point-estimated parameters.
    """
    if problem.data.batch_size is not None:
        raise ArgumentError(
            f"{name} accepts or rejects by the log joint of all rows, and a step would take "
            f"{problem.data.batch_size:,} of {problem.log_posterior.num_data:,}: pass the data as "
            "tensors with batch_size=None, or use BAOA, which takes minibatches"
        )
    if problem.engine.has_points:
        site = next(iter(problem.log_posterior.points))
        raise ArgumentError(
            f"{name} has no steps for param '{site}', which all chains share: give it a prior, or "
            "use BAOA"
        )


def position_of(problem: Problem, values: Mapping[str, Tensor], argument: str) -> Tensor:
    """The vector of all D unconstrained parameters that belongs to constrained values of the sites,
    as a user passes them.

    Args:
        problem: model, data and starts of the run.
        values: constrained values of all latent sites, by name. Point-estimated parameters may be
            left out; they then have the values with which chain 0 starts.
        argument: name of the user's argument that has these values, for messages.

    Raises:
        ArgumentError: a site is missing, unknown, or has another shape.
    """
    layout, start = problem.engine.layout, problem.positions[0]
    sites = problem.log_posterior.values
    for name, value in {**dict.fromkeys(problem.log_posterior.latents), **values}.items():
        like = sites.get(name)
        if value is None or like is None or torch.as_tensor(value).shape != like.shape:
            shapes = {site: list(like.shape) for site, like in sites.items()}
            raise ArgumentError(
                f"{argument}[{name!r}]: pass constrained values of sites and shapes {shapes}"
            )
    converted = {name: torch.as_tensor(value).to(sites[name]) for name, value in values.items()}
    unconstrained = problem.log_posterior.unconstrain(converted)
    return layout.flatten(layout.unflatten(start) | unconstrained)


def as_log_posterior(model: Model | LogPosterior, num_data: int | None) -> LogPosterior:
    """A new `LogPosterior` of a model, before any batch, for data of `num_data` rows; None if that
    number is not known yet.
    """
    if isinstance(model, LogPosterior):
        return model.renew(num_data)
    return LogPosterior(model, num_data)


def module_device(model: Model | LogPosterior) -> torch.device | None:
    """The device of a model's first parameter, to which data are moved; None for a model without
    parameters, such as a plain function."""
    module = model.model if isinstance(model, LogPosterior) else model
    if isinstance(module, nn.Module):
        parameter = next(module.parameters(), None)
        return None if parameter is None else parameter.device
    return None


def _data_for(log_posterior: LogPosterior, data: Data) -> Data:
    """The data of the run: unchanged, except for a model that subsamples by itself, for which they
    are all rows with indices of subsamples.

    Raises:
        ArgumentError: the model subsamples by itself, and the data are not whole tensors.
    """
    info = log_posterior.model_info
    if info.own_plate is None or isinstance(data, OwnSubsamples):
        return data
    if not isinstance(data, TensorData) or data.batch_size is not None:
        raise ArgumentError(
            f"the model subsamples by itself in plate '{info.own_plate}': pass the whole data as "
            "tensors, without a loader or batch_size"
        )
    return OwnSubsamples(data.arguments, log_posterior.num_data, info.batch_size, data.columns)
