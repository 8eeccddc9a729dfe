"""The bias of a finite step size, from the coupled run at half the step.

A bias that falls as lr^p is 1/2^p as large in the coupled run.  So it is the difference of the two
runs times 2^p / (2^p - 1) (Richardson's extrapolation).  With minibatches, p comes from the
kernel's exact law on a Gaussian, with the draws' variances and the gradients' noise, wherever that
law explains the difference.  Otherwise p is the kernel's order, and the precision is taken as
linear in lr^p (on Gaussians exact for SGLD, nearly so for SGHMC).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.schedules import Cyclical
from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.coupled_run import run_coupled
from pyro_scale.diagnostics.divergence import explosion
from pyro_scale.diagnostics.extrapolation import LEAST_VARIANCE, Law, law_of
from pyro_scale.diagnostics.report import errors_of_the_worst, lower_lr, standard_error
from pyro_scale.errors import ArgumentError, BiasWarning
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.run.run import RunPlan
from pyro_scale.tuning.policy import TOLERANCE

#: Places in an epoch from which on draws see enough of what shuffled batches heat on average: of 4
#: a bias comes out 6% too large, of 2 about 30%.
_ENOUGH_PLACES = 3


class Bias(NamedTuple):
    """What is known of one element: values, and the order of lr that they are extrapolated by.

    Attributes:
        mean: what is too much in the mean, in posterior sds.
        mean_error: its standard error.
        sd: by what the standard deviation is multiplied.
        sd_error: its standard error.
        sd_range: what it is within as many standard errors as the worst of its site's elements
            may be off by chance.
        mean_range: so many standard errors of the mean.
        orders: of the mean, of the standard deviation.
    """

    mean: float
    mean_error: float
    sd: float
    sd_error: float
    sd_range: tuple[float, float]
    mean_range: float
    orders: tuple[float, float]


def step_size_bias(plan: RunPlan, result: PosteriorDraws, num_samples: int | None) -> Any:
    """A table, one row a latent site; see `Sampler.step_size_bias`."""
    import pandas

    _check(plan, result, num_samples)
    started = time.perf_counter()
    count = num_samples or result.positions.shape[1]
    short, coupled = run_coupled(plan, result, count)
    laws = _laws(plan, result, short, coupled)
    biases = {
        name: _bias(
            _elements(short.samples[name]),
            _elements(coupled.samples[name]),
            short.weights,
            laws.get(name),
            plan,
        )
        for name in result.log_posterior.latents
    }
    table = pandas.DataFrame(
        [(bias.mean, bias.mean_error, bias.sd, bias.sd_error) for bias in biases.values()],
        columns=["mean_bias", "mean_bias_mcse", "sd_inflation", "sd_inflation_mcse"],
        index=pandas.Index([*biases], name="site"),
    )
    table.attrs["order"] = {name: bias.orders[1] for name, bias in biases.items()}
    table.attrs["seconds"] = time.perf_counter() - started
    _warn_of_the_worst(biases, result, plan)
    return table


def _check(plan: RunPlan, result: PosteriorDraws, num_samples: int | None) -> None:
    """Refuses what has no bias to be found this way.

    Raises:
        ArgumentError: it says why.
    """
    if isinstance(plan.kernel.lr, Cyclical):
        raise ArgumentError(
            "step_size_bias: a run at half of a Cyclical lr visits other modes, so the two cannot "
            "be compared: use a run at a constant lr"
        )
    if float(result.sample_stats["temperature"].max()) == 0:
        raise ArgumentError(
            "step_size_bias: temperature 0 is an optimizer, which has no posterior to be off from"
        )
    if message := explosion(result):
        raise ArgumentError(f"step_size_bias: {message}")
    epoch, thinning = plan.problem.epoch(plan.sampling), plan.steps.thinning
    if epoch is not None:
        places = epoch // math.gcd(epoch, thinning)
        if places < min(epoch, _ENOUGH_PLACES):
            other = next(n for n in itertools.count(thinning) if math.gcd(n, epoch) == 1)
            raise ArgumentError(
                f"step_size_bias: with thinning={thinning} all draws fall at {places} of the "
                f"{epoch} places in an epoch, where shuffled batches heat more or less than on "
                f"average: run with thinning={other}"
            )
    kept = result.positions.shape[1]
    if num_samples is not None and num_samples > kept:
        raise ArgumentError(f"num_samples={num_samples}: the run has {kept} draws a chain")


def _laws(
    plan: RunPlan, result: PosteriorDraws, short: PosteriorDraws, coupled: PosteriorDraws
) -> dict[str, Law]:
    """The law of every latent site's unconstrained elements, where there is one."""
    noise, problem = result.measurements.gradient_noise, plan.problem
    theory, in_batches = plan.kernel.theory, problem.data.batch_size is not None
    is_heated = in_batches and theory is not None and theory.heated
    if noise is None or not is_heated or problem.engine.known_noise is not None:
        return {}
    count = len(noise.variance)
    own, half = (
        torch.cat(list(each.blocks()))[:, :count].double().var(0) for each in (short, coupled)
    )
    law = law_of(plan, noise.variance.double(), own, half)
    slices = result.layout.slices()
    return {name: Law(*(x[slices[name]] for x in law)) for name in result.log_posterior.latents}


def _elements(samples: Tensor) -> Tensor:
    """Draws `[chains, draws, ...]` as `[chains, draws, elements]`."""
    return samples.reshape(*samples.shape[:2], -1).double()


def _bias(
    own: Tensor, coupled: Tensor, weights: Tensor | None, law: Law | None, plan: RunPlan
) -> Bias:
    """The bias of a site's worst elements.

    Args:
        own: the run's draws, `[chains, draws, elements]`.
        coupled: the coupled run's.
        weights: of draws, `[chains, draws]`.
        law: of its unconstrained elements, if there is one.
        plan: of the run.
    """
    share = torch.ones(1, 1, 1) if weights is None else (weights / weights.mean())[..., None]
    gaps = share * (own - coupled)
    center = (share * (own + coupled)).mean((0, 1)) / 2
    squares = [share * (draws - center).square() for draws in (own, coupled)]
    variances = [square.mean((0, 1)) for square in squares]
    moves = variances[1] > 0  # what never does, such as a triangle of zeros, has no bias
    ratio = torch.where(moves, variances[0] / variances[1], 1)
    orders, in_variance = _orders(ratio, law, plan)

    def inflate(ratio: Tensor) -> Tensor:
        return _extrapolate(ratio, orders, in_variance)

    inflation = inflate(ratio)
    sd = torch.where(moves, (variances[0] / inflation.square()).sqrt(), 1)
    means = gaps.mean((0, 1)) * _factor(orders) / sd
    mean, spread = int(means.abs().argmax()), int((inflation - 1).abs().argmax())
    scale = float(_factor(orders)[mean] / sd[mean])
    line = (squares[0] - ratio * squares[1])[..., spread] / variances[1][spread]
    error = standard_error(line)
    most = errors_of_the_worst(len(means))
    around = {far: inflate(ratio + far * error)[spread].item() for far in (-most, -1, 1, most)}
    return Bias(
        mean=float(means[mean]),
        mean_error=scale * standard_error(gaps[..., mean]),
        sd=float(inflation[spread]),
        sd_error=(around[1] - around[-1]) / 2 or math.nan,  # beyond the bound
        sd_range=(around[-most], around[most]),
        mean_range=most * scale * standard_error(gaps[..., mean]),
        orders=(float(orders[mean]), float(orders[spread])),
    )


def _orders(ratio: Tensor, law: Law | None, plan: RunPlan) -> tuple[Tensor, Tensor]:
    """(By which order of lr each element is extrapolated, whether in its variance): the law's on a
    Gaussian, where that explains what is seen, by between half and twice of it; else the kernel's,
    and 1 where minibatches heat by nobody knows what."""
    theory, in_batches = plan.kernel.theory, plan.problem.data.batch_size is not None
    unknown = theory is None or (in_batches and theory.heated and law is None)
    order = 1 if theory is None or unknown else theory.order
    orders = torch.full_like(ratio, order)
    if law is None:  # heat of minibatches adds to the variance
        is_heat = in_batches and order == 1
        return orders, torch.full_like(ratio, is_heat, dtype=torch.bool)
    if law.gap.shape != ratio.shape:  # as of a simplex
        law = Law(*(x.nanmean().expand_as(ratio) for x in law))
    part = (1 - 1 / ratio) / law.gap
    explains = (part > 0.5) & (part < 2) & law.order.isfinite()
    return torch.where(explains, law.order, orders), explains


def _factor(order: Tensor) -> Tensor:
    """The bias over its difference to that at half the step."""
    return 2.0**order / (2.0**order - 1)


def _extrapolate(ratio: Tensor, order: Tensor, in_variance: Tensor) -> Tensor:
    """A standard deviation over that at lr = 0, from the ratio of the variances at lr and lr/2;
    linear in the variance, or else in the precision."""
    linear = 1 - _factor(order) * (1 - 1 / ratio.clamp(min=LEAST_VARIANCE))
    in_precision = 1 + _factor(order) * (ratio - 1)
    least = torch.full_like(ratio, LEAST_VARIANCE)
    inflation = torch.where(in_variance, 1 / linear.maximum(least), in_precision.maximum(least))
    return inflation.sqrt()


def _warn_of_the_worst(biases: Mapping[str, Bias], result: PosteriorDraws, plan: RunPlan) -> None:
    """Warns where a bias is known to be large."""

    def excess(bias: Bias) -> tuple[float, float]:
        """(How many times too large what is known to be, order of lr that it falls with)."""
        low, high = bias.sd_range
        of_sd = of_mean = 0.0
        if low > 1 + TOLERANCE.sd or high < 1 - TOLERANCE.sd:
            of_sd = abs(bias.sd - 1) / TOLERANCE.sd
        if abs(bias.mean) - bias.mean_range > TOLERANCE.mean:
            of_mean = abs(bias.mean) / TOLERANCE.mean
        return max((of_sd, bias.orders[1]), (of_mean, bias.orders[0]))

    worst = max(biases, key=lambda name: excess(biases[name])[0])
    (times, order), bias = excess(biases[worst]), biases[worst]
    if times == 0:
        return
    in_batches = plan.problem.data.batch_size is not None
    others = "; where minibatches heat, raise batch_size or pass control_variates=True"
    warn(
        BiasWarning,
        f"site '{worst}' is off because its step is finite: its standard deviations are up to "
        f"{bias.sd:.3g} ± {bias.sd_error:.2g} times what they would be at ever smaller steps, its "
        f"means up to {bias.mean:.2g} ± {bias.mean_error:.2g} posterior sds away: "
        f"{lower_lr(result, times ** (-1 / order))}{others if in_batches else ''}",
        code="step-size",
    )
