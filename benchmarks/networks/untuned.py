"""Networks with nothing to tune, beside the tuned ones: `ps.BAOA(model).run((x, y), seed=0)`.

    python benchmarks/networks/untuned.py [--sets boston yacht] [--splits 20]

The models and splits are those of `digits.py` (prior Normal(0, 1)) and `uci.py` (with the priors
and likelihoods that were chosen there); starts, step size, lengths and batches are the library's
choice.  Writes results/untuned.json after each split, goes on where it stopped, and prints a table
of paired differences.  It takes about an hour of one core.
"""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import digits
import torch
import uci

import pyro_scale as ps

FILE = uci.RESULTS / "untuned.json"
#: Of digits' tuned row, and how many splits there are.
TUNED, SPLITS = "BAOA, T = 1, prior Normal(0, 1)", 10


def on_digits(noise: str, seed: int) -> dict[str, Any]:
    """Scores of the test rows of one split."""
    split = digits.split_of(seed, digits.NOISES[noise])
    torch.manual_seed(seed)
    begun = time.perf_counter()
    mcmc = ps.BAOA(digits.bayesian(1.0)).run((split.x, split.y), seed=0, progress=False)
    seconds = time.perf_counter() - begun
    probs = mcmc.predict(split.x_test, reduce="mean")["y"]
    scores = digits.score(probs[None], split.y_test)
    return {**scores, "seconds": seconds, "verdict": mcmc.report().verdict}


def on_uci(name: str, seed: int) -> dict[str, Any]:
    """The same of a regression."""
    rows = uci.standardized(name, seed)
    torch.manual_seed(seed)
    model, _ = uci.model_of(rows[0].shape[1], uci.SAMPLING[name].floor, uci.chosen(name))
    begun = time.perf_counter()
    mcmc = ps.BAOA(model).run(rows[:2], seed=0, progress=False)
    seconds = time.perf_counter() - begun
    rmse, ll = uci.scores_of(mcmc, rows)
    return {"rmse": rmse, "ll": ll, "seconds": seconds, "verdict": mcmc.report().verdict}


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """A row a score: ours, tuned, their paired difference."""
    lines = ["| | score | splits | untuned | tuned | untuned - tuned, paired |", "|---" * 6 + "|"]
    tuned_digits, tuned_uci = json.loads(digits.RESULTS.read_text()), uci.read("uci")
    for name, splits in results.items():
        if not splits:
            continue
        if name in tuned_digits:
            tuned, kinds = [each[TUNED] for each in tuned_digits[name]], ["nll", "accuracy"]
        else:
            tuned, kinds = list(tuned_uci[name]["splits"].values()), ["rmse", "ll"]
        for kind in kinds:
            ours = [each[kind] for each in splits]
            theirs = [each[kind] for each in tuned[: len(ours)]]
            pairs = [one - other for one, other in zip(ours, theirs, strict=True)]
            columns = [uci.mean_and_error(each) for each in (ours, theirs, pairs)]
            cells = [f"{mean:.4f}" + f" ± {error:.4f}" * (len(ours) > 1) for mean, error in columns]
            lines.append(f"| {name} | {kind} | {len(ours)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the splits that are missing, and prints the table."""
    asked = uci.arguments(__doc__)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    there = FILE.exists() and not asked.fresh
    results: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text()) if there else {}
    runs = {noise: (on_digits, min(SPLITS, asked.splits)) for noise in digits.NOISES}
    if (uci.DATA / "load.py").exists():
        runs |= dict.fromkeys(asked.sets, (on_uci, asked.splits))
    else:
        print(f"uci: skipped, no data: {uci.DATA} has no load.py; set PYRO_SCALE_DATA")
    for seed in range(asked.splits):
        for name, (run, most) in runs.items():
            done = results.setdefault(name, [])
            if seed < most and len(done) == seed:
                done.append(run(name, seed))
                print(name, seed, done[-1], flush=True)
                FILE.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
