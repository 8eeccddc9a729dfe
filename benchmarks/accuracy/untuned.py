"""Whether a run with nothing set is right, and knows it: `python benchmarks/accuracy/untuned.py`.

    --only NAME      only the posteriors whose name starts so
    --seeds 3        runs of each
    --batches        batches of N/10, of posteriors whose rows stand alone and are 100 or more
    --again          runs that are stored, too: their outcomes are replaced

`ps.BAOA(model).run(data, seed=seed)` on posteriordb's posteriors and on those of `jobs/` (whose
names start with `jobs/`), from the library's own starts.
Right is every element of the published parameters within 0.1 sd in its mean and 5% in its sd, plus
three standard errors of the run's and of the reference.  Silently wrong is a run that is beyond
0.25 sd or 25% and whose verdict is yes.  Outcomes are stored after each run, in
`results/untuned.json` (`untuned_batches.json`), and a later call goes on from them; the page is
`results/untuned.md` (`untuned_batches.md`).
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from entry import Posterior
from judge import FAR_MEAN, FAR_SD, NOTHING, judge, stored_truth, truth_of
from more import EVERYTHING

import pyro_scale as ps

RESULTS = Path(__file__).parent / "results"


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
        seconds: of processors, compilation included.
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


def processor_seconds() -> float:
    """Of this process and of the compilers that it has started."""
    return sum(os.times()[:4])


def run(posterior: Posterior, truth: Mapping[str, Any], seed: int, in_batches: bool) -> Outcome:
    """One run with nothing set."""
    data = posterior.load()
    assert data is not None
    size = {"batch_size": len(data[0]) // 10} if in_batches else {}
    begin = processor_seconds()
    try:
        mcmc = ps.BAOA(posterior.model).run(data, seed=seed, progress=False, **size)
    except ps.errors.PyroScaleError as error:
        seconds = processor_seconds() - begin
        return Outcome(posterior.name, seed, *NOTHING, "raised", 0, seconds, str(error))
    seconds = processor_seconds() - begin
    attrs, report = mcmc.posterior.draws.attrs, mcmc.report()
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


def stored(path: Path) -> dict[tuple[str, int], Outcome]:
    """Outcomes of earlier calls, by posterior and seed."""
    kept = json.loads(path.read_text()) if path.exists() else []
    return {(each["posterior"], each["seed"]): Outcome(**each) for each in kept}


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", action="store_true")
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    name = "untuned_batches" if arguments.batches else "untuned"
    title = f"Nothing set{', batches of N/10' if arguments.batches else ''}"
    RESULTS.mkdir(exist_ok=True)
    path, known = RESULTS / f"{name}.json", stored_truth()
    names = [posterior.name for posterior in EVERYTHING]
    for posterior in EVERYTHING:
        data = posterior.load() if posterior.name.startswith(arguments.only) else None
        if data is None:
            continue
        if arguments.batches and (posterior.batch_size is None or len(data[0]) < 100):
            continue
        if posterior.exact is None and (posterior.same_as or posterior.name) not in known:
            print(f"{posterior.name}: skipped, it has no reference yet", flush=True)
            continue
        truth = truth_of(posterior, data, known)
        for seed in range(arguments.seeds):
            if (posterior.name, seed) in stored(path) and not arguments.again:
                continue
            outcome = run(posterior, truth, seed, arguments.batches)
            print(outcome, flush=True)
            outcomes = stored(path) | {(posterior.name, seed): outcome}
            ordered = sorted(outcomes.values(), key=lambda o: (names.index(o.posterior), o.seed))
            path.write_text(json.dumps([asdict(each) for each in ordered], indent=0) + "\n")
            (RESULTS / f"{name}.md").write_text(table(ordered, title))
    print(table(list(stored(path).values()), title))


if __name__ == "__main__":
    main()
