"""Reuses a model's preflight (the checks of the model before a run) in the next run of the same
object on the same data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import pyro
import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdRef

from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.core.rows import Arguments
from pyro_scale.data.sources import Data, TensorData
from pyro_scale.engine.reuse import mark
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.sites import Point, Site
from pyro_scale.model.terms import terms_of


@dataclass(frozen=True)
class Understood:
    """A log posterior after its preflight (the checks of the model before a run), kept for the next
    run.

    It can be reused if the data are the very same tensors, which torch has not written to since,
    and if one run of the model, on the first batch and at the latents of the preflight, gives the
    same sites, params, shapes, plates and log densities, bit for bit. So anything that the model
    reads besides its arguments is compared through its effects.

    Attributes:
        log_posterior: the model, after its preflight.
        call: arguments and settings of the preflight, with identifiers of the data's tensors.
        trace: sites, params and log densities of a run of the model.
    """

    log_posterior: LogPosterior
    call: Any
    trace: Any

    @classmethod
    def from_preflight(cls, log_posterior: LogPosterior, data: Data) -> Self | None:
        """The checked log posterior with what is needed to tell later whether model and data are
        still the same, to be kept for the next run; None if changes of the data could not be
        detected (loaders), or the model fails.

        Args:
            log_posterior: the model, after its preflight and checks.
            data: the data of the run.
        """
        call = _describe_call(log_posterior.given_num_data, data)
        trace = None if call is None else _trace(log_posterior, data.first())
        if trace is None:
            return None
        kept = pytree.tree_map_only(Tensor, torch.clone, trace)  # the user may write to tensors
        return cls(log_posterior, call, kept)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the method has other tensors

    def reuse(self, log_posterior: LogPosterior, data: Data) -> LogPosterior | None:
        """The kept log posterior if its model and data are those of the new `log_posterior` and
        `data`, and nothing has changed; None otherwise."""
        call = _describe_call(log_posterior.given_num_data, data)
        if not log_posterior.is_of_same_model(self.log_posterior) or call != self.call:
            return None
        trace = _trace(self.log_posterior, data.first())
        return self.log_posterior if trace is not None and _are_same(trace, self.trace) else None


def _describe_call(num_data: int | None, data: Data) -> Any:
    """All that the result of a preflight depends on besides the model, as values to compare by
    `==`: N, the batch size, validation settings, and marks of the data's tensors. None for data
    whose changes would not be noticed, such as loaders."""
    if not isinstance(data, TensorData):
        return None
    leaves, structure = pytree.tree_flatten(data.arguments)
    if any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves):
        return None
    validates = pyro.infer.util.is_validation_enabled(), Distribution._validate_args
    marks = [mark(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return num_data, data.num_data, data.batch_size, validates, structure, marks


def _trace(log_posterior: LogPosterior, arguments: Arguments) -> Any:
    """Log densities, sites and point-estimated parameters of a run of the model on the first batch,
    to compare them with another run; None if the model fails."""
    try:
        run = log_posterior.run_as_first(arguments)
        terms = terms_of(run.sites)
    except Exception as error:  # a new preflight raises it
        raise_if_from_handler(error)
        return None
    return (
        [(name, term.log_prob, term.scale, term.plates) for name, term in terms.items()],
        [_facts_of_site(site) for site in run.sites.values()],
        [_facts_of_point(point) for point in run.points.values()],
    )


def _facts_of_site(site: Site) -> Any:
    """Name, kind, distribution's class, value and mask of a site, for the comparison of two runs of
    a model. Of observed data, the value's shape only."""
    is_data = site.kind not in ("latent", "deterministic")
    value = site.value.shape if is_data else site.value
    names = sorted(site.infer)
    return site.name, site.kind, type(site.fn), value, site.mask, names, site.validates


def _facts_of_point(point: Point) -> Any:
    parameter = None if point.parameter is None else WeakIdRef(point.parameter)
    return point.name, point.unconstrained, str(point.constraint), parameter


def _are_same(one: Any, other: Any) -> bool:
    """Whether two nested lists or tuples are equal, where tensors are equal if dtype, device and
    all numbers are the same."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
