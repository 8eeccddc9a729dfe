"""Prediction intervals and sets of classes, from the posterior alone or conformal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments, DataLike
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
from pyro_scale.posterior.row_batches import data_sites

#: (The model's arguments, names of sites, a reduction) -> the reduced predictions, by site.
Predict = Callable[[Arguments, Sequence[str], Reduction], dict[str, Any]]

#: Predictive draws of each row from which an interval is computed, at least.
_MIN_DRAWS = 1000


def check_interval(interval: float | None, calibrate: DataLike, reduce: Any) -> None:
    """Raises for arguments of `predict` about intervals that are out of range or do not go
    together.

    Raises:
        ArgumentError: the level is not in (0, 1); `calibrate` without `interval`; `reduce` with
            `interval`.
    """
    if interval is None:
        if calibrate is not None:
            raise ArgumentError("calibrate= needs interval=: pass interval= too, such as 0.9")
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
    """Intervals (lower and upper ends), or sets of classes (booleans `[..., classes]`), that
    contain an observation with probability `level`, by site.

    Args:
        result: the model, and at least one draw.
        predict: function that computes reduced predictions of some sites for some rows.
        arguments: the model's arguments for the rows to predict.
        return_sites: names of the sites; None for the observed ones.
        level: the probability, in (0, 1).
        held_out: rows not seen by the fit, on which intervals are calibrated (conformal
            prediction); None for the posterior's intervals.
        num_draws: number of posterior draws that `predict` uses.

    Raises:
        ArgumentError: a site has no intervals, or there are too few draws for the level.
        DataError: there are too few held-out rows, or they have no observations.
    """
    sites = result.log_posterior.model_info.sites
    observed = [name for name, site in sites.items() if site.kind == "observed"]
    names = observed if return_sites is None else list(return_sites)
    if not names:
        raise ArgumentError(f"interval={level}: the model has no observed site: pass return_sites=")
    if held_out is not None:
        _check_rows_apart(result, names)
        _check_unseen(result, held_out)
    # with several drawn sites, one may depend on the draw of another, which repeats hold fixed
    is_only_drawn = sum(site.kind in ("observed", "enumerated") for site in sites.values()) == 1
    repeats = -(-_MIN_DRAWS // num_draws) if is_only_drawn else 1
    classes = [name for name in names if name in observed and is_of_classes(sites[name])]
    numbers = [name for name in names if name not in classes]
    kinds: dict[str, _Classes | _Numbers] = {name: _Classes(sites[name]) for name in classes}
    kinds |= {name: _Numbers(sites[name]) for name in numbers if name in sites}
    if numbers:
        _check_draws(level, num_draws * repeats)

    def predict_all(arguments: Arguments) -> dict[str, Any]:
        predicted = predict(arguments, classes, Ranked(held_out is not None)) if classes else {}
        return predicted | (predict(arguments, numbers, Central(level, repeats)) if numbers else {})

    if held_out is None:
        predicted = predict_all(arguments)
        return {name: kinds[name].uncalibrated(predicted[name], level) for name in names}
    axes = data_sites(result)
    scores: dict[str, list[Tensor]] = {name: [] for name in names}
    for part in held_out.in_order(CHUNK_ROWS):
        values, predicted = _observations(result, part, names), predict_all(part)
        for name in names:
            part_scores = kinds[name].scores(predicted[name], values[name])
            by_row = part_scores.movedim(kinds[name].axis(axes[name]), 0)
            scores[name].append(by_row.reshape(len(by_row), -1).amax(1))
    thresholds = {
        name: _threshold(torch.cat(parts).double(), level) for name, parts in scores.items()
    }
    predicted = predict_all(arguments)
    return {name: kinds[name].conformal(predicted[name], thresholds[name]) for name in names}


@dataclass(frozen=True)
class _Numbers:
    """Computes prediction intervals of a site whose values are numbers, from intervals of the
    posterior alone or conformal. `_Classes` has the same methods for classes."""

    site: Site

    def uncalibrated(self, predicted: Interval, level: float) -> Interval:
        """The intervals `predicted`, from the posterior's predictive draws, as `predict` returns
        them without held-out rows; for a site of integers, the ends are rounded outwards. `level`
        is not used."""
        if self._is_discrete:
            return Interval(predicted.lower.floor(), predicted.upper.ceil())
        return predicted

    def scores(self, predicted: Interval, values: Tensor) -> Tensor:
        """Conformal scores of observations, in their shape: an observation's distance from its
        interval, divided by the interval's width; negative inside the interval.

        Args:
            predicted: the posterior's intervals.
            values: the observations.
        """
        width = self._width(predicted)
        return torch.maximum(predicted.lower - values, values - predicted.upper) / width

    def conformal(self, predicted: Interval, threshold: Tensor) -> Interval:
        """The calibrated intervals: all values within the site's support whose score is at most the
        threshold. For integers, the ends are whole numbers and an interval is never empty.

        Args:
            predicted: the posterior's intervals.
            threshold: largest score inside, from `_threshold`.
        """
        margin = threshold * self._width(predicted)
        lower, upper = predicted.lower - margin, predicted.upper + margin
        if self._is_discrete:  # the integers in the interval, or else the one in the middle
            middle = ((predicted.lower + predicted.upper) / 2).floor()
            lower, upper = lower.ceil().minimum(middle), upper.floor().maximum(middle)
        return Interval(*(end.clamp(*self._bounds) for end in (lower, upper)))

    def axis(self, axis: int) -> int:
        """The axis of the rows in the scores, which for numbers is the same as the one in the
        site's value. Axes are negative, counted from the right."""
        return axis

    def _width(self, predicted: Interval) -> Tensor:
        """The width of each interval, upper minus lower end; for integers, how many of them the
        interval contains. Scores are divided by it.

        Raises:
            ArgumentError: a width is 0.
        """
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
        """The support of a single element of the site's values, as one of torch's constraints
        without event dimensions; None if the distribution does not say."""
        try:
            support = self.site.fn.support
        except NotImplementedError:
            return None
        while hasattr(support, "base_constraint"):
            support = support.base_constraint
        return support

    @property
    def _is_discrete(self) -> bool:
        """Whether the site is observed and its values are integers."""
        return self.site.kind == "observed" and bool(getattr(self._support, "is_discrete", False))

    @property
    def _bounds(self) -> tuple[float, float]:
        """The lower and upper bound of the site's support; infinite where there is none, or bounds
        differ between rows."""
        lower = getattr(self._support, "lower_bound", None)
        upper = getattr(self._support, "upper_bound", None)
        return (
            float(lower) if isinstance(lower, int | float) else -math.inf,
            float(upper) if isinstance(upper, int | float) else math.inf,
        )


@dataclass(frozen=True)
class _Classes:
    """Computes prediction sets of a site whose values are classes, from probabilities of the
    posterior alone or conformal. `_Numbers` has the same methods for numbers."""

    site: Site

    def uncalibrated(self, predicted: Tensor, level: float) -> Tensor:
        """The posterior's sets, as booleans `[..., classes]`: the most probable classes, until
        their probabilities sum to `level`. Probabilities are compared to six decimals, because sums
        are rounded.

        Args:
            predicted: for each class, the total probability of the more probable classes.
            level: the probability of a set.
        """
        return predicted.double().round(decimals=6) < round(level, 6)

    def scores(self, predicted: Tensor, values: Tensor) -> Tensor:
        """Conformal scores of the observed classes: the total predictive probability of more
        probable classes, plus a random fraction of that of the observed class.

        Args:
            predicted: the score of every class, `[..., classes]`.
            values: the observations, as numbers of classes or one-hot.

        Raises:
            DataError: an observation is no class of the site.
        """
        labels = values.argmax(-1) if is_one_hot(self.site) else values.long()
        if not ((labels >= 0) & (labels < predicted.shape[-1])).all():
            raise DataError(
                f"calibrate: site '{self.site.name}' has classes other than 0 to "
                f"{predicted.shape[-1] - 1}: leave their rows out"
            )
        return predicted.gather(-1, labels[..., None])[..., 0]

    def conformal(self, predicted: Tensor, threshold: Tensor) -> Tensor:
        """The calibrated prediction sets, as booleans `[..., classes]`: the classes whose score is
        at most the threshold.

        Args:
            predicted: the score of every class, `[..., classes]`.
            threshold: largest score in a set, from `_threshold`.
        """
        return predicted <= threshold

    def axis(self, axis: int) -> int:
        """The axis of the rows in the scores, from the one in the site's value: scores have no
        dimension of classes, which one-hot values have. Axes are negative, counted from the right.
        """
        return axis + 1 if is_one_hot(self.site) else axis


def _observations(
    result: PosteriorDraws, arguments: Arguments, names: Sequence[str]
) -> dict[str, Tensor]:
    """The observed values of the sites with these names, by name, in the rows of `arguments` (the
    model's arguments with held-out rows, observations included), in the rows' order.

    Raises:
        DataError: a site is not observed, or not for all rows.
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
    """Raises if a site has missing observations.

    Args:
        site: the site in a run on held-out rows.
        is_drawn: whether its value was drawn because it is not observed.

    Raises:
        DataError: values are missing, masked, NaN or infinite.
    """
    problem = None
    if is_drawn:
        problem = "was not observed: pass the model's observations with the held-out rows"
    elif _is_masked(site):
        problem = "has a mask: leave rows out whose observations are missing"
    elif not site.value.isfinite().all():
        problem = "has NaN or infinite values: leave their rows out"
    if problem is not None:
        raise DataError(f"calibrate: site '{site.name}' {problem}")


def _is_masked(site: Site) -> bool:
    """Whether a mask hides some of the site's values; False if the distribution's masks are not
    known.
    """
    try:
        mask = mask_of(site.fn)
    except NoInformation:
        return False
    site_mask = torch.as_tensor(True if site.mask is None else site.mask)
    return not (site_mask.all() and mask.all())


def _check_rows_apart(result: PosteriorDraws, names: Sequence[str]) -> None:
    """Raises unless every site has one value for each row and rows are predicted independently of
    each other, which conformal prediction needs.

    Args:
        result: draws of the run, with the model.
        names: names of the sites for which intervals or sets are to be calibrated.

    Raises:
        ArgumentError: a site has no such values; the message names it.
    """
    by_row = data_sites(result)
    for name in names:
        if name not in by_row or not is_row_wise(result.log_posterior):
            raise ArgumentError(
                f"calibrate: site '{name}' has no value a row that is predicted apart from the "
                f"other rows, of which there are {list(by_row) if by_row else 'none'}: leave "
                "calibrate out, or name others by return_sites="
            )


def _check_unseen(result: PosteriorDraws, held_out: Data) -> None:
    """Raises if the rows that were passed to calibrate intervals are the same tensors in memory as
    those of the run; equal copies are not recognized.

    Raises:
        ArgumentError: the fit has seen these rows.
    """
    if result.data is None:
        return
    old, new = (
        [leaf.data_ptr() for leaf in rows.leaves(data.first())] for data in (result.data, held_out)
    )
    if new and old == new:
        raise ArgumentError(
            "calibrate: these are rows that the fit has seen, on which it does better than on new "
            "ones: pass others, held out of run()"
        )


def _check_draws(level: float, count: int) -> None:
    """Raises if there are too few predictive draws to estimate the ends of an interval.

    Args:
        level: probability of the interval.
        count: number of predictive draws of each row.

    Raises:
        ArgumentError: there are too few.
    """
    if 1 - 2 / (count + 1) < round(level, 6) - 1e-9:
        raise ArgumentError(
            f"interval={level}: {count} draws resolve levels up to {1 - 2 / (count + 1):.3g}: pass "
            "a lower level, or keep more draws (with one observed site, a few are enough)"
        )


def _threshold(scores: Tensor, level: float) -> Tensor:
    """The conformal threshold: the score that an observation of a new row does not exceed with
    probability `level`.

    Args:
        scores: scores of held-out rows, `[rows]`.
        level: the probability.

    Raises:
        DataError: there are too few rows for the level.
    """
    if rank_of(len(scores), level) > len(scores):
        least = math.ceil(round(level / (1 - level), 9))
        raise DataError(
            f"calibrate has {len(scores)} rows, and interval={level} takes at least {least}: pass "
            "more held-out rows, or a lower level"
        )
    return conformal(scores, 1 - level)
