"""How far a run's verdict can be trusted: `python benchmarks/accuracy/verdicts.py`.

    --part gaussian|bad    only these
    --only NAME            bad settings whose name starts so
    --seeds 200            of the Gaussian; bad settings have a fortieth of them
    --from 0               the first of them
    --again                runs that are stored, too: their outcomes are replaced

A Gaussian posterior (a regression on ten correlated columns, other data at each seed) is sampled
with nothing set, on all 500 rows and in batches of 50: a run that is right should have a yes.  A
run of `bad_settings.py` should be right, or not have one, or say that it is of another density
than the posterior, as the user asked.  Right is as in `judge.py`.  Writes
`results/verdicts.md`, with exact (Clopper-Pearson) 95% intervals, and `results/verdicts.json`, from
which a later call goes on.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import torch
from bad_settings import BY_LINE, CASES, UNSEEN, Case, line_data
from judge import NOTHING, judge
from scipy.stats import beta

import pyro_scale as ps

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TEN = partial(line_data, size=10, rows=500)
GAUSSIANS = [
    BY_LINE("all rows", data=TEN),
    BY_LINE("batches of N/10", data=TEN, how={"batch_size": 50}),
]


@dataclass(frozen=True)
class Outcome:
    """Of one run.

    Attributes:
        part: `"gaussian"` or `"bad"`.
        case: its name.
        seed: of data and run.
        mean: the largest error of a mean, in posterior sds.
        sd: the largest of an sd, in itself.
        is_right: whether all are within the tolerance.
        verdict: of the run; `"raised"` where it raised.
        told: the report's first line, or the error.
        seconds: of the run.
    """

    part: str
    case: str
    seed: int
    mean: float
    sd: float
    is_right: bool
    verdict: str
    told: str
    seconds: float

    @property
    def is_as_asked(self) -> bool:
        """Whether the report says that draws are of another density than the posterior."""
        return self.verdict == "yes" and " at temperature " in self.told

    @property
    def is_silent(self) -> bool:
        """Whether it is wrong, and passed with a yes."""
        return self.verdict == "yes" and not (self.is_right or self.is_as_asked)


def run(part: str, case: Case, seed: int, sampler: Any = None) -> Outcome:
    """One run."""
    data = case.data(seed)
    pyro.set_rng_seed(seed)
    errors, begin = NOTHING, time.perf_counter()
    try:
        sampler = sampler or case.method(case.model, **case.settings(data, seed))
        sampler.run(data, seed=seed, progress=False, **case.how)
        report = sampler.report()
        verdict, told = report.verdict, report.headline
    except ps.errors.PyroScaleError as error:
        verdict, told = "raised", str(error)
    seconds = round(time.perf_counter() - begin, 1)
    if verdict != "raised":
        values = sampler.get_samples(group_by_chain=True)
        errors = judge(values, case.sites, case.truth(data))
    return Outcome(part, case.name, seed, *errors, verdict, told, seconds)


def share(count: int, of: int) -> str:
    """A count, and the exact 95% interval of its rate."""
    low = 0.0 if count == 0 else float(beta.ppf(0.025, count, of - count + 1))
    high = 1.0 if count == of else float(beta.ppf(0.975, count + 1, of - count))
    return f"{count} of {of} ({100 * low:.1f} to {100 * high:.1f}%)"


def row(name: str, found: list[Outcome]) -> str:
    """A case's counts."""
    right = [o for o in found if o.is_right]
    verdicts = [sum(o.verdict == kind for o in found) for kind in ("yes", "unknown", "no")]
    raised = sum(o.verdict == "raised" for o in found)
    as_asked, silent = sum(o.is_as_asked for o in found), sum(o.is_silent for o in found)
    cells = [len(right), *verdicts, raised, as_asked, silent]
    return f"| {name} | {len(found)} | " + " | ".join(map(str, cells)) + " |"


def page(outcomes: list[Outcome]) -> str:
    """Both tables."""
    gaussian, bad = ([o for o in outcomes if o.part == part] for part in ("gaussian", "bad"))
    lines = ["# Verdicts", "", "## A Gaussian", ""]
    head = "runs | right | yes | not known | no | raised | as asked | wrong with a yes |"
    for case in dict.fromkeys(o.case for o in gaussian):
        found = [o for o in gaussian if o.case == case]
        right = [o for o in found if o.is_right]
        refused = sum(o.verdict != "yes" for o in right)
        passed = sum(o.is_silent for o in found)
        lines += [
            f"{case}: right {share(len(right), len(found))}; of these refused "
            f"{share(refused, len(right))}; wrong with a yes {share(passed, len(found))}.",
            "",
        ]
    lines += [f"| | {head}", "|---|---|---|---|---|---|---|---|---|"]
    for case in dict.fromkeys(o.case for o in gaussian):
        lines.append(row(case, [o for o in gaussian if o.case == case]))
    unseen = [case.name for case in UNSEEN]
    for title, found in {
        "Bad settings": [o for o in bad if o.case not in unseen],
        "Beyond what can be seen": [o for o in bad if o.case in unseen],
    }.items():
        wrong = [o for o in found if not (o.is_right or o.is_as_asked)]
        passed = sum(o.is_silent for o in wrong)
        lines += ["", f"## {title}", ""]
        if wrong:
            lines += [f"Wrong, and passed with a yes: {share(passed, len(wrong))}.", ""]
        lines += [f"| | {head}", "|---|---|---|---|---|---|---|---|---|"]
        for case in dict.fromkeys(o.case for o in found):
            lines.append(row(case, [o for o in found if o.case == case]))
    return "\n".join([*lines, ""])


def stored() -> dict[tuple[str, str, int], Outcome]:
    """Outcomes so far, by part, case and seed."""
    path = RESULTS / "verdicts.json"
    kept = [Outcome(**o) for o in json.loads(path.read_text())] if path.exists() else []
    return {(o.part, o.case, o.seed): o for o in kept}


def save(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """All outcomes so far, with these in the place of earlier ones."""
    path = RESULTS / "verdicts.json"
    RESULTS.mkdir(exist_ok=True)
    merged = stored() | {(o.part, o.case, o.seed): o for o in outcomes}
    names = [case.name for case in (*GAUSSIANS, *CASES, *UNSEEN)]
    known = [o for o in merged.values() if o.case in names]
    known.sort(key=lambda o: (names.index(o.case), o.seed))
    path.write_text(json.dumps([asdict(o) for o in known], indent=0) + "\n")
    (RESULTS / "verdicts.md").write_text(page(known))
    return known


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="")
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="SEED")
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    bad_seeds = max(1, arguments.seeds // 40)
    parts = {
        "bad": [(case, seed) for case in (*CASES, *UNSEEN) for seed in range(bad_seeds)],
        "gaussian": [(case, seed) for seed in range(arguments.seeds) for case in GAUSSIANS],
    }
    # one object for all seeds of a Gaussian: its program is compiled once
    samplers = {case.name: case.method(case.model) for case in GAUSSIANS}
    known = save([])
    for part, runs in parts.items():
        for case, seed in runs:
            chosen = arguments.part in part and case.name.startswith(arguments.only)
            is_new = arguments.again or (part, case.name, seed) not in stored()
            if chosen and is_new and seed >= arguments.first:
                outcome = run(part, case, seed, samplers.get(case.name))
                known = save([outcome])
                print(outcome, flush=True)
    print(page(known))


if __name__ == "__main__":
    main()
