"""The time series in NumPyro, hidden states summed out by hand."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from numpyro import factor, sample


def forward(log_start, log_transition, log_emissions):
    """The log likelihood of a hidden Markov chain: emissions `[T, states]`, the first at start."""

    def step(alpha, log_emission):
        return logsumexp(alpha[:, None] + log_transition, axis=0) + log_emission, None

    alpha = log_start + log_emissions[0]
    return logsumexp(jax.lax.scan(step, alpha, log_emissions[1:])[0])


def switching(stay):
    """Two states' transition matrix from their probabilities to stay."""
    return jnp.stack([jnp.stack([stay[0], 1 - stay[0]]), jnp.stack([1 - stay[1], stay[1]])])


def hmm_masked(sequences, lengths):
    transition = sample("transition", dist.Dirichlet(jnp.ones((2, 2))))
    locs = sample("locs", dist.Normal(jnp.array([-1.0, 1.0]), 0.5))
    scale = sample("scale", dist.LogNormal(0, 1))
    log_emissions = dist.Normal(locs, scale).log_prob(sequences[..., None])
    log_a = jnp.log(transition)
    inside = jnp.arange(sequences.shape[1]) < lengths[:, None]
    # beyond its end a chain moves on unseen, which sums to one
    log_emissions = jnp.where(inside[..., None], log_emissions, 0.0)
    factor("y", jax.vmap(lambda e: forward(log_a[0], log_a, e))(log_emissions).sum())


def hmm_loop(sequences, lengths):
    stay = sample("stay", dist.Beta(2, 1).expand([2]))
    locs = sample("locs", dist.Normal(jnp.array([-1.0, 1.0]), 0.5))
    log_a = jnp.log(switching(stay))
    for i, (y, length) in enumerate(zip(sequences, lengths, strict=True)):
        log_emissions = dist.Normal(locs, 0.6).log_prob(y[: int(length), None])
        factor(f"y_{i}", forward(log_a[0], log_a, log_emissions))


def hmm_parallel(y):
    transition = sample("transition", dist.Dirichlet(jnp.ones((2, 2))))
    locs = sample("locs", dist.Normal(jnp.array([-1.0, 1.0]), 0.5))
    scale = sample("scale", dist.LogNormal(0, 1))
    log_emissions = dist.Normal(locs, scale).log_prob(y[:, None])
    # Pyro's chain has a state before the first observation
    start = jnp.log(transition.mean(0))
    factor("y", forward(start, jnp.log(transition), log_emissions))


def mixed_hmm(steps):
    stay = sample("stay", dist.Beta(2, 1).expand([2]))
    moves = sample("moves", dist.Beta(2, 2).expand([2]))
    rate = sample("rate", dist.LogNormal(jnp.array([0.7, -0.3]), 0.2))
    rests = steps[..., None] == 0
    moving = jnp.log(moves) + dist.Gamma(4, rate).log_prob(jnp.where(rests, 1.0, steps[..., None]))
    log_emissions = jnp.where(rests, jnp.log1p(-moves), moving)
    log_a = jnp.log(switching(stay))
    factor("y", jax.vmap(lambda e: forward(log_a[0], log_a, e))(log_emissions).sum())


def capture_recapture(captures):
    survival = sample("survival", dist.Uniform(0, 1))
    detection = sample("detection", dist.Uniform(0, 1))
    occasions = captures.shape[1]
    when = jnp.arange(occasions)
    first = captures.argmax(1)
    last = occasions - 1 - captures[:, ::-1].argmax(1)
    # never seen again after an occasion: dead, or alive, missed, and never seen again
    unseen = [jnp.ones(())]
    for _ in range(occasions - 1):
        unseen.append(1 - survival + survival * (1 - detection) * unseen[-1])
    unseen = jnp.stack(unseen[::-1])
    between = (when > first[:, None]) & (when <= last[:, None])
    seen = jnp.where(captures == 1, jnp.log(detection), jnp.log1p(-detection))
    known_alive = jnp.where(between, jnp.log(survival) + seen, 0.0).sum()
    factor("y", known_alive + jnp.log(unseen[last]).sum())


def change_point(disasters):
    early = sample("early", dist.Exponential(1))
    late = sample("late", dist.Exponential(1))
    before = jnp.cumsum(disasters) - disasters  # up to the year before the change
    count = jnp.arange(len(disasters))
    after, total = disasters.sum() - before, len(disasters)
    log_early = before * jnp.log(early) - count * early
    log_late = after * jnp.log(late) - (total - count) * late
    factor("y", logsumexp(log_early + log_late))


def ar1_loop(y):
    a = sample("a", dist.Uniform(-1, 1))
    sigma = sample("sigma", dist.HalfNormal(1))
    sample("y", dist.Normal(a * y[:-1], sigma), obs=y[1:])


def ar2_plate(y):
    alpha = sample("alpha", dist.Normal(0, 1))
    phi = sample("phi", dist.Normal(0, 1).expand([2]))
    sigma = sample("sigma", dist.HalfNormal(1))
    lags = jnp.stack([y[1:-1], y[:-2]], 1)
    sample("y", dist.Normal(alpha + lags @ phi, sigma), obs=y[2:])


def stochastic_volatility(returns):
    sigma = sample("sigma", dist.Gamma(4, 16))
    start = sample("start", dist.Normal(0, 1))
    z = sample("z", dist.Normal(0, 1).expand([len(returns)]))
    sample("y", dist.Normal(0, jnp.exp(start + sigma * jnp.cumsum(z))), obs=returns)
