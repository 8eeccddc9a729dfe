"""What an object's last run understood of its model, for the next run on the same data."""

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
    """A log posterior after its preflight and the checks on other batches.

    It serves again where the data are the very same tensors and have not been written to by torch,
    and where one run of the model, on the first batch and at the latent values of the preflight,
    has the same sites, params, shapes and plates, and log densities that are the same to the bit:
    what the model reads besides its arguments is compared by what comes of it.

    Attributes:
        log_posterior: the model.
        asked: what it was understood for.
        seen: a run of it.
    """

    log_posterior: LogPosterior
    asked: Any
    seen: Any

    @classmethod
    def of(cls, log_posterior: LogPosterior, data: Data) -> Self | None:
        """What is known of a model now; None where changes of the data would not be noticed.

        Args:
            log_posterior: understood and checked.
            data: all rows.
        """
        asked = _asked(log_posterior.given_num_data, data)
        seen = None if asked is None else _seen(log_posterior, data.first())
        if seen is None:
            return None
        kept = pytree.tree_map_only(Tensor, torch.clone, seen)  # which the user may write to
        return cls(log_posterior, asked, kept)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy has other tensors

    def again(self, log_posterior: LogPosterior, data: Data) -> LogPosterior | None:
        """What is known of a log posterior that has seen no batch, if nothing has changed."""
        asked = _asked(log_posterior.given_num_data, data)
        if not log_posterior.is_of_same_model(self.log_posterior) or asked != self.asked:
            return None
        seen = _seen(self.log_posterior, data.first())
        return self.log_posterior if seen is not None and _are_same(seen, self.seen) else None


def _asked(num_data: int | None, data: Data) -> Any:
    """The arguments, as far as they decide what is understood, and the very data; None of data
    whose changes would not be noticed."""
    if not isinstance(data, TensorData):
        return None
    leaves, structure = pytree.tree_flatten(data.arguments)
    if any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves):
        return None
    validates = pyro.infer.util.is_validation_enabled(), Distribution._validate_args
    marks = [mark(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return num_data, data.num_data, data.batch_size, validates, structure, marks


def _seen(log_posterior: LogPosterior, arguments: Arguments) -> Any:
    """What a run of the model shows of it; None where it fails."""
    try:
        run = log_posterior.run_as_first(arguments)
        terms = terms_of(run.sites)
    except Exception as error:  # understanding the model anew will say it
        raise_if_from_handler(error)
        return None
    return (
        [(name, term.log_prob, term.scale, term.plates) for name, term in terms.items()],
        [_facts(site) for site in run.sites.values()],
        [_facts_of_point(point) for point in run.points.values()],
    )


def _facts(site: Site) -> Any:
    """What of a site is not in its log density."""
    is_own = site.kind in ("latent", "deterministic")  # others' values are data
    value = site.value if is_own else site.value.shape
    names = sorted(site.infer)
    return site.name, site.kind, type(site.fn), value, site.mask, names, site.validates


def _facts_of_point(point: Point) -> Any:
    parameter = None if point.parameter is None else WeakIdRef(point.parameter)
    return point.name, point.unconstrained, str(point.constraint), parameter


def _are_same(one: Any, other: Any) -> bool:
    """Whether two nested lists are, tensors to the bit."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
