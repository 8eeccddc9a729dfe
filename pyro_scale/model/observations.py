"""Whether a model has data: a factor, or an observed site that masks do not leave out."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping
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


def check_unmasked(sites: Mapping[str, Site]) -> None:
    """Checks that masks leave something of what is observed, in a run on all rows.

    Raises:
        ModelError: they leave nothing; it names a site.
    """
    observed = [site for site in sites.values() if site.kind in ("observed", "factor")]
    if observed and all(map(is_left_out, observed)):
        raise ModelError(
            f"site '{observed[-1].name}': its mask leaves out every element, and nothing else is "
            f"observed: pass a mask that is True where values count. {_PRIOR}",
            code="no-observation",
        )


def is_left_out(site: Site) -> bool:
    """Whether masks, or NaN where the distribution takes it for a mask, leave no element."""
    fn: Any = site.fn
    masks, values = [site.mask], site.value
    while fn is not None:
        masks.append(getattr(fn, "_mask", None))
        if isinstance(fn, dist.NanMaskedNormal | dist.NanMaskedMultivariateNormal):
            masks.append(~values.isnan())
        fn = getattr(fn, "base_dist", None)
    return any(mask is not None and not bool(torch.as_tensor(mask).any()) for mask in masks)


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
