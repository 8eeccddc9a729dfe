"""What `ps.sample` predicts and chooses, against what both methods take:
`python benchmarks/accuracy/sample.py [NAME ...]`, or of all `jobs/`.

NUTS and BAOA sample a job with nothing set, each in a process of its own, on one thread, after a
short run that compiles.  A process that takes more than `LIMIT` CPU seconds is cut.  Better is the
method with fewer CPU seconds to 400 effective draws: where draws take `d` of `s` seconds (warm-up
of NUTS apart) and `n` are effective, these are `s - d + 400 d / n`.  Writes `results/sample.md` and
`results/sample.json`, from which a later call goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from jobs import JOBS
from jobs.job import Job

import pyro_scale as ps
from pyro_scale.data.open import open_data
from pyro_scale.infer import sample
from pyro_scale.kernels import Hyperparameters
from pyro_scale.run.problem import as_log_posterior, prepare
from pyro_scale.tuning.costs import TYPICAL, Costs

RESULTS = Path(__file__).parent / "results"
METHODS = {"NUTS": ps.NUTS, "BAOA": ps.BAOA}
LIMIT, ENOUGH = 200, 400
HOW: dict[str, Any] = {"num_samples": 1000, "num_chains": 4, "seed": 0}
HEAD = "| job | chosen | better | good | rates, s | printed, s |" + 2 * " CPU s | s | to 400 |"


def costs_of(job: Job) -> Costs:
    """The predictions of fixed rates."""
    opened = open_data(job.load(), None, None, None)
    log_posterior = as_log_posterior(job.model, opened.num_data)
    problem = prepare(log_posterior, opened, Hyperparameters(), None, 1, 0)
    return Costs(problem, HOW["num_samples"], HOW["num_chains"])


def take(job: Job, name: str) -> dict[str, float]:
    """Seconds of a run by a method, to enough effective draws, and as `ps.sample` prints them."""
    method, data = METHODS[name](job.model), job.load()
    short = {"max_seconds": 20.0} if name == "BAOA" else {"warmup_steps": 20}
    with contextlib.suppress(ps.errors.PyroScaleError):  # too little time
        method.run(data, num_samples=20, seed=1, progress=False, **short)
    is_nuts = isinstance(method, ps.NUTS)
    printed = sample._timed(method, data, **HOW) if is_nuts else math.nan
    wall, cpu = time.perf_counter(), time.process_time()
    method.run(data, progress=False, **HOW)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    draws = method.posterior.draws
    share, kept = draws.attrs["sampling_time"] / wall, draws.positions.shape[1]
    share *= kept / (TYPICAL.nuts_warmup + kept) if is_nuts else 1
    ess = float(method.summary()[["ess_bulk", "ess_tail"]].min().min())
    enough = cpu * (1 - share + share * ENOUGH / ess)
    return {"printed": printed, "wall": wall, "cpu": cpu, "ess": ess, "cpu_to_enough": enough}


def take_apart(job: Job, name: str) -> dict[str, float]:
    """`take` in a process of its own; an infinite time where that was cut."""
    call = [sys.executable, __file__, "--take", job.name, name]
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=False)
    cut = dict.fromkeys(("printed", "wall", "cpu", "ess"), math.nan) | {"cpu_to_enough": math.inf}
    return cut if done.returncode else json.loads(done.stdout.splitlines()[-1])


def page(known: dict[str, dict[str, float]]) -> str:
    """The counts, and a row a job."""
    rows, fixed, printed, are_good = list[str](), list[float](), list[float](), list[bool]()
    for job in JOBS:
        if any(f"{job.name} {name}" not in known for name in METHODS):
            continue
        runs, costs = {name: known[f"{job.name} {name}"] for name in METHODS}, costs_of(job)
        chosen = sample._choose(costs.problem, costs, 60.0)[0].__name__
        enough = {name: run["cpu_to_enough"] for name, run in runs.items()}
        better = min(METHODS, key=enough.__getitem__)
        are_good.append(enough[chosen] <= 1.5 * enough[better])
        cells = [job.name[5:], chosen, better, "yes" if are_good[-1] else "no"]
        nuts = runs["NUTS"]
        fixed.append(costs.nuts / nuts["cpu"])
        printed.append(nuts["printed"] / nuts["wall"])
        cells += [f"{number:.2g}" for number in (costs.nuts, nuts["printed"])]
        for run in runs.values():
            cells += [f"{run[key]:.2g}" for key in ("cpu", "wall", "cpu_to_enough")]
        rows.append(f"| {' | '.join(cells)} |")
    lines = [f"Within 1.5 of the better: {sum(are_good)} of {len(are_good)}.", ""]
    for what, ratios in (
        ("Rates of NUTS over CPU", fixed),
        ("Printed for NUTS over taken", printed),
    ):
        ratios = [ratio for ratio in ratios if not math.isnan(ratio)]
        inside = sum(0.5 <= ratio <= 2 for ratio in ratios)
        median = statistics.median(ratios or [math.nan])
        lines += [f"{what}: median {median:.2f}, {inside} of {len(ratios)} in 1/2 to 2.", ""]
    return "\n".join(["# `ps.sample`", "", *lines, HEAD, "|---" * 12 + "|", *rows, ""])


def main(names: list[str]) -> None:
    """Runs the jobs that are asked for, or one of them if another call says so."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    by_name = {job.name: job for job in JOBS}
    if names[:1] == ["--take"]:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
        print(json.dumps(take(by_name[names[1]], names[2])))
        return
    path = RESULTS / "sample.json"
    RESULTS.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    for name in [f"jobs/{name}" for name in names] or by_name:
        for method in METHODS:
            if (key := f"{name} {method}") not in known:
                known[key] = take_apart(by_name[name], method)
                path.write_text(json.dumps(known, indent=1) + "\n")
                print(key, known[key], flush=True)
    (RESULTS / "sample.md").write_text(page(known))


if __name__ == "__main__":
    main(sys.argv[1:])
