"""Before the first step of a sampler's run: checks of its arguments, and chains at their starts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.rows import DataLike
from pyro_scale.core.validation import AUTO, as_count
from pyro_scale.core.warn import warn
from pyro_scale.data.row_sampler import Sampling, check_sampling
from pyro_scale.data.sources import Data
from pyro_scale.engine.draws import Steps
from pyro_scale.errors import ArgumentError, BiasWarning
from pyro_scale.infer.method import InitStrategy
from pyro_scale.infer.settings import needs_all_rows
from pyro_scale.kernels import Kernel
from pyro_scale.run.by_rank import Sharing, check_same
from pyro_scale.run.config import RunConfig, check_equal_weights, check_length, check_memory
from pyro_scale.run.problem import Problem, check_can_adjust
from pyro_scale.run.resume import Journal, identity_of
from pyro_scale.tuning.plan import is_trained
from pyro_scale.tuning.training import prepare_in_batches

if TYPE_CHECKING:
    from pyro_scale.infer.sampler import Sampler


def check_config(sampler: Sampler, config: RunConfig) -> None:
    """Raises if the arguments of `Sampler.run` contradict the sampler's settings and
    hyperparameters, such as a schedule for a run of unknown length.

    Raises:
        ArgumentError: the message names the argument.
    """
    kernel, steps = sampler.kernel, config.steps
    if steps is None:
        _check_constant(kernel)
    chooses = "lr" in sampler._settings.chosen or sampler._settings.precondition is not None
    if chooses and callable(kernel.hyperparameters()["temperature"]):
        raise ArgumentError(
            "temperature is a schedule, but lr='auto' and precondition are chosen at one "
            "temperature: pass a number for lr, and precondition=None"
        )
    least = Steps(config.num_samples, config.warmup_steps or 0, config.thinning or 1)
    length = least.warmup_steps + least.num_samples * least.thinning
    check_length(config.num_samples, config.num_chains, length)
    columns = kernel.columns((steps or least).total)  # raises for values out of range
    if config.store is False and steps is not None:
        check_equal_weights(kernel.lr, columns["lr"][steps.kept])


def run_problem(
    sampler: Sampler, data: DataLike, config: RunConfig, seed: int, sharing: Sharing
) -> Problem:
    """The analyzed model on the data, with all chains at their starts, ready for tuning.

    Args:
        sampler: the sampler that is run.
        data: data as for `Sampler.run`.
        config: the checked arguments of `Sampler.run`.
        seed: seed of the run.
        sharing: how the run is shared out among processes.

    Raises:
        ArgumentError: an option cannot be used with these data.
        ModelError, SiteError, PlateError: the model cannot be run on these data.
    """
    adjusted = sampler.kernel.adjusted
    size = None if config.batch_size == AUTO else config.batch_size
    open_batches = functools.partial(sampler._open, data)
    first = open_batches(size)
    num_data = sharing.num_rows(first, sampler._num_data, needs_all_rows(sampler._settings))

    def prepare(opened: Data) -> Problem:
        return sampler._analyze(opened, num_data, sampler.kernel, config.num_chains, seed)

    if config.batch_size == AUTO:
        whitens = sampler._settings.precondition is not None
        tunes = "lr" in sampler._settings.chosen and whitens and not adjusted
        problem = prepare_in_batches(prepare, first, open_batches, tunes)
    else:
        is_all = adjusted and size is not None and size == first.num_data
        problem = prepare(open_batches(None) if is_all else first)
    problem = sharing.share_out(problem)
    if adjusted:
        check_can_adjust(problem, type(sampler).__name__)
    if config.superchains is not None:
        size = config.num_chains // config.superchains
        shared = problem.positions[::size].repeat_interleave(size, dim=0)
        problem = dataclasses.replace(problem, positions=shared)
    if config.store is None:
        kept = problem.positions[list(problem.kept_chains)]
        check_memory(kept, config.num_samples, config.memory_budget)
    return problem


def run_facts(
    sampler: Sampler, problem: Problem, config: RunConfig, journal: Journal
) -> dict[str, Any]:
    """Facts by name (model, data, arguments, seed) that identify the run, to compare with those of
    a checkpoint and of other processes; empty if there are neither.

    Args:
        sampler: the sampler that is run.
        problem: the analyzed model on the data.
        config: the checked arguments of `Sampler.run`.
        journal: writes checkpoints, and has the one that is resumed.

    Raises:
        RankError: another process has other data or arguments.
        FileError: the checkpoint to resume is of another run.
    """
    if journal.path is None and problem.is_alone:
        return {}
    store = config.store
    settings, fit = sampler._settings, sampler._settings.precondition
    place = "nowhere" if store is False else "memory" if store is None else "a store"
    about = {"method": type(sampler).__name__, "draws in": place, **config.facts}
    facts = identity_of(problem, about, asked_hyperparameters(sampler), _numbers_of_fit(fit))
    trains = is_trained(problem, settings, config.steps is None)
    if trains or ("lr" in settings.chosen and fit is None) or store is False:
        facts["num_samples"] = config.num_samples  # the draws depend on the run's length
    compared = {"draws": config.num_samples, **_norms_of_starts(problem, fit)}
    check_same(problem, {**facts, **compared})
    journal.check_same_run(facts, config.num_samples)
    return facts


def _check_constant(kernel: Kernel) -> None:
    """Raises if a hyperparameter is a schedule; called if the run's length is chosen during the
    run.

    Raises:
        ArgumentError: the message names the hyperparameter.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(kernel)}
    for name, value in kernel.hyperparameters().items():
        parts = value.values() if isinstance(value, Mapping) else [value]
        if value is not defaults[name] and any(callable(part) for part in parts):
            raise ArgumentError(
                f"{name} is a schedule, which needs the length of the run: pass "
                "warmup_steps= and thinning= as numbers"
            )


def checked_sampling(sampler: Sampler, sampling: Sampling | None, in_batches: bool) -> Sampling:
    """How the run draws rows, "shuffle", "replacement" or "symmetric", after checks: what the user
    passed, or the sampler's default.

    Args:
        sampler: the sampler that is run.
        sampling: what the user passed; None for the sampler's default.
        in_batches: whether steps take minibatches.

    Raises:
        ArgumentError: `sampling` is unknown, or excludes `subtract_noise`.

    Warns:
        BiasWarning: the sampler's thermostat corrects for noise of batches that are drawn with
            replacement, but these are not.
    """
    if sampling is None:
        return "replacement" if sampler._settings.subtract_noise else sampler.kernel.sampling
    check_sampling(sampling)
    if sampling != "replacement" and sampler._settings.subtract_noise:
        raise ArgumentError(
            f"subtract_noise with sampling='{sampling}' would subtract noise that such batches "
            "already cancel: leave sampling out, or pass 'replacement'"
        )
    if sampling != "replacement" and sampler.kernel.sampling == "replacement" and in_batches:
        warn(
            BiasWarning,
            f"{type(sampler).__name__} with sampling='{sampling}' makes the posterior too narrow: "
            "its thermostat corrects for noise that such batches already cancel; leave sampling "
            "out",
            code="too-narrow",
        )
    return sampling


def asked_hyperparameters(sampler: Sampler) -> dict[str, Any]:
    """What the user asked for: hyperparameters and settings by name, with `"auto"` for
    hyperparameters that a run chooses, and the kind of preconditioner as text."""
    settings, precondition = sampler._settings, sampler._settings.precondition
    kind = precondition if isinstance(precondition, str) else type(precondition).__name__
    return {
        **sampler.kernel.hyperparameters(),
        **dict.fromkeys(settings.chosen, AUTO),
        "precondition": kind,
        "control_variates": settings.control_variates,
        "subtract_noise": settings.subtract_noise,
    }


def _numbers_of_fit(fit: Any) -> dict[str, float]:
    """A fingerprint of the Gaussian that was passed as `precondition`, to detect on `resume` that
    another one was passed: two weighted sums, over its means and over its log variances, by name.
    An empty dict if `fit` is not a Gaussian."""
    if not isinstance(fit, Gaussian):
        return {}
    factors = torch.arange(1, len(fit.mean) + 1).to(fit.mean).sin()
    return {
        "mean of the precondition": float(factors @ fit.mean),
        "variance of the precondition": float(factors @ fit.variance.log()),
    }


def _norms_of_starts(problem: Problem, fit: Any) -> dict[str, str]:
    """Norms of the starts and of the preconditioning fit, by name, as text with 4 digits, by which
    processes detect that they have different ones."""
    tensors = {"starts": problem.positions}
    if fit is not None and not isinstance(fit, str):
        tensors |= {"precondition.mean": fit.mean, "precondition.sd": fit.variance.sqrt()}
    return {name: f"{float(value.double().norm()):.4g}" for name, value in tensors.items()}


def check_superchains(superchains: Any, num_chains: int, init_strategy: InitStrategy) -> int:
    """The number of superchains as an int, after checks; a superchain is a group of chains that
    share a start.

    Args:
        superchains: what the user passed.
        num_chains: number of chains.
        init_strategy: what the user passed; only a dict is looked at.

    Raises:
        ArgumentError: the chains cannot be divided into so many equal groups of two or more; or a
            dict of starts has different starts within a group.
    """
    superchains = as_count("superchains", superchains, least=2)
    size, remainder = divmod(num_chains, superchains)
    if remainder or size < 2:
        enough = superchains * max(2, size + bool(remainder))
        raise ArgumentError(
            f"superchains={superchains} of num_chains={num_chains}: each needs as many chains as "
            f"the others, two or more; pass num_chains={enough}"
        )
    if isinstance(init_strategy, dict):
        for name, value in init_strategy.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (num_chains,):
                continue  # checked later against the model's shapes
            starts = value.unflatten(0, (superchains, size))
            if not torch.equal(starts, starts[:, :1].expand_as(starts)):
                raise ArgumentError(
                    f"init_strategy['{name}']: chains of a superchain share their start, but these "
                    f"differ; pass each {size} times, starts.repeat_interleave({size}, dim=0)"
                )
    return superchains
