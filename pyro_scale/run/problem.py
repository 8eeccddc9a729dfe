"""Everything before the first step: the model after its preflight, and chains at their starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import warn
from pyro_scale.curvature.chunks import chunks_of, is_row_wise
from pyro_scale.data.batches import Batches, OwnIndices, SharedBatches, WholeData
from pyro_scale.data.features import FeatureData
from pyro_scale.data.loaders import to_device
from pyro_scale.data.row_sampler import RowIndices, Sampling
from pyro_scale.data.sources import Data, OwnSubsamples, TensorData
from pyro_scale.distributed.ranks import ALONE, Ranks
from pyro_scale.engine.draws import Draws
from pyro_scale.engine.step import Engine
from pyro_scale.errors import ArgumentError, ModelWarning
from pyro_scale.kernels import Hyperparameters
from pyro_scale.model.diagnose import cut_gradients
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.model_info import model_warnings
from pyro_scale.model.observation_checks import check_something_counts
from pyro_scale.model.other_batches import check_batches, check_supports
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.initialize import init_of, initialize
from pyro_scale.run.understood import Understood

#: Batches besides the first on which the rules are tried before a run.
_OTHER_BATCHES = 2


@dataclass(frozen=True)
class Problem:
    """What a run starts from.

    Attributes:
        log_posterior: the model, understood.
        data: where batches come from.
        engine: moves the chains.
        positions: the chains' starts, `[chains, D]`.
        seed: of the run.
        features: where batches come from instead, if the engine's density takes something else.
        base: how a network's frozen base is run, in words.
        chooses_batches: whether the rows of a batch are the library's choice.
        ranks: the processes that the chains are shared out among.
        understood: what the next run of the same model and data need not find out again.
    """

    log_posterior: LogPosterior
    data: Data
    engine: Engine
    positions: Tensor
    seed: int
    features: TensorData | FeatureData | None = None
    base: str = "none"
    chooses_batches: bool = False
    ranks: Ranks = ALONE
    understood: Understood | None = None

    @property
    def chains(self) -> range:
        """The numbers of the chains that this process moves.  Points, which move by the mean
        gradient of all chains, keep these on every one."""
        num_chains = len(self.positions)
        return range(num_chains) if self.engine.has_points else self.ranks.chains(num_chains)

    @property
    def is_split(self) -> bool:
        """Whether processes have shared the chains out."""
        return len(self.chains) < len(self.positions)

    def numbers(self, count: int) -> Sequence[int]:
        """Those of so many chains: of all, or of this process's."""
        return range(count) if count == len(self.positions) else self.chains

    @property
    def is_writer(self) -> bool:
        """Whether this process is the one, of those that move the same chains, that writes."""
        if not self.is_split:
            return self.ranks.is_first
        return self.ranks.rows is None or self.ranks.rows.rank == 0

    @property
    def has_all_rows(self) -> bool:
        """Whether the data of this process are all rows."""
        return self.ranks.rows is None or self.ranks.rows.share is None

    @property
    def part(self) -> slice:
        """This process's rows of every batch."""
        own = self.ranks.rows
        return slice(None) if own is None else own.of(self.batch_size)

    @property
    def batch_size(self) -> int:
        """Rows of a batch: B, or N for the whole data."""
        if self.data.batch_size is None and isinstance(self.data, TensorData):
            return rows.count(self.data.arguments) or self.log_posterior.model_info.batch_size
        return self.data.batch_size or self.log_posterior.model_info.batch_size

    def in_batches_of(self, size: int | None) -> Problem:
        """The same tensors, so many rows at a time, or all of them."""
        assert isinstance(self.data, TensorData)
        return dataclasses.replace(self, data=dataclasses.replace(self.data, batch_size=size))

    def batches(
        self,
        num_chains: int,
        sampling: Sampling,
        share: bool = False,
        chains: Sequence[int] | None = None,
    ) -> Batches:
        """Chains' batches, as the engine takes them: their own, or the same for all.

        Args:
            num_chains: how many chains there are.
            sampling: how rows are drawn.
            share: whether all have the same.
            chains: the numbers of those whose batches are wanted; all of them by default.
        """
        source, chains = self.features or self.data, chains or range(num_chains)
        seed, own = self.seed, self.ranks.rows
        if own is not None and not self.has_all_rows:  # or ranks would draw the same places
            seed = derived_seed(seed, own.rank, Purpose.BATCHES)
        if share:
            return SharedBatches(source.batches(seed, 1, sampling), len(chains))
        return source.batches(seed, num_chains, sampling, chains)

    def with_engine(self, **changes: Any) -> Problem:
        """The same with another kernel or density."""
        return dataclasses.replace(self, engine=dataclasses.replace(self.engine, **changes))

    def with_lr(self, lr: float) -> Problem:
        """The same with another step size."""
        return self.with_engine(kernel=dataclasses.replace(self.engine.kernel, lr=lr))

    def moved_to(self, draws: Draws, chains: list[int]) -> Problem:
        """The same, with some chains at the last of their draws."""
        positions = self.positions.clone()
        positions[chains] = draws.positions[chains, -1].to(positions)
        return dataclasses.replace(self, positions=positions)

    def epoch(self, sampling: Sampling) -> int | None:
        """Batches that go through all rows once; None where none do, or a batch is all rows."""
        size = self.data.batch_size
        if size is None or sampling == "replacement":
            return None
        return max(1, self.log_posterior.num_data // size)

    def batches_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batches:
        """A batch given as the model's own arguments."""
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
    init_strategy: Any,
    num_chains: int,
    seed: int,
    must_be_usable: bool = True,
    earlier: Understood | None = None,
) -> Problem:
    """Runs the model's preflight and finds every chain's start.

    A method that takes no steps passes `Hyperparameters()`, by which nothing is moved; one that is
    told where to be, `must_be_usable=False`: the log joint is not evaluated at starts.  Where an
    earlier run has understood the same model, the checks that look for what it may do on other
    batches are not repeated.

    Raises:
        ModelError, SiteError, PlateError: what is wrong with the model.
        ArgumentError: a dict of starts that does not fit the model or the number of chains.
    """
    arguments = data.first()
    known = None if earlier is None else earlier.again(log_posterior, data)
    log_posterior = known or log_posterior
    inits = [init_of(log_posterior, init_strategy, c, num_chains) for c in range(num_chains)]
    drawn = log_posterior.prepare(arguments, inits[0], seed)
    for warning in model_warnings(log_posterior.model_info):
        warn(ModelWarning, warning)
    data = _data_for(log_posterior, data)
    per_chain = data.batch_size is not None
    engine, positions = initialize(
        log_posterior,
        kernel,
        arguments,
        inits,
        init_strategy,
        seed,
        per_chain,
        drawn,
        must_be_usable,
    )
    params = engine.layout.unflatten(positions[0])
    check_values(log_posterior, data, params)
    if known is None:
        check_other_batches(log_posterior, data, params)
        if must_be_usable:
            _warn_of_cut_gradients(log_posterior, params, arguments)
    understood = None if known is None else earlier
    return Problem(log_posterior, data, engine, positions, seed, understood=understood)


def _warn_of_cut_gradients(
    log_posterior: LogPosterior, params: Mapping[str, Tensor], arguments: Arguments
) -> None:
    for name, latents in cut_gradients(log_posterior, params, arguments).items():
        along = " and ".join(f"'{latent}'" for latent in latents[:3])
        warn(
            ModelWarning,
            f"site '{name}': its log density depends on {along}, and its gradient does not: "
            "something between them cuts gradients, such as .detach(), .item(), .data, float() or "
            "torch.no_grad(). Methods follow gradients: draws will be wrong, unless that is meant",
            code="cut-gradient",
        )


def check_all_rows(log_posterior: LogPosterior, data: Data, params: Mapping[str, Tensor]) -> None:
    """Tries on rows from all over the data what the first batch has told of the model.

    Raises:
        SiteError: an observed value outside of its support, by row.
        PlateError: what was taken for a row's, or for a constant, depends on the other rows.
    """
    data = _data_for(log_posterior, data)
    check_values(log_posterior, data, params)
    check_other_batches(log_posterior, data, params)


def check_values(log_posterior: LogPosterior, data: Data, params: Mapping[str, Tensor]) -> None:
    """Refuses observed values outside of their support, in all rows of tensors, and masks that
    leave all rows out."""
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
    """Tries the rules on some batches besides the first."""
    if data.batch_size is not None:
        check_batches(log_posterior, params, data.first(), data.spread(_OTHER_BATCHES))


def check_can_adjust(problem: Problem, name: str) -> None:
    """Checks that proposals can be accepted or rejected: by the log joint of all rows, and of each
    chain alone.

    Args:
        problem: of the run.
        name: of the method.

    Raises:
        ArgumentError: steps take minibatches; there are points, which chains share.
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


def check_rows_can_be_shared(problem: Problem) -> None:
    """Checks that ranks can take parts of a batch.

    Raises:
        ArgumentError: the model chooses its rows by itself; the mesh is of another device.
    """
    shared, device = problem.ranks.rows, problem.positions.device.type
    if shared is not None and shared.device != device:
        raise ArgumentError(
            f"mesh: it is of {shared.device} devices, and the model is on {device}: pass "
            f"init_device_mesh('{device}', ...), or move the model and the data"
        )
    plate = problem.log_posterior.model_info.own_plate
    if shared is not None and isinstance(problem.data, OwnSubsamples):
        raise ArgumentError(
            f"mesh: the model subsamples by itself in plate '{plate}', so ranks cannot take parts "
            "of its batches: pass batch_size=, and write the plate with subsample_size=len(x)"
        )


def position_of(problem: Problem, values: Mapping[str, Tensor], argument: str) -> Tensor:
    """Constrained values of all sites, passed as some argument, as a position [D]; points that
    are not among them stay as they are.

    Raises:
        ArgumentError: a site is missing, unknown, or has another shape.
    """
    layout, start = problem.engine.layout, problem.positions[0]
    sites = problem.log_posterior.values
    for name, value in {**dict.fromkeys(problem.log_posterior.latents), **values}.items():
        like = sites.get(name)
        if value is None or like is None or torch.as_tensor(value).shape != like.shape:
            shapes = {site: list(each.shape) for site, each in sites.items()}
            raise ArgumentError(
                f"{argument}[{name!r}]: pass constrained values of sites and shapes {shapes}"
            )
    converted = {name: torch.as_tensor(value).to(sites[name]) for name, value in values.items()}
    unconstrained = problem.log_posterior.unconstrain(converted)
    return layout.flatten(layout.unflatten(start) | unconstrained)


def as_log_posterior(
    model: Callable[..., Any] | LogPosterior, num_data: int | None
) -> LogPosterior:
    """The model as a log posterior, for N rows."""
    if isinstance(model, LogPosterior):
        return model.renew(num_data)
    return LogPosterior(model, num_data)


def module_device(model: Callable[..., Any] | LogPosterior) -> torch.device | None:
    """Where the model's parameters are; None for a model without any."""
    module = model.model if isinstance(model, LogPosterior) else model
    if isinstance(module, nn.Module):
        parameter = next(module.parameters(), None)
        return None if parameter is None else parameter.device
    return None


def _data_for(log_posterior: LogPosterior, data: Data) -> Data:
    """The data, or indices into them for a model that subsamples by itself."""
    info = log_posterior.model_info
    if info.own_plate is None or isinstance(data, OwnSubsamples):
        return data
    if not isinstance(data, TensorData) or data.batch_size is not None:
        raise ArgumentError(
            f"the model subsamples by itself in plate '{info.own_plate}': pass the whole data as "
            "tensors, without a loader or batch_size"
        )
    return OwnSubsamples(data.arguments, log_posterior.num_data, info.batch_size, data.columns)
