"""The hierarchies in NumPyro, non-centered."""

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import deterministic, sample


def schools_noncentered(sigma, y):
    mu = sample("mu", dist.Normal(0, 5))
    tau = sample("tau", dist.HalfCauchy(5))
    theta = deterministic("theta", mu + tau * sample("eta", dist.Normal(0, 1).expand([8])))
    sample("y", dist.Normal(theta, sigma), obs=y)


schools_centered = schools_noncentered  # the same posterior


def radon(county, floor, log_radon):
    mu = sample("mu", dist.Normal(0, 3))
    tau = sample("tau", dist.HalfNormal(1))
    slope = sample("slope", dist.Normal(0, 2))
    sigma = sample("sigma", dist.HalfNormal(2))
    alpha = deterministic("alpha", mu + tau * sample("z", dist.Normal(0, 1).expand([12])))
    sample("y", dist.Normal(alpha[county] + slope * floor, sigma), obs=log_radon)


def baseball(at_bats, hits):
    m = sample("m", dist.Uniform(0, 1))
    kappa = sample("kappa", dist.Pareto(1, 1.5))
    phi = sample("phi", dist.Beta(m * kappa, (1 - m) * kappa).expand([18]))
    sample("y", dist.Binomial(at_bats.astype(int), phi), obs=hits)


def item_response(person, item, correct):
    mean = sample("mean", dist.Normal(0, 2))
    spread = sample("spread", dist.HalfNormal(2))
    ability = sample("ability", dist.Normal(0, 1).expand([25]))
    z = sample("z", dist.Normal(0, 1).expand([8]))
    difficulty = deterministic("difficulty", mean + spread * z)
    sample("y", dist.BernoulliLogits(ability[person] - difficulty[item]), obs=correct)


def matrix_factorization(user, item, rating):
    u = sample("u", dist.Normal(0, 1).expand([12, 2]))
    v = sample("v", dist.Normal(0, 1).expand([8, 2]))
    deterministic("first_user", v @ u[0])
    sample("y", dist.Normal(jnp.einsum("nr,nr->n", u[user], v[item]), 0.5), obs=rating)
