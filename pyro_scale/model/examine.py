"""Which site's log density is not finite at given values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core.rows import Arguments
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.recorder import Recorder
from pyro_scale.model.sites import is_subsample
from pyro_scale.model.terms import terms_of

#: Characters of an error's message that are told.
_TOLD = 300


def examine(
    log_posterior: LogPosterior,
    params: Mapping[str, Tensor],
    arguments: Arguments,
    indices: Tensor | None = None,
    validate: bool = False,
) -> tuple[str | None, str]:
    """(The first site whose log density is not finite, or cannot be had; what it is, or the error
    that the model raised there).

    Args:
        log_posterior: the model.
        params: unconstrained tensors by site.
        arguments: of the model.
        indices: `[B]`, for a model that subsamples by itself.
        validate: whether with Pyro's and torch's validation on.
    """
    met: list[str] = []
    recorder = partial(_Meeting, met=met)
    try:
        run = log_posterior.run(params, arguments, indices, recorder, validate)
        terms = terms_of(run.sites)
    except Exception as error:  # of whatever kind the user's model raises
        sites = log_posterior.model_info.sites
        expected = [n for n, s in sites.items() if s.kind != "subsample" and n not in met]
        return next(iter(expected or met), None), in_short(error)
    for name, term in terms.items():
        if not bool(torch.isfinite(term.log_prob).all()):
            return name, as_word(term.log_prob)
    return None, ""


def as_word(values: Tensor) -> str:
    """How values are not finite."""
    return "NaN" if bool(values.isnan().any()) else "infinite"


def in_short(error: Exception) -> str:
    """An error on one line."""
    text = " ".join(format(error).split())
    return f"{type(error).__name__}: {text[:_TOLD]}"


class _Meeting(Recorder):
    """A recorder that notes the sites whose log density could be had.

    Args:
        met: their names are added to it.
        others: as for a recorder.
    """

    def __init__(self, *, met: list[str], **others: Any):
        super().__init__(**others)
        self._met = met

    def _pyro_post_sample(self, msg: Any) -> None:
        is_plate = is_subsample(msg["fn"])
        if not is_plate:
            msg["fn"].log_prob(msg["value"])
        super()._pyro_post_sample(msg)
        if not is_plate:
            self._met.append(msg["name"])
