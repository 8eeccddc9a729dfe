"""MNIST against notMNIST by a network's uncertainty: `python benchmarks/networks/ood.py`.

    --table    only print the table of the results that there are

A network 784-100-10 (ReLU) is fitted to 55,000 images of MNIST.  How well does its uncertainty tell
MNIST's 10,000 test images from notMNIST's 10,000, letters?  The AUROC of the epistemic uncertainty
(the mutual information of label and weights) and of the total one (the entropy of the mean
prediction) is the share of pairs in which the letter's is the larger.

8 chains of BAOA at temperature 1 are compared with 8 networks that SGD finds in as many steps from
usual starts, each of them by itself ("one network", the mean over 8) and all together (a deep
ensemble).  The prior of the first layer's weights is Normal(0, scale), of the others Normal(0,
sqrt(2 / fan in)).  Off the data the posterior is the prior, so the wider it is the more draws
disagree there; but MNIST has to allow it.  So the rule, fixed beforehand: of the scales whose NLL
on 5,000 validation rows of MNIST is within a standard error (of paired differences) of the least,
the widest, for each method by itself.  notMNIST does not choose the scale; the way in which chains
start was found in pilot runs that showed its AUROC.

Chains start at draws of the prior.  Where the data say nothing, as about pixels that are empty in
all digits, that is where the posterior is; usual starts are near 0 there, and chains would need
more steps to leave than a run has.  They descend without noise first, then are heated.  An
ensemble from such starts is in the table, too.

Needs the data folder, `PYRO_SCALE_DATA` (../shared/data by default), with mnist/mnist.npz and
notmnist/notmnist_test.npz.  Writes `results/ood.json` beside this file after each run.  It takes
about 10 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro.distributions as dist
import torch
from classifier import classifier
from pyro.infer.autoguide import init_to_sample
from torch import Tensor, nn

import pyro_scale as ps

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "ood.json"
DATA = Path(os.environ.get("PYRO_SCALE_DATA", HERE.parents[1].parent / "shared" / "data"))
FILES = DATA / "mnist" / "mnist.npz", DATA / "notmnist" / "notmnist_test.npz"
SCALES = (0.1, 0.3, 1.0)  # of the prior of the first layer
CHAINS, BATCH, DESCENT, WARMUP, DRAWS, THINNING = 8, 128, 1000, 2000, 20, 101
STEPS = WARMUP + DRAWS * THINNING
POSTERIOR, ENSEMBLE, RESTARTED = "BAOA, T = 1", "deep ensemble", "deep ensemble from the prior"


class Images(NamedTuple):
    """Pixels from 0 to 1, `[rows, 784]`, and labels."""

    x: Tensor
    y: Tensor
    x_val: Tensor
    y_val: Tensor
    x_test: Tensor
    y_test: Tensor
    letters: Tensor


def images() -> Images:
    """MNIST's training images in two parts, its test images, and notMNIST's."""

    def rows(pixels: np.ndarray) -> Tensor:
        return torch.from_numpy(pixels).flatten(1).float() / 255

    with np.load(FILES[0]) as mnist, np.load(FILES[1]) as letters:
        x, x_test = rows(mnist["x_train"]), rows(mnist["x_test"])
        y, y_test = (torch.from_numpy(mnist[key]).long() for key in ("y_train", "y_test"))
        outside = rows(letters["x"])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    val, train = order.split([5000, len(x) - 5000])
    return Images(x[train], y[train], x[val], y[val], x_test, y_test, outside)


def bayesian(scale: float) -> Any:
    """The network as a Pyro model."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))

    def prior(name: str, weight: Tensor) -> dist.Normal:
        return dist.Normal(0.0, scale if name.startswith("0.") else math.sqrt(2 / 100))

    return classifier(ps.bayesianize(net, prior=prior))


def run(data: Images, scale: float, warm: bool, from_prior: bool) -> Any:
    """8 chains of the posterior, or 8 networks found by SGD with momentum: temperature 0."""
    cooled = ps.schedules.cosine_decay(0.3, STEPS, end=0.03)
    return ps.BAOA(
        bayesian(scale),
        lr=(lambda step: 0.3 if step < DESCENT else 0.1) if warm else cooled,
        friction=1.0,
        temperature=(lambda step: float(step >= DESCENT)) if warm else 0.0,
        init_strategy=init_to_sample if from_prior else None,
        compile=True,
    ).run(
        (data.x, data.y),
        batch_size=BATCH,
        num_samples=DRAWS if warm else 1,
        warmup_steps=WARMUP if warm else 0,
        thinning=THINNING if warm else STEPS,
        num_chains=CHAINS,
        seed=0,
        progress=False,
    )


def scores(fit: Any, data: Images) -> dict[str, Any]:
    """Of validation rows each one's log loss; of test rows NLL and accuracy; and the AUROCs."""
    val = fit.predict(data.x_val, reduce="mean")["y"]
    test = fit.predict(data.x_test, reduce="mean")["y"]
    inside, outside = (fit.predict(x, reduce="entropy")["y"] for x in (data.x_test, data.letters))
    return {
        "losses": (-val.gather(1, data.y_val[:, None]).log()[:, 0]).tolist(),
        "nll": float(ps.metrics.nll(test, data.y_test)),
        "accuracy": float(ps.metrics.accuracy(test, data.y_test)),
        "ece": float(ps.metrics.ece(test, data.y_test)),
        "total": float(ps.metrics.auroc(inside.total, outside.total)),
        "epistemic": float(ps.metrics.auroc(inside.epistemic, outside.epistemic)),
    }


def scores_of_one(fit: Any, data: Images) -> dict[str, Any]:
    """The same for the networks of an ensemble one by one, on average."""

    def probs(x: Tensor) -> Tensor:
        return fit.predict(x, return_sites=["probs"])["probs"]

    val, test, outside = probs(data.x_val), probs(data.x_test), probs(data.letters)
    own = [
        {
            "nll": ps.metrics.nll(inside, data.y_test),
            "accuracy": ps.metrics.accuracy(inside, data.y_test),
            "ece": ps.metrics.ece(inside, data.y_test),
            "total": ps.metrics.auroc(*(torch.special.entr(p).sum(-1) for p in (inside, letters))),
        }
        for inside, letters in zip(test, outside, strict=True)
    ]
    losses = -val[:, torch.arange(len(data.y_val)), data.y_val].log().mean(0)
    means = {key: float(torch.stack([each[key] for each in own]).mean()) for key in own[0]}
    return {"losses": losses.tolist(), **means}


def judged(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Validation NLL in place of single losses, and which is chosen: the widest prior within a
    standard error of the least."""
    losses = torch.tensor([each["losses"] for each in runs], dtype=torch.float64)
    behind = losses - losses[losses.mean(1).argmin()]
    ties = behind.mean(1) <= behind.std(1) / behind.shape[1] ** 0.5
    widest = max(each["scale"] for each, tie in zip(runs, ties, strict=True) if tie)
    return [
        {
            "scale": each["scale"],
            "chosen": each["scale"] == widest,
            "validation": float(of_rows.mean()),
            **{key: value for key, value in each.items() if key not in ("scale", "losses")},
        }
        for each, of_rows in zip(runs, losses, strict=True)
    ]


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """A row a method and scale; what the rule chose is bold."""
    head = "| | first layer's prior | validation NLL | NLL | accuracy | ECE | total | epistemic |"
    lines = [head, "|---" * 8 + "|"]
    for method, runs in results.items():
        for each in runs:
            keys = ("validation", "nll", "accuracy", "ece", "total", "epistemic")
            numbers = [f"{each[key]:.4f}" if key in each else "" for key in keys]
            name = f"**{method}**" if each["chosen"] else method
            lines.append(" | ".join([f"| {name}", f"Normal(0, {each['scale']})", *numbers]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Runs everything, and prints what there is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="warm-up of")
    torch.set_num_threads(1)
    if options.table:
        results = json.loads(RESULTS.read_text())
    elif not all(file.exists() for file in FILES):
        print(f"skipped: no {FILES[0]} or {FILES[1]}; set PYRO_SCALE_DATA")
        return
    else:
        runs, data = {}, images()
        for scale in SCALES:
            for method in (POSTERIOR, ENSEMBLE, RESTARTED):
                begun = time.perf_counter()
                fit = run(data, scale, method == POSTERIOR, method != ENSEMBLE)
                found = [(method, scores(fit, data))]
                if method == ENSEMBLE:
                    found.append(("one network", scores_of_one(fit, data)))
                for name, values in found:
                    runs.setdefault(name, []).append({"scale": scale, **values})
                results = {name: judged(some) for name, some in runs.items()}
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{method}, scale {scale}: {time.perf_counter() - begun:.0f} s", flush=True)
    print(f"\nMNIST against notMNIST, AUROC of uncertainties\n\n{table(results)}")


if __name__ == "__main__":
    main()
