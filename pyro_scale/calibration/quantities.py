"""What is ranked: latents, the log likelihood, and functions of latents and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pyro_scale.calibration.simulations import Generator
from pyro_scale.calibration.stack import Stack, take_one
from pyro_scale.calibration.truth import Truth
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import ArgumentError
from pyro_scale.model.sites import Site
from pyro_scale.model.terms import terms_of
from pyro_scale.posterior.chunked_vmap import vmap_in_chunks

#: A function of one draw's sites, and of the data as the model takes them.
Quantity = Callable[..., Any]
#: The name of the log likelihood, which is always ranked.
LOGLIK = "loglik"


class Ranked(NamedTuple):
    """Quantities of some data sets.

    Attributes:
        ranks: of the true value among draws, `[data sets, ...]`: how many are smaller.
        true: the value that the data were drawn from.
        mean, sd: of the draws.
    """

    ranks: dict[str, Tensor]
    true: dict[str, Tensor]
    mean: dict[str, Tensor]
    sd: dict[str, Tensor]


def check_quantities(quantities: Mapping[str, Quantity], sites: tuple[str, ...]) -> None:
    """Refuses names that are taken, and values that cannot be called.

    Raises:
        ArgumentError: it names the quantity.
    """
    for name, function in quantities.items():
        if not callable(function):
            raise ArgumentError(
                f"quantities[{name!r}] is not callable: pass a function of (sites, data)"
            )
        if name in sites:
            raise ArgumentError(
                f"quantities[{name!r}]: a latent site has this name, and is ranked anyway: choose "
                "another"
            )


def check_values(
    truth: Truth,
    stack: Stack,
    quantities: Mapping[str, Quantity],
    predict_at: Arguments | None,
    seed: int,
) -> None:
    """Tries quantities and predictions on the first data set, before the work starts.

    Raises:
        ArgumentError: it names what fails.
    """
    model, zero = truth.fitted, torch.tensor(0)
    params = {name: value[0] for name, value in truth.params(1, seed).items()}
    shared, own = cast(Any, stack.arguments(zero))
    with own_generator(seed), torch.no_grad():
        sites = stack.log_posterior.run(params, (shared, own)).sites
        told = _sites_of(sites, model)
        for name, quantity in quantities.items():
            try:
                torch.as_tensor(quantity(dict(told), model.given(own)))
            except Exception as error:
                raise ArgumentError(
                    f"quantities[{name!r}] fails: {type(error).__name__}: {error}.  It is called "
                    f"with a dict of the sites {list(told)} and the model's arguments, and "
                    "gives a number or a tensor"
                ) from error
        if predict_at is not None:
            try:
                model.log_posterior.simulate(params, predict_at)
            except Exception as error:
                raise ArgumentError(
                    f"predictive: the model fails on it: {type(error).__name__}: {error}; pass "
                    "rows as the model's arguments"
                ) from error


def rank(
    model: Generator,
    stack: Stack,
    true: Tensor,
    draws: Tensor,
    quantities: Mapping[str, Quantity],
    predict_at: Arguments | None = None,
    seed: int = 0,
) -> Ranked:
    """The ranks of true values among draws.

    Args:
        model: the one that is fitted, which knows what users' functions take.
        stack: the data sets.
        true: params that they were drawn from, `[data sets, D]`.
        draws: params, `[data sets, draws, D]`; those of a chain that broke may be NaN.
        quantities: functions of (sites, data).
        predict_at: rows whose observations are drawn at every draw; None for none.
        seed: of these, and of the order of equal values.
    """
    count, names = draws.shape[1] + 1, set(model.places)
    positions = torch.cat([draws, true[:, None].to(draws)], 1).flatten(0, 1)

    def values(number: Tensor) -> dict[str, Tensor]:
        arguments: Any = stack.arguments(number // count)
        shared, own = arguments
        params = stack.layout.unflatten(take_one(positions, number))
        sites = stack.log_posterior.run(params, (shared, own)).sites
        latents = {s.name: s.value for s in sites.values() if s.kind == "latent"}
        terms = terms_of(sites).values()
        of_data = [(t.log_prob * t.scale).sum() for t in terms if names & set(t.name.split("+"))]
        found = {**latents, LOGLIK: torch.stack([term.double() for term in of_data]).sum()}
        for name, quantity in quantities.items():
            found[name] = torch.as_tensor(quantity(_sites_of(sites, model), model.given(own)))
        if predict_at is not None:
            drawn = model.log_posterior.simulate(params, predict_at).sites
            found |= {f"{name} (predicted)": drawn[name].value for name in names}
        return found

    numbers, is_random = torch.arange(len(positions)), predict_at is not None
    with own_generator(seed), torch.no_grad():
        parts = list(vmap_in_chunks(values, [numbers], is_random))
    every = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    source = torch.Generator().manual_seed(seed)
    ranked = Ranked({}, {}, {}, {})
    for name, flat in every.items():
        value = flat.unflatten(0, (-1, count)).double()
        drawn, truth = value[:, :-1], value[:, -1]
        below = (drawn < truth[:, None]).sum(1)
        equal = (drawn == truth[:, None]).sum(1)
        tie = torch.rand(equal.shape, generator=source, dtype=torch.float64) * (equal + 1)
        ranked.ranks[name] = below + tie.long().clamp(max=equal)
        ranked.true[name], ranked.mean[name] = truth, drawn.mean(1)
        ranked.sd[name] = drawn.std(1)
    return ranked


def _sites_of(sites: Mapping[str, Site], model: Generator) -> dict[str, Tensor]:
    """What a quantity is told of a run: latents and observations, as the data set has them."""
    told = {*model.latents, *model.places}
    return {name: site.value for name, site in sites.items() if name in told}
