"""Runs whose draws stay what they are while the code is rebuilt, each a dict of tensors.

`python tests/support/reference_runs.py` stores them in `tests/contract/reference_runs.json`: the
digest of every bit, by kind of processor, and some of the numbers, for other processors.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
import torchopt
from places import ROOT

import pyro_scale as ps

STORED = ROOT / "tests" / "contract" / "reference_runs.json"
#: Numbers that are stored of every tensor, evenly spread over it.
NUMBERS = 6

N = 240
SOURCE = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=SOURCE, dtype=torch.float64)
LOGITS = X @ torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
Y = torch.bernoulli(torch.sigmoid(LOGITS), generator=SOURCE)
DATA = X, Y
QUIET = {"seed": 5, "progress": False}
STEPS = {
    **QUIET,
    "num_samples": 40,
    "warmup_steps": 30,
    "thinning": 3,
    "num_chains": 3,
    "batch_size": 16,
}
#: Lengths that are chosen, within a small budget.
UNTUNED = {**QUIET, "num_samples": 50, "max_rows": 3_000_000}


def model(x, y=None):
    """A logistic regression with an unknown prior scale."""
    scale = pyro.sample("scale", dist.HalfNormal(torch.tensor(2.0, dtype=torch.float64)))
    with pyro.plate("features", 3):
        w = pyro.sample("w", dist.Normal(0.0, scale))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def flat_model(x, y=None):
    """The same with a known scale: a campaign of many simulations takes long on the other's."""
    with pyro.plate("features", 3):
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def of(run):
    """The draws of a run, and what it measured of them."""
    stats = run.to_arviz()["sample_stats"]
    told = {name: torch.from_numpy(stats[name].values) for name in stats.data_vars}
    return {**run.get_samples(group_by_chain=True), **told}


def by_steps(method, **options):
    return lambda: of(method(model, lr=0.05, **options).run(DATA, **STEPS))


def untuned(method, batch_size=None, **options):
    return lambda: of(method(model, **options).run(DATA, batch_size=batch_size, **UNTUNED))


def fit(method, draws=20, **options):
    def run():
        found = method(model, **options).run(DATA, num_steps=60, batch_size=16, **QUIET)
        return {**found.get_samples(draws), "trace": torch.as_tensor(found.trace)}

    return run


def laplace():
    found = ps.Laplace(model).run(DATA, **QUIET)
    return {**found.get_samples(20), "evidence": torch.tensor(found.fit.attrs["log_evidence"])}


def ekf():
    return dict(ps.EKF(model).run(DATA, batch_size=16, **QUIET).get_samples(20))


def nuts():
    """Short, as it carries rounding from draw to draw a hundredfold."""
    run = ps.NUTS(model).run(DATA, num_samples=20, warmup_steps=40, num_chains=2, **QUIET)
    return dict(run.get_samples(group_by_chain=True))


def resumed():
    """A run of every second draw, which a longer one goes on from."""
    with tempfile.TemporaryDirectory() as folder:
        method = ps.SGHMC(model, lr=0.05, compile=False)
        method.run(DATA, checkpoint=folder, **{**STEPS, "num_samples": 20})
        longer = ps.SGHMC(model, lr=0.05, compile=False)
        return of(longer.run(DATA, resume=folder, **STEPS))


def extended():
    """The same of a run whose lengths were chosen."""
    with tempfile.TemporaryDirectory() as folder:
        ps.BAOA(model).run(DATA, checkpoint=folder, **UNTUNED)
        longer = ps.BAOA(model)
        return of(longer.run(DATA, resume=folder, **{**UNTUNED, "num_samples": 80}))


def campaign():
    found = ps.sbc(ps.BAOA(flat_model), (X[:40], Y[:40]), num_simulations=20, **QUIET)
    return {name: torch.as_tensor(ranks) for name, ranks in found.ranks.items()}


RUNS = {
    "SGLD": by_steps(ps.SGLD),
    "pSGLD": by_steps(ps.pSGLD),
    "SGHMC": by_steps(ps.SGHMC),
    "SGNHT": by_steps(ps.SGNHT),
    "BAOA": by_steps(ps.BAOA),
    "UBU": by_steps(ps.UBU),
    "eager": by_steps(ps.BAOA, compile=False),
    "compiled": by_steps(ps.BAOA, compile=True),
    "by a matrix": untuned(ps.BAOA),
    "by scales": untuned(ps.SGHMC, precondition="diag"),
    "in batches": untuned(ps.BAOA, 24),
    "adjusted": untuned(ps.GHMC),
    "control variates": by_steps(ps.SGLD, control_variates=True),
    "less noise": by_steps(ps.SGHMC, subtract_noise=True),
    "MAP": fit(ps.MAP, None, optimizer=torchopt.adam(1e-2)),
    "VI": fit(ps.VI),
    "IVON": fit(ps.IVON),
    "Laplace": laplace,
    "EKF": ekf,
    "NUTS": nuts,
    "resumed": resumed,
    "extended": extended,
    "campaign": campaign,
}
#: What two processes do together, with the draws of one.
SHARED = ["BAOA", "by a matrix", "campaign"]


def machine() -> str:
    """What bits depend on: processor, torch and its instructions."""
    kind = platform.processor() or platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        names = [line for line in cpus.read_text().splitlines() if line.startswith("model name")]
        kind = names[0].partition(":")[2].strip() if names else kind
    return f"{kind}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def run(name: str) -> dict[str, torch.Tensor]:
    """A run's tensors, whatever ran before it."""
    torch.manual_seed(0)
    with pyro.get_param_store().scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RUNS[name]()


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of names, shapes, dtypes and every bit."""
    total = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        total.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        total.update(value.detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:32]


def numbers(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Some of each tensor's numbers."""
    some = {}
    for name, value in tensors.items():
        flat = value.detach().reshape(-1).double()
        places = torch.linspace(0, len(flat) - 1, min(NUMBERS, len(flat))).long()
        some[name] = flat[places].tolist()
    return some


def stored() -> dict[str, dict]:
    return json.loads(STORED.read_text()) if STORED.exists() else {}


def main() -> None:
    """Store what the runs that are named, or all, are now; or on ranks, print some's numbers."""
    if "RANK" in os.environ:
        tensors = {name: run(name) for name in SHARED}
        if os.environ["RANK"] == "0":
            print(json.dumps({name: numbers(value) for name, value in tensors.items()}))
        return
    held = stored()
    for name in sys.argv[1:] or RUNS:  # alone or after others: bits must not depend on it
        tensors = run(name)
        digests = held.get(name, {}).get("digests", {})
        held[name] = {
            "digests": digests | {machine(): digest(tensors)},
            "numbers": numbers(tensors),
        }
        print(name, flush=True)
    STORED.write_text(json.dumps({name: held[name] for name in RUNS if name in held}, indent=1))


if __name__ == "__main__":
    main()
