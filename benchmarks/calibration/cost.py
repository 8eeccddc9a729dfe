"""What a calibration costs, on one core: `python benchmarks/calibration/cost.py`.

    --only PART          logistic, logistic_nuts, schools, schools_nuts or simuk
    --simulations 1000   of ours
    --peer 8             of simuk

Every part is a process of its own on one core with one thread.  Ours begins with nothing compiled,
in an empty `PYRO_SCALE_CACHE_DIR`, and its seconds are those of all of `ps.sbc`, compilation
included; `cpu` are the processor's, which are fewer where others share the core.  simuk makes and
compiles an `MCMC` for each simulation, 1,000 draws after 1,000 of warm-up as is its default; its
seconds are those of some simulations after a first one.  It needs `pip install simuk`.  Writes
`results/cost.json`; `report.py` makes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from circumstances import circumstances

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "cost.json"
PACKAGES = ("torch", "pyro-ppl", "nutpie", "simuk", "numpyro", "jax", "pyro-scale")
PARTS = ("logistic", "logistic_nuts", "schools", "schools_nuts", "simuk")


def processor() -> float:
    """Seconds of the processor, those of compilers among them."""
    return sum(os.times()[:4])


def ours(part: str, simulations: int) -> dict[str, Any]:
    """One call of `ps.sbc`."""
    import torch
    from models import COLUMNS, ROWS, SIGMA, design, logistic, schools

    import pyro_scale as ps

    torch.set_num_threads(1)
    model, rows = (
        (schools, SIGMA) if part.startswith("schools") else (logistic, design(ROWS, COLUMNS))
    )
    method = ps.NUTS if part.endswith("nuts") else ps.BAOA
    begin, cpu = time.perf_counter(), processor()
    sbc = ps.sbc(
        method(model),
        (rows, torch.zeros(len(rows))),
        num_simulations=simulations,
        seed=0,
        progress=False,
    )
    seconds, cpu = time.perf_counter() - begin, processor() - cpu
    attrs = {name: str(value) for name, value in sbc.attrs.items()}
    found = {"verdict": sbc.verdict, "slow": len(sbc.slow), "failed": len(sbc.failed)}
    spent = {"seconds": seconds, "cpu": cpu, "simulations": simulations}
    return {**spent, "attrs": attrs, **found}


def simuk(simulations: int) -> dict[str, Any]:
    """NumPyro's NUTS by simuk, a first simulation and then some more."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from models import COLUMNS, ROWS, design
    from numpyro.infer import NUTS
    from simuk import SBC

    def model(x: Any, y: Any = None) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(COLUMNS), 1.0).to_event(1))
        with numpyro.plate("data", ROWS):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    def run(count: int) -> tuple[float, float]:
        data = {"x": x, "y": jnp.zeros(ROWS, dtype=jnp.int32)}
        sbc = SBC(NUTS(model), num_simulations=count, seed=0, data_dir=data)
        begin, cpu = time.perf_counter(), processor()
        sbc.run_simulations()
        return time.perf_counter() - begin, processor() - cpu

    x = jnp.asarray(design(ROWS, COLUMNS).numpy())
    first, _ = run(1)
    seconds, cpu = run(simulations)
    return {"seconds": seconds, "cpu": cpu, "simulations": simulations, "first": first}


def measure(part: str, simulations: int) -> dict[str, Any]:
    """A part, in a process of its own."""
    with tempfile.TemporaryDirectory() as empty:
        own = {"PYRO_SCALE_CACHE_DIR": empty, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", __file__, "--alone", part]
        begin = time.perf_counter()
        ran = subprocess.run(
            [*command, "--simulations", str(simulations)],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        process = time.perf_counter() - begin
    if ran.returncode:
        raise SystemExit(f"{part}: {ran.stderr}")
    found = json.loads(ran.stdout.splitlines()[-1])
    return {**found, "process": process, "when": f"one core, {circumstances(PACKAGES)}"}


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", choices=("", *PARTS), metavar="PART")
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--peer", type=int, default=8)
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if arguments.alone:
        warnings.filterwarnings("ignore")
        count = arguments.simulations
        found = simuk(count) if arguments.alone == "simuk" else ours(arguments.alone, count)
        print(json.dumps(found))
        return
    for part in PARTS:
        if arguments.only in ("", part):
            count = arguments.peer if part == "simuk" else arguments.simulations
            record = measure(part, count)
            kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps({**kept, part: record}, indent=1) + "\n")
            print(part, record, flush=True)


if __name__ == "__main__":
    main()
