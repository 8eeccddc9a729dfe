"""Simulation-based calibration: whether a method gives calibrated posteriors on a model."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pyro_scale.calibration import chains
from pyro_scale.calibration.campaign import Campaign
from pyro_scale.calibration.comparison import SBCComparison
from pyro_scale.calibration.fitters import Fitter, OneByOne, Stacked, StackedNUTS
from pyro_scale.calibration.quantities import Quantity, check_quantities
from pyro_scale.calibration.results import SBC
from pyro_scale.calibration.simulations import Generator
from pyro_scale.calibration.stack import Stack
from pyro_scale.calibration.truth import FromPosterior, FromPrior, Truth
from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count, is_auto
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.open import open_data
from pyro_scale.data.row_sampler import check_sampling
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import ArgumentError, CallError
from pyro_scale.exact.pointer_check import takes_pointers
from pyro_scale.infer.approximation import Approximation
from pyro_scale.infer.method import Method
from pyro_scale.infer.nuts import NUTS
from pyro_scale.infer.sampler import Sampler
from pyro_scale.kernels import Hyperparameters
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.rng.seeds import choose_seed, derived_seed
from pyro_scale.run.problem import as_log_posterior, module_device, prepare
from pyro_scale.tuning.training import is_network

From = Literal["prior", "posterior"]
#: Simulations of which fewer tell nothing.
_LEAST = 20
#: Settings of a run that stacked chains take; those of NUTS.
_OF_CHAINS, _OF_NUTS = ("warmup_steps", "thinning", "batch_size", "sampling"), ("warmup_steps",)
#: What `sbc` decides by itself.
_OWN = ("data", "num_samples", "num_chains", "seed", "progress")


@without_vmap_warnings()
def sbc(
    inference: Method | Mapping[str, Method],
    data: Any,
    *,
    num_simulations: int = 1000,
    method: From = "prior",
    quantities: Mapping[str, Quantity] | None = None,
    simulator: Callable[..., Any] | None = None,
    predictive: Any = None,
    seed: int | None = None,
    progress: bool = True,
    memory_budget: int | None = None,
    resume: SBC | None = None,
    **settings: Any,
) -> Any:
    """Whether a method, with its settings, gives calibrated posteriors on a model.

    Latents are drawn from the prior, data from the model, draws from the posterior of these data;
    if the draws are right, then the rank of the true latents among them is uniform (Talts et al.
    2018).  Samplers run all simulations as chains of one compiled program.  Each of them finds the
    mode, the geometry and the step size of its own posterior; the lengths of the stages are common
    to all, and found on the first twenty.  There is one chain a simulation.

    Ranks are among 100 draws of each simulation.  Unless `thinning` is set, it is doubled, at most
    8 times, until 99% of the simulations have 200 effective draws or more.  Simulations that break
    or stay slow are kept, counted and named.

    Args:
        inference: a method with the settings under test, such as `ps.BAOA(model)`; or a dict of
            several, by name, which are fitted to the same data sets.
        data: as for `run`, observations included: their values are not used but with
            `method="posterior"`, covariates are.
        num_simulations: at least 20; 1,000 find an sd that is off by 10%.
        method: `"prior"`; or `"posterior"` (Saeilynoja et al. 2025), for an `inference` that has
            been run on the data: latents are drawn from its posterior and data from them, and what
            is tested is the posterior of these data together with the given ones.
        quantities: functions of (sites, data), ranked besides all latents and the total log
            likelihood `"loglik"`: `sites` is a dict of one draw's values, `data` the model's
            arguments with simulated observations.  Quantities of the data find errors that latents
            alone do not (Modrak et al. 2023).
        simulator: another model of the same sites, to draw latents and data from.
        predictive: rows, as the model's arguments, at which predictions are checked: the rank of an
            observation drawn by the true latents among the draws' own.
        seed: the same seed gives the same result; drawn from torch's generator by default.
        progress: whether to show a progress bar, which says how long it takes.
        memory_budget: bytes that data sets and draws may take at a time, half of the machine's by
            default; `attrs["blocks"]` says in how many blocks simulations were run.
        resume: what an interrupted call with the same arguments returned.
        settings: of `run`, such as `warmup_steps=`, `thinning=`, `batch_size=`.

    Returns:
        An `SBC`: print it for the verdict; `summary()`, `plot()`, `to_datatree()`.  An
        `SBCComparison` of these, for a dict.

    Raises:
        ArgumentError: fewer than 20 simulations; a setting that is none of the method's.
        SiteError: a site cannot be drawn (an improper prior, a `pyro.factor`), or data sets are off
            the support of the model.
        ModelError: the model has `pyro.param` sites; what `method="posterior"` cannot do.

    Warns:
        PyroScaleWarning: it was interrupted; the result has the simulations until then.

    Example:
        >>> import pyro, pyro.distributions as dist, torch, pyro_scale as ps
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> found = ps.sbc(ps.BAOA(model), torch.zeros(10), num_simulations=100, seed=0,
        ...                progress=False)
        >>> found.verdict
        'calibrated'

    References: Talts et al., Validating Bayesian inference algorithms with simulation-based
    calibration, 2018; Modrak et al., Simulation-based calibration checking for Bayesian computation:
    the choice of test quantities shapes sensitivity, 2023; Saeilynoja, Buerkner and Vehtari,
    Graphical test for discrete uniformity, 2022; Saeilynoja et al., Posterior SBC, 2025.
    """
    seed = choose_seed(seed)
    if isinstance(inference, Mapping):
        if resume is not None:
            raise ArgumentError("resume: it goes on with one method; pass that instead of a dict")
        if not inference:
            raise ArgumentError("inference={}: pass a method, or a dict of some by name")
        return SBCComparison(
            {
                name: _sbc(
                    each, data, num_simulations, method, quantities, simulator, predictive, seed,
                    progress, memory_budget, None, settings, name,
                )
                for name, each in inference.items()
            }
        )
    return _sbc(
        inference, data, num_simulations, method, quantities, simulator, predictive, seed, progress,
        memory_budget, resume, settings, None,
    )


def _sbc(
    inference: Method,
    data: Any,
    num_simulations: int,
    method: From,
    quantities: Mapping[str, Quantity] | None,
    simulator: Callable[..., Any] | None,
    predictive: Any,
    seed: int,
    progress: bool,
    memory_budget: int | None,
    resume: SBC | None,
    settings: Mapping[str, Any],
    label: str | None,
) -> SBC:
    if not isinstance(inference, Method):
        raise ArgumentError(
            f"inference is a {type(inference).__name__}: pass a method on a model, such as "
            "ps.BAOA(model)"
        )
    if method not in get_args(From):
        raise ArgumentError(f"method={method!r}: pass one of {list(get_args(From))}")
    count = as_count("num_simulations", num_simulations, least=_LEAST)
    if memory_budget is not None:
        memory_budget = as_count("memory_budget", memory_budget, hint=" of bytes")
    if resume is not None:
        seed = _seed_of(resume, count)
    _check_settings(inference, settings)
    arguments = _whole(data, inference)
    model = _generator(inference, inference.model, arguments)
    truth: Truth
    if method == "posterior":
        if simulator is not None:
            raise ArgumentError("simulator: method='posterior' draws data from the fitted model")
        truth = FromPosterior.of(model, _posterior_draws(inference))
    elif simulator is None:
        truth = FromPrior(model, model)
    else:
        truth = FromPrior.of(model, _generator(inference, simulator, arguments))
    own = dict(quantities or {})
    check_quantities(own, model.latents)
    stack, vectorized_network = _stack(truth, inference, settings, seed)
    fitter = _fitter(inference, stack, settings, vectorized_network)
    predict_at = None if predictive is None else rows.as_arguments(predictive)
    name = label or type(inference).__name__
    return Campaign(
        truth=truth,
        stack=stack,
        fitter=fitter,
        quantities=own,
        predict_at=predict_at,
        count=count,
        seed=seed,
        title=f"sbc, {name}",
        progress=progress,
        memory_budget=memory_budget,
        attrs={
            "method": repr(inference),
            "from": method,
            "num_data": stack.num_data,
            "fitted_by": type(fitter).__name__,
            **{key: str(value) for key, value in settings.items()},
        },
    ).run(resume)


def _whole(data: Any, inference: Method) -> Arguments:
    """All rows, as the model's arguments."""
    opened = open_data(data, None, inference._num_data, module_device(inference.model))
    if opened.batch_size is not None:  # a loader
        return rows.concatenate(list(opened.in_order()))
    return opened.first()


def _generator(inference: Method, model: Any, arguments: Arguments) -> Generator:
    num_data = inference._num_data or rows.count(arguments)
    return Generator.of(as_log_posterior(model, num_data), arguments)


def _posterior_draws(inference: Method) -> dict[str, Tensor]:
    """Unconstrained, `[draws, ...]`."""
    result = inference._draws()
    params = result.layout.unflatten(result.positions.flatten(0, 1))
    return {name: params[name] for name in result.log_posterior.latents}


def _stack(
    truth: Truth, inference: Method, settings: Mapping[str, Any], seed: int
) -> tuple[Stack, bool]:
    """(The first data set, understood, with what all have in common; whether it is a network)."""
    fitted = truth.fitted
    params = truth.params(1, seed)
    own = truth.observed(params, 0, 1, seed)
    log_posterior = LogPosterior(fitted.model(), fitted.num_rows)
    first = (fitted.shared(), {name: table[0] for name, table in own.items()})
    problem = prepare(
        log_posterior, open_data(first, None, fitted.num_rows), Hyperparameters(), None, 1, seed
    )
    size = settings.get("batch_size")
    if is_auto(size):
        size = None
    if size is not None:
        size = as_count("batch_size", size, hint=", or None for all rows")
        if size > fitted.num_rows:
            raise ArgumentError(f"batch_size={size}: the data have {fitted.num_rows} rows")
        size = None if size == fitted.num_rows else size
    sampling = settings.get("sampling") or getattr(
        getattr(inference, "kernel", None), "sampling", "shuffle"
    )
    check_sampling(sampling)
    compiles = getattr(getattr(inference, "_settings", None), "compile", True)
    stack = Stack(
        log_posterior=problem.log_posterior,
        layout=Layout.of(problem.engine.layout.unflatten(problem.positions[0])),
        shared=first[0],
        own=own,
        seeds=[seed],
        batch_size=size,
        sampling=sampling,
        compile=True if is_auto(compiles) else compiles,
        earlier=Earlier(),
        bar=Progress(None, "", False),
        vectorized=problem.engine.vectorized,
    )
    return stack, is_network(problem)


def _fitter(
    inference: Method, stack: Stack, settings: Mapping[str, Any], is_trained: bool
) -> Fitter:
    """How the method is run on many data sets."""
    init = inference._init_strategy
    can_start = init is None or (callable(init) and not isinstance(init, Approximation))
    if isinstance(inference, NUTS) and can_start:
        return StackedNUTS(
            warmup_steps=as_count("warmup_steps", settings.get("warmup_steps", 1000)),
            max_depth=inference.max_depth,
            target_accept=inference.target_accept,
            low_rank=inference.mass == "low_rank",
            temperature=inference.temperature,
            compiled=bool(inference._compile),
            by_pointer=takes_pointers(),
            init=init,
        )
    if isinstance(inference, Sampler) and can_start and stack.vectorized and not is_trained:
        stacked = _stacked(inference, stack, settings)
        if stacked is not None:
            return Stacked(stacked, init)
    return OneByOne(_alone(inference, stack, settings))


def _stacked(
    sampler: Sampler, stack: Stack, settings: Mapping[str, Any]
) -> chains.Method | None:
    """The sampler as chains with a data set each can run it; None where they cannot: its proposals
    are accepted or rejected, or it knows a point or a noise of its one data set."""
    own, kernel = sampler._settings, sampler.kernel
    needs_its_data = own.subtract_noise or isinstance(own.precondition, Mapping)
    anchored = own.control_variates is True or isinstance(own.control_variates, Mapping)
    if is_auto(own.control_variates) and stack.batch_size is not None:
        anchored = True
    kinds: dict[Any, chains.Kind | None] = {None: None, "diag": "diag", "dense": "dense"}
    kinds["auto"] = "dense" if stack.layout.size <= chains.MOST_DENSE else "diag"
    known = own.precondition is None or isinstance(own.precondition, str)
    if kernel.adjusted or needs_its_data or anchored or not known:
        return None
    if own.precondition not in kinds or ("lr" in own.chosen and own.precondition is None):
        return None

    def number(name: str, least: int) -> int | None:
        value = settings.get(name, "auto")
        return None if is_auto(value) else as_count(name, value, least=least, hint=", or 'auto'")

    return chains.Method(
        kernel=kernel,
        lr="lr" in own.chosen,
        friction="friction" in own.chosen,
        kind=kinds[own.precondition],
        warmup_steps=number("warmup_steps", 0),
        thinning=number("thinning", 1),
    )


def _alone(
    inference: Method, stack: Stack, settings: Mapping[str, Any]
) -> Callable[[Arguments, int], tuple[Tensor, bool]]:
    """Runs the method on one data set, as a user would."""
    names = inspect.signature(type(inference).run).parameters
    how = {"num_chains": 1} if "num_chains" in names and isinstance(inference, Sampler) else {}

    def run(arguments: Arguments, seed: int) -> tuple[Tensor, bool]:
        own = copy.copy(inference)
        own.model, own._num_data, own._result = stack.log_posterior.model, None, None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one of many fits, whose ranks tell
            own.run(arguments, seed=seed, progress=False, **how, **settings)
            if isinstance(own, Approximation):
                drawn = own._draw(chains.NUM_DRAWS, derived_seed(seed, 0, 0))  # type: ignore[arg-type]
                return drawn.positions, True
            return own._draws().positions, False

    return run


def _check_settings(inference: Method, settings: Mapping[str, Any]) -> None:
    names = inspect.signature(type(inference).run).parameters
    for name in settings:
        if name in _OWN:
            raise CallError(f"sbc: {name} is not a setting: ranks are among 100 draws of one chain")
        if name not in names:
            raise CallError(
                f"sbc: {type(inference).__name__}.run has no setting '{name}'; it has "
                f"{[each for each in names if each not in (*_OWN, 'self')]}"
            )


def _seed_of(resume: SBC, count: int) -> int:
    if not isinstance(resume, SBC):
        raise ArgumentError("resume: pass what the interrupted call returned")
    if resume.num_simulations >= count:
        raise ArgumentError(
            f"resume: it has {resume.num_simulations} simulations already: pass a larger "
            "num_simulations"
        )
    return int(resume.attrs["seed"])
