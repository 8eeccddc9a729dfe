"""Prediction intervals and sets of classes, conformal ones among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.chunks import CHUNK_ROWS, is_row_wise, split
from pyro_scale.curvature.fisher import NoInformation, mask_of
from pyro_scale.data.sources import Data
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.metrics.conformal import Interval, conformal, rank_of
from pyro_scale.model.recorder import Reader
from pyro_scale.model.sites import Site
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.predictive import join
from pyro_scale.posterior.reductions import Central, Ranked, Reduction, is_of_classes, is_one_hot
from pyro_scale.posterior.site_rows import data_sites

#: What a reduction keeps of the predictive draws of some sites.
Predict = Callable[[Arguments, Sequence[str], Reduction], dict[str, Any]]

#: Draws of a row that an interval is made of, at least.
_DRAWS = 1000


def check_asked(interval: float | None, calibrate: Any, reduce: Any) -> None:
    """Refuses levels out of range, and arguments that contradict each other."""
    if interval is None:
        if calibrate is not None:
            raise ArgumentError("calibrate: it is of intervals: pass interval= too, such as 0.9")
        return
    if isinstance(interval, bool) or not isinstance(interval, int | float) or not 0 < interval < 1:
        raise ArgumentError(f"interval={interval!r}: pass a probability in (0, 1), such as 0.9")
    if reduce is not None:
        raise ArgumentError(f"interval={interval} and reduce={reduce!r}: pass one of them")


def predict_sets(
    result: PosteriorDraws,
    predict: Predict,
    arguments: Arguments,
    return_sites: Sequence[str] | None,
    level: float,
    held_out: Data | None,
    num_draws: int,
) -> dict[str, Any]:
    """Intervals, and sets of classes, that hold an observation with a probability of `level`.

    Args:
        result: the model, and a draw.
        predict: what a reduction keeps of the predictive draws.
        arguments: the model's own.
        return_sites: sites; observed ones by default.
        level: the probability.
        held_out: rows that calibrate them; without, the posterior is taken at its word.
        num_draws: how many posterior draws `predict` uses.

    Raises:
        ArgumentError: a site that has no intervals, or too few draws for the level.
        DataError: held-out rows that are too few, or not observed.
    """
    sites = result.log_posterior.model_info.sites
    observed = [name for name, site in sites.items() if site.kind == "observed"]
    names = observed if return_sites is None else list(return_sites)
    if not names:
        raise ArgumentError(f"interval={level}: the model has no observed site: pass return_sites=")
    if held_out is not None:
        _check_rows_apart(result, names)
        _check_unseen(result, held_out)
    # of several sites that are drawn, one may be given another's draw, which would be held fixed
    alone = sum(site.kind in ("observed", "enumerated") for site in sites.values()) == 1
    repeats = -(-_DRAWS // num_draws) if alone else 1
    classes = [name for name in names if name in observed and is_of_classes(sites[name])]
    numbers = [name for name in names if name not in classes]
    kinds: dict[str, _Classes | _Numbers] = {name: _Classes(sites[name]) for name in classes}
    kinds |= {name: _Numbers(sites[name]) for name in numbers if name in sites}
    if numbers:
        _check_draws(level, num_draws * repeats)

    def predicted(arguments: Arguments) -> dict[str, Any]:
        kept = predict(arguments, classes, Ranked(held_out is not None)) if classes else {}
        return kept | (predict(arguments, numbers, Central(level, repeats)) if numbers else {})

    if held_out is None:
        kept = predicted(arguments)
        return {name: kinds[name].plain(kept[name], level) for name in names}
    axes = data_sites(result)
    scores: dict[str, list[Tensor]] = {name: [] for name in names}
    for part in held_out.in_order(CHUNK_ROWS):
        values, kept = _observations(result, part, names), predicted(part)
        for name in names:
            scored = kinds[name].scores(kept[name], values[name])
            by_row = scored.movedim(kinds[name].axis(axes[name]), 0)
            scores[name].append(by_row.reshape(len(by_row), -1).amax(1))
    thresholds = {
        name: _threshold(torch.cat(parts).double(), level) for name, parts in scores.items()
    }
    kept = predicted(arguments)
    return {name: kinds[name].conformal(kept[name], thresholds[name]) for name in names}


@dataclass(frozen=True)
class _Numbers:
    """Intervals of a site of numbers."""

    site: Site

    def plain(self, predicted: Interval, level: float) -> Interval:
        """As the posterior has them."""
        if self._is_discrete:
            return Interval(predicted.lower.floor(), predicted.upper.ceil())
        return predicted

    def scores(self, predicted: Interval, values: Tensor) -> Tensor:
        """How far observations are outside of their intervals, in units of its width."""
        width = self._width(predicted)
        return torch.maximum(predicted.lower - values, values - predicted.upper) / width

    def conformal(self, predicted: Interval, threshold: Tensor) -> Interval:
        """Those whose observations would have a score up to the threshold."""
        margin = threshold * self._width(predicted)
        lower, upper = predicted.lower - margin, predicted.upper + margin
        if self._is_discrete:  # the whole numbers in it, or else the one in the middle
            middle = ((predicted.lower + predicted.upper) / 2).floor()
            lower, upper = lower.ceil().minimum(middle), upper.floor().maximum(middle)
        return Interval(*(end.clamp(*self._bounds) for end in (lower, upper)))

    def axis(self, axis: int) -> int:
        """Where the rows are in scores, given where they are in values."""
        return axis

    def _width(self, predicted: Interval) -> Tensor:
        """Of intervals; of whole numbers, how many are in one."""
        width = predicted.upper - predicted.lower + self._is_discrete
        if not (width > 0).all():
            raise ArgumentError(
                f"calibrate: site '{self.site.name}': the predictive draws of a row are all the "
                "same number, so its interval has no width to calibrate: give the model noise, or "
                "use float64"
            )
        return width

    @property
    def _support(self) -> Any:
        try:
            support = self.site.fn.support
        except NotImplementedError:
            return None
        while hasattr(support, "base_constraint"):
            support = support.base_constraint
        return support

    @property
    def _is_discrete(self) -> bool:
        return self.site.kind == "observed" and bool(getattr(self._support, "is_discrete", False))

    @property
    def _bounds(self) -> tuple[float, float]:
        """What no observation is below or above, where that is the same for all rows."""
        ends = (getattr(self._support, f"{which}_bound", None) for which in ("lower", "upper"))
        least, most = (float(e) if isinstance(e, int | float) else None for e in ends)
        return -math.inf if least is None else least, math.inf if most is None else most


@dataclass(frozen=True)
class _Classes:
    """Sets of classes."""

    site: Site

    def plain(self, predicted: Tensor, level: float) -> Tensor:
        """As the posterior has them; probabilities are meant to add up to decimals."""
        return predicted.double().round(decimals=6) < round(level, 6)

    def scores(self, predicted: Tensor, values: Tensor) -> Tensor:
        """Those of the classes that were observed."""
        labels = values.argmax(-1) if is_one_hot(self.site) else values.long()
        if not ((labels >= 0) & (labels < predicted.shape[-1])).all():
            raise DataError(
                f"calibrate: site '{self.site.name}' has classes other than 0 to "
                f"{predicted.shape[-1] - 1}: leave their rows out"
            )
        return predicted.gather(-1, labels[..., None])[..., 0]

    def conformal(self, predicted: Tensor, threshold: Tensor) -> Tensor:
        """The classes whose scores are up to the threshold."""
        return predicted <= threshold

    def axis(self, axis: int) -> int:
        """Where the rows are in scores, given where they are in values."""
        return axis + 1 if is_one_hot(self.site) else axis


def _observations(
    result: PosteriorDraws, arguments: Arguments, names: Sequence[str]
) -> dict[str, Tensor]:
    """The observed values of some sites.

    Raises:
        DataError: there are none, or not of all rows.
    """
    log_posterior, parts = result.log_posterior, []
    params = result.layout.unflatten(result.positions[0, 0])
    for chunk in split(log_posterior, [arguments]):
        with torch.no_grad():
            run = log_posterior.run(params, chunk.arguments, chunk.indices, Reader)
        for name in names:
            _check_observed(run.sites[name], name in run.drawn)
        values = {n: run.sites[n].value.broadcast_to(run.sites[n].shape) for n in names}
        parts.append((values, chunk))
    return dict(join(parts, data_sites(result)))


def _check_observed(site: Site, is_drawn: bool) -> None:
    """Refuses a site some of whose values are missing."""
    what = None
    if is_drawn:
        what = "was not observed: pass the model's observations with the held-out rows"
    elif _is_masked(site):
        what = "has a mask: leave rows out whose observations are missing"
    elif not site.value.isfinite().all():
        what = "has NaN or infinite values: leave their rows out"
    if what is not None:
        raise DataError(f"calibrate: site '{site.name}' {what}")


def _is_masked(site: Site) -> bool:
    own = True if site.mask is None else site.mask
    try:
        inner = mask_of(site.fn)
    except NoInformation:
        return False
    return not (torch.as_tensor(own).all() and inner.all())


def _check_rows_apart(result: PosteriorDraws, names: Sequence[str]) -> None:
    """Refuses sites whose rows are not predicted one by one, alike."""
    known = data_sites(result)
    for name in names:
        if name not in known or not is_row_wise(result.log_posterior):
            raise ArgumentError(
                f"calibrate: site '{name}' has no value a row that is predicted apart from the "
                f"other rows, of which there are {list(known) if known else 'none'}: leave "
                "calibrate out, or name others by return_sites="
            )


def _check_unseen(result: PosteriorDraws, held_out: Data) -> None:
    """Refuses the very tensors that the fit has seen."""
    if result.data is None:
        return
    seen, new = (rows.leaves(data.first()) for data in (result.data, held_out))
    if new and [each.data_ptr() for each in seen] == [each.data_ptr() for each in new]:
        raise ArgumentError(
            "calibrate: these are rows that the fit has seen, on which it does better than on new "
            "ones: pass others, held out of run()"
        )


def _check_draws(level: float, count: int) -> None:
    if 1 - 2 / (count + 1) < round(level, 6) - 1e-9:
        raise ArgumentError(
            f"interval={level}: {count} draws tell levels up to {1 - 2 / (count + 1):.3g}: pass a "
            "lower level, or keep more draws (of a model with one observed site, a few are enough)"
        )


def _threshold(scores: Tensor, level: float) -> Tensor:
    """The conformal threshold of rows' scores."""
    if rank_of(len(scores), level) > len(scores):
        least = math.ceil(round(level / (1 - level), 9))
        raise DataError(
            f"calibrate has {len(scores)} rows, and interval={level} takes at least {least}: pass "
            "more held-out rows, or a lower level"
        )
    return conformal(scores, 1 - level)
