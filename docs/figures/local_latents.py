"""Picture of docs/guide/groups.md: the eight schools with their effects sampled, and summed out.

`python docs/figures/local_latents.py` writes docs/img/local-latents-funnel.png, and prints
gradients, divergences and effective draws of both runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import pyro_scale as ps

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OUT = Path(__file__).resolve().parent.parent / "img" / "local-latents-funnel.png"
BLUE, VERMILION = "#0072B2", "#D55E00"  # of Okabe and Ito (2008)
Y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERROR = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(error: Tensor, y: Tensor) -> None:
    """The eight schools, centered."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(error)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, error), obs=y)


def run(name: str, model: Any) -> Any:
    """A run of NUTS, whose cost is printed."""
    fit = ps.NUTS(model).run((ERROR, Y), seed=0, progress=False)
    stats = fit.to_arviz(log_likelihood=False).sample_stats
    table = fit.summary(["mu", "tau"])
    print(
        f"{name}: {int(stats.n_steps.sum()):,} gradients of draws, "
        f"{int(stats.diverging.sum())} divergences, {table['ess_bulk'].min():.0f} effective draws"
    )
    return fit


def exact(mu: Any, log_tau: Any) -> Any:
    """The log density of (mu, log tau) given the data, effects integrated in closed form."""
    tau = np.exp(log_tau)
    variance = ERROR.numpy() ** 2 + tau[..., None] ** 2
    log_lik = -0.5 * ((Y.numpy() - mu[..., None]) ** 2 / variance + np.log(variance)).sum(-1)
    return log_lik - 0.5 * (mu / 5) ** 2 - np.log1p((tau / 5) ** 2) + log_tau


def main() -> None:
    """Runs both models and draws the picture."""
    joint = run("joint", schools)
    summed = run("summed out", ps.marginalize(schools, "theta"))
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
    draws = joint.get_samples()
    bad = joint.to_arviz(log_likelihood=False).sample_stats.diverging.values.reshape(-1)
    height = draws["tau"].log()
    dots = {"s": 3, "alpha": 0.35, "linewidths": 0}
    axes[0].scatter(draws["theta"][:, 0], height, color=BLUE, **dots)
    axes[0].scatter(draws["theta"][bad, 0], height[bad], s=14, color=VERMILION, marker="x")
    axes[0].set(title="joint: ten dimensions, a funnel", xlabel="effect of the first school")
    axes[0].set(ylabel="log tau", xlim=(-20, 40), ylim=(-6.5, 4.5))
    draws = summed.get_samples()
    axes[1].scatter(draws["mu"], draws["tau"].log(), color=BLUE, **dots)
    mu, log_tau = np.meshgrid(np.linspace(-10, 18, 200), np.linspace(-6.5, 4.5, 200))
    density = exact(mu, log_tau)
    levels = density.max() - np.array([6.0, 3.0, 1.0, 0.25])
    axes[1].contour(mu, log_tau, density, levels, colors="black", linewidths=1, linestyles="-")
    axes[1].set(title="effects summed out: two dimensions", xlabel="mu", xlim=(-10, 18))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize("medium")
    axes[1].tick_params(labelleft=True)
    figure.savefig(OUT, dpi=150, facecolor="white")


if __name__ == "__main__":
    main()
