"""The preflight's second run, at the latent values of the first: with Pyro's and torch's own
checks, and an eye on torch's generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pyro
import torch
from torch.distributions import Distribution

from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.errors import ModelError, PyroScaleError
from pyro_scale.model.module_trace import trace_modules
from pyro_scale.model.recorder import Recorder


class SecondRun(NamedTuple):
    """What came of it.

    Attributes:
        recorder: of the run.
        drew: whether it drew from torch's generator.
        by: the module that did, in words.
        error: what the checks of shapes and of distributions' arguments have raised; the run is
            one without them, then.
    """

    recorder: Recorder
    drew: bool
    by: str | None
    error: Exception | None = None

    def raise_error(self) -> None:
        """Raises what the checks have.

        Raises:
            ModelError: the model fails validation.
        """
        if isinstance(self.error, ValueError) and not isinstance(self.error, PyroScaleError):
            raise ModelError(
                f"the model fails validation on the first batch: {self.error}"
            ) from self.error
        if self.error is not None:
            raise self.error


def run_again(run: Callable[..., Recorder]) -> SecondRun:
    """Runs a model with Pyro's and torch's own checks, unless they are switched off.

    Args:
        run: runs it at the latent values of the first run; it takes `validate`.
    """
    if not pyro.infer.util.is_validation_enabled():
        return _traced(run, validate=False)
    try:
        return _traced(run, validate=True)
    except Exception as error:
        raise_if_from_handler(error)
        return _traced(run, validate=False)._replace(error=error)


def sites_to_validate(second: SecondRun) -> set[str]:
    """The sites whose values are to be checked: `validate_args=False`, and validation that is
    switched off for all of Pyro or torch, are the user's word."""
    if not (pyro.infer.util.is_validation_enabled() and Distribution._validate_args):
        return set()
    sites = second.recorder.sites.values()
    return {site.name for site in sites if second.error is not None or site.validates}


def _traced(run: Callable[..., Recorder], validate: bool) -> SecondRun:
    before = torch.random.get_rng_state()
    with trace_modules() as trace:
        recorder = run(validate=validate)
    drew = not torch.equal(before, torch.random.get_rng_state())
    by = trace.describe(trace.drew) if trace.drew is not None else None
    return SecondRun(recorder, drew, by)
