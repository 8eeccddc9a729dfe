"""Models of a few well-known densities, and the density of all rows of a model's data."""

import pyro
import pyro.distributions as dist
import torch

from pyro_scale import LogPosterior, kernels
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.data.open import open_data
from pyro_scale.run.problem import as_log_posterior, prepare


def prior_only(make, name="x"):
    """A model of one latent and no data; make: () -> its distribution."""

    def model():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample(name, make())

    return model


def weights(size=2, sd=1.0, name="w"):
    """A latent vector ~ N(0, sd^2 I)."""
    return pyro.sample(name, dist.Normal(torch.zeros(size), sd).to_event(1))


def regression_of(make, *, mean=0.0, sd=1.0, features=lambda x: x, name="w"):
    """w ~ N(mean, sd^2 I), y ~ make(features(x) w); make: `[rows]` -> a distribution."""

    def model(x, y=None):
        columns = features(x)
        prior = dist.Normal(mean + columns.new_zeros(columns.shape[-1]), sd)
        w = pyro.sample(name, prior.to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", make(columns @ w), obs=y)

    return model


def linear_regression(noise=1.0, **prior):
    """Rows y ~ N(x w, noise^2), with the arguments of `regression_of`."""
    return regression_of(lambda fit: dist.Normal(fit, noise), **prior)


def logistic_regression(**prior):
    """Rows y ~ Bernoulli, with the arguments of `regression_of`."""
    return regression_of(lambda fit: dist.Bernoulli(logits=fit), **prior)


def normal_mean(mean=0.0, sd=0.5, noise=1.0, name="w"):
    """w ~ N(mean, sd^2 I), y ~ N(w, noise^2): rows' gradients differ by constants."""

    def model(y):
        dims = y.dim() - 1
        w = pyro.sample(name, dist.Normal(mean + torch.zeros_like(y[0]), sd).to_event(dims))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w, noise).to_event(dims), obs=y)

    return model


def prepare_run(model, data=None, *, kernel=None, chains=1, seed=0, **kwargs):
    """The problem of a run, before its warm-up; further arguments are those of `open_data`."""
    data = open_data(data, **kwargs)
    log_posterior = as_log_posterior(model, data.num_data)
    return prepare(log_posterior, data, kernel or kernels.SGLD(lr=1.0), None, chains, seed)


def density_of_all_rows(problem, **kwargs):
    return FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout, **kwargs)


def initialize(model, *batch, num_data=None, seed=0):
    """(A model's log posterior, which has seen a batch, and a chain's start)."""
    log_posterior = LogPosterior(model, num_data=num_data)
    return log_posterior, log_posterior.init(seed, *batch)
