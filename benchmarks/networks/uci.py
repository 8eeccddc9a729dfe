"""Bayesian networks on UCI regressions, 20 standard splits: RMSE and log predictive density.

A network of two hidden layers of 32 ReLU has two outputs, a row's mean and scale; all weights have
a normal prior of sd `spread`/sqrt(fan in), and a row has a normal distribution or a Student t of 4
degrees of freedom.  Eight chains start at points that Adam finds in 2,000 steps of minibatches and
run `ps.BAOA` on full batches (N is 277 to 1,439).  Inputs and outputs are standardized on the
training rows, scores are in the output's unit:

- RMSE, of the predictive mean;
- LL, a test row's log predictive density, the mean over draws of its density, in nats.

Spread and likelihood are chosen for each set on validation rows, a fifth of the training rows of
the first five splits: of those whose RMSE is within a standard error (of paired differences) of
the least, the one with the largest LL.

The data are those of Gal and Ghahramani (2016), in $PYRO_SCALE_DATA (../shared/data by default),
where a file load.py reads them.  Beside ours: MC dropout's published figures (Mukhoti et al. 2018,
trained to convergence), and sklearn-contrib-bde on the same splits, where `uci_bde.py` was run.

    OMP_NUM_THREADS=1 python benchmarks/networks/uci.py [--sets boston yacht] [--splits 20]

Writes results/uci_validation.json and results/uci.json, where what is there is not run again
(`--fresh` does), and prints tables.  It takes about an hour of one core.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
import torchopt
from torch import Tensor, nn

import pyro_scale as ps

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DATA = Path(os.environ.get("PYRO_SCALE_DATA", HERE.parents[2] / "shared" / "data"))

#: MC dropout's published RMSE and LL: means over the splits, with their standard errors.
PUBLISHED = {
    "boston": ((2.90, 0.18), (-2.40, 0.04)),
    "concrete": ((4.82, 0.16), (-2.93, 0.02)),
    "energy": ((0.54, 0.06), (-1.21, 0.01)),
    "wine_red": ((0.62, 0.01), (-0.93, 0.01)),
    "yacht": ((0.67, 0.05), (-1.25, 0.01)),
}


class Sampling(NamedTuple):
    """What pilot runs on validation rows of the first splits fixed.

    Args:
        lr: of the sampler, of weights in units of 1/sqrt(fan in), of biases in units of 1/2.
        steps: of the sampler; a quarter of them is warm-up.
        floor: of a row's scale, in sds of the training rows' output.
    """

    lr: float
    steps: int
    floor: float = 0.01


class Choice(NamedTuple):
    """What is chosen on validation rows.

    Args:
        spread: a weight's prior sd, in units of 1/sqrt(fan in).
        freedom: degrees of freedom of a row's Student t; None is the normal distribution.
    """

    spread: float
    freedom: float | None


SAMPLING = {
    "boston": Sampling(lr=0.03, steps=4000),
    "concrete": Sampling(lr=0.03, steps=4000),
    "energy": Sampling(lr=0.008, steps=5000),
    "wine_red": Sampling(lr=0.02, steps=2500),
    "yacht": Sampling(lr=0.0025, steps=6000, floor=0.001),
}
GRID = [Choice(spread, freedom) for spread in (0.5, 1.0, 2.0, 4.0) for freedom in (4.0, None)]
CHOOSING = 5  # splits whose validation rows choose
CHAINS, DRAWS, OPTIMIzER_STEPS, WIDTH = 8, 50, 2000, 32

Rows = tuple[Tensor, Tensor, Tensor, Tensor, float]
Scores = dict[str, float]


def model_of(
    num_inputs: int, floor: float, choice: Choice
) -> tuple[Callable[..., Tensor], dict[str, float]]:
    """(The network as a Pyro model, the unit of each weight's prior sd)."""
    net = nn.Sequential(
        nn.Linear(num_inputs, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 2),
    )
    units, scales = {}, {}
    for name, weight in net.named_parameters():
        matrix = weight.dim() == 2
        units[name] = weight.shape[1] ** -0.5 if matrix else 0.5
        scales[name] = choice.spread * units[name] if matrix else 1.0
    net = ps.bayesianize(net, prior=lambda name, weight: dist.Normal(0.0, scales[name]))

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        mean, scale = net(x).unbind(-1)
        scale = floor + nn.functional.softplus(scale)
        df = choice.freedom
        of_row = dist.StudentT(df, mean, scale) if df else dist.Normal(mean, scale)
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", of_row, obs=y)

    return model, units


def scores_of(method: Any, rows: Rows) -> tuple[float, float]:
    """RMSE and LL of the test rows, in the output's unit."""
    _, _, x_test, y_test, unit = rows
    log_lik = method.log_likelihood((x_test, y_test))["y"]
    mean = method.predict(x_test, reduce="mean")["y"]
    density = ps.metrics.log_predictive_density(log_lik).mean()
    return float(ps.metrics.rmse(mean, y_test)) * unit, float(density) - math.log(unit)


def fit(rows: Rows, sampling: Sampling, choice: Choice, seed: int) -> Scores:
    """The scores of one split, and what they cost."""
    x, y = rows[:2]
    torch.manual_seed(seed)
    model, units = model_of(x.shape[1], sampling.floor, choice)
    begun, cpu = time.perf_counter(), time.process_time()
    common: Any = {"num_chains": CHAINS, "seed": seed, "progress": False}
    start = ps.MAP(model, optimizer=torchopt.adam(0.01), compile=True)
    start.run((x, y), num_steps=OPTIMIzER_STEPS, batch_size=100, **common)
    mass = {name: unit**-2 for name, unit in units.items()}
    mcmc = ps.BAOA(
        model, lr=sampling.lr, friction=0.05, mass=mass, init_strategy=start, compile=True
    )
    warmup = sampling.steps // 4
    thinning = (sampling.steps - warmup) // DRAWS
    mcmc.run((x, y), num_samples=DRAWS, warmup_steps=warmup, thinning=thinning, **common)

    rmse, ll = scores_of(mcmc, rows)
    cost = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - cpu}
    ensemble = dict(zip(("ensemble_rmse", "ensemble_ll"), scores_of(start, rows), strict=True))
    return {"rmse": rmse, "ll": ll, **cost, **ensemble}


# ------------------------------------------------------------------ data


def standardized(name: str, split: int, validation: bool = False) -> Rows:
    """Training and test rows of a split, in sds of the training rows; y's sd in its own unit.

    With `validation` a random fifth of the training rows stands for the test rows, which are
    left out.
    """
    spec = importlib.util.spec_from_file_location("load", DATA / "load.py")
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    x, y, x_test, y_test = (torch.tensor(a) for a in loader.load_uci(name, split))
    if validation:
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(split))
        held, kept = order[: len(y) // 5], order[len(y) // 5 :]
        x, y, x_test, y_test = x[kept], y[kept], x[held], y[held]
    means, sds, mean, sd = x.mean(0), x.std(0), y.mean(), y.std()
    scaled = (x - means) / sds, (y - mean) / sd, (x_test - means) / sds, (y_test - mean) / sd
    x, y, x_test, y_test = (a.float() for a in scaled)
    return x, y, x_test, y_test, float(sd)


# ------------------------------------------------------------------ results


def arguments(doc: str | None) -> argparse.Namespace:
    """What both scripts take."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", nargs="+", default=list(PUBLISHED), choices=list(PUBLISHED))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--fresh", action="store_true", help="run again what there is")
    return parser.parse_args()


def read(part: str) -> dict[str, Any]:
    """What was run of a part: for each name its settings and its scores by split."""
    file = RESULTS / f"{part}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def record(
    part: str,
    splits: int,
    settings: dict[str, Any],
    fit: Callable[[str, int], Scores],
    fresh: bool = False,
) -> None:
    """Runs the splits that a part's file does not have yet, and writes each when it is done."""
    results = read(part)
    for name, of_name in settings.items():
        if fresh or results.get(name, {}).get("settings") != of_name:
            results[name] = {"settings": of_name, "splits": {}}
    for split in range(splits):
        for name in settings:
            if str(split) not in results[name]["splits"]:
                results[name]["splits"][str(split)] = scores = fit(name, split)
                RESULTS.mkdir(exist_ok=True)
                (RESULTS / f"{part}.json").write_text(json.dumps(results, indent=1) + "\n")
                cells = ", ".join(f"{key} {value:.3f}" for key, value in scores.items())
                print(f"{part}: {name} {split}: {cells}", flush=True)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean over splits and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def likelihood(choice: Choice) -> str:
    """Its name in tables."""
    return f"t({choice.freedom:g})" if choice.freedom else "normal"


def trial(name: str, choice: Choice) -> str:
    """A set with a choice, as the results have it."""
    return f"{name}, spread {choice.spread:g}, {likelihood(choice)}"


def chosen(name: str) -> Choice:
    """The largest LL of those whose RMSE is within a standard error of the least."""
    results = read("uci_validation")

    def column(choice: Choice, score: str) -> list[float]:
        return [scores[score] for scores in results[trial(name, choice)]["splits"].values()]

    least = min(GRID, key=lambda choice: statistics.fmean(column(choice, "rmse")))
    near = [least]
    for choice in GRID:
        pairs = zip(column(choice, "rmse"), column(least, "rmse"), strict=True)
        behind, error = mean_and_error([one - other for one, other in pairs])
        near += [choice] if behind <= error else []
    return max(near, key=lambda choice: statistics.fmean(column(choice, "ll")))


def trials(names: Sequence[str]) -> str:
    """All validation scores in Markdown; what was chosen is bold."""
    lines = ["| set | prior sd x sqrt(fan in) | likelihood | RMSE | LL |", "|---" * 5 + "|"]
    for name in names:
        best = chosen(name)
        for choice in GRID:
            splits = read("uci_validation")[trial(name, choice)]["splits"].values()
            rmse, ll = (
                "{:.3f} ± {:.3f}".format(*mean_and_error([scores[score] for scores in splits]))
                for score in ("rmse", "ll")
            )
            title = f"**{name}**" if choice == best else name
            cells = [title, f"{choice.spread:g}", likelihood(choice), rmse, ll]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(names: Sequence[str]) -> str:
    """Scores on test rows in Markdown; `sds` are standard errors by which ours are better (+)."""
    lines = ["| set | score | splits | ours | MC dropout | sds | bde | ours - bde, paired | sds |"]
    lines += ["|---" * 9 + "|"]
    of_ours, of_peer = read("uci"), read("uci_bde")
    for name in names:
        ours = of_ours[name]["splits"]
        peer = of_peer.get(name, {"splits": {}})["splits"]
        for score, (published, error), sign in zip(
            ("rmse", "ll"), PUBLISHED[name], (-1, 1), strict=True
        ):
            mean, own = mean_and_error([scores[score] for scores in ours.values()])
            cells = [name, score, f"{len(ours)}", f"{mean:.3f} ± {own:.3f}"]
            cells += [f"{published:.2f} ± {error:.2f}", f"{sign * (mean - published) / own:+.1f}"]
            both = [split for split in ours if split in peer]
            if both:
                theirs, other = mean_and_error([peer[split][score] for split in both])
                pairs = [ours[split][score] - peer[split][score] for split in both]
                gap, spread = mean_and_error(pairs)
                cells.append(f"{theirs:.3f} ± {other:.3f} ({len(both)} splits)")
                cells += [f"{gap:+.3f} ± {spread:.3f}", f"{sign * gap / spread:+.1f}"]
            else:
                cells += ["", "", ""]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Chooses, runs what is asked for and prints the tables."""
    asked = arguments(__doc__)
    if not (DATA / "load.py").exists():
        print(f"uci: skipped, no data: {DATA} has no load.py; set PYRO_SCALE_DATA")
        return
    warnings.simplefilter("ignore")
    cells = {trial(name, choice): (name, choice) for name in asked.sets for choice in GRID}

    def settings(name: str, choice: Choice) -> dict[str, float | None]:
        return SAMPLING[name]._asdict() | choice._asdict()

    def validate(cell: str, split: int) -> Scores:
        name, choice = cells[cell]
        return fit(standardized(name, split, validation=True), SAMPLING[name], choice, split)

    tried = {cell: settings(*what) for cell, what in cells.items()}
    record("uci_validation", CHOOSING, tried, validate, asked.fresh)
    choices = {name: chosen(name) for name in asked.sets}

    def test(name: str, split: int) -> Scores:
        return fit(standardized(name, split), SAMPLING[name], choices[name], split)

    final = {name: settings(name, choice) for name, choice in choices.items()}
    record("uci", asked.splits, final, test, asked.fresh)
    print(f"\nValidation rows\n\n{trials(asked.sets)}\n\nTest rows\n\n{table(asked.sets)}")


if __name__ == "__main__":
    main()
