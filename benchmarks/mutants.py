"""Which share of small faults the tests notice.

`python benchmarks/mutants.py [--count 100] [--seed 0] [--package tuning] [--slow]` draws places of
the package by a seed, all packages alike, makes one change at each (an operator, a factor, a sign,
a comparison, a bound), in a copy of the checkout, and runs the tests of the changed file's package
until one fails.  It prints each mutant with what became of it, and the share that was caught; a
mutant that runs into the time limit is caught, too.  What survives is either not tested, or the
same program.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyro_scale"
#: Where other packages' tests are that test one, besides those of its own name.
ALSO = {
    "core": ["kernels", "engine", "curvature"],
    "exact": ["infer"],
    "kernels": ["data"],
    "curvature": ["infer", "tuning"],
    "distributed": ["run"],
    "run": ["engine", "infer"],
    "infer": ["end_to_end"],
}
#: How long the tests of a package may take, in seconds.
LIMIT = 900
PYTEST = sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider"
OTHER: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
BOUNDS = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """A change of one expression.

    Attributes:
        path: the file.
        line: the expression's first.
        before, after: the expression.
        text: the whole file with the change.
    """

    path: Path
    line: int
    before: str
    after: str
    text: str


def changed(node: ast.expr) -> ast.expr | None:
    """The expression with one fault; None where there is none to make."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in OTHER:
            if any(
                isinstance(part, ast.Constant | ast.JoinedStr) and not is_number(part)
                for part in (left, right)
            ):
                return None  # text
            return ast.BinOp(left, OTHER[type(op)](), right)
        case ast.BinOp(left, ast.Pow(), right) if is_number(right):
            return ast.BinOp(left, ast.Pow(), ast.BinOp(right, ast.Mult(), ast.Constant(2)))
        case ast.UnaryOp(ast.USub(), operand):
            return operand
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Compare(left, [op], others) if type(op) in OTHER:
            return ast.Compare(left, [OTHER[type(op)]()], others)
        case ast.BoolOp(op, values):
            return ast.BoolOp(OTHER[type(op)](), values)
        case ast.Call(ast.Name(name), arguments, keywords) if name in BOUNDS:
            return ast.Call(ast.Name(BOUNDS[name]), arguments, keywords)
        case ast.Call(ast.Attribute(value, name), arguments, keywords) if name in BOUNDS:
            return ast.Call(ast.Attribute(value, BOUNDS[name]), arguments, keywords)
        case ast.Constant(float(number)) if number:
            return ast.Constant(2 * number)
    return None


def is_number(node: ast.expr) -> bool:
    """Whether it is written as a number."""
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def mutants(path: Path) -> Iterator[Mutant]:
    """All of a file; none within f-strings and annotations."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    skipped: list[ast.AST] = [n for n in ast.walk(tree) if isinstance(n, ast.JoinedStr | ast.Raise)]
    skipped += [n.annotation for n in ast.walk(tree) if isinstance(n, ast.AnnAssign)]
    inner = {id(part) for node in skipped for part in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr) or id(node) in inner:
            continue
        if (after := changed(node)) is None:
            continue
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        new = f"({ast.unparse(after)})"
        text = (source[:begin] + new.encode() + source[end:]).decode()
        yield Mutant(path, node.lineno, ast.unparse(node), new[1:-1], text)


def draw(count: int, seed: int, package: str | None) -> list[Mutant]:
    """Mutants of all packages in turn, each at a place drawn from all of its places."""
    folders = sorted(p for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__")
    source = random.Random(seed)
    pools = []
    for folder in folders:
        if package in (None, folder.name):
            pool = [mutant for path in sorted(folder.rglob("*.py")) for mutant in mutants(path)]
            pools.append(source.sample(pool, min(count, len(pool))))
    in_turn = (mutant for turn in zip_longest(*pools) for mutant in turn if mutant is not None)
    return list(islice(in_turn, count))


def run_tests(copy: Path, package: str, marks: str) -> subprocess.CompletedProcess[str]:
    """The tests of a package in a copy of the checkout, until one fails."""
    folders = [copy / "tests" / name for name in (package, *ALSO.get(package, []))]
    return subprocess.run(
        [*PYTEST, "-m", marks, *(str(folder) for folder in folders if folder.exists())],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )


def fate(mutant: Mutant, copy: Path, marks: str) -> str:
    """`"caught"`, with the test that caught it, or `"SURVIVED"`."""
    place = copy / mutant.path.relative_to(ROOT)
    before = place.read_text()
    place.write_text(mutant.text)
    try:
        done = run_tests(copy, mutant.path.relative_to(PACKAGE).parts[0], marks)
    except subprocess.TimeoutExpired:
        return "caught by the time limit"
    finally:
        place.write_text(before)
    if done.returncode == 0:
        return "SURVIVED"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"caught by {failed[0].split()[1] if failed else 'an error'}"


def main() -> None:
    """Draw, try and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package")
    parser.add_argument("--slow", action="store_true", help="run tests marked slow, too")
    asked = parser.parse_args()
    marks = "not long and not site" if asked.slow else "not slow and not long and not site"
    caught = total = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "site", "dist", "build")
        shutil.copytree(ROOT, copy, ignore=ignored)
        drawn = draw(asked.count, asked.seed, asked.package)
        for package in sorted({mutant.path.relative_to(PACKAGE).parts[0] for mutant in drawn}):
            if (sound := run_tests(copy, package, marks)).returncode:
                sys.exit(f"the tests of {package} fail by themselves:\n{sound.stdout[-2000:]}")
        for mutant in drawn:
            result = fate(mutant, copy, marks)
            caught, total = caught + result.startswith("caught"), total + 1
            where = f"{mutant.path.relative_to(ROOT)}:{mutant.line}"
            print(f"{where}: {mutant.before} -> {mutant.after}: {result}", flush=True)
    print(f"{caught} of {total} caught")


if __name__ == "__main__":
    main()
