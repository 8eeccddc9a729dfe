"""What a Metropolis-adjusted microcanonical sampler would give, at best.

MAMS (Robnik, Cohn-Gordon and Seljak, arXiv 2503.01707) beside `ps.NUTS`: effective draws a gradient
after warm-up, the least of all x and x squared.  MAMS is tuned by what is not known in practice:
scales are the posterior's sds, the length L is the best of a grid, and the step size is that of an
acceptance rate of 0.9.  So this bounds from above what it can win, and says nothing of warm-up.

    python benchmarks/exact/mams_trial.py [NAME ...]
"""

from __future__ import annotations

import math
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import arviz
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from ours import LIB
from problems import problems

import pyro_scale as ps
from pyro_scale.exact.log_density import EarlierFunction, log_density

ACCEPTANCE, LENGTHS = 0.9, (0.35, 0.6, 1.0, 1.6, 2.6)  # in units of sqrt(D)
CHAINS, DRAWS, SEEDS = 8, 250, 4


@dataclass(frozen=True)
class Scaled:
    """A log density of positions that are centred and in units of their sds."""

    function: Callable[..., Any]
    center: Any
    scale: Any

    def __call__(self, z: Any) -> tuple[float, Any]:
        """(Its value, its gradient)."""
        value, gradient = self.function(torch.from_numpy(self.center + self.scale * z))
        return float(value), gradient.numpy() * self.scale


def turn(u: Any, gradient: Any, step: float) -> tuple[Any, float]:
    """(The velocity, of length one, after a push along the gradient; the kinetic energy gained)."""
    size, count = np.linalg.norm(gradient), len(u) - 1
    e, delta = gradient / size, step * size / count
    shrunk, along = math.exp(-delta), gradient @ u / size
    cosh, sinh = (1 + shrunk**2) / 2, (1 - shrunk**2) / 2  # both times exp(-delta)
    length = cosh + along * sinh
    u = (shrunk * u + e * (sinh + along * (cosh - shrunk))) / length
    return u / np.linalg.norm(u), count * (delta + math.log(length))


def trajectory(
    density: Scaled, z: Any, at_z: tuple[float, Any], u: Any, step: float, count: int
) -> tuple[Any, tuple[float, Any], float]:
    """(The end, value and gradient there, the energy error) of leapfrog steps."""
    (start, gradient), energy = at_z, 0.0
    value = start
    for _ in range(count):
        u, first = turn(u, gradient, step / 2)
        z = z + step * u
        value, gradient = density(z)
        if not math.isfinite(value):
            return z, (value, gradient), math.inf
        u, second = turn(u, gradient, step / 2)
        energy += first + second
    return z, (value, gradient), energy - (value - start)


def sample(
    density: Scaled, starts: Any, length: float, step: float, draws: int, seed: int
) -> tuple[Any, int, float]:
    """(Draws `[chains, draws, D]`, gradients, mean acceptance)."""
    rng, gradients, acceptance, chains = np.random.default_rng(seed), 0, [], []
    for z in starts:
        at_z, kept = density(z), []
        for _ in range(draws):
            u = rng.normal(size=len(z))
            count = max(1, math.ceil(2 * rng.uniform() * length / step))
            end, at_end, error = trajectory(density, z, at_z, u / np.linalg.norm(u), step, count)
            gradients += count
            acceptance.append(math.exp(min(0.0, -error)))
            if rng.uniform() < acceptance[-1]:
                z, at_z = end, at_end
            kept.append(z)
        chains.append(kept)
    return np.array(chains), gradients, statistics.mean(acceptance)


def find_step(density: Scaled, starts: Any, length: float) -> float:
    """Of the acceptance rate that is asked for, by bisection."""
    low, high = 1e-3, 4 * length
    for _ in range(9):
        middle = math.sqrt(low * high)
        accepted = sample(density, starts[:2], length, middle, 40, 1)[2]
        low, high = (middle, high) if accepted > ACCEPTANCE else (low, middle)
    return low


def least_ess(draws: Any) -> float:
    """Of all elements and their squares."""
    columns = np.moveaxis(draws, -1, 0)
    return min(float(arviz.ess(values)) for x in columns for values in (x, x**2))


def normal() -> None:
    """50 independent standard normals."""
    pyro.factor("no data", torch.zeros(()))
    pyro.sample("x", dist.Normal(torch.zeros(50), 1.0).to_event(1))


def _normals(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


AXES = torch.linalg.qr(_normals(100, 100))[0]
WALK_STEPS, WALK_NOISE = _normals(2, 100)
WALK = (0.3 * WALK_STEPS).cumsum(0) + 0.5 * WALK_NOISE


def rotated() -> None:
    """Variances from 0.01 to 100, along axes that no diagonal mass sees."""
    x = pyro.sample("x", dist.Normal(torch.zeros(100), 1.0).to_event(1))
    squares = (x @ AXES).square()
    pyro.factor("rotated", (squares - squares / torch.logspace(-2, 2, 100)).sum() / 2)


def banana() -> None:
    """A curved valley."""
    pyro.factor("no data", torch.zeros(()))
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.sample("b", dist.Normal(a * a, 0.3))


def funnel() -> None:
    """A mild one: scales vary sevenfold."""
    pyro.factor("no data", torch.zeros(()))
    s = pyro.sample("s", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(torch.zeros(9), (s / 2).exp()).to_event(1))


def level() -> None:
    """A random walk of 100 steps, non-centered."""
    drift, noise = (pyro.sample(name, dist.HalfNormal(1.0)) for name in ("drift", "noise"))
    steps = pyro.sample("steps", dist.Normal(torch.zeros(100), 1.0).to_event(1))
    levels = torch.ones(100, 100).tril() @ (drift * steps)
    pyro.sample("y", dist.Normal(levels, noise).to_event(1), obs=WALK)


def of_problems(name: str) -> tuple[Any, Any, int]:
    """One that others are timed on."""
    problem = problems()[name]()
    data = {key: torch.as_tensor(value) for key, value in problem.data.items()}
    return partial(problem.model, LIB), data, problem.num_data


MODELS: dict[str, Callable[[], tuple[Any, Any, int | None]]] = {
    "normal": lambda: (normal, None, None),
    "rotated": lambda: (rotated, None, None),
    "eight schools": lambda: of_problems("eight schools"),
    "logistic": lambda: of_problems("logistic 768 x 8"),
    "radon": lambda: of_problems("radon"),
    "banana": lambda: (banana, None, None),
    "funnel": lambda: (funnel, None, None),
    "level": lambda: (level, None, None),
}


def main() -> None:
    """Prints a line a model."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    for name in sys.argv[1:] or MODELS:
        model, data, num_data = MODELS[name]()
        nuts, rates = ps.NUTS(model, num_data=num_data), []
        for seed in range(1, 1 + SEEDS):
            result = nuts.run(data, seed=seed, progress=False).posterior.draws
            gradients = int(result.sample_stats["n_steps"].sum())
            rates.append(least_ess(result.positions.numpy()) / gradients)
        draws = result.positions.flatten(0, 1).numpy()
        ready = nuts._problem(data, 1, None, 0)
        start = ready.engine.layout.unflatten(ready.positions[0])
        function = log_density(
            ready.log_posterior, ready.data.first(), start, 1.0, True, EarlierFunction()
        ).function
        density = Scaled(function, draws.mean(0), draws.std(0))
        places = np.random.default_rng(0).integers(len(draws), size=CHAINS)
        starts = (draws[places] - density.center) / density.scale
        tried = []
        for multiple in LENGTHS:
            length = multiple * math.sqrt(draws.shape[1])
            step = find_step(density, starts, length)
            x, gradients, accepted = sample(density, starts, length, step, DRAWS, 2)
            rate = least_ess(density.center + density.scale * x) / gradients
            tried.append((rate, multiple, step, accepted))
        best, multiple, step, accepted = max(tried)
        nuts_rate = statistics.geometric_mean(rates)
        print(
            f"{name:14} D {draws.shape[1]:4}  NUTS {nuts_rate:.4f} ({min(rates):.4f} to "
            f"{max(rates):.4f})  MAMS {best:.4f}, L {multiple} sqrt(D), step {step:.2f}, accepted "
            f"{accepted:.2f}  ratio {best / nuts_rate:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
