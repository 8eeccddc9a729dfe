"""The jobs' true moments: `PYTHONPATH=benchmarks/accuracy python -m jobs.truth`, once.

    --only NAME     only the jobs whose name starts so
    --draws 1000    a chain, of four, in each of two runs; 2,500 effective ones are aimed at
    --again         jobs that have a good entry, too: it is replaced

NUTS runs twice on all rows in float64: with a diagonal and with a low-rank mass matrix, from other
seeds.  Their density is compared with Pyro's at random points, constants included.  Where both
runs agree within four standard errors at every element, R-hat of all chains is below 1.01 and the
standard error of every mean is below .02 sds, `truth.json` gets the moments of all eight chains:
of each element its mean, sd, the mean's standard error and effective draws.  Long sites have twelve
elements, evenly spaced.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from entry import Posterior, Tensors, elements
from pyro.infer.mcmc.util import initialize_model
from torch import Tensor
from truth import moments

import pyro_scale as ps
from jobs import JOBS

TRUTH = Path(__file__).parent / "truth.json"
#: Elements of a site; what a reference has to reach: both runs' difference in standard errors, the
#: mean's standard error in sds, and R-hat.
MOST_ELEMENTS, MOST_DIFFERENCE, MOST_ERROR, MOST_R_HAT = 12, 4.0, 0.02, 1.01
RUNS = {"diag": 101, "low_rank": 202}


def check_density(posterior: Posterior, data: Tensors) -> None:
    """Compares the density that NUTS runs on with Pyro's, at three random points."""
    ours = ps.LogPosterior(posterior.model, num_data=len(data[0]))
    for seed in range(3):
        pyro.set_rng_seed(seed)
        free, potential, _, _ = initialize_model(posterior.model, data)
        theirs = -float(potential(free))
        found = float(ours(free, data).log_joint)
        assert math.isclose(found, theirs, rel_tol=1e-9, abs_tol=1e-6), (found, theirs)


def compared(values: dict[str, Tensor], sites: tuple[str, ...]) -> dict[str, np.ndarray]:
    """At most twelve elements of each site that are not constant, `[chains, draws]`."""
    chosen = {}
    for site in sites:
        found = elements(values, (site,))
        varying = [name for name, draws in found.items() if float(draws.std()) > 0]
        step = math.ceil(len(varying) / MOST_ELEMENTS)
        chosen |= {name: found[name].numpy() for name in varying[::step]}
    return chosen


def reference(posterior: Posterior, data: Tensors, draws: int) -> dict[str, Any]:
    """A job's entry of `truth.json`, and what `is_good` asks for."""
    check_density(posterior, data)
    begin, divergences, runs = time.process_time(), [], []
    start = {name: value.expand(4, *value.shape) for name, value in posterior.start(data).items()}
    for mass, seed in RUNS.items():
        nuts = ps.NUTS(posterior.model, mass=mass, target_accept=0.95, init_strategy=start or None)
        nuts.run(data, num_samples=draws, seed=seed, progress=False)
        divergences.append(int(nuts.posterior.draws.sample_stats["diverging"].sum()))
        runs.append(compared(nuts.get_samples(group_by_chain=True), posterior.sites))
    first, second = ({name: moments(each[name]) for name in runs[0]} for each in runs)
    both = {name: moments(np.concatenate([each[name] for each in runs])) for name in runs[0]}
    difference = max(
        abs(first[name][what] - second[name][what])
        / math.hypot(first[name][error], second[name][error])
        for name in both
        for what, error in (("mean", "mcse"), ("sd", "sd_mcse"))
    )
    return {
        "draws": draws,
        "divergences": divergences,
        "difference": round(difference, 2),
        "r_hat": round(max(each["r_hat"] for each in both.values()), 4),
        "seconds": round(time.process_time() - begin, 1),
        "elements": {
            name: {what: float(f"{each[what]:.6g}") for what in ("mean", "sd", "mcse", "ess")}
            for name, each in both.items()
        },
    }


def is_good(entry: dict[str, Any]) -> bool:
    """Whether both runs agree, and are long enough."""
    error = max(each["mcse"] / each["sd"] for each in entry["elements"].values())
    right = entry["difference"] < MOST_DIFFERENCE and entry["r_hat"] < MOST_R_HAT
    return right and error < MOST_ERROR


def text(known: dict[str, Any]) -> str:
    """The file: a line an element."""
    lines = []
    for name, entry in sorted(known.items()):
        rest = json.dumps({key: value for key, value in entry.items() if key != "elements"})
        rows = [f"  {json.dumps(key)}: {json.dumps(m)}" for key, m in entry["elements"].items()]
        lines.append(f' "{name}": {rest[:-1]}, "elements": {{\n' + ",\n".join(rows) + "}}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Runs what is asked for and updates the file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for posterior in JOBS:
        known = json.loads(TRUTH.read_text()) if TRUTH.exists() else {}
        is_known = (
            posterior.name in known and is_good(known[posterior.name]) and not arguments.again
        )
        if is_known or not posterior.name.startswith(arguments.only):
            continue
        entry = reference(posterior, posterior.load(), arguments.draws)
        facts = {key: value for key, value in entry.items() if key != "elements"}
        least = min(each["ess"] for each in entry["elements"].values())
        print(posterior.name, facts, f"least ess {least:.0f}, {is_good(entry)}", flush=True)
        if is_good(entry):
            known = json.loads(TRUTH.read_text()) if TRUTH.exists() else {}
            TRUTH.write_text(text(known | {posterior.name: entry}))


if __name__ == "__main__":
    main()
