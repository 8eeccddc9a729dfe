"""How accurate a million gradient rows are: `python benchmarks/accuracy/run.py`.

    --only NAME         only the posteriors whose name starts so
    --samplers A,B      of BAOA, SGHMC, SGLD, SGNHT, UBU, pSGLD; by default all that there are
    --seeds 3           runs of each
    --rows 1000000      gradient rows a run has: chains x steps x rows of a batch
    --full              seven seeds, and step sizes from 1e-5 to 100 instead of 1e-4 to 1

Every posterior is sampled with every step size of a grid of half decades, and with lr="auto" if
there is such a thing (whose passes through the data come on top of the budget); four chains, the
first quarter of the steps as warm-up, all else as a user finds it.  A run's error is the root mean
square, over the elements of the published parameters, of (mean - true mean) / true sd, and of
log(sd / true sd); the medians over seeds are reported.  A run with a chain that is no longer
finite has an infinite error.

Truth is `truth.json`, which `truth.py` made.  Writes `benchmarks/accuracy/results/`, a CSV of
all runs so far (a posterior's and sampler's are replaced when they are run again) and a table in
Markdown.  Posteriors whose data are missing are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from entry import Posterior, Tensors, elements
from posteriors import POSTERIORS

import pyro_scale as ps

SAMPLERS = ("BAOA", "SGHMC", "SGLD", "SGNHT", "UBU", "pSGLD")
CHAINS, MOST_DRAWS = 4, 1000
HERE = Path(__file__).parent
RESULTS = HERE / "results"
AUTO = "auto"


@dataclass(frozen=True)
class Run:
    """One run's outcome.

    Attributes:
        posterior: its name.
        sampler: its class's name.
        lr: a number as text, or "auto".
        seed: of the run.
        rows: its budget.
        used: the lr that "auto" arrived at, else lr itself.
        mean_error: RMSE of the means, in posterior sds.
        sd_error: RMSE of the sds' logarithms.
        inflation: what the library says minibatches multiplied the temperature by, at most.
        seconds: of the whole run, compilation included.
    """

    posterior: str
    sampler: str
    lr: str
    seed: int
    rows: int
    used: float
    mean_error: float
    sd_error: float
    inflation: float
    seconds: float

    @property
    def error(self) -> float:
        """The larger of both."""
        return max(self.mean_error, self.sd_error)


def grid(lowest: int, highest: int) -> list[str]:
    """Step sizes of half decades, 10^lowest to 10^highest."""
    return [f"{10 ** (k / 2):.2g}" for k in range(2 * lowest, 2 * highest + 1)]


def has_auto(sampler: str) -> bool:
    """Whether a sampler chooses its own step size."""
    try:
        getattr(ps, sampler)(lambda x: None, lr=AUTO)
    except (ps.errors.ArgumentError, TypeError):
        return False
    return True


def sample(
    posterior: Posterior, data: Tensors, sampler: str, lr: str, seed: int, rows: int
) -> tuple[Any, bool]:
    """(The sampler after its run, whether all chains stayed finite)."""
    batch = posterior.batch_size or len(data[0])
    steps = rows // (CHAINS * batch)
    warmup = steps // 4
    thinning = math.ceil((steps - warmup) / MOST_DRAWS)
    start = {
        site: value.expand(CHAINS, *value.shape) for site, value in posterior.start(data).items()
    }
    mcmc = getattr(ps, sampler)(
        posterior.model,
        lr=AUTO if lr == AUTO else float(lr),
        precondition=None,
        init_strategy=start,
    )
    try:
        mcmc.run(
            data,
            num_samples=(steps - warmup) // thinning,
            warmup_steps=warmup,
            thinning=thinning,
            num_chains=CHAINS,
            batch_size=posterior.batch_size,
            seed=seed,
            progress=False,
        )
    except ps.errors.NonFiniteError:
        return mcmc, False
    return mcmc, True


def measure(
    posterior: Posterior,
    data: Tensors,
    truth: dict[str, dict[str, float]],
    sampler: str,
    lr: str,
    seed: int,
    rows: int,
) -> Run:
    """One run, compared with the truth."""
    begin = perf_counter()
    mcmc, finite = sample(posterior, data, sampler, lr, seed, rows)
    seconds = perf_counter() - begin
    used, inflation = math.nan if lr == AUTO else float(lr), math.nan
    errors = (math.inf, math.inf)
    if finite:
        errors = errors_of(elements(mcmc.get_samples(group_by_chain=True), posterior.sites), truth)
        stats = mcmc.to_arviz(log_likelihood=False).sample_stats
        used = float(stats["lr"].to_numpy()[..., -1].mean())
        inflation = float(mcmc.diagnostics()["minibatch_heating"].max())
    return Run(posterior.name, sampler, lr, seed, rows, used, *errors, inflation, seconds)


def errors_of(
    found: dict[str, torch.Tensor], truth: dict[str, dict[str, float]]
) -> tuple[float, float]:
    """RMSE of the means in true sds, and of the logarithms of the sds."""
    means, sds = [], []
    for name, draws in found.items():
        true = truth[name]
        true_mean, true_sd = (true.get(f"exact_{m}", true[m]) for m in ("mean", "sd"))
        means.append(((float(draws.mean()) - true_mean) / true_sd) ** 2)
        sd = float(draws.std())
        sds.append(math.log(sd / true_sd) ** 2 if 0 < sd < math.inf else math.inf)
    pair = tuple(math.sqrt(sum(squares) / len(squares)) for squares in (means, sds))
    return tuple(math.inf if math.isnan(error) else error for error in pair)


# ---------------------------------------------------------------- report


def medians(runs: Iterable[Run]) -> tuple[float, float]:
    """Over seeds, of both errors."""
    runs = list(runs)
    return median(r.mean_error for r in runs), median(r.sd_error for r in runs)


def row(runs: list[Run]) -> str:
    """A posterior's and a sampler's row: the best lr of the grid, and "auto"."""
    by_lr: dict[str, list[Run]] = {}
    for run in runs:
        by_lr.setdefault(run.lr, []).append(run)
    automatic = by_lr.pop(AUTO, [])
    cells = [f"{sum(r.seconds for r in runs) / len(runs):.1f}"]
    if automatic:
        used = median(r.used for r in automatic)
        cells = [f"{used:.2g}", *(f"{e:.3f}" for e in medians(automatic)), *cells]
    else:
        cells = ["", "", "", *cells]
    if by_lr:
        best = min(by_lr, key=lambda lr: median(r.error for r in by_lr[lr]))
        errors = medians(by_lr[best])
        at_edge = "*" if best in (min(by_lr, key=float), max(by_lr, key=float)) else ""
        name = f"{best}{at_edge}" if max(errors) < math.inf else "none"
        cells = [name, *(f"{e:.3f}" for e in errors), *cells]
    else:
        cells = ["", "", "", *cells]
    return f"| {runs[0].posterior} | {runs[0].sampler} | {' | '.join(cells)} |"


def markdown(runs: list[Run], rows: int) -> str:
    """The table of all runs of this budget."""
    runs = [run for run in runs if run.rows == rows]
    seeds = len({run.seed for run in runs})
    lines = [
        "# Error in posterior sds at "
        f"{rows / 1e6:g} million gradient-row evaluations, median of {seeds} seeds",
        "",
        "Mean: RMSE of (mean - true mean) / true sd.  Sd: RMSE of log(sd / true sd).  Best: the lr",
        "of the grid whose larger error is least; * at an end of the grid.  s: seconds a run.",
        "",
        "| posterior | sampler | best lr | mean | sd | auto chose | mean | sd | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.posterior, run.sampler), []).append(run)
    return "\n".join([*lines, *(row(group) for group in groups.values()), ""])


def earlier() -> list[Run]:
    """The runs of the CSV."""
    path = RESULTS / "runs.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        types = {"posterior": str, "sampler": str, "lr": str, "seed": int, "rows": int}
        return [
            Run(**{name: types.get(name, float)(value) for name, value in line.items()})
            for line in csv.DictReader(file)
        ]


def write(runs: list[Run], rows: int) -> None:
    """The CSV and the table of this budget."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Run)])
        writer.writeheader()
        writer.writerows(asdict(run) for run in runs)
    (RESULTS / "accuracy.md").write_text(markdown(runs, rows))


def main() -> None:
    """Runs what is asked for; results are written after each posterior and sampler."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args()
    seeds = arguments.seeds or (7 if arguments.full else 3)
    lrs = grid(-5, 2) if arguments.full else grid(-4, 0)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of short warm-ups: errors say the same
    truth = json.loads((HERE / "truth.json").read_text())
    runs, posteriors = earlier(), [p.name for p in POSTERIORS]
    for posterior in POSTERIORS:
        data = posterior.load() if posterior.name.startswith(arguments.only) else None
        if data is None:
            continue
        known = truth[posterior.name]["elements"]
        for sampler in arguments.samplers.split(","):
            if not hasattr(ps, sampler):
                continue
            found = [
                measure(posterior, data, known, sampler, lr, seed, arguments.rows)
                for lr in [*lrs, *([AUTO] if has_auto(sampler) else [])]
                for seed in range(seeds)
            ]
            ours = (posterior.name, sampler, arguments.rows)
            runs = [run for run in runs if (run.posterior, run.sampler, run.rows) != ours] + found
            runs.sort(key=lambda run: (posteriors.index(run.posterior), run.sampler))
            write(runs, arguments.rows)
            print(row(found), flush=True)
    print(f"\n{markdown(runs, arguments.rows)}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
