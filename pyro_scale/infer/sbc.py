"""Simulation-based calibration: whether a method gives calibrated posteriors on a model."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pyro_scale.calibration.campaign import Campaign
from pyro_scale.calibration.chains import Stacked
from pyro_scale.calibration.fitters import Fitter, OneByOne, StackedFit, StackedNUTS
from pyro_scale.calibration.quantities import Quantity, check_quantities, check_values
from pyro_scale.calibration.results import SBC, SBCComparison
from pyro_scale.calibration.simulations import Generator
from pyro_scale.calibration.stack import Stack
from pyro_scale.calibration.stacked_chains import Kind
from pyro_scale.calibration.truth import FromPosterior, FromPrior, Truth
from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import AUTO, as_count, as_flag, is_auto
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.open import open_data
from pyro_scale.data.row_sampler import check_sampling
from pyro_scale.data.sources import TensorData
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import ArgumentError, CallError
from pyro_scale.exact.pointer_check import takes_pointers
from pyro_scale.infer.approximation import Approximation
from pyro_scale.infer.laplace import Laplace
from pyro_scale.infer.map import MAP
from pyro_scale.infer.method import Method
from pyro_scale.infer.nuts import NUTS
from pyro_scale.infer.sampler import Sampler
from pyro_scale.infer.sampler_setup import asked_hyperparameters
from pyro_scale.infer.stochastic import check_length, count_steps
from pyro_scale.infer.svgd import SVGD
from pyro_scale.infer.vi import IVON, VI
from pyro_scale.kernels import Hyperparameters
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.results.call_checks import check_calls
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.problem import Problem, as_log_posterior, module_device, prepare
from pyro_scale.run.resume import digest_of
from pyro_scale.tuning.plan import is_trained
from pyro_scale.tuning.policy import GEOMETRY, SIMULATIONS, WARM_UP

From = Literal["prior", "posterior"]
#: Fewer simulations tell nothing.
_LEAST = 20
#: What `sbc` sets itself.
_OWN = ("data", "num_samples", "num_chains", "seed", "progress")
#: What simulations have no use for.
_OF_ONE_RUN = (
    "superchains",
    "share_batches",
    "max_rows",
    "max_seconds",
    "checkpoint",
    "checkpoint_every",
    "resume",
    "store",
    "memory_budget",
    "distributed",
    "mesh",
    "rows_by_rank",
)


@check_calls
@without_vmap_warnings()
def sbc(
    inference: Method | Mapping[str, Method],
    data: Any,
    *,
    num_simulations: int = 1000,
    method: From = "prior",
    quantities: Mapping[str, Quantity] | None = None,
    simulator: Callable[..., Any] | None = None,
    resample: bool = False,
    predictive: Any = None,
    seed: int | None = None,
    progress: bool = True,
    memory_budget: int | None = None,
    resume: SBC | None = None,
    **settings: Any,
) -> Any:
    """Whether a method, with its settings, gives calibrated posteriors on a model.

    Latents are drawn from the prior, data from the model, draws from the posterior of these data.
    If the draws are right, the rank of the true latents among them is uniform (Talts et al. 2018).
    Samplers run all simulations as chains of one compiled program, one chain a simulation.  Each
    finds the mode, the geometry and the step size of its own posterior; the lengths of the stages
    are common to all, and found on the first twenty.  `NUTS`, `VI` and `IVON` are run likewise.
    One by one, in seconds each, are run: other methods, networks that are trained first, fits as
    `precondition=`, matrices of more than 128 dimensions, and control variates, which `batch_size=`
    turns on where lr is chosen (pass a number for lr, or `control_variates=False`).

    Ranks are among 100 draws of each simulation.  Unless `thinning` is set, it is doubled for
    simulations of fewer than 200 effective draws, at most 8 times, until these are at most 1% of
    all.  Simulations that break or stay slow are kept, counted and named.

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
            likelihood `"loglik"`: `sites` is a dict of one draw's latents and the simulated
            observations, `data` the model's arguments, with simulated observations where the
            model is passed them.  Quantities of the data find errors that latents
            alone do not (Modrak et al. 2023).
        simulator: another model of the same sites, to draw latents and data from.
        resample: whether each data set has rows of covariates drawn anew, with replacement, from
            those of the data; by default all have the data's.
        predictive: rows, as the model's arguments, at which predictions are checked: the rank of an
            observation drawn by the true latents among the draws' own.
        seed: the same seed gives the same result; drawn from torch's generator by default.
        progress: whether to show a progress bar, which says how long it takes.
        memory_budget: bytes that data sets and draws may take at a time, half of the machine's by
            default; `attrs["blocks"]` says in how many blocks simulations were run.
        resume: what an interrupted call with the same arguments returned.  Another model,
            simulator, prior, other rows or quantities are refused, by what they make of the first
            simulations.
        settings: of `run`, such as `warmup_steps=`, `thinning=`, `batch_size=`.

    Returns:
        An `SBC`: print it for the verdict; `summary()`, `plot()`, `to_datatree()`.  An
        `SBCComparison` of these, for a dict.

    Raises:
        ArgumentError: fewer than 20 simulations; a setting that the method does not have.
        SiteError: a site cannot be drawn (an improper prior, a `pyro.factor`), or data sets are off
            the support of the model.
        ModelError: the model has `pyro.param` sites; it is one that `method="posterior"`
            cannot test.

    Warns:
        PyroScaleWarning: it was interrupted; the result has the simulations done so far.

    Examples:
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
    calibration, 2018; Modrak et al., Simulation-based calibration checking for Bayesian
    computation, 2023; Saeilynoja, Buerkner and Vehtari, Graphical test for discrete uniformity,
    2022; Saeilynoja et al., Posterior SBC, 2025.
    """
    seed = choose_seed(seed)
    if isinstance(inference, Mapping):
        if resume is not None:
            raise ArgumentError(
                "resume: only one method can be resumed: pass it by itself, not in a dict"
            )
        if not inference:
            raise ArgumentError("inference={}: pass a method, or a dict of some by name")
        for each in inference.values():
            _check(each, method, settings)
        how = {
            "num_simulations": num_simulations,
            "method": method,
            "quantities": quantities,
            "simulator": simulator,
            "resample": resample,
            "predictive": predictive,
            "seed": seed,
            "progress": progress,
            "memory_budget": memory_budget,
            **settings,
        }
        return SBCComparison({name: sbc(each, data, **how) for name, each in inference.items()})
    count = as_count("num_simulations", num_simulations, least=_LEAST)
    if memory_budget is not None:
        memory_budget = as_count("memory_budget", memory_budget, hint=" of bytes")
    if resume is not None:
        seed = _seed_of(resume, count)
    _check(inference, method, settings)
    if isinstance(inference, Sampler | VI | IVON) and "batch_size" not in settings:
        read = open_data(data, None, inference._num_data).batch_size  # a loader's
        settings |= {} if read is None else {"batch_size": read}
    truth = _truth(inference, data, method, simulator, as_flag("resample", resample))
    own = dict(quantities or {})
    predict_at = None if predictive is None else rows.as_arguments(predictive)
    check_quantities(own, truth.fitted.latents)
    first = truth.observed(truth.params(1, seed), 0, 1, seed)
    problem = _problem(truth.fitted, first, seed)
    stack = _stack(truth.fitted, first, problem, inference, settings, seed)
    _check_batches(truth, stack)
    check_values(truth, stack, own, predict_at, seed)
    fitter = _fitter(inference, problem, stack, settings)
    campaign = Campaign(
        truth=truth,
        stack=stack,
        fitter=fitter,
        quantities=own,
        predict_at=predict_at,
        count=count,
        seed=seed,
        title=f"sbc, {type(inference).__name__}",
        progress=progress,
        memory_budget=memory_budget,
        attrs={
            "method": _in_words(inference),
            "from": method,
            "num_data": stack.num_data,
            **{name: str(value) for name, value in settings.items()},
        },
    )
    return campaign.run(resume)


# ------------------------------------------------------------------ what is simulated


def _truth(
    inference: Method,
    data: Any,
    method: From,
    simulator: Callable[..., Any] | None,
    resample: bool,
) -> Truth:
    """Where data sets come from.

    Raises:
        ArgumentError: a simulator or resampled covariates beside a posterior.
    """
    opened = open_data(data, None, inference._num_data, module_device(inference.model))
    arguments = opened.first()
    if opened.batch_size is not None:  # a loader
        arguments = rows.concatenate(list(opened.in_order()))
    num_data = inference._num_data or rows.count(arguments)

    def of(model: Any) -> Generator:
        generator = Generator.from_model(as_log_posterior(model, num_data), arguments)
        return generator.with_resampled_covariates() if resample else generator

    if method == "posterior":
        if simulator is not None or resample:
            raise ArgumentError(
                "method='posterior' draws data from the model that is fitted, at the data's own "
                "covariates: leave simulator and resample out"
            )
        result = inference.posterior.kept_draws
        held = result.data.arguments if isinstance(result.data, TensorData) else None
        if held is not None and digest_of(held) != digest_of(arguments):
            raise ArgumentError(
                "method='posterior': the data are not those that the inference was run on: pass "
                "the same ones"
            )
        params = result.layout.unflatten(torch.cat(list(result.blocks())))
        return FromPosterior.from_draws(of(inference.model), params)
    model = of(inference.model)
    if simulator is None:
        return FromPrior(model, model)
    return FromPrior.from_models(model, of(simulator))


def _problem(fitted: Generator, first: Mapping[str, Tensor], seed: int) -> Problem:
    """The model on the first data set, understood."""
    arguments = fitted.shared_arguments(), {name: table[0] for name, table in first.items()}
    log_posterior = LogPosterior(fitted.stacked_model(), fitted.num_rows)
    opened = open_data(arguments, None, fitted.num_rows)
    return prepare(log_posterior, opened, Hyperparameters(), None, 1, seed)


def _stack(
    fitted: Generator,
    first: Mapping[str, Tensor],
    problem: Problem,
    inference: Method,
    settings: Mapping[str, Any],
    seed: int,
) -> Stack:
    """The first data set, with what all have in common."""
    num_rows, size = fitted.num_rows, settings.get("batch_size")
    if size is not None and not is_auto(size):
        size = as_count("batch_size", size, hint=", or None for all rows")
        if size > num_rows:
            raise ArgumentError(f"batch_size={size}: the data have {num_rows} rows")
    sampling: Any = settings.get("sampling")
    compiles = True
    if isinstance(inference, Sampler):
        sampling = sampling or inference.kernel.sampling
        compiles = inference._settings.compile is not False
    sampling = sampling or "shuffle"
    check_sampling(sampling)
    return Stack(
        log_posterior=problem.log_posterior,
        layout=problem.engine.layout,
        shared=fitted.shared_arguments(),
        tables=first,
        seeds=[seed],
        batch_size=None if is_auto(size) or size == num_rows else size,
        sampling=sampling,
        compile=compiles,
        earlier=Earlier(),
        bar=Progress(None, "", False),
        vectorized=problem.engine.vectorized,
    )


def _check_batches(truth: Truth, stack: Stack) -> None:
    """Checks that the model can be run on batches, as a run does.

    Raises:
        PlateError, SiteError: it cannot.
    """
    if stack.batch_size is not None:
        fitted = truth.fitted
        opened = open_data(fitted.arguments, stack.batch_size, stack.num_data)
        log_posterior = as_log_posterior(fitted.log_posterior.model, stack.num_data)
        prepare(log_posterior, opened, Hyperparameters(), None, 1, stack.seeds[0])


# ------------------------------------------------------------------ how it is fitted


def _fitter(
    inference: Method, problem: Problem, stack: Stack, settings: Mapping[str, Any]
) -> Fitter:
    """How the method is run on many data sets."""
    init = inference._init_strategy
    can_start = init is None or (callable(init) and not isinstance(init, Method))
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
    if isinstance(inference, Sampler) and can_start and not _trains(inference, problem, settings):
        stacked = _stacked(inference, stack, settings)
        if stacked is not None:
            return stacked
    if isinstance(inference, VI | IVON) and can_start and stack.vectorized:
        fitted = _stacked_fit(inference, problem, stack, settings)
        if fitted is not None:
            return fitted
    searches = (
        isinstance(inference, Laplace) and init is None and not {"mode", "tune"} & set(settings)
    )
    return OneByOne(_alone(inference, stack, settings), takes_modes=searches)


def _trains(sampler: Sampler, problem: Problem, settings: Mapping[str, Any]) -> bool:
    """Whether the sampler's runs start with training, which ends when it will."""
    chooses_length = any(is_auto(settings.get(each, AUTO)) for each in ("warmup_steps", "thinning"))
    problem = problem.with_engine(kernel=sampler.kernel)
    return is_trained(problem, sampler._settings, chooses_length)


def _stacked_fit(
    inference: VI | IVON, problem: Problem, stack: Stack, settings: Mapping[str, Any]
) -> StackedFit | None:
    """The fit of every data set by one program; None where each ends when it will, or its
    optimizer is not a function."""
    if inference._early_stopping or not inference._is_pure:
        return None
    num_steps, num_epochs = settings.get("num_steps"), settings.get("num_epochs")
    check_length(num_steps, num_epochs)
    data = open_data(stack.arguments(torch.tensor(0)), stack.batch_size, stack.num_data)
    total = count_steps(dataclasses.replace(problem, data=data), num_steps, num_epochs)

    def fit_of(state: Any, values: Mapping[str, Tensor], seed: int) -> Fit:
        places, temperature = slice(0, stack.layout.size), values["temperature"]
        return Fit(
            log_posterior=stack.log_posterior,
            data=None,
            layout=stack.layout,
            centers=state.position.detach()[None],
            sites=stack.log_posterior.latents,
            gaussians=(inference._gaussian(state, places, temperature / stack.num_data),),
            seed=seed,
            attrs={"temperature": float(temperature)},
        )

    return StackedFit(inference.kernel, total, fit_of, inference._init_strategy)


def _stacked(sampler: Sampler, stack: Stack, settings: Mapping[str, Any]) -> Stacked | None:
    """The sampler as chains with a data set each can run it; None where they cannot, as it knows a
    point or a noise of its one data set."""
    own, kernel, lr = sampler._settings, sampler.kernel, "lr" in sampler._settings.chosen
    anchor = own.control_variates
    anchored = stack.batch_size is not None if is_auto(anchor) else bool(anchor)
    if not stack.vectorized or anchored or own.subtract_noise:
        return None
    is_cold = bool(kernel.values(0)["temperature"] == 0)
    if is_cold or (kernel.adjusted and stack.batch_size is not None):
        return None
    kinds: dict[Any, Kind | None] = {None: None, "diag": "diag", "dense": "dense"}
    kinds["auto"] = "dense" if stack.layout.size <= GEOMETRY.dense_single else "diag"
    asked = own.precondition
    if not (asked is None or isinstance(asked, str)) or asked not in kinds:
        return None
    # a larger matrix is learned for one data set alone
    if (lr and asked is None) or (asked == "dense" and stack.layout.size > WARM_UP.matrix):
        return None

    def number(name: str, least: int) -> int | None:
        value = settings.get(name, "auto")
        return None if is_auto(value) else as_count(name, value, least=least, hint=", or 'auto'")

    return Stacked(
        kernel=kernel,
        lr=lr,
        friction="friction" in own.chosen,
        kind=kinds[asked],
        warmup_steps=number("warmup_steps", 0),
        thinning=number("thinning", 1),
        init=sampler._init_strategy,
    )


def _alone(
    inference: Method, stack: Stack, settings: Mapping[str, Any]
) -> Callable[[Arguments, int, Mapping[str, Tensor] | None], tuple[Tensor, bool]]:
    """Runs the method on one data set, as a user would."""
    how = {"num_chains": 1} if isinstance(inference, Sampler | NUTS) else {}

    def run(
        arguments: Arguments, seed: int, mode: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, bool]:
        own: Any = copy.copy(inference)
        own.model, own._num_data = stack.log_posterior.model, None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one of many fits, whose ranks tell
            known = {} if mode is None else {"mode": mode}
            own.run(arguments, seed=seed, progress=False, **known, **how, **settings)
            is_gaussian = isinstance(own, Approximation)
            posterior = own.posterior
            result = posterior.kept_draws
            if is_gaussian:
                result = posterior.drawn(SIMULATIONS.ranked, seed)
            draws = torch.stack(list(result.blocks()))
            return draws, is_gaussian or isinstance(own, SVGD)

    return run


# ------------------------------------------------------------------ arguments


def _check(inference: Any, method: Any, settings: Mapping[str, Any]) -> None:
    """Refuses what is not a method, and settings that the method does not have."""
    if not isinstance(inference, Method):
        raise ArgumentError(
            f"inference is a {type(inference).__name__}: pass a method on a model, such as "
            "ps.BAOA(model)"
        )
    if isinstance(inference, MAP):
        raise ArgumentError("MAP gives one point, and there are no draws to rank: use Laplace")
    if method not in get_args(From):
        raise ArgumentError(f"method={method!r}: pass one of {list(get_args(From))}")
    names = inspect.signature(inference.run).parameters
    for name in settings:
        if name in _OWN:
            raise CallError(f"sbc: {name} is not a setting: ranks are among 100 draws of one chain")
        if name in _OF_ONE_RUN:
            raise CallError(
                f"sbc: {name} is of one long run, not of many simulations: leave it out"
            )
        if name not in names:
            own = [each for each in names if each not in ("self", *_OWN, *_OF_ONE_RUN)]
            raise CallError(
                f"sbc: {type(inference).__name__}.run has no setting '{name}': it has {own}"
            )


def _seed_of(resume: Any, count: int) -> int:
    if not isinstance(resume, SBC):
        raise ArgumentError("resume: pass what the interrupted call returned")
    if resume.num_simulations >= count:
        raise ArgumentError(
            f"resume: it has {resume.num_simulations} simulations already: pass a larger "
            "num_simulations"
        )
    return int(resume.attrs["seed"])


def _in_words(inference: Method) -> str:
    """A method and its settings."""
    if isinstance(inference, Sampler):
        asked = asked_hyperparameters(inference)
        return f"{type(inference).__name__}({', '.join(f'{n}={v}' for n, v in asked.items())})"
    return repr(inference)
