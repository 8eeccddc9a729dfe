"""Ranks of true values: of latents, the log likelihood, and functions of latents and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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

#: A function of (constrained values of a draw by site, the data as the model's arguments).
Quantity = Callable[..., Any]
#: Name of the log likelihood, which is always ranked.
LOGLIK = "loglik"


class Ranked(NamedTuple):
    """Ranks of true values among posterior draws; dicts from the name of a quantity to a tensor.

    Attributes:
        ranks: number of draws below the true value, int64 `[data sets, ...]`.
        true: true values, `[data sets, ...]`.
        mean: means of the posterior draws, `[data sets, ...]`.
        sd: standard deviations of the posterior draws, `[data sets, ...]`.
    """

    ranks: dict[str, Tensor]
    true: dict[str, Tensor]
    mean: dict[str, Tensor]
    sd: dict[str, Tensor]


def check_quantities(quantities: Mapping[str, Quantity], latents: tuple[str, ...]) -> None:
    """Raises an error unless the user's quantities are callable and have other names than latent
    sites.

    Args:
        quantities: functions of (sites, data), by name.
        latents: names of the latent sites.

    Raises:
        ArgumentError: a quantity cannot be called, or has the name of a latent site.
    """
    for name, function in quantities.items():
        if not callable(function):
            raise ArgumentError(
                f"quantities[{name!r}] is not callable: pass a function of (sites, data)"
            )
        if name in latents:
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
    """Computes quantities and predictions of the first data set once, to raise their errors before
    the work starts.

    Args:
        truth: source of the true params.
        stack: data sets of the model, of which the first is used.
        quantities: functions of (sites, data), by name.
        predict_at: rows of data whose observations are predicted; None for none.
        seed: seed of the true params and of all random numbers.

    Raises:
        ArgumentError: a quantity or the prediction fails.
    """
    model = truth.fitted
    params = {name: value[0] for name, value in truth.params(1, seed).items()}
    shared, tables = stack.arguments(torch.tensor(0))
    with own_generator(seed), torch.no_grad():
        values = _values_for_users(stack.log_posterior.run(params, (shared, tables)).sites, model)
        for name, quantity in quantities.items():
            try:
                torch.as_tensor(quantity(dict(values), model.fill_arguments(tables)))
            except Exception as error:
                raise ArgumentError(
                    f"quantities[{name!r}] fails: {type(error).__name__}: {error}.  It is called "
                    f"with a dict of the sites {list(values)} and the model's arguments, and "
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
    """Ranks of true values among posterior draws: of latents, the log likelihood ("loglik"),
    quantities, and predicted observations.  A true value that equals draws is ranked among them at
    random.

    Args:
        model: fitted model.
        stack: data sets.
        true: params that the data sets were drawn from, `[data sets, D]`.
        draws: posterior draws, unconstrained, `[data sets, draws, D]`; NaN for draws of a chain
            that broke.
        quantities: functions of (sites, data), by name.
        predict_at: rows of data whose observations are predicted by every draw and by the true
            params; None for none.
        seed: seed of the predictions, and of the order of equal values.
    """
    count, observed = draws.shape[1] + 1, set(model.places)
    positions = torch.cat([draws, true[:, None].to(draws)], 1).flatten(0, 1)

    def compute(number: Tensor) -> dict[str, Tensor]:
        shared, tables = stack.arguments(number // count)
        params = stack.layout.unflatten(take_one(positions, number))
        sites = stack.log_posterior.run(params, (shared, tables)).sites
        latents = {site.name: site.value for site in sites.values() if site.kind == "latent"}
        values = model.select_ranked(latents)
        log_liks = [
            (term.log_prob * term.scale).sum().double()
            for term in terms_of(sites).values()
            if observed & set(term.name.split("+"))
        ]
        values[LOGLIK] = torch.stack(log_liks).sum()
        for name, quantity in quantities.items():
            data = model.fill_arguments(tables)
            values[name] = torch.as_tensor(quantity(_values_for_users(sites, model), data))
        if predict_at is not None:
            predicted = model.log_posterior.simulate(params, predict_at).sites
            values |= {f"{name} (predicted)": predicted[name].value for name in observed}
        return values

    numbers, is_random = torch.arange(len(positions)), predict_at is not None
    with own_generator(seed), torch.no_grad():
        parts = list(vmap_in_chunks(compute, [numbers], is_random))
    source = torch.Generator().manual_seed(seed)
    ranked = Ranked({}, {}, {}, {})
    for name in parts[0]:
        flat = torch.cat([part[name] for part in parts])
        by_data_set = flat.unflatten(0, (-1, count)).double()
        drawn, truth = by_data_set[:, :-1], by_data_set[:, -1]
        below = (drawn < truth[:, None]).sum(1)
        equal = (drawn == truth[:, None]).sum(1)
        tie = torch.rand(equal.shape, generator=source, dtype=torch.float64) * (equal + 1)
        ranked.ranks[name] = below + tie.long().clamp(max=equal)
        ranked.true[name], ranked.mean[name] = truth, drawn.mean(1)
        ranked.sd[name] = drawn.std(1)
    return ranked


def _values_for_users(sites: Mapping[str, Site], model: Generator) -> dict[str, Tensor]:
    """The values of latent and observed sites by name, with which the user's `quantities=`
    functions are called; other sites are left out."""
    names = {*model.latents, *model.places}
    return {name: site.value for name, site in sites.items() if name in names}
