"""A million rows and three million, with nothing set: `python benchmarks/accuracy/many_rows.py`.

    --only logistic | flights    one of them
    --seed 0

`ps.BAOA(model).run(data, seed=seed)` on a logistic regression of 10^6 rows by 20 correlated
columns, and on 3,000,000 flights (US, 2001; delays above 15 minutes) as a hierarchical regression
with 229 airports.  Gradients of rows are counted by stage, in passes through the data, a row's
control variates included.

Truth: of the logistic regression, the Gaussian at the exact mode (skewness is of order N^-1/2); of
flights, NUTS on their counts by airports and hour, which have the same posterior.  Where NumPyro is
installed, its gradient of all rows is timed in the same process.  NUTS takes about as many as
nutpie needs for 1,000 draws of warm-up and 1,000 kept of four chains; the product is what NumPyro
would take.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import pyro_scale as ps

DATA = Path(os.environ.get("PYRO_SCALE_DATA", "../shared/data"))
N, COLUMNS, CORRELATION = 1_000_000, 20, 0.9
AIRPORTS = 229


def logistic(x: Tensor, y: Tensor | None = None) -> Any:
    """A regression on correlated columns."""
    w = pyro.sample("w", dist.Normal(torch.zeros(COLUMNS), 2.5).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def flights(x: Tensor, origin: Tensor, y: Tensor | None = None, count: Tensor | None = None) -> Any:
    """Delays by distance, hour and airport; of `count` flights a row, where that is passed."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("airports", AIRPORTS):
        a = pyro.sample("a", dist.Normal(mu, sigma))
    logits = a[origin] + x @ w
    with pyro.plate("data", len(x)):
        if count is None:
            return pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)
        return pyro.sample("y", dist.Binomial(count, logits=logits), obs=y)


def logistic_data() -> tuple[Tensor, Tensor]:
    """Columns with a common part, and labels of known weights."""
    source = torch.Generator().manual_seed(0)
    own = torch.randn(N, COLUMNS, generator=source) * (1 - CORRELATION) ** 0.5
    x = own + torch.randn(N, 1, generator=source) * CORRELATION**0.5
    w = torch.randn(COLUMNS, generator=source) / 2
    return x, (torch.rand(N, generator=source) < torch.sigmoid(x @ w)).float()


def flights_data() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(The flights, row by row; their counts by route and hour)."""
    table = np.load(DATA / "flights" / "flights.npz")
    names = "minute", "delay", "origin", "destination", "distance_miles"
    minute, delay, origin, destination, miles = (
        torch.from_numpy(table[name].astype("int64")) for name in names
    )
    hour, late = minute % 1440 // 60, (delay > 15).long()
    cell = (origin * AIRPORTS + destination) * 24 + hour
    cells, place = cell.unique(return_inverse=True)
    count = torch.bincount(place).double()
    late_count = torch.bincount(place, weights=late.double())

    def features(origin: Tensor, destination: Tensor, hour: Tensor) -> Tensor:
        angle = hour.double() * (2 * math.pi / 24)
        thousands = miles[origin, destination].double() / 1000 - 0.7
        return torch.stack([thousands, angle.sin(), angle.cos()], 1)

    rows = features(origin, destination, hour).float(), origin, late.float()
    route = cells // 24
    counted = features(route // AIRPORTS, route % AIRPORTS, cells % 24)
    return rows, (counted, route // AIRPORTS, late_count, count)


def logistic_truth(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(Mode, sds of the Gaussian there), by Newton's method in float64."""
    x, y = (each.double() for each in data)
    w = torch.zeros(COLUMNS, dtype=torch.float64)
    for _ in range(12):
        p = torch.sigmoid(x @ w)
        precision = (x * (p * (1 - p))[:, None]).mT @ x + torch.eye(COLUMNS) / 2.5**2
        w = w + torch.linalg.solve(precision, x.mT @ (y - p) - w / 2.5**2)
    return w, torch.linalg.inv(precision).diagonal().sqrt()


def flights_truth(counted: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Any]:
    """(Means, sds, the run), by NUTS on the counts."""
    torch.set_default_dtype(torch.float64)
    nuts = ps.NUTS(flights).run(counted, num_samples=2000, seed=0, progress=False)
    torch.set_default_dtype(torch.float32)
    draws = flat(nuts.get_samples())
    return draws.mean(0), draws.std(0), nuts


def flat(samples: dict[str, Tensor]) -> Tensor:
    """Draws of all sites, `[draws, elements]`."""
    return torch.cat([samples[n].double().reshape(len(samples[n]), -1) for n in sorted(samples)], 1)


def numpyro_gradient(data: tuple[Tensor, ...], name: str) -> float | None:
    """Seconds of NumPyro's gradient of all rows, compiled; None where it is not installed."""
    if importlib.util.find_spec("numpyro") is None:
        return None
    import jax
    import numpyro
    import numpyro.distributions as nd
    from numpyro.infer.util import initialize_model

    def model_logistic(x: Any, y: Any) -> None:
        w = numpyro.sample("w", nd.Normal(np.zeros(COLUMNS), 2.5).to_event(1))
        numpyro.sample("y", nd.Bernoulli(logits=x @ w), obs=y)

    def model_flights(x: Any, origin: Any, y: Any) -> None:
        mu = numpyro.sample("mu", nd.Normal(0.0, 2.0))
        sigma = numpyro.sample("sigma", nd.HalfNormal(1.0))
        w = numpyro.sample("w", nd.Normal(np.zeros(3), 1.0).to_event(1))
        with numpyro.plate("airports", AIRPORTS):
            a = numpyro.sample("a", nd.Normal(mu, sigma))
        numpyro.sample("y", nd.Bernoulli(logits=a[origin] + x @ w), obs=y)

    model = {"logistic": model_logistic, "flights": model_flights}[name]
    arrays = tuple(each.numpy() for each in data)
    start = initialize_model(jax.random.PRNGKey(0), model, model_args=arrays)
    gradient = jax.jit(jax.value_and_grad(start.potential_fn))
    place, seconds = start.param_info.z, []
    for _ in range(8):
        begun = time.perf_counter()
        jax.block_until_ready(gradient(place))
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def report(name: str, data: tuple[Tensor, ...], model: Callable[..., Any], seed: int) -> Any:
    """Runs, and prints what it took."""
    begun = time.perf_counter()
    mcmc = ps.BAOA(model).run(data, seed=seed, progress=False)
    seconds = time.perf_counter() - begun
    attrs = mcmc.posterior.draws.attrs
    passes = {key[7:]: value for key, value in attrs.items() if key.startswith("passes_")}
    total = sum(passes.values())
    print(
        f"{name}: {seconds:.0f} s, {total:.0f} passes: {passes}, lr {attrs['lr']:.3g}, thinning",
        end=" ",
    )
    print(f"{attrs['thinning']}; {mcmc.report().headline}", flush=True)
    return mcmc


def compare(mcmc: Any, mean: Tensor, sd: Tensor) -> None:
    """Prints how far the draws are off."""
    draws = flat(mcmc.get_samples())
    means, sds = (draws.mean(0) - mean) / sd, draws.std(0) / sd - 1
    print(
        f"  worst mean {float(means.abs().max()):.3f} sds, sd {100 * float(sds.abs().max()):.1f}%"
    )


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", choices=["", "logistic", "flights"])
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if asked.only in ("", "logistic"):
        data = logistic_data()
        compare(report("logistic", data, logistic, asked.seed), *logistic_truth(data))
        print(f"  NumPyro's gradient of all rows: {numpyro_gradient(data, 'logistic')} s")
    if asked.only in ("", "flights"):
        if not (DATA / "flights" / "flights.npz").exists():
            print("flights: set PYRO_SCALE_DATA to a folder that has them")
            return
        rows, counted = flights_data()
        mcmc = report("flights", rows, flights, asked.seed)
        print(
            f"  NumPyro's gradient of all rows: {numpyro_gradient(rows, 'flights')} s", flush=True
        )
        mean, sd, nuts = flights_truth(counted)
        compare(mcmc, mean, sd)
        print(f"  NUTS on {len(counted[0]):,} counts: {nuts.diagnostics().attrs}")


if __name__ == "__main__":
    main()
