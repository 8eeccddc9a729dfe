"""Centered latents, whose prior's scale is a function of other latents, and improper priors."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.reparam import LocScaleReparam

from pyro_scale.model.diagnose import centered_latents, improper_latents
from pyro_scale.model.log_posterior import LogPosterior


def student_schools(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.StudentT(nu, mu, tau))
        pyro.sample("y", dist.Normal(theta, 10.0), obs=y)


def centered_of(model):
    y = torch.tensor([28.0, 8.0, -3.0])
    log_posterior = LogPosterior(model, num_data=3)
    log_posterior.prepare((y,))
    return centered_latents(log_posterior, log_posterior.start((y,), seed=0), (y,))


def test_the_scale_and_not_the_location_counts():
    assert centered_of(student_schools) == {"theta": ["tau"]}


def test_what_is_advised_leaves_none():
    mended = pyro.poutine.reparam(
        student_schools, {"theta": LocScaleReparam(0.0, shape_params=["df"])}
    )
    assert centered_of(mended) == {}


def test_effects_of_parents_do_not_cancel():
    def model(y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            theta = pyro.sample("theta", dist.Normal(0.0, (a - b).exp()))
            pyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    assert centered_of(model) == {"theta": ["a", "b"]}


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
