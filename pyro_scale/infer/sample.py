"""One function that chooses the method."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from tqdm.auto import tqdm

from pyro_scale.core.exclusive import Ignored
from pyro_scale.core.rows import DataLike, Model
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.errors import ArgumentError
from pyro_scale.infer.method import Method
from pyro_scale.infer.nuts import NUTS
from pyro_scale.infer.samplers import BAOA, GHMC
from pyro_scale.kernels import Hyperparameters
from pyro_scale.marginal.grouped_data import open_rows
from pyro_scale.results.call_checks import check_calls
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.problem import Problem, as_log_posterior, module_device, prepare
from pyro_scale.tuning.costs import TYPICAL, Costs
from pyro_scale.tuning.policy import SEARCH, TRAINING
from pyro_scale.tuning.training import is_network

#: NUTS's pilot, of which a draw is timed: warm-up draws, and draws.
_PILOT_WARMUP, _PILOT_DRAWS = 200, 50
#: Draws of each chain that are kept at least where time is short.
_FEWEST = 100
#: Seconds that compilation may take in addition.
_COMPILATION = 20.0
#: NUTS may take this fraction of the user's seconds even where BAOA has minibatches: its draws are
#: exact.
_WORTH_EXACTNESS = 1 / 6
_without_divergences = Ignored(r"\d+ of \d+ trajectories diverged")


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
    ensemble, by BAOA.  Any other model is sampled exactly, by NUTS on all rows, if that is
    estimated to take at most `seconds`, or at most a sixth of them where rows are so many that BAOA
    takes minibatches; otherwise by BAOA.  If nutpie is not installed, GHMC replaces NUTS for data
    that are tensors and models without `pyro.param`.

    The choice counts the arithmetic of a gradient, on a fixed reference machine, so that the same
    problem gets the same method everywhere.  What NUTS will take on this machine is measured by
    chains of 250 draws, and written to stderr; if all draws would take longer than `seconds`, there
    are fewer.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        data: a `DataLoader`, or the model's own arguments.
        seconds: time after which sampling ends with the draws so far.  Compilation takes some ten
            seconds more.
        num_samples: draws to keep, per chain.
        num_chains: number of chains.
        seed: the same seed gives the same draws, unless time runs out.
        progress: whether to show a progress bar, and how long NUTS will take.

    Returns:
        `NUTS`, `GHMC` or `BAOA`, after its run.  `posterior.attrs["sample"]` says which method
        was chosen and why, with the seconds that NUTS was predicted to take.

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
    opened = open_rows(data, None, None, module_device(model))
    log_posterior = as_log_posterior(model, opened.num_data)
    problem = prepare(log_posterior, opened, Hyperparameters(), None, 1, seed)
    costs = Costs(problem, num_samples, num_chains)
    kind, reason = _choose(problem, costs, seconds)
    method, why = kind(model), f"{kind.__name__}, {reason}"
    arguments: dict[str, Any] = {"num_samples": num_samples, "num_chains": num_chains, "seed": seed}
    if isinstance(method, NUTS):
        needed = _timed(method, data, **arguments)
        why += f"; about {needed:.2g} s"
        if needed > seconds:
            part = seconds / needed
            arguments["warmup_steps"] = max(_PILOT_WARMUP, int(part * TYPICAL.nuts_warmup))
            arguments["num_samples"] = min(num_samples, max(_FEWEST, int(part * num_samples)))
            why += f", so chains are cut to {arguments['num_samples']} draws"
    if progress:
        tqdm.write(why, file=sys.stderr)
    method.run(data, max_seconds=seconds + _COMPILATION, progress=progress, **arguments)
    method.posterior.attrs["sample"] = why
    return method


def _choose(
    problem: Problem, costs: Costs, seconds: float
) -> tuple[type[NUTS] | type[GHMC] | type[BAOA], str]:
    """(The method for the problem, why in words).

    Args:
        problem: the analyzed model and its data.
        costs: seconds that each method would take on the reference machine.
        seconds: seconds that the user has.
    """
    if is_network(problem):
        return BAOA, "from trained starts, as the model is a network"
    has_batches = problem.data.batch_size is not None
    has_batches |= problem.log_posterior.num_data > TRAINING.few_rows
    affordable = _WORTH_EXACTNESS * seconds if has_batches else seconds
    if importlib.util.find_spec("nutpie") is not None:
        if costs.nuts <= affordable:
            return NUTS, "which is exact, as there is time for it"
        return BAOA, f"as NUTS would take about {costs.nuts:.2g} s"
    can_adjust = problem.data.batch_size is None and not problem.engine.has_points
    if can_adjust and costs.ghmc <= affordable:
        return GHMC, "which is exact, as NUTS needs pyro-scale[nuts]"
    return BAOA, "as NUTS needs pyro-scale[nuts]"


def _timed(nuts: NUTS, data: DataLike, num_samples: int, num_chains: int, seed: int) -> float:
    """Seconds that the draws of NUTS take, with warm-up and the searches for modes after them, from
    the time of a short run with as many chains; a second run does not compile again."""
    with _without_divergences():  # the run itself warns of its own
        nuts.run(
            data,
            num_samples=_PILOT_DRAWS,
            warmup_steps=_PILOT_WARMUP,
            num_chains=num_chains,
            seed=seed,
            progress=False,
        )
    a_draw = nuts.posterior.draws.attrs["sampling_time"] / (_PILOT_WARMUP + _PILOT_DRAWS)
    draws = (1 + SEARCH.fraction_of_nuts) * (TYPICAL.nuts_warmup + num_samples)
    return draws * float(a_draw)
