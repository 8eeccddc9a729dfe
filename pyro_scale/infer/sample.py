"""One function for those who do not want to choose a method."""

from __future__ import annotations

import importlib.util
from typing import Any

from pyro_scale.core import rows
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.open import open_data
from pyro_scale.data.sources import TensorData
from pyro_scale.errors import ArgumentError
from pyro_scale.infer.method import Method
from pyro_scale.infer.nuts import NUTS
from pyro_scale.infer.samplers import BAOA, GHMC
from pyro_scale.kernels import Hyperparameters
from pyro_scale.results.call_checks import check_calls
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.problem import as_log_posterior, module_device, prepare
from pyro_scale.tuning.training import is_network

#: Numbers of the data that a gradient goes through in a second, and seconds of one without data:
#: of one core, fixed, so that a choice depends on the problem and not on the machine.
_RATE, _LEAST = 4e8, 2e-5
#: Gradients of a draw of NUTS, and its draws of warm-up; steps of a draw of BAOA, and of warm-up;
#: steps of a draw of GHMC.
_LEAPFROGS, _WARMUP, _THINNING, _STEPS, _ADJUSTED = 16, 1000, 5, 5000, 10
#: Rows of two gradients of a minibatch, and rows from which on there are minibatches.
_BATCH, _MANY_ROWS = 2 * 1024, 20_000
#: Seconds that compilation may take on top.
_COMPILATION = 20.0


@check_calls
@without_vmap_warnings()
def sample(
    model: Any,
    data: Any,
    *,
    seconds: float = 60.0,
    num_samples: int = 1000,
    num_chains: int = 4,
    seed: int | None = None,
    progress: bool = True,
) -> Method:
    """Draws from the posterior, by the method that fits the model, the data and the time.

    A network with a hidden layer, or with more than 500 weights, is trained and sampled as an
    ensemble.  Anything else is sampled exactly, by NUTS on all rows, where that takes no longer
    than `seconds` by the numbers that its gradients go through; else by BAOA, with minibatches of
    many rows, which ends after `seconds`.  Where nutpie is not installed GHMC takes the place of
    NUTS, for data that are tensors and models without `pyro.param`.  The estimates are of a fixed
    reference machine and good to an order of magnitude: the same problem gets the same method
    everywhere.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        data: a `DataLoader`, or the model's own arguments.
        seconds: that sampling may take, about; compilation, some ten seconds, comes on top.
        num_samples: draws to keep, per chain.
        num_chains: how many chains.
        seed: the same seed gives the same draws, unless the time is over.
        progress: whether to show a progress bar.

    Returns:
        `NUTS`, `GHMC` or `BAOA`, after its run.  `get_samples()`, `summary()` and `to_arviz()` read
        it; its `attrs["sample"]` in `diagnostics()` says which method it is, why, and what the
        other one would have cost.

    Raises:
        ArgumentError: `seconds` is no number above 0; and what the methods raise.

    Examples:
        >>> import pyro, pyro.distributions as dist, torch, pyro_scale as ps
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> run = ps.sample(model, torch.linspace(-1, 2, 30), seed=0, progress=False)
        >>> type(run).__name__, round(float(run.get_samples()["mu"].mean()), 1)
        ('NUTS', 0.5)
    """
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:
        raise ArgumentError(f"seconds={seconds!r}: pass a number above 0")
    num_samples = as_count("num_samples", num_samples)
    num_chains, seed = as_count("num_chains", num_chains), choose_seed(seed)
    opened = open_data(data, None, None, module_device(model))
    log_posterior = as_log_posterior(model, opened.num_data)
    problem = prepare(log_posterior, opened, Hyperparameters(), None, 1, seed)
    num_data = problem.log_posterior.num_data
    held = opened.arguments if isinstance(opened, TensorData) else opened.first()
    leaves = [leaf for leaf in rows.leaves(held) if rows.is_rows(leaf)]
    numbers = sum(leaf.numel() / max(1, len(leaf)) for leaf in leaves) + 1  # a row

    def gradient(num_rows: int) -> float:
        return _LEAST + numbers * num_rows / _RATE

    exact = num_chains * (_WARMUP + num_samples) * _LEAPFROGS * gradient(num_data)
    a_step = gradient(_BATCH if num_data > _MANY_ROWS else num_data)
    approximate = num_chains * (_STEPS + _THINNING * num_samples) * a_step
    costs = f"NUTS about {exact:.2g} s, BAOA about {approximate:.2g} s"
    adjusted = num_chains * (_STEPS + _ADJUSTED * num_samples) * gradient(num_data)
    can_adjust = problem.data.batch_size is None and not problem.engine.has_points
    how: dict[str, Any] = {
        "num_samples": num_samples,
        "num_chains": num_chains,
        "seed": seed,
        "progress": progress,
    }
    if is_network(problem):
        why = f"BAOA from trained starts, as the model is a network ({costs})"
    elif importlib.util.find_spec("nutpie") is None:
        costs = f"GHMC about {adjusted:.2g} s, BAOA about {approximate:.2g} s"
        if can_adjust and adjusted <= seconds:
            why = f"GHMC, which is exact, as NUTS needs pyro-scale[nuts] ({costs})"
            exactly = GHMC(model).run(data, max_seconds=seconds + _COMPILATION, **how)
            return _explained(exactly, why)
        why = f"BAOA, as NUTS needs pyro-scale[nuts] ({costs})"
    elif exact > seconds:
        why = f"BAOA, as NUTS would take longer than seconds={seconds:g} ({costs})"
    else:
        why = f"NUTS, which is exact, as there is time for it ({costs})"
        return _explained(NUTS(model).run(data, **how), why)
    sampler = BAOA(model).run(data, max_seconds=seconds + _COMPILATION, **how)
    return _explained(sampler, why)


def _explained(method: Method, why: str) -> Method:
    """The method, whose facts say why it was chosen."""
    method.posterior.attrs["sample"] = why
    return method
