"""Figure 2 of the paper: a density of four wells, by one chain and by many, in numbers.

The paper shows the density without a formula; that of its authors' example code is

    log p(x) = sum_i (x_i^2 - x_i^4 / 10) + const,    x in R^2.

Truth is the share of each of 30 x 30 bins by quadrature; what is reported is the total variation
distance from it of 500,000 draws: of 10,000 chains that keep 50 each, and of one chain that takes
as many steps in all.  At temperature 0 the chains are a deep ensemble.  Beside it the same wells
with unequal masses: of the same depth, which chains cross, and three times as deep, which they do
not, so that parallel chains keep the shares of their starts.  Nothing is scaled down.

    OMP_NUM_THREADS=1 python notebooks/paper/double_well.py

Writes double_well.json and double_well.png; it takes a few minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import pyro_scale as ps

HERE = Path(__file__).resolve().parent
RESULTS, FIGURE = HERE / "double_well.json", HERE / "double_well.png"

BINS, INSIDE, EDGE = 30, 20, 4.0
SEEDS = range(3)

#: Chains and draws of each; steps of BAOA from one draw to the next, and before the first.
CHAINS, DRAWS, LR, THINNING, WARMUP = 10_000, 50, 0.2, 40, 400


class Wells(NamedTuple):
    """log p(x) = depth sum_i (x_i^2 - x_i^4 / 10) + tilt x_1, at a temperature."""

    depth: float = 1.0
    tilt: float = 0.0
    temperature: float = 1.0

    def log_density(self, x: Tensor) -> Tensor:
        """At x `[..., 2]` and temperature 1, without the constant."""
        return self.depth * (x**2 - x**4 / 10).sum(-1) + self.tilt * x[..., 0]

    def posterior(self) -> ps.LogPosterior:
        """As what samplers take."""
        return ps.LogPosterior.from_function(
            lambda params, batch: self.log_density(params["x"]), {"x": torch.zeros(2)}, num_data=1
        )

    def marginals(self, ticks: Tensor) -> Tensor:
        """p of either coordinate at ticks, `[2, ticks]`; the density is their product."""
        well = self.depth * (ticks**2 - ticks**4 / 10)
        exponent = torch.stack([well + self.tilt * ticks, well]) / self.temperature
        return (exponent - exponent.amax(1, keepdim=True)).exp()

    def shares(self) -> Tensor:
        """The exact share of each bin, `[30, 30]`: the midpoint rule with 20 points a side."""
        points = (torch.arange(BINS * INSIDE, dtype=torch.float64) + 0.5) / (BINS * INSIDE)
        sides = self.marginals(EDGE * (2 * points - 1)).view(2, BINS, INSIDE).sum(2)
        sides = sides / sides.sum(1, keepdim=True)
        return sides[0][:, None] * sides[1]

    def exact_draws(self, count: int, seed: int) -> Tensor:
        """By the inverse of each coordinate's distribution function, `[count, 2]`."""
        fine = torch.linspace(-EDGE - 1, EDGE + 1, 100_001, dtype=torch.float64)
        below = self.marginals((fine[1:] + fine[:-1]) / 2).cumsum(1)
        below = below / below[:, -1:]
        uniform = torch.rand(
            2, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        return fine[torch.searchsorted(below, uniform) + 1].T

    def saddle(self) -> float:
        """Where the two sides of x_1 meet."""
        middle = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
        return float(middle[self.marginals(middle)[0].argmin()])

    def right(self) -> float:
        """The exact share of the right side."""
        fine = torch.linspace(-EDGE - 1, EDGE + 1, 100_001, dtype=torch.float64)
        density = self.marginals(fine)[0]
        return float(density[fine > self.saddle()].sum() / density.sum())


def histogram(draws: Tensor) -> Tensor:
    """The share of draws in each bin, `[30, 30]`; a few may lie outside of all."""
    cells = ((draws.double() + EDGE) / (2 * EDGE) * BINS).floor().long()
    inside = ((cells >= 0) & (cells < BINS)).all(1)
    flat = cells[inside, 0] * BINS + cells[inside, 1]
    return torch.bincount(flat, minlength=BINS**2).view(BINS, BINS) / len(draws)


def total_variation(shares: Tensor, found: Tensor) -> float:
    """Half the sum of the differences; what lies outside of all bins counts whole."""
    return float((found - shares).abs().sum() + 1 - found.sum()) / 2


def starts(num_chains: int, seed: int = 0) -> dict[str, Tensor]:
    """Anywhere in a square around the saddle."""
    uniform = torch.rand(num_chains, 2, generator=torch.Generator().manual_seed(seed))
    return {"x": 4 * uniform - 2}


def sample(
    wells: Wells, num_chains: int, seed: int, num_draws: int = CHAINS * DRAWS
) -> tuple[Tensor, float]:
    """Draws `[num_draws, 2]` of `BAOA`, and the seconds of its steps."""
    sampler = ps.BAOA(
        wells.posterior(),
        lr=LR,
        temperature=wells.temperature,
        init_strategy=starts(num_chains, seed),
        compile=True,
    )
    each = num_draws // num_chains
    sampler.run(
        None,
        num_samples=each,
        warmup_steps=WARMUP,
        thinning=THINNING + (0 if num_chains > 1 else WARMUP // DRAWS),  # as many steps in all
        num_chains=num_chains,
        seed=seed,
        progress=False,
    )
    return sampler.get_samples()["x"], sampler.to_arviz().posterior.attrs["sampling_time"]


def measure(wells: Wells) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The distances of parallel, serial and exact draws, and the shares of the first seed."""
    truth, saddle = wells.shares(), wells.saddle()
    row: dict[str, Any] = wells._asdict()
    row["right"] = {"quadrature": wells.right()}
    first = {"quadrature": truth}
    row["total_variation"], row["seconds"] = {}, {}
    for name, chains in {"parallel": CHAINS, "serial": 1, "exact": 0}.items():
        distances, right, seconds = [], [], []
        for seed in SEEDS:
            if chains:
                draws, spent = sample(wells, chains, seed)
            else:
                draws, spent = wells.exact_draws(CHAINS * DRAWS, seed), 0.0
            found = histogram(draws)
            first.setdefault(name, found)
            distances.append(total_variation(truth, found))
            right.append(float((draws[:, 0] > saddle).double().mean()))
            seconds.append(spent)
        row["total_variation"][name] = distances
        row["right"][name], row["seconds"][name] = right, statistics.mean(seconds)
    return row, first


def ensemble() -> dict[str, Any]:
    """1,000 chains at temperature 0, beside torch.optim from the same starts."""
    wells, begin = Wells(), starts(1000)
    chains = ps.SGHMC.from_sgd(
        wells.posterior(), lr=0.01, momentum=0.9, temperature=0.0, init_strategy=begin, compile=True
    )
    chains.run(
        None, num_samples=1, warmup_steps=0, thinning=500, num_chains=1000, seed=0, progress=False
    )
    members = chains.get_samples()["x"]
    position = begin["x"].clone().requires_grad_()
    optimizer = torch.optim.SGD([position], lr=0.01, momentum=0.9)
    for _ in range(500):
        optimizer.zero_grad()
        (-wells.log_density(position).sum()).backward()
        optimizer.step()
    return {
        "from_torch_optim": float((members - position.detach()).abs().max()),
        "from_the_modes": float((members.abs() - 5**0.5).abs().max()),
        "in_each_well": torch.unique(members > 0, dim=0, return_counts=True)[1].tolist(),
    }


CASES = {
    "T = 0.1": Wells(temperature=0.1),
    "T = 0.3": Wells(temperature=0.3),
    "T = 1": Wells(),
    "unequal masses": Wells(tilt=0.4),
    "unequal and deep": Wells(depth=3.0, tilt=0.4),
}


def plot(columns: dict[str, dict[str, Tensor]]) -> None:
    """The shares of bins: truth, many chains, one chain."""
    names = {"quadrature": "quadrature", "parallel": "10,000 chains", "serial": "one chain"}
    figure, axes = plt.subplots(3, len(columns), figsize=(11.5, 7.2), sharex=True, sharey=True)
    for column, (title, shares) in zip(axes.T, columns.items(), strict=True):
        top = float(shares["quadrature"].max())
        for ax, which in zip(column, names, strict=True):
            image = {"extent": (-EDGE, EDGE) * 2, "origin": "lower", "cmap": "viridis"}
            ax.imshow(shares[which].T, vmin=0, vmax=top, **image)
            far = total_variation(shares["quadrature"], shares[which])
            if which != "quadrature":
                text = f"TV {far:.3f}"
                ax.text(0, 0, text, color="w", ha="center", va="center", fontsize=9)
        column[0].set_title(title)
        column[-1].set_xlabel("$x_1$")
    for ax, label in zip(axes[:, 0], names.values(), strict=True):
        ax.set_ylabel(f"{label}\n$x_2$")
    figure.suptitle(
        "share of each of 30 x 30 bins, of 500,000 draws; the colors of a column have one scale"
    )
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=100)


def main() -> None:
    """Runs all, writes the numbers and the figure."""
    torch.set_num_threads(1)
    begin, rows, columns = time.perf_counter(), {}, {}
    for name, wells in CASES.items():
        rows[name], columns[name] = measure(wells)
        print(name, rows[name], flush=True)
    found = {
        "torch": torch.__version__,
        "pyro_scale": version("pyro-scale"),
        "threads": torch.get_num_threads(),
        "seconds": time.perf_counter() - begin,
        "cases": rows,
        "ensemble": ensemble(),
    }
    print(found["ensemble"], file=sys.stderr)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    plot(columns)


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    main()
