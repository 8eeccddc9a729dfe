"""Where the time of README's program goes, from a new process to `summary()`.

`python docs/figures/short_run.py` runs the program in new processes, before and after its code is
compiled, and writes docs/img/performance-short-run.svg; the seconds are printed. They are the
processor's, the compiler's included: on a quiet machine, about those that a user waits.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "img" / "performance-short-run.svg"
ROUNDS = 2
#: What `run` spends its time on: module and function of each part.
PARTS = {
    "analyze the model": ("infer.sampler", "run_problem"),
    "tune": ("infer.sampler_run", "plan_run"),
    "compile": ("engine.loop", "choose_program"),
    "take the steps": ("infer.sampler_run", "execute"),
    "measure temperatures": ("infer.sampler_run", "measure"),
    "check the draws": ("infer.sampler_run", "report"),
}
#: Of Okabe and Ito (2008).
COLORS = ["0.55", "0.75", "#E69F00", "#F0E442", "#D55E00", "#0072B2", "#56B4E9", "#CC79A7"]
COLORS += ["0.35", "#009E73"]


def cpu_seconds() -> float:
    """Seconds of processors that this process and its finished children have used."""
    return sum(os.times()[:4])


class Clock:
    """Seconds of functions by name, without those of timed functions that they call."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def watch(self, name: str, module: str, function: str) -> None:
        """Times the calls of a function that a module of Pyro Scale makes."""
        place = import_module(f"pyro_scale.{module}")
        original = getattr(place, function)

        @functools.wraps(original)
        def timed(*args, **kwargs):
            begun, inner = cpu_seconds(), self.seconds.total()
            try:
                return original(*args, **kwargs)
            finally:
                inner = self.seconds.total() - inner
                self.seconds[name] += cpu_seconds() - begun - inner

        setattr(place, function, timed)


def measure() -> dict[str, float]:
    """Seconds of the program's stages, and of the parts of `run`, in this process."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    first_run, clock = import_module("first_run"), Clock()

    def watch() -> None:
        for name, place in PARTS.items():
            clock.watch(name, *place)

    stages = first_run.main("BAOA", watch, cpu_seconds)
    run, parts = stages["run"], {name: clock.seconds[name] for name in PARTS}
    return {
        "import torch and pyro": stages["import torch, pyro"],
        "import pyro_scale": stages["import pyro_scale"],
        **parts,
        "the remainder of run": run - sum(parts.values()),
        "summary": stages["summary"],
    }


def in_new_process(cache: str) -> dict[str, float]:
    """The same in a new process, whose compiled code is in a directory."""
    places = {"PYRO_SCALE_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-W", "ignore", __file__, "measure"]
    output = subprocess.check_output(command, env={**os.environ, **places}, text=True)
    return json.loads(output)


def quickest(bars: list[dict[str, float]]) -> dict[str, float]:
    """The run with the least sum."""
    return min(bars, key=lambda bar: sum(bar.values()))


def draw(bars: dict[str, dict[str, float]]) -> None:
    """Writes the picture: a bar for each label, in parts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, axes = plt.subplots(figsize=(9, 3.6))
    left = [0.0] * len(bars)
    for name, color in zip(next(iter(bars.values())), COLORS, strict=True):
        widths = [bar[name] for bar in bars.values()]
        label = f"{name} ({', '.join(f'{width:.2f}' for width in widths)})"
        axes.barh([*bars], widths, left=left, color=color, label=label, edgecolor="white")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of one processor")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(ncol=3, loc="lower center", fontsize=9, frameon=False)
    figure.patch.set_facecolor("white")
    figure.tight_layout(rect=(0, 0.28, 1, 1))
    figure.savefig(OUT, metadata={"Date": None})


def main() -> None:
    """Runs the program, prints its seconds and draws them."""
    cold, warm = [], []
    for _ in range(ROUNDS):  # the first one also reads the files from disk
        with tempfile.TemporaryDirectory() as cache:
            cold.append(in_new_process(cache))
            warm.append(in_new_process(cache))
    bars = {"nothing compiled": quickest(cold), "compiled before": quickest(warm)}
    print(json.dumps(bars, indent=2))
    draw(bars)


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        print(json.dumps(measure()))
    else:
        main()
