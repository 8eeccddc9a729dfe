"""NumPyro's NUTS in its fastest form: one scan, compiled ahead of time, chain after chain.

`MCMC.run` compiles again at every call, which is not counted here.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from answers import Answer, answer
from jax import lax
from numpyro.infer import NUTS
from numpyro.infer.util import initialize_model
from problems import least_ess, logistic, logistic_by_column, problems

_LIB = SimpleNamespace(sample=numpyro.sample, plate=numpyro.plate, dist=dist, math=jnp)


def _seconds_per_gradient(model: Any, data: dict[str, Any]) -> float:
    info = initialize_model(jax.random.key(0), model, model_kwargs=data)
    value_and_grad = jax.value_and_grad(info.potential_fn)

    def seconds(count: int) -> float:
        def body(_: int, carry: Any) -> Any:
            z, total = carry
            value, gradient = value_and_grad(z)
            return jax.tree.map(lambda a, b: a - 1e-12 * b, z, gradient), total + value

        run = jax.jit(lambda z: lax.fori_loop(0, count, body, (z, 0.0)))
        jax.block_until_ready(run(info.param_info.z))
        begun = time.process_time()
        jax.block_until_ready(run(info.param_info.z))
        return time.process_time() - begun

    count = 1
    while seconds(count) < 0.2:
        count *= 4
    return seconds(count) / count


def main() -> None:
    """Answers seeds until there are no more."""
    jax.config.update("jax_enable_x64", True)
    problem = problems()[sys.argv[1]]()
    data, model = {name: jnp.asarray(v) for name, v in problem.data.items()}, problem.model
    if sys.argv[2:] == ["by column"] and model is logistic:
        data, model = (
            {"columns": jnp.asarray(problem.data["x"].T), "y": data["y"]},
            logistic_by_column,
        )
    bound = partial(model, _LIB)
    kernel = NUTS(bound)

    def init(seed: int) -> Any:
        return kernel.init(jax.random.key(seed), problem.draws, None, (), data)

    def chain(state: Any, data: Any) -> Any:
        def body(state: Any, _: None) -> Any:
            state = kernel.sample(state, (), data)
            return state, (state.z, state.num_steps, state.diverging)

        return lax.scan(body, state, None, length=2 * problem.draws)[1]

    begun = time.perf_counter()
    start = init(0)
    compiled = jax.jit(chain).lower(start, data).compile()
    first = time.perf_counter() - begun
    gradient = _seconds_per_gradient(bound, data)
    constrain = jax.jit(jax.vmap(jax.vmap(kernel.postprocess_fn((), data))))

    def run(seed: int) -> Answer:
        starts = [init(1000 + problem.chains * seed + i) for i in range(problem.chains)]
        jax.block_until_ready(starts)
        cpu, wall = time.process_time(), time.perf_counter()
        chains = [jax.block_until_ready(compiled(start, data)) for start in starts]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        z, num_steps, diverging = jax.tree.map(
            lambda *each: np.stack(each)[:, problem.draws :], *chains
        )
        samples = constrain(z)
        return Answer(
            cpu=cpu,
            wall=wall,
            ess=least_ess({name: np.asarray(samples[name]) for name in z}),
            gradients=int(num_steps.sum()),
            divergences=int(diverging.sum()),
            program="scan, compiled ahead of time",
            first=first,
            gradient=gradient,
        )

    answer(run)


if __name__ == "__main__":
    main()
