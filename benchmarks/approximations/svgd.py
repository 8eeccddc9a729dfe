"""What becomes of `ps.SVGD` in many dimensions: the variance of 50 particles on standard normals,
and what 20 networks predict, beside an ensemble of as many.  Run it by itself; it prints tables."""

from __future__ import annotations

import math
import statistics

import pyro
import pyro.distributions as dist
import torch
import torchopt
from sklearn.datasets import load_digits
from torch import nn

import pyro_scale as ps
from pyro_scale.metrics import ece

PARTICLES, NETWORKS, SEEDS = 50, 20, 3
STEPS = 5000


def falling(lr: float, steps: int) -> object:
    """Adam whose lr falls to a thousandth."""
    return torchopt.adam(torchopt.schedule.polynomial_schedule(lr, 1e-3 * lr, 1.0, steps))


def variance(size: int, seed: int) -> float:
    """Of the particles on a standard normal of so many dimensions."""

    def normal() -> None:
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("z", dist.Normal(torch.zeros(size), 1.0).to_event(1))

    svgd = ps.SVGD(normal, num_particles=PARTICLES, optimizer=falling(0.1, STEPS))
    svgd.run(None, num_steps=STEPS, seed=seed, progress=False)
    return float(svgd.get_samples()["z"].var(0, correction=0).mean())


def digits(seed: int) -> dict[str, tuple[float, ...]]:
    """(Log predictive density a row, accuracy, calibration error, seconds of steps), held out."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = torch.from_numpy(images).float()[order] / 16, torch.from_numpy(labels)[order]
    torch.manual_seed(seed)
    net = ps.bayesianize(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))

    def model(x: torch.Tensor, y: torch.Tensor | None = None) -> None:
        logits = net(x)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    found, options = {}, {"num_steps": 3000, "batch_size": 100, "seed": seed, "progress": False}
    train, test = (x[:1000], y[:1000]), (x[1000:], y[1000:])
    svgd = ps.SVGD(model, num_particles=NETWORKS, optimizer=falling(0.01, 3000))
    ensemble = ps.MAP(model, optimizer=falling(0.01, 3000))
    svgd.run(train, **options)
    ensemble.run(train, num_chains=NETWORKS, **options)
    for method in (svgd, ensemble):
        probs = method.predict(test[0], reduce="mean")["y"]
        rows = torch.arange(len(probs))
        accuracy = float((probs.argmax(1) == test[1]).double().mean())
        density = float(probs[rows, test[1]].log().mean())
        seconds = method.to_arviz(log_likelihood=False).attrs["sampling_time"]
        found[type(method).__name__] = density, accuracy, float(ece(probs, test[1])), seconds
    return found


if __name__ == "__main__":
    print("| dimensions | variance | the fixed point of n - 1 or more |\n|---|---|---|")
    for size in (1, 2, 5, 10, 20, 50, 100):
        found = [variance(size, seed) for seed in range(SEEDS)]
        limit = math.log(PARTICLES + 1) * (1 - 1 / PARTICLES) / size
        shown = f"{limit:.3f}" if size >= PARTICLES - 1 else ""
        low, middle, high = min(found), statistics.median(found), max(found)
        print(f"| {size} | {middle:.3f} ({low:.3f} to {high:.3f}) | {shown} |", flush=True)
    print("\n| method | log density a row | accuracy | ECE | seconds |\n|---|---|---|---|---|")
    runs = [digits(seed) for seed in range(SEEDS)]
    for name in runs[0]:
        columns = zip(*(run[name] for run in runs), strict=True)
        print(f"| {name} | " + " | ".join(f"{statistics.mean(c):.4f}" for c in columns) + " |")
