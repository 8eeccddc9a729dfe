"""Times the Gaussian approximations and their peers: `python benchmarks/approximations/run.py`.

    --only NAME    only the questions whose name starts so: diagonal, dense, kron, product, fisher,
                   vi, ekf, falling, first, predict, memory
    --rounds 7     how often each contender is timed

As in `benchmarks/run.py`, every contender has a process of its own with one thread, all on the same
core, and they are timed in turns.  Tables show medians over the rounds.  Laplace approximations are
those of a tanh network on all of scikit-learn's digits, at the same weights for all.  For the
diagonal GGN the peers have the batch size at which they were fastest when it was tried out once (1
to 32 rows, and up to 1,797 for BackPACK and ASDL); for other tables it was not tried out.

Writes `results.json` beside this file, a question's part whenever it is run, and from all of it
`docs/approximations.md`.  Needs the extra: `pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # whose protocol this one shares

import numpy as np
from circumstances import circumstances
from protocol import ONE_THREAD, Answer, Contender, Worker

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parents[1] / "docs" / "approximations.md"
PACKAGES = (
    "torch",
    "pyro-ppl",
    "posteriors",
    "laplace-torch",
    "curvlinops-for-pytorch",
    "backpack-for-pytorch",
    "pyro-scale",
)
OURS = "Pyro Scale"
Record = dict[str, Any]


# ------------------------------------------------------------------ what is asked


@dataclass(frozen=True)
class Target:
    """A number to reach.

    Attributes:
        what: in words.
        peer: the row that the first one, or `ours`, is compared with.
        ours: a row.
        faster: the least that peer's time over ours may be.
        close: the most that their numbers may differ.

    Without a bound, it is their times' ratio, to be read.
    """

    what: str
    peer: str
    ours: str = OURS
    faster: float | None = None
    close: float | None = None


@dataclass(frozen=True)
class Question:
    """Contenders that are timed in turns, a table.

    Attributes:
        name: for `--only`.
        title: of the table.
        text: what was measured, in Markdown.
        contenders: in the table's order; the first is the one that ratios refer to.
        targets: what to reach.
        reference: whose numbers the others' are compared with.
        distance: of two answers' numbers, (a contender's, the reference's).
        difference: what the distance is, a column's head.
        unit: of the table, with `per_second` of them in a second.
    """

    name: str
    title: str
    text: str
    contenders: tuple[Contender, ...]
    targets: tuple[Target, ...] = ()
    reference: str = OURS
    distance: Callable[[np.ndarray, np.ndarray], float] | None = None
    difference: str = "difference"
    unit: str = "ms"
    per_second: float = 1e3


def relative(found: np.ndarray, reference: np.ndarray) -> float:
    """The largest relative difference of any element."""
    return float(np.abs(found / reference - 1).max())


def of_matrix(found: np.ndarray, reference: np.ndarray) -> float:
    """The largest difference of a matrix's elements, over the roots of both diagonal elements."""
    size = round(len(reference) ** 0.5)
    found, reference = found.reshape(size, size), reference.reshape(size, size)
    scale = np.sqrt(reference.diagonal())
    return float((np.abs(found - reference) / scale[:, None] / scale).max())


def of_vector(found: np.ndarray, reference: np.ndarray) -> float:
    """The largest difference, over the largest element."""
    return float(np.abs(found - reference).max() / np.abs(reference).max())


def of_gaussian(found: np.ndarray, reference: np.ndarray) -> float:
    """The largest difference of means or sds, in sds; both are means, then sds."""
    sd = np.split(reference, 2)[1]
    return float(np.abs((found - reference) / np.concatenate([sd, sd])).max())


BACKPACK = "laplace-torch, BackPACK, batch 1797"
ONE, TWO, NARROW = {"hidden": (64,)}, {"hidden": (64, 64)}, {"hidden": (16,)}
#: What of a Pyro Scale object is timed.
WARM = (
    "For Pyro Scale, the time is that of all of `ps.Laplace(model).run((x, y), mode=weights)`, "
    "with the evidence: for an object that has run on these tensors before, which checks that "
    "model and data are the same, or for a new object, which inspects the model first."
)


def _laplace_torch(name: str, backend: str | None, batch_size: int, **more: Any) -> Contender:
    arguments = {"backend": backend, "batch_size": batch_size, **more}
    return Contender(
        f"laplace-torch, {name}, batch {batch_size}", "laplaces:laplace_torch", arguments
    )


def _posteriors(kind: str, batch_size: int, **more: Any) -> Contender:
    arguments = {"kind": kind, "batch_size": batch_size, **more}
    name = f"posteriors, {kind}, batch {batch_size}"
    return Contender(name, "laplaces:posteriors_laplace", arguments)


def _in(dtype: str, contender: Contender) -> Contender:
    name = f"{contender.name} ({dtype})" if dtype != "float32" else contender.name
    arguments = {**contender.arguments, "dtype": dtype}
    return Contender(name, contender.problem, arguments)


def _diagonal(name: str, sizes: str, hidden: dict[str, Any]) -> Question:
    contenders = (
        Contender(OURS, "laplaces:ours", hidden),
        Contender(f"{OURS}, a new object", "laplaces:ours", {**hidden, "again": False}),
        Contender(f"{OURS}, the curvature alone", "laplaces:ours_curvature", hidden),
        _laplace_torch("default (curvlinops)", None, 8, **hidden),
        _posteriors("diag_ggn", 4, **hidden),
        _laplace_torch("BackPACK", "BackPackGGN", 1797, **hidden),
        _laplace_torch("ASDL", "AsdlGGN", 1797, **hidden),
    )
    double = tuple(_in("float64", contenders[place]) for place in (0, 2, 5))
    default, posteriors, backpack, asdl = _names(contenders)[3:]
    alone = f"{OURS}, the curvature alone"
    return Question(
        name,
        f"The diagonal GGN of a network {sizes}",
        f"{_count(hidden):,} weights, 1,797 rows, standard normal prior.  From the weights to the "
        f"posterior's precision.  {WARM}  curvlinops itself has estimates of a diagonal and no "
        "exact one.",
        (*contenders, *double),
        (
            Target("the curvature alone, against BackPACK", backpack, ours=alone, faster=2),
            Target("the curvature alone, against ASDL", asdl, ours=alone, faster=2),
            Target("the curvature alone, against posteriors", posteriors, ours=alone, faster=50),
            Target("all of run(), against BackPACK", backpack, faster=1 / 1.5),
            Target("all of run(), against ASDL", asdl, faster=1 / 1.5),
            Target("all of run(), against laplace-torch's default", default, faster=1),
            Target("the precision, in float32", backpack, close=1e-5),
            Target(
                "the precision, in float64",
                f"{backpack} (float64)",
                ours=f"{OURS} (float64)",
                close=1e-12,
            ),
        ),
        f"{backpack} (float64)",
        relative,
        "precision: largest relative difference",
    )


def _count(hidden: dict[str, Any]) -> int:
    sizes = (64, *hidden["hidden"], 10)
    return sum((before + 1) * after for before, after in pairwise(sizes))


def _dense(dtype: str) -> tuple[Contender, ...]:
    dense = {**NARROW, "structure": "dense"}
    contenders = (
        Contender(OURS, "laplaces:ours", dense),
        Contender(f"{OURS}, the curvature alone", "laplaces:ours_curvature", dense),
        _laplace_torch("default (curvlinops)", None, 1797, structure="Full", **NARROW),
        _laplace_torch("BackPACK", "BackPackGGN", 128, structure="Full", **NARROW),
        _posteriors("dense_ggn", 8, **NARROW),
        Contender("curvlinops, times the identity", "laplaces:curvlinops_matrix", NARROW),
    )
    return tuple(_in(dtype, contender) for contender in contenders)


def _names(contenders: tuple[Contender, ...]) -> list[str]:
    return [contender.name for contender in contenders]


def _laplace_question(
    name: str,
    title: str,
    text: str,
    make: Callable[[str], tuple[Contender, ...]],
    own_targets: tuple[Target, ...] = (),
    **more: Any,
) -> Question:
    single, double = make("float32"), make("float64")
    default, posteriors = [
        next(each for each in _names(single) if each.startswith(start))
        for start in ("laplace-torch, default", "posteriors")
    ]
    targets = (
        Target("against laplace-torch's default", default, faster=1),
        Target("against posteriors", posteriors, faster=1),
        Target("the precision, in float32", default, close=1e-5),
        Target(
            "the precision, in float64",
            f"{default} (float64)",
            ours=f"{OURS} (float64)",
            close=1e-5,
        ),
    )
    targets += own_targets
    # laplace-torch's default makes a dense matrix of a float32 identity, whatever the type
    reference = next(each for each in _names(double) if "BackPACK" in each)
    return Question(name, title, text, (*single, *double), targets, reference, **more)


DENSE = _laplace_question(
    "dense",
    "The dense GGN of a network 64-16-10",
    "1,210 weights, 1,797 rows; with the factor of the covariance.",
    _dense,
    distance=of_matrix,
    difference="precision: largest difference over the roots of the diagonals",
)

_KRON = {**NARROW, "structure": "kron"}
KRON = Question(
    "kron",
    "Kronecker factors of the network 64-16-10",
    "1,210 weights, 1,797 rows in a single batch; from the weights to the eigenvalues.",
    tuple(
        _in(dtype, contender)
        for dtype in ("float32", "float64")
        for contender in (
            Contender(OURS, "laplaces:ours", _KRON),
            _laplace_torch("default (curvlinops)", None, 1797, structure="Kron", **NARROW),
            _laplace_torch("BackPACK", "BackPackGGN", 1797, structure="Kron", **NARROW),
        )
    ),
    (
        Target(
            "against laplace-torch's default",
            "laplace-torch, default (curvlinops), batch 1797",
            faster=1,
        ),
        Target("against laplace-torch with BackPACK", BACKPACK, faster=1 / 1.5),
        Target(
            "the precision, in float64",
            "laplace-torch, default (curvlinops), batch 1797 (float64)",
            ours=f"{OURS} (float64)",
            close=1e-5,
        ),
    ),
    f"{BACKPACK} (float64)",
    of_matrix,
    "precision: largest difference over the roots of the diagonals",
)

PRODUCT = Question(
    "product",
    "The GGN of the network 64-64-64-10 times a vector",
    "All 1,797 rows at once.",
    tuple(
        _in(dtype, contender)
        for dtype in ("float32", "float64")
        for contender in (
            Contender(OURS, "laplaces:ours_product", TWO),
            Contender("curvlinops", "laplaces:curvlinops_product", TWO),
        )
    ),
    (
        Target("against curvlinops", "curvlinops", faster=1),
        Target("the product, in float32", "curvlinops", close=1e-5),
        Target(
            "the product, in float64",
            "curvlinops (float64)",
            ours=f"{OURS} (float64)",
            close=1e-5,
        ),
    ),
    "curvlinops (float64)",
    of_vector,
    "largest difference over the largest element",
)

_FISHER = {**TWO, "curvature": "empirical_fisher"}
FISHER = Question(
    "fisher",
    "The diagonal empirical Fisher of the network 64-64-64-10",
    "As the diagonal GGN, in float32.  " + WARM,
    (
        Contender(OURS, "laplaces:ours", _FISHER),
        Contender(f"{OURS}, a new object", "laplaces:ours", {**_FISHER, "again": False}),
        Contender(
            f"{OURS}, the curvature alone",
            "laplaces:ours_curvature",
            {**TWO, "kind": "empirical_fisher"},
        ),
        _laplace_torch("default (curvlinops)", "CurvlinopsEF", 128, **TWO),
        _laplace_torch("BackPACK", "BackPackEF", 1797, **TWO),
        _posteriors("diag_fisher", 32, **TWO),
    ),
    (
        Target(
            "against laplace-torch's default",
            "laplace-torch, default (curvlinops), batch 128",
            faster=1,
        ),
        Target("against posteriors", "posteriors, diag_fisher, batch 32", faster=1),
        Target("against laplace-torch with BackPACK", BACKPACK, faster=1),
        Target(
            "the precision",
            "laplace-torch, default (curvlinops), batch 128",
            close=1e-5,
        ),
    ),
    "laplace-torch, default (curvlinops), batch 128",
    relative,
    "precision: largest relative difference",
)


def _vi(structure: str, guide: str) -> Question:
    def peer(density: str, **more: Any) -> Contender:
        arguments = {"structure": structure, "density": density, "steps": 300, **more}
        name = f"posteriors, {density.replace('_', ' ')}{plain if more else ''}"
        return Contender(name, "steps:vi_posteriors", arguments)

    plain, steps = ", plain gradients", 50_000

    contenders = (
        Contender(OURS, "steps:vi_ours", {"structure": structure, "steps": steps}),
        Contender(
            f"{OURS}{plain}",
            "steps:vi_ours",
            {"structure": structure, "steps": steps, "sticking": False},
        ),
        Contender(
            f"{OURS}, eager",
            "steps:vi_ours",
            {"structure": structure, "steps": 300, "compile": False},
        ),
        peer("by_hand"),
        peer("by_hand", sticking=False),
        peer("through_pyro"),
        Contender(f"Pyro SVI, {guide}", "steps:vi_pyro", {"guide": guide, "steps": 300}),
    )
    reach = 500 if structure == "dense" else 50
    targets = (
        Target("against posteriors on the log joint by hand", "posteriors, by hand", faster=reach),
        Target("against posteriors on the Pyro model", "posteriors, through pyro", faster=reach),
        Target(
            "against posteriors by hand, both with plain gradients",
            f"posteriors, by hand{plain}",
            ours=f"{OURS}{plain}",
            faster=50,
        ),
    )
    return Question(
        f"vi_{structure}",
        f"A step of variational inference, {structure}",
        "Logistic regression, 768 rows, 8 columns, batch 32; one draw a step, "
        "`sticking_the_landing`, Adam with an lr that falls from 0.01 to 0.0001 over 3,000 steps.  "
        "A step draws its rows and its noise.  The eager run takes only 300 steps, so its fit has "
        "not converged.  Plain gradients, the default here and in Pyro, do without "
        "`sticking_the_landing`, which is posteriors' default.",
        contenders,
        targets,
        OURS,
        of_gaussian,
        "largest difference of means and sds, in sds",
        "us",
        1e6,
    )


def _ekf(structure: str) -> Question:
    ours, steps = "steps:ekf_ours", {"structure": structure}
    fisher = {**steps, "curvature": "empirical_fisher"}
    contenders = (
        Contender(f"{OURS}, empirical Fisher", ours, fisher),
        Contender(f"{OURS}, empirical Fisher, step()", ours, {**fisher, "way": "step"}),
        Contender(f"{OURS}, empirical Fisher, eager", ours, {**fisher, "way": "eager"}),
        Contender(f"{OURS}, GGN (the default)", ours, {**steps, "curvature": "ggn"}),
        Contender(f"posteriors, {structure}_fisher", "steps:ekf_posteriors", steps),
    )
    first, *_, peer = _names(contenders)
    same = structure == "diag"
    text = (
        "The same regression, 600 batches of 32 rows in order, of which the eager run takes 24.  "
        "The whole run() is that of an object that has run before, and includes the check of its "
        "fit.  posteriors has only the empirical Fisher, with a density written by hand; ours is "
        "the Pyro model."
    )
    if not same:
        text += (
            "  posteriors 0.1.3 subtracts the Fisher information where a filter must add it.  At "
            "Bayes' lr its precision is therefore not positive after a few steps, so it is timed "
            "at an lr of 0.001, and numbers are not compared."
        )
    return Question(
        f"ekf_{structure}",
        f"A step of the extended Kalman filter, {structure}",
        text,
        contenders,
        (
            *((Target("the filtered Gaussian", peer, ours=first, close=1e-5),) if same else ()),
            Target("posteriors' time over ours", peer, ours=first, faster=50),
        ),
        peer,
        of_gaussian if same else None,
        "largest difference of means and sds, in sds",
        "us",
        1e6,
    )


def _falling(method: str, structure: str) -> Question:
    def ours(lr: str, way: str = "compiled") -> Contender:
        of = {"method": method, "structure": structure, "lr": lr, "way": way}
        return Contender(f"{lr} lr{', eager' * (way == 'eager')}", "steps:falling", of)

    contenders = (
        ours("constant"),
        ours("linear"),
        ours("exponential"),
        ours("linear", "eager"),
    )
    constant, linear, exponential, eager = _names(contenders)
    return Question(
        f"falling_{method.lower()}_{structure}",
        f"A step of {method} as its lr falls, {structure}",
        "The same regression, with TorchOpt's schedules.  The compared fits are those after 300 "
        "steps.",
        contenders,
        (
            Target("a constant lr's time over a line's", constant, ours=linear, faster=0.9),
            Target("a constant lr's time over an exponential's", constant, exponential, faster=0.9),
            Target("the fit, compiled and eager", eager, ours=linear, close=1e-4),
        ),
        eager,
        of_gaussian,
        "largest difference of means and sds, in sds",
        "us",
        1e6,
    )


def _first(method: str, structure: str) -> Question:
    of = {"method": method, "structure": structure, "steps": 5000}
    return Question(
        f"first_{method.lower()}_{structure}",
        f"First and later runs of {method}, {structure}",
        "The time is that of all of run(), over 5,000 steps of 32 rows of a logistic regression "
        "with 8 columns: for an object that has run on these tensors before; for a new object, "
        "which inspects the model and traces its step; and for the first run, with nothing "
        "compiled yet.  The difference is between the means of the last and the first run, in sds.",
        (Contender(OURS, "steps:first_and_later", of),),
        (Target("the same fit again", OURS, close=1e-6),),
        unit="s",
        per_second=1,
        distance=lambda found, _: float(found[0]),
        difference="difference of the runs",
    )


def _predictions(name: str, title: str, hidden: tuple[int, ...] | None) -> Question:
    def contender(label: str, way: str) -> Contender:
        return Contender(label, "predictions:predict", {"hidden": hidden, "way": way})

    each = "one pass of torch a draw"
    contenders = [contender(OURS, "ours"), contender(each, "each draw")]
    targets = [Target("the mean prediction", each, close=1e-5)]
    if hidden is None:
        targets.append(Target("against a pass a draw", each, faster=20))
    else:
        contenders.append(contender("the batched matrix products alone", "products"))
        targets.append(
            Target(
                "against the matrix products alone",
                "the batched matrix products alone",
                faster=1 / 1.5,
            )
        )
    return Question(
        name,
        f"`predict` of 4,000 draws for 1,000 rows: {title}",
        "`predict(x, reduce='mean')` of a sampler's draws, against a pass of plain torch for each.",
        tuple(contenders),
        tuple(targets),
        each,
        lambda found, reference: float(np.abs(found - reference).max()),
        "largest difference of a chance",
    )


QUESTIONS = (
    _diagonal("diagonal_one", "64-64-10", ONE),
    _diagonal("diagonal_two", "64-64-64-10", TWO),
    DENSE,
    KRON,
    PRODUCT,
    FISHER,
    _vi("diag", "AutoDiagonalNormal"),
    _vi("dense", "AutoMultivariateNormal"),
    _ekf("diag"),
    _ekf("dense"),
    _falling("VI", "diag"),
    _falling("VI", "dense"),
    _falling("MAP", "point"),
    _first("VI", "diag"),
    _first("VI", "dense"),
    _first("EKF", "diag"),
    _first("EKF", "dense"),
    _predictions("predict_regression", "a regression with 8 columns", None),
    _predictions("predict_network", "a network 64-64-10", (64,)),
)


# ------------------------------------------------------------------ measuring


def measure(question: Question, rounds: int) -> Record:
    """A question's rows and targets."""
    answers: dict[str, list[Answer]] = {}
    workers: list[Worker] = []
    for contender in question.contenders:
        worker = Worker(contender)
        ready = worker.answer()
        print(f"  {contender.name}: {ready.failure or 'ready'}", flush=True)
        answers[contender.name] = [ready] if ready.failure else []
        if not ready.failure:
            workers.append(worker)
    for _ in range(rounds):
        for worker in workers:
            given = answers[worker.contender.name]
            if not (given and given[-1].failure):
                given.append(worker.ask())
    for worker in workers:
        worker.stop()
    rows = {name: _row(question, given, answers) for name, given in answers.items()}
    return {
        "when": f"one core, {circumstances(PACKAGES)}",
        "rounds": rounds,
        "rows": rows,
        "targets": [_reached(question, target, rows, answers) for target in question.targets],
    }


def _row(question: Question, given: list[Answer], answers: Mapping[str, list[Answer]]) -> Record:
    failure = next((answer.failure for answer in given if answer.failure), "")
    if failure:
        return {"failure": failure}
    times = {
        part: [answer.seconds[part] * question.per_second for answer in given]
        for part in given[0].seconds
    }
    return {
        "median": {part: statistics.median(values) for part, values in times.items()},
        "least": {part: min(values) for part, values in times.items()},
        "difference": _difference(question, given, answers.get(question.reference, [])),
    }


def _difference(question: Question, given: list[Answer], others: list[Answer]) -> float | None:
    numbers = [answers[-1].mean if answers else None for answers in (given, others)]
    found, reference = numbers
    if question.distance is None or found is None or reference is None:
        return None
    return question.distance(found, reference)


def _reached(
    question: Question,
    target: Target,
    rows: Mapping[str, Record],
    answers: Mapping[str, list[Answer]],
) -> Record:
    ours, peer = rows[target.ours], rows[target.peer]
    record: Record = {"what": target.what, "figure": None, "bound": "", "reached": None}
    if target.close is not None:
        figure = _difference(question, answers[target.ours], answers[target.peer])
        bound, reached = f"<= {target.close:g}", figure is not None and figure <= target.close
    else:
        times = [row.get("median", {}).get("") for row in (ours, peer)]
        figure = None if None in times else times[1] / times[0]
        bound = "" if target.faster is None else f">= {target.faster:g}x"
        reached = figure is not None and figure >= (target.faster or 0)
    if figure is not None:
        record.update(figure=figure, reached=reached if bound else None)
    return {**record, "bound": bound}


def measure_memory() -> Record:
    """The dense GGN of 5,017 parameters over 60,000 rows, in processes of their own."""
    rows: dict[str, Record] = {}
    for what, name, most in (
        ("curvature", "`ps.Curvature(...).dense`", 2),
        ("laplace", '`ps.Laplace(structure="dense").run`', 3),
    ):
        command = [sys.executable, "-W", "ignore", str(HERE / "memory.py"), what]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            rows[name] = {"failure": ran.stderr.strip().splitlines()[-1]}
            continue
        found = json.loads(ran.stdout.splitlines()[-1])
        found["matrices"] = found["bytes"] / (4 * found["size"] ** 2)
        found["most"] = most
        rows[name] = found
        print(f"  {name}: {found['bytes'] / 1e6:.0f} MB, {found['seconds']:.1f} s", flush=True)
    return {"when": f"one core, {circumstances(PACKAGES)}", "rows": rows}


# ------------------------------------------------------------------ the page


def table(question: Question, record: Record) -> str:
    """A question in Markdown."""
    lines = [f"## {question.title}", "", question.text, ""]
    lines += ["| target | to reach | measured | reached |", "|---|---|---|---|"]
    for target in record["targets"]:
        reached = {True: "yes", False: "**no**", None: ""}[target["reached"]]
        figure = _short(target["figure"]) or "not measured"
        lines.append(f"| {target['what']} | {target['bound']} | {figure} | {reached} |")
    head = f"| contender | median, {question.unit} | least | x ours | {question.difference} |"
    lines += ["", head, "|---|---|---|---|---|"]
    first = next(iter(record["rows"].values())).get("median", {}).get("")
    for name, row in record["rows"].items():
        if "failure" in row:
            lines.append(f"| {name} | failed | | | {row['failure']} |")
            continue
        for part, median in row["median"].items():
            label = f"{name}, {part}" if part else name
            ratio = _short(median / first) if first else ""
            difference = "" if part else _short(row["difference"])
            if row["difference"] == 0 and name == question.reference and not part:
                difference = "0 (the reference)"
            least = _short(row["least"][part])
            lines.append(f"| {label} | {_short(median)} | {least} | {ratio} | {difference} |")
    lines += ["", f"Medians of {record['rounds']} rounds; {record['when']}.", ""]
    return "\n".join(lines)


def memory_table(record: Record) -> str:
    """The question of memory in Markdown."""
    lines = [
        "## Memory of the dense GGN of 5,017 parameters over 60,000 rows",
        "",
        "A network 64-76-1, Bernoulli, float32: a matrix is 101 MB.  The table shows the peak of "
        "the process's resident memory, less what it held with model and data.",
        "",
        "| | MB | matrices | to reach | s | reached |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in record["rows"].items():
        if "failure" in row:
            lines.append(f"| {name} | failed | | | | {row['failure']} |")
            continue
        reached = "yes" if row["matrices"] <= row["most"] else "**no**"
        cells = f"{row['bytes'] / 1e6:.0f} | {row['matrices']:.2f} | <= {row['most']} | "
        cells += f"{row['seconds']:.1f}"
        lines.append(f"| {name} | {cells} | {reached} |")
    return "\n".join([*lines, "", f"{record['when']}.", ""])


def page(results: Mapping[str, Record]) -> str:
    """All of `docs/approximations.md`."""
    short = [
        f"- {question.title}: {target['what']}, {_short(target['figure'])} ({target['bound']})"
        for question in QUESTIONS
        for target in results.get(question.name, {}).get("targets", [])
        if target["reached"] is False
    ]
    short += [
        f"- Memory: {name}, {row['matrices']:.2f} matrices (<= {row['most']})"
        for name, row in results.get("memory", {}).get("rows", {}).items()
        if row.get("matrices", 0) > row.get("most", 0)
    ]
    parts = [
        "# Speed of the approximations against other libraries",
        "",
        "Written by `make approximations` (`benchmarks/approximations/run.py`).  Every contender "
        "runs in its own process with one thread, all on the same core, and they are timed in "
        "turns. The machine is a shared virtual machine of two cores, so compare ratios rather "
        "than times. Times of Laplace approximations and filters are CPU time; those of "
        "variational inference and of the memory table are wall-clock time. For the diagonal GGN, "
        "other libraries' batch sizes were tried once (1 to 32 rows, and up to 1,797 for BackPACK "
        "and ASDL); for the other tables they were not, so another batch size may be faster.",
        "",
        "These targets were missed:" if short else "All targets were reached.",
        *([""] if short else []),
        *short,
        "",
    ]
    parts += [table(q, results[q.name]) for q in QUESTIONS if q.name in results]
    if "memory" in results:
        parts.append(memory_table(results["memory"]))
    return "\n".join(parts)


def _short(number: float | None) -> str:
    """Three digits, or all before the point; exponents for what is tiny."""
    if number is None:
        return ""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1e}" if 0 < abs(number) < 1e-3 else f"{number:.3g}"


def main() -> None:
    """Asks what is asked for and prints the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    os.environ.update(ONE_THREAD)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    asked = [*[(q.name, q) for q in QUESTIONS], ("memory", None)]
    asked = [(name, q) for name, q in asked if name.startswith(arguments.only)]
    if not asked:
        parser.error(f"--only takes the start of {[*(q.name for q in QUESTIONS), 'memory']}")
    for name, question in asked:
        print(f"{name}", flush=True)
        record = measure_memory() if question is None else measure(question, arguments.rounds)
        results[name] = record
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
