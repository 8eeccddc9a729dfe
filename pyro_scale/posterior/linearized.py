"""Predictions of the model linearized at a Gaussian's mean, and the probit approximation.

The arguments of the observed sites' distributions are taken as linear in the params, on an
unconstrained scale (Immer et al. 2021).  For classes, the probit approximation gives the
predictive distribution without draws: logits are divided by sqrt(1 + pi/8 times their variance)
(MacKay 1992).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    OneHotCategorical,
    TransformedDistribution,
    constraints,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pyro_scale.core.exclusive import PlainLSTM
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature import fisher
from pyro_scale.curvature.chunks import Chunk
from pyro_scale.errors import ArgumentError
from pyro_scale.model.derivatives import jacobian_rows
from pyro_scale.model.draws import draws
from pyro_scale.model.sites import Site
from pyro_scale.model.transforms import bijection
from pyro_scale.posterior.chunked_vmap import vmap_in_chunks
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.posterior.predictive import (
    Terms,
    explain_failures,
    reduce_batches,
    spread_evenly,
)
from pyro_scale.posterior.readers import readers_of
from pyro_scale.posterior.reductions import Reduce, Reduction, as_reduction
from pyro_scale.posterior.row_batches import data_sites, row_batches

#: A vector `[D]` of unconstrained parameters -> the unconstrained arguments of the sites'
#: distributions, by site and name of the argument.
Outputs = Callable[[Tensor], dict[str, dict[str, Tensor]]]

#: Axes of a Gaussian along which changes are computed together, to limit memory.
_AXES_TOGETHER = 256


def predict(
    fit: Fit,
    arguments: Arguments,
    num_samples: int | None,
    batch_size: int | None,
    return_sites: Sequence[str] | None,
    reduce: Reduce | Reduction | None = None,
    probit: bool = False,
) -> dict[str, Any]:
    """Predictive draws of the observed sites by the model linearized at each Gaussian's mean,
    `[draws, ...]` by name, one for each draw of the Gaussians; or a summary of them.

    Args:
        fit: the Gaussians, one for each start.
        arguments: the model's arguments.
        num_samples: number of the Gaussians' draws to use, evenly spaced; None for all.
        batch_size: rows that are predicted together; None for all.
        return_sites: names of observed sites; None for all.
        reduce: summary of the draws, as for `predictive.predict`; None for the draws.
        probit: whether draws are from the probit approximation of the predictive distribution.

    Raises:
        ArgumentError: the fit has no Gaussian; a site has no arguments that can be linearized.
    """
    if not fit.gaussians:
        raise ArgumentError("linearized=True needs a Gaussian: fit Laplace, VI or EKF")
    result = fit.thin(torch.arange(1))
    names = list(data_sites(result))
    if not names:
        raise ArgumentError("linearized=True: the model has no observed site with a distribution")
    for name in return_sites or ():
        if name not in names:
            raise ArgumentError(
                f"return_sites: linearized=True gives the observed sites {names}, not '{name}'"
            )
    names = list(return_sites or names)
    total = fit.num_starts * fit.num_draws
    positions = fit.by_start(spread_evenly(total, total if num_samples is None else num_samples))
    reduction = as_reduction(reduce)

    def terms_by_start(chunk: Chunk, terms: Terms) -> Iterator[dict[str, tuple[Tensor, ...]]]:
        for start, draws_of_start in enumerate(positions):
            if len(draws_of_start):
                yield terms(_linearized_sites(fit, start, draws_of_start, chunk, names, probit))

    facts: dict[str, Any] = {"num_samples": num_samples, "batch_size": batch_size}
    facts |= {"return_sites": return_sites, "reduce": reduce, "probit": probit}
    with (
        readers_of(result, "linearized predict", arguments, True, **facts) as readers,
        explain_failures(result, arguments, batch_size),
    ):
        may_split = not reduction.keeps_draws
        batches = row_batches(result, arguments, batch_size, names, readers.share, may_split)
        return reduce_batches(result, batches, reduction, readers, terms_by_start)


def _linearized_sites(
    fit: Fit, start: int, positions: Tensor, chunk: Chunk, names: Sequence[str], probit: bool
) -> dict[str, Site]:
    """The observed sites for a chunk of rows, with the linearized model's distributions at n draws
    of a Gaussian in a leading dimension, and a predictive draw from each.

    Args:
        fit: the Gaussians.
        start: index of the start whose Gaussian is used.
        positions: draws of this Gaussian, `[n, D]`.
        chunk: the rows.
        names: names of the sites.
        probit: whether to use the probit approximation of the predictive distribution instead,
            which is the same for all n.
    """

    def sites_at(position: Tensor, drawn: Mapping[str, Tensor] | None = None) -> Mapping[str, Site]:
        params, log_posterior = fit.layout.unflatten(position), fit.log_posterior
        return log_posterior.simulate(params, chunk.arguments, chunk.indices, drawn).sites

    center = fit.centers[start]
    with torch.enable_grad():
        sites = sites_at(center.detach().clone().requires_grad_())
    scales = {name: _scales(sites[name]) for name in names}
    drawn = {name: site.value.detach() for name, site in sites.items() if site.kind == "observed"}
    if probit:
        _check_classes([sites[name] for name in names])

    def outputs(position: Tensor) -> dict[str, dict[str, Tensor]]:
        with _OriginalLogits() as logits:
            moved = sites_at(position, drawn)  # nothing is drawn under vmap
            arguments = {name: logits.arguments(moved[name]) for name in names}
        return {
            name: {key: scale.inv(arguments[name][key]) for key, scale in scales[name].items()}
            for name in names
        }

    with torch.no_grad():
        if probit:
            logits = _probit_logits(outputs, fit, start)
            values = pytree.tree_map(lambda x: x.expand(len(positions), *x.shape), logits)
        else:
            values = _linear_outputs(outputs, center, positions)
        return {
            name: _with_arguments(
                sites[name],
                {key: scale(values[name][key]) for key, scale in scales[name].items()},
            )
            for name in names
        }


def _linear_outputs(outputs: Outputs, center: Tensor, positions: Tensor) -> Any:
    """Values at n vectors of the outputs linearized at the center: a pytree of tensors `[n, ...]`.

    Args:
        outputs: function from a vector `[D]` to the distributions' unconstrained arguments, by site
            and name.
        center: mean of the Gaussian, `[D]`.
        positions: the vectors, `[n, D]`.
    """

    def linear(away: Tensor) -> Any:
        values, change = torch.func.jvp(outputs, (center,), (away,))[:2]
        return pytree.tree_map(torch.add, values, change)

    away = positions - center
    try:
        with PlainLSTM():
            chunks = list(vmap_in_chunks(linear, [away]))
    except RuntimeError:  # something has no forward derivatives, such as packed sequences
        return pytree.tree_map(torch.add, outputs(center), _changes(outputs, center, away))
    return pytree.tree_map(lambda *parts: torch.cat(parts), *chunks)


def _changes(outputs: Outputs, center: Tensor, away: Tensor) -> Any:
    """Directional derivatives of the outputs at the center, along n directions: a pytree of tensors
    `[n, ...]`.

    Takes a backward pass for each number in the outputs; works for any layer that can be trained.

    Args:
        outputs: function from a vector `[D]` to the distributions' unconstrained arguments, by site
            and name.
        center: mean of the Gaussian, `[D]`.
        away: the directions, `[n, D]`.
    """
    with torch.enable_grad():
        leaf = center.detach().clone().requires_grad_()
        values, structure = pytree.tree_flatten(outputs(leaf))
        flat = torch.cat([value.reshape(-1) for value in values])
    products = torch.cat([away @ rows.mT for _, rows in jacobian_rows(flat, [leaf])], dim=1)
    parts = products.split([value.numel() for value in values], dim=1)
    pairs = zip(parts, values, strict=True)
    return pytree.tree_unflatten(
        [part.reshape(len(away), *value.shape) for part, value in pairs], structure
    )


# ------------------------------------------------------------------ arguments of distributions


class _Softmax:
    """Map from unnormalized log probabilities to probabilities, symmetric in the classes, unlike
    the stick-breaking bijection of `biject_to`."""

    def __call__(self, logs: Tensor) -> Tensor:
        return logs.softmax(-1)

    def inv(self, probs: Tensor) -> Tensor:
        """Log probabilities from probabilities, which are clamped above 0."""
        return probs.clamp(min=torch.finfo(probs.dtype).tiny).log()


def _scales(site: Site) -> dict[str, Any]:
    """A dict from the name of each argument of the site's distribution that depends on the params
    to the bijection between the argument and an unconstrained value, on whose scale the model is
    linearized.

    Raises:
        ArgumentError: the site has no such arguments.
    """
    try:
        base = fisher.base_of(site.fn)
        arguments, kinds = fisher.own_arguments(base), base.arg_constraints
        scales = {k: _scale(kinds[k]) for k, value in arguments.items() if value.requires_grad}
    except (fisher.NoInformation, NotImplementedError):
        scales = {}
    if not scales:
        raise ArgumentError(
            f"linearized=True: site '{site.name}' has no arguments that depend on the params and "
            "can be taken as linear in them: leave linearized out"
        )
    return scales


def _scale(constraint: Any) -> Any:
    return _Softmax() if constraint is constraints.simplex else bijection(constraint)


def _with_arguments(site: Site, replaced: Mapping[str, Tensor]) -> Site:
    """A copy of a site whose distribution has other arguments, `[n, ...]` each, and whose value is
    a draw from it for each of the n.

    Args:
        site: the site.
        replaced: new arguments by name; others stay.
    """
    base = fisher.base_of(site.fn)
    arguments = {name: value.detach() for name, value in fisher.own_arguments(base).items()}
    # other parameters of the constructor, such as a Multinomial's total_count
    others = inspect.signature(type(base)).parameters.keys() - set(base.arg_constraints)
    kept = {n: getattr(base, n) for n in others - {"validate_args"} if hasattr(base, n)}
    fn = type(base)(**{**kept, **arguments, **replaced}, validate_args=False)
    if transforms := list(_transforms(site.fn)):
        fn = TransformedDistribution(fn, transforms, validate_args=False)
    return dataclasses.replace(site, fn=fn, value=draws(fn, 1)[0])


def _transforms(fn: Any) -> Iterator[Any]:
    """Yields the transforms that a distribution applies to draws of its base distribution, in the
    order in which they are applied, also through wrappers such as `Independent`; none for a plain
    distribution."""
    if hasattr(fn, "base_dist"):
        yield from _transforms(fn.base_dist)
    if isinstance(fn, TransformedDistribution):
        yield from fn.transforms


# ------------------------------------------------------------------ probit approximation


def _check_classes(sites: Sequence[Site]) -> None:
    """Raises for sites to which the probit approximation does not apply.

    Raises:
        ArgumentError: a site is neither Bernoulli nor Categorical.
    """
    for site in sites:
        base = fisher.base_of(site.fn)
        if not isinstance(base, Bernoulli | Categorical | OneHotCategorical):
            raise ArgumentError(
                f"linearized='probit': site '{site.name}' is a {type(base).__name__}, and the "
                "approximation is for Bernoulli and Categorical ones: pass linearized=True"
            )


def _probit_logits(outputs: Outputs, fit: Fit, start: int) -> Any:
    """The logits of the predictive distribution by the probit approximation, by site and argument
    name: the logits at the center, divided by sqrt(1 + pi/8 times their variance under the
    Gaussian).

    Args:
        outputs: function from a vector `[D]` to the model's logits.
        fit: the Gaussians.
        start: index of the start whose Gaussian is used.
    """
    center = fit.centers[start]
    try:
        with PlainLSTM():
            variances = _variances(outputs, fit, start)
    except RuntimeError:  # something has no forward derivatives, such as packed sequences
        axes = torch.eye(len(fit.places)).to(center)
        changes = _changes(outputs, center, fit.at(start, axes) - center)
        variances = pytree.tree_map(lambda x: x.square().sum(0), changes)
    return pytree.tree_map(
        lambda logits, variance: logits / (1 + math.pi / 8 * variance).sqrt(),
        outputs(center),
        variances,
    )


def _variances(outputs: Outputs, fit: Fit, start: int) -> Any:
    """Variances of the linearized outputs under one of the Gaussians: a pytree like that of the
    outputs.

    Args:
        outputs: function from a vector `[D]` to the model's logits.
        fit: the Gaussians.
        start: index of the start whose Gaussian is used.
    """
    center, size, total = fit.centers[start], len(fit.places), None

    def change(away: Tensor) -> Any:
        return torch.func.jvp(outputs, (center,), (away,))[1]

    axes = torch.arange(size).split(_AXES_TOGETHER)
    noise = (torch.nn.functional.one_hot(block, size).to(center) for block in axes)
    for changes in vmap_in_chunks(change, (fit.at(start, block) - center for block in noise)):
        squares = pytree.tree_map(lambda x: x.square().sum(0), changes)
        total = squares if total is None else pytree.tree_map(torch.add, total, squares)
    return total


class _OriginalLogits(TorchFunctionMode):
    """Records the logits that `Categorical` normalizes.

    `Categorical` keeps logits - logsumexp(logits) only.  A constant added to all logits changes no
    probability, but it does change the variances of logits.
    """

    def __init__(self) -> None:
        super().__init__()
        # by id: (a tensor, the logits that it was computed from); the tensor keeps its id in use
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._normalized: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name == "logsumexp":
            self._sums[id(out)] = out, args[0]
        elif name in ("sub", "__sub__"):
            _, logits = self._sums.get(id(args[1]), (None, None))
            if logits is args[0]:
                self._normalized[id(out)] = out, logits
        elif name == "expand" and id(args[0]) in self._normalized:
            _, logits = self._normalized[id(args[0])]
            self._normalized[id(out)] = out, logits
        return out

    def arguments(self, site: Site) -> dict[str, Tensor]:
        """The arguments of a site's distribution by name, where `logits` of a categorical one are
        those that the model passed, not the normalized ones that torch keeps."""
        base = fisher.base_of(site.fn)
        arguments = dict(fisher.own_arguments(base))
        if isinstance(base, Categorical | OneHotCategorical) and "logits" in arguments:
            normalized = base.logits
            _, logits = self._normalized.get(id(normalized), (normalized, normalized))
            arguments["logits"] = logits.expand_as(arguments["logits"])
        return arguments
