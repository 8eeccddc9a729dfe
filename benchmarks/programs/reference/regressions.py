"""The regressions in NumPyro: written a second time, from the statistics."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import deterministic, factor, sample


def logistic_minibatches(x, y):
    bias = sample("bias", dist.Normal(0, 2))
    w = sample("w", dist.Normal(0, 1).expand([3]))
    sample("y", dist.BernoulliLogits(bias + x @ w), obs=y)


def soft_labels(x, share):
    w = sample("w", dist.Normal(0, 2).expand([2]))
    logits = x @ w
    factor("share", (share * logits - jnp.logaddexp(0, logits)).sum())


def robust_regression(x, y):
    alpha = sample("alpha", dist.Normal(0, 5))
    beta = sample("beta", dist.Normal(0, 5))
    scale = sample("scale", dist.HalfNormal(2))
    df = sample("df", dist.Gamma(2, 0.5))
    sample("y", dist.StudentT(df, alpha + beta * x, scale), obs=y)


def poisson_offset(x, exposure, counts):
    alpha = sample("alpha", dist.Normal(0, 2))
    beta = sample("beta", dist.Normal(0, 1).expand([2]))
    sample("y", dist.Poisson(exposure * jnp.exp(alpha + x @ beta)), obs=counts)


def negative_binomial(x, log_offset, counts):
    alpha = sample("alpha", dist.Normal(0, 2))
    beta = sample("beta", dist.Normal(0, 1))
    concentration = sample("concentration", dist.LogNormal(1, 1))
    mean = jnp.exp(alpha + beta * x + log_offset)
    sample("y", dist.NegativeBinomial2(mean, concentration), obs=counts)


def zero_inflated(x, counts):
    gate = sample("gate", dist.Uniform(0, 1))
    alpha = sample("alpha", dist.Normal(0, 2))
    beta = sample("beta", dist.Normal(0, 1))
    rate = jnp.exp(alpha + beta * x)
    log_poisson = jnp.log1p(-gate) + dist.Poisson(rate).log_prob(counts)
    zero = jnp.logaddexp(jnp.log(gate), jnp.log1p(-gate) - rate)
    factor("y", jnp.where(counts == 0, zero, log_poisson).sum())


def ordinal(x, rating):
    beta = sample("beta", dist.Normal(0, 2))
    ordered = dist.transforms.OrderedTransform()
    base = dist.Normal(0, 2).expand([3]).to_event(1)
    cutpoints = sample("cutpoints", dist.TransformedDistribution(base, ordered))
    below = 1 / (1 + jnp.exp(-(cutpoints - beta * x[:, None])))
    edges = jnp.ones((len(x), 1))
    cumulative = jnp.concatenate([0 * edges, below, edges], 1)
    probs = jnp.diff(cumulative, axis=1)
    factor("y", jnp.log(probs[jnp.arange(len(x)), rating]).sum())


def survival(treated, time, censored):
    shape = sample("shape", dist.LogNormal(0, 0.5))
    intercept = sample("intercept", dist.Normal(0, 2))
    effect = sample("effect", dist.Normal(0, 1))
    scale = jnp.exp(intercept + effect * treated)
    log_hazard = jnp.log(shape / scale) + (shape - 1) * jnp.log(time / scale)
    factor("y", (jnp.where(censored, 0, log_hazard) - (time / scale) ** shape).sum())


def horseshoe(x, y):
    tau = sample("tau", dist.HalfCauchy(0.5))
    sigma = sample("sigma", dist.HalfNormal(2))
    local = sample("lambda", dist.HalfCauchy(1).expand([x.shape[1]]))
    z = sample("z", dist.Normal(0, 1).expand([x.shape[1]]))
    beta = deterministic("beta", tau * local * z)
    sample("y", dist.Normal(x @ beta, sigma), obs=y)


def logistic_growth(days, size):
    capacity = sample("capacity", dist.LogNormal(4, 0.5))
    rate = sample("rate", dist.LogNormal(-1, 0.5))
    midpoint = sample("midpoint", dist.Normal(10, 5))
    noise = sample("noise", dist.HalfNormal(0.5))
    curve = jnp.log(capacity) - jnp.logaddexp(0, -rate * (days - midpoint))
    sample("y", dist.Normal(curve, noise), obs=jnp.log(size))


def gp_regression(x, y):
    length = sample("length", dist.LogNormal(0, 0.5))
    amplitude = sample("amplitude", dist.LogNormal(0, 0.5))
    noise = sample("noise", dist.LogNormal(-1, 0.5))
    kernel = amplitude**2 * jnp.exp(-((x[:, None] - x) ** 2) / (2 * length**2))
    sample("y", dist.MultivariateNormal(0, kernel + noise**2 * jnp.eye(len(x))), obs=y)


def hsgp(x, y):
    length = sample("length", dist.LogNormal(-0.7, 0.5))
    amplitude = sample("amplitude", dist.HalfNormal(1))
    noise = sample("noise", dist.HalfNormal(0.5))
    beta = sample("beta", dist.Normal(0, 1).expand([12]))
    frequency = jnp.arange(1, 13) * jnp.pi / 3
    scale = amplitude * ((2 * jnp.pi) ** 0.5 * length) ** 0.5
    weights = scale * jnp.exp(-((length * frequency) ** 2) / 4) * beta
    f = (jnp.sin(frequency * (x[:, None] + 1.5)) / 1.5**0.5) @ weights
    sample("y", dist.Normal(f, noise), obs=y)


def bayesian_network(x, y):
    a = sample("a", dist.Normal(0, 2).expand([6, 1]))
    b = sample("b", dist.Normal(0, 2).expand([6]))
    c = sample("c", dist.Normal(0, 1).expand([6]))
    d = sample("d", dist.Normal(0, 1))

    def curve(x):
        return jnp.tanh(x @ a.T + b) @ c + d

    deterministic("curve", curve(jnp.linspace(-2, 2, 5)[:, None]))
    sample("y", dist.Normal(curve(x), 0.2), obs=y)


def lkj_covariance(y):
    mean = sample("mean", dist.Normal(0, 2).expand([3]))
    scale = sample("scale", dist.HalfNormal(2).expand([3]))
    corr_tril = sample("corr_tril", dist.LKJCholesky(3, 2))
    with numpyro.plate("rows", len(y)):
        sample("y", dist.MultivariateNormal(mean, scale_tril=scale[:, None] * corr_tril), obs=y)
