"""What the preflight finds out about a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.model.classify import Probe
from pyro_scale.model.observations import why_left_out
from pyro_scale.model.partial import Kept
from pyro_scale.model.recorder import Recorder
from pyro_scale.model.scaling import Scaling
from pyro_scale.model.sites import Point, Site
from pyro_scale.model.terms import Term

#: Why a function's own log posterior is not scaled.
PER_DATUM = "log posterior per datum, times N"


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model after its preflight.

    Attributes:
        sites: every site of the run on the first batch.
        points: `pyro.param` sites and unfrozen weights.
        scaling: how each term enters the log joint.
        batch_size: rows of that batch; N for a model without rows.
        own_plate: the plate that the model subsamples by itself, if it does.
        enum_dim: the first dimension that is free for enumerated sites; None without any.
        partition_error: largest difference, in nats, between a row's log likelihood in the
            batch and in a part of it: how well the parts add up to the whole; None without
            parts or rows.
        example: a small batch to run the model on when only its latents matter.
        whole_only: whether the model runs on the whole data only.
        steady: deterministic sites that do not change with the batch.
        is_frozen: whether modules run whose weights are neither latents nor points.
        validated: the sites whose values are checked against their support.
        row_axes: of deterministic sites that follow the batch: the rows' axis, from the right.
        weights: the latents that are weights of a network's layers.
        kept: of latents of which masks leave elements out: those that are params.
    """

    sites: Mapping[str, Site]
    points: Mapping[str, Point]
    scaling: Scaling
    batch_size: int
    own_plate: str | None
    enum_dim: int | None
    partition_error: float | None
    example: Arguments
    whole_only: bool
    steady: tuple[str, ...]
    row_axes: Mapping[str, int]
    is_frozen: bool = False
    validated: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()
    kept: Mapping[str, Kept] = field(default_factory=dict)

    @property
    def is_function(self) -> bool:
        """Whether it is of a function that is the log posterior as a whole."""
        return any(rule.why == PER_DATUM for rule in self.scaling.rules.values())


def free_dim(sites: Mapping[str, Site]) -> int | None:
    """The first dimension left of all batch dimensions, if anything is enumerated."""
    if not any(site.kind == "enumerated" for site in sites.values()):
        return None
    batch_dims = [len(site.fn.batch_shape) for site in sites.values() if site.kind != "subsample"]
    plate_dims = [-frame.dim for site in sites.values() for frame in site.plates if frame.dim]
    return -1 - max(batch_dims + plate_dims)


def partition_error_of(
    scaling: Scaling, terms: Mapping[str, Term], probes: list[Probe], batch_size: int
) -> float | None:
    """The largest difference between a row in the batch and in a part of it, in nats."""
    expected = scaling.rows(terms, batch_size)
    probes = [v for v in probes if v.terms.keys() <= scaling.rules.keys()]
    return max(
        (
            float((mine - theirs).abs().max())
            for probe in probes
            for part in [scaling.rows(probe.terms, len(probe.origin))]
            for name in expected
            for mine, theirs in [probe.shared_rows(expected[name], part[name])]
            if len(mine)
        ),
        default=None,
    )


def example_of(arguments: Arguments, runs: list[Recorder], own_plate: str | None) -> Arguments:
    """Half of the batch where that works: enough to run the model for its latents' sake."""
    count = rows.count(arguments)
    if own_plate is not None or not runs or count is None or count < 2:
        return arguments
    return rows.take(arguments, slice(0, count // 2))


def steady_of(
    sites: Mapping[str, Site], runs: Sequence[Recorder], elsewhere: Sequence[Recorder] = ()
) -> tuple[str, ...]:
    """Deterministic sites that do not change with the batch, at either latent values."""

    def same(name: str, group: Sequence[Mapping[str, Site]]) -> bool:
        if not all(name in each for each in group):
            return False
        return all(torch.equal(group[0][name].value, each[name].value) for each in group)

    here, there = [sites, *(r.sites for r in runs)], [r.sites for r in elsewhere]
    return tuple(
        name
        for name, site in sites.items()
        if site.kind == "deterministic" and same(name, here) and (not there or same(name, there))
    )


def row_axes_of(
    sites: Mapping[str, Site], runs: list[Recorder], size: int, own: str | None
) -> dict[str, int]:
    """The axis along which each deterministic site follows the batch."""
    axes = {}
    for site in sites.values():
        if site.kind != "deterministic" or site.name in steady_of(sites, runs):
            continue
        shape = site.value.shape
        shapes = [run.sites[site.name].value.shape for run in runs if site.name in run.sites]
        for axis in range(len(shape)):
            # a model that subsamples by itself always has B rows: there the size must do
            follows = own is not None or any(other[axis] != size for other in shapes)
            if shape[axis] == size and follows:
                axes[site.name] = axis - len(shape)
                break
    return axes


def model_warnings(info: ModelInfo) -> list[str]:
    """What may be a mistake, though the library can run it.

    A site whose own constant scale happens to be N/B may have been meant as just that; data
    that nothing follows may have been forgotten, and masks may be the wrong way round.
    """
    ratio = info.scaling.num_data / info.batch_size
    rules = info.scaling.rules
    follow = any(rule.role == "rows" or rule.whole_data for rule in rules.values())
    unused = not follow and not info.is_function and rows.count(info.example) is not None
    ignored = "no site follows the rows: nothing is scaled by N/B, and the data may go unused"
    left_out = [
        f"site '{site.name}': {why}, so it adds nothing"
        for site in info.sites.values()
        if site.kind == "observed" and site.mask is not False and ratio == 1
        for why in [why_left_out(site)]
        if why
    ]
    kept = [
        f"site '{name}': its poutine.scale is a constant that equals N/B = {ratio:.6g}; it is "
        "kept, and the rows are multiplied by N/B besides. If it was N/B written by hand, remove it"
        for name, rule in info.scaling.rules.items()
        if rule.role == "rows" and rule.keeps_scale and ratio != 1 and name in info.sites
        for scale in [info.sites[name].scale]
        if not isinstance(scale, torch.Tensor) and abs(scale - ratio) <= 1e-6 * ratio
    ]
    return [ignored] * unused + left_out + kept
