"""Everything that comes before the first step: the model understood, chains at their starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import transform_to

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import warn
from pyro_scale.data.batches import Batch, Batches, OwnIndices, SharedBatches, WholeData
from pyro_scale.data.features import FeatureData
from pyro_scale.data.loaders import to_device
from pyro_scale.data.row_sampler import RowIndices, Sampling
from pyro_scale.data.sources import Data, IndexedData, OwnSubsamples, TensorData
from pyro_scale.engine.step import Engine
from pyro_scale.errors import ArgumentError, ModelError, ModelWarning, SiteError
from pyro_scale.fullbatch.chunks import is_row_wise, pieces_of
from pyro_scale.kernels import Hyperparameters
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.model_info import model_warnings
from pyro_scale.model.other_batches import check_batches, check_supports
from pyro_scale.model.preflight import InitFunction

#: How many starts of a chain are tried: of a model that half of all starts break, 20 fail once in
#: a million.
_MOST_STARTS = 20


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
    """

    log_posterior: LogPosterior
    data: Data
    engine: Engine
    positions: Tensor
    seed: int
    features: TensorData | FeatureData | None = None
    base: str = "none"

    def batches(self, num_chains: int, sampling: Sampling, share: bool = False) -> Batches:
        """The chains' batches, as the engine takes them: their own, or the same for all."""
        source = self.features or self.data
        if share:
            return SharedBatches(source.batches(self.seed, 1, sampling), num_chains)
        return source.batches(self.seed, num_chains, sampling)

    def with_engine(self, **changes: Any) -> Problem:
        """The same with another kernel or density."""
        return dataclasses.replace(self, engine=dataclasses.replace(self.engine, **changes))

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
            indices = RowIndices(self.seed, 1, data.num_data, data.batch_size, "shuffle")
            return OwnIndices(arguments, indices)
        return WholeData(to_device(arguments, module_device(self.log_posterior)))


def prepare(
    log_posterior: LogPosterior,
    data: Data,
    kernel: Hyperparameters,
    init_strategy: Any,
    num_chains: int,
    seed: int,
) -> Problem:
    """Runs the model's preflight and finds every chain's start.

    Raises:
        ModelError, SiteError, PlateError: what is wrong with the model.
        ArgumentError: a dict of starts that does not fit the model or the number of chains.
    """
    arguments = data.first()
    inits = [init_of(log_posterior, init_strategy, c, num_chains) for c in range(num_chains)]
    log_posterior.prepare(arguments, inits[0], seed)
    if isinstance(init_strategy, dict):
        refuse_unknown_sites(log_posterior, init_strategy)
    for doubt in model_warnings(log_posterior.model_info):
        warn(ModelWarning, doubt)
    data = _as_taken(log_posterior, data)
    starts = [log_posterior.start(arguments, seed, c, init) for c, init in enumerate(inits)]
    points = {name: point.unconstrained for name, point in log_posterior.points.items()}
    if isinstance(init_strategy, dict):
        points |= _points_of(log_posterior, init_strategy)
    layout = Layout.of(starts[0] | points)
    positions = torch.stack([layout.flatten(start | points) for start in starts])
    num_latents = Layout.of(starts[0]).size
    engine = Engine(_with_all_sites(kernel, layout), log_posterior, layout, num_latents)

    def draw(chain: int, attempt: int) -> Tensor:
        start = log_posterior.start(arguments, seed, chain, inits[chain], attempt=attempt)
        return layout.flatten(start | points)

    redraw = None if isinstance(init_strategy, dict) else draw
    per_chain = data.batch_size is not None
    engine, positions = _tried(engine, log_posterior, positions, arguments, per_chain, redraw)
    at_first = layout.unflatten(positions[0])
    check_all_rows(log_posterior, data, at_first)
    return Problem(log_posterior, data, engine, positions, seed)


def check_all_rows(log_posterior: LogPosterior, data: Data, params: Mapping[str, Tensor]) -> None:
    """Tries on rows from all over the data what the first batch has told of the model.

    Raises:
        SiteError: an observed value outside of its support, by row.
        PlateError: what was taken for a row's, or for a constant, depends on the other rows.
    """
    data = _as_taken(log_posterior, data)
    if data.batch_size is None:
        return
    if isinstance(data, TensorData) and is_row_wise(log_posterior):
        check_supports(log_posterior, params, pieces_of(log_posterior, data))
    check_batches(log_posterior, params, data.first(), _from_everywhere(data))


def _from_everywhere(data: Data) -> list[tuple[Arguments, Tensor | None]]:
    """Batches of rows drawn from the whole data, where rows can be had by their places, and for a
    model that subsamples by itself these."""
    if isinstance(data, OwnSubsamples):
        total = data.num_data
    elif isinstance(data, TensorData):
        total = rows.count(data.arguments) or 0
    elif isinstance(data, IndexedData):
        total = len(data.subset)
    else:
        return []
    size = data.batch_size or total
    places = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    chosen = [part for part in places[: _OTHER_BATCHES * size].split(size) if len(part) == size]
    if isinstance(data, IndexedData):  # which may be dear to read
        return [(each, None) for each in data.read([data.subset[chosen[0]].tolist()], seed=0)]
    chosen = [part.to(rows.device(data.arguments)) for part in chosen]
    if isinstance(data, OwnSubsamples):
        return [(data.arguments, part) for part in chosen]
    return [(rows.take(data.arguments, part), None) for part in chosen]


def position_of(problem: Problem, values: Mapping[str, Tensor], argument: str) -> Tensor:
    """Constrained values of all sites, passed as some argument, as a position [D]; points that
    are not among them stay as they are.

    Raises:
        ArgumentError: a site is missing, unknown, or has another shape.
    """
    layout, start = problem.engine.layout, problem.positions[0]
    known = problem.log_posterior.constrain(layout.unflatten(start))
    for name, value in {**dict.fromkeys(problem.log_posterior.latents), **values}.items():
        like = known.get(name)
        if value is None or like is None or torch.as_tensor(value).shape != like.shape:
            shapes = {site: list(each.shape) for site, each in known.items()}
            raise ArgumentError(
                f"{argument}[{name!r}]: pass constrained values of sites and shapes {shapes}"
            )
    given = {name: torch.as_tensor(value).to(known[name]) for name, value in values.items()}
    unconstrained = problem.log_posterior.unconstrain(given)
    return layout.flatten(layout.unflatten(start) | unconstrained)


def as_log_posterior(
    model: Callable[..., Any] | LogPosterior, num_data: int | None
) -> LogPosterior:
    """The model as a log posterior, for N rows."""
    if isinstance(model, LogPosterior):
        return model.renewed(num_data)
    return LogPosterior(model, num_data)


def module_device(model: Callable[..., Any] | LogPosterior) -> torch.device | None:
    """Where the model's parameters are; None for a model without any."""
    module = model.model if isinstance(model, LogPosterior) else model
    if isinstance(module, nn.Module):
        parameter = next(module.parameters(), None)
        return None if parameter is None else parameter.device
    return None


def _as_taken(log_posterior: LogPosterior, data: Data) -> Data:
    """The data, or indices into them for a model that subsamples by itself."""
    known = log_posterior.model_info
    if known.own_plate is None or isinstance(data, OwnSubsamples):
        return data
    if not isinstance(data, TensorData) or data.batch_size is not None:
        raise ArgumentError(
            f"the model subsamples by itself in plate '{known.own_plate}': pass the whole data as "
            "tensors, without a loader or batch_size"
        )
    return OwnSubsamples(data.arguments, log_posterior.num_data, known.batch_size)


def init_of(
    log_posterior: LogPosterior, init_strategy: Any, chain: int, num_chains: int
) -> InitFunction:
    """Where one chain starts: site -> constrained value."""
    default = log_posterior.default_init(chain)
    if not isinstance(init_strategy, dict):
        return init_strategy or default
    for name, value in init_strategy.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(
                f"init_strategy['{name}'] is a {type(value).__name__}: pass a tensor of "
                "constrained values, [num_chains, ...]"
            )

    def init(site: Any) -> Tensor:
        name = site["name"]
        if name not in init_strategy:
            return default(site)
        given, like = init_strategy[name], default(site)
        if given.shape != (num_chains, *like.shape):
            raise ArgumentError(
                f"init_strategy['{name}'] has shape {list(given.shape)}: with "
                f"num_chains={num_chains} it must be {[num_chains, *like.shape]}"
            )
        return given[chain].to(like)

    return init


def refuse_unknown_sites(log_posterior: LogPosterior, starts: Mapping[str, Tensor]) -> None:
    """Refuses starts of sites that the model does not have."""
    for name in starts:
        if name not in log_posterior.latents and name not in log_posterior.points:
            raise ArgumentError(
                f"init_strategy: '{name}' is not a latent site; the model has "
                f"{list(log_posterior.latents)}"
            )


def _points_of(log_posterior: LogPosterior, starts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Unconstrained points among the starts `[num_chains, ...]`: one value, as all chains have."""
    found = {}
    for name, point in log_posterior.points.items():
        if name in starts:
            value = transform_to(point.constraint).inv(starts[name][0]).to(point.unconstrained)
            found[name] = value.expand_as(point.unconstrained)
    return found


def _with_all_sites(kernel: Hyperparameters, layout: Layout) -> Hyperparameters:
    """The kernel with a value for every site in hyperparameters that are given by site."""
    defaults = {field.name: field.default for field in dataclasses.fields(kernel)}
    completed = {
        name: _of_all_sites(name, hyper, defaults[name], layout)
        for name, hyper in kernel.hyperparameters().items()
        if isinstance(hyper, Mapping)
    }
    return dataclasses.replace(kernel, **completed) if completed else kernel


def _of_all_sites(name: str, hyper: Mapping[str, Any], default: Any, layout: Layout) -> Any:
    unknown = [site for site in hyper if site not in layout.names]
    if unknown:
        raise ArgumentError(f"{name}: there is no site {unknown}; the model has {layout.names}")
    missing = [site for site in layout.names if site not in hyper]
    if missing and default is dataclasses.MISSING:
        raise ArgumentError(f"{name}: no value for site {missing}; it has no default")
    for site, shape in zip(layout.names, layout.shapes, strict=True):
        value = hyper.get(site, default)
        if isinstance(value, Tensor) and value.dim() and value.shape != shape:
            raise ArgumentError(
                f"{name}[{site!r}] has shape {list(value.shape)}: it must have the site's "
                f"unconstrained one, {list(shape)}"
            )
    return {site: hyper.get(site, default) for site in layout.names}


def _tried(
    engine: Engine,
    log_posterior: LogPosterior,
    positions: Tensor,
    arguments: Arguments,
    per_chain: bool,
    redraw: Callable[[int, int], Tensor] | None,
) -> tuple[Engine, Tensor]:
    """(The engine that the model goes through: vectorized over chains, or else one by one; where
    chains start).

    A start where the log joint or its gradient is not finite is drawn anew, as Pyro's own samplers
    do: `redraw(chain, attempt)`.

    Raises:
        SiteError: a chain's log joint at its start is NaN or infinite on the first batch.
    """
    layout = engine.layout
    others = (arguments, per_chain, log_posterior.first_indices())
    engine, (values, gradient) = first_evaluation(engine, positions, *others)
    finite = torch.isfinite(values)
    usable = finite & torch.isfinite(gradient).all(1)
    for attempt in range(1, _MOST_STARTS):
        if redraw is None or bool(usable.all()):
            break
        drawn = positions.clone()
        for chain in torch.nonzero(~usable)[:, 0].tolist():
            drawn[chain] = redraw(chain, attempt)
        _, (values, gradient) = first_evaluation(engine, drawn, *others)
        usable = torch.isfinite(values) & torch.isfinite(gradient).all(1)
        positions = torch.where(usable[:, None], drawn, positions)
        finite = finite | usable
    if not bool(finite.all()):
        chain = int(torch.nonzero(~finite)[0])
        site = log_posterior.broken_site(layout.unflatten(positions[chain]), arguments)
        raise SiteError(
            f"site '{site}': its log density is NaN or infinite on the first batch where chain "
            f"{chain} starts; check the data, or change init_strategy"
        )
    return engine, positions


def first_evaluation(
    engine: Engine,
    positions: Tensor,
    arguments: Arguments,
    per_chain: bool,
    indices: Tensor | None = None,
) -> tuple[Engine, tuple[Tensor, Tensor]]:
    """(The engine that the model goes through, each chain's log joint on one batch and its
    gradient)."""
    num_chains = len(positions)
    if indices is not None:
        batch = Batch(arguments, per_chain=False, indices=indices.expand(num_chains, -1))
    elif per_chain:
        batch = Batch(rows.stack([arguments] * num_chains), per_chain=True)
    else:
        batch = Batch(arguments, per_chain=False)
    try:
        return engine, engine.evaluate(positions, batch)
    except (RuntimeError, NotImplementedError) as error:
        if "random operation" in str(error):
            raise ModelError(
                "something in the model draws at random: call .eval() on modules with dropout, "
                f"and make every random draw a pyro.sample site ({error})"
            ) from error
    one_by_one = dataclasses.replace(engine, vectorized=False)
    return one_by_one, one_by_one.evaluate(positions, batch)
