"""ps.NUTS and NumPyro's on the same models: `python benchmarks/exact/run.py`.

    --only NAME       problems whose name begins so
    --seeds 10        runs of each
    --numpyro PYTHON  an interpreter that has NumPyro, if it is not this one

Both run on one core with one thread, in turns.  Times are of the processor, without compilation,
which is listed (a first call, with imports done).  NumPyro runs as one scan that is compiled ahead
of time, on tables as they are and by column; its `MCMC.run` compiles again at every call.  Writes
`benchmarks/exact/results.json` and prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from problems import problems

HERE = Path(__file__).parent


class _Worker:
    """A process that answers seeds."""

    def __init__(self, python: str, script: str, *arguments: str):
        one = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
        self._process = subprocess.Popen(
            ["taskset", "-c", "0", python, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | one,
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended")
        return line

    def ask(self, seed: int) -> dict[str, Any]:
        """What the run with a seed took."""
        assert self._process.stdin is not None
        print(seed, file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._read())
        return answer

    def stop(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _measure(name: str, seeds: int, numpyro: str) -> dict[str, list[dict[str, Any]]]:
    contenders = {
        "ours": (sys.executable, "ours.py", name),
        "numpyro": (numpyro, "numpyro_aot.py", name),
    }
    if name.startswith("logistic"):
        contenders["numpyro by column"] = (numpyro, "numpyro_aot.py", name, "by column")
    workers = {contender: _Worker(*command) for contender, command in contenders.items()}
    answers: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    for seed in range(seeds):
        for contender, worker in workers.items():
            answers[contender].append(worker.ask(seed))
    for worker in workers.values():
        worker.stop()
    return answers


def _row(name: str, answers: list[dict[str, Any]]) -> str:
    seconds = statistics.median(each["cpu"] for each in answers)
    rate = statistics.geometric_mean(each["ess"] / each["cpu"] for each in answers)
    per_gradient = statistics.geometric_mean(each["ess"] / each["gradients"] for each in answers)
    divergences = sum(each["divergences"] for each in answers)
    gradient, first = answers[0]["gradient"] * 1e6, answers[0]["first"]
    return (
        f"{name:20} {seconds:8.3f} s {gradient:9.2f} us {rate:9,.0f} ESS/s "
        f"{per_gradient:7.4f} ESS/gradient {divergences:3d} divergences {first:6.1f} s first  "
        f"{answers[0]['program'][:40]}"
    )


def main() -> None:
    """Measures, writes and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--numpyro", default=sys.executable, metavar="PYTHON")
    chosen = parser.parse_args()
    path = HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in problems():
        if name.startswith(chosen.only):
            results[name] = _measure(name, chosen.seeds, chosen.numpyro)
            print(name)
            for contender, answers in results[name].items():
                print("  ", _row(contender, answers), flush=True)
            path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
