"""Examines a model before any step: its sites, its rows, and everything that is wrong with it.

The model runs a few times on the first batch at one set of latent values: twice as it is, to find
random draws, and on other rows, to find the terms that follow the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive, own_generator, raise_if_from_handler
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import ArgumentError, ModelError, PlateError, PyroScaleError, SiteError
from pyro_scale.model.checks import (
    check_densities,
    check_event_shapes,
    check_imputations,
    check_latent_sizes,
    check_local_latents,
    check_names,
    check_no_random_draws,
    check_observations,
    check_starts,
    check_terms,
    check_values,
    differing,
    local_message,
)
from pyro_scale.model.classify import Probe, classify
from pyro_scale.model.init_strategies import WEIGHT
from pyro_scale.model.model_info import (
    PER_DATUM,
    ModelInfo,
    example_of,
    free_dim,
    partition_error_of,
    row_axes_of,
    steady_of,
)
from pyro_scale.model.module_trace import ModuleTrace, trace_modules
from pyro_scale.model.observations import check_has_observation, check_something_counts
from pyro_scale.model.partial import Kept, element_mask, leave_out
from pyro_scale.model.plates import (
    agreed_size,
    check_plate_size,
    check_subsampling,
    data_plate_size,
    declared_size,
    own_plate,
)
from pyro_scale.model.program import Program
from pyro_scale.model.recorder import LatentShapeChanged, Recorder, check_enumerated
from pyro_scale.model.scaling import Rule, Scaling
from pyro_scale.model.second_run import run_again, sites_to_validate
from pyro_scale.model.sites import points_of_store
from pyro_scale.model.terms import terms_of
from pyro_scale.model.write_guard import forbid_writes

#: Layers of networks; any network has one of them.
_LAYERS = nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention
#: How far from the first latent values the second ones are, unconstrained.
_SHIFT = 0.71
#: The same, of those at which masks of latents are looked at.
_SHIFTS = 0.0, _SHIFT, -2.0, 2.0

#: An initialization in Pyro's manner: site -> constrained value.
InitFunction = Callable[[Any], Tensor]


def draw_latents(
    program: Program, arguments: Arguments, init: InitFunction, kept: Mapping[str, Kept]
) -> Recorder:
    """Runs the model with its latents drawn by an initialization in Pyro's manner."""
    with exclusive, torch.no_grad(), InitMessenger(init):
        recorder = Recorder(store=points_of_store(), kept=kept)
        return program.run(arguments, recorder)


def attempt_first(
    init: InitFunction, model: Callable[..., Any], arguments: Arguments, recorder: Recorder
) -> None:
    """Runs a model as for the first time, and evaluates its sites."""
    with exclusive, own_generator(), torch.no_grad(), InitMessenger(init):
        Program(model).run(arguments, recorder)
        terms_of(recorder.sites)


def understand(
    program: Program, arguments: Arguments, init: InitFunction, num_data: int | None
) -> ModelInfo:
    """The preflight.

    Raises:
        ModelError, SiteError, PlateError: see there; nothing has been run yet when they come.
        ArgumentError: N is neither given nor in the model.
    """
    count = rows.count(arguments)
    elsewhere: list[Probe] = []
    other_runs: list[Recorder] = []
    with own_generator(), torch.no_grad():
        with trace_modules() as trace, forbid_writes(program.model, arguments) as copies:
            first = _first_run(program, copies, init, count, num_data)
            check_has_observation(program, copies, first.sites, count)
        program.find_owners(first.points, trace.modules)
        is_frozen, executed = _is_frozen(first, trace), trace.modules
        check_values(first.sites)
        check_starts(first.sites)
        check_latent_sizes(first.sites)
        own = own_plate(first.sites, count)
        check_imputations(first.sites)
        kept = {} if own is not None else _kept_of(program, first, arguments)
        if count is not None and num_data not in (None, count):
            kept = {name: each for name, each in kept.items() if len(each.places)}
        leave_out(first.sites, kept)
        recipe = _Recipe(program, first, kept)
        second = run_again(partial(recipe.run, arguments))
        full = second.recorder
        check_names(full.sites)
        validated = sites_to_validate(second)
        check_event_shapes(full.sites)
        check_observations(full.sites, validated)
        check_densities(full.sites)
        terms = terms_of(full.sites)
        check_terms(terms, arguments)
        again = terms_of(first.sites)
        if differing(terms, again) is not None:  # by more than the way to unconstrained values
            again = terms_of(recipe.run(arguments).sites)
        check_no_random_draws(terms, again, second.drew, second.by)
        second.raise_error()
        if own is not None:
            batch_size = full.sites[own].fn.subsample_size
            num_data = agreed_size(num_data, full.sites[own])
            probes, runs = recipe.other_indices(arguments, own, batch_size, num_data)
        elif count is None:
            num_data = num_data or data_plate_size(full.sites)
            batch_size, probes, runs = num_data, [], []
        else:
            batch_size = count
            probes, runs = recipe.other_rows(arguments, batch_size, num_data)
            elsewhere, other_runs = _elsewhere(
                _Recipe(program, first, kept, _SHIFT), arguments, batch_size, num_data
            )
            num_data = num_data or declared_size([full, *runs])
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
    check_subsampling(full.sites, own, batch_size)
    scaling = classify(terms, probes, batch_size, num_data, own, elsewhere)
    check_local_latents(full.sites, own, runs)
    if batch_size == num_data:
        check_something_counts([full.sites])
    return ModelInfo(
        sites=full.sites,
        points=first.points,
        scaling=scaling,
        batch_size=batch_size,
        own_plate=own,
        enum_dim=recipe.enum_dim,
        partition_error=partition_error_of(scaling, terms, probes, batch_size),
        example=example_of(arguments, runs, own),
        whole_only=count is not None and not probes,
        steady=steady_of(full.sites, runs, other_runs),
        row_axes=row_axes_of(full.sites, runs, batch_size, own),
        is_frozen=is_frozen,
        validated=frozenset(validated),
        weights=_weights(full, executed),
        kept=kept,
    )


def understand_function(
    program: Program, arguments: Arguments, init: InitFunction, num_data: int | None
) -> ModelInfo:
    """The preflight of a function that is the log posterior as a whole: nothing is scaled."""
    num_data = num_data or 1
    with own_generator(), torch.no_grad(), trace_modules():
        first = _first_run(program, arguments, init, None, num_data)
        recipe = _Recipe(program, first, {})
        terms = terms_of(first.sites)
        check_terms(terms)
        check_no_random_draws(terms, terms_of(recipe.run(arguments).sites), False)
    rules = {
        name: Rule("prior" if term.is_prior else "global", why=PER_DATUM)
        for name, term in terms.items()
    }
    return ModelInfo(
        sites=first.sites,
        points=first.points,
        scaling=Scaling(num_data, rules),
        batch_size=rows.count(arguments) or num_data,
        own_plate=None,
        enum_dim=None,
        partition_error=None,
        example=arguments,
        whole_only=False,
        steady=(),
        row_axes={},
    )


def _kept_of(program: Program, first: Recorder, arguments: Arguments) -> dict[str, Kept]:
    """The params among the elements of latents of which masks leave some out: where nothing
    depends on those, at any of some latent values.

    Raises:
        SiteError: a mask depends on a latent.
    """
    latents = [site for site in first.sites.values() if site.kind == "latent"]
    of_latents = {site.name: element_mask(site) for site in latents}
    masks = {name: mask for name, mask in of_latents.items() if mask is not None}
    unused = {name: mask for name, mask in masks.items() if not bool(mask.all())}
    for shift in _SHIFTS if masks else ():
        recipe = _Recipe(program, first, {}, shift)
        try:
            sites = recipe.run(arguments).sites
            terms = terms_of(sites)
        except PyroScaleError:
            raise
        except Exception:  # the values may be impossible
            continue
        for name, mask in masks.items():
            now = element_mask(sites[name])
            if now is None or now.shape != mask.shape or not torch.equal(now, mask):
                raise SiteError(
                    f"site '{name}': its mask depends on another latent, so elements come and go "
                    "with its value: sum a mixture out by hand, or keep all elements"
                )
            moved = recipe.run(arguments, moved={name: ~mask})
            if name in unused and differing(terms, terms_of(moved.sites)) is not None:
                del unused[name]
    return {name: Kept.of(mask) for name, mask in unused.items()}


def _elsewhere(
    recipe: _Recipe, arguments: Arguments, size: int, num_data: int | None
) -> tuple[list[Probe], list[Recorder]]:
    """The batch and its parts at other latent values, where the model can be evaluated there."""
    try:
        full = recipe.run(arguments)
        probes, runs = recipe.other_rows(arguments, size, num_data)
        terms = terms_of(full.sites)
        check_terms(terms)
    except Exception as error:  # the values may be impossible: then there is nothing to compare
        raise_if_from_handler(error)
        return [], []
    if any(probe.terms.keys() != terms.keys() for probe in probes):
        return [], []
    return [Probe(terms, torch.arange(size)), *probes], [full, *runs]


class _Recipe:
    """How to run the model again at the latent values of its first run, or at shifted ones."""

    def __init__(
        self, program: Program, first: Recorder, kept: Mapping[str, Kept], shift: float = 0.0
    ):
        self._program, self._first, self._shift, self._kept = program, first, shift, kept
        self.enum_dim = free_dim(first.sites)

    def run(
        self,
        arguments: Arguments,
        indices: Mapping[str, Tensor] | None = None,
        validate: bool = False,
        moved: Mapping[str, Tensor] | None = None,
    ) -> Recorder:
        latents = {
            site.name: site.unconstrained + self._shift
            for site in self._first.sites.values()
            if site.unconstrained is not None
        }
        for name, places in (moved or {}).items():
            extra = (1,) * (latents[name].dim() - places.dim())
            places = places.reshape(places.shape + extra)
            latents[name] = latents[name] + places.to(latents[name]) / 3
        recorder = Recorder(
            latents=latents,
            points=self._first.points,
            indices=indices,
            enum_dim=self.enum_dim,
            kept=self._kept,
        )
        return self._program.run(arguments, recorder, validate)

    def other_rows(
        self, arguments: Arguments, size: int, num_data: int | None
    ) -> tuple[list[Probe], list[Recorder]]:
        """The two halves of the batch, a single row doubled, and a probe more: the batch backwards,
        which moves a row that depends on its place (`arange(len(x)) % 12`) where halves do not."""
        places = torch.arange(size)
        parts = [places[: size // 2], places[size // 2 :]] if size > 1 else [places.repeat(2)]
        runs, probes = [], []
        for part in parts:
            try:
                runs.append(self.run(rows.take(arguments, _slice(part))))
                probes.append(Probe(terms_of(runs[-1].sites), part))
            except Exception as error:
                raise_if_from_handler(error)
                if num_data in (None, size):  # the whole data, so that the factor is 1 anyway
                    return [], []
                if isinstance(error, LatentShapeChanged):
                    raise _explain(error, size, len(part)) from None
                if isinstance(error, PyroScaleError):
                    raise
                raise PlateError(
                    f"the model runs on {size} rows but not on {len(part)} of them "
                    f"({type(error).__name__}: {error}). "
                    + self._why_not(arguments, part, size, num_data)
                ) from error
        if size > 1:
            probes.append(self._backwards(arguments, places.flip(0)))
        return probes, runs

    def _backwards(self, arguments: Arguments, order: Tensor) -> Probe:
        return Probe(terms_of(self.run(rows.take(arguments, order)).sites), order)

    def _why_not(self, arguments: Arguments, part: Tensor, size: int, num_data: int | None) -> str:
        """What to do about a part of a batch on which the model fails: as many rows as the batch
        has, of the part alone, tell whether its rows are why, and the batch twice whether the model
        has a fixed size."""

        def runs_on(places: Tensor) -> bool:
            with contextlib.suppress(Exception):
                terms_of(self.run(rows.take(arguments, _slice(places))).sites)
                return True
            return False

        if len(part) < size and not runs_on(part.repeat(size // len(part) + 1)[:size]):
            return (
                f"So it does on {size} rows that are copies of those: it takes the others' values, "
                "and rows come in any company: compute what it takes of the data once, from all "
                "rows, outside of the model"
            )
        if runs_on(torch.arange(size).repeat(2)):
            return (
                f"It runs on {2 * size}: write it for any number of rows, down to one, or pass the "
                "whole data (batch_size=None)"
            )
        return f"Take sizes from the batch: plate('data', {num_data}, subsample_size=len(x))"

    def other_indices(
        self, arguments: Arguments, plate: str, size: int, num_data: int
    ) -> tuple[list[Probe], list[Recorder]]:
        """Another order, and half of the rows with others, for a model that subsamples itself."""
        first = torch.arange(size)
        half = size // 2
        orders = [first.flip(0), torch.cat([first[:half], (first[half:] + size) % num_data])]
        runs = [self.run(arguments, {plate: order}) for order in orders]
        origins = [torch.where(order < size, order, -1) for order in orders]
        return [Probe(terms_of(r.sites), o) for r, o in zip(runs, origins, strict=True)], runs


def _first_run(
    program: Program,
    arguments: Arguments,
    init: InitFunction,
    count: int | None,
    num_data: int | None,
) -> Recorder:
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
                check_enumerated(site.name, site.fn, site.infer)
        if "Expected mask" in str(error):  # Pyro's own check
            raise ModelError(
                f"a mask is not of booleans ({error}): pass a tensor, mask.bool()",
                code="observed-value",
            ) from error
        own_plate(recorder.sites, count)
        check_plate_size(recorder.sites, count, num_data, error)
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


def _is_frozen(first: Recorder, trace: ModuleTrace) -> bool:
    """Whether a module ran some of whose weights are neither drawn nor estimated."""
    moving = {p.parameter.data_ptr() for p in first.points.values() if p.parameter is not None}
    for site in first.sites.values():
        if WEIGHT in site.infer:
            module, name = site.infer[WEIGHT]
            moving.add(module.weights()[name].data_ptr())
    own = [w for module in trace.modules for w in module.parameters(recurse=False)]
    return any(weight.data_ptr() not in moving for weight in own)


def _weights(run: Recorder, executed: list[nn.Module]) -> frozenset[str]:
    """The latents that are weights of bayesianized networks, or a `PyroSample` of a layer."""
    latents = [site for site in run.sites.values() if site.kind == "latent"]
    layers = [m for m in executed if isinstance(m, PyroModule) and isinstance(m, _LAYERS)]
    names = {layer._pyro_get_fullname(name) for layer in layers for name in layer._pyro_samples}
    return frozenset(site.name for site in latents if WEIGHT in site.infer or site.name in names)


def _explain(error: LatentShapeChanged, size: int, part: int) -> SiteError:
    follows = [n for n, m in zip(error.given, error.wanted, strict=False) if n != m]
    if len(error.given) == len(error.wanted) and follows == [size]:
        return SiteError(local_message(error.name, "of the batch's size"), code="local-latent")
    return error


def _slice(part: Tensor) -> Any:
    """A contiguous part as a slice, which copies nothing."""
    if len(set(part.tolist())) < len(part):
        return part
    return slice(int(part[0]), int(part[-1]) + 1)
