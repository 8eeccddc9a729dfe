"""Writes docs/calibration.md: `python benchmarks/calibration/report.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import cost
import verdicts
from verdicts import Case, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "calibration.md"
#: False alarms of 40 runs at 5%, the part of wrong samplers that is found, seconds, and simuk's
#: time over ours.
MOST_ALARMS, ALARM_RUNS, LEAST_FOUND, MOST_SECONDS, LEAST_RATIO = 6, 40, 0.95, 60, 100
SIGNIFICANT = 0.05

HEAD = """\
# Calibration by simulation, measured

Written by `make calibration` (`benchmarks/calibration`); each script says at its top what it does.
The machine is a shared virtual machine of two cores, so times are upper bounds.
"""

ALARMS = """\
## Right samplers

Data and latents come from the fitted model, so the draws should be right.  A verdict of
"miscalibrated" is a false alarm, at 5% over all elements by Holm's method.  40 runs of a test at
exactly 5% have 6 or fewer false alarms in 99.7% of all cases.  `z sd` is the mean over runs and
elements of `z_score_sd`; with exact draws it is 1.015, because mean and sd come from 100 draws.
The runs of 20,000 simulations have no target; they show how small a bias the test detects.
"""

POWER = """\
## Wrong samplers

Each sampler is wrong on purpose.  The columns `by w` and `by loglik` count the runs in which that
quantity alone is below 5% (its least p-value, adjusted for all elements).

At the two step sizes, the stationary sd on this Gaussian posterior is 1.1 times the posterior's,
by `GaussianChain`.  On all rows, BAOA is exact on a Gaussian at any stable step, so it is run in
batches, whose noise heats it.

A likelihood multiplied by B/N of the current batch is refused before the run (`PlateError`), and
so is `num_data=` below the number of rows.  A constant factor is allowed, as in tempering; the runs
with N/B forgotten make this mistake.
"""

TIMES = """\
## Times

Times are for one core and one thread, with nothing compiled before.  simuk runs NumPyro's NUTS with
its default of 1,000 draws after 1,000 of warm-up; ours takes 100 draws of at least 400.  simuk was
shortened to a few simulations, so compare times per simulation.

Chains that have too few effective draws continue alone, and double the thinning until they have
enough; the steps of draws are those of the slowest chain.
"""


def cell(value: Any) -> str:
    """Yes, no or nothing."""
    return {True: "yes", False: "**no**", None: ""}[value]


def groups(is_right: bool) -> Iterator[tuple[Case, list[Outcome]]]:
    """Cases, and the runs of each that there are."""
    outcomes = verdicts.load()
    for case in verdicts.cases():
        found = [o for o in outcomes if o.case == case.name]
        if found and case.is_right == is_right:
            yield case, found


def flagged(found: list[Outcome]) -> int:
    """Runs whose verdict is miscalibrated."""
    return sum(o.verdict == "miscalibrated" for o in found)


def common(found: list[Outcome]) -> str:
    """What both tables show of a case."""
    unknown = sum(o.verdict == "unknown" for o in found)
    slow, failed = (max(getattr(o, name) for o in found) for name in ("slow", "failed"))
    z_sd = fmean(o.z_score_sd for o in found)
    return (
        f"{unknown} | {z_sd:.3f} | {slow} | {failed} | {median(o.seconds for o in found):.0f} "
        f"({max(o.seconds for o in found):.0f})"
    )


def alarms() -> Iterator[str]:
    """Right samplers."""
    yield ALARMS
    yield (
        "| sampler | simulations | runs | miscalibrated | to reach | reached | unknown | z sd | "
        "slow, most | failed, most | s, median (most) |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for case, found in groups(True):
        target, reached = "", None
        if len(found) == ALARM_RUNS:
            target = f"at most {MOST_ALARMS}"
            reached = flagged(found) <= MOST_ALARMS
        yield (
            f"| {case.title} | {case.simulations:,} | {len(found)} | {flagged(found)} | {target} | "
            f"{cell(reached)} | {common(found)} |"
        )
    yield ""
    for case, found in groups(True):
        if len(found) == 1:
            least = ", ".join(f"{name} {p:.2g}" for name, p in found[0].p_value.items())
            yield f"Least p-value of each quantity's elements, {case.title}: {least}.\n"


def power() -> Iterator[str]:
    """Wrong samplers."""
    yield POWER
    names = ("w", "loglik")
    yield (
        "| sampler | runs | miscalibrated | to reach | reached | "
        + " | ".join(f"by {name}" for name in names)
        + " | unknown | z sd | slow, most | failed, most | s, median (most) |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for case, found in groups(False):
        by = " | ".join(str(sum(o.p_holm[name] <= SIGNIFICANT for o in found)) for name in names)
        reached = flagged(found) >= LEAST_FOUND * len(found)
        yield (
            f"| {case.title} | {len(found)} | {flagged(found)} | {LEAST_FOUND:.0%} | "
            f"{cell(reached)} | {by} | {common(found)} |"
        )
    yield ""


def times(results: Mapping[str, Any]) -> Iterator[str]:
    """What it costs."""
    yield TIMES
    yield (
        "| | simulations | s | CPU s | to reach | reached | s per simulation | verdict | "
        "slow | failed | steps of warm-up | steps of draws |"
    )
    yield "|" + "---|" * 12
    titles = {
        "logistic": "BAOA, nothing set, logistic regression 768 x 8",
        "logistic_nuts": "NUTS, the same",
        "schools": "BAOA, nothing set, eight schools, non-centered",
        "schools_nuts": "NUTS, the same",
        "simuk": "simuk, NumPyro's NUTS, logistic regression 768 x 8",
    }
    for part, title in titles.items():
        if part not in results:
            continue
        record = results[part]
        seconds, count = record["seconds"], record["simulations"]
        target, reached = "", None
        if part in ("logistic", "schools"):
            target, reached = f"under {MOST_SECONDS}", seconds < MOST_SECONDS
        of_it = [record.get(name, "") for name in ("verdict", "slow", "failed")]
        attrs = record.get("attrs", {})
        of_it += [attrs.get(name, "") for name in ("steps_warm-up", "steps_draws")]
        yield (
            f"| {title} | {count:,} | {seconds:.1f} | {record['cpu']:.1f} | {target} | "
            f"{cell(reached)} | {seconds / count:.3g} | {' | '.join(map(str, of_it))} |"
        )
    yield ""
    if "simuk" in results:
        each = {part: record["seconds"] / record["simulations"] for part, record in results.items()}
        for part, name in (("logistic", "BAOA"), ("logistic_nuts", "NUTS")):
            if part in each:
                ratio = each["simuk"] / each[part]
                target = "" if name == "NUTS" else f" (to reach: {LEAST_RATIO}x)"
                yield f"A simuk simulation takes {ratio:.0f}x as long as {name}'s{target}.\n"
    of_run: dict[str, list[str]] = {}
    for part in filter(results.__contains__, titles):
        of_run.setdefault(results[part]["when"], []).append(titles[part])
    for when, rows in of_run.items():
        which = "" if len(of_run) == 1 else f" ({'; '.join(rows)})"
        yield f"Measured{which} {when}.\n"


def main() -> None:
    """Writes the page."""
    lines = [HEAD, *alarms(), *power()]
    for when in dict.fromkeys(o.when for o in verdicts.load()):
        lines.append(f"Measured {when}.\n")
    if cost.RESULTS.exists():
        lines += times(json.loads(cost.RESULTS.read_text()))
    PAGE.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
