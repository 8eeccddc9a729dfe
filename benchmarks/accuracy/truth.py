"""The posteriors' true moments: `python benchmarks/accuracy/truth.py`, once, some minutes.

    --only NAME    only the posteriors whose name starts so; the others' entries are kept
    --draws 600    a chain, of 64
    --length 2     of a trajectory, in posterior sds; the Gaussian process needs 10
    --seed 0

Runs Hamiltonian Monte Carlo with a Metropolis test on Pyro's own density of all rows, in float64
and without Pyro Scale, and writes `truth.json`: for each element its mean, sd, the Monte Carlo
standard errors of both, bulk ESS and R-hat.  Linear regressions have `exact_mean` and `exact_sd` by
quadrature beside them, which the benchmark uses instead; how far the draws are from them is
printed, in Monte Carlo standard errors.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import arviz
import numpy as np
import pyro
import torch
from entry import Posterior, Tensors, elements
from hmc import Chains, Layout, mode
from more import MORE
from posteriors import POSTERIORS
from pyro import poutine
from pyro.infer.mcmc.util import initialize_model
from torch import Tensor
from torch.distributions import biject_to

TRUTH = Path(__file__).parent / "truth.json"
CHAINS, WARMUP, STARTS = 64, 200, 8

#: What a reference has to reach: the mean's standard error in sds, and R-hat.
MOST_ERROR, MOST_R_HAT = 0.02, 1.01


def init(site: dict[str, Any]) -> Tensor:
    """Uniform in (-1, 1), unconstrained; Pyro's own cannot start at improper priors."""
    fn = site["fn"]
    base = fn.support.base_constraint if hasattr(fn.support, "base_constraint") else fn.support
    transform = biject_to(base)
    return transform(2 * torch.rand(transform.inverse_shape(fn.shape())) - 1)


def sample(
    posterior: Posterior, data: Tensors, draws: int, length: float, seed: int
) -> dict[str, Tensor]:
    """Draws of the compared sites, `[chains, draws, ...]`, constrained."""
    pyro.set_rng_seed(seed)
    start = posterior.start(data)

    def init_strategy(site: dict[str, Any]) -> Tensor:
        return start[site["name"]] if site["name"] in start else init(site)

    def unconstrained() -> tuple[dict[str, Tensor], Any, Any]:
        # Given the nesting, Pyro need not draw from improper priors to guess it.
        return initialize_model(
            posterior.model, data, max_plate_nesting=1, init_strategy=init_strategy
        )[:3]

    like, potential_fn, transforms = unconstrained()
    layout = Layout(like)

    def potential(position: Tensor) -> Tensor:
        return potential_fn(layout.unflatten(position))

    def compared(position: Tensor) -> dict[str, Tensor]:
        free = layout.unflatten(position)
        values = {name: transforms[name].inv(value) for name, value in free.items()}
        trace = poutine.trace(poutine.condition(posterior.model, values)).get_trace(*data)
        return {site: trace.nodes[site]["value"] for site in posterior.sites}

    starts = torch.stack([layout.flatten(unconstrained()[0]) for _ in range(STARTS)])
    center = mode(potential, starts)
    covariance = torch.linalg.inv(torch.func.hessian(potential)(center))
    chains = Chains(potential, center, covariance, CHAINS, length)
    chains.run(100, adapt=True)
    chains.learn(chains.run(WARMUP, adapt=True))
    chains.run(100, adapt=True)
    kept = chains.run(draws)
    return torch.func.vmap(torch.func.vmap(compared))(kept)


def moments(draws: np.ndarray) -> dict[str, float]:
    """Mean, sd, their standard errors, effective draws (in bulk) and R-hat of draws `[chains,
    draws]` of one element."""
    return {
        "mean": float(draws.mean()),
        "sd": float(draws.std()),
        "mcse": float(arviz.mcse(draws)),
        "sd_mcse": float(arviz.mcse(draws, method="sd")),
        "ess": float(arviz.ess(draws)),
        "r_hat": float(arviz.rhat(draws)),
    }


def reference(
    posterior: Posterior, data: Tensors, draws: int, length: float, seed: int
) -> dict[str, Any]:
    """A posterior's entry of `truth.json`."""
    start = time.perf_counter()
    values = sample(posterior, data, draws, length, seed)
    exact = exact_elements(posterior, data)
    found = {}
    for name, column in elements(values, posterior.sites).items():
        found[name] = {**moments(column.numpy()), **exact.get(name, {})}
    return {
        "settings": {
            "chains": CHAINS,
            "draws": draws,
            "warmup": WARMUP + 200,
            "length": length,
            "seed": seed,
        },
        "versions": {package: version(package) for package in ("torch", "pyro-ppl")},
        "seconds": round(time.perf_counter() - start, 1),
        "elements": found,
    }


def exact_elements(posterior: Posterior, data: Tensors) -> dict[str, dict[str, float]]:
    """Each element's moments by quadrature; none where there is no formula."""
    if posterior.exact is None:
        return {}
    moments = posterior.exact(data)
    means = elements({site: m[None, None] for site, (m, _) in moments.items()}, posterior.sites)
    sds = elements({site: s[None, None] for site, (_, s) in moments.items()}, posterior.sites)
    return {
        name: {"exact_mean": float(means[name]), "exact_sd": float(sds[name])} for name in means
    }


def verdict(entry: dict[str, Any]) -> str:
    """Whether a reference is good enough, and how far it is from quadrature."""
    found = entry["elements"].values()
    error = max(e["mcse"] / e["sd"] for e in found)
    r_hat = max(e["r_hat"] for e in found)
    good = error < MOST_ERROR and r_hat < MOST_R_HAT
    text = f"{'good' if good else 'NOT GOOD'}, mcse {error:.4f} sd, R-hat {r_hat:.4f}"
    if all("exact_mean" in e for e in found):
        means = max(abs(e["mean"] - e["exact_mean"]) / e["mcse"] for e in found)
        sds = max(abs(e["sd"] / e["exact_sd"] - 1) for e in found)
        text += f"; from quadrature: means {means:.1f} mcse, sds {100 * sds:.1f} %"
    text += f"; sds +- {100 * max(e['sd_mcse'] / e['sd'] for e in found):.1f} %"
    return f"{text}; {entry['seconds']} s"


def main() -> None:
    """Runs what is asked for and updates the file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--draws", type=int, default=600)
    parser.add_argument("--length", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    pyro.enable_validation(False)  # which vmap cannot do
    warnings.filterwarnings("ignore", category=FutureWarning)
    for posterior in (*POSTERIORS, *MORE):
        if posterior.same_as is not None:
            continue
        data = posterior.load() if posterior.name.startswith(arguments.only) else None
        if data is None:
            continue
        options = (arguments.draws, arguments.length, arguments.seed)
        entry = reference(posterior, data, *options)
        known = json.loads(TRUTH.read_text()) if TRUTH.exists() else {}
        TRUTH.write_text(json.dumps(known | {posterior.name: entry}, indent=1) + "\n")
        print(f"{posterior.name}: {verdict(entry)}", flush=True)


if __name__ == "__main__":
    main()
