"""Examines a model on its first batch, before any step: its sites, its rows, and what is wrong.

All runs are at the same latent values but the last:

1. a run with latents from an initialization (`_first_run`);
2. a run with Pyro's and torch's validation, which finds random draws (`_validated_run`);
3. runs on other rows, which find the terms that follow the rows (`Rerun.probe_rows`);
4. runs 2 and 3 at other latent values (`probe_shifted`).

`classify.Comparison` compares their terms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import pyro
import torch
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroModule
from torch import nn
from torch.distributions import Distribution

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator, raise_if_from_handler
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import ArgumentError, ModelError, PyroScaleError
from pyro_scale.model import model_info, observation_checks, plates, site_checks
from pyro_scale.model.classify import Comparison, Probe
from pyro_scale.model.guards import forbid_writes, trace_modules
from pyro_scale.model.init_strategies import WEIGHT, InitFunction
from pyro_scale.model.masked_latents import Kept, leave_out
from pyro_scale.model.model_info import PER_DATUM, ModelInfo
from pyro_scale.model.program import Program
from pyro_scale.model.recorder import Recorder
from pyro_scale.model.reruns import Rerun, find_kept, probe_shifted
from pyro_scale.model.scaling import Rule, Scaling
from pyro_scale.model.sites import Site, points_of_store
from pyro_scale.model.terms import Term, terms_of

#: Layers that identify networks: any network has one of them.
_LAYERS = nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention


def examine_model(
    program: Program, arguments: Arguments, init: InitFunction, num_data: int | None
) -> ModelInfo:
    """The preflight of a Pyro model: runs the model on its first batch and on parts of this batch,
    checks it, and returns what was found: sites, scaling rules, B and N.

    Args:
        program: runs the model.
        arguments: the first batch, as the model's arguments.
        init: initialization strategy of the latents.
        num_data: N as the user passed it; None if it was left out.

    Raises:
        ModelError, SiteError, PlateError: what is wrong with the model.
        ArgumentError: N is unknown, or less than the number of rows of the batch.
    """
    count = rows.count(arguments)
    with own_generator(), torch.no_grad():
        with trace_modules() as trace, forbid_writes(program.model, arguments) as copies:
            first = _first_run(program, copies, init, count, num_data)
            observation_checks.check_has_observation(program, copies, first.sites, count)
        program.find_owners(first.points, trace.modules)
        is_frozen = _is_frozen(first, trace.modules)
        observation_checks.check_tensors(first.sites)
        site_checks.check_starts(first.sites)
        site_checks.check_latent_sizes(first.sites)
        own_plate = plates.find_own_plate(first.sites, count)
        site_checks.check_imputations(first.sites)
        is_batch = count is not None and num_data not in (None, count)
        kept = dict[str, Kept]()
        if own_plate is None:
            kept = _kept_elements(program, first, arguments, is_batch)
        leave_out(first.sites, kept)
        rerun = Rerun(program, first, kept)
        second = _validated_run(rerun, arguments)
        validated = _sites_to_validate(second)
        terms = _check_second_run(first, second, validated, rerun, arguments)
        sites = second.recorder.sites
        probed = _probe(rerun, arguments, sites, own_plate, num_data)
    probes, shifted, batch_size, num_data = probed
    plates.check_subsampling(sites, own_plate, batch_size)
    comparison = Comparison(terms, probes, batch_size, num_data, own_plate, shifted)
    scaling = comparison.scaling()
    site_checks.check_local_latents(sites, own_plate, [probe.sites for probe in probes])
    if batch_size == num_data:
        observation_checks.check_something_counts([sites])
    return ModelInfo(
        sites=sites,
        points=first.points,
        scaling=scaling,
        batch_size=batch_size,
        own_plate=own_plate,
        enum_dim=rerun.enum_dim,
        partition_error=model_info.partition_error(scaling, terms, probes, batch_size),
        example=model_info.small_batch(arguments, probes, own_plate),
        whole_only=count is not None and not probes,
        steady=model_info.steady_sites(sites, probes, shifted),
        row_axes=model_info.row_axes(sites, probes, batch_size, own_plate),
        is_frozen=is_frozen,
        validated=frozenset(validated),
        weights=_network_weights(second.recorder, trace.modules),
        kept=kept,
    )


def examine_function(
    program: Program, arguments: Arguments, init: InitFunction, num_data: int | None
) -> ModelInfo:
    """The preflight of a model made by `program.function_model`, whose function returns the log
    posterior per datum, so that nothing is scaled by N/B: runs it once, checks the result and
    returns what was found.

    Args:
        program: runs the model.
        arguments: the first batch, as the model's arguments.
        init: initialization strategy of the latents.
        num_data: N as the user passed it; None if it was left out.
    """
    num_data = num_data or 1
    with own_generator(), torch.no_grad(), trace_modules():
        first = _first_run(program, arguments, init, None, num_data)
        terms = terms_of(first.sites)
        site_checks.check_terms(terms)
        again = Rerun(program, first, {}).run(arguments)
        site_checks.check_no_random_draws(terms, terms_of(again.sites), drew=False)
    rules = {
        name: Rule("prior" if term.is_prior else "global", why=PER_DATUM)
        for name, term in terms.items()
    }
    return ModelInfo(
        sites=first.sites,
        points=first.points,
        scaling=Scaling(num_data, rules),
        batch_size=rows.count(arguments) or num_data,
        example=arguments,
    )


# ---------------------------------------------------------------------- the first run


def _first_run(
    program: Program,
    arguments: Arguments,
    init: InitFunction,
    count: int | None,
    num_data: int | None,
) -> Recorder:
    """Runs the model with latents from the initialization strategy `init`, and returns the recorder
    of the run. If the run fails for a known reason, the error that is raised explains it.

    Args:
        program: runs the model.
        arguments: the first batch, as the model's arguments.
        init: initialization strategy of the latents.
        count: number of rows of the batch; None if it has none.
        num_data: N as the user passed it; None if it was left out.
    """
    recorder = Recorder(store=points_of_store())
    try:
        with InitMessenger(init):
            program.run(arguments, recorder)
    except PyroScaleError:
        raise
    except Exception as error:
        raise_if_from_handler(error)
        for site in recorder.sites.values():
            if site.kind == "enumerated":
                site_checks.check_enumerated(site.name, site.fn, site.infer)
        if "Expected mask" in str(error):  # Pyro's own check
            raise ModelError(
                f"a mask is not of booleans ({error}): pass a tensor, mask.bool()",
                code="observed-value",
            ) from error
        plates.find_own_plate(recorder.sites, count)
        plates.check_plate_size(recorder.sites, count, num_data, error)
        if isinstance(error, NotImplementedError) and "inhomogeneous total_count" in str(error):
            raise ModelError(
                "torch's Multinomial takes one total for all rows: pass the largest, "
                "dist.Multinomial(int(total.max()), probs=...); its density takes each row's total "
                "from the counts"
            ) from error
        error.add_note(f"raised by the model on its first batch: {rows.described(arguments)}")
        raise
    if not any(site.kind == "latent" for site in recorder.sites.values()):
        raise ModelError(
            "the model has no latent site, so there is nothing to infer: give it a pyro.sample "
            "without obs=, or wrap a network by pyro_scale.bayesianize(net)"
        )
    return recorder


def _is_frozen(first: Recorder, modules: Iterable[nn.Module]) -> bool:
    """Whether one of these modules, which ran in the first run, has a weight that is neither a
    latent nor point-estimated."""
    moving = {p.parameter.data_ptr() for p in first.points.values() if p.parameter is not None}
    for site in first.sites.values():
        if WEIGHT in site.infer:
            module, name = site.infer[WEIGHT]
            moving.add(module.weights()[name].data_ptr())
    weights = [weight for module in modules for weight in module.parameters(recurse=False)]
    return any(weight.data_ptr() not in moving for weight in weights)


def _network_weights(run: Recorder, modules: Iterable[nn.Module]) -> frozenset[str]:
    """The names of the latents that are weights of bayesianized networks, or a `PyroSample` of one
    of the layers among the modules that ran."""
    layers = [m for m in modules if isinstance(m, PyroModule) and isinstance(m, _LAYERS)]
    samples = {layer._pyro_get_fullname(name) for layer in layers for name in layer._pyro_samples}
    latents = [site for site in run.sites.values() if site.kind == "latent"]
    return frozenset(s.name for s in latents if WEIGHT in s.infer or s.name in samples)


def _kept_elements(
    program: Program, first: Recorder, arguments: Arguments, is_batch: bool
) -> dict[str, Kept]:
    """The elements of latents that masks do not leave out, by site. In a batch of some of the
    rows, a mask that leaves all elements of a latent out is ignored: other rows may need them.

    Args:
        program: runs the model.
        first: recorder of the first run.
        arguments: the batch of that run.
        is_batch: whether the batch has only some of the rows of the data.
    """
    kept = find_kept(program, first, arguments)
    if is_batch:
        return {name: elements for name, elements in kept.items() if len(elements.places)}
    return kept


# ---------------------------------------------------------------------- the second run


class _ValidatedRun(NamedTuple):
    """A run with Pyro's and torch's validation.

    Attributes:
        recorder: recorder of the run.
        drew: whether the run drew from torch's generator.
        module: phrase that names the module that drew; None if none did.
        error: the exception of a failed validation, or None; if there is one, `recorder` is of a
            run without validation.
    """

    recorder: Recorder
    drew: bool
    module: str | None
    error: Exception | None = None

    def raise_error(self) -> None:
        """Raises `error`, the exception of the run whose validation failed; does nothing if
        validation succeeded.
        """
        if isinstance(self.error, ValueError) and not isinstance(self.error, PyroScaleError):
            raise ModelError(
                f"the model fails validation on the first batch: {self.error}"
            ) from self.error
        if self.error is not None:
            raise self.error


def _validated_run(rerun: Rerun, arguments: Arguments) -> _ValidatedRun:
    """Runs the model with Pyro's and torch's validation, or without it if the user has switched it
    off. If validation fails, the model runs again without it, and the result has the error."""

    def run(validate: bool) -> _ValidatedRun:
        before = torch.random.get_rng_state()
        with trace_modules() as trace:
            recorder = rerun.run(arguments, validate=validate)
        drew = not torch.equal(before, torch.random.get_rng_state())
        module = trace.describe(trace.drew) if trace.drew is not None else None
        return _ValidatedRun(recorder, drew, module)

    if not pyro.infer.util.is_validation_enabled():
        return run(validate=False)
    try:
        return run(validate=True)
    except Exception as error:
        raise_if_from_handler(error)
        return run(validate=False)._replace(error=error)


def _sites_to_validate(second: _ValidatedRun) -> set[str]:
    """The names of the sites whose values are to be checked against their support: all for which
    the user has not switched off validation, in the distribution or in Pyro or torch as a whole."""
    if not (pyro.infer.util.is_validation_enabled() and Distribution._validate_args):
        return set()
    sites = second.recorder.sites.values()
    return {site.name for site in sites if second.error is not None or site.validates}


def _check_second_run(
    first: Recorder,
    second: _ValidatedRun,
    validated: Collection[str],
    rerun: Rerun,
    arguments: Arguments,
) -> dict[str, Term]:
    """Checks the second run's sites, and that its terms of the log density equal the first run's.
    Returns the terms, by name.

    Args:
        first: recorder of the first run.
        second: the run with validation, at the same latent values.
        validated: names of the sites whose values are checked against their support.
        rerun: runs the model again if the terms differ, since they may differ by rounding alone.
        arguments: the batch, as the model's arguments.

    Raises:
        ModelError, SiteError: a check fails.
    """
    sites = second.recorder.sites
    site_checks.check_names(sites)
    observation_checks.check_observations(sites, validated)
    terms, again = terms_of(sites), terms_of(first.sites)
    site_checks.check_terms(terms, arguments)
    # the first run's values went to unconstrained space and back, which may round
    if site_checks.first_differing_term(terms, again) is not None:
        again = terms_of(rerun.run(arguments).sites)
    site_checks.check_no_random_draws(terms, again, second.drew, second.module)
    second.raise_error()
    return terms


# ---------------------------------------------------------------------- the other runs


def _probe(
    rerun: Rerun,
    arguments: Arguments,
    sites: Mapping[str, Site],
    own_plate: str | None,
    num_data: int | None,
) -> tuple[list[Probe], list[Probe], int, int]:
    """Runs the model on other rows than the batch's, and determines B and N.

    Args:
        rerun: runs the model at the latent values of its first run.
        arguments: the first batch, as the model's arguments.
        sites: sites of a run on this batch.
        own_plate: the plate that the model subsamples by itself; None if there is none.
        num_data: N as the user passed it; None if it was left out.

    Returns:
        A tuple of four: the runs on other rows; the run on the batch and those on other rows, all
        at other latent values (may be empty); B; N.

    Raises:
        ArgumentError: N is unknown, or less than B.
    """
    count = rows.count(arguments)
    probes: list[Probe] = []
    shifted: list[Probe] = []
    if own_plate is not None:
        batch_size = sites[own_plate].fn.subsample_size
        num_data = plates.agreed_size(num_data, sites[own_plate])
        probes = rerun.probe_indices(arguments, own_plate, batch_size, num_data)
    elif count is None:
        num_data = batch_size = num_data or plates.data_plate_size(sites)
    else:
        batch_size = count
        probes = rerun.probe_rows(arguments, batch_size, num_data)
        shifted = probe_shifted(rerun, arguments, batch_size, num_data)
        num_data = num_data or plates.declared_size([sites, *(probe.sites for probe in probes)])
    if num_data is None:
        raise ArgumentError(
            "the number of rows N is unknown: pass num_data=N, the size of the whole data set "
            "(not of a batch, nor the number of batches)",
            code="no-length",
        )
    if batch_size > num_data:
        raise ArgumentError(
            f"num_data={num_data} is less than the {batch_size} rows of one batch: pass the size "
            "of the whole data set"
        )
    return probes, shifted, batch_size, num_data
