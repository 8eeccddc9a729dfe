"""First tries of programs as others write them: `python benchmarks/programs/run.py`.

    --only NAME     only this program (repeatable); prints its row and writes nothing
    --limit 120     seconds a program

Each program in `examples/` is tried as a new user would, with the same numbers for all:
`ps.explain(model, data)`, then `ps.BAOA(model).run(data, seed=0)`, `summary()` and
`diagnostics()`.  It runs in a process of its own, so that one that hangs does not stop the rest.

What comes of it is held against what the program declares:

    right           every mean within 0.1 sd, every sd within 5 %, plus two Monte Carlo standard
                    errors: those of `references.json`, and of the run's draws if they were
                    independent
    off             it ran, but is not right; "silently" if no warning of ours was given
    refused         by an error of ours, rightly or wrongly
    stopped         by an error of ours after the first step: chains were no longer finite
    raised raw      an exception that is not ours
    timed out       not done within the limit

Writes the table `results.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from program import Program, elements, names

import pyro_scale as ps

HERE = Path(__file__).parent
SETTINGS = {"seed": 0}
MEAN_TOLERANCE, SD_TOLERANCE = 0.1, 0.05  # in sds; relative
GOOD = ("right", "refused rightly")


@dataclass
class Try:
    """What came of a program.

    Attributes:
        name: the program's.
        outcome: in words, as the module's docstring has them.
        mean_error: the largest |mean - true mean| in true sds, and whose; None if it did not run.
        sd_error: the largest |sd / true sd - 1|, and whose.
        r_hat: the largest.
        said: the first words of what was raised, or of the warnings.
        flagged: whether a warning of ours was among them.
        seconds: from the program's start to its end.
    """

    name: str
    outcome: str
    mean_error: tuple[float, str] | None = None
    sd_error: tuple[float, str] | None = None
    r_hat: float | None = None
    said: list[str] = field(default_factory=list)
    flagged: bool = False
    seconds: float = 0.0


def attempt(name: str) -> Try:
    """Tries a program in this process."""
    program = Program.load(name)
    start = perf_counter()
    error: Exception | None = None
    with warnings.catch_warnings(record=True) as caught:
        try:
            ps.explain(program.model, program.data)
            mcmc = ps.BAOA(program.model).run(program.data, progress=False, **SETTINGS)
            draws = mcmc.get_samples(group_by_chain=True)
            mcmc.summary()
            r_hat = float(mcmc.diagnostics()["r_hat"].max())
        except Exception as raised:
            error = raised
    if error is not None:
        outcome, said = failure(program, error), [f"{type(error).__name__}: {error}"]
        found = Try(name, outcome, said=[*said, *(str(w.message) for w in caught)])
    elif program.refused:
        found = Try(name, "ran, to be refused", r_hat=r_hat, said=[str(w.message) for w in caught])
    else:
        found = compare(program, draws, [str(w.message) for w in caught])
        found.r_hat = r_hat
    found.flagged = any(issubclass(w.category, ps.errors.PyroScaleWarning) for w in caught)
    if found.outcome == "off":
        found.outcome = "off, flagged" if found.flagged else "off, silently"
    found.seconds = perf_counter() - start
    return found


def failure(program: Program, error: Exception) -> str:
    """The outcome of a program that raised."""
    if not isinstance(error, ps.errors.PyroScaleError):
        return "raised raw"
    if isinstance(error, ps.errors.NonFiniteError):
        return "stopped"
    if not program.refused:
        return "refused wrongly"
    return "refused rightly" if program.refused in str(error) else "refused in other words"


def compare(program: Program, draws: Mapping[str, Any], said: list[str]) -> Try:
    """Means and sds of a run's draws against the reference's."""
    truth = json.loads((HERE / "references.json").read_text())[program.name]["elements"]
    columns = elements(draws, program.right)
    means, sds, right = [], [], True
    for name, true in truth.items():
        column = columns[name]
        mean_error = abs(column.mean() - true["mean"]) / true["sd"]
        sd_error = abs(column.std() / true["sd"] - 1)
        # of as many independent draws: that a chain's are not is its own fault
        of_mean = math.hypot(true["mcse"] / true["sd"], column.size**-0.5)
        of_sd = math.hypot(
            true["sd_mcse"] / true["sd"], ((true["kurtosis"] - 1) / 4 / column.size) ** 0.5
        )
        right &= mean_error < MEAN_TOLERANCE + 2 * of_mean
        right &= sd_error < SD_TOLERANCE + 2 * of_sd
        means.append((float(mean_error), name))
        sds.append((float(sd_error), name))
    outcome = "right" if right else "off"  # where a comparison with NaN is False
    return Try(program.name, outcome, max(means), max(sds), said=said)


def in_own_process(name: str, limit: float) -> Try:
    """Tries a program in a process of its own, which is killed at the limit."""
    command = [sys.executable, __file__, "--child", name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its compilers, too
            return Try(name, "timed out", seconds=limit)
    if process.returncode != 0 or not out:
        last = err.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        return Try(name, "raised raw", said=last)
    return Try(**json.loads(out.splitlines()[-1]))


def row(found: Try) -> str:
    """A line of the table."""
    mean = "" if found.mean_error is None else f"{found.mean_error[0]:.2f} ({found.mean_error[1]})"
    sd = "" if found.sd_error is None else f"{100 * found.sd_error[0]:.0f} % ({found.sd_error[1]})"
    r_hat = "" if found.r_hat is None else f"{found.r_hat:.2f}"
    said = "; ".join(dict.fromkeys(first_words(text) for text in found.said))
    cells = (found.name, found.outcome, mean, sd, r_hat, said, f"{found.seconds:.0f}")
    return "| " + " | ".join(cells) + " |"


def first_words(text: str, length: int = 90) -> str:
    """The beginning of a message, in one line that a table can hold."""
    flat = " ".join(text.split()).replace("|", "\\|")
    return flat if len(flat) <= length else flat[:length].rsplit(" ", 1)[0] + " ..."


def table(tries: Iterable[Try]) -> str:
    """The page of results: sums, then a row a program."""
    tries = list(tries)
    counts = Counter(found.outcome for found in tries)
    good = sum(counts[outcome] for outcome in GOOD)
    sums = ", ".join(f"{outcome} {count}" for outcome, count in counts.most_common())
    settings = ", ".join(f"{name}={value}" for name, value in SETTINGS.items())
    head = ["program", "outcome", "worst mean, sds", "worst sd", "R-hat", "said", "seconds"]
    return "\n".join(
        [
            "# First tries",
            "",
            f"Of {len(tries)} programs {good} come out as they have to at the first try: {sums}.",
            "",
            f"Made by `make programs`, which `run.py` explains: `ps.explain(model, data)`, then "
            f"`ps.BAOA(model).run(data, {settings})`. Seconds are those of a machine "
            "that did other things beside.",
            "",
            "| " + " | ".join(head) + " |",
            "|" + "---|" * len(head),
            *(row(found) for found in tries),
            "",
        ]
    )


def main() -> None:
    """Tries what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], choices=names(), metavar="NAME")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(asdict(attempt(options.child))))
        return
    tries = []
    for name in options.only or names():
        tries.append(in_own_process(name, options.limit))
        print(row(tries[-1]), flush=True)
    if not options.only:
        (HERE / "results.md").write_text(table(tries))


if __name__ == "__main__":
    main()
