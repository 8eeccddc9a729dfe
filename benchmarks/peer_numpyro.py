"""NumPyro: full-batch NUTS, the exact answer where the data are small."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from problems import logistic_data
from protocol import Timing


def nuts(draws: int, rows: int = 768) -> Callable[[], Timing]:
    """Seconds a gradient (a leapfrog step), and a draw, after warm-up.

    `MCMC.run` compiles again at every call, so the kernel it has warmed up is scanned here.
    """
    x, y = (jnp.asarray(a) for a in logistic_data(rows))

    def model() -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(x.shape[-1]), 1.0).to_event(1))
        with numpyro.plate("data", rows):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    kernel = NUTS(model)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=1, progress_bar=False)
    mcmc.warmup(jax.random.key(0))
    state = mcmc.last_state

    def draw(state: Any, _: None) -> tuple[Any, Any]:
        state = kernel.sample(state, (), {})
        return state, (state.z["w"], state.num_steps)

    run = jax.jit(lambda state: jax.lax.scan(draw, state, length=draws))

    def timing() -> Timing:
        nonlocal state
        start = time.perf_counter()
        state, (w, num_steps) = jax.block_until_ready(run(state))
        seconds = time.perf_counter() - start
        per_gradient = seconds / int(num_steps.sum())
        return Timing({"": per_gradient, "per draw": seconds / draws}, draws=np.asarray(w))

    timing()
    return timing
