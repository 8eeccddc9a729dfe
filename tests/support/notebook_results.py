"""The numbers that notebooks show in their small setting, and the stored ones to compare with.

`python tests/support/notebook_results.py NAME ...` stores those of notebooks, of all without names,
in `notebooks/small`: the mean over `SEEDS` of every number in a displayed table or a printed line,
and how far a run may be from it.  Runs after the first have other seeds, and train networks from
weights that differ in the sixth digit, to which another processor's rounding comes.

A tolerance is `SDS` standard deviations over the runs and, for what rounding comes to on another
machine, one unit of the last digit that is shown, or 1e-3 where all are.  What the
runs disagree about in words, or by more than a factor of ten, is not compared; nor are seconds and
bytes.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import nbformat
from nbclient import NotebookClient
from places import ROOT

SEEDS, SDS = range(5), 8
STORED = ROOT / "notebooks" / "small"
#: A number, and one unit of its last digit.
Number = tuple[float, float]
#: By cell and label.
Results = dict[str, dict[str, list[Number]]]
NUMBER = re.compile(r"(?<![A-Za-z_\d.])[-+]?(?:\d[\d,]*\.?\d*(?:e[-+]?\d+)?|nan|inf)(?![A-Za-z_])")
#: What the machine or the version decides.
COST = re.compile(r"^Pyro Scale|seconds|per_second|memory|\d s\b", re.IGNORECASE)
#: Shows tables in full precision.
SETUP = """
import json, sys
import pandas, pyro, torch
from pyro_scale.rng import seeds

def _show(type, frame):
    def bundle(shown):
        text = frame(shown).to_json(orient="split", double_precision=15, default_handler=str)
        return {"application/json": json.loads(text)}, {}

    get_ipython().display_formatter.mimebundle_formatter.for_type(type, bundle)

_show(pandas.DataFrame, lambda shown: shown)
_show(pandas.Series, lambda shown: shown.to_frame())
_show("pyro_scale.infer.compare.Comparison", lambda shown: shown.table)

_choose, _begin, _shift = seeds.choose_seed, torch.optim.Optimizer.__init__, [0]

def _shifted(seed):
    return _choose(seed) + 1000 * _shift[0]

def _perturbed(optimizer, params, defaults):
    _begin(optimizer, params, defaults)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.mul_(1 + 1e-6 * _shift[0])

torch.optim.Optimizer.__init__ = _perturbed
for _module in list(sys.modules.values()):
    if getattr(_module, "choose_seed", None) is _choose:
        _module.choose_seed = _shifted
"""
#: Begins a run.
BEGIN = """
_shift[0] = {seed}
import pyro, torch
pyro.clear_param_store()
torch.set_default_dtype(torch.float32)
"""


def notebooks() -> list[Path]:
    """All of them."""
    return sorted((ROOT / "notebooks").glob("*.ipynb")) + sorted(
        (ROOT / "notebooks" / "paper").glob("*.ipynb")
    )


def results(path: Path, seeds: Iterable[int] = (0,)) -> list[Results]:
    """What the notebook's cells show in the small setting, for each seed."""
    book = nbformat.read(path, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    runs = [[_cell(BEGIN.format(seed=seed)), *map(copy.deepcopy, code)] for seed in seeds]
    book.cells = [_cell(SETUP), *itertools.chain(*runs)]
    client = NotebookClient(book, timeout=900, resources={"metadata": {"path": path.parent}})
    client.execute(env=os.environ | {"PYRO_SCALE_SMALL": "1"})
    return [_results(cells[1:]) for cells in runs]


def _cell(source: str) -> Any:
    return nbformat.v4.new_code_cell(source)


def _results(cells: list[Any]) -> Results:
    shown: Results = {}
    for place, cell in enumerate(cells, 1):
        for output in cell.outputs:
            for label, numbers in _shown(output):
                shown.setdefault(f"cell {place}", {}).setdefault(label, []).extend(numbers)
    return shown


def _shown(output: Any) -> Iterator[tuple[str, list[Number]]]:
    if output.output_type == "stream":
        return _lines(output.text if output.name == "stdout" else "")
    data = output.get("data", {})
    if "application/json" in data:
        return _cells(data["application/json"])
    return _lines("" if "image/png" in data else data.get("text/plain", ""))


def _lines(text: str) -> Iterator[tuple[str, list[Number]]]:
    """Each line without its numbers, and the numbers."""
    for line in text.splitlines():
        if line.strip() and not COST.search(line):
            yield _words(line), _numbers(line)


def _cells(table: dict[str, Any]) -> Iterator[tuple[str, list[Number]]]:
    """Each cell's column and row, and its numbers."""
    columns = [_label(column) for column in table["columns"]]
    for place, column in enumerate(columns):
        if COST.search(column):
            continue
        values = [row[place] for row in table["data"]]
        unit = _unit([value for value in values if isinstance(value, float)])
        for row, value in zip(table["index"], values, strict=True):
            label = f"{column} | {_label(row)}"
            if isinstance(value, str):
                yield f"{label}: {_words(value)}", _numbers(value)
            else:
                yield label, [(math.nan if value is None else float(value), unit)]


def _label(name: Any) -> str:
    return ", ".join(map(str, name)) if isinstance(name, list) else str(name)


def _words(text: str) -> str:
    return " ".join(NUMBER.sub("#", text).split())


def _numbers(text: str) -> list[Number]:
    return [_number(number.replace(",", "")) for number in NUMBER.findall(text)]


def _number(text: str) -> Number:
    mantissa, _, exponent = text.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return float(text), 10.0 ** (int(exponent or 0) - decimals)


def _unit(column: list[float]) -> float:
    """One unit of the last digit that a column is rounded to; 0 if it is not rounded."""
    rounded = (d for d in range(5) if all(math.isclose(v, round(v, d)) for v in column))
    return next((10.0**-decimals for decimals in rounded), 0.0)


def stored(path: Path) -> Path:
    """Where a notebook's results are kept."""
    return STORED / f"{path.stem}.json"


def store(path: Path) -> None:
    """Keeps the results of a notebook, with their tolerances."""
    _write(path, results(path, SEEDS))


def _write(path: Path, runs: list[Results]) -> None:
    kept = {cell: _tolerances([run.get(cell, {}) for run in runs]) for cell in runs[0]}
    lines = [
        f"{json.dumps(cell)}: {{\n"
        + ",\n".join(
            f"  {json.dumps(k, ensure_ascii=False)}: {json.dumps(v)}" for k, v in v.items()
        )
        + "\n}"
        for cell, v in kept.items()
        if v
    ]
    stored(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _tolerances(runs: list[dict[str, list[Number]]]) -> dict[str, list[Number]]:
    """The mean and the tolerance of each number of a cell that runs agree about."""
    agreed: dict[str, list[list[Number]]] = {}
    for label in runs[0]:
        lists = [run[label] for run in runs if label in run]
        if len(lists) == len(runs) and len(set(map(len, lists))) == 1:
            agreed[label] = [list(numbers) for numbers in zip(*lists, strict=True)]
    kept = {label: [_compared(number) for number in numbers] for label, numbers in agreed.items()}
    return {label: numbers for label, numbers in kept.items() if None not in numbers}


def _compared(runs: list[Number]) -> Number | None:
    values, units = zip(*runs, strict=True)
    if not all(map(math.isfinite, values)):
        return (values[0], 0.0) if len(set(map(str, values))) == 1 else None
    least, most = sorted(map(abs, (min(values), max(values))))
    if min(values) * max(values) > 0 and most > 10 * least:
        return None
    mean = fmean(values)
    within = SDS * stdev(values) + max(*units, 1e-4 * abs(mean), 0 if units[0] else 1e-3)
    return float(f"{mean:.6g}"), float(f"{within:.2g}")


def differences(path: Path) -> list[str]:
    """What a run shows that the stored results do not allow, a line each, and another run neither:
    of thousands of numbers on another processor, some are out by chance."""
    told = _differences(path, 0)
    again = _differences(path, len(SEEDS)) if told else {}
    return [line for label, line in told.items() if label in again]


def _differences(path: Path, seed: int) -> dict[str, str]:
    """The same of one run, by cell, label and place in the line."""
    (shown,), told = results(path, (seed,)), {}
    for cell, labels in json.loads(stored(path).read_text(encoding="utf-8")).items():
        for label, numbers in labels.items():
            new = shown.get(cell, {}).get(label)
            if new is None or len(new) != len(numbers):
                told[f"{cell}: {label}"] = f"{cell}: {label}: not shown"
                continue
            for place, ((value, _), (mean, within)) in enumerate(zip(new, numbers, strict=True)):
                if not (abs(value - mean) <= within or str(value) == str(mean)):
                    told[f"{cell}: {label}: {place}"] = (
                        f"{cell}: {label}: {value:.6g} instead of {mean:.6g} within {within:.2g}"
                    )
    return told


if __name__ == "__main__":
    for book in notebooks():
        if not sys.argv[1:] or book.stem in sys.argv[1:]:
            print(book.stem, flush=True)
            store(book)
