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


class PyroScaleError(Exception):
    """The base of every error that this library raises on purpose."""


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


class PlateError(ModelError):
    """It is not certain how often the likelihood is to be counted, so nothing is run."""


class NonFiniteError(PyroScaleError):
    """A chain's state became NaN or infinite; the draws of the finished chains are kept."""


class NotRunError(PyroScaleError):
    """Results were asked for before `run` (or `step`) produced any."""


class FileError(PyroScaleError):
    """A file cannot be written or read, is damaged, or belongs to another method or model."""


class RankError(PyroScaleError):
    """Another process of a distributed run has failed, died, or was called otherwise."""


class PyroScaleWarning(UserWarning):
    """The base of every warning of this library."""


class ModelWarning(PyroScaleWarning):
    """The model can be run, but may not say what was meant."""


class CompileWarning(PyroScaleWarning):
    """Steps run slower than they might: what kept them from being compiled."""


class ConvergenceWarning(PyroScaleWarning):
    """A run was too short: chains do not agree, remember their starts, or a bound still rises."""


class BiasWarning(PyroScaleWarning):
    """Draws or steps are known, or predicted, to be off the posterior."""


class VerdictWarning(PyroScaleWarning):
    """A run that was tuned by itself is not known to be right; `report()` says why."""


class ApproximationWarning(PyroScaleWarning):
    """An approximation or an estimate does not fit well enough to be trusted."""
