"""Results as files: a CSV a suite, and from all of these one table and one plot."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from circumstances import circumstances
from protocol import Answer
from suites import OURS, SUITES, Suite

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "pyro-ppl", "posteriors", "blackjax", "jax", "numpyro", "pyro-scale")


@dataclass(frozen=True)
class Row:
    """A line of a suite's table; times are in the suite's unit, None for what failed."""

    name: str
    fastest: float | None
    median: float | None
    rounds: int
    check: str


def rows_of(suite: Suite, answers: dict[str, list[Answer]]) -> list[Row]:
    """A suite's table from each contender's answers, one a round."""
    reference = _moments(answers[suite.contenders[0].name]) if suite.comparable else None
    rows = []
    for name, given in answers.items():
        failure = next((answer.failure for answer in given if answer.failure), "")
        if failure:
            rows.append(Row(name, None, None, 0, failure))
            continue
        for part in given[0].seconds:
            times = [answer.seconds[part] * suite.per_second for answer in given]
            label = f"{name}, {part}" if part else name
            check = "" if part else _check(given, reference)
            rows.append(Row(label, min(times), statistics.median(times), len(times), check))
    return rows


def _moments(answers: Sequence[Answer]) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and standard deviation of each coordinate over all rounds."""
    known = [(a.mean, a.variance) for a in answers if a.mean is not None and a.variance is not None]
    if not known:
        return None
    mean = np.mean([m for m, _ in known], axis=0)
    square = np.mean([v + m**2 for m, v in known], axis=0)
    return mean, (square - mean**2) ** 0.5


def _check(answers: Sequence[Answer], reference: tuple[np.ndarray, np.ndarray] | None) -> str:
    """How far a contender's draws are from the reference's, or how good its network is."""
    if answers[-1].accuracy is not None:
        return f"accuracy {answers[-1].accuracy:.3f}"
    moments = _moments(answers)
    if moments is None or reference is None:
        return ""
    (mean, sd), (mean_of_ours, sd_of_ours) = moments, reference
    off = np.abs((mean - mean_of_ours) / sd_of_ours).max()
    return f"means within {off:.2f} sd, sd x {np.mean(sd / sd_of_ours):.2f}"


def write(suite: Suite, rows: Iterable[Row]) -> None:
    """A suite's CSV; its first line says when and on what it was measured."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{suite.name}.csv").open("w", newline="") as file:
        file.write(f"# {circumstances(PACKAGES)}\n")
        writer = csv.writer(file)
        writer.writerow(
            ["contender", f"min_{suite.unit}", f"median_{suite.unit}", "rounds", "check"]
        )
        for row in rows:
            writer.writerow([row.name, row.fastest, row.median, row.rounds, row.check])


def read(suite: Suite) -> tuple[str, list[Row]] | None:
    """What `write` wrote: the circumstances and the rows; None if it has not."""
    path = RESULTS / f"{suite.name}.csv"
    if not path.exists():
        return None
    circumstances, _, *lines = path.read_text().splitlines()
    rows = [
        Row(name, _number(fastest), _number(median), int(rounds), check)
        for name, fastest, median, rounds, check in csv.reader(lines)
    ]
    return circumstances.removeprefix("# "), rows


def _number(text: str) -> float | None:
    return float(text) if text else None


# ---------------------------------------------------------------- the table


def markdown(suite: Suite, circumstances: str, rows: Sequence[Row]) -> str:
    """A suite's targets and times."""
    lines = [f"## {suite.title}", "", circumstances, ""]
    lines += ["| target | to reach | by min | by median | reached |", "|---|---|---|---|---|"]
    fastest = {row.name: row.fastest for row in rows if row.fastest is not None}
    medians = {row.name: row.median for row in rows if row.median is not None}
    for target in suite.targets:
        by_min, by_median = target.figure(fastest), target.figure(medians)
        if by_min is None or by_median is None:
            lines.append(f"| {target.what} | {target.bound} | | | not measured |")
            continue
        figures = f"{_short(by_min)} | {_short(by_median)}"
        verdict = target.verdict(by_min)
        lines.append(f"| {target.what} | {target.bound} | {figures} | {verdict} |")
    lines += ["", f"| contender | min, {suite.unit} | median | x ours | check |"]
    lines += ["|---|---|---|---|---|"]
    first = rows[0].fastest
    for row in rows:
        if row.fastest is None or row.median is None:
            lines.append(f"| {row.name} | failed | | | {row.check} |")
            continue
        ratio = _short(row.fastest / first) if first else ""
        times = f"{_short(row.fastest)} | {_short(row.median)}"
        lines.append(f"| {row.name} | {times} | {ratio} | {row.check} |")
    return "\n".join(lines) + "\n"


def _short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def write_all() -> None:
    """`results.md` and `results.png`, from the CSVs of all suites that have been run."""
    known = [(suite, *found) for suite in SUITES if (found := read(suite)) is not None]
    tables = [markdown(*one) for one in known]
    (RESULTS / "results.md").write_text("# Benchmarks\n\n" + "\n".join(tables))
    _plot([(suite, rows) for suite, _, rows in known])


def _plot(known: Sequence[tuple[Suite, list[Row]]]) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    measured = [
        (suite, [row for row in reversed(rows) if row.fastest is not None]) for suite, rows in known
    ]
    measured = [(suite, rows) for suite, rows in measured if rows]
    if not measured:
        return
    heights = [len(rows) + 2 for _, rows in measured]
    figure, panels = plt.subplots(
        len(measured),
        figsize=(10, 0.28 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for (suite, rows), axes in zip(measured, panels[:, 0], strict=True):
        colors = [
            "C1" if row.name.startswith((OURS, "import pyro_scale")) else "C0" for row in rows
        ]
        times = [row.fastest for row in rows if row.fastest is not None]
        bars = axes.barh([row.name for row in rows], times, color=colors)
        axes.bar_label(bars, fmt=_short, padding=3, fontsize=8)
        axes.set_xscale("log")
        axes.set_xlim(min(times) / 4, max(times) * 3)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(labelsize=8)
        axes.set_title(suite.title, fontsize=9, loc="left")
    figure.savefig(RESULTS / "results.png", dpi=120)
    plt.close(figure)
