"""How far a run is off because its step is finite, from its shadow at half the step.

Of a bias that falls as lr^p the shadow keeps 1/2^p, so the bias is the difference of the two times
2^p / (2^p - 1) (Richardson's extrapolation).  Noise of minibatches multiplies the variance by
1 + a lr, so there p is 1 and what is linear in lr is the variance; a finite step by itself has the
kernel's order, and what is linear in lr^p is the precision (on Gaussians: SGLD's exactly, SGHMC's
nearly).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.schedules import Cyclical
from pyro_scale.errors import ArgumentError
from pyro_scale.infer.diagnostics import lower_lr
from pyro_scale.infer.export import quiet_arviz
from pyro_scale.infer.result import Result
from pyro_scale.infer.shadow import Course, with_shadow

#: Biases above which a posterior is visibly off: of a standard deviation, over itself; of a mean,
#: in posterior sds.
_MOST_OF_SD, _MOST_OF_MEAN = 0.05, 0.1
#: Standard errors beyond which a bias is known; draws below which there are none.
_ERRORS, _FEWEST_DRAWS = 3.0, 50
#: The least part of a variance that is taken for the posterior's.
_LEAST = 0.01


class Bias(NamedTuple):
    """What is known of one element: values, and the order of lr that they are extrapolated by.

    Attributes:
        mean: what is too much in the mean, in posterior sds.
        mean_error: its standard error.
        sd: by what the standard deviation is multiplied.
        sd_error: its standard error.
        sd_range: what it is within three standard errors.
        orders: of the mean, of the standard deviation.
    """

    mean: float
    mean_error: float
    sd: float
    sd_error: float
    sd_range: tuple[float, float]
    orders: tuple[int, int]


def step_size_bias(course: Course, result: Result, num_samples: int | None) -> Any:
    """A table, one row a latent site; see `Sampler.step_size_bias`."""
    import pandas

    _check(course, result, num_samples)
    started = time.perf_counter()
    count = num_samples or result.positions.shape[1]
    short, shadow = with_shadow(course, result, count)
    found = {
        name: _bias(
            _elements(short.samples[name]),
            _elements(shadow.samples[name]),
            short.weights,
            _heat(course, result, name),
            course,
        )
        for name in result.log_posterior.latents
    }
    table = pandas.DataFrame(
        [(bias.mean, bias.mean_error, bias.sd, bias.sd_error) for bias in found.values()],
        columns=["mean_bias", "mean_bias_error", "sd_inflation", "sd_inflation_error"],
        index=pandas.Index([*found], name="site"),
    )
    table.attrs["order"] = {name: bias.orders[1] for name, bias in found.items()}
    table.attrs["seconds"] = time.perf_counter() - started
    _warn_of_the_worst(found, result, course)
    return table


def _check(course: Course, result: Result, num_samples: int | None) -> None:
    """Refuses what has no bias to be found this way.

    Raises:
        ArgumentError: it says why.
    """
    if isinstance(course.kernel.lr, Cyclical):
        raise ArgumentError(
            "step_size_bias: a Cyclical lr goes from mode to mode by steps of its own size, which "
            "a run at half of it does not follow: look at a run at a constant lr"
        )
    if float(result.sample_stats["temperature"].max()) == 0:
        raise ArgumentError(
            "step_size_bias: temperature 0 is an optimiser, which has no posterior to be off from"
        )
    kept = result.positions.shape[1]
    if num_samples is not None and num_samples > kept:
        raise ArgumentError(f"num_samples={num_samples}: the run has {kept} draws a chain")


def _heat(course: Course, result: Result, name: str) -> Tensor | None:
    """By what minibatches multiply the temperature of a site's elements, `[elements]` or `[1]`;
    None where they do by what nobody knows."""
    noise = result.gradient_noise
    if course.setup.data.batch_size is None:
        return torch.ones(1)
    if noise is None or not course.kernel.heated:
        return None
    return noise.inflation[result.layout.slices()[name]].double()


def _elements(samples: Tensor) -> Tensor:
    """Draws `[chains, draws, ...]` as `[chains, draws, elements]`."""
    return samples.reshape(*samples.shape[:2], -1).double()


def _bias(
    own: Tensor, shadow: Tensor, weights: Tensor | None, heat: Tensor | None, course: Course
) -> Bias:
    """The bias of a site's worst elements.

    Args:
        own: the run's draws, `[chains, draws, elements]`.
        shadow: the shadow's.
        weights: of draws, `[chains, draws]`.
        heat: by what minibatches multiply the temperature, first order in lr.
        course: of the run.
    """
    share = torch.ones(1, 1, 1) if weights is None else (weights / weights.mean())[..., None]
    gaps = share * (own - shadow)
    centre = (share * (own + shadow)).mean((0, 1)) / 2
    squares = [share * (draws - centre).square() for draws in (own, shadow)]
    variances = [square.mean((0, 1)) for square in squares]
    moves = variances[1] > 0  # what never does, such as a triangle of zeros, has no bias
    ratio = torch.where(moves, variances[0] / variances[1], 1)
    by_heat = _is_by_heat(ratio, heat)
    orders = torch.where(by_heat, 1, course.kernel.order)
    # what shuffling cancels is more at half the step, and the variance may fall faster
    in_variance = by_heat & (course.sampling == "replacement")

    def inflated(ratio: Tensor) -> Tensor:
        return _extrapolated(ratio, orders, in_variance)

    inflation = inflated(ratio)
    sd = torch.where(moves, (variances[0] / inflation.square()).sqrt(), 1)
    means = gaps.mean((0, 1)) * _factor(orders) / sd
    mean, spread = int(means.abs().argmax()), int((inflation - 1).abs().argmax())
    scale = float(_factor(orders)[mean] / sd[mean])
    line = (squares[0] - ratio * squares[1])[..., spread] / variances[1][spread]
    error = _standard_error(line)
    around = {
        far: inflated(ratio + far * error)[spread].item() for far in (-_ERRORS, -1, 1, _ERRORS)
    }
    return Bias(
        mean=float(means[mean]),
        mean_error=scale * _standard_error(gaps[..., mean]),
        sd=float(inflation[spread]),
        sd_error=(around[1] - around[-1]) / 2 or math.nan,  # beyond the bound
        sd_range=(around[-_ERRORS], around[_ERRORS]),
        orders=(int(orders[mean]), int(orders[spread])),
    )


def _is_by_heat(ratio: Tensor, heat: Tensor | None) -> Tensor:
    """Whether minibatches account for how variances differ, `[elements]`: by between half and
    twice of what 1 + a lr says.  (Of shuffled batches it can say far too much.)"""
    if heat is None:
        return torch.ones_like(ratio, dtype=torch.bool)
    heat = heat if heat.shape == ratio.shape else heat.mean().expand_as(ratio)
    predicted, measured = (heat - 1) / 2 / heat, 1 - 1 / ratio
    return (measured > predicted / 2) & (measured < 2 * predicted)


def _factor(order: Tensor) -> Tensor:
    """The bias over its difference to that at half the step."""
    return 2.0**order / (2.0**order - 1)


def _extrapolated(ratio: Tensor, order: Tensor, in_variance: Tensor) -> Tensor:
    """A standard deviation over that at lr = 0, from the ratio of the variances at lr and lr/2;
    linear in the variance, or else in the precision."""
    linear = 1 - _factor(order) * (1 - 1 / ratio.clamp(min=_LEAST))
    in_precision = 1 + _factor(order) * (ratio - 1)
    least = torch.full_like(ratio, _LEAST)
    inflation = torch.where(in_variance, 1 / linear.maximum(least), in_precision.maximum(least))
    return inflation.sqrt()


def _standard_error(series: Tensor) -> float:
    """The Monte Carlo standard error of the mean of `[chains, draws]`; NaN of few draws."""
    if series.numel() < _FEWEST_DRAWS or series.shape[1] < 4:
        return math.nan
    return float(quiet_arviz().mcse(series.numpy(), method="mean"))


def _warn_of_the_worst(found: Mapping[str, Bias], result: Result, course: Course) -> None:
    """Warns where a bias is known to be large."""

    def excess(bias: Bias) -> tuple[float, int]:
        """(How many times too large what is known to be, order of lr that it falls with)."""
        low, high = bias.sd_range
        of_sd = of_mean = 0.0
        if low > 1 + _MOST_OF_SD or high < 1 - _MOST_OF_SD:
            of_sd = abs(bias.sd - 1) / _MOST_OF_SD
        if abs(bias.mean) - _ERRORS * bias.mean_error > _MOST_OF_MEAN:
            of_mean = abs(bias.mean) / _MOST_OF_MEAN
        return max((of_sd, bias.orders[1]), (of_mean, bias.orders[0]))

    worst = max(found, key=lambda name: excess(found[name])[0])
    (times, order), bias = excess(found[worst]), found[worst]
    if times == 0:
        return
    in_batches = course.setup.data.batch_size is not None
    others = "; where minibatches heat, raise batch_size or pass control_variates=True"
    warnings.warn(
        f"site '{worst}' is off because its step is finite: its standard deviations are up to "
        f"{bias.sd:.3g} ± {bias.sd_error:.2g} times what they would be at ever smaller steps, its "
        f"means up to {bias.mean:.2g} ± {bias.mean_error:.2g} posterior sds away: "
        f"{lower_lr(result, times ** (-1 / order))}{others if in_batches else ''}",
        UserWarning,
        stacklevel=4,
    )
