"""Gaussian variational inference."""

from __future__ import annotations

import math
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from pyro_scale import kernels
from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian
from pyro_scale.core.memory import check_fits
from pyro_scale.core.rows import Model
from pyro_scale.core.schedules import Falling, Schedule
from pyro_scale.core.validation import as_count
from pyro_scale.curvature.bound import Bound, Offset
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.infer.approximation import Structure
from pyro_scale.infer.stochastic import Optimized, Options
from pyro_scale.kernels.optimizer import as_optimizer, falling_adam
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.problem import Problem

#: Matrices that a dense step holds: the factor, its gradient, the optimizer's state, and the next
#: ones.
_MATRICES = 8
#: IVON's first step size.
_LR = 0.03
#: Dimensions up to which the bound's optimum is searched for.
_MOST_DIMENSIONS = 100
#: The fewest draws for that search, and gradients of rows that are always cheap enough.
_FEWEST, _CHEAP = 400, 2**22


class Variational(Optimized):
    """Base class of `VI` and `IVON`, which maximize the evidence lower bound (ELBO). In few
    dimensions, a run with the default optimizer and lr ends with steps to the bound's optimum, by
    gradients of all rows; any other run ends with a measurement of how far its fit is from this
    optimum."""

    objective = "ELBO"
    #: Whether the run ends with steps to the bound's optimum: only if the user set no step size.
    _improves = False

    def _finish(self, fit: Fit, problem: Problem, num_gradients: int) -> Fit:
        size, num_data = len(fit.places), problem.log_posterior.num_data
        count = max(_FEWEST, 4 * (size + 1))
        affordable = max(num_gradients, _CHEAP) // (num_data * fit.num_starts)
        has_bound = problem.is_alone and problem.has_all_rows and fit.temperature > 0
        if size > _MOST_DIMENSIONS or not has_bound or (1 + self._improves) * count > affordable:
            return fit
        try:
            return self._at_optimum(fit, problem, count)
        except DataError as error:
            if error.code != "no-length":
                raise
            return fit  # a loader that does not end after N rows

    def _at_optimum(self, fit: Fit, problem: Problem, count: int) -> Fit:
        """The fit with its distance from the bound's optimum (means in sds, sds relative) in
        `attrs`; if `_improves`, the fit is first moved to that optimum.

        Args:
            fit: the fit where the optimizer ended.
            problem: the analyzed model of the run.
            count: number of draws of the Gaussian at which the bound's slope is evaluated, on all
                rows.
        """
        size = len(fit.places)
        density = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
        gaussians, centers, offsets = list[Gaussian](), list[Tensor](), list[Offset]()
        for start, (gaussian, center) in enumerate(zip(fit.gaussians, fit.centers, strict=True)):
            assert isinstance(gaussian, Dense | Diagonal)
            seed = derived_seed(fit.seed, start, Purpose.APPROXIMATION)
            source = torch.Generator().manual_seed(seed)
            eps = torch.randn(2, count, size, generator=source, dtype=torch.float64)
            eps = eps.to(center.device)
            bound = Bound(density, center, fit.places, fit.temperature)
            if self._improves:
                gaussian = bound.improved(gaussian, eps[0])
            gaussians.append(gaussian)
            centers.append(center.index_put((fit.places,), gaussian.mean))
            offsets.append(bound.offset(gaussian, eps[1]))
        measured = {
            "at_optimum": [offset.is_small for offset in offsets],
            "mean_offset": [offset.mean for offset in offsets],
            "sd_offset": [offset.sd for offset in offsets],
        }
        return fit.replaced(
            gaussians=tuple(gaussians),
            centers=torch.stack(centers),
            attrs={**fit.attrs, **measured},
        )


class VI(Variational):
    """Variational inference with a Gaussian in unconstrained space (the paper's A.2).

    Ascends the evidence lower bound E_q[log joint] + T H[q] by reparameterized gradients.  For a
    Gaussian posterior of precision L, the optimum has variances T / L_ii, and T L^-1 if dense.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        structure: `"diag"` or `"dense"`.
        optimizer: one of TorchOpt's functional ones, or a factory of one of torch.optim's, as for
            `MAP`; it is used as it is.  At a constant lr the fit keeps moving by about lr, so let
            it fall (`torchopt.schedule.polynomial_schedule`).  The default is Adam with an lr that
            falls from 0.01 to 0 over the run (as 1 / (1 + step / 1,000) in single steps and with
            `early_stopping`).  In up to 100 dimensions, and if it costs no more than the run, the
            default ends with steps to the bound's optimum, by gradients of all rows at several
            hundred draws.
        num_particles: number of draws of the Gaussian q at every step.
        sticking_the_landing: leaves out a part of the gradient that is 0 on average (Roeder et al.
            2017), so that the gradient's noise vanishes where q is the posterior.
        temperature: 1 is the posterior, below 1 a cold one; a float or a schedule.
        init_scale: first sd of every element, as for Pyro's `AutoNormal`: small, so that the first
            gradients are those near the start.  A network whose weights are too noisy learns
            nothing.
        early_stopping: whether to stop once the bound no longer rises, as for `MAP`.
        options: `init_strategy`, where the mean starts; `num_data`; `compile`: as for `MAP`.

    Raises:
        ArgumentError: an argument is unknown or out of range.

    Examples:
        >>> import torch, pyro, pyro.distributions as dist
        >>> import pyro_scale as ps
        >>> def model(y=None):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> fit = ps.VI(model)
        >>> fit = fit.run((torch.tensor([1.0, 2.0, 3.0]),), num_steps=1000, seed=0, progress=False)
        >>> gaussian = fit.fit.gaussians[0]
        >>> round(float(gaussian.mean[0]), 2), round(float(gaussian.variance[0]), 2)  # 1 / 3.01
        (1.99, 0.33)
    """

    def __init__(
        self,
        model: Model,
        *,
        structure: Structure = "diag",
        optimizer: Any = None,
        num_particles: int = 1,
        sticking_the_landing: bool = False,
        temperature: float | Schedule = 1.0,
        init_scale: float = 0.1,
        early_stopping: bool = False,
        **options: Unpack[Options],
    ):
        self._improves = is_default = optimizer is None
        if not isinstance(init_scale, int | float) or not 0 < init_scale < math.inf:
            raise ArgumentError(f"init_scale={init_scale!r}: pass a number > 0")
        kind = kernels.FullRank if structure == "dense" else kernels.MeanField
        kernel = kind(
            optimizer=falling_adam(early_stopping) if is_default else as_optimizer(optimizer),
            num_particles=as_count("num_particles", num_particles),
            sticking_the_landing=sticking_the_landing,
            temperature=temperature,
            init_scale=float(init_scale),
        )
        super().__init__(
            model, kernel, structure=structure, early_stopping=early_stopping, **options
        )

    def _check(self, problem: Problem) -> None:
        if self.structure == "dense":
            (chains, size), layout = problem.positions.shape, problem.engine.layout
            device = problem.positions.device
            check_fits(size, layout.dtype, device, _MATRICES * chains, "VI")

    def _gaussian(self, state: Any, places: slice, temperature: Tensor) -> Gaussian:
        mean, warm = state.position[places], float(temperature > 0)
        if self.structure == "dense":
            factor = kernels.FullRank.factor(state.spread)[places, places]
            return Dense(mean, warm * factor)
        return Diagonal(mean, warm * torch.exp(state.spread[places]))


class IVON(Variational):
    """Variational inference by natural gradients, with independent elements, for networks:
    improved variational online Newton (Shen et al. 2024).  `kernels.IVON` has the equations.

    A step costs as much as Adam's.  The optimum is that of `VI(structure="diag")`.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        lr: the step size in units of Newton's step, a float or a schedule, used as it is.  The
            default falls from 0.03 to 0 over the run (as 1 / (1 + step / 1,000) in single steps and
            with `early_stopping`), and the run ends as that of `VI` does.  A constant 0.1 is too
            long for a network: weights of small precision, about which the data say little, move
            further than the data allow.
        momentum: weight of past gradients.
        forgetting: weight of past curvature.  The default averages over the latter steps, and ends
            at the published 1 - 1e-5.  With a constant below that, minibatches make the sds too
            small, and with a constant lr they also move the mean (see `kernels.IVON`): let lr fall.
        first_curvature: precision of every element before the first step, divided by N; 1 is that
            of rows each of which determines a param to an sd of 1.  Steps are proportional to its
            inverse.  Raise it if the likelihood is sharp, such as a network's with little noise, as
            the first steps are too long otherwise.
        temperature: 1 is the posterior, below 1 a cold one; a float or a schedule.
        early_stopping: whether to stop once the bound no longer rises, as for `MAP`.
        options: `init_strategy`, where the mean starts; `num_data`; `compile`: as for `MAP`.

    Raises:
        ArgumentError: a hyperparameter is out of its range.
        CallError: an unknown argument.
    """

    def __init__(
        self,
        model: Model,
        *,
        lr: float | Schedule | Literal["auto"] = "auto",
        momentum: float | Schedule = 0.9,
        forgetting: float | Schedule = kernels.IVON.forgetting,
        first_curvature: float = 1.0,
        temperature: float | Schedule = 1.0,
        early_stopping: bool = False,
        **options: Unpack[Options],
    ):
        self._improves = lr == "auto"
        falling = Falling(_LR)
        auto = falling.__call__ if early_stopping else falling
        kernel = kernels.IVON(
            lr=auto if lr == "auto" else lr,
            momentum=momentum,
            forgetting=forgetting,
            first_curvature=first_curvature,
            temperature=temperature,
        )
        super().__init__(model, kernel, structure="diag", early_stopping=early_stopping, **options)

    _is_pure = True

    def _gaussian(self, state: Any, places: slice, temperature: Tensor) -> Gaussian:
        sd = torch.sqrt(temperature.to(state.position) / state.curvature[places])
        return Diagonal(state.position[places], sd)
