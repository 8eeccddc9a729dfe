"""Linear regression with every method, against the exact posterior.

"Scalable Bayesian Learning with posteriors" (Duffield et al., ICLR 2025) has no figure of this.
What it says of its methods in sections 3.1 and 4 and in appendices A and B is checked here where
the truth is known: 442 rows of ten correlated columns (scikit-learn's diabetes data), with known
noise and a normal prior, so that the posterior is a Gaussian that linear algebra gives.  The
condition number of its precision is over 400: two of the columns are nearly one.

For each method: the worst error of a mean in exact sds, and sds over the exact ones, of the ten
weights and of the steepest mode, beside what theory says that they are.  Not all should be 1.
Nothing is scaled down.

    OMP_NUM_THREADS=1 python notebooks/paper/linear_regression.py

Writes linear_regression.json and linear_regression.png beside this file; it takes minutes of one
core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
import torchopt
from sklearn.datasets import load_diabetes
from torch import Tensor

import pyro_scale as ps

HERE = Path(__file__).resolve().parent
#: Of the outcome, in its own sds; about what is left of it by least squares.
NOISE = 0.7
BATCH = 32

X, Y = (torch.tensor(a) for a in load_diabetes(return_X_y=True, scaled=False))
X, Y = (X - X.mean(0)) / X.std(0), (Y - Y.mean()) / Y.std()
N = len(X)


def regression(x: Tensor, y: Tensor | None = None) -> None:
    """Ten weights, known noise."""
    w = pyro.sample("w", dist.Normal(torch.zeros(10).double(), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, NOISE), obs=y)


#: The posterior's.
PRECISION = X.T @ X / NOISE**2 + torch.eye(10).double()
COVARIANCE = torch.linalg.inv(PRECISION)
MEAN = COVARIANCE @ X.T @ Y / NOISE**2

#: The precision over N, mode by mode, and how much of it is a row's: the variance of its gradient.
VALUES, MODES = torch.linalg.eigh(PRECISION / N)
SCATTER = ((Y - X @ MEAN)[:, None] * X @ MODES / NOISE**2).var(0)

#: What sds are of, [10, 11]: the ten weights, and the steepest mode, which sees a step first.
DIRECTIONS = torch.cat([torch.eye(10).double(), MODES[:, -1:]], 1)
SD = (DIRECTIONS * (COVARIANCE @ DIRECTIONS)).sum(0).sqrt()


# -- what theory says: sds over the exact ones, [11] ----------------------------------------------


def over_exact(covariance: Tensor) -> Tensor:
    """A Gaussian's sds over the exact ones, [11]."""
    return (DIRECTIONS * (covariance @ DIRECTIONS)).sum(0).sqrt() / SD


def of_modes(factors: Tensor) -> Tensor:
    """The same where the variances of the modes are off by factors, [10]."""
    return over_exact(MODES @ (factors / VALUES / N).diag() @ MODES.T)


def sgld(lr: float, batch: float = math.inf) -> Tensor:
    """T / (L (1 - lr L / 2)), with the heat of minibatches, 1 + lr N V / (2 B)."""
    return of_modes((1 + lr * N * SCATTER / (2 * batch)) / (1 - lr * VALUES / 2))


def sghmc(lr: float, friction: float, batch: float = math.inf) -> Tensor:
    """T / (L (1 - lr^2 L / (4 - 2 lr f))), with the heat of minibatches, 1 + lr N V / (2 f B)."""
    heat = 1 + lr * N * SCATTER / (2 * friction * batch)
    return of_modes(heat / (1 - lr**2 * VALUES / (4 - 2 * lr * friction)))


def baoa(lr: float, friction: float, batch: float = math.inf) -> Tensor:
    """T / L, with the heat of minibatches, 1 + lr N V / (2 f B) to first order of lr."""
    return of_modes(1 + lr * N * SCATTER / (2 * friction * batch))


EXACT = over_exact(COVARIANCE)
#: Of independent weights, by variational inference and by curvature's diagonal.
INDEPENDENT = over_exact((1 / PRECISION.diagonal()).diag())


# -- methods --------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A method, and what is expected of it.

    Attributes:
        method: not yet run.
        settings: of its `run`.
        theory: its sds over the exact ones, [11]; None where no formula of a line says them.
        says: that, in words.
    """

    method: Any
    settings: dict[str, Any]
    theory: Tensor | None
    says: str


QUIET: dict[str, Any] = {"seed": 0, "progress": False}
SAMPLED = {"num_samples": 2000, "warmup_steps": 0, "thinning": 1, "num_chains": 8, **QUIET}
#: On all rows; on all where chains are slow; and on 32 rows, drawn anew at each step.
WHOLE = {**SAMPLED, "warmup_steps": 2000, "thinning": 10}
SLOWLY = {**SAMPLED, "warmup_steps": 5000, "thinning": 20}
PARTS = {**SAMPLED, "warmup_steps": 50_000, "thinning": 100}
PARTS |= {"batch_size": BATCH, "sampling": "replacement"}


def falling(first: float, steps: int) -> Any:
    """Adam, with steps that fall to a thousandth."""
    return torchopt.adam(torchopt.schedule.polynomial_schedule(first, first / 1000, 1.0, steps))


def approximations(steps: int = 20_000) -> dict[str, Entry]:
    """Gaussians and points; where steps find them, on all rows and on batches."""
    found = {}
    for batch in (None, BATCH):
        on, run = f", batches of {batch}" if batch else "", {"num_steps": steps, **QUIET}
        run |= {"batch_size": batch} if batch else {}
        for structure, theory, says in (
            ("diag", INDEPENDENT, "1/sqrt(L_ii)"),
            ("dense", EXACT, "exact"),
        ):
            adam = falling(2e-2, steps)
            vi = ps.VI(regression, structure=structure, optimizer=adam, num_particles=4)
            found[f"VI, {structure}{on}"] = Entry(vi, run, theory, says)
        ivon = ps.IVON(regression, lr=lambda step: 0.3 * (1 - step / steps))
        found[f"IVON{on}"] = Entry(ivon, run, INDEPENDENT, "1/sqrt(L_ii)")
        mode = ps.MAP(regression, optimizer=falling(2e-2, steps))
        found[f"MAP{on}"] = Entry(mode, run, 0 * EXACT, "a point")
    newton = ps.MAP(regression, structure="dense")
    found["MAP, then Newton"] = Entry(newton, {"num_steps": 100, **QUIET}, 0 * EXACT, "a point")
    for structure, theory in (("diag", INDEPENDENT), ("dense", EXACT)):
        says = "exact" if structure == "dense" else "1/sqrt(L_ii)"
        laplace = ps.Laplace(regression, structure=structure)
        found[f"Laplace, {structure}"] = Entry(laplace, QUIET, theory, says)
        ekf, row_by_row = ps.EKF(regression, structure=structure), {"batch_size": 1, **QUIET}
        found[f"EKF, {structure}, row by row"] = Entry(ekf, row_by_row, theory, says)
    return found


def samplers() -> dict[str, Entry]:
    """Markov chains from the prior on, on all rows and on batches of 32."""
    long, short = {"lr": 0.2, "friction": 0.3}, {"lr": 0.02, "friction": 1.0}
    second, hot = "1 + O(lr^2)", "hot by lr N V / (2 f B)"
    thermostat = "heat taken off, the same of all"
    return {
        "BAOA": Entry(ps.BAOA(regression, **long), WHOLE, EXACT, "exact"),
        "SGHMC": Entry(ps.SGHMC(regression, **long), WHOLE, sghmc(**long), "step factor"),
        "UBU": Entry(ps.UBU(regression, **long), WHOLE, None, second),
        "SGNHT": Entry(ps.SGNHT(regression, **long), WHOLE, None, second),
        "SGLD": Entry(ps.SGLD(regression, lr=0.05), SLOWLY, sgld(0.05), "1/(1 - lr L/2)"),
        "pSGLD": Entry(ps.pSGLD(regression, lr=0.005), SLOWLY, None, "1 + O(lr)"),
        f"BAOA, batches of {BATCH}": Entry(
            ps.BAOA(regression, **short), PARTS, baoa(**short, batch=BATCH), hot
        ),
        f"BAOA, batches of {BATCH}, control variates": Entry(
            ps.BAOA(regression, **short, control_variates=True), PARTS, None, "1 + a little"
        ),
        f"SGHMC, batches of {BATCH}": Entry(
            ps.SGHMC(regression, **short), PARTS, sghmc(**short, batch=BATCH), hot
        ),
        f"UBU, batches of {BATCH}": Entry(
            ps.UBU(regression, **short), PARTS, baoa(**short, batch=BATCH), hot
        ),
        f"SGNHT, batches of {BATCH}": Entry(ps.SGNHT(regression, **short), PARTS, None, thermostat),
        f"SGLD, batches of {BATCH}": Entry(
            ps.SGLD(regression, lr=0.005), PARTS, sgld(0.005, BATCH), "hot by lr N V / (2 B)"
        ),
        f"pSGLD, batches of {BATCH}": Entry(
            ps.pSGLD(regression, lr=0.002), PARTS, None, "hot by lr G N V / (2 B)"
        ),
    }


# -- the run --------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What a method says, [11] each: errors of means in exact sds, sds over the exact ones, and
    the Monte Carlo errors of both; nan where there are none."""

    mean: Tensor
    sd: Tensor
    mean_error: Tensor
    sd_error: Tensor


def found_by(fitted: Any) -> Found:
    """A fitted method's; Monte Carlo errors are from how chains differ."""
    if hasattr(fitted, "fit"):
        covariance, none = torch.zeros(10, 10).double(), math.nan * SD
        for gaussian in fitted.fit.gaussians:
            covariance = torch.stack([gaussian.covariance_times(e) for e in torch.eye(10).double()])
        mean = (fitted.fit.centers[0] - MEAN) @ DIRECTIONS / SD
        return Found(mean, over_exact(covariance), none, none)
    draws = (fitted.get_samples(group_by_chain=True)["w"] - MEAN) @ DIRECTIONS / SD
    mean, sd = draws.mean((0, 1)), draws.var((0, 1)).sqrt()
    of_chain, root = (draws - mean).square().mean(1), len(draws) ** 0.5
    error = of_chain.std(0) / root / (2 * sd)
    return Found(mean, sd, draws.mean(1).std(0) / root, error)


def row(entry: Entry) -> dict[str, Any]:
    """Runs it; a row of the table."""
    begun = time.perf_counter()
    fitted = entry.method.run((X, Y), **entry.settings)
    seconds, found = time.perf_counter() - begun, found_by(fitted)
    return {
        "mean error": float(found.mean.abs().max()),
        "mean error, Monte Carlo": float(found.mean_error.max()),
        "sds": found.sd.tolist(),
        "sds, Monte Carlo": found.sd_error.tolist(),
        "theory": None if entry.theory is None else entry.theory.tolist(),
        "says": entry.says,
        "seconds": seconds,
    }


def main() -> None:
    """The whole run."""
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    for name, entry in (approximations() | samplers()).items():
        report[name] = row(entry)
        print(name, report[name], flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "pyro-scale")}
    stored = {"methods": report, "versions": versions, "threads": torch.get_num_threads()}
    (HERE / "linear_regression.json").write_text(json.dumps(rounded(stored), indent=1) + "\n")
    plotted(report).savefig(HERE / "linear_regression.png", dpi=110)


def rounded(value: Any) -> Any:
    """Floats to four digits, all the way down; nan becomes None."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.4g}")
    return value


def plotted(report: dict[str, Any]) -> plt.Figure:
    """Sds over the exact ones of each method, ten weights and the steepest mode, with theory's."""
    names = [name for name in report if any(report[name]["sds"])]
    shape = {"sharey": True, "width_ratios": (3, 2), "figsize": (10, 0.27 * len(names) + 1.4)}
    figure, axes = plt.subplots(1, 2, **shape)
    for at, name in enumerate(reversed(names)):
        row = report[name]
        errors = [error or 0 for error in row["sds, Monte Carlo"]]
        for axis, part in zip(axes, (slice(0, 10), slice(10, 11)), strict=True):
            measured, places = row["sds"][part], [at] * len(row["sds"][part])
            if row["theory"]:
                circles = {"mfc": "none", "ms": 9, "color": "#D55E00", "label": "theory"}
                axis.plot(row["theory"][part], places, "o", **circles)
            style = {"color": "#0072B2", "ms": 6, "lw": 1, "label": "measured, ± Monte Carlo error"}
            axis.errorbar(measured, places, xerr=errors[part], fmt=".", **style)
    axes[0].set(xscale="log", xlabel="sds of the ten weights over the exact ones")
    axes[1].set(xlabel="the steepest mode's")
    ticks = [0.125, 0.25, 0.5, 1]
    axes[0].set_xticks(ticks, [str(tick) for tick in ticks])
    axes[0].minorticks_off()
    axes[0].set_yticks(range(len(names)), reversed(names))
    for axis in axes:
        axis.axvline(1, color="0.5", lw=0.8, zorder=0)
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    return figure


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    main()
