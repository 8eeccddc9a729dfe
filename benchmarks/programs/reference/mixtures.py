"""The mixtures in NumPyro, assignments summed out by hand."""

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from numpyro import deterministic, factor, sample


def gaussian_mixture(points):
    weights = sample("weights", dist.Dirichlet(jnp.ones(2)))
    scale = sample("scale", dist.LogNormal(0, 1))
    locs = sample("locs", dist.Normal(jnp.array([-2.0, 2.0]), 1))
    log_joint = jnp.log(weights) + dist.Normal(locs, scale).log_prob(points[:, None])
    factor("y", logsumexp(log_joint, axis=1).sum())


def dirichlet_process(points):
    beta = sample("beta", dist.Beta(1, 1).expand([4]))
    mu = sample("mu", dist.Normal(0, 2).expand([5]))
    rest = jnp.concatenate([jnp.ones(1), jnp.cumprod(1 - beta)])
    weights = rest * jnp.concatenate([beta, jnp.ones(1)])

    def log_density(x):
        return logsumexp(jnp.log(weights) + dist.Normal(mu, 0.8).log_prob(x[:, None]), axis=1)

    deterministic("density", jnp.exp(log_density(jnp.array([-3.0, -2.0, 0.0, 1.5, 3.0]))))
    factor("y", log_density(points).sum())


def lda(documents):
    topic_words = sample("topic_words", dist.Dirichlet(jnp.ones((2, 6))))
    doc_topics = sample("doc_topics", dist.Dirichlet(jnp.ones((10, 2))))
    word_probs = deterministic("word_probs", doc_topics @ topic_words)
    factor("y", jnp.log(jnp.take_along_axis(word_probs, documents, 1)).sum())


def spike_mixture(amounts):
    spent = sample("spent", dist.Uniform(0, 1))
    mean = sample("mean", dist.Normal(0, 3))
    sd = sample("sd", dist.HalfNormal(2))
    something = jnp.log(spent) + dist.Normal(mean, sd).log_prob(amounts)
    nothing = jnp.where(amounts == 0, jnp.log1p(-spent), -jnp.inf)
    # a zero may be of either, as in Pyro's MaskedMixture
    factor("y", jnp.logaddexp(nothing, something).sum())
