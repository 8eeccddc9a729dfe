"""Gaussian variational inference."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_scale import kernels
from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian
from pyro_scale.core.memory import check_fits
from pyro_scale.core.schedules import Falling, Schedule
from pyro_scale.core.validation import as_count
from pyro_scale.curvature.bound import Bound, Offset
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.infer.approximation import Structure
from pyro_scale.infer.stochastic import Optimized
from pyro_scale.kernels.optimizer import as_optimizer, falling_adam
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.problem import Problem

#: Matrices that a dense step holds: the factor, its gradient, the optimizer's and their next.
_MATRICES = 8
#: IVON's step size at first.
_LR = 0.03
#: Dimensions up to which the bound's optimum is looked for, the fewest draws for it, and gradients
#: of rows that are always cheap.
_MOST_DIMENSIONS, _FEWEST, _CHEAP = 100, 400, 2**22


class Variational(Optimized):
    """What VI and IVON share: the bound, and its optimum where that is cheap to find."""

    objective = "ELBO"
    #: Whether the run ends with steps to the bound's optimum: nothing was said of step sizes.
    _improves = False

    def _finish(self, fit: Fit, problem: Problem, taken: int) -> Fit:
        size, num_data = len(fit.places), problem.log_posterior.num_data
        count = max(_FEWEST, 4 * (size + 1))
        worth = max(taken, _CHEAP) // (num_data * fit.num_starts)
        is_here = problem.ranks.is_alone and problem.has_all_rows and fit.temperature > 0
        if size > _MOST_DIMENSIONS or not is_here or (1 + self._improves) * count > worth:
            return fit
        try:
            return self._at_optimum(fit, problem, count)
        except DataError as error:
            if error.code != "no-length":
                raise
            return fit  # a loader that does not end after N rows gives batches only

    def _at_optimum(self, fit: Fit, problem: Problem, count: int) -> Fit:
        """The fit, moved to the optimum of the bound if `_improves`, with its distance from that
        optimum in `attrs`.

        Args:
            fit: where the optimizer ended.
            problem: of the run.
            count: draws at which the bound's slope is taken.
        """
        size = len(fit.places)
        density = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
        gaussians, centers, offsets = list[Gaussian](), list[Tensor](), list[Offset]()
        for start, (gaussian, center) in enumerate(zip(fit.gaussians, fit.centers, strict=True)):
            assert isinstance(gaussian, Dense | Diagonal)
            own = derived_seed(fit.seed, start, Purpose.APPROXIMATION)
            source = torch.Generator().manual_seed(own)
            eps = torch.randn(2, count, size, generator=source, dtype=torch.float64).to(
                center.device
            )
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
        optimizer: by default Adam with an lr that falls from 0.01 to 0 over the run (as
            1 / (1 + step / 1,000) in single steps and with `early_stopping`), which ends, in up to
            100 dimensions and where that costs no more than the run, with steps to the optimum by
            all rows' gradients at some draws.  One of TorchOpt's functional ones, or a factory of
            one of torch.optim's, as for `MAP`, is taken as it is.  At a constant lr the fit keeps
            moving by about lr: let it fall (`torchopt.schedule.polynomial_schedule`).
        num_particles: draws of q a step.
        sticking_the_landing: leaves out a part of the gradient that is 0 on average (Roeder et al.
            2017), so that its noise vanishes where q is the posterior.
        temperature: 1 is the posterior; below, a cold one; a float or a schedule.
        init_strategy: where the mean starts, as for `MAP`.
        init_scale: every element's sd at first, as for Pyro's `AutoNormal`: small, so that the
            first gradients are those near the start; a network whose weights are noisier than it
            bears learns nothing.
        num_data: N, which overrides what the data say.
        compile: as for samplers.
        early_stopping: as for `MAP`, by the bound.

    Raises:
        ArgumentError: an argument that is unknown or out of range.

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
        model: Any,
        *,
        structure: Structure = "diag",
        optimizer: Any = None,
        num_particles: int = 1,
        sticking_the_landing: bool = False,
        temperature: float | Schedule = 1.0,
        init_strategy: Any = None,
        init_scale: float = 0.1,
        num_data: int | None = None,
        compile: bool | Literal["auto"] = "auto",
        early_stopping: bool = False,
    ):
        self._improves = optimizer is None
        if not isinstance(init_scale, int | float) or not 0 < init_scale < math.inf:
            raise ArgumentError(f"init_scale={init_scale!r}: pass a number > 0")
        kind = kernels.FullRank if structure == "dense" else kernels.MeanField
        kernel = kind(
            optimizer=falling_adam(early_stopping)
            if optimizer is None
            else as_optimizer(optimizer),
            num_particles=as_count("num_particles", num_particles),
            sticking_the_landing=sticking_the_landing,
            temperature=temperature,
            init_scale=float(init_scale),
        )
        super().__init__(
            model,
            kernel,
            structure=structure,
            init_strategy=init_strategy,
            num_data=num_data,
            compile=compile,
            early_stopping=early_stopping,
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
    improved variational online Newton (Shen et al. 2024; the equations are at `kernels.IVON`).

    A step costs what Adam's does.  Its optimum is that of `VI(structure="diag")`.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        lr: the step size in units of Newton's, a float or a schedule, which is taken as it is.  By
            default it falls from 0.03 to 0 over the run (as 1 / (1 + step / 1,000) in single steps
            and with `early_stopping`), which ends as that of `VI` does.  At a constant 0.1, the
            noise of a network's weights, whose precision is small where data say little, makes
            them move further than the data allow.
        momentum: the weight of past gradients.
        forgetting: the weight of past curvature; by default an average over the latter steps, which
            ends at the published 1 - 1e-5.  At a constant one below, minibatches make the sds too
            small, and at a constant lr they move the mean about (see `kernels.IVON`): let lr fall.
        first_curvature: the precision over N at first; 1 is that of rows that each know a param
            to 1.  Steps go as its inverse: raise it where the likelihood is sharp, such as a
            network's with little noise, or the first ones are too long.
        temperature: 1 is the posterior; below, a cold one; a float or a schedule.
        init_strategy: where the mean starts, as for `MAP`.
        num_data: N, which overrides what the data say.
        compile: as for samplers.
        early_stopping: as for `MAP`, by the bound.
    """

    def __init__(
        self,
        model: Any,
        *,
        lr: float | Schedule | Literal["auto"] = "auto",
        momentum: float | Schedule = 0.9,
        forgetting: float | Schedule = kernels.IVON.forgetting,
        first_curvature: float = 1.0,
        temperature: float | Schedule = 1.0,
        init_strategy: Any = None,
        num_data: int | None = None,
        compile: bool | Literal["auto"] = "auto",
        early_stopping: bool = False,
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
        super().__init__(
            model,
            kernel,
            structure="diag",
            init_strategy=init_strategy,
            num_data=num_data,
            compile=compile,
            early_stopping=early_stopping,
        )

    def _gaussian(self, state: Any, places: slice, temperature: Tensor) -> Gaussian:
        sd = torch.sqrt(temperature.to(state.position) / state.curvature[places])
        return Diagonal(state.position[places], sd)
