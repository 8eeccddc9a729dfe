"""Times Pyro Scale and its peers side by side: `python benchmarks/run.py`.

    --only NAME    only the suites whose name starts so: logistic, full_batch, many_chains, mlp,
                   rows, compile
    --rounds 7     how often each contender is timed

Every contender has a process of its own, with one thread on one core (the same for all) unless
its name says otherwise.  It is set up and warmed up once; then all are timed in turns, so that
what else the machine does falls on all of them, and the table shows the least and the median of
the rounds.  A peer that is not installed or fails is reported as such.

Writes `benchmarks/results/`: a CSV a suite, and `results.md` and `results.png` of all suites run
so far.  All times are for a chain-step with its randomness: drawing the batch, the noise, and
keeping every thinning-th position.  The column "check" compares what was sampled with ours.

Needs the extra: `pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse

import report
from protocol import Answer, Worker
from suites import SUITES, Suite


def measure(suite: Suite, rounds: int) -> dict[str, list[Answer]]:
    """Each contender's answers, one a round; the last is a failure if it failed."""
    answers: dict[str, list[Answer]] = {contender.name: [] for contender in suite.contenders}
    workers = []
    for contender in suite.contenders:
        worker = Worker(contender)
        ready = worker.answer()  # one after the other, so that they compile undisturbed
        print(f"  {contender.name}: {ready.failure or 'ready'}", flush=True)
        if ready.failure:
            answers[contender.name].append(ready)
        else:
            workers.append(worker)
    for _ in range(min(rounds, suite.most_rounds)):
        for worker in workers:
            given = answers[worker.contender.name]
            if not (given and given[-1].failure):
                given.append(worker.ask())
    for worker in workers:
        worker.stop()
    return answers


def main() -> None:
    """Runs the suites asked for and prints their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    chosen = [suite for suite in SUITES if suite.name.startswith(arguments.only)]
    if not chosen:
        parser.error(f"--only takes the start of one of {[suite.name for suite in SUITES]}")
    for suite in chosen:
        print(f"{suite.name}: {suite.title}", flush=True)
        rows = report.rows_of(suite, measure(suite, arguments.rounds))
        report.write(suite, rows)
        report.write_all()
        print()
        print(report.markdown(suite, *(report.read(suite) or ("", rows))), flush=True)


if __name__ == "__main__":
    main()
