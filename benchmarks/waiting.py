"""What a user waits for: compilation, imports, README's program, in fresh processes.

`python waiting.py logistic network` compiles the two in turn and prints the seconds of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol import Timing


def compiling() -> Callable[[], Timing]:
    """Seconds from `run` to its first step: all caches empty, another model, caches warm."""

    def timing() -> Timing:
        with tempfile.TemporaryDirectory() as cache:
            first, new = _fresh_process(cache, "logistic", "network")
            (warm,) = _fresh_process(cache, "logistic")
        return Timing(
            {
                "first compile ever": first,
                "new model in the same process": new,
                "warm cache in a new process": warm,
            }
        )

    return timing


def readme(method: str) -> Callable[[], Timing]:
    """Seconds of README's program in a new process, code compiled before and not."""

    def timing() -> Timing:
        with tempfile.TemporaryDirectory() as cache:
            first, again = (_first_run(method, cache) for _ in range(2))
        stages = {f"compiled before: {name}": seconds for name, seconds in again.items()}
        return Timing({"": sum(again.values()), "nothing compiled": sum(first.values()), **stages})

    return timing


def _first_run(method: str, cache: str) -> dict[str, float]:
    """Seconds by stage; its data are scikit-learn's, whose import is left out."""
    program = str(Path(__file__).with_name("first_run.py"))
    stages: dict[str, float] = json.loads(_output(program, method, **_caches(cache)))
    del stages["data"]
    return stages


def importing(module: str) -> Callable[[], Timing]:
    """Seconds of an import in a new process."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"

    def timing() -> Timing:
        return Timing({"": float(_output("-c", code))})

    timing()  # reads the files from disk
    return timing


def _fresh_process(cache: str, *models: str) -> list[float]:
    return json.loads(_output(__file__, *models, **_caches(cache)))


def _caches(directory: str) -> dict[str, str]:
    """The environment of a process whose compiled code is in a directory."""
    return {"PYRO_SCALE_CACHE_DIR": directory, "TORCHINDUCTOR_CACHE_DIR": directory}


def _output(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={**os.environ, **environment},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout


def _main() -> None:
    import models
    import ours
    import problems
    import torch

    import pyro_scale as ps

    known: dict[str, Callable[[], Any]] = {
        "logistic": lambda: (models.logistic_model, problems.logistic_data(768)),
        "network": lambda: (ours.mlp_model(models.mlp((64,))), problems.digits()),
    }
    seconds = []
    for name in sys.argv[1:]:
        model, data = known[name]()
        mcmc = ps.SGHMC(model, lr=0.01, friction=problems.FRICTION, compile=True)
        tensors = tuple(torch.from_numpy(a) for a in data)
        start = time.perf_counter()
        mcmc.run(
            tensors,
            batch_size=32,
            num_samples=20,
            warmup_steps=0,
            thinning=5,
            num_chains=1,
            seed=0,
            progress=False,
        )
        whole = time.perf_counter() - start
        sampling = mcmc.to_arviz(log_likelihood=False).posterior.attrs["sampling_time"]
        seconds.append(whole - sampling)
    print(json.dumps(seconds))


if __name__ == "__main__":
    _main()
