"""BlackJAX: its SGHMC integrator with momentum kept, in `lax.scan`; and JAX by hand.

`diffusions.sghmc` is the sampler that the others run: one gradient, on a new batch, a step.
`blackjax.sghmc` wraps it: it draws the momentum anew and then takes 10 steps on one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.sgmcmc import diffusions
from problems import (
    LOGISTIC_BATCH,
    LOGISTIC_LR,
    LOGISTIC_THINNING,
    MLP_BATCH,
    MLP_LR,
    MLP_THINNING,
    WARMUP,
    digits,
    in_nats,
    logistic_data,
)
from protocol import Timing

Key = Any
State = tuple[Any, Any]  # position, momentum
Step = Callable[..., State]  # (state, this step's part of the tape) -> state

#: Draws that one program makes: longer ones leave the cache, shorter ones are all overhead.
DRAWS_A_CALL, DRAWS_A_CALL_OF_MANY_CHAINS = 4000, 4
COLUMNS = 8


# ---------------------------------------------------------------- programs


def program(step: Step, tape: Callable[[Key], Any]) -> Callable[[State, Key], Any]:
    """(state, key) -> (state, draws): a step for each entry `[draws, thinning]` of the tape."""

    def draw(state: State, entries: Any) -> tuple[State, Any]:
        state, _ = jax.lax.scan(lambda state, entry: (step(state, *entry), None), state, entries)
        return state, state[0]

    return lambda state, key: jax.lax.scan(draw, state, tape(key))


def indices_and_keys(rows: int, batch: int, *shape: int) -> Callable[[Key], Any]:
    """A tape of batches and keys, drawn in bulk."""

    def tape(key: Key) -> Any:
        for_rows, for_noise = jax.random.split(key)
        indices = jax.random.randint(for_rows, (*shape, batch), 0, rows)
        return indices, jax.random.split(for_noise, shape)

    return tape


def timed(
    run: Callable[[State, Key], Any],
    state: State,
    steps_a_call: int,
    calls: int,
    chains: int = 1,
    accuracy: Callable[[State], float] | None = None,
) -> Callable[[], Timing]:
    """Times calls of a program on from where the last left off; compiles and warms up first."""
    jitted = jax.jit(run, donate_argnums=0)
    key = jax.random.key(0)

    def several(calls: int) -> list[Any]:
        nonlocal state, key
        draws = []
        for _ in range(calls):
            key, ours = jax.random.split(key)
            state, drawn = jitted(state, ours)
            draws.append(drawn)
        jax.block_until_ready(state)
        return draws

    several(-(-WARMUP // steps_a_call))

    def timing() -> Timing:
        start = time.perf_counter()
        draws = several(calls)
        seconds = (time.perf_counter() - start) / (calls * steps_a_call * chains)
        if accuracy is not None:
            return Timing({"": seconds}, accuracy=accuracy(state))
        return Timing({"": seconds}, np.concatenate([np.reshape(d, (-1, COLUMNS)) for d in draws]))

    return timing


# ---------------------------------------------------------------- logistic regression


class Logistic:
    """The regression's data and density; `by_columns` stores x transposed."""

    def __init__(self, rows: int, by_columns: bool = False):
        x, y = logistic_data(rows, COLUMNS)
        self.rows, self.by_columns = rows, by_columns
        self.x, self.y = jnp.asarray(x.T.copy() if by_columns else x), jnp.asarray(y)
        self.lr, self.friction = in_nats(LOGISTIC_LR, rows)
        self.integrator = diffusions.sghmc(self.friction, 0.0)

    def batch(self, rows: Any) -> Any:
        """The rows of a batch."""
        return self.x[rows], self.y[rows]

    def log_joint(self, w: Any, batch: Any) -> Any:
        """Its estimate from a batch, in nats."""
        x, y = batch
        z = w @ x if self.by_columns else x @ w
        return self.rows * jnp.mean(y * z - jax.nn.softplus(z)) - 0.5 * jnp.sum(w**2)

    def step(self, state: State, batch: Any, key: Key) -> State:
        """BlackJAX's."""
        position, momentum = state
        gradient = jax.grad(self.log_joint)(position, batch)
        return self.integrator(key, position, momentum, gradient, self.lr)

    def step_by_hand(self, state: State, batch: Any, noise: Any) -> State:
        """The same, with the noise given."""
        position, momentum = state
        gradient = jax.grad(self.log_joint)(position, batch)
        decay = self.lr * self.friction
        momentum = (1 - decay) * momentum + self.lr * gradient + (2 * decay) ** 0.5 * noise
        return position + self.lr * momentum, momentum


def start(*chains: int) -> State:
    """At zero, at rest."""
    return jnp.zeros((*chains, COLUMNS)), jnp.zeros((*chains, COLUMNS))


def loop(steps: int, rows: int = 768) -> Callable[[], Timing]:
    """A jitted step in a Python loop."""
    known = Logistic(rows)

    def run(state: State, key: Key) -> Any:
        for_rows, for_noise = jax.random.split(key)
        chosen = jax.random.randint(for_rows, (LOGISTIC_BATCH,), 0, rows)
        state = known.step(state, known.batch(chosen), for_noise)
        return state, state[0]

    return timed(run, start(), 1, steps)


def scan(steps: int, rows: int = 768, in_bulk: bool = True) -> Callable[[], Timing]:
    """Indices drawn in bulk before the scan, or in its body."""
    known = Logistic(rows)
    shape = (DRAWS_A_CALL, LOGISTIC_THINNING)

    def drawn(state: State, chosen: Any, key: Key) -> State:
        return known.step(state, known.batch(chosen), key)

    def drawing(state: State, for_rows: Key, for_noise: Key) -> State:
        return drawn(state, jax.random.randint(for_rows, (LOGISTIC_BATCH,), 0, rows), for_noise)

    def keys(key: Key) -> Any:
        both = jax.random.split(key, (2, *shape))
        return both[0], both[1]

    tape = indices_and_keys(rows, LOGISTIC_BATCH, *shape) if in_bulk else keys
    run = program(drawn if in_bulk else drawing, tape)
    return _many_calls(run, steps)


def by_hand(steps: int, rows: int = 768) -> Callable[[], Timing]:
    """JAX without BlackJAX: the noise in bulk too."""
    known = Logistic(rows)
    shape = (DRAWS_A_CALL, LOGISTIC_THINNING)

    def tape(key: Key) -> Any:
        for_rows, for_noise = jax.random.split(key)
        indices = jax.random.randint(for_rows, (*shape, LOGISTIC_BATCH), 0, rows)
        return indices, jax.random.normal(for_noise, (*shape, COLUMNS))

    def step(state: State, chosen: Any, noise: Any) -> State:
        return known.step_by_hand(state, known.batch(chosen), noise)

    return _many_calls(program(step, tape), steps)


def public(steps: int, rows: int = 768) -> Callable[[], Timing]:
    """`blackjax.sghmc(...).step` in a scan; per gradient, of which 10 share a batch."""
    known = Logistic(rows)
    gradients = 10
    sghmc = blackjax.sghmc(jax.grad(known.log_joint), gradients, known.friction)

    def draw(position: Any, entry: Any) -> tuple[Any, Any]:
        chosen, key = entry
        position = sghmc.step(key, position, known.batch(chosen), known.lr)
        return position, position

    tape = indices_and_keys(rows, LOGISTIC_BATCH, DRAWS_A_CALL)
    steps_a_call = DRAWS_A_CALL * gradients
    return timed(
        lambda position, key: jax.lax.scan(draw, position, tape(key)),
        start()[0],
        steps_a_call,
        steps // steps_a_call,
    )


def full_batch(
    steps: int, rows: int = 768, by_columns: bool = False, hand: bool = False
) -> Callable[[], Timing]:
    """All rows at every step."""
    known = Logistic(rows, by_columns)
    data = known.x, known.y
    shape = (DRAWS_A_CALL // 4, LOGISTIC_THINNING)

    def tape(key: Key) -> Any:
        noise = jax.random.normal(key, (*shape, COLUMNS)) if hand else jax.random.split(key, shape)
        return (noise,)

    step = known.step_by_hand if hand else known.step
    run = program(lambda state, noise: step(state, data, noise), tape)
    steps_a_call = shape[0] * shape[1]
    return timed(run, start(), steps_a_call, steps // steps_a_call)


def many_chains(
    steps: int, chains: int = 1000, rows: int = 768, outside: str = "scan"
) -> Callable[[], Timing]:
    """Chains by vmap, inside of the scan or outside of it; indices in bulk."""
    known = Logistic(rows)
    shape = (DRAWS_A_CALL_OF_MANY_CHAINS, LOGISTIC_THINNING)

    def step(state: State, chosen: Any, key: Key) -> State:
        return known.step(state, known.batch(chosen), key)

    def vmap_outside(state: State, key: Key) -> Any:
        one = program(step, indices_and_keys(rows, LOGISTIC_BATCH, *shape))
        return jax.vmap(one)(state, jax.random.split(key, chains))

    scan_outside = program(jax.vmap(step), indices_and_keys(rows, LOGISTIC_BATCH, *shape, chains))
    run = scan_outside if outside == "scan" else vmap_outside
    steps_a_call = shape[0] * shape[1]
    return timed(run, start(chains), steps_a_call, steps // steps_a_call, chains)


def _many_calls(run: Callable[[State, Key], Any], steps: int) -> Callable[[], Timing]:
    steps_a_call = DRAWS_A_CALL * LOGISTIC_THINNING
    return timed(run, start(), steps_a_call, steps // steps_a_call)


# ---------------------------------------------------------------- a network


def network(
    hidden: tuple[int, ...], steps: int, chains: int = 1, rows: int | None = None
) -> Callable[[], Timing]:
    """A Bayesian network on digits; more chains by vmap inside of the scan."""
    pixels, labels = (jnp.asarray(a) for a in digits(rows))
    lr, friction = in_nats(MLP_LR, len(pixels))
    integrator = diffusions.sghmc(friction, 0.0)

    def log_joint(params: Any, x: Any, y: Any) -> Any:
        log_p = jax.nn.log_softmax(_forward(params, x))
        prior = -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return len(pixels) * jnp.take_along_axis(log_p, y[:, None], 1).mean() + prior

    def step(state: State, chosen: Any, key: Key) -> State:
        position, momentum = state
        gradient = jax.grad(log_joint)(position, pixels[chosen], labels[chosen])
        return integrator(key, position, momentum, gradient, lr)

    def accuracy(state: State) -> float:
        first = jax.tree.map(lambda leaf: leaf[0], state[0])
        return float((_forward(first, pixels[:2000]).argmax(-1) == labels[:2000]).mean())

    tape = indices_and_keys(len(pixels), MLP_BATCH, steps // MLP_THINNING, MLP_THINNING, chains)
    position = jax.vmap(lambda key: _weights(key, (64, *hidden, 10)))(
        jax.random.split(jax.random.key(1), chains)
    )
    state = (position, jax.tree.map(jnp.zeros_like, position))
    return timed(program(jax.vmap(step), tape), state, steps, 1, chains, accuracy)


def _weights(key: Key, sizes: tuple[int, ...]) -> list[Any]:
    def layer(key: Key, i: int, o: int) -> Any:
        return jax.random.uniform(key, (i, o), minval=-(i**-0.5), maxval=i**-0.5), jnp.zeros(o)

    keys = jax.random.split(key, len(sizes) - 1)
    return [layer(k, i, o) for k, (i, o) in zip(keys, pairwise(sizes), strict=True)]


def _forward(params: list[Any], x: Any) -> Any:
    for number, (weight, bias) in enumerate(params):
        x = (x if number == 0 else jax.nn.relu(x)) @ weight + bias
    return x
