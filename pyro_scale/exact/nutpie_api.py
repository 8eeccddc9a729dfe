"""nutpie's NUTS on a log density.  The only file that imports nutpie.

nutpie asks a model for a sampler; ours hands over machine code as a pointer, through calls that
nutpie does not document.  They are known for the versions below, and tried in a process of their
own before this one relies on them (`pointer_check.py`).  Any other version gets a Python function,
which costs some 15 microseconds a gradient more.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_scale.compile.cpp_function import NativeFunction
from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.errors import ArgumentError, ModelError, SiteError
from pyro_scale.exact.log_density import LogDensity

#: Versions whose calls for pointers are known.
KNOWN_VERSIONS = ("0.16.8", "0.16.11")
#: Sample statistics in ArviZ's names: nutpie's names, and dtypes.
_STATISTICS: dict[str, tuple[str, type]] = {
    "diverging": ("diverging", np.bool_),
    "energy": ("energy", np.float64),
    "tree_depth": ("depth", np.int64),
    "n_steps": ("n_steps", np.int64),
    "acceptance_rate": ("mean_tree_accept", np.float64),
    "step_size": ("step_size_bar", np.float64),
    "lp": ("logp", np.float64),
}
#: The name of a mass matrix with some eigenvectors, before 0.16.9.
_OLD_LOW_RANK = "low_rank_modified_mass_matrix"
#: What a chain tells of itself, and how often in milliseconds.
_TOLD = "{% for c in chains %}{{c.finished_draws}} {{c.divergences}} {{c.step_size}}{% endfor %}"
_TOLD_EVERY = 100


@dataclass(frozen=True)
class Settings:
    """Of one chain.

    Attributes:
        num_samples: draws after warm-up.
        warmup_steps: draws that adapt the step size and the mass.
        max_depth: of trees, whose leaves are at most 2^max_depth.
        target_accept: of the step size adaptation.
        low_rank: whether the mass matrix has some eigenvectors besides its diagonal.
    """

    num_samples: int
    warmup_steps: int
    max_depth: int
    target_accept: float
    low_rank: bool


class ChainDraws(NamedTuple):
    """What a chain leaves.

    Attributes:
        positions: after warm-up, `[draws, D]`, in float64.
        sample_stats: in ArviZ's names, `[draws]`.
        is_broken: whether the log density was not finite where a trajectory diverged after
            warm-up.
    """

    positions: Tensor
    sample_stats: dict[str, Tensor]
    is_broken: bool


class ChainProgress(NamedTuple):
    """How far a chain is.

    Attributes:
        num_draws: warm-up's and others.
        num_divergences: in all of them.
        step_size: as it is now, in few digits.
    """

    num_draws: int
    num_divergences: int
    step_size: str


class Chain:
    """A chain that runs in threads of nutpie's own.

    Args:
        density: what is sampled.
        by_pointer: whether to hand machine code over, if there is some.
        start: the first position, [D].
        settings: of the chain.
        seed: of its noise.

    Raises:
        ArgumentError: nutpie is not installed.
    """

    def __init__(
        self, density: LogDensity, by_pointer: bool, start: Tensor, settings: Settings, seed: int
    ):
        nutpie = _nutpie()
        native = density.native if by_pointer else None
        self._model = _Model(density, native, start.detach().double().numpy())
        is_known = version() in KNOWN_VERSIONS
        self._sampler = nutpie.sample(
            self._model if is_known else self._model.in_python(),
            draws=settings.num_samples,
            tune=settings.warmup_steps,
            chains=1,
            cores=1,
            seed=seed,
            progress_bar=False,
            blocking=False,
            return_raw_trace=True,
            maxdepth=settings.max_depth,
            target_accept=settings.target_accept,
            store_divergences=True,
            **_mass(settings.low_rank),
        )

    @property
    def progress(self) -> ChainProgress:
        """How far it is."""
        draws, divergences, step_size = self._model.told.split()
        return ChainProgress(int(draws), int(divergences), step_size)

    def wait(self, seconds: float) -> ChainDraws | None:
        """Waits at most so long; the draws, if the chain has finished.

        Raises:
            SiteError: there is no finite start.
            ModelError: compiled code failed.
            Exception: what the model raised.
            BaseException: what a signal handler raised, as it is.
        """
        results: Any = None
        error: Exception | None = None
        try:
            results = self._sampler.wait(timeout=seconds)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # a panic of Rust's is no Exception
            raise_if_from_handler(raised)
            if not isinstance(raised, TimeoutError):
                error = _translate(raised)
        error = self._model.error or error
        if error is not None:
            raise error
        return None if results is None else self._read(results)

    def stop(self) -> ChainDraws | None:
        """Ends the chain; its draws so far, none of one that has failed."""
        try:
            return self._read(self._sampler.abort())
        except BaseException as raised:  # of a chain that has failed, Rust panics
            raise_if_from_handler(raised)
            return None

    def _read(self, results: Any) -> ChainDraws:
        import pyarrow

        (trace,), (stats,) = results.get_arrow_trace()

        def column(name: str) -> Any:
            return pyarrow.array(stats.column(name)).to_numpy(False)

        kept = ~column("tuning").astype(np.bool_)
        flat = pyarrow.array(trace.column("x")).flatten().to_numpy(False)
        positions = torch.from_numpy(flat.reshape(len(kept), -1)[kept].copy())
        sample_stats = {
            name: torch.from_numpy(column(theirs)[kept].astype(dtype))
            for name, (theirs, dtype) in _STATISTICS.items()
        }
        # nutpie says where a trajectory ended if there is a log density
        without_end = np.asarray(pyarrow.array(stats.column("divergence_end")).is_null())
        is_broken = bool((column("diverging").astype(np.bool_) & kept & without_end).any())
        return ChainDraws(positions, sample_stats, is_broken)


class _Model:
    """What nutpie asks for a sampler.

    Attributes:
        told: the last that the chain told of itself.
        error: what the Python function raised, if it did.
    """

    def __init__(self, density: LogDensity, native: NativeFunction | None, start: Any):
        self._density, self._native, self._start = density, native, start
        self.n_dim = density.layout.size
        self.told = "0 0 0"
        self.error: Exception | None = None

    def _make_sampler(
        self, settings: Any, init_mean: Any, cores: int, progress: Any, *others: Any
    ) -> Any:
        from nutpie import _lib

        progress = _lib.ProgressType.template_callback(_TOLD_EVERY, _TOLD, 1, self._listen)
        if self._native is None:
            model = self.in_python()
            return model._make_sampler(settings, init_mean, cores, progress, *others)
        model = self._by_pointer(_lib, self._native)
        return _lib.PySampler.from_pymc(settings, cores, model, progress, *others)

    def _by_pointer(self, library: Any, native: NativeFunction) -> Any:
        size = self.n_dim
        sizes: dict[str, int] = {}  # the same dict for both: the first call adds to it
        variables = library.PyVariable.new_variables(["x"], ["float64"], [(size,)], sizes, {})
        evaluate = library.LogpFunc(native.address, native.inputs_address, native)
        expand = library.ExpandFunc(size, size, native.copy_address, 0, native)
        return library.PyMcModel(evaluate, expand, variables, size, sizes, {}, self._begin, None)

    def in_python(self) -> Any:
        """The model by nutpie's public interface."""
        from nutpie.compiled_pyfunc import from_pyfunc

        return from_pyfunc(
            self.n_dim,
            lambda: self._evaluate,
            lambda *_: lambda x: {"x": np.array(x)},
            [np.dtype("float64")],
            [(self.n_dim,)],
            ["x"],
            make_initial_point_fn=self._begin,
        )

    def _evaluate(self, x: Any) -> tuple[float, Any]:
        try:
            value, gradient = self._density.function(torch.from_numpy(np.array(x)))
        except Exception as error:  # of whatever kind the model raises; Rust would panic at it
            self.error = error
            return np.nan, np.full(self.n_dim, np.nan)
        # without a gradient there is no value either, as in compiled code
        return float(value) if gradient.isfinite().all() else np.nan, gradient.numpy()

    def _listen(self, told: str) -> None:
        self.told = told

    def _begin(self, _: int) -> Any:
        return self._start.copy()


def version() -> str:
    """nutpie's.

    Raises:
        ArgumentError: it is not installed.
    """
    return str(_nutpie().__version__)


def _nutpie() -> Any:
    try:
        import nutpie
    except ImportError as error:
        raise ArgumentError(
            "NUTS needs nutpie, an optional dependency: pip install 'pyro-scale[nuts]'"
        ) from error
    return nutpie


def _mass(low_rank: bool) -> dict[str, Any]:
    """The choice of a mass matrix, by the name that nutpie gives it."""
    if not low_rank:
        return {}
    names = inspect.signature(_nutpie().sample).parameters
    return {"adaptation": "low_rank"} if "adaptation" in names else {_OLD_LOW_RANK: True}


def _translate(error: BaseException) -> Exception:
    """A failure of nutpie's as ours."""
    if "initial" in str(error).lower():
        return SiteError(
            "NUTS: the log density or its gradient is not finite where the chain starts, or the "
            "gradient is zero: check the data, or change init_strategy",
            code="not-finite",
        )
    return ModelError(f"NUTS: the log density failed ({str(error).splitlines()[0]})")
