"""The predictive distribution of the model linearized at a Gaussian's mean."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import TransformedDistribution, constraints
from torch.utils import _pytree as pytree

from pyro_scale.core.exclusive import PlainLSTM
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import ArgumentError
from pyro_scale.fullbatch.chunks import Chunk
from pyro_scale.model.curvature import fisher
from pyro_scale.model.derivatives import jacobian_rows
from pyro_scale.model.draws import draws
from pyro_scale.model.sites import Site
from pyro_scale.model.transforms import bijection
from pyro_scale.posterior.by_rank import readers_of
from pyro_scale.posterior.draws import in_chunks
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.posterior.predictive import (
    as_dtype,
    explain_failures,
    join,
    spread_evenly,
)
from pyro_scale.posterior.probit import GivenLogits, check_probit, shrink, sum_of_squares
from pyro_scale.posterior.reductions import Reduce, Reduction, reduction_of
from pyro_scale.posterior.row_batches import row_batches
from pyro_scale.posterior.site_rows import data_sites


def predict(
    fit: Fit,
    arguments: Arguments,
    num_samples: int | None,
    batch_size: int | None,
    return_sites: Sequence[str] | None,
    reduce: Reduce | Reduction | None = None,
    probit: bool = False,
) -> dict[str, Any]:
    """Draws of the observed sites, `[draws, ...]`, one for each draw of the approximation, or what
    is kept of them; with `probit`, of the distribution that MacKay's approximation gives.

    Raises:
        ArgumentError: there is no Gaussian; a site has no arguments that can be linearized.
    """
    if not fit.gaussians:
        raise ArgumentError("linearized=True needs a Gaussian: fit Laplace, VI or EKF")
    here = fit.thin(torch.arange(1))  # what it knows of the model
    names = list(data_sites(here))
    if not names:
        raise ArgumentError("linearized=True: the model has no observed site with a distribution")
    for name in return_sites or ():
        if name not in names:
            raise ArgumentError(
                f"return_sites: linearized=True gives the observed sites {names}, not '{name}'"
            )
    total = fit.num_starts * fit.num_draws
    positions = fit.by_start(spread_evenly(total, total if num_samples is None else num_samples))
    reduction = None if reduce is None else reduction_of(reduce)

    def kept(chunk: Chunk) -> dict[str, Any]:
        drawn = [
            _draw(fit, start, own, chunk, return_sites or names, probit)
            for start, own in enumerate(positions)
            if len(own)
        ]
        return {
            name: _reduce_draws([sites[name] for sites in drawn], reduction) for name in drawn[0]
        }

    asked = {"num_samples": num_samples, "batch_size": batch_size, "return_sites": return_sites}
    asked["probit"] = probit
    with readers_of(here, "linearized predict", arguments, True, reduce=reduce, **asked) as readers:
        with explain_failures(here, arguments, batch_size):
            batches = row_batches(
                here, arguments, batch_size, return_sites or names, readers.share, bool(reduction)
            )
            values = readers.map(kept, batches.chunks)
        sites, axes = fit.log_posterior.model_info.sites, dict(batches.axes)
        if reduction is not None:
            axes = {name: reduction.axis(sites[name], axis) for name, axis in axes.items()}
        joined = join(values, axes)
    return as_dtype(joined, fit.layout.dtype) if reduction else joined


def _reduce_draws(sites: Sequence[Site], reduction: Reduction | None) -> Any:
    """Draws of one site, `[n, ...]` from each start, or what is kept of them."""
    if reduction is None:
        return torch.cat([site.value for site in sites])
    draws = reduction.gathered()
    for site in sites:
        draws.add(reduction.terms(site))
    return reduction.total(draws)


def _draw(
    fit: Fit, start: int, positions: Tensor, chunk: Chunk, names: Sequence[str], probit: bool
) -> dict[str, Site]:
    """Sites whose distributions and draws are those of the positions `[n, D]` of one start, or as
    many of their distribution by the probit approximation."""

    def sites(position: Tensor, drawn: Mapping[str, Tensor] | None = None) -> Mapping[str, Site]:
        params, log_posterior = fit.layout.unflatten(position), fit.log_posterior
        return log_posterior.simulate(params, chunk.arguments, chunk.indices, drawn).sites

    center = fit.centers[start]
    with torch.enable_grad():
        here = sites(center.detach().clone().requires_grad_())
    linear = {name: _linear_arguments(here[name]) for name in names}
    drawn = {name: site.value.detach() for name, site in here.items() if site.kind == "observed"}

    if probit:
        check_probit([here[name] for name in names])

    def outputs(position: Tensor) -> dict[str, dict[str, Tensor]]:
        with GivenLogits() as given:
            there = sites(position, drawn)  # nothing is drawn under vmap
            own = {name: given.arguments(there[name]) for name in linear}
        return {
            name: {key: to.inv(own[name][key]) for key, to in scales.items()}
            for name, scales in linear.items()
        }

    def change(away: Tensor) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = torch.func.jvp(outputs, (center,), (away,))[1]
        return found

    def moved(away: Tensor) -> dict[str, dict[str, Tensor]]:
        now, change = torch.func.jvp(outputs, (center,), (away,))[:2]
        return {n: {k: now[n][k] + change[n][k] for k in now[n]} for n in now}

    with torch.no_grad():
        try:
            with PlainLSTM():
                if probit:
                    variances = sum_of_squares(change, fit, start)
                else:
                    chunks = list(in_chunks(moved, [positions - center]))
        except RuntimeError:  # of what has no forward derivatives, such as packed sequences
            if probit:
                axes = torch.eye(len(fit.places)).to(center)
                squares = _changes(outputs, center, fit.at(start, axes) - center)
                variances = pytree.tree_map(lambda x: x.square().sum(0), squares)
            else:
                chunks = [
                    pytree.tree_map(
                        torch.add, outputs(center), _changes(outputs, center, positions - center)
                    )
                ]
        if probit:
            shrunk = pytree.tree_map(shrink, outputs(center), variances)
            chunks = [pytree.tree_map(lambda x: x.expand(len(positions), *x.shape), shrunk)]
        joined_sites = pytree.tree_map(lambda *parts: torch.cat(parts), *chunks)
        return {
            name: _draws_of(
                here[name],
                {key: linear[name][key](value) for key, value in joined_sites[name].items()},
            )
            for name in names
        }


def _changes(outputs: Callable[[Tensor], Any], center: Tensor, away: Tensor) -> Any:
    """The derivatives of a pytree of tensors, a function of params [D], along `[n, D]`: by a
    backward pass for each number in it, which takes any layer that can be trained."""
    with torch.enable_grad():
        leaf = center.detach().clone().requires_grad_()
        values, structure = pytree.tree_flatten(outputs(leaf))
        flat = torch.cat([value.reshape(-1) for value in values])
    found = torch.cat([away @ rows.mT for _, rows in jacobian_rows(flat, [leaf])], dim=1)
    parts = found.split([value.numel() for value in values], dim=1)
    pairs = zip(parts, values, strict=True)
    return pytree.tree_unflatten(
        [part.reshape(len(away), *value.shape) for part, value in pairs], structure
    )


def _linear_arguments(site: Site) -> dict[str, Any]:
    """The arguments of a site that depend on the params -> the map from an unconstrained scale,
    on which they are taken as linear."""
    try:
        arguments = _arguments(site)
        kinds = fisher.base_of(site.fn).arg_constraints
        scales = {k: _scale(kinds[k]) for k, value in arguments.items() if value.requires_grad}
    except (fisher.NoInformation, NotImplementedError):
        scales = {}
    if not scales:
        raise ArgumentError(
            f"linearized=True: site '{site.name}' has no arguments that depend on the params and "
            "can be taken as linear in them: leave linearized out"
        )
    return scales


def _arguments(site: Site) -> dict[str, Tensor]:
    return fisher.own_arguments(fisher.base_of(site.fn))


class _Softmax:
    """Logarithms -> probabilities: unlike a bijection, it takes all of them alike."""

    def __call__(self, logs: Tensor) -> Tensor:
        return logs.softmax(-1)

    def inv(self, probs: Tensor) -> Tensor:
        """Probabilities -> logarithms."""
        return probs.clamp(min=torch.finfo(probs.dtype).tiny).log()


def _scale(constraint: Any) -> Any:
    return _Softmax() if constraint is constraints.simplex else bijection(constraint)


def _draws_of(site: Site, changed: Mapping[str, Tensor]) -> Site:
    """A site's distribution with arguments `[n, ...]` in place of its own, and draws of it."""
    base = fisher.base_of(site.fn)
    arguments = {name: value.detach() for name, value in fisher.own_arguments(base).items()}
    # what the constructor takes besides, such as a Multinomial's total_count
    others = inspect.signature(type(base)).parameters.keys() - set(base.arg_constraints)
    kept = {n: getattr(base, n) for n in others - {"validate_args"} if hasattr(base, n)}
    fn = type(base)(**{**kept, **arguments, **changed}, validate_args=False)
    if transforms := list(_transforms(site.fn)):
        fn = TransformedDistribution(fn, transforms, validate_args=False)
    return dataclasses.replace(site, fn=fn, value=draws(fn, 1)[0])


def _transforms(fn: Any) -> Iterator[Any]:
    """What a wrapped distribution does to values of what is inside, innermost first."""
    if hasattr(fn, "base_dist"):
        yield from _transforms(fn.base_dist)
    if isinstance(fn, TransformedDistribution):
        yield from fn.transforms
