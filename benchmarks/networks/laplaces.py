"""Laplace approximations of networks by structure: `python benchmarks/networks/laplaces.py`.

    --splits 5    how many random splits of each set

At the same modes (MAP, Adam), with the same linearized predictions of 200 draws: a diagonal,
Kronecker factors, and a dense one of the last layer.  Each has the prior's scale of most evidence,
of 0.3, 1 and 3; MAP has that of the Kronecker factors.

- digits: scikit-learn's, a network 64-64-64-10 (tanh), and a convolutional one.
- UCI: a network of 32 tanh with a mean and a scale for each row; sets in $PYRO_SCALE_DATA.

Where laplace-torch is installed, its KronLaplace is fitted at the same weights of the classifiers,
all rows in one batch, and its evidence stands beside ours.

Writes `results/laplaces.json` beside this file, and prints a table: NLL of test rows in nats, mean
over splits with its standard error, and the log evidence a training row.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
import torchopt
from sklearn.datasets import load_digits
from torch import Tensor, nn
from uci import DATA, standardized

import pyro_scale as ps

RESULTS = Path(__file__).parent / "results" / "laplaces.json"
SCALES, STEPS, BATCH, DRAWS = (0.3, 1.0, 3.0), 2000, 128, 200
SETS = ("yacht", "energy", "boston")


class Task(NamedTuple):
    """A network and its rows: to fit, to test; the last layer's weights by pattern."""

    network: Callable[[], nn.Module]
    likelihood: Callable[[Tensor], Any]
    data: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    last: str


def mlp() -> nn.Module:
    """64-64-64-10."""
    hidden = nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(64, 10))


def cnn() -> nn.Module:
    """Two convolutions and a layer."""
    first = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)
    second = nn.Conv2d(8, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(64, 10))


def classes(logits: Tensor) -> Any:
    """Of each row's logits."""
    return dist.Categorical(logits=logits)


def mean_and_scale(outputs: Tensor) -> Any:
    """Of each row's two outputs."""
    return dist.Normal(outputs[:, 0], nn.functional.softplus(outputs[:, 1]) + 0.01)


def tasks(split: int) -> dict[str, Task]:
    """All of a split."""
    generator = torch.Generator().manual_seed(split)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    test, train = torch.randperm(len(x), generator=generator).split([360, 1437])
    rows = (x[train], y[train]), (x[test], y[test])
    found = {
        "digits, layers": Task(mlp, classes, *rows, "4.*"),
        "digits, convolutions": Task(cnn, classes, *rows, "8.*"),
    }
    for name in SETS:
        if not (DATA / "load.py").exists():
            print(f"{name}: no data in {DATA}; set PYRO_SCALE_DATA")
            continue
        x, y, x_test, y_test, _ = standardized(name, split)
        data, test_rows = (x, y), (x_test, y_test)

        def network(inputs: int = x.shape[1]) -> nn.Module:
            return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 2))

        found[name] = Task(network, mean_and_scale, data, test_rows, "2.*")
    return found


def scores(task: Task) -> dict[str, dict[str, float]]:
    """By structure: NLL of the test rows, log evidence a row."""
    found: dict[str, dict[str, float]] = {}
    for scale in SCALES:
        torch.manual_seed(0)
        net = task.network()
        bayesian = ps.bayesianize(net, prior=dist.Normal(0.0, scale))

        def model(x: Tensor, y: Tensor | None = None, net: Any = bayesian) -> Any:
            fn = task.likelihood(net(x))
            with pyro.plate("data", len(x)):
                return pyro.sample("y", fn, obs=y)

        lr = torchopt.schedule.polynomial_schedule(1e-2, 1e-4, 1.0, STEPS)
        mode = ps.MAP(model, optimizer=torchopt.adam(lr), compile=True)
        mode.run(task.data, num_steps=STEPS, batch_size=BATCH, seed=0, progress=False)
        weights = {name: value[0] for name, value in mode.get_samples().items()}
        fits = {
            "diag": ps.Laplace(model, structure="diag"),
            "kron": ps.Laplace(model, structure="kron"),
            "last layer": ps.Laplace(model, structure="dense", sites=[task.last]),
        }
        for name, fit in fits.items():
            fit.run(task.data, mode=mode, seed=0, progress=False)
            evidence = float(fit.log_marginal_likelihood()) / len(task.data[0])
            if evidence > found.get(name, {}).get("evidence", -math.inf):
                nll = _nll(task, fit)
                found[name] = {"nll": nll, "evidence": evidence, "scale": scale}
                if name == "kron":
                    found["MAP"] = {"nll": _plug_in(task, net, weights), "scale": scale}
                    peer = _laplace_torch(task, net, weights, scale)
                    if peer is not None:
                        found["kron"]["laplace-torch"] = peer
    return found


def _nll(task: Task, fit: Any) -> float:
    """Of linearized predictions: mean probabilities, or a normal of their mean and variance."""
    x, y = task.test
    how: dict[str, Any] = {"num_samples": DRAWS, "linearized": True}
    mean = fit.predict(x, reduce="mean", **how)["y"]
    if not y.is_floating_point():
        return -float(mean.clamp(min=1e-7).log().gather(1, y[:, None]).mean())
    variance = fit.predict(x, reduce="variance", **how)["y"].total
    return -float(dist.Normal(mean, variance.sqrt()).log_prob(y).mean())


def _plug_in(task: Task, net: nn.Module, weights: dict[str, Tensor]) -> float:
    with torch.no_grad():
        outputs = torch.func.functional_call(net, weights, task.test[0])
        return -float(task.likelihood(outputs).log_prob(task.test[1]).mean())


def _laplace_torch(
    task: Task, net: nn.Module, weights: dict[str, Tensor], scale: float
) -> float | None:
    """The evidence a row that laplace-torch's KronLaplace has at the same weights."""
    if task.likelihood is not classes:
        return None  # it has no such head
    try:
        import laplace
    except ImportError:
        return None
    at = copy.deepcopy(net)
    at.load_state_dict(weights)
    rows = torch.utils.data.TensorDataset(*task.data)
    found = laplace.KronLaplace(at, "classification", prior_precision=scale**-2)
    found.fit(torch.utils.data.DataLoader(rows, batch_size=len(rows)))
    return float(found.log_marginal_likelihood()) / len(rows)


def table(results: dict[str, list[dict[str, dict[str, float]]]]) -> str:
    """Means over splits, with standard errors."""
    lines = [
        "| | structure | NLL | log evidence a row | laplace-torch's |",
        "|---|---|---|---|---|",
    ]
    for task, splits in results.items():
        for name in ("MAP", "diag", "kron", "last layer"):
            columns = [
                _mean([split[name][key] for split in splits if key in split[name]])
                for key in ("nll", "evidence", "laplace-torch")
            ]
            lines.append(f"| {task} | {name} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.4f}" for value in values)
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.4f} ± {error:.4f}"


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=5)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    results: dict[str, list[dict[str, dict[str, float]]]] = {}
    for split in range(asked.splits):
        for name, task in tasks(split).items():
            results.setdefault(name, []).append(scores(task))
            RESULTS.write_text(json.dumps(results, indent=1))
            print(table(results), flush=True)


if __name__ == "__main__":
    main()
