"""One function that chooses the method."""

from __future__ import annotations

import importlib.util
from typing import Any

from pyro_scale.core import rows
from pyro_scale.core.rows import DataLike, Model
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.open import open_data
from pyro_scale.data.sources import Data, TensorData
from pyro_scale.errors import ArgumentError
from pyro_scale.infer.method import Method
from pyro_scale.infer.nuts import NUTS
from pyro_scale.infer.samplers import BAOA, GHMC
from pyro_scale.kernels import Hyperparameters
from pyro_scale.results.call_checks import check_calls
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.problem import as_log_posterior, module_device, prepare
from pyro_scale.tuning.training import is_network

#: Numbers of the data that a gradient reads in a second, and seconds of a gradient without data.
#: These are of one core of a fixed machine, so that the choice depends on the problem alone.
_NUMBERS_PER_SECOND, _SECONDS = 4e8, 2e-5
#: NUTS: gradients per draw, and warm-up draws.
_LEAPFROGS, _WARMUP = 16, 1000
#: BAOA and GHMC: steps per draw; warm-up steps of both.
_BAOA_STEPS, _GHMC_STEPS, _WARMUP_STEPS = 5, 10, 5000
#: Rows of the two gradients of a minibatch, and rows above which there are minibatches.
_BATCH, _MANY_ROWS = 2 * 1024, 20_000
#: Seconds that compilation may take in addition.
_COMPILATION = 20.0


@check_calls
@without_vmap_warnings()
def sample(
    model: Model,
    data: DataLike,
    *,
    seconds: float = 60.0,
    num_samples: int = 1000,
    num_chains: int = 4,
    seed: int | None = None,
    progress: bool = True,
) -> Method:
    """Draws from the posterior, by the method that fits the model, the data and the time.

    A network with a hidden layer, or with more than 500 weights, is trained and sampled as an
    ensemble.  Any other model is sampled exactly, by NUTS on all rows, if that is estimated to take
    at most `seconds`; else by BAOA, with minibatches of many rows, which ends after `seconds`.  If
    nutpie is not installed, GHMC replaces NUTS for data that are tensors and models without
    `pyro.param`.  The estimates count the numbers that gradients read, on a fixed reference
    machine, and are good to an order of magnitude.  So the same problem gets the same method
    everywhere.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        data: a `DataLoader`, or the model's own arguments.
        seconds: time that sampling may take, approximately.  Compilation takes some ten seconds
            more.
        num_samples: draws to keep, per chain.
        num_chains: number of chains.
        seed: the same seed gives the same draws, unless time runs out.
        progress: whether to show a progress bar.

    Returns:
        `NUTS`, `GHMC` or `BAOA`, after its run.  `posterior.attrs["sample"]` says which method
        was chosen and why, with the estimated times of the methods.

    Raises:
        ArgumentError: `seconds` is not a number above 0; and what the methods raise.

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
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ArgumentError(f"seconds={seconds!r}: pass a number above 0")
    num_samples = as_count("num_samples", num_samples)
    num_chains, seed = as_count("num_chains", num_chains), choose_seed(seed)
    opened = open_data(data, None, None, module_device(model))
    log_posterior = as_log_posterior(model, opened.num_data)
    problem = prepare(log_posterior, opened, Hyperparameters(), None, 1, seed)
    num_data = problem.log_posterior.num_data
    numbers_per_row = _numbers_per_row(opened)

    def seconds_per_gradient(num_rows: int) -> float:
        return _SECONDS + numbers_per_row * num_rows / _NUMBERS_PER_SECOND

    per_pass = seconds_per_gradient(num_data)
    per_step = seconds_per_gradient(_BATCH if num_data > _MANY_ROWS else num_data)
    nuts = num_chains * (_WARMUP + num_samples) * _LEAPFROGS * per_pass
    baoa = num_chains * (_WARMUP_STEPS + _BAOA_STEPS * num_samples) * per_step
    ghmc = num_chains * (_WARMUP_STEPS + _GHMC_STEPS * num_samples) * per_pass
    costs = f"NUTS about {nuts:.2g} s, BAOA about {baoa:.2g} s"
    can_adjust = problem.data.batch_size is None and not problem.engine.has_points
    arguments: dict[str, Any] = {
        "num_samples": num_samples,
        "num_chains": num_chains,
        "seed": seed,
        "progress": progress,
    }
    if is_network(problem):
        why = f"BAOA from trained starts, as the model is a network ({costs})"
    elif importlib.util.find_spec("nutpie") is None:
        costs = f"GHMC about {ghmc:.2g} s, BAOA about {baoa:.2g} s"
        if can_adjust and ghmc <= seconds:
            why = f"GHMC, which is exact, as NUTS needs pyro-scale[nuts] ({costs})"
            sampler = GHMC(model).run(data, max_seconds=seconds + _COMPILATION, **arguments)
            return _with_reason(sampler, why)
        why = f"BAOA, as NUTS needs pyro-scale[nuts] ({costs})"
    elif nuts > seconds:
        why = f"BAOA, as NUTS would take longer than seconds={seconds:g} ({costs})"
    else:
        why = f"NUTS, which is exact, as there is time for it ({costs})"
        return _with_reason(NUTS(model).run(data, **arguments), why)
    run = BAOA(model).run(data, max_seconds=seconds + _COMPILATION, **arguments)
    return _with_reason(run, why)


def _numbers_per_row(data: Data) -> float:
    """An estimate of the cost of a gradient: how many numbers it reads for one row of the data
    (elements of the row, averaged over the tensors of rows, plus one)."""
    batch = data.arguments if isinstance(data, TensorData) else data.first()
    leaves = [leaf for leaf in rows.leaves(batch) if rows.is_rows(leaf)]
    return sum(leaf.numel() / max(1, len(leaf)) for leaf in leaves) + 1


def _with_reason(method: Method, why: str) -> Method:
    """The method itself, after the sentence `why`, on why it was chosen, was written to
    `posterior.attrs["sample"]`."""
    method.posterior.attrs["sample"] = why
    return method
