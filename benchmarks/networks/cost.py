"""What a posterior over a network's weights costs beside training it once.

    OMP_NUM_THREADS=1 python benchmarks/networks/cost.py

A convolutional network on 28 x 28 images, batches of 64, on the threads that torch has: results
are kept by their number.  Seconds a step are slopes: a long run's less a short one's, so that
compilation and set-up are left out; the ways take turns, and the medians of their ratios are
reported.  It takes about ten minutes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from classifier import classifier
from torch import nn

import pyro_scale as ps

ROWS, BATCH, SHORT, LONG, ROUNDS = 6400, 64, 20, 320, 5
RESULTS = Path(__file__).parent / "results" / "cost.json"


def network() -> nn.Module:
    """50,186 weights, most of the work in the convolutions."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 28),
        nn.ReLU(),
        nn.Linear(28, 10),
    )


def sgd(x: torch.Tensor, y: torch.Tensor) -> Callable[[int], object]:
    """Training by torch.optim.SGD with momentum and weight decay."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)

    def train(steps: int) -> None:
        for _ in range(steps):
            rows = torch.randint(0, ROWS, (BATCH,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()

    return train


def sampler(
    method: type[ps.Sampler], x: torch.Tensor, y: torch.Tensor, chains: int, include: str | None
) -> Callable[[int], object]:
    """A sampler on all weights, or on some."""
    model = classifier(ps.bayesianize(network(), prior="kaiming", include=include))

    def sample(steps: int) -> object:
        mcmc = method(model, lr=0.03, friction=3.0, compile=True)
        last = {"num_samples": 1, "warmup_steps": steps - 1, "thinning": 1, "num_chains": chains}
        return mcmc.run((x, y), batch_size=BATCH, seed=0, progress=False, **last)

    return sample


def slope(run: Callable[[int], object]) -> float:
    """Seconds a step."""
    seconds = []
    for steps in (SHORT, LONG):
        start = time.perf_counter()
        run(steps)
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / (LONG - SHORT)


def main() -> None:
    """Measures and reports."""
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 1, 28, 28), torch.randint(0, 10, (ROWS,))
    ways = {
        "SGD": sgd(x, y),
        "BAOA": sampler(ps.BAOA, x, y, 1, None),
        "SGHMC": sampler(ps.SGHMC, x, y, 1, None),
        "BAOA, 8 chains": sampler(ps.BAOA, x, y, 8, None),
    }
    heads = {
        "last layer": sampler(ps.BAOA, x, y, 1, "9"),
        "last layer, 8 chains": sampler(ps.BAOA, x, y, 8, "9"),
    }
    for run in [*ways.values(), *heads.values()]:
        run(SHORT)  # compiles
    rounds = [{name: slope(run) for name, run in ways.items()} for _ in range(ROUNDS)]
    whole = []  # with the base's pass through the data, which is most of it
    for _ in range(ROUNDS):
        for name, run in heads.items():
            start = time.perf_counter()
            run(LONG)
            whole.append((name, time.perf_counter() - start))

    def ratio(one: str, other: str) -> float:
        return statistics.median(each[one] / each[other] for each in rounds)

    seconds = {name: [s for n, s in whole if n == name] for name in heads}
    pairs = zip(seconds["last layer, 8 chains"], seconds["last layer"], strict=True)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    threads = torch.get_num_threads()
    found[f"{threads} thread{'s' * (threads > 1)}"] = {
        "milliseconds a step": {
            name: 1e3 * statistics.median(each[name] for each in rounds) for name in ways
        },
        "BAOA / SGD": ratio("BAOA", "SGD"),
        "SGHMC / SGD": ratio("SGHMC", "SGD"),
        "8 chains / 1": ratio("BAOA, 8 chains", "BAOA"),
        f"last layer, {LONG} steps, 8 chains / 1": statistics.median(a / b for a, b in pairs),
        f"last layer, {LONG} steps, seconds": {n: statistics.median(s) for n, s in seconds.items()},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
