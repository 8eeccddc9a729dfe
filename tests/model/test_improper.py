"""Latents whose prior does not integrate to one."""

import pyro
import pyro.distributions as dist
import torch

from pyro_scale.model.improper import improper_latents
from pyro_scale.model.log_posterior import LogPosterior


def test_improper_latents_are_named_and_no_others():
    def model(y):
        pyro.sample("flat", dist.ImproperUniform(dist.constraints.real, (), ()))
        pyro.sample("masked", dist.Normal(0.0, 1.0).expand([3]).to_event(1).mask(False))
        pyro.sample("wide", dist.Normal(0.0, 1e6).expand([3]).to_event(1))
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(0.0, scale), obs=y)

    y = torch.tensor([1.0, 2.0, 3.0])
    log_posterior = LogPosterior(model, num_data=3)
    log_posterior.prepare((y,))
    params = log_posterior.start((y,), seed=0)
    assert improper_latents(log_posterior, params, (y,)) == ["flat", "masked"]
