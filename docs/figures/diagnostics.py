"""Pictures of docs/diagnostics.md: a good run on the left, a bad one on the right.

Every curve is of a real run with a fixed seed.  `python docs/figures/diagnostics.py` makes all of
them, `python docs/figures/diagnostics.py rhat pareto_k` some.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
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

IMAGES = Path(__file__).resolve().parent.parent / "img"
QUIET: dict[str, Any] = {"seed": 0, "progress": False}
#: Okabe and Ito's (2008) colors, which differ for color-blind eyes as well, and line styles.
BLUE, VERMILION, GREEN, PURPLE, GRAY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "0.45"
CHAINS = list(zip([BLUE, VERMILION, GREEN, PURPLE], ["-", "--", "-.", ":"], strict=True))


def random(*shape: int, seed: int = 0) -> Tensor:
    """Standard normals of their own seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pair() -> tuple[Any, Any]:
    """A figure of two panels with the same axes."""
    return plt.subplots(1, 2, figsize=(8, 3), sharex=True, sharey=True, layout="constrained")


def save(figure: Any, name: str) -> None:
    """Writes a figure."""
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.title.set_fontsize("medium")
        ax.tick_params(labelleft=True)
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / f"diagnostics-{name}.png", dpi=150, facecolor="white")
    plt.close(figure)


# ---------------------------------------------------------------------------------- models


def mean(y: Tensor) -> None:
    """The mean of normals; its posterior is Gaussian and known."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def exact(y: Tensor) -> tuple[float, float]:
    """The mean and the sd of its posterior."""
    precision = 1 / 100 + len(y)
    return float(y.sum()) / precision, precision**-0.5


def mixture(y: Tensor) -> None:
    """Two components, either of which may be first: two modes."""
    m = pyro.sample("m", dist.Normal(torch.zeros(2), 5.0).to_event(1))
    with pyro.plate("data", len(y)):
        parts = dist.Categorical(torch.full((2,), 0.5))
        pyro.sample("y", dist.MixtureSameFamily(parts, dist.Normal(m, 1.0)), obs=y)


def ordered_mixture(y: Tensor) -> None:
    """The same with the components in order: one mode."""
    low = pyro.sample("low", dist.Normal(0.0, 5.0))
    gap = pyro.sample("gap", dist.LogNormal(2.0, 0.3))
    m = pyro.deterministic("m", torch.stack([low, low + gap]))
    with pyro.plate("data", len(y)):
        parts = dist.Categorical(torch.full((2,), 0.5))
        pyro.sample("y", dist.MixtureSameFamily(parts, dist.Normal(m, 1.0)), obs=y)


def regression(x: Tensor, y: Tensor | None = None) -> None:
    """A logistic regression."""
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1]), 10.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def rare(y: Tensor) -> None:
    """A rate that may be very small."""
    rate = pyro.sample("rate", dist.Gamma(0.1, 0.1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(rate), obs=y)


def counts(exposure: Tensor, y: Tensor | None = None) -> None:
    """A rate of counts."""
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(exposure)):
        pyro.sample("y", dist.Poisson(rate * exposure), obs=y)


def schools(error: Tensor, y: Tensor, centered: bool) -> None:
    """The eight schools, centered or not."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(error)):
        if centered:
            theta = pyro.sample("theta", dist.Normal(mu, tau))
        else:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            theta = pyro.deterministic("theta", mu + tau * z)
        pyro.sample("y", dist.Normal(theta, error), obs=y)


# ---------------------------------------------------------------------------------- pictures


def trace(ax: Any, draws: Any, title: str) -> None:
    """A line a chain, of draws `[chains, draws]`."""
    for number, chain in enumerate(draws):
        color, style = CHAINS[number]
        ax.plot(np.arange(len(chain)), chain, style, color=color, lw=0.9, label=f"chain {number}")
    ax.set_title(title)


def rhat() -> None:
    """Chains that agree, and chains in two modes."""
    y = torch.cat([random(40) - 3.5, random(40, seed=1) + 3.5])
    how = {"num_samples": 200, "warmup_steps": 1000, "thinning": 20, **QUIET}
    figure, axes = pair()
    for ax, model, words in (
        (axes[0], ordered_mixture, "components in order"),
        (axes[1], mixture, "either component may be first"),
    ):
        starts = {"init_strategy": pyro.infer.autoguide.init_to_sample}
        run = ps.BAOA(model, lr=0.2, **starts).run(y, **how)
        draws = run.get_samples(group_by_chain=True)["m"][..., 0]
        r_hat = run.diagnostics().r_hat.max()
        print(f"rhat: {words}: {r_hat:.2f}")
        trace(ax, draws, f"{words}: R-hat {r_hat:.2f}")
        ax.set_xlabel("draw")
    axes[0].set_ylabel("mean of component 0")
    axes[0].set_ylim(-6, 6)
    axes[0].legend(ncols=2, loc="upper left", fontsize="small", frameon=False)
    save(figure, "rhat")


def heat() -> None:
    """Draws at temperature 1, and draws that minibatches heat to 1.5, at the same step size."""
    y = random(2000) + 1
    center, sd = exact(y)
    how = {"num_samples": 4000, "warmup_steps": 5000, "thinning": 60, "batch_size": 20, **QUIET}
    figure, axes = pair()
    grid = np.linspace(-5, 5, 400)
    for ax, variates in ((axes[0], True), (axes[1], False)):
        run = ps.BAOA(mean, lr=0.01, friction=1.0, control_variates=variates)
        run.run(y, sampling="replacement", **how)
        row = run.diagnostics().loc["mu"]
        print(f"heat: {variates}: {row.to_dict()}")
        z = (run.get_samples()["mu"].numpy() - center) / sd
        ax.hist(z, np.linspace(-5, 5, 51), density=True, color=BLUE, alpha=0.45, label="draws")
        ax.plot(grid, np.exp(-(grid**2) / 2) / (2 * np.pi) ** 0.5, "k--", lw=1.3, label="exact")
        ax.set_title(f"control_variates={variates}: temperature {row.temperature:.2f}")
        ax.set_xlabel("mu, in posterior sds from the exact mean")
    axes[0].set_ylabel("density")
    axes[0].legend(loc="upper left", fontsize="small", frameon=False)
    save(figure, "heat")


def ess() -> None:
    """Draws that are nearly independent, and every state kept."""
    y = random(200)
    figure, axes = pair()
    for ax, thinning in ((axes[0], 12), (axes[1], 1)):
        run = ps.BAOA(mean, lr=0.4).run(
            y, num_samples=1000, warmup_steps=200, thinning=thinning, **QUIET
        )
        draws = run.get_samples(group_by_chain=True)["mu"].double().numpy()
        lags = np.arange(41)
        off = draws - draws.mean(1, keepdims=True)
        own = [np.mean(off[:, : off.shape[1] - lag] * off[:, lag:]) for lag in lags]
        table = run.diagnostics().loc["mu"]
        print(f"ess: thinning {thinning}: {table.ess_bulk:.0f} of {draws.size}")
        ax.bar(lags, np.array(own) / own[0], color=BLUE, width=0.7)
        ax.axhline(0, color="0.5", lw=0.8)
        ax.set_title(f"thinning={thinning}: ess_bulk {table.ess_bulk:.0f} of {draws.size} draws")
        ax.set_xlabel("lag in draws")
    axes[0].set_ylabel("autocorrelation")
    save(figure, "ess")


def pareto_k() -> None:
    """Laplace where the posterior is nearly Gaussian, and where it is skewed."""
    figure, axes = pair()
    grid = np.linspace(-9, 4, 1301)
    for ax, y in ((axes[0], torch.arange(20.0) % 5), (axes[1], torch.zeros(5))):
        fit = ps.Laplace(rare).run(y, **QUIET)
        gaussian, k = fit.fit.gaussians[0], fit.diagnostics().pareto_k[0]
        mode, sd = float(gaussian.mean), float(gaussian.variance) ** 0.5
        log_rate = torch.tensor(mode + sd * grid)
        # a gamma distribution, of the rate; times the rate, of its logarithm
        log_density = (0.1 + y.sum()) * log_rate - (0.1 + len(y)) * log_rate.exp()
        density = (log_density - log_density.max()).exp().numpy()
        density /= density.sum() * (grid[1] - grid[0])
        words = f"{len(y)} rows, {int(y.sum())} events"
        print(f"pareto_k: {words}: {k:.2f}")
        ax.plot(grid, density, "-", color=BLUE, label="exact")
        normal = np.exp(-(grid**2) / 2) / (2 * np.pi) ** 0.5
        ax.plot(grid, normal, "--", color=VERMILION, label="Laplace")
        ax.set_title(f"{words}: pareto_k {k:.2f}")
        ax.set_xlabel("log rate, in the fit's sds from its mode")
    axes[0].set_ylabel("density")
    axes[0].legend(loc="upper left", fontsize="small", frameon=False)
    save(figure, "pareto-k")


def sbc() -> None:
    """Uniform ranks, and ranks of draws that are too wide."""
    data, bins, simulations = (torch.ones(200), torch.zeros(200)), 20, 500
    figure, axes = pair()
    how = {"num_simulations": simulations, **QUIET}
    hot = {"batch_size": 5, "warmup_steps": 2000, "thinning": 100, "sampling": "replacement"}
    for ax, method, settings, words in (
        (axes[0], ps.BAOA(counts), {}, "nothing set"),
        (axes[1], ps.BAOA(counts, lr=0.02, friction=1.0), hot, "batch_size=5"),
    ):
        found = ps.sbc(method, data, **settings, **how)
        row = found.summary().loc["rate"]
        print(f"sbc: {words}:\n{found}\n{row.to_dict()}")
        places = (found.ranks["rate"].numpy() + 0.5) / (found.num_draws + 1)
        ax.hist(places, np.linspace(0, 1, bins + 1), color=BLUE, alpha=0.6, rwidth=0.9)
        each = simulations / bins
        band = 2.58 * (each * (1 - 1 / bins)) ** 0.5
        ax.axhspan(each - band, each + band, color="0.8", zorder=0)
        ax.axhline(each, color="k", ls="--", lw=1)
        ax.set_title(f"{words}: z_score_sd {row.z_score_sd:.2f}, p_holm {row.p_holm:.2g}")
        ax.set_xlabel("rank of the true rate / draws")
    axes[0].set_ylabel("simulations")
    save(figure, "sbc")


def warmup() -> None:
    """Chains that start after warm-up, and chains that are still on their way."""
    x = random(300, 3)
    y = (x @ torch.tensor([1.0, -1.0, 0.5]) + random(300, seed=1) > 0).float()
    figure, axes = pair()
    start = {"w": torch.tensor([[-60.0, 0, 0], [-30.0, 0, 0], [30.0, 0, 0], [60.0, 0, 0]])}
    for ax, steps in ((axes[0], 6000), (axes[1], 0)):
        run = ps.BAOA(regression, lr=0.6, init_strategy=start)
        run.run((x, y), num_samples=200, warmup_steps=steps, thinning=20, **QUIET)
        draws = run.get_samples(group_by_chain=True)["w"][..., 0]
        row = run.diagnostics().loc["w"]
        print(f"warmup: {steps}: {row.to_dict()}")
        words = f"R-hat {row.r_hat:.2f}, temperature {row.temperature:.3g}"
        trace(ax, draws, f"warmup_steps={steps}: {words}")
        ax.set_xlabel("draw")
    axes[0].set_ylabel("w[0]")
    axes[0].legend(ncols=2, loc="upper right", fontsize="small", frameon=False)
    save(figure, "warmup")


def exploded() -> None:
    """A step size inside of the stable range, and one above it."""
    y = random(200)
    figure, axes = pair()
    for ax, lr in ((axes[0], 0.5), (axes[1], 2.1)):
        run = ps.BAOA(mean, lr=lr, friction=1.0, init_strategy={"mu": torch.zeros(4)})
        run.run(y, num_samples=60, warmup_steps=0, thinning=1, **QUIET)
        draws = run.get_samples(group_by_chain=True)["mu"]
        end = float(draws[:, -1].abs().max())
        print(f"exploded: lr {lr}: ends at {end:.3g}")
        trace(ax, draws, f"lr={lr}")
        ax.set_yscale("symlog", linthresh=1, linscale=1)
        ax.set_xlabel("step")
    axes[0].set_ylabel("mu (symmetric log scale)")
    axes[0].legend(ncols=2, loc="upper left", fontsize="small", frameon=False)
    save(figure, "exploded")


def divergences() -> None:
    """NUTS on the eight schools, non-centered and centered."""
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    error = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    figure, axes = pair()
    for ax, centered in ((axes[0], False), (axes[1], True)):
        run = ps.NUTS(schools, target_accept=0.95).run(
            {"error": error, "y": y, "centered": centered}, **QUIET
        )
        draws, found = run.get_samples(), run.to_arviz().sample_stats.diverging.values
        diverging = found.reshape(-1)
        tau, theta = draws["tau"].numpy(), draws["theta"][:, 0].numpy()
        print(f"divergences: centered {centered}: {diverging.sum()} of {diverging.size}")
        ax.plot(theta, tau, ".", color=BLUE, ms=2, alpha=0.35)
        ax.plot(theta[diverging], tau[diverging], "x", color=VERMILION, ms=5, label="diverging")
        words = "centered" if centered else "non-centered"
        ax.set_title(f"{words}: {diverging.sum()} of {diverging.size} trajectories diverged")
        ax.set(yscale="log", xlabel="theta[0]", xlim=(-20, 40), ylim=(0.05, 60))
    axes[0].set_ylabel("tau (log scale)")
    axes[1].legend(loc="lower right", fontsize="small", frameon=False)
    save(figure, "divergences")


PICTURES: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (rhat, heat, ess, pareto_k, sbc, warmup, exploded, divergences)
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
