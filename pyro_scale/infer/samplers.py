"""The samplers: one class for every kernel, with its use, cost and reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

from torch import Tensor

from pyro_scale import kernels
from pyro_scale.core.rows import Model
from pyro_scale.core.schedules import Schedule
from pyro_scale.infer.method import InitStrategy
from pyro_scale.infer.sampler import Sampler

#: A constant, or a schedule: a function of the step's number.
Rate: TypeAlias = float | Schedule
#: One rate for all sites, or a dict by site.
BySite: TypeAlias = Rate | Mapping[str, Rate]
#: One rate for all sites, or a dict by site of rates or of tensors of the sites' unconstrained
#: shapes.
Mass: TypeAlias = Rate | Mapping[str, Rate | Tensor]
#: A step size; `"auto"` chooses one.
StepSize: TypeAlias = BySite | Literal["auto"]
#: A friction; `"auto"` is 1, at which all directions relax about as fast as the step size allows.
Friction: TypeAlias = BySite | Literal["auto"]


class Options(TypedDict, total=False):
    """The keyword arguments that every sampler has besides its hyperparameters, for type checkers;
    `Sampler` says what they are."""

    init_strategy: InitStrategy | Literal["auto"]
    num_data: int | None
    compile: bool | Literal["auto"]
    precondition: Any
    control_variates: bool | Mapping[str, Tensor] | Literal["auto"]
    subtract_noise: bool


class Underdamped(Sampler):
    """Base class of samplers with momentum; it has their common hyperparameters: step size,
    friction, mass and temperature."""

    def __init__(
        self,
        model: Model,
        *,
        lr: StepSize = "auto",
        friction: Friction = "auto",
        mass: Mass = 1.0,
        temperature: Rate = 1.0,
        **options: Unpack[Options],
    ):
        rates = {"lr": lr, "friction": friction, "mass": mass, "temperature": temperature}
        super().__init__(model, **rates, **options)


class BAOA(Underdamped):
    """Underdamped Langevin dynamics: kick, drift, noise, drift.

    Use this unless you have a reason for another sampler.  On a Gaussian its variance is exact at
    any stable step size; otherwise its bias is of second order in lr.  Cost: one gradient and one
    normal draw per element a step.  `pyro_scale.kernels.BAOA` has the equations.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        lr: the step size (about the square root of SGD's), or `"auto"`.
        friction: the rate at which momentum decays; `"auto"` is 1.
        mass: mass of each element's momentum: larger ones move more slowly.
        temperature: 1 is the posterior, 0 is SGD with momentum.
        options: `init_strategy`, `num_data`, `compile`, `precondition`, `control_variates`,
            `subtract_noise`; `Sampler` says what they are.

    Raises:
        ArgumentError: a hyperparameter is out of its range.
        CallError: an unknown argument.

    Reference: Leimkuhler and Matthews, Rational construction of stochastic numerical methods for
    molecular sampling, Applied Mathematics Research eXpress 2013 (BAOAB, whose two half kicks are
    one here).
    """

    kernel_class = kernels.BAOA


class GHMC(Underdamped):
    """Generalized Hamiltonian Monte Carlo: one leapfrog step at a time, accepted or rejected.

    Use this if every step can take all rows and draws have to be exact, as NUTS's are, without an
    extra library.  No step size biases it, so lr="auto" takes the longest step at which nine in ten
    proposals are accepted.  Cost: one gradient of all rows and one normal draw per element a step.
    It takes no minibatches; BAOA does.  `pyro_scale.kernels.GHMC` has the equations.

    Differences of log joints decide about proposals.  If log joints are beyond some 10^5 nats,
    write the model in float64.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`, without `pyro.param` sites.
        lr: the step size, or `"auto"`.
        friction: the rate at which momentum decays; `"auto"` is 0.5.
        mass: mass of each element's momentum: larger ones move more slowly.
        temperature: 1 is the posterior; above 0.
        options: `init_strategy`, `num_data`, `compile`, `precondition`; `Sampler` says what they
            are.

    Raises:
        ArgumentError: a hyperparameter is out of its range; `control_variates` or `subtract_noise`.
        CallError: an unknown argument.

    References: Horowitz, A generalized guided Monte Carlo algorithm, Physics Letters B 1991; Neal,
    Non-reversibly updating a uniform [0, 1] value for Metropolis accept/reject decisions,
    arXiv 2001.11950, 2020.
    """

    kernel_class = kernels.GHMC


class SGHMC(Underdamped):
    """Stochastic gradient Hamiltonian Monte Carlo.

    Use this to reproduce published results; BAOA costs the same and has less bias.  Cost: one
    gradient and one normal draw per element a step.  The bias is of second order in lr.
    `pyro_scale.kernels.SGHMC` has the equations.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        lr: the step size (the square root of SGD's), or `"auto"`.
        friction: the rate at which momentum decays; `"auto"` is 1.
        mass: mass of each element's momentum: larger ones move more slowly.
        temperature: 1 is the posterior, 0 is SGD with momentum.
        options: `init_strategy`, `num_data`, `compile`, `precondition`, `control_variates`,
            `subtract_noise`; `Sampler` says what they are.

    Raises:
        ArgumentError: a hyperparameter is out of its range.
        CallError: an unknown argument.

    Reference: Chen, Fox and Guestrin, Stochastic gradient Hamiltonian Monte Carlo, ICML 2014; the
    paper's appendix B.2.
    """

    kernel_class = kernels.SGHMC


class SGLD(Sampler):
    """Stochastic gradient Langevin dynamics.

    Use this if simplicity matters: two hyperparameters, no momentum.  Cost: one gradient and one
    normal draw per element a step.  The bias is of first order in lr.  `pyro_scale.kernels.SGLD`
    has the equations.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        lr: the step size, SGD's, or `"auto"`.
        temperature: 1 is the posterior, 0 is SGD.
        options: `init_strategy`, `num_data`, `compile`, `precondition`, `control_variates`,
            `subtract_noise`; `Sampler` says what they are.

    Raises:
        ArgumentError: a hyperparameter is out of its range.
        CallError: an unknown argument.

    Reference: Welling and Teh, Bayesian learning via stochastic gradient Langevin dynamics, ICML
    2011; the paper's appendix B.1.
    """

    kernel_class = kernels.SGLD

    def __init__(
        self,
        model: Model,
        *,
        lr: StepSize = "auto",
        temperature: Rate = 1.0,
        **options: Unpack[Options],
    ):
        super().__init__(model, lr=lr, temperature=temperature, **options)


class SGNHT(Sampler):
    """The stochastic gradient Nosé-Hoover thermostat.

    Use this if minibatches are noisy and the noise is about the same for all elements: the friction
    adapts to the noise and removes the bias that it causes.  Start it near the mode
    (`init_strategy`).  Cost: one gradient and one normal draw per element a step.  The bias is of
    second order in lr.  `pyro_scale.kernels.SGNHT` has the equations.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        lr: the step size (about the square root of SGD's), or `"auto"`.
        friction: the rate at which momentum decays without minibatches; `"auto"` is 1.
        mass: mass of each element's momentum: larger ones move more slowly.
        temperature: 1 is the posterior, 0 is SGD with momentum.
        options: `init_strategy`, `num_data`, `compile`, `precondition`, `control_variates`,
            `subtract_noise`; `Sampler` says what they are.

    Raises:
        ArgumentError: a hyperparameter is out of its range.
        CallError: an unknown argument.

    Reference: Ding et al., Bayesian sampling using stochastic gradient thermostats, NeurIPS 2014;
    the paper's appendix B.3.
    """

    kernel_class = kernels.SGNHT

    def __init__(
        self,
        model: Model,
        *,
        lr: StepSize = "auto",
        friction: Rate | Literal["auto"] = "auto",
        mass: Mass = 1.0,
        temperature: Rate = 1.0,
        **options: Unpack[Options],
    ):
        rates = {"lr": lr, "friction": friction, "mass": mass, "temperature": temperature}
        super().__init__(model, **rates, **options)


class UBU(Underdamped):
    """Underdamped Langevin dynamics: free motion, kick, free motion.

    Use this with `sampling="symmetric"`, if the paths of chains, and not only their stationary
    distribution, have to be accurate to second order in lr.  Cost: one gradient and four normal
    draws per element a step.  `pyro_scale.kernels.UBU` has the equations.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        lr: the step size (about the square root of SGD's), or `"auto"`.
        friction: the rate at which momentum decays; `"auto"` is 1.
        mass: mass of each element's momentum: larger ones move more slowly.
        temperature: 1 is the posterior, 0 switches the noise off.
        options: `init_strategy`, `num_data`, `compile`, `precondition`, `control_variates`,
            `subtract_noise`; `Sampler` says what they are.

    Raises:
        ArgumentError: a hyperparameter is out of its range.
        CallError: an unknown argument.

    References: Sanz-Serna and Zygalakis, Wasserstein distance estimates for the distributions of
    numerical approximations to ergodic stochastic differential equations, JMLR 2021; Paulin,
    Whalley, Chada and Leimkuhler, Sampling from Bayesian neural network posteriors with symmetric
    minibatch splitting Langevin dynamics, 2024.
    """

    kernel_class = kernels.UBU


class pSGLD(Sampler):
    """Preconditioned stochastic gradient Langevin dynamics: RMSprop with noise.

    Use this if elements differ widely in scale and there is no fit to start the chains from.  Cost:
    one gradient and one normal draw per element a step.  The bias is of first order in lr.
    `pyro_scale.kernels.pSGLD` has the equations.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        lr: the step size, in units of the gradients' root mean square, or `"auto"`.
        temperature: 1 is the posterior, 0 is RMSprop.
        forgetting: weight of the newest gradient in the mean square, at most 1.  The default falls
            with the steps, as (1 + step)^-0.7 / 2, so that the preconditioner converges.
        damping: added to the root mean square, so that steps stay finite where gradients vanish.
        options: `init_strategy`, `num_data`, `compile`, `precondition`, `control_variates`,
            `subtract_noise`; `Sampler` says what they are.

    Raises:
        ArgumentError: a hyperparameter is out of its range.
        CallError: an unknown argument.

    Reference: Li, Chen, Carlson and Carin, Preconditioned stochastic gradient Langevin dynamics for
    deep neural networks, AAAI 2016.
    """

    kernel_class = kernels.pSGLD

    def __init__(
        self,
        model: Model,
        *,
        lr: StepSize = "auto",
        temperature: Rate = 1.0,
        forgetting: Rate = kernels.pSGLD.forgetting,
        damping: Rate = kernels.pSGLD.damping,
        **options: Unpack[Options],
    ):
        rates = {"lr": lr, "temperature": temperature}
        super().__init__(model, **rates, forgetting=forgetting, damping=damping, **options)
