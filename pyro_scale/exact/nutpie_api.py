"""nutpie's NUTS on a log density.  The only file that imports nutpie.

Machine code is handed over as a pointer, through calls that nutpie does not document; they are
known for the versions below.  Any other version gets a Python function by nutpie's public
interface, which costs some 15 microseconds a gradient more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_scale.errors import ArgumentError, SiteError
from pyro_scale.exact.log_density import LogDensity

#: Versions whose calls for pointers are known.
_KNOWN_VERSIONS = ("0.16.8",)
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
    """

    positions: Tensor
    sample_stats: dict[str, Tensor]


class Chain:
    """A chain that runs in threads of nutpie's own.

    Args:
        density: what is sampled.
        start: the first position, [D].
        settings: of the chain.
        seed: of its noise.

    Raises:
        ArgumentError: nutpie is not installed.
    """

    def __init__(self, density: LogDensity, start: Tensor, settings: Settings, seed: int):
        library, size = _library(), density.layout.size
        first = start.detach().double().numpy()

        def init(_: int) -> Any:
            return first.copy()

        native = density.native
        if native is None or _version() not in _KNOWN_VERSIONS:
            self._background = _python_sampler(density, init, settings, seed)
            self._sampler = self._background._sampler
            return
        kinds = library.PyNutsSettings
        own = kinds.LowRank(seed) if settings.low_rank else kinds.Diag(seed)
        own.num_chains, own.num_tune = 1, settings.warmup_steps
        own.num_draws, own.maxdepth = settings.num_samples, settings.max_depth
        own.target_accept = settings.target_accept
        sizes: dict[str, int] = {}  # the same dict for both: the first call adds to it
        variables = library.PyVariable.new_variables(["x"], ["float64"], [(size,)], sizes, {})
        evaluate = library.LogpFunc(native.address, native.inputs_address, native)
        expand = library.ExpandFunc(size, size, native.copy_address, 0, native)
        model = library.PyMcModel(evaluate, expand, variables, size, sizes, {}, init, None)
        quiet, storage = library.ProgressType.none(), library.PyStorage.arrow()
        self._sampler = library.PySampler.from_pymc(own, 1, model, quiet, storage)

    def wait(self, seconds: float) -> bool:
        """Waits at most so long; whether the chain has finished.

        Raises:
            SiteError: there is no finite start.
        """
        try:
            self._sampler.wait(seconds)
        except TimeoutError:
            return False
        except RuntimeError as error:
            raise _translate(error) from error
        return bool(self._sampler.is_finished())

    def stop(self) -> None:
        """Ends the chain; its draws so far are kept."""
        self._sampler.abort()

    def draws(self) -> ChainDraws:
        """What there is, once the chain has finished or was stopped."""
        import pyarrow

        (trace,), (stats,) = self._sampler.take_results().get_arrow_trace()

        def column(name: str) -> Any:
            return pyarrow.array(stats.column(name)).to_numpy(False)

        kept = ~column("tuning").astype(np.bool_)
        flat = pyarrow.array(trace.column("x")).flatten().to_numpy(False)
        positions = torch.from_numpy(flat.reshape(len(kept), -1)[kept].copy())
        sample_stats = {
            name: torch.from_numpy(column(theirs)[kept].astype(dtype))
            for name, (theirs, dtype) in _STATISTICS.items()
        }
        return ChainDraws(positions, sample_stats)


def _python_sampler(
    density: LogDensity, init: Callable[[int], Any], settings: Settings, seed: int
) -> Any:
    """The chain by nutpie's public interface, at work."""
    import nutpie
    from nutpie.compiled_pyfunc import from_pyfunc

    def make_logp() -> Callable[[Any], tuple[float, Any]]:
        def logp(x: Any) -> tuple[float, Any]:
            value, gradient = density.function(torch.from_numpy(np.array(x)))
            return float(value), gradient.numpy()

        return logp

    def make_expand(*_: int) -> Callable[[Any], dict[str, Any]]:
        return lambda x: {"x": np.array(x)}

    size = density.layout.size
    model = from_pyfunc(
        size,
        make_logp,
        make_expand,
        [np.dtype("float64")],
        [(size,)],
        ["x"],
        make_initial_point_fn=init,
    )
    return nutpie.sample(
        model,
        draws=settings.num_samples,
        tune=settings.warmup_steps,
        chains=1,
        cores=1,
        seed=seed,
        progress_bar=False,
        blocking=False,
        low_rank_modified_mass_matrix=settings.low_rank,
        maxdepth=settings.max_depth,
        target_accept=settings.target_accept,
    )


def _translate(error: RuntimeError) -> Exception:
    """A failure of nutpie's as ours."""
    if "initial" in str(error).lower():
        return SiteError(
            "NUTS: the log density or its gradient is not finite where the chain starts, or the "
            "gradient is zero: check the data, or change init_strategy"
        )
    return error


def _library() -> Any:
    try:
        from nutpie import _lib
    except ImportError as error:
        raise ArgumentError(
            "NUTS needs nutpie, an optional dependency: pip install 'pyro-scale[nuts]'"
        ) from error
    return _lib


def _version() -> str:
    import nutpie

    return str(nutpie.__version__)
