"""Scores of a Bayesian network on digits, and of others: `python benchmarks/networks/digits.py`.

    --splits 10    how many random splits of the 1,797 images
    --table        only print the tables of the results that there are

On scikit-learn's digits, a network 64-64-64-10 (ReLU), the same for all: 8 chains of BAOA, MAP, an
ensemble of 8 MAPs, MC dropout, a Laplace approximation of the last layer and mean-field variational
inference.  A fifth of the rows is for testing, a fifth of the others for choosing, and all are
fitted to the rest.  Everything is done twice: with the labels as they are, and with a fifth of the
training labels, those for choosing among them, drawn at random.  Test labels stay clean.

What is chosen is chosen by the NLL of the validation rows, for each split anew: the scale of the
prior, Normal(0, scale) for all weights, the step at which to stop, the temperature, the dropout
rate.  Where the table says Normal(0, 1), it is the library's default prior, and no choice.  MAP's
scores are means over the 8 networks of the ensemble; the Laplace approximation is of the first, in
whose last layer the logits are linear.

Writes `results/digits.json` beside this file after each split, and prints tables: means over
splits, their standard errors, and the NLL's paired difference to the best one's.  It needs the
extra `demo`, and about 35 minutes of one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
import torchopt
from classifier import classifier
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pyro_scale as ps

RESULTS = Path(__file__).parent / "results" / "digits.json"
NOISES = {"clean": 0.0, "a fifth of the training labels random": 0.2}
SCALES, TEMPERATURES, RATES = (0.3, 0.6, 1.0, 2.0), (1.0, 0.3), (0.1, 0.2, 0.5)
CHAINS, BATCH, WARMUP, DRAWS, THINNING = 8, 128, 1000, 25, 80
TRAINING, STOPS = 2000, 40  # steps of an optimizer, and at how many it may stop
UNIT = "prior Normal(0, 1)"


class Split(NamedTuple):
    """Images and labels of one split: to fit, to choose by, to test."""

    x: Tensor
    y: Tensor
    x_val: Tensor
    y_val: Tensor
    x_test: Tensor
    y_test: Tensor


class Fit(NamedTuple):
    """What may be chosen, and what it predicts: `[networks, rows, 10]`, several where the mean of
    their scores counts."""

    choice: dict[str, float]
    validation: Tensor
    test: Tensor


def split_of(seed: int, noise: float) -> Split:
    """A random split, where a part of the labels that are not for testing is random."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    test, val, train = torch.randperm(len(x), generator=generator).split([360, 288, 1149])
    drawn = torch.randint(10, y.shape, generator=generator)
    noisy = torch.where(torch.rand(y.shape, generator=generator) < noise, drawn, y)
    return Split(x[train], noisy[train], x[val], noisy[val], x[test], y[test])


def score(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, NLL and ECE of predictions `[networks, rows, 10]`, the mean over networks, of
    probabilities of at least 1e-7: some networks are certain and wrong."""
    bounded = probs.clamp(min=1e-7)
    bounded = bounded / bounded.sum(-1, keepdim=True)
    scores = {"accuracy": ps.metrics.accuracy, "nll": ps.metrics.nll, "ece": ps.metrics.ece}
    return {
        name: float(torch.stack([of(one, labels) for one in bounded]).mean())
        for name, of in scores.items()
    }


def chosen(fits: list[Fit], split: Split) -> Fit:
    """The fit of the least NLL on validation rows."""
    return min(fits, key=lambda fit: score(fit.validation, split.y_val)["nll"])


def network() -> nn.Sequential:
    """The network."""
    hidden = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(64, 10))


def bayesian(scale: float) -> Any:
    """The network as a Pyro model."""
    return classifier(ps.bayesianize(network(), prior=dist.Normal(0.0, scale)))


def fit_of(choice: dict[str, float], probs: Tensor, split: Split) -> Fit:
    """Predictions for validation and test rows, `[networks, rows, 10]`, taken apart."""
    return Fit(choice, probs[:, : len(split.x_val)], probs[:, len(split.x_val) :])


def averaged(choice: dict[str, float], method: Any, split: Split, **options: Any) -> Fit:
    """The mean prediction of a method's draws."""
    rows = torch.cat([split.x_val, split.x_test])
    return fit_of(choice, method.predict(rows, reduce="mean", **options)["y"][None], split)


# ------------------------------------------------------------------ the methods


def chains_of(split: Split, scale: float, **options: Any) -> Any:
    """8 chains of BAOA; at temperature 0 they are SGD with momentum."""
    steps = {key: options.pop(key) for key in ("num_samples", "warmup_steps", "thinning")}
    common = {"batch_size": BATCH, "num_chains": CHAINS, "seed": 0, "progress": False}
    sampler = ps.BAOA(bayesian(scale), compile=True, **options)
    return sampler.run((split.x, split.y), **steps, **common)


def posteriors(split: Split) -> Iterator[Fit]:
    """BAOA with each scale and temperature."""
    steps = {"num_samples": DRAWS, "warmup_steps": WARMUP, "thinning": THINNING}
    for scale, temperature in itertools.product(SCALES, TEMPERATURES):
        chains = chains_of(split, scale, temperature=temperature, lr=0.4, friction=1.5, **steps)
        yield averaged({"scale": scale, "temperature": temperature}, chains, split)


def from_optimizers(split: Split) -> dict[str, list[Fit]]:
    """What begins with networks that are trained, and looked at on their way."""
    found: dict[str, list[Fit]] = {"MAP": [], "deep ensemble": []}
    found |= {"last-layer Laplace": [], "mean-field VI": []}
    data, rows = (split.x, split.y), torch.cat([split.x_val, split.x_test])
    steps = {"num_samples": STOPS, "warmup_steps": 0, "thinning": TRAINING // STOPS}
    for scale in SCALES:
        chains = chains_of(split, scale, temperature=0.0, lr=0.3, friction=1.0, **steps)
        probs = chains.predict(rows, return_sites=["probs"])["probs"].unflatten(0, (CHAINS, STOPS))
        steps_taken = [(stop + 1) * TRAINING // STOPS for stop in range(STOPS)]
        choices = [{"scale": scale, "step": step} for step in steps_taken]
        members = [fit_of(c, probs[:, i], split) for i, c in enumerate(choices)]
        together = [fit_of(c, probs[:, i].mean(0)[None], split) for i, c in enumerate(choices)]
        found["MAP"] += members
        found["deep ensemble"] += together

        best = chosen(members, split).choice
        samples = chains.get_samples(group_by_chain=True)
        first = {name: weight[0, choices.index(best)] for name, weight in samples.items()}
        laplace = ps.Laplace(chains.model, sites=["4.*"], structure="dense")
        laplace.run(data, mode=first, seed=0, progress=False)
        found["last-layer Laplace"].append(averaged(best, laplace, split, num_samples=200))

        start = {name: weight[None] for name, weight in first.items()}
        lr = torchopt.schedule.polynomial_schedule(1e-2, 1e-4, 1.0, TRAINING)
        for temperature in TEMPERATURES:
            options = {"temperature": temperature, "init_strategy": start, "compile": True}
            fit = ps.VI(chains.model, optimizer=torchopt.adam(lr), **options)
            fit.run(data, batch_size=BATCH, num_steps=TRAINING, seed=0, progress=False)
            choice = {"scale": scale, "temperature": temperature}
            found["mean-field VI"].append(averaged(choice, fit, split, num_samples=200))
    return found


def dropouts(split: Split) -> Iterator[Fit]:
    """MC dropout in plain PyTorch, with the prior as a penalty, looked at on its way; networks of
    all scales and rates at once."""
    grid = list(itertools.product(SCALES, RATES))
    scales, rates = torch.tensor(grid)[:, :, None, None].unbind(1)
    nets = [[layer for layer in network() if isinstance(layer, nn.Linear)] for _ in grid]
    layers = list(zip(*nets, strict=True))
    weights = [torch.stack([each.weight.detach().T for each in layer]) for layer in layers]
    biases = [torch.stack([each.bias.detach()[None] for each in layer]) for layer in layers]
    params = [each.requires_grad_() for each in weights + biases]
    optimizer = torch.optim.SGD(params, 0.08, momentum=0.75)

    def logits(x: Tensor) -> Tensor:
        x = x.expand(len(grid), -1, -1)
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            x = torch.baddbmm(bias, x, weight).relu()
            x = x * (torch.rand_like(x) > rates) / (1 - rates)
        return torch.baddbmm(biases[-1], x, weights[-1])

    rows = torch.cat([split.x_val, split.x_test])
    for step in range(1, TRAINING + 1):
        batch = torch.randint(len(split.x), (BATCH,))
        optimizer.zero_grad()
        target = split.y[batch].repeat(len(grid))
        loss = nn.functional.cross_entropy(logits(split.x[batch]).flatten(0, 1), target) * len(grid)
        decay = sum((each.square() / scales**2).sum() for each in params) / (2 * len(split.x))
        (loss + decay).backward()
        optimizer.step()
        if step % (TRAINING // 8) == 0:
            with torch.no_grad():
                probs = sum(logits(rows).softmax(-1) for _ in range(50)) / 50
            for (scale, rate), one in zip(grid, probs[:, None], strict=True):
                yield fit_of({"scale": scale, "rate": rate, "step": step}, one, split)


# ------------------------------------------------------------------ all of them


def compared(split: Split) -> dict[str, Any]:
    """Each method's scores on the test rows, and what was chosen for it."""
    torch.manual_seed(0)
    sampled, others = list(posteriors(split)), from_optimizers(split)
    warm = [fit for fit in sampled if fit.choice["temperature"] == 1]
    fits = {
        "BAOA, temperature and prior chosen": sampled,
        "BAOA, T = 1, prior chosen": warm,
        f"BAOA, T = 1, {UNIT}": [fit for fit in warm if fit.choice["scale"] == 1],
        f"MAP, {UNIT}": [fit for fit in others["MAP"] if fit.choice["scale"] == 1][-1:],
        "MC dropout": list(dropouts(split)),
        **others,
    }
    best = {name: chosen(some, split) for name, some in fits.items()}
    return {
        name: {**score(fit.test, split.y_test), "choice": fit.choice} for name, fit in best.items()
    }


def table(splits: list[dict[str, Any]]) -> str:
    """A row a method, from the least NLL to the largest."""

    def column(method: str, key: str) -> Tensor:
        return torch.tensor([split[method][key] for split in splits])

    def cell(values: Tensor) -> str:
        return f"{values.mean():.4f} ± {values.std() / len(values) ** 0.5:.4f}"

    methods = sorted(splits[0], key=lambda method: float(column(method, "nll").mean()))
    lines = ["| | accuracy | NLL | ECE | NLL over the best |", "|---|---|---|---|---|"]
    for method in methods:
        columns = [column(method, key) for key in ("accuracy", "nll", "ece")]
        behind = column(method, "nll") - column(methods[0], "nll")
        lines.append(" | ".join([f"| {method}", *map(cell, columns), cell(behind)]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Goes through the splits, and prints what there is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="warm-up of|the ELBO still rose")
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if options.table else {name: [] for name in NOISES}
    for seed, name in itertools.product(range(0 if options.table else options.splits), NOISES):
        begun = time.perf_counter()
        results[name].append(compared(split_of(seed, NOISES[name])))
        print(f"split {seed}, {name}: {time.perf_counter() - begun:.0f} s", flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for name, splits in results.items():
        print(f"\nDigits, {name}, {len(splits)} splits\n\n{table(splits)}")


if __name__ == "__main__":
    main()
