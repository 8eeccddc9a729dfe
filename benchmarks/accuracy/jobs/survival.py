"""Times until an event, many of them censored."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from entry import Tensors
from torch import Tensor

from jobs.job import groups, job


def weibull_log_lik(time: Tensor, event: Tensor, shape: Tensor, log_scale: Tensor) -> Tensor:
    """Log density of events, log survival of censored times."""
    log_hazard = shape.log() + (shape - 1) * time.log() - shape * log_scale
    return event * log_hazard - torch.exp(shape * (time.log() - log_scale))


def weibull(x: Tensor, time: Tensor, event: Tensor) -> None:
    """Accelerated failure times, a third censored."""
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    shape = pyro.sample("shape", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(time)):
        pyro.factor("survival", weibull_log_lik(time, event, shape, a + x @ b))


def censored(times: Tensor, end: float) -> tuple[Tensor, Tensor]:
    """(Times until the event or the end, whether it is the event)."""
    return times.clamp(max=end), (times < end).double()


def weibull_data() -> Tensors:
    """200 patients."""
    x = torch.randn(200, 3)
    log_scale = 1 + x @ torch.tensor([0.5, -0.3, 0.0])
    times = torch.distributions.Weibull(log_scale.exp(), 1.5).sample()
    return x, *censored(times, 4.0)


def frailty(hospital: Tensor, x: Tensor, time: Tensor, event: Tensor) -> None:
    """The same in 15 hospitals."""
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    with pyro.plate("hospitals", 15):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(time)):
        log_scale = a + x @ b + tau * z[hospital]
        pyro.factor("survival", weibull_log_lik(time, event, shape, log_scale))


def frailty_data() -> Tensors:
    """300 patients."""
    hospital, x = groups(15, 300), torch.randn(300, 2)
    log_scale = 1 + x @ torch.tensor([0.4, -0.2]) + 0.3 * torch.randn(15)[hospital]
    times = torch.distributions.Weibull(log_scale.exp(), 1.3).sample()
    return hospital, x, *censored(times, 5.0)


def hazards(interval: Tensor, x: Tensor, exposure: Tensor, y: Tensor) -> None:
    """A piecewise constant hazard of 10 intervals, whose logarithm is a random walk."""
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    level = pyro.sample("level", dist.Normal(-2.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    steps = pyro.sample("steps", dist.Normal(torch.zeros(9), 1.0).to_event(1))
    log_hazard = level + tau * torch.nn.functional.pad(steps.cumsum(0), (1, 0))
    with pyro.plate("data", len(y)):
        rate = exposure * torch.exp(log_hazard[interval] + x @ b)
        pyro.sample("y", dist.Poisson(rate), obs=y)


def hazards_data() -> Tensors:
    """200 persons: a row is a person in an interval of length 1."""
    x = torch.randn(200, 2)
    rate = 0.2 * torch.exp(x @ torch.tensor([0.5, -0.4]))
    time, event = censored((torch.distributions.Exponential(rate).sample()), 10.0)
    start = torch.arange(10.0)
    exposure = (time[:, None] - start).clamp(0, 1)
    died = (event[:, None] > 0) & (exposure > 0) & (time[:, None] <= start + 1)
    at_risk = exposure > 0
    person, interval = at_risk.nonzero(as_tuple=True)
    return interval, x[person], exposure[at_risk], died[at_risk].double()


def cure(x: Tensor, time: Tensor, event: Tensor) -> None:
    """A part of the patients never has the event."""
    a = pyro.sample("a", dist.Normal(torch.zeros(2), 1.5).to_event(1))
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    at_risk = torch.nn.functional.logsigmoid(a[0] + a[1] * x)
    cured = torch.nn.functional.logsigmoid(-a[0] - a[1] * x)
    with pyro.plate("data", len(time)):
        log_lik = at_risk + weibull_log_lik(time, event, shape, b[0] + b[1] * x)
        alive = torch.logaddexp(cured, log_lik)
        pyro.factor("survival", torch.where(event > 0, log_lik, alive))


def cure_data() -> Tensors:
    """300 patients, 40% cured."""
    x = torch.randn(300)
    sick = torch.bernoulli(torch.sigmoid(0.4 + 0.8 * x)) > 0
    times = torch.distributions.Weibull(torch.exp(0.5 + 0.3 * x), 1.5).sample()
    return x, *censored(torch.where(sick, times, 1e6), 6.0)


SURVIVAL = (
    job("weibull", "a third censored", weibull, weibull_data, ("a", "b", "shape"), True),
    job("frailty", "in 15 hospitals", frailty, frailty_data, ("a", "b", "shape", "tau", "z"), True),
    job(
        "hazards", "piecewise constant", hazards, hazards_data, ("b", "level", "tau", "steps"), True
    ),
    job("cure", "some are cured", cure, cure_data, ("a", "b", "shape"), True),
)
