"""The bias of a finite step size, from a coupled run at half the step.

The coupled run starts at the same positions and takes twice as many steps on the same path of noise
(each normal is split in two), with its own batches, drawn by the same rule.  The two runs stay
close, so their difference has less variance than either.  `extrapolation.py` derives the bias from
it.  With minibatches, the order of the bias in lr is that of the kernel on a Gaussian, wherever
that law explains the difference.  Otherwise it is the kernel's order, and the precision is taken as
linear in lr^p (on Gaussians exact for SGLD, nearly so for SGHMC).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.schedules import Cyclical
from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.bias import judge_bias
from pyro_scale.diagnostics.convergence import standard_error
from pyro_scale.diagnostics.divergence import explosion, message
from pyro_scale.diagnostics.extrapolation import (
    Law,
    bias_factor,
    choose_orders,
    extrapolate_sd,
    gaussian_law,
)
from pyro_scale.diagnostics.policy import TEMPERATURE, errors_by_chance
from pyro_scale.diagnostics.report import Report
from pyro_scale.diagnostics.table import lower_lr
from pyro_scale.engine.draws import Draws, Steps
from pyro_scale.errors import ArgumentError, BiasWarning, NonFiniteError
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.rng.streams import RefinedNoise
from pyro_scale.run.blame import broken_sites
from pyro_scale.run.run import RunPlan
from pyro_scale.tuning.pilot import Bias
from pyro_scale.tuning.policy import TOLERANCE

if TYPE_CHECKING:
    import pandas

#: Places in an epoch that draws must fall at to see the average heat of shuffled batches: with 4
#: places a bias comes out 6% too large, with 2 about 30%.
_ENOUGH_PLACES = 3


class _SiteBias(NamedTuple):
    """The step-size bias of those two elements of a site whose mean and whose sd are furthest off.

    Attributes:
        mean: bias of the mean, in posterior sds.
        mean_mcse: standard error of `mean`.
        sd: (sd at the run's lr) / (sd at lr = 0).
        sd_mcse: standard error of `sd`.
        sd_order: power of lr with which `sd` - 1 falls.
        excess: the larger of the two biases, each divided by its tolerance; 0 if neither is
            significantly above its tolerance.
        excess_order: power of lr with which that bias falls.
    """

    mean: float
    mean_mcse: float
    sd: float
    sd_mcse: float
    sd_order: float
    excess: float
    excess_order: float


def step_size_bias(
    plan: RunPlan, result: PosteriorDraws, num_samples: int | None
) -> pandas.DataFrame:
    """A DataFrame with a row for each latent site: the bias of its mean, in posterior sds, and the
    ratio of its sd to the sd at lr = 0, at the worst elements, each with a standard error. Warns if
    a bias is significantly above its tolerance.

    Args:
        plan: plan of the run, by which a coupled run at half the step size is made.
        result: draws of the run.
        num_samples: draws of each chain to use, the first ones; None for all.

    Raises:
        ArgumentError: a coupled run cannot show the bias of this run.
    """
    import pandas

    _check_run(plan, result, num_samples)
    started = time.perf_counter()
    count = num_samples or result.positions.shape[1]
    short, coupled = run_coupled(plan, result, count)
    laws = _gaussian_laws(plan, result, short, coupled)
    biases = {
        name: _bias_of_site(
            short.samples[name], coupled.samples[name], short.weights, laws.get(name), plan
        )
        for name in result.log_posterior.latents
    }
    table = pandas.DataFrame(
        [(bias.mean, bias.mean_mcse, bias.sd, bias.sd_mcse) for bias in biases.values()],
        columns=["mean_bias", "mean_bias_mcse", "sd_inflation", "sd_inflation_mcse"],
        index=pandas.Index([*biases], name="site"),
    )
    table.attrs["order"] = {name: bias.sd_order for name, bias in biases.items()}
    table.attrs["seconds"] = time.perf_counter() - started
    worst = max(biases, key=lambda name: biases[name].excess)
    if biases[worst].excess > 0:
        _warn_of_bias(worst, biases[worst], result, plan)
    return table


def judged_by_bias(result: PosteriorDraws, table: pandas.DataFrame) -> PosteriorDraws:
    """A run's draws with a new report, which judges the step size by its measured bias. All other
    findings are those of the old report.

    Args:
        result: draws of the run, with a report.
        table: the table of `step_size_bias()`.
    """
    before = Report.from_json(result.attrs["report"])
    findings = [finding for finding in before.findings if finding.check != "step size"]
    count = sum(result.shapes[str(name)].numel() for name in table.index)
    for name, row in table.iterrows():
        ratio = max(row["sd_inflation"], 1e-300)
        numbers = row["mean_bias"], row["mean_bias_mcse"], math.log(ratio)
        bias = Bias(*torch.tensor([*numbers, row["sd_inflation_mcse"] / ratio])[:, None])
        how = ", by a run at half the step"
        finding = judge_bias(str(name), bias, count, "more num_samples=", how=how)
        if finding.verdict == "no":
            finding = dataclasses.replace(finding, advice="a smaller lr, or lr='auto'")
        findings.append(finding)
    report = Report.from_findings(findings, before.choices, before.temperatures)
    return dataclasses.replace(result, attrs=result.attrs | {"report": report.to_json()})


def _check_run(plan: RunPlan, result: PosteriorDraws, num_samples: int | None) -> None:
    """Raises unless a coupled run at half the step size can show the bias of this run.

    Raises:
        ArgumentError: a Cyclical lr, temperature 0, chains that have exploded, draws that fall on
            too few different batches of an epoch, or more draws than the run has.
    """
    if isinstance(plan.kernel.lr, Cyclical):
        raise ArgumentError(
            "step_size_bias: a run at half of a Cyclical lr visits other modes, so the two cannot "
            "be compared: use a run at a constant lr"
        )
    if float(result.sample_stats["temperature"].max()) == 0:
        raise ArgumentError(
            "step_size_bias: at temperature 0 a run is an optimizer, whose draws have no posterior"
        )
    if exploded := explosion(result):
        raise ArgumentError(f"step_size_bias: {exploded}")
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


# ------------------------------------------------------------------ the coupled run


def run_coupled(
    plan: RunPlan, result: PosteriorDraws, count: int
) -> tuple[PosteriorDraws, PosteriorDraws]:
    """(The first `count` draws of each chain of the run; as many draws of a coupled run at half the
    step size, driven by the same Brownian path), both with the chains that finished in both runs.
    Draws with the same indices belong together.

    Raises:
        NonFiniteError: all chains of the coupled run became NaN or infinite.
    """
    draws = _run_at_half_step(plan, count)
    places = [i for i, chain in enumerate(plan.finished) if chain in draws.finished]
    chains = [plan.finished[place] for place in places]
    short = dataclasses.replace(
        result,
        positions=result.positions[torch.tensor(places)[:, None], torch.arange(count)],
        sample_stats={k: v[places, :count] for k, v in result.sample_stats.items()},
    )
    return short, dataclasses.replace(short, positions=draws.positions[chains])


def _run_at_half_step(plan: RunPlan, count: int) -> Draws:
    """`count` draws of each chain of a coupled run: all chains of the plan are run again with half
    the step size and twice as many steps, driven by the same Brownian path, so that differences
    from the run's draws are due to the step size."""
    problem, kernel, positions = plan.problem, plan.kernel, plan.problem.positions
    steps = Steps(count, 2 * plan.steps.warmup_steps, 2 * plan.steps.thinning)
    columns = {
        name: column.repeat_interleave(2, 0)[: steps.total] for name, column in plan.columns.items()
    }
    columns["lr"] = columns["lr"] / 2
    chains, shape = range(len(positions)), (kernel.normals, problem.engine.num_latents)
    noise = RefinedNoise(problem.seed, chains, shape, positions.dtype, positions.device)
    # another seed for batches; momenta start as those of the run
    other = dataclasses.replace(problem, seed=derived_seed(problem.seed, 0, Purpose.SHADOW))
    coupled = dataclasses.replace(plan, problem=other, columns=columns, steps=steps)
    title = f"{type(kernel).__name__} at half the step"
    draws = coupled.execute(title, seed=problem.seed, noise=noise).draws
    if draws.error is not None:
        raise draws.error
    if not set(draws.finished) & set(plan.finished):
        raise NonFiniteError(message(draws, columns["lr"], broken_sites(other, draws)))
    return draws


# ------------------------------------------------------------------ the bias


def _gaussian_laws(
    plan: RunPlan, result: PosteriorDraws, short: PosteriorDraws, coupled: PosteriorDraws
) -> dict[str, Law]:
    """How the variances of each latent site's unconstrained elements depend on lr on a Gaussian
    posterior with the run's minibatch noise, by site: the sampler's theory, from which the bias at
    lr follows better than from the difference of two noisy variances. Empty if minibatch noise does
    not heat the sampler, or was not measured.

    Args:
        plan: plan of the run.
        result: draws and measurements of the run.
        short: the first draws of the run, at lr.
        coupled: draws of the coupled run, at lr/2.
    """
    noise, problem = result.measurements.gradient_noise, plan.problem
    theory, in_batches = plan.kernel.theory, problem.data.batch_size is not None
    is_heated = in_batches and theory is not None and theory.heated
    if noise is None or not is_heated or problem.engine.known_noise is not None:
        return {}
    count = len(noise.variance)
    at_lr, at_half = (
        torch.cat(list(draws.blocks()))[:, :count].double().var(0) for draws in (short, coupled)
    )
    law = gaussian_law(plan, noise.variance.double(), at_lr, at_half)
    slices = result.layout.slices()
    return {name: Law(*(x[slices[name]] for x in law)) for name in result.log_posterior.latents}


def _bias_of_site(
    at_lr: Tensor, at_half: Tensor, weights: Tensor | None, law: Law | None, plan: RunPlan
) -> _SiteBias:
    """The step-size bias of a site: of the mean at the element where this is furthest off, and of
    the sd at the element where that is.

    Args:
        at_lr: constrained draws at lr, `[chains, draws, ...]`.
        at_half: constrained draws at lr/2, of the same shape.
        weights: weights of the draws, `[chains, draws]`; None if all count alike.
        law: how variances of the site's unconstrained elements depend on lr; None if it is not
            known.
        plan: plan of the run.
    """
    at_lr, at_half = (x.reshape(*x.shape[:2], -1).double() for x in (at_lr, at_half))
    share = torch.ones(1, 1, 1) if weights is None else (weights / weights.mean())[..., None]
    gaps = share * (at_lr - at_half)
    center = (share * (at_lr + at_half)).mean((0, 1)) / 2
    squares = [share * (draws - center).square() for draws in (at_lr, at_half)]
    variances = [square.mean((0, 1)) for square in squares]
    varies = variances[1] > 0  # constants, such as a triangle of zeros, have no bias
    ratio = torch.where(varies, variances[0] / variances[1], 1)
    orders, in_variance = choose_orders(ratio, law, plan)
    inflation = extrapolate_sd(ratio, orders, in_variance)
    sd = torch.where(varies, (variances[0] / inflation.square()).sqrt(), 1)
    scale = bias_factor(orders) / sd
    means = gaps.mean((0, 1)) * scale
    mean, spread = int(means.abs().argmax()), int((inflation - 1).abs().argmax())
    mean_bias, mean_mcse = float(means[mean]), float(scale[mean]) * standard_error(gaps[..., mean])
    ratio_mcse = standard_error(
        (squares[0] - ratio * squares[1])[..., spread] / variances[1][spread]
    )
    # the worst of so many elements may be off by chance
    errors = errors_by_chance(TEMPERATURE.one_sided, len(means))
    low, below, above, high = (
        extrapolate_sd(ratio + far * ratio_mcse, orders, in_variance)[spread].item()
        for far in (-errors, -1, 1, errors)
    )
    factor, of_sd, of_mean = float(inflation[spread]), 0.0, 0.0
    if low > 1 + TOLERANCE.sd or high < 1 - TOLERANCE.sd:
        of_sd = abs(factor - 1) / TOLERANCE.sd
    if abs(mean_bias) - errors * mean_mcse > TOLERANCE.mean:
        of_mean = abs(mean_bias) / TOLERANCE.mean
    excess, order = max((of_sd, float(orders[spread])), (of_mean, float(orders[mean])))
    return _SiteBias(
        mean=mean_bias,
        mean_mcse=mean_mcse,
        sd=factor,
        sd_mcse=(above - below) / 2 or math.nan,  # 0 where both are clamped
        sd_order=float(orders[spread]),
        excess=excess,
        excess_order=order,
    )


def _warn_of_bias(site: str, bias: _SiteBias, result: PosteriorDraws, plan: RunPlan) -> None:
    """Warns that the step size biases a site, with the size of the bias and advice.

    Args:
        site: name of the site.
        bias: the site's bias, which the caller has found significant.
        result: draws of the run.
        plan: plan of the run.
    """
    advice = lower_lr(result, bias.excess ** (-1 / bias.excess_order))
    if plan.problem.data.batch_size is not None:
        advice += "; where minibatches heat, raise batch_size or pass control_variates=True"
    warn(
        BiasWarning,
        f"site '{site}' is off because its step is finite: its standard deviations are up to "
        f"{bias.sd:.3g} ± {bias.sd_mcse:.2g} times what they would be at ever smaller steps, its "
        f"means up to {bias.mean:.2g} ± {bias.mean_mcse:.2g} posterior sds away: {advice}",
        code="step-size",
    )
