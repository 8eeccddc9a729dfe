"""What users can get wrong, one class each, and what they are warned of.

Every message names the site or the argument and says the fix.  All errors derive from
`PyroScaleError`; those about a value that was passed are `ValueError`s too.  All warnings derive
from `PyroScaleWarning`, so that a program or a CI can turn some of them into errors:

>>> import warnings
>>> import pyro_scale as ps
>>> warnings.simplefilter("error", ps.errors.ConvergenceWarning)
>>> warnings.filters.pop(0)[0]  # for this example's sake
'error'
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

#: The page that says what to do about a symptom, in a section for each code.
SYMPTOMS = "https://pyro-scale.github.io/pyro-scale/symptoms.html"

#: What errors and warnings are about, where the page has a section on it.
Code = Literal[
    "batchnorm",
    "cannot-write",
    "chains-disagree",
    "cut-gradient",
    "discrete-latent",
    "divergences",
    "dropout",
    "ensemble",
    "exploded",
    "local-latent",
    "log-likelihood",
    "memory",
    "minibatch-heat",
    "no-compiler",
    "no-length",
    "no-observation",
    "not-compiled",
    "not-finite",
    "not-rows",
    "observed-value",
    "pareto-k",
    "plate",
    "random-likelihood",
    "ranks",
    "resume",
    "step-size",
    "too-narrow",
    "too-short",
    "verdict",
    "workers",
]


class _Coded(Exception):
    """A message, and the section of the page of symptoms that has more on it: `str` ends with the
    link, on a line of its own.

    Attributes:
        code: the section's anchor; None if the message says all there is to say.
    """

    code: Code | None = None

    def __init__(self, *args: object, code: Code | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.code is None else f"{message}\nSee {SYMPTOMS}#{self.code}"


class PyroScaleError(_Coded):
    """The base of every error that this library raises on purpose.

    `error.code` is a short word for what went wrong, such as `"plate"`, or None.  Where there is
    one, the message ends with a link to its section of the page of symptoms:

    >>> import pyro_scale as ps
    >>> print(ps.errors.PlateError("site 'y': 80 rows"))
    site 'y': 80 rows
    See https://pyro-scale.github.io/pyro-scale/symptoms.html#plate

    Within another message, `f"({error})"`, the link is left out.
    """

    def __format__(self, spec: str) -> str:
        return format(Exception.__str__(self), spec)


class ArgumentError(PyroScaleError, ValueError):
    """An argument is out of its range, unknown, or contradicts another one."""


class CallError(ArgumentError, TypeError):
    """An argument that there is not, or in the wrong place; it is a `TypeError` as well."""


class DataError(PyroScaleError, ValueError):
    """The data are empty, ragged, without a known length, or contradict `batch_size`."""


class ModelError(PyroScaleError):
    """The model as a whole cannot be sampled: no latents, random draws in the likelihood, ..."""


class SiteError(ModelError):
    """One sample site cannot be handled: local, discrete, of changing shape, or not finite."""


class CannotDrawError(SiteError, NotImplementedError):
    """A site's distribution has a density but no draws; it is a `NotImplementedError` as well.

    Attributes:
        missing: the site -> NaN, of the shape of a draw.
    """

    missing: Mapping[str, Any] = MappingProxyType({})


class PlateError(ModelError):
    """It is not certain how often the likelihood is to be counted, so nothing is run."""

    code = "plate"


class NonFiniteError(PyroScaleError):
    """A chain's state became NaN or infinite; the draws of the finished chains are kept."""

    code = "not-finite"


class NotRunError(PyroScaleError):
    """Results were asked for before `run` (or `step`) produced any."""


class FileError(PyroScaleError):
    """A file cannot be written or read, is damaged, or belongs to another method or model."""


class RankError(PyroScaleError):
    """Another process of a distributed run has failed, died, or was called otherwise."""

    code = "ranks"


class PyroScaleWarning(_Coded, UserWarning):
    """The base of every warning of this library; it has a `code` as errors do."""


class ModelWarning(PyroScaleWarning):
    """The model can be run, but may not say what was meant."""


class CompileWarning(PyroScaleWarning):
    """Steps run slower than they might: what kept them from being compiled."""

    code = "not-compiled"


class ConvergenceWarning(PyroScaleWarning):
    """A run was too short: chains do not agree, remember their starts, or a bound still rises."""

    code = "too-short"


class BiasWarning(PyroScaleWarning):
    """Draws or steps are known, or predicted, to be off the posterior."""

    code = "minibatch-heat"


class VerdictWarning(PyroScaleWarning):
    """A run that was tuned by itself is not known to be right; `report()` says why."""

    code = "verdict"


class ApproximationWarning(PyroScaleWarning):
    """An approximation or an estimate does not fit well enough to be trusted."""
