"""A Gaussian approximation as a Pyro guide."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.gaussian import Dense, Diagonal, as_structure
from pyro_scale.posterior.gaussians import Fit


class Guide(PyroModule):
    """Draws all latent sites from one Gaussian in unconstrained space, whose mean and spread are
    params: `SVI` goes on optimizing them.

    A mode is a point of the sites' own density, as `AutoDelta` is, without a Jacobian.

    Args:
        fit: of which the first start's Gaussian is taken; what has none stays where it is.

    Raises:
        ArgumentError: it is one at temperature 0, which has no density.
    """

    def __init__(self, fit: Fit):
        # params are in Pyro's store by name: nobody else's may be the same
        super().__init__(f"guide_{uuid.uuid4().hex[:12]}")
        self._fit = fit
        self.loc: Any = PyroParam(fit.centers[0, fit.places].clone(), constraints.real)
        self._dense = False
        if fit.gaussians:
            fit.at_temperature_1(0)  # which refuses none
            self._dense = not isinstance(fit.gaussians[0], Diagonal)
            gaussian = as_structure(fit.gaussians[0], self._dense)
            spread = (
                gaussian.scale_tril if isinstance(gaussian, Dense) else gaussian.variance.sqrt()
            )
            kind = constraints.lower_cholesky if self._dense else constraints.positive
            self.scale: Any = PyroParam(spread.clone(), kind)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Samples every latent site; the arguments are the model's."""
        fit, log_posterior = self._fit, self._fit.log_posterior
        position = fit.centers[0].index_put((fit.places,), self._draw())
        params = fit.layout.unflatten(position)
        with exclusive, pyro.poutine.block():  # the model is run for its supports, not to be seen
            sites = log_posterior.run(
                params, log_posterior.model_info.example, log_posterior.first_indices()
            ).sites
        self._read()  # again: with a store of its own, the run took off what SVI knows them by
        values, plates = {}, {}
        for name in log_posterior.latents:
            site = sites[name]
            event_dim = len(site.fn.event_shape)
            batch_shape = site.value.shape[: site.value.dim() - event_dim]
            log_density = site.value.new_zeros(batch_shape)
            if fit.gaussians and site.log_det is not None:  # all of it, in equal parts
                log_density = log_density - site.log_det / max(1, batch_shape.numel())
            with ExitStack() as stack:
                for frame in site.plates:
                    if frame.name not in plates:
                        plates[frame.name] = pyro.plate(frame.name, frame.size, dim=frame.dim)
                    stack.enter_context(plates[frame.name])
                values[name] = pyro.sample(
                    name, dist.Delta(site.value, log_density=log_density, event_dim=event_dim)
                )
        return values

    def _read(self) -> tuple[Any, Any]:
        return self.loc, self.scale if self._fit.gaussians else None

    def _draw(self) -> Tensor:
        loc, scale = self._read()
        if scale is None:
            return loc
        if self._dense:
            fn: Any = dist.MultivariateNormal(loc, scale_tril=scale)
        else:
            fn = dist.Normal(loc, scale).to_event(1)
        return pyro.sample("_position", fn, infer={"is_auxiliary": True})
