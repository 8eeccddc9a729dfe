"""Finds the chains' starts: a value for every site, drawn again if the log joint is not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import transform_to

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.data.batches import Batch
from pyro_scale.engine.step import Engine
from pyro_scale.errors import ArgumentError, ModelError, SiteError
from pyro_scale.kernels import Hyperparameters
from pyro_scale.model.diagnose import find_broken_site
from pyro_scale.model.init_strategies import InitFunction
from pyro_scale.model.log_posterior import (
    MOST_STARTS,
    LogPosterior,
    Params,
    unconstrained_values,
)
from pyro_scale.model.site_checks import FINITE_DATA

#: Where chains start: an initialization, constrained values `[num_chains, ...]` by site, or None
#: for the default.
ChainStarts = InitFunction | dict[str, Tensor] | None


class ChainInits(NamedTuple):
    """Where chains start.

    Attributes:
        strategy: the init strategy as the user passed it: None, a function, or a dict of starts by
            site.
        functions: one init function for each chain, from `init_of`.
    """

    strategy: ChainStarts
    functions: Sequence[InitFunction]


def initialize(
    log_posterior: LogPosterior,
    kernel: Hyperparameters,
    first: Arguments,
    inits: ChainInits,
    seed: int,
    per_chain: bool,
    drawn: Params | None = None,
    must_be_usable: bool = True,
) -> tuple[Engine, Tensor]:
    """Finds a start for every chain. Returns (the engine that takes steps with all chains; the
    chains' starts, all D unconstrained parameters of each, `[chains, D]`).

    Args:
        log_posterior: the model, after its preflight (the checks of the model before a run).
        kernel: the sampler's kernel, with its hyperparameters.
        first: one minibatch, as the model's arguments.
        inits: where chains start.
        seed: the run's seed.
        per_chain: whether each chain has its own minibatches.
        drawn: chain 0's start, if the preflight has drawn it; None to draw it.
        must_be_usable: whether the log joint has to be finite at the starts; False for methods that
            do not use them.

    Raises:
        ArgumentError: a dict of starts or of hyperparameters does not fit the model.
        SiteError: a chain's log joint at its start is NaN or infinite on the first batch.
    """
    params = {name: point.unconstrained for name, point in log_posterior.points.items()}
    strategy, functions = inits
    if isinstance(strategy, dict):
        check_sites(log_posterior, strategy)
        params |= _params_of(log_posterior, strategy)

    def draw(chain: int, attempt: int) -> dict[str, Tensor]:
        return log_posterior.start(first, seed, chain, functions[chain], attempt=attempt)

    if must_be_usable:
        first_start = dict(drawn) if drawn is not None else draw(0, 0)
        starts = [first_start, *(draw(chain, 0) for chain in range(1, len(functions)))]
    else:
        starts = [unconstrained_values(log_posterior.model_info.sites)] * len(functions)
    layout, num_latents = (
        Layout.from_tensors(starts[0] | params),
        Layout.from_tensors(starts[0]).size,
    )
    positions = torch.stack([layout.flatten(start | params) for start in starts])
    engine = Engine(with_all_sites(kernel, layout), log_posterior, layout, num_latents)

    def redraw(chain: int, attempt: int) -> Tensor:
        return layout.flatten(draw(chain, attempt) | params)

    if not must_be_usable:
        return engine, positions
    again = None if isinstance(strategy, dict) else redraw
    return _find_usable_starts(engine, log_posterior, positions, first, per_chain, again)


def init_of(
    log_posterior: LogPosterior,
    init_strategy: ChainStarts,
    chain: int,
    num_chains: int,
) -> InitFunction:
    """The init function of one chain, as Pyro's strategies are: it takes a site of a Pyro trace and
    returns the constrained value at which the chain starts there.

    Args:
        log_posterior: the model, which gives the default start.
        init_strategy: the init strategy as the user passed it: None for the default, a function, or
            a dict from a site to starts `[num_chains, ...]` (the default for other sites).
        chain: number of the chain.
        num_chains: number of chains of the run.

    Raises:
        ArgumentError: an entry of a dict of starts is not a tensor; when the function is called, a
            tensor has the wrong shape.
    """
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
        starts, like = init_strategy[name], default(site)
        if starts.shape != (num_chains, *like.shape):
            raise ArgumentError(
                f"init_strategy['{name}'] has shape {list(starts.shape)}: with "
                f"num_chains={num_chains} it must be {[num_chains, *like.shape]}"
            )
        return starts[chain].to(like)

    return init


def check_sites(log_posterior: LogPosterior, starts: Mapping[str, Tensor]) -> None:
    """Raises if a dict of starts names a site that the model does not have.

    Raises:
        ArgumentError: the message names the first such site.
    """
    for name in starts:
        if name not in log_posterior.latents and name not in log_posterior.points:
            raise ArgumentError(
                f"init_strategy: '{name}' is not a latent site; the model has "
                f"{list(log_posterior.latents)}"
            )


def _params_of(log_posterior: LogPosterior, starts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Unconstrained starts of the point-estimated parameters (`pyro.param` sites, which are
    optimized, not sampled), by site, from the user's dict of starts; sites that the dict leaves out
    are left out. Of the chains' values those of chain 0, as all chains share these parameters."""
    params = {}
    for name, point in log_posterior.points.items():
        if name in starts:
            value = transform_to(point.constraint).inv(starts[name][0]).to(point.unconstrained)
            params[name] = value.expand_as(point.unconstrained)
    return params


def with_all_sites(kernel: Hyperparameters, layout: Layout) -> Hyperparameters:
    """The sampler's kernel with completed hyperparameters: those that the user passed as dicts by
    site get the default for sites that are missing.

    Raises:
        ArgumentError: a site that the model does not have, a missing site without a default, or a
            tensor of another shape than the site's.
    """
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


def _find_usable_starts(
    engine: Engine,
    log_posterior: LogPosterior,
    positions: Tensor,
    arguments: Arguments,
    per_chain: bool,
    redraw: Callable[[int, int], Tensor] | None,
) -> tuple[Engine, Tensor]:
    """(An engine that can evaluate the model: vectorized over chains if possible, otherwise chain
    by chain; the chains' starts, `[chains, D]`).

    A start where the log joint or its gradient is not finite is drawn again, as in Pyro's own
    samplers.

    Args:
        engine: an engine that is vectorized over chains.
        log_posterior: the model, after its preflight.
        positions: the starts to try first, `[chains, D]`.
        arguments: one minibatch, as the model's arguments.
        per_chain: whether each chain has its own minibatches.
        redraw: function (chain, attempt) -> another start [D]; None if the user passed the starts,
            which are not replaced.

    Raises:
        SiteError: a chain's log joint at its start is NaN or infinite on the first batch.
    """
    layout = engine.layout
    others = (arguments, per_chain, log_posterior.first_indices())
    engine, (values, gradient) = first_evaluation(engine, positions, *others)
    finite = torch.isfinite(values)
    usable = finite & torch.isfinite(gradient).all(1)
    for attempt in range(1, MOST_STARTS):
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
        params, indices = layout.unflatten(positions[chain]), log_posterior.first_indices()
        site, _ = find_broken_site(log_posterior, params, arguments, indices)
        raise SiteError(
            f"site '{site or '?'}': its log density is NaN or infinite on the first batch where "
            f"chain {chain} starts; {rows.to_clean(arguments) or FINITE_DATA}",
            code="not-finite",
        )
    return engine, positions


def first_evaluation(
    engine: Engine,
    positions: Tensor,
    arguments: Arguments,
    per_chain: bool,
    indices: Tensor | None = None,
) -> tuple[Engine, tuple[Tensor, Tensor]]:
    """Evaluates the model at the starts of all chains on one minibatch, to see whether it can be
    vectorized over chains and whether the starts are usable.

    Args:
        engine: the engine to try first; if it fails, the same engine chain by chain is used.
        positions: starts of the chains, `[chains, D]`.
        arguments: the minibatch, as the model's arguments.
        per_chain: whether each chain has its own minibatches.
        indices: indices of the rows `[B]`, for a model that subsamples by itself; None for others.

    Returns:
        (An engine that can evaluate the model, (log joint of each chain in nats, `[chains]`; its
        gradient divided by N, the number of rows of the data, `[chains, D]`)).

    Raises:
        ModelError: the model draws random numbers outside of `pyro.sample`.
    """
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
                f"and make every random draw a pyro.sample site ({error})",
                code="random-likelihood",
            ) from error
    one_by_one = dataclasses.replace(engine, vectorized=False)
    return one_by_one, one_by_one.evaluate(positions, batch)
