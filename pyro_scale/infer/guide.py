"""A Gaussian approximation as a Pyro guide."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_scale.core.gaussian import Dense
from pyro_scale.infer.fit import Fit
from pyro_scale.model.transforms import bijection


class Guide(PyroModule):
    """Draws all latent sites from one Gaussian in unconstrained space, whose mean and spread are
    params: `SVI` goes on optimising them.

    Args:
        fit: of which the first start's Gaussian is taken; what has none stays where it is.
    """

    def __init__(self, fit: Fit):
        super().__init__()
        self._fit = fit
        self.loc: Any = PyroParam(fit.centres[0, fit.places].clone(), constraints.real)
        self._dense = False
        if fit.gaussians:
            gaussian = fit.gaussians[0]
            self._dense = isinstance(gaussian, Dense)
            spread = gaussian.scale_tril if isinstance(gaussian, Dense) else gaussian.sd
            kind = constraints.lower_cholesky if self._dense else constraints.positive
            self.scale: Any = PyroParam(spread.clone(), kind)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Samples every latent site; the arguments are the model's."""
        fit = self._fit
        position = fit.centres[0].index_put((fit.places,), self._drawn())
        values, plates = fit.layout.unflatten(position), {}
        for name in fit.log_posterior.latents:
            site = fit.log_posterior.understanding.sites[name]
            transform = bijection(site.fn.support)
            value = transform(values[name])
            log_det = transform.log_abs_det_jacobian(values[name], value)
            event_dim = len(site.fn.event_shape)
            shape = value.shape[: value.dim() - event_dim]
            log_density = -log_det.reshape(*shape, -1).sum(-1)
            with ExitStack() as stack:
                for frame in site.plates:
                    if frame.name not in plates:
                        plates[frame.name] = pyro.plate(frame.name, frame.size, dim=frame.dim)
                    stack.enter_context(plates[frame.name])
                values[name] = pyro.sample(
                    name, dist.Delta(value, log_density=log_density, event_dim=event_dim)
                )
        return {name: values[name] for name in fit.log_posterior.latents}

    def _drawn(self) -> Tensor:
        if not self._fit.gaussians:
            return self.loc
        if self._dense:
            fn: Any = dist.MultivariateNormal(self.loc, scale_tril=self.scale)
        else:
            fn = dist.Normal(self.loc, self.scale).to_event(1)
        return pyro.sample("_position", fn, infer={"is_auxiliary": True})
