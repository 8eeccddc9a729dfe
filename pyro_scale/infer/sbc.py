"""Simulation-based calibration: whether a method gives calibrated posteriors on a model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from pyro_scale.calibration.campaign import Campaign
from pyro_scale.calibration.fitters import Fitter
from pyro_scale.calibration.quantities import Quantity, check_quantities, check_values
from pyro_scale.calibration.results import SBC, SBCComparison
from pyro_scale.calibration.simulations import Generator
from pyro_scale.calibration.stack import Stack
from pyro_scale.calibration.summed_out import SummedOut, check_data_sets
from pyro_scale.calibration.truth import FromPosterior, FromPrior, Truth
from pyro_scale.core import rows
from pyro_scale.core.rows import DataLike, Model
from pyro_scale.core.validation import as_count, as_flag, is_auto
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.open import open_data
from pyro_scale.data.row_sampler import check_sampling
from pyro_scale.data.sources import TensorData
from pyro_scale.engine.progress import Progress
from pyro_scale.engine.reuse import Earlier
from pyro_scale.errors import ArgumentError, CallError
from pyro_scale.infer.map import MAP
from pyro_scale.infer.method import Method
from pyro_scale.infer.sampler import Sampler
from pyro_scale.infer.sampler_setup import asked_hyperparameters
from pyro_scale.infer.sbc_fitters import fitter_for
from pyro_scale.infer.vi import IVON, VI
from pyro_scale.kernels import Hyperparameters
from pyro_scale.marginal.grouped import Grouped
from pyro_scale.marginal.grouped_data import open_rows
from pyro_scale.marginal.summed import is_summed, local_sites, user_model
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.results.call_checks import check_calls
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.problem import Problem, as_log_posterior, prepare
from pyro_scale.run.resume import digest_of

From = Literal["prior", "posterior"]
#: The fewest simulations.
_FEWEST_SIMULATIONS = 20
#: Arguments of a method's `run` that `sbc` sets.
_SET = ("data", "num_samples", "num_chains", "seed", "progress")
#: Arguments of a method's `run` that simulations do not have.
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
    data: DataLike,
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
    """Tests whether a method, with its settings, gives calibrated posteriors on a model.

    For each simulation, latents are drawn from the prior, data from the model, and draws from the
    posterior of these data.  If the draws are right, the rank of the true latents among them is
    uniform (Talts et al. 2018).

    Samplers run all simulations as chains of one compiled program, one chain a simulation.  Each
    chain finds the mode, the geometry and the step size of its posterior; the lengths of the stages
    are common to all, and determined by the first twenty.  `NUTS`, `VI` and `IVON` are run in the
    same way.  Others are run one by one, in seconds each: other methods, networks that are trained
    first, fits as `precondition=`, matrices of more than 128 dimensions, and control variates.
    (`batch_size=` turns control variates on if lr is chosen; to avoid them, pass a number for lr or
    `control_variates=False`.)

    Local latents are summed out if `ps.marginalize(model)` is the method's model, or `data` are
    `ps.Grouped`.  Their true values are drawn from the model like all others.  In each fit they are
    summed out, over nodes placed for its data set, and drawn afterwards.  Those of five rows or
    groups, spread over the data, are ranked by names like `z[12]`, and the log likelihood is that
    given all latents.  Placing nodes takes about a second a data set.

    Ranks are among 100 draws of each simulation.  Unless `thinning` is set, it is doubled for
    simulations of fewer than 200 effective draws, at most 8 times, until these are at most 1% of
    all.  Simulations that break or stay slow are kept, counted and named.

    Args:
        inference: a method with the settings under test, such as `ps.BAOA(model)`; or a dict of
            several, by name, which are fitted to the same data sets.
        data: data as for the method's `run`, also `Grouped`, observations included.  Covariates are
            used; the values of observations only with `method="posterior"`.
        num_simulations: at least 20; 1,000 detect an sd that is off by 10%.
        method: `"prior"`; or `"posterior"` (Saeilynoja et al. 2025), for an `inference` that has
            been run on the data.  Then latents are drawn from its posterior, new data from these
            latents, and the posterior of the new data together with `data` is tested.
        quantities: functions of (sites, data), ranked besides all latents and the total log
            likelihood `"loglik"`: `sites` is a dict of one draw's latents and the simulated
            observations, `data` the model's arguments, with simulated observations where the
            model is passed them.  Quantities of the data detect errors that latents alone do not
            (Modrak et al. 2023).
        simulator: another model of the same sites, to draw latents and data from.
        resample: whether rows of covariates are drawn anew for each data set, with replacement,
            from those of `data`; by default all data sets have the same covariates.
        predictive: rows, as the model's arguments, at which predictions are checked: an observation
            drawn with the true latents is ranked among observations drawn with the draws.
        seed: the same seed gives the same result; drawn from torch's generator by default.
        progress: whether to show a progress bar, which says how long it takes.
        memory_budget: bytes that data sets and draws may take at a time, half of the machine's by
            default; `attrs["blocks"]` is the number of blocks in which simulations were run.
        resume: the result of an interrupted call with the same arguments.  Another model,
            simulator, prior, other rows or quantities raise an error, if they change the first
            simulations.
        settings: arguments of the method's `run`, such as `warmup_steps=`, `thinning=`,
            `batch_size=`.

    Returns:
        An `SBC`, whose text is the verdict; it has `summary()`, `plot()` and `to_datatree()`.  For
        a dict of methods, an `SBCComparison` of these.

    Raises:
        ArgumentError: there are fewer than 20 simulations; the method does not have a setting;
            `method="posterior"` with local latents summed out, or `resample=True` with `Grouped`.
        SiteError: a site cannot be drawn (an improper prior, a `pyro.factor`), or data sets are
            outside of the support of the model.
        PlateError: the groups' plate has other members than there are groups.
        ModelError: the model has `pyro.param` sites, or `method="posterior"` cannot test it.

    Warns:
        PyroScaleWarning: the call was interrupted; the result has the simulations done so far.

    Examples:
        >>> import pyro, pyro.distributions as dist, torch, pyro_scale as ps
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> result = ps.sbc(ps.BAOA(model), torch.zeros(10), num_simulations=100, seed=0,
        ...                 progress=False)
        >>> result.verdict
        'calibrated'

    References: Talts et al., Validating Bayesian inference algorithms with simulation-based
    calibration, 2018; Modrak et al., Simulation-based calibration checking for Bayesian
    computation, 2023; Saeilynoja, Buerkner and Vehtari, Graphical test for discrete uniformity,
    2022; Saeilynoja et al., Posterior SBC, 2025.
    """
    seed = choose_seed(seed)
    if isinstance(inference, Mapping):
        _check_all(inference, method, settings, resume)
        call = {
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
        return SBCComparison({name: sbc(one, data, **call) for name, one in inference.items()})
    count = as_count("num_simulations", num_simulations, least=_FEWEST_SIMULATIONS)
    if memory_budget is not None:
        memory_budget = as_count("memory_budget", memory_budget, hint=" of bytes")
    if resume is not None:
        seed = _seed_of(resume, count)
    _check(inference, method, settings)
    if isinstance(inference, Sampler | VI | IVON) and "batch_size" not in settings:
        of_loader = inference._open(data, None).batch_size
        settings |= {} if of_loader is None else {"batch_size": of_loader}
    truth = _truth(inference, data, method, simulator, as_flag("resample", resample))
    predict_at = None if predictive is None else rows.as_arguments(predictive)
    how = settings, dict(quantities or {}), predict_at, count, seed, method
    campaign = _campaign(truth, inference, *how)
    return campaign.run(resume, progress, memory_budget)


def _campaign(
    truth: Truth,
    inference: Method,
    settings: Mapping[str, Any],
    quantities: Mapping[str, Quantity],
    predict_at: rows.Arguments | None,
    count: int,
    seed: int,
    method: From,
) -> Campaign:
    """The simulations of a call of `sbc`, after checks on the first data set.

    Args:
        truth: source of true latents and data sets.
        inference: the method under test.
        settings: arguments of the method's `run`.
        quantities: functions of (sites, data), by name, ranked besides latents.
        predict_at: rows, as the model's arguments, at which predictions are ranked; None for none.
        count: number of simulations.
        seed: seed of the call.
        method: "prior" or "posterior".

    Raises:
        ArgumentError: a quantity, or the batch size, is impossible.
        ModelError, SiteError, PlateError: the method cannot be run on the model.
    """
    check_quantities(quantities, truth.fitted.latents)
    first = truth.observed(truth.params(1, seed), 0, 1, seed)
    problem = _problem(truth.fitted, first, seed)
    stack = _stack(truth.fitted, first, problem, inference, settings, seed)
    if truth.fitted.summed is None:
        _check_batches(truth, stack)
    check_values(truth, stack, quantities, predict_at, seed)
    return Campaign(
        truth=truth,
        stack=stack,
        fitter=_fitter(inference, problem, stack, settings, truth.fitted),
        quantities=quantities,
        predict_at=predict_at,
        count=count,
        seed=seed,
        title=f"sbc, {type(inference).__name__}",
        attrs={
            "method": _in_words(inference),
            "from": method,
            "num_data": stack.num_data,
            **{name: str(value) for name, value in settings.items()},
        },
    )


def _fitter(
    inference: Method,
    problem: Problem,
    stack: Stack,
    settings: Mapping[str, Any],
    fitted: Generator,
) -> Fitter | SummedOut:
    """What fits the method under test to data sets, with local latents summed out if the user asks
    for that. Arguments as for `fitter_for`, and the model under test with its covariates."""
    fitter = fitter_for(inference, problem, stack, settings)
    if fitted.summed is None:
        return fitter

    def fitter_of(problem: Problem, stack: Stack) -> Fitter:
        of_units = {"batch_size": stack.batch_size} if "batch_size" in settings else {}
        return fitter_for(inference, problem, stack, {**settings, **of_units})

    return SummedOut(fitted, fitted.summed, stack.batch_size, fitter_of, fitter.has_lengths)


# ------------------------------------------------------------------ what is simulated


def _truth(
    inference: Method,
    data: DataLike,
    method: From,
    simulator: Callable[..., Any] | None,
    resample: bool,
) -> Truth:
    """The distribution from which each simulation's true latents and data set are drawn: prior or
    posterior.

    Args:
        inference: the method under test.
        data: data as for `sbc`.
        method: "prior" or "posterior".
        simulator: another model to draw from; None for the method's own model.
        resample: whether rows of covariates are drawn anew for each data set.

    Raises:
        ArgumentError: a simulator or resampled covariates are combined with "posterior", or the
            data are not those of the method's run.
    """
    opened = inference._open(data, None)
    grouped = data if isinstance(data, Grouped) else None
    arguments = opened.first() if grouped is None else grouped.rows
    if opened.batch_size is not None:  # a loader
        arguments = rows.concatenate(list(opened.in_order()))
    num_data = inference._num_data or rows.count(arguments)
    local = None
    if is_summed(inference.model, opened):
        if method == "posterior" or (grouped is not None and resample):
            raise ArgumentError(
                "sbc: with local latents summed out, latents are drawn from the prior, and groups "
                "have the rows of the data: leave method='posterior' and resample out"
            )
        all_rows = cast(TensorData, open_rows(grouped or arguments))
        local = local_sites(inference.model, all_rows, seed=0)

    def generator_of(model: Model) -> Generator:
        model = user_model(model)
        model = model if grouped is None else grouped.on_rows(model)
        generator = Generator.from_model(as_log_posterior(model, num_data), arguments)
        generator = dataclasses.replace(generator, grouped=grouped, summed=local)
        check_data_sets(generator)
        return generator.with_resampled_covariates() if resample else generator

    if method == "posterior":
        if simulator is not None or resample:
            raise ArgumentError(
                "method='posterior' draws data from the model that is fitted, at the data's own "
                "covariates: leave simulator and resample out"
            )
        result = inference.posterior.kept_draws
        of_run = result.data.arguments if isinstance(result.data, TensorData) else None
        if of_run is not None and digest_of(of_run) != digest_of(arguments):
            raise ArgumentError(
                "method='posterior': the data are not those that the inference was run on: pass "
                "the same ones"
            )
        params = result.layout.unflatten(torch.cat(list(result.blocks())))
        return FromPosterior.from_draws(generator_of(inference.model), params)
    fitted = generator_of(inference.model)
    if simulator is None:
        return FromPrior(fitted, fitted)
    return FromPrior.from_models(fitted, generator_of(simulator))


def _problem(fitted: Generator, first: Mapping[str, Tensor], seed: int) -> Problem:
    """The analyzed model on the first simulated data set.

    Args:
        fitted: model under test with its covariates.
        first: simulated observations by site, `[1, ...]`, of the first data set.
        seed: seed of the analysis.
    """
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
    """The simulated data sets as one `Stack`, which so far holds only the first: a stack is fitted
    by one program, one chain a data set, and has what these share (model, covariates, batch size,
    compiled program).

    Args:
        fitted: model under test with its covariates.
        first: simulated observations by site, `[1, ...]`, of the first data set.
        problem: the analyzed model on the first data set.
        inference: the method under test.
        settings: arguments of the method's `run`.
        seed: seed of the first data set's fit.

    Raises:
        ArgumentError: the batch size or the way of drawing rows is impossible.
    """
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
    """Runs the model under test once on batches, if a batch size is set, so that its errors come
    before the simulations start; does nothing if steps take all rows.

    Raises:
        PlateError, SiteError: the model cannot be run on batches.
    """
    if stack.batch_size is not None:
        fitted = truth.fitted
        opened = open_data(fitted.arguments, stack.batch_size, stack.num_data)
        log_posterior = as_log_posterior(fitted.log_posterior.model, stack.num_data)
        problem = prepare(log_posterior, opened, Hyperparameters(), None, 1, stack.seeds[0])
        if problem.anchor is not None:
            latents = " and ".join(f"'{latent.name}'" for latent in problem.anchor.latents)
            raise ArgumentError(
                f"sbc: with batch_size, latents of each row ({latents}) are summed out: pass "
                "ps.marginalize(model) as the method's model"
            )


# ------------------------------------------------------------------ arguments


def _check(inference: Any, method: Any, settings: Mapping[str, Any]) -> None:
    """Raises unless `inference` is a method with draws whose `run` has all the settings.

    Args:
        inference: what the user passed as the method.
        method: what the user passed as "prior" or "posterior".
        settings: arguments of the method's `run`, by name.

    Raises:
        ArgumentError: `inference` is no method, or one without draws; or `method` is unknown.
        CallError: the method's `run` does not have a setting, or `sbc` sets it.
    """
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
        if name in _SET:
            raise CallError(f"sbc: {name} cannot be set: ranks are among 100 draws of one chain")
        if name in _OF_ONE_RUN:
            raise CallError(
                f"sbc: {name} is for one long run, not for many simulations: leave it out"
            )
        if name not in names:
            settable = [n for n in names if n not in ("self", *_SET, *_OF_ONE_RUN)]
            raise CallError(
                f"sbc: {type(inference).__name__}.run has no setting '{name}': it has {settable}"
            )


def _check_all(inference: Mapping[str, Any], method: Any, settings: Any, resume: Any) -> None:
    """Raises unless `inference` is a non-empty dict of methods that all have the settings, and no
    earlier result is to be resumed.

    Raises:
        ArgumentError, CallError: as `_check`; or `resume` is not None; or the dict is empty.
    """
    if resume is not None:
        raise ArgumentError(
            "resume: only one method can be resumed: pass it by itself, not in a dict"
        )
    if not inference:
        raise ArgumentError("inference={}: pass a method, or a dict of methods by name")
    for one in inference.values():
        _check(one, method, settings)


def _seed_of(resume: Any, count: int) -> int:
    """The seed of an interrupted call of `sbc`, whose result `resume` is continued to `count`
    simulations.

    Raises:
        ArgumentError: `resume` is no result of `sbc`, or has `count` simulations already.
    """
    if not isinstance(resume, SBC):
        raise ArgumentError("resume: pass what the interrupted call returned")
    if resume.num_simulations >= count:
        raise ArgumentError(
            f"resume: it has {resume.num_simulations} simulations already: pass a larger "
            "num_simulations"
        )
    return int(resume.attrs["seed"])


def _in_words(inference: Method) -> str:
    """The method under test with the settings that the user asked for, as text for the progress bar
    and the result, such as "BAOA(lr=auto, ...)"."""
    if isinstance(inference, Sampler):
        settings = asked_hyperparameters(inference)
        return f"{type(inference).__name__}({', '.join(f'{n}={v}' for n, v in settings.items())})"
    return repr(inference)
