"""nutpie's NUTS on a log density.  The only file that imports nutpie.

nutpie asks a model for a sampler.  Our model hands over machine code as a pointer, through calls
that nutpie does not document.  These calls are known for the versions below.  Because a wrong
interface would end the process, they are tried once per version in another process
(`check_pointers`).  Any other version gets a Python function, which costs some 15 microseconds a
gradient more.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_scale.compile import cache
from pyro_scale.compile.compiled import compile_value_and_gradient
from pyro_scale.compile.cpp_function import NativeFunction
from pyro_scale.compile.trace import trace
from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.core.layout import Layout
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
#: nutpie's name, before 0.16.9, of a mass matrix of eigenvectors and a diagonal.
_OLD_LOW_RANK = "low_rank_modified_mass_matrix"
#: nutpie's template of a chain's progress, and milliseconds from one report to the next.
_PROGRESS = (
    "{% for c in chains %}{{c.finished_draws}} {{c.divergences}} {{c.step_size}}{% endfor %}"
)
_PROGRESS_EVERY = 100
#: Python code that another process runs to check the interface, and seconds that it may take.
_CHECK = "from pyro_scale.exact.nutpie_api import check_pointers; check_pointers()"
_SECONDS = 300


@dataclass(frozen=True)
class Settings:
    """The settings of one NUTS chain.

    Attributes:
        num_samples: number of draws after warm-up.
        warmup_steps: number of draws that adapt the step size and the mass.
        max_depth: largest depth of trees, which have at most 2^max_depth leaves.
        target_accept: acceptance rate that the step size is adapted to.
        low_rank: whether the mass matrix has eigenvectors besides its diagonal.
    """

    num_samples: int
    warmup_steps: int
    max_depth: int
    target_accept: float
    low_rank: bool

    @property
    def length(self) -> int:
        """Number of draws of a chain, warm-up included."""
        return self.warmup_steps + self.num_samples


class ChainDraws(NamedTuple):
    """The draws of one NUTS chain after warm-up.

    Attributes:
        positions: unconstrained draws, float64 `[draws, D]`.
        sample_stats: sample statistics by ArviZ's names, `[draws]`.
        is_broken: whether the log density was not finite where a trajectory diverged after warm-up.
    """

    positions: Tensor
    sample_stats: dict[str, Tensor]
    is_broken: bool


class ChainProgress(NamedTuple):
    """How far a running chain is.

    Attributes:
        num_draws: number of draws so far, warm-up included.
        num_divergences: number of divergent draws among them.
        step_size: current step size, as text with few digits.
    """

    num_draws: int
    num_divergences: int
    step_size: str


class Chain:
    """A NUTS chain that runs in nutpie's threads from its creation on.

    Args:
        density: log density to sample.
        start: unconstrained parameters at which the chain starts, `[D]`.
        settings: settings of the chain.
        seed: seed of the chain's random numbers.
        by_pointer: whether to hand over machine code, if the density has any; None to do so if
            nutpie's version supports that.

    Raises:
        ArgumentError: nutpie is not installed.
    """

    def __init__(
        self,
        density: LogDensity,
        start: Tensor,
        settings: Settings,
        seed: int,
        by_pointer: bool | None = None,
    ):
        nutpie = _nutpie()
        takes_it = takes_pointers() if by_pointer is None else by_pointer
        native = density.native if takes_it else None
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
        """How far the chain is: its number of draws and of divergences so far, warm-up included,
        and its current step size.
        """
        draws, divergences, step_size = self._model.progress.split()
        return ChainProgress(int(draws), int(divergences), step_size)

    def wait(self, seconds: float) -> ChainDraws | None:
        """Waits for at most `seconds` for the chain to finish.  Returns its draws; None if the
        chain still runs.

        Raises:
            SiteError: the log density is not finite at the start.
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
        """Ends the chain.  Returns its draws after warm-up so far; None if the chain has failed."""
        try:
            return self._read(self._sampler.abort())
        except BaseException as raised:  # Rust panics if the chain has failed
            raise_if_from_handler(raised)
            return None

    def _read(self, results: Any) -> ChainDraws:
        """The chain's draws after warm-up with their statistics, converted from the results that
        nutpie returns.
        """
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
        # nutpie gives the end of a divergent trajectory only where the log density is finite
        without_end = np.asarray(pyarrow.array(stats.column("divergence_end")).is_null())
        is_broken = bool((column("diverging").astype(np.bool_) & kept & without_end).any())
        return ChainDraws(positions, sample_stats, is_broken)


class _Model:
    """The model as nutpie's interface wants it: an object that nutpie asks for a sampler.

    Args:
        density: log density to sample.
        native: machine code to hand over; None to hand over a Python function.
        start: unconstrained latents at which the chain starts, a NumPy array `[D]`.

    Attributes:
        progress: the chain's latest report, by the template `_PROGRESS`.
        error: exception that the Python function raised; None if it raised none.
    """

    def __init__(self, density: LogDensity, native: NativeFunction | None, start: Any):
        self._density, self._native, self._start = density, native, start
        self.n_dim = density.layout.size
        self.progress = "0 0 0"
        self.error: Exception | None = None

    def _make_sampler(
        self, settings: Any, init_mean: Any, cores: int, progress: Any, *others: Any
    ) -> Any:
        """nutpie's sampler of this model. nutpie itself calls this method, with arguments whose
        meaning only nutpie needs to know.
        """
        from nutpie import _lib

        reports = _lib.ProgressType.template_callback(_PROGRESS_EVERY, _PROGRESS, 1, self._listen)
        if self._native is None:
            model = self.in_python()
            return model._make_sampler(settings, init_mean, cores, reports, *others)
        model = self._by_pointer(_lib, self._native)
        return _lib.PySampler.from_pymc(settings, cores, model, reports, *others)

    def _by_pointer(self, library: Any, native: NativeFunction) -> Any:
        """nutpie's object for a model with one variable "x" `[D]`, which calls machine code.

        Args:
            library: nutpie's compiled module.
            native: machine code of the log density.
        """
        size = self.n_dim
        sizes: dict[str, int] = {}  # the same dict for both: the first call adds to it
        variables = library.PyVariable.new_variables(["x"], ["float64"], [(size,)], sizes, {})
        evaluate = library.LogpFunc(native.address, native.inputs_address, native)
        expand = library.ExpandFunc(size, size, native.copy_address, 0, native)
        return library.PyMcModel(evaluate, expand, variables, size, sizes, {}, self._begin, None)

    def in_python(self) -> Any:
        """nutpie's object for a model with one variable "x" `[D]`, which calls a Python function,
        by nutpie's public interface."""
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
        """(The log density at x `[D]`, its gradient), evaluated in Python; NaN if the model raises,
        and the exception is kept in `error`."""
        try:
            value, gradient = self._density.function(torch.from_numpy(np.array(x)))
        except Exception as error:  # whatever the model raises; it would make Rust panic
            self.error = error
            return np.nan, np.full(self.n_dim, np.nan)
        # no value without a gradient, as in compiled code
        return float(value) if gradient.isfinite().all() else np.nan, gradient.numpy()

    def _listen(self, progress: str) -> None:
        """Receives a report of the chain's progress, a text that nutpie sends, and stores it in
        `progress`.
        """
        self.progress = progress

    def _begin(self, _: int) -> Any:
        """The unconstrained latents at which the chain starts, a new array `[D]`; nutpie passes a
        seed, which is not used."""
        return self._start.copy()


def version() -> str:
    """nutpie's version, such as "0.16.8".

    Raises:
        ArgumentError: nutpie is not installed.
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
    """The keyword argument that asks `nutpie.sample` for a mass matrix with eigenvectors, whose
    name depends on nutpie's version; an empty dict for a diagonal mass matrix.
    """
    if not low_rank:
        return {}
    names = inspect.signature(_nutpie().sample).parameters
    return {"adaptation": "low_rank"} if "adaptation" in names else {_OLD_LOW_RANK: True}


def _translate(error: BaseException) -> Exception:
    """The error to raise to the user in place of an error of nutpie: a `SiteError` if the chain
    could not start, otherwise a `ModelError`. Returned, not raised.
    """
    if "initial" in str(error).lower():
        return SiteError(
            "NUTS: the log density or its gradient is not finite where the chain starts, or the "
            "gradient is zero: check the data, or change init_strategy",
            code="not-finite",
        )
    return ModelError(f"NUTS: the log density failed ({str(error).splitlines()[0]})")


# ---------------------------------------------------------------------- the interface for pointers


@functools.cache
def takes_pointers() -> bool:
    """Whether machine code may be handed to nutpie as pointers (which is fast, and could crash with
    another version): nutpie's version is known, and `check_pointers` passed in another process, now
    or earlier.

    Raises:
        ArgumentError: nutpie is not installed.
    """
    if version() not in KNOWN_VERSIONS:
        return False
    parts = ("nutpie", version(), sys.version, torch.__version__)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    if cache.read(key) is None:
        command = [sys.executable, "-c", _CHECK]
        try:
            checked = subprocess.run(command, capture_output=True, timeout=_SECONDS)
        except (OSError, subprocess.SubprocessError):
            return False
        if checked.returncode:
            return False
        cache.write(key, b"passed")
    return True


def check_pointers() -> None:
    """Samples a normal distribution by handing over machine code, and compares nutpie's log
    densities with the distribution's.

    Raises:
        AssertionError: log densities differ, or the chain does not end or accepts too little.
    """
    mean = torch.tensor((1.0, -2.0, 3.0), dtype=torch.float64)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return -(x - mean).square().sum() / 2, mean - x

    native = compile_value_and_gradient(trace(function, [torch.zeros_like(mean)]))
    density = LogDensity(native, Layout.from_tensors({"x": mean}), "compiled log density")
    settings = Settings(50, 50, 10, 0.8, low_rank=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws = Chain(density, torch.zeros_like(mean), settings, 0, by_pointer=True).wait(_SECONDS)
    if draws is None:
        raise AssertionError("the chain does not end")
    expected = torch.stack([function(position)[0] for position in draws.positions])
    torch.testing.assert_close(draws.sample_stats["lp"], expected)
    if draws.sample_stats["acceptance_rate"].mean() < 0.5:
        raise AssertionError("gradients are not those of the log density")
