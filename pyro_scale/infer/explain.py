"""`explain()`: a table of a model's sites and of the factors that scale them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributions import ComposeTransform, IndependentTransform

from pyro_scale.core.rows import DataLike, Model
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.curvature.gaussian_prior import exact_moments
from pyro_scale.data.sources import Data
from pyro_scale.marginal.anchor import Anchor
from pyro_scale.marginal.grouped_data import open_rows
from pyro_scale.marginal.local_sites import LocalLatent
from pyro_scale.marginal.summed import with_summed
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.model_info import ModelInfo, model_warnings
from pyro_scale.model.scaling import Rule
from pyro_scale.model.sites import Point, Site
from pyro_scale.model.transforms import bijection
from pyro_scale.results.call_checks import check_calls
from pyro_scale.run.problem import as_log_posterior, check_all_rows, module_device

#: Sites whose names differ only in their numbers share a line if there are at least so many.
_FEWEST_FOLDED = 5
_COLUMNS = ("site", "kind", "shape", "support", "transform", "plate", "Pyro", "ours", "why")


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns: a table of a model's sites and of the factors that scale their log
    densities.  It prints as text, and as HTML in a notebook.

    Attributes:
        rows: one dict a site, by column: site, kind, shape, support, transform, plate, the factor
            by which Pyro multiplied the log density, the factor by which this library multiplies
            it, and why.
        num_data: number of rows of data, N.
        batch_size: number of rows in a batch, B.
        num_dimensions: number of elements of all latents in unconstrained space.
        partition_error: largest difference, in nats, between a row's log likelihood in the first
            batch and in a part of it; None if there are no parts to compare.
        gaussian_prior: names of the latents whose prior is Gaussian in unconstrained space.  For
            these EKF's start is exact; for others it uses moments of prior draws.
        warnings: sentences about possible mistakes in the model.
    """

    rows: tuple[dict[str, str], ...]
    num_data: int
    batch_size: int
    num_dimensions: int
    partition_error: float | None
    gaussian_prior: tuple[str, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        rows = _fold(self.rows)
        widths = [max(len(c), *(len(row[c]) for row in rows)) for c in _COLUMNS]
        lines = ["  ".join(c.ljust(w) for c, w in zip(_COLUMNS, widths, strict=True)).rstrip()]
        lines.append("-" * len(lines[0]))
        for row in rows:
            cells = (row[c].ljust(w) for c, w in zip(_COLUMNS, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, "", *self._figures()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import html  # few need it, and it takes 6 ms

        head = "".join(f"<th style='text-align:left'>{c}</th>" for c in _COLUMNS)
        body = "".join(
            "<tr>"
            + "".join(f"<td style='text-align:left'>{html.escape(row[c])}</td>" for c in _COLUMNS)
            + "</tr>"
            for row in _fold(self.rows)
        )
        figures = "<br>".join(html.escape(line) for line in self._figures())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{figures}</p>"

    def _figures(self) -> list[str]:
        ratio = self.num_data / self.batch_size
        checked = (
            "not checked"
            if self.partition_error is None
            else f"a row's log likelihood differs by at most {self.partition_error:.1e} nats"
        )
        latents = [row["site"] for row in self.rows if row["kind"] == "latent"]
        others = [name for name in latents if name not in self.gaussian_prior]
        exact = _folded_names(self.gaussian_prior)
        start = [f"exact for {exact}"] * bool(self.gaussian_prior)
        start += [f"moments of draws for {_folded_names(others)}"] * bool(others)
        return [
            f"N = {self.num_data} rows, B = {self.batch_size} a batch, N/B = {ratio:.6g}",
            f"{self.num_dimensions} unconstrained dimensions",
            f"partition check (whole batch against its parts): {checked}",
            f"the prior as a Gaussian, where EKF starts: {'; '.join(start)}",
            *(f"warning: {warning}" for warning in self.warnings),
        ]


def _fold(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of the table (one dict a site) with every group of five or more that differ only in
    the numbers in the site's name, such as the sites of a loop over time, merged to one row. The
    merged row's site reads "first ... last (count)"."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        cells = tuple(row[c] for c in _COLUMNS if c != "site")
        groups.setdefault((_without_numbers(row["site"]), *cells), []).append(row)
    folded = []
    for group in groups.values():
        names = [row["site"] for row in group]
        is_long = len(group) >= _FEWEST_FOLDED
        folded += [{**group[0], "site": _span(names)}] if is_long else group
    return folded


def _folded_names(names: Iterable[str]) -> str:
    """The sites' names separated by commas, with "first ... last (count)" in place of five or more
    names that differ only in their numbers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_without_numbers(name), []).append(name)
    return ", ".join(
        _span(group) if len(group) >= _FEWEST_FOLDED else ", ".join(group)
        for group in groups.values()
    )


def _without_numbers(name: str) -> str:
    """The site's name with every number replaced by "#", so that sites such as "x_1" and "x_2" give
    equal results."""
    return re.sub(r"\d+", "#", name)


def _span(names: Sequence[str]) -> str:
    """A short form of many sites' names, "first ... last (count)", such as "x_0 ... x_99 (100)"."""
    return f"{names[0]} ... {names[-1]} ({len(names)})"


@check_calls
@without_vmap_warnings()
def explain(
    model: Model, data: DataLike = None, batch_size: int | None = None, num_data: int | None = None
) -> Explanation:
    """Shows how the library understands a model: which sites are latent and which observed, and
    which log densities are scaled by N/B.  Nothing is sampled.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        data: a loader, or the model's own arguments, as for a sampler's `run`.
        batch_size: rows in a batch, for data that are tensors; None for all rows.
        num_data: number of rows in all, N; None takes it from the data.

    Raises:
        ModelError, SiteError, PlateError, DataError, ArgumentError: as `run` would.

    Examples:
        >>> import torch, pyro, pyro.distributions as dist, pyro_scale as ps
        >>> def model(x):
        ...     s = pyro.sample("s", dist.HalfNormal(1.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(0.0, s), obs=x)
        >>> explanation = ps.explain(model, torch.randn(100), batch_size=20)
        >>> explanation.num_data, explanation.batch_size, explanation.rows[1]["ours"]
        (100, 20, 'N/B = 5')
    """
    opened = open_rows(data, batch_size, num_data, module_device(model))
    log_posterior = as_log_posterior(model, opened.num_data)
    return with_summed(_explain, log_posterior, opened, seed=0)


def _explain(log_posterior: LogPosterior, data: Data, anchor: Anchor | None) -> Explanation:
    first = data.first()
    log_posterior.prepare(first)
    check_all_rows(log_posterior, data, log_posterior.start(first, seed=0))
    info = log_posterior.model_info
    local = [] if anchor is None else [_local_row(latent, anchor) for latent in anchor.latents]
    return Explanation(
        rows=(*_table(log_posterior), *local),
        num_data=log_posterior.num_data,
        batch_size=info.batch_size,
        num_dimensions=log_posterior.layout.size,
        partition_error=info.partition_error,
        gaussian_prior=tuple(exact_moments(log_posterior, first)),
        warnings=tuple(_warnings(info)),
    )


def _local_row(latent: LocalLatent, anchor: Anchor) -> dict[str, str]:
    """The table's row about a latent that is summed out."""
    model = anchor.model
    why = f"summed out over {model.num_nodes} nodes of each {model.local.unit}"
    row = dict.fromkeys(_COLUMNS, "")
    return row | {
        "site": latent.name,
        "kind": "local",
        "shape": str(list(latent.shape)),
        "why": why,
    }


def _table(log_posterior: LogPosterior) -> list[dict[str, str]]:
    """The rows of `Explanation`, each a dict from column to text: one for each sample site except
    subsamples, in the model's order, then one for each point-estimated param."""
    info = log_posterior.model_info
    ratio = log_posterior.num_data / info.batch_size
    rules = {part: rule for name, rule in info.scaling.rules.items() for part in name.split("+")}
    rows = [
        _site_row(site, rules.get(site.name), ratio)
        for site in info.sites.values()
        if site.kind != "subsample"
    ]
    return rows + [_point_row(point) for point in log_posterior.points.values()]


def _site_row(site: Site, rule: Rule | None, ratio: float) -> dict[str, str]:
    """The table's row, by column's name, about a sample site.

    Args:
        site: the site.
        rule: rule that scales the site's log density; None if the site has none.
        ratio: N/B, number of rows of data over rows in a batch.
    """
    is_latent, is_factor = site.kind == "latent", site.kind == "factor"
    pyro, ours, why = ("", "", "") if rule is None else (rule.pyro, rule.ours, rule.why)
    if site.kind == "enumerated":
        why = "summed out"
    if site.kind == "deterministic":
        why = "a function of the others"
    elif rule is not None and rule.keeps_scale and not _is_one(site.scale):
        why += f"; the user's scale {_number(site.scale)} is kept"
    if site.kind != "deterministic" and site.mask is not None:
        why += "; masked"
    return {
        "site": site.name,
        "kind": site.kind,
        "shape": str(list(site.fn.batch_shape if is_factor else site.value.shape)),
        "support": "" if is_factor else _support(site.fn.support),
        "transform": _transform(bijection(site.fn.support)) if is_latent else "",
        "plate": ", ".join(_plate(frame) for frame in site.plates),
        "Pyro": _factor(pyro, ratio),
        "ours": _factor(ours, ratio),
        "why": why,
    }


def _point_row(point: Point) -> dict[str, str]:
    """The table's row, by column's name, about a `pyro.param` site or an unfrozen weight, which is
    point-estimated."""
    empty = dict.fromkeys(_COLUMNS, "")
    return empty | {
        "site": point.name,
        "kind": "param",
        "shape": str(list(point.unconstrained.shape)),
        "support": _support(point.constraint),
        "why": "point-estimated: one value for all chains, moved at temperature 0",
    }


def _factor(words: str, ratio: float) -> str:
    """A scaling factor for a cell of the table: "N/B" becomes "N/B = 5" with its number, other
    words stay.

    Args:
        words: factor of a scaling rule in words, such as "1" or "N/B".
        ratio: N/B, number of rows of data over rows in a batch.
    """
    return f"N/B = {ratio:.6g}" if words == "N/B" else words


def _is_one(scale: float | Tensor) -> bool:
    return not isinstance(scale, Tensor) and scale == 1


def _number(scale: float | Tensor) -> str:
    """The user's `poutine.scale` of a site as text, such as "0.5"; for a tensor of several
    elements, a phrase with its shape."""
    if isinstance(scale, Tensor) and scale.numel() > 1:
        return f"of shape {list(scale.shape)}"
    return f"{float(scale):.6g}"


def _plate(frame: Any) -> str:
    """A plate (the frame that Pyro records of it) as text, its name and size: "data [100]", or
    "data [20 of 100]" for a subsample of 20."""
    if frame.full_size in (None, frame.size):
        return f"{frame.name} [{frame.size}]"
    return f"{frame.name} [{frame.size} of {frame.full_size}]"


def _support(constraint: Any) -> str:
    """A distribution's support (a constraint of torch's) as short text, such as "positive" or
    "interval(0, 1)", for a cell of the table; event dimensions are left out."""
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    text = str(constraint)
    for bound in vars(constraint).values():
        if isinstance(bound, Tensor):
            is_number = bound.numel() == 1
            short = f"{float(bound):.6g}" if is_number else f"tensor of shape {list(bound.shape)}"
            text = text.replace(format(bound), short)
    return text.removesuffix("()").replace("lower_bound=", "").replace("upper_bound=", "")


def _transform(transform: Any) -> str:
    """The transform from unconstrained space to a site's support as text, such as "Exp", "Affine
    then Exp" or "identity", for a cell of the table."""
    if isinstance(transform, IndependentTransform):
        return _transform(transform.base_transform)
    if isinstance(transform, ComposeTransform):
        return " then ".join(map(_transform, transform.parts)) or "identity"
    return type(transform).__name__.removesuffix("Transform")


def _warnings(info: ModelInfo) -> list[str]:
    """Sentences for `Explanation.warnings` about possible mistakes in the analyzed model, or what
    restricts its use; an empty list if there are none."""
    warnings = model_warnings(info)
    rules = info.scaling.rules
    by_hand = [name for name, rule in rules.items() if not rule.keeps_scale]
    if by_hand:
        warnings.append(
            f"the poutine.scale of {by_hand} was taken for N/B written by hand and is replaced"
        )
    if info.whole_only or any(rule.whole_data for rule in rules.values()):
        warnings.append("the model runs on the whole data only: no minibatches")
    dtypes = {s.value.dtype for s in info.sites.values() if s.kind == "latent"}
    if len(dtypes) > 1:
        warnings.append(f"the latents' dtypes differ: {sorted(map(str, dtypes))}")
    return warnings
