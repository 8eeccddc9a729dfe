"""Fits a method to many data sets for `sbc`: by one program if possible, else one by one."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_scale.calibration.chains import Stacked
from pyro_scale.calibration.fitters import Fitter, OneByOne, StackedFit, StackedNUTS
from pyro_scale.calibration.stack import Stack
from pyro_scale.calibration.stacked_chains import Kind
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import AUTO, as_count, is_auto
from pyro_scale.data.open import open_data
from pyro_scale.exact import nutpie_api
from pyro_scale.infer.approximation import Approximation
from pyro_scale.infer.laplace import Laplace
from pyro_scale.infer.method import Method
from pyro_scale.infer.nuts import NUTS
from pyro_scale.infer.sampler import Sampler
from pyro_scale.infer.settings import count_or_auto
from pyro_scale.infer.stochastic import check_length, count_steps
from pyro_scale.infer.svgd import SVGD
from pyro_scale.infer.vi import IVON, VI
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.run.problem import Problem
from pyro_scale.tuning.plan import is_trained
from pyro_scale.tuning.policy import GEOMETRY, SIMULATIONS, WARM_UP


def fitter_for(
    inference: Method, problem: Problem, stack: Stack, settings: Mapping[str, Any]
) -> Fitter:
    """The fitter that `sbc` uses for a method: an object that fits the method to many data sets,
    all at once by one program if the method can be stacked, otherwise one after another.

    Args:
        inference: the method under test, with its settings.
        problem: the analyzed model on the first data set.
        stack: stack of the first data set, with what all data sets share.
        settings: arguments of the method's `run`.

    Raises:
        ArgumentError: a setting is out of range, or nutpie is missing.
    """
    init = inference._init_strategy
    can_start = init is None or (callable(init) and not isinstance(init, Method))
    if isinstance(inference, NUTS) and can_start:
        nutpie_api.version()  # raises if nutpie is missing
        return StackedNUTS(
            warmup_steps=as_count("warmup_steps", settings.get("warmup_steps", 1000)),
            max_depth=inference.max_depth,
            target_accept=inference.target_accept,
            low_rank=inference.mass == "low_rank",
            temperature=inference.temperature,
            compiled=bool(inference._compile),
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
    """Whether a run of the sampler under test would begin with training by an optimizer, as for
    networks. The length of training differs between data sets, so such runs are done one by one
    rather than in one program."""
    lengths = [settings.get("warmup_steps", AUTO), settings.get("thinning", AUTO)]
    chooses_length = any(is_auto(length) for length in lengths)
    problem = problem.with_engine(kernel=sampler.kernel)
    return is_trained(problem, sampler._settings, chooses_length)


def _stacked_fit(
    inference: VI | IVON, problem: Problem, stack: Stack, settings: Mapping[str, Any]
) -> StackedFit | None:
    """A fitter that fits VI or IVON to all data sets by one program. None if fits stop early, or if
    the optimizer is stateful (torch.optim's): then data sets must be fitted one by one.

    Args:
        inference: the method under test, with its settings.
        problem: the analyzed model on the first data set.
        stack: stack of the first data set, with what all data sets share.
        settings: arguments of the method's `run`.

    Raises:
        ArgumentError: the number of steps is missing or out of range.
    """
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
    """A fitter that runs the sampler on all data sets by one program, one chain a data set; None if
    that is impossible, for example with control variates, which are computed for one data set.

    Args:
        sampler: the sampler under test.
        stack: stack of the first data set.
        settings: arguments of the sampler's `run`.
    """
    options, kernel, lr = sampler._settings, sampler.kernel, "lr" in sampler._settings.chosen
    anchor = options.control_variates
    anchored = stack.batch_size is not None if is_auto(anchor) else bool(anchor)
    if not stack.vectorized or anchored or options.subtract_noise:
        return None
    is_cold = bool(kernel.values(0)["temperature"] == 0)
    if is_cold or (kernel.adjusted and stack.batch_size is not None):
        return None
    kinds: dict[Any, Kind | None] = {None: None, "diag": "diag", "dense": "dense"}
    kinds["auto"] = "dense" if stack.layout.size <= GEOMETRY.dense_single else "diag"
    coordinates = options.precondition
    if not (coordinates is None or isinstance(coordinates, str)) or coordinates not in kinds:
        return None
    # a larger matrix is learned only for a single data set
    is_large = coordinates == "dense" and stack.layout.size > WARM_UP.matrix
    if (lr and coordinates is None) or is_large:
        return None
    return Stacked(
        kernel=kernel,
        lr=lr,
        friction="friction" in options.chosen,
        kind=kinds[coordinates],
        warmup_steps=count_or_auto("warmup_steps", settings.get("warmup_steps", AUTO), least=0),
        thinning=count_or_auto("thinning", settings.get("thinning", AUTO)),
        init=sampler._init_strategy,
    )


def _alone(
    inference: Method, stack: Stack, settings: Mapping[str, Any]
) -> Callable[[Arguments, int, Mapping[str, Tensor] | None], tuple[Tensor, bool]]:
    """A function that runs the method on one data set, as a user would: (the model's arguments, a
    seed, the mode by site or None to search) -> (unconstrained draws `[chains, draws, D]`; whether
    they count as independent, as those of approximations and SVGD do).

    Args:
        inference: the method under test.
        stack: stack of data sets, for the model.
        settings: arguments of the method's `run`.
    """
    if isinstance(inference, Sampler | NUTS):
        settings = {"num_chains": 1, **settings}

    def run(
        arguments: Arguments, seed: int, mode: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, bool]:
        copied: Any = copy.copy(inference)
        copied.model, copied._num_data = stack.log_posterior.model, None
        of_mode = {} if mode is None else {"mode": mode}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a single fit; the ranks of all are the evidence
            copied.run(arguments, seed=seed, progress=False, **of_mode, **settings)
            is_gaussian = isinstance(copied, Approximation)
            result = copied.posterior.kept_draws
            if is_gaussian:
                result = copied.posterior.drawn(SIMULATIONS.ranked, seed)
            draws = torch.stack(list(result.blocks()))
            return draws, is_gaussian or isinstance(copied, SVGD)

    return run
