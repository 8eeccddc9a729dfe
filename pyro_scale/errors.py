"""Errors and warnings.

Every message names the site or the argument, and what to do.  All errors derive from
`PyroScaleError`; those about a value that was passed are also `ValueError`s.  All warnings derive
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

#: The page of symptoms, with a section for each code.
SYMPTOMS = "https://pyro-scale.github.io/pyro-scale/symptoms.html"

#: Anchors of the sections of the page of symptoms.
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
    """An error or warning whose text ends with a link to a section of the page of symptoms.

    Attributes:
        code: anchor of the section; None for no link.
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
    """The base class of all errors that this library raises on purpose.

    `error.code` is a short word for the cause, such as `"plate"`, or None.  With a code, the
    message ends with a link to its section of the page of symptoms:

    >>> import pyro_scale as ps
    >>> print(ps.errors.PlateError("site 'y': 80 rows"))
    site 'y': 80 rows
    See https://pyro-scale.github.io/pyro-scale/symptoms.html#plate

    In an f-string, `f"({error})"`, the link is left out.
    """

    def __format__(self, spec: str) -> str:
        return format(Exception.__str__(self), spec)


class ArgumentError(PyroScaleError, ValueError):
    """An argument is out of its range, unknown, or contradicts another one."""


class CallError(ArgumentError, TypeError):
    """A call has an argument that does not exist or is in the wrong place; the message says what to
    write instead. It is also a `TypeError`."""


class DataError(PyroScaleError, ValueError):
    """The data are empty, ragged, without a known length, or contradict `batch_size`."""


class ModelError(PyroScaleError):
    """The model cannot be sampled: it has no latents, a random likelihood, ..."""


class SiteError(ModelError):
    """A sample site cannot be handled: for example a latent with a value for each row (local), a
    discrete latent, a value outside of its support, or a shape that changes between batches."""


class CannotDrawError(SiteError, NotImplementedError):
    """A site's distribution has a density but cannot be drawn from; also a `NotImplementedError`.

    Attributes:
        missing: tensors of NaN by site, in the shape that a draw would have; empty if unknown.
    """

    missing: Mapping[str, Any] = MappingProxyType({})


class PlateError(ModelError):
    """The factor N/B, by which a minibatch's likelihood has to be scaled, cannot be determined for
    a term of the model, so nothing is run; N is the number of rows of data, B that of a batch."""

    code = "plate"


class NonFiniteError(PyroScaleError):
    """A chain's state became NaN or infinite; the draws of the finished chains are kept."""

    code = "not-finite"


class NotRunError(PyroScaleError):
    """Results were asked for before `run` (or `step`) produced any."""


class FileError(PyroScaleError):
    """A file cannot be written or read, is damaged, or belongs to another method or model."""


class RankError(PyroScaleError):
    """Another process of a distributed run failed, died, or made a different call."""

    code = "ranks"


class PyroScaleWarning(_Coded, UserWarning):
    """The base class of all warnings of this library; they have a `code` as errors do."""


class ModelWarning(PyroScaleWarning):
    """The model can be run but looks like a mistake; the message says what to check."""


class CompileWarning(PyroScaleWarning):
    """Steps are slow because they could not be compiled; the message says why."""

    code = "not-compiled"


class ConvergenceWarning(PyroScaleWarning):
    """A run was too short: chains disagree or depend on their starts, or a bound still rises."""

    code = "too-short"


class BiasWarning(PyroScaleWarning):
    """Draws are biased, because of the step size or minibatches, as measured or as predicted."""

    code = "minibatch-heat"


class VerdictWarning(PyroScaleWarning):
    """The report of a run that tuned itself has a verdict other than "yes"; `report()` says why."""

    code = "verdict"


class ApproximationWarning(PyroScaleWarning):
    """An approximation or an estimate is not accurate enough to be trusted."""
