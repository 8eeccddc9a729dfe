"""The mode of the posterior density."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from pyro_scale import kernels
from pyro_scale.core.memory import check_fits
from pyro_scale.core.rows import Model
from pyro_scale.core.warn import warn
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.modes import NEAR, lbfgs, newton_refine
from pyro_scale.errors import ApproximationWarning, ArgumentError
from pyro_scale.infer.approximation import Approximation, Structure
from pyro_scale.infer.settings import A_FIT, gaussian_of
from pyro_scale.infer.stochastic import Optimized, Options
from pyro_scale.kernels.optimizer import as_optimizer
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.run.problem import Problem


class MAP(Optimized):
    """Maximum a posteriori: the mode of the density of the sites' values (without the Jacobians of
    transforms, as with `AutoDelta` and Stan's optimizer), found by a stochastic optimizer in
    unconstrained space.

    `get_samples` returns the mode, one draw a start.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        optimizer: one of TorchOpt's functional ones, `torchopt.adam(1e-2)` by default; its lr may
            be a number, a schedule of TorchOpt's or ours, or any function of the step's number.  Or
            a factory of one of torch.optim's, such as
            `lambda params: torch.optim.SGD(params, lr=0.1)`, which runs eagerly.  The optimizer
            minimizes the negative log joint over N: the mean loss over rows, plus the prior's
            over N.
        structure: `"dense"` ends the run with L-BFGS and Newton's method on all rows, which find
            the mode to rounding; `"diag"` ends after the optimizer's steps.
        early_stopping: whether to stop once no start's log joint rises significantly from the third
            quarter of the steps so far to the last (see `converged`).  Do not combine it with an lr
            that is to fall first.
        precondition: a fit (`Laplace`, `VI`) in whose coordinates the optimizer moves: params =
            mean + S z, with S S' = N times the fit's covariance.  If the fit is the Laplace
            approximation at the mode, the loss has curvature 1 there in every direction, and
            `torchopt.sgd(1.0)` on all rows is Newton's method.  With Kronecker factors, a step is
            K-FAC's (Martens and Grosse 2015) with constant factors.
        options: `init_strategy`, where the search starts: one of Pyro's strategies, a dict of
            constrained tensors `[num_chains, ...]`, or another fit; `num_data`, the number of rows
            in all, N, if not that of the data; `compile`, as for samplers.

    Raises:
        ArgumentError: an argument is unknown or out of range, such as a fit of only some sites.

    Examples:
        >>> import torch, pyro, pyro.distributions as dist
        >>> import pyro_scale as ps
        >>> def model(y=None):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> fit = ps.MAP(model, structure="dense")
        >>> fit = fit.run((torch.tensor([1.0, 2.0, 3.0]),), num_steps=200, seed=0, progress=False)
        >>> round(float(fit.get_samples()["mu"][0]), 3)  # 6 / (3 + 1/100)
        1.993
    """

    def __init__(
        self,
        model: Model,
        *,
        optimizer: Any = None,
        structure: Structure = "diag",
        early_stopping: bool = False,
        precondition: Approximation | None = None,
        **options: Unpack[Options],
    ):
        if precondition is not None:
            self._preconditioner = gaussian_of(precondition)
            if self._preconditioner is None:
                raise ArgumentError(f"precondition={precondition!r}: pass None, or {A_FIT}")
        kernel = kernels.MAP(optimizer=as_optimizer(optimizer))
        super().__init__(
            model, kernel, structure=structure, early_stopping=early_stopping, **options
        )
        self._ends_exactly = structure == "dense"

    def _target(self, log_posterior: LogPosterior) -> LogPosterior:
        return log_posterior.without_jacobian()

    def _check(self, problem: Problem) -> None:
        if self.structure == "dense":
            layout, device = problem.engine.layout, problem.positions.device
            check_fits(layout.size, layout.dtype, device, 6, "Newton's method")

    def _finish(self, fit: Fit, problem: Problem, num_gradients: int) -> Fit:
        if self.structure == "diag":
            return fit
        density = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)

        def precision(position: Tensor) -> Tensor:
            return -density.hessian(position)

        places = torch.arange(problem.engine.layout.size)
        modes, distances = [], []
        for center in fit.centers:
            near = lbfgs(density, center, "take more steps, or leave structure out").position
            refined = newton_refine(density, near, precision, places)
            modes.append(refined.position)
            distances.append(refined.distance)
        if max(distances) > NEAR * len(places):
            warn(
                ApproximationWarning,
                "structure='dense': Newton's method did not find the mode (the density may have a "
                "flat direction, or float32 too few digits): take more steps, or use float64",
            )
        return fit.replaced(centers=torch.stack(modes))
