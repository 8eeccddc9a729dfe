"""Whether a model has data: a factor, or an observed site that masks do not leave out."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger

from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import ModelError
from pyro_scale.model.init_strategies import WEIGHT
from pyro_scale.model.program import Program
from pyro_scale.model.recorder import Recorder
from pyro_scale.model.sites import Site, points_of_store

#: Distributions of a part of a total, which say nothing where that is 0.
_COUNTS_OF_TOTALS = (
    dist.Binomial,
    dist.BetaBinomial,
    dist.Multinomial,
    dist.DirichletMultinomial,
)
_PRIOR = "For draws of the prior: pyro.infer.Predictive(model, num_samples=1000)(...)"


def check_has_observation(
    program: Program, arguments: Arguments, sites: Mapping[str, Site], count: int | None
) -> None:
    """Checks that a site is observed, or that there is a factor.

    Args:
        program: the model.
        arguments: the first batch.
        sites: of a run on it.
        count: its rows.

    Raises:
        ModelError: it names the site that looks like the data's, and what its `obs=` lacks.
    """
    if any(site.kind in ("observed", "factor") for site in sites.values()):
        return
    site = _likely_observation(sites, count)
    if site is None:
        fix = "give the likelihood's pyro.sample obs=, or add a pyro.factor"
    else:
        argument = _argument_of(program, arguments, sites, site.name)
        where = f" in plate '{site.plates[-1].name}'" if site.plates else ""
        fix = f"site '{site.name}'{where} looks like the data's: give its pyro.sample obs="
        if argument is not None:
            fix = (
                f"the model's argument '{argument}', by which site '{site.name}'{where} would be "
                f"observed, is None: pass {argument} with the data"
            )
    raise ModelError(
        f"the model has no observed site and no factor, so it would learn nothing: {fix}. {_PRIOR}",
        code="no-observation",
    )


def check_something_counts(runs: Iterable[Mapping[str, Site]]) -> None:
    """Checks that something of what is observed counts, in runs on all rows.

    Raises:
        ModelError: nothing does; it names a site and what leaves it out.
    """
    last = None
    for sites in runs:
        observed = [site for site in sites.values() if site.kind in ("observed", "factor")]
        left_out = [why for why in map(why_left_out, observed) if why]
        if len(left_out) < len(observed):
            return
        last = observed[-1].name, left_out[-1]
    if last is not None:
        site, why = last
        raise ModelError(
            f"site '{site}': {why}, and nothing else is observed, so the model would learn "
            f"nothing. {_PRIOR}",
            code="no-observation",
        )


def why_left_out(site: Site) -> str:
    """What leaves out every element of an observed site; "" where nothing does."""
    fn: Any = site.fn
    masks, totals = [site.mask], None
    while fn is not None:
        masks.append(getattr(fn, "_mask", None))
        if isinstance(fn, dist.NanMaskedNormal | dist.NanMaskedMultivariateNormal):
            masks.append(~site.value.isnan())
        if isinstance(fn, _COUNTS_OF_TOTALS):
            totals = torch.as_tensor(fn.total_count)
        fn = getattr(fn, "base_dist", None)
    if any(mask is not None and not bool(torch.as_tensor(mask).any()) for mask in masks):
        return "its mask leaves out every element (True keeps one)"
    return "all of its totals are 0" if totals is not None and not bool(totals.any()) else ""


def _likely_observation(sites: Mapping[str, Site], count: int | None) -> Site | None:
    """The last unobserved site that the rows have a value of each: one in the data's plate goes
    before one whose shape has that size."""

    def is_plated(site: Site) -> bool:
        sizes = {size for frame in site.plates for size in (frame.size, frame.full_size)}
        return bool(sizes) if count is None else count in sizes

    free = [s for s in sites.values() if s.kind in ("latent", "enumerated")]
    free = [site for site in free if WEIGHT not in site.infer]
    plated = [site for site in free if is_plated(site)]
    sized = [site for site in free if count is not None and count in site.value.shape]
    return next(reversed(plated or sized), None)


def _argument_of(
    program: Program, arguments: Arguments, sites: Mapping[str, Site], name: str
) -> str | None:
    """The argument that is None and by which a site is observed: the model is run with the site's
    value in its place."""
    model: Any = program.model
    while isinstance(model, functools.partial) and isinstance(next(iter(model.args), 0), Messenger):
        model = model.args[1]  # poutine.condition(model, ...) and its like
    try:
        signature = inspect.signature(getattr(model, "forward", model))
        args, kwargs = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    bound.apply_defaults()
    values = {site.name: site.unconstrained for site in sites.values()}
    latents = {name: value for name, value in values.items() if value is not None}
    for argument in [each for each, value in bound.arguments.items() if value is None]:
        run = Recorder(latents=latents, store=points_of_store())
        with contextlib.suppress(Exception), own_generator(), torch.no_grad():
            program.run({**bound.arguments, argument: sites[name].value}, run)
        if name in run.sites and run.sites[name].kind == "observed":
            return argument
    return None
