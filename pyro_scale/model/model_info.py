"""The result of the preflight, and functions that compute its parts from the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.model.classify import Probe
from pyro_scale.model.masked_latents import Kept
from pyro_scale.model.observation_checks import why_left_out
from pyro_scale.model.scaling import Scaling
from pyro_scale.model.sites import Point, Site
from pyro_scale.model.terms import Term

#: Why the log posterior that a function returns is not scaled.
PER_DATUM = "log posterior per datum, times N"


@dataclass(frozen=True)
class ModelInfo:
    """What the preflight found out about a model on its first batch.

    Attributes:
        sites: every site of the run on the first batch, by name.
        points: `pyro.param` sites and unfrozen weights, by name: the point-estimated ones.
        scaling: the rules by which each term enters the log joint density.
        batch_size: B, rows of the first batch; N for a model without rows.
        example: a small batch to run the model on when only its latents matter.
        own_plate: the plate that the model subsamples by itself; None if there is none.
        enum_dim: the first dimension (negative, from the right) that is free for enumerated sites;
            None if there are no such sites.
        partition_error: largest difference, in nats, between a row's log likelihood in the batch
            and in a part of the batch: the rounding error of computing by parts; None without parts
            or rows.
        whole_only: whether the model runs on the whole data only.
        steady: names of the deterministic sites that do not change with the batch.
        row_axes: for deterministic sites that follow the batch, the axis of the rows, negative and
            from the right.
        is_frozen: whether the model calls modules with weights that are neither latents nor points.
        validated: names of the sites whose values are checked against their support.
        weights: names of the latents that are weights of a network's layers.
        kept: for latents with elements that masks leave out, the elements that are params.
        row_work: what a row takes to compute, in rows of an ordinary model; for budgets.
    """

    sites: Mapping[str, Site]
    points: Mapping[str, Point]
    scaling: Scaling
    batch_size: int
    example: Arguments
    own_plate: str | None = None
    enum_dim: int | None = None
    partition_error: float | None = None
    whole_only: bool = False
    steady: tuple[str, ...] = ()
    row_axes: Mapping[str, int] = field(default_factory=dict)
    is_frozen: bool = False
    validated: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()
    kept: Mapping[str, Kept] = field(default_factory=dict)
    row_work: int = 1

    @property
    def is_function(self) -> bool:
        """Whether the model was made by `LogPosterior.from_function`, whose function returns the
        log posterior per datum: then nothing is scaled by N/B."""
        return any(rule.why == PER_DATUM for rule in self.scaling.rules.values())


def partition_error(
    scaling: Scaling, terms: Mapping[str, Term], probes: Sequence[Probe], batch_size: int
) -> float | None:
    """The largest difference, in nats, between a row's log likelihood in the batch and in another
    run with the row (a part of the batch); None if no row is in both.

    Args:
        scaling: the scaling rules.
        terms: terms of the run on the batch, by name.
        probes: runs of the model on other rows, made to find what depends on the rows.
        batch_size: B, rows of the batch.
    """
    expected = scaling.rows(terms, batch_size)
    errors = []
    for probe in probes:
        if not probe.terms.keys() <= scaling.rules.keys():
            continue
        part = scaling.rows(probe.terms, len(probe.origin))
        for name in expected:
            mine, theirs = probe.shared_rows(expected[name], part[name])
            if len(mine):
                errors.append(float((mine - theirs).abs().max()))
    return max(errors, default=None)


def small_batch(arguments: Arguments, probes: Sequence[Probe], own_plate: str | None) -> Arguments:
    """A batch to run the model on when only its latents matter: the first half of this one if the
    model has run on halves, otherwise this one.

    Args:
        arguments: the batch, as the model's arguments.
        probes: runs of the model on parts of the batch, made to find what depends on the rows;
            empty if the model runs on the whole data only.
        own_plate: the plate that the model subsamples by itself; None if there is none.
    """
    count = rows.count(arguments)
    if own_plate is not None or not probes or count is None or count < 2:
        return arguments
    return rows.take(arguments, slice(0, count // 2))


def steady_sites(
    sites: Mapping[str, Site], probes: Sequence[Probe], shifted: Sequence[Probe]
) -> tuple[str, ...]:
    """The names of the deterministic sites whose value does not depend on the rows: it is the same
    in runs on other rows, at either of two sets of latent values.

    Args:
        sites: sites of the run on the batch.
        probes: runs on other rows at the same latent values.
        shifted: runs on the batch and on other rows at other latent values; may be empty.
    """

    def is_same(name: str, runs: Sequence[Mapping[str, Site]]) -> bool:
        values = [run[name].value for run in runs if name in run]
        return len(values) == len(runs) and all(torch.equal(values[0], v) for v in values)

    groups = [[sites, *(probe.sites for probe in probes)], [probe.sites for probe in shifted]]
    return tuple(
        name
        for name, site in sites.items()
        if site.kind == "deterministic" and all(is_same(name, runs) for runs in groups if runs)
    )


def row_axes(
    sites: Mapping[str, Site], probes: Sequence[Probe], size: int, own_plate: str | None
) -> dict[str, int]:
    """For each deterministic site whose size depends on the batch, the axis of the rows, negative
    and from the right. Sites without such an axis are left out.

    Args:
        sites: sites of the run on the batch.
        probes: runs of the model on other rows, made to find what depends on the rows.
        size: B, rows of the batch.
        own_plate: the plate that the model subsamples by itself; None if there is none.
    """
    axes = {}
    steady = steady_sites(sites, probes, ())
    for name, site in sites.items():
        if site.kind != "deterministic" or name in steady:
            continue
        shape = site.value.shape
        shapes = [probe.sites[name].value.shape for probe in probes if name in probe.sites]
        for axis in range(len(shape)):
            # a model that subsamples by itself always has B rows: only the size tells
            follows = own_plate is not None or any(other[axis] != size for other in shapes)
            if shape[axis] == size and follows:
                axes[name] = axis - len(shape)
                break
    return axes


def model_warnings(info: ModelInfo) -> list[str]:
    """Messages, one string each, about possible mistakes in a model that can be run; empty if there
    are none. Nothing is raised or printed.

    A constant scale that equals N/B may have been meant as N/B. Rows that no site follows may have
    been forgotten. A mask that leaves out everything may be inverted.
    """
    ratio = info.scaling.num_data / info.batch_size
    rules = info.scaling.rules
    warnings = []
    follows = any(rule.role == "rows" or rule.whole_data for rule in rules.values())
    if not follows and not info.is_function and rows.count(info.example) is not None:
        warnings.append(
            "no site follows the rows: nothing is scaled by N/B, and the data may go unused"
        )
    if ratio == 1:
        for site in info.sites.values():
            if site.kind == "observed" and site.mask is not False and (why := why_left_out(site)):
                warnings.append(f"site '{site.name}': {why}, so it adds nothing")
        return warnings
    for name, rule in rules.items():
        if rule.role != "rows" or not rule.keeps_scale or name not in info.sites:
            continue
        scale = info.sites[name].scale
        if not isinstance(scale, torch.Tensor) and abs(scale - ratio) <= 1e-6 * ratio:
            warnings.append(
                f"site '{name}': its poutine.scale is a constant that equals N/B = {ratio:.6g}; it "
                "is kept, and the rows are multiplied by N/B besides. If it was N/B written by "
                "hand, remove it"
            )
    return warnings
