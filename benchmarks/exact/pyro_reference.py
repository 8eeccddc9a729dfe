"""Pyro's own NUTS on the models of `nuts_models.py`: `python benchmarks/exact/pyro_reference.py`.

    --only NAME     only this model (repeatable); the others' entries are kept
    --samples 4000  draws a chain, after 1,000 steps of warm-up
    --chains 4      one after another, each with a seed of its own
    --seed 0
    --eager         without Pyro's `jit_compile`

Writes `tests/infer/pyro_nuts_references.json`: how each was made, and for each element of each site
the mean, the mean square about that mean, the Monte Carlo standard errors of both, sd, ESS and
R-hat.  `tests/infer/test_nuts_against_pyro.py` compares `ps.NUTS` with it.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import arviz
import pyro
import torch
from nuts_models import POSTERIORS, Posterior, elements, mean_and_error
from pyro.infer import MCMC, NUTS
from torch import Tensor

REFERENCES = Path(__file__).parents[2] / "tests" / "infer" / "pyro_nuts_references.json"
WARMUP = 1000
#: What a reference has to reach.
MOST_R_HAT = 1.01


def sample(
    posterior: Posterior, samples: int, chains: int, seed: int, jit: bool
) -> tuple[dict[str, Tensor], int]:
    """(Draws of each site `[chains, draws, ...]`; how many trajectories diverged)."""
    runs, divergences = [], 0
    for chain in range(chains):
        pyro.clear_param_store()
        pyro.set_rng_seed(1000 * seed + chain)
        nuts = NUTS(posterior.model, jit_compile=jit, ignore_jit_warnings=True, max_plate_nesting=1)
        mcmc = MCMC(nuts, num_samples=samples, warmup_steps=WARMUP, disable_progbar=True)
        mcmc.run(*posterior.data)
        runs.append(mcmc.get_samples())
        divergences += sum(map(len, mcmc.diagnostics()["divergences"].values()))
    draws = {site: torch.stack([run[site] for run in runs]) for site in runs[0]}
    return draws, divergences


def measure(draws: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """What is kept of each element."""
    kept = {}
    for name, column in elements(draws).items():
        mean, mean_error = mean_and_error(column)
        square, square_error = mean_and_error((column - mean) ** 2)
        kept[name] = {
            "mean": mean,
            "mean_mcse": mean_error,
            "sd": square**0.5,
            "square": square,
            "square_mcse": square_error,
            "ess": float(arviz.ess(column)),
            "r_hat": float(arviz.rhat(column)),
        }
    return kept


def reference(name: str, samples: int, chains: int, seed: int, jit: bool) -> dict[str, Any]:
    """A model's entry."""
    draws, divergences = sample(POSTERIORS[name](), samples, chains, seed, jit)
    how = {
        "method": "pyro.infer.mcmc.NUTS, float64",
        "pyro-ppl": version("pyro-ppl"),
        "torch": version("torch"),
        "chains": chains,
        "samples": samples,
        "warmup": WARMUP,
        "seed": seed,
        "jit_compile": jit,
        "divergences": divergences,
    }
    return {"how": how, "elements": measure(draws)}


def rounded(value: Any) -> Any:
    """Numbers to seven digits, which is beyond any Monte Carlo error."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return float(f"{value:.7g}") if isinstance(value, float) else value


def main(arguments: Iterable[str] | None = None) -> None:
    """Runs what is asked for and updates the file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(POSTERIORS)
    parser.add_argument("--only", action="append", default=[], choices=names, metavar="NAME")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
    for name in options.only or names:
        start = perf_counter()
        entry = reference(name, options.samples, options.chains, options.seed, not options.eager)
        entries = json.loads(REFERENCES.read_text()) if REFERENCES.exists() else {}
        entries[name] = rounded(entry)
        REFERENCES.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")
        r_hat = max(element["r_hat"] for element in entry["elements"].values())
        print(
            f"{name}: {'good' if r_hat < MOST_R_HAT else 'NOT GOOD'}, R-hat {r_hat:.4f}, ESS "
            f"{min(element['ess'] for element in entry['elements'].values()):.0f}, "
            f"{entry['how']['divergences']} divergences, {perf_counter() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
