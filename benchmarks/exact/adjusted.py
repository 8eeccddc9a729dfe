"""ps.GHMC beside ps.NUTS: effective draws a gradient, with nothing set in either.

The least ESS of all elements and their squares, over gradients of the sampling phase; gradients of
warm-up are listed beside it.  Both take all rows, so that a gradient costs the same.  The models
are those of `mams_trial.py`.

    python benchmarks/exact/adjusted.py [--seeds 4] [NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from mams_trial import MODELS, least_ess

import pyro_scale as ps


def nuts(model: Any, data: Any, num_data: int | None) -> Callable[[int], tuple[float, str]]:
    """Runs seeds: (effective draws a gradient, the verdict, which NUTS has none of)."""
    sampler = ps.NUTS(model, num_data=num_data)

    def run(seed: int) -> tuple[float, str]:
        result = sampler.run(data, seed=seed, progress=False).posterior.draws
        gradients = int(result.sample_stats["n_steps"].sum())
        return least_ess(result.positions.numpy()) / gradients, ""

    return run


def adjusted(model: Any, data: Any, num_data: int | None) -> Callable[[int], tuple[float, str]]:
    """Runs seeds: (effective draws a gradient, a word on the run)."""
    sampler = ps.GHMC(model, num_data=num_data)

    def run(seed: int) -> tuple[float, str]:
        result = sampler.run(data, seed=seed, progress=False).posterior.draws
        chains, draws, _ = result.positions.shape
        gradients = chains * draws * result.attrs["thinning"]
        told = (
            f"{sampler.report().verdict} (warm-up {result.attrs['warmup_steps']:,} steps a chain, "
            f"thinning {result.attrs['thinning']}, accepted {result.attrs['acceptance_rate']:.2f})"
        )
        return least_ess(result.positions.numpy()) / gradients, told

    return run


def main() -> None:
    """Prints a line a model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=4)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    for name in asked.names or MODELS:
        rates, said = dict[str, list[float]](), []
        for contender in (nuts, adjusted):
            run, rates[contender.__name__] = contender(*MODELS[name]()), []
            for seed in range(1, 1 + asked.seeds):
                rate, told = run(seed)
                rates[contender.__name__].append(rate)
                said += [told] if told else []
        mean = {each: statistics.geometric_mean(of) for each, of in rates.items()}
        spread = {each: f"{min(of):.4f} to {max(of):.4f}" for each, of in rates.items()}
        print(
            f"{name:14} NUTS {mean['nuts']:.4f} ({spread['nuts']})  GHMC {mean['adjusted']:.4f} "
            f"({spread['adjusted']})  ratio {mean['adjusted'] / mean['nuts']:.2f}\n    "
            + "\n    ".join(said),
            flush=True,
        )


if __name__ == "__main__":
    main()
