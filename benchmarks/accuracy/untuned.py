"""Whether a run with nothing set is right, and knows it: `python benchmarks/accuracy/untuned.py`.

    --only NAME      only the posteriors whose name starts so
    --seeds 3        runs of each
    --batches        batches of N/10, of posteriors whose rows stand alone and are 100 or more

`ps.BAOA(model).run(data, seed=seed)` on posteriordb's posteriors, from the library's own starts.
Right is every element of the published parameters within 0.1 sd in its mean and 5% in its sd, plus
three standard errors of the run's and of the reference.  Silently wrong is a run that is beyond
0.25 sd or 25% and whose verdict is yes.  Writes `results/untuned.md` (`untuned_batches.md`).
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from entry import Posterior
from judge import FAR_MEAN, FAR_SD, NOTHING, judge, truth_of
from more import EVERYTHING

import pyro_scale as ps

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Outcome:
    """Of one run.

    Attributes:
        posterior: its name.
        seed: of the run.
        mean: the largest error of a mean, in posterior sds.
        sd: the largest of an sd, in itself.
        is_right: whether all are within the tolerance.
        verdict: of the run; `"raised"` where it raised.
        rows: gradients of rows over N, of all chains together.
        seconds: of the run, compilation included.
        told: the report's first line, or the error.
    """

    posterior: str
    seed: int
    mean: float
    sd: float
    is_right: bool
    verdict: str
    rows: float
    seconds: float
    told: str

    @property
    def is_silently_wrong(self) -> bool:
        """Whether it is far off, and says that it is right."""
        return self.verdict == "yes" and (self.mean > FAR_MEAN or self.sd > FAR_SD)


def run(posterior: Posterior, truth: Mapping[str, Any], seed: int, in_batches: bool) -> Outcome:
    """One run with nothing set."""
    data = posterior.load()
    assert data is not None
    size = {"batch_size": len(data[0]) // 10} if in_batches else {}
    begin = time.perf_counter()
    try:
        mcmc = ps.BAOA(posterior.model).run(data, seed=seed, progress=False, **size)
    except ps.errors.PyroScaleError as error:
        seconds = time.perf_counter() - begin
        return Outcome(posterior.name, seed, *NOTHING, "raised", 0, seconds, str(error))
    seconds, attrs, report = time.perf_counter() - begin, mcmc.posterior.draws.attrs, mcmc.report()
    steps = attrs["warmup_steps"] + attrs["num_samples"] * attrs["thinning"]
    rows = 4 * steps * (2 * size["batch_size"] / len(data[0]) if size else 1)
    errors = judge(mcmc.get_samples(group_by_chain=True), posterior.sites, truth)
    kind = report.verdict
    return Outcome(posterior.name, seed, *errors, kind, rows, seconds, report.headline)


def table(outcomes: list[Outcome], title: str) -> str:
    """The page: sums, then a row a run."""
    count = len(outcomes)
    right = [o for o in outcomes if o.is_right]
    refused = [o for o in right if o.verdict != "yes"]
    silent = [o for o in outcomes if o.is_silently_wrong]
    passed = [o for o in outcomes if not o.is_right and o.verdict == "yes"]
    lines = [
        f"# {title}",
        "",
        f"Right: {len(right)} of {count}. Right, and not known to be: {len(refused)}. Outside of "
        f"the tolerance with a yes: {len(passed)}; far outside: {len(silent)}.",
        "",
        "Rows are gradients over N, of four chains, warm-up and pilots included.",
        "",
        "| posterior | seed | worst mean, sds | worst sd | right | verdict | rows / N | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {o.posterior} | {o.seed} | {o.mean:.3f} | {100 * o.sd:.1f}% | "
        f"{'yes' if o.is_right else 'no'} | {o.verdict} | {o.rows:,.0f} | {o.seconds:.1f} |"
        for o in outcomes
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", action="store_true")
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    known, outcomes = json.loads((HERE / "truth.json").read_text()), []
    for posterior in EVERYTHING:
        data = posterior.load() if posterior.name.startswith(arguments.only) else None
        if data is None:
            continue
        if arguments.batches and (posterior.batch_size is None or len(data[0]) < 100):
            continue
        truth = truth_of(posterior, data, known)
        for seed in range(arguments.seeds):
            outcomes.append(run(posterior, truth, seed, arguments.batches))
            print(outcomes[-1], flush=True)
    name = "untuned_batches" if arguments.batches else "untuned"
    title = f"Nothing set{', batches of N/10' if arguments.batches else ''}"
    page = table(outcomes, title)
    if not arguments.only:
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / f"{name}.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
