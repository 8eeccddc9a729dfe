"""Bayesian logistic regression on the Pima Indians data, from one Pyro model, by nine methods.

The paper's appendix G: Table 3 and Figures 11 and 12.  768 rows, 8 standardized columns, no
intercept, standard normal weights.  Every contender starts at zero and gives 5,000 draws:

- at the paper's settings: SGHMC with lr 0.01, friction 1, 2,000 steps of warm-up, every 5th step
  kept (or one draw of each of 5,000 chains after 2,000 steps), diagonal VI by Adam, 8,000 steps;
- at settings that the library chooses: `lr="auto"`, for runs that are long enough for draws to be
  nearly independent.

Ten seeds of each; three where 5,000 chains run, two of posteriors (a run takes a minute), whose
parallel chains are not run.  NUTS is compiled by Pyro (`jit_compile`), which halves its time.
Means and sds are compared with those of the 50,000 draws of its ten runs.
The squared kernel Stein discrepancy is that of 1,000 draws, every fifth, with the score of the
whole log joint, in units of the posterior's sds.

    OMP_NUM_THREADS=1 python notebooks/paper/pima.py

Writes pima.json and pima.png.  It needs posteriors, BlackJAX and the data
($PYRO_SCALE_DATA, ../shared/data by default), and takes about 20 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import arviz
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
import torchopt
from data_folder import DATA, loader
from pyro.infer import MCMC, NUTS
from scipy.stats import gaussian_kde
from torch import Tensor

import pyro_scale as ps

HERE = Path(__file__).resolve().parent
RESULTS, FIGURE = HERE / "pima.json", HERE / "pima.png"

#: The paper's settings.
LR, WARMUP, DRAWS, THINNING = 0.01, 2000, 5000, 5
CHAINS, CHAIN_STEPS, VI_STEPS, BATCH = 5000, 2000, 8000, 32

#: Ours: steps from one draw to the next; primes, as an epoch has 24 batches.
APART_FULL, APART = 101, 499

KSD_DRAWS = 1000
VERSIONS = ("torch", "pyro-ppl", "pyro-scale", "posteriors", "blackjax", "jax")


class Run(NamedTuple):
    """Draws `[5000, 8]`, the seconds and the processor's seconds that they took, and those that
    the compilation took before."""

    draws: Tensor
    seconds: float
    cpu_seconds: float
    compile_seconds: float = 0.0


class Watch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """By the clock, and of the processor by all threads."""
        return time.perf_counter() - self.wall, time.process_time() - self.cpu


# ---------------------------------------------------------------- the model and its data


def model(x: Tensor, y: Tensor | None = None) -> Tensor:
    """Logistic regression with standard normal weights."""
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


@cache
def data() -> tuple[Tensor, Tensor, list[str]]:
    """x `[N, 8]`, standardized, y `[N]`, and the columns' names.

    Where the data are missing: 8 columns of scikit-learn's breast cancer.
    """
    if (folder := loader()) is not None:
        x, y, names = folder.load_pima()
    else:
        from sklearn.datasets import load_breast_cancer

        bunch, columns = load_breast_cancer(), [0, 1, 4, 5, 8, 9, 11, 14]
        x, y, names = bunch.data[:, columns], bunch.target, list(bunch.feature_names[columns])
    x = (x - x.mean(0)) / x.std(0)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32), names


# ---------------------------------------------------------------- ours


def timed(method: Any, short: dict[str, int], **settings: Any) -> Run:
    """A run of ours; a short one before compiles the same program."""
    x, y, _ = data()
    method.run((x, y), progress=False, **settings | short)
    facts = method.to_arviz(log_likelihood=False).posterior.attrs
    watch = Watch()
    method.run((x, y), progress=False, **settings)
    times = watch.read()
    return Run(method.get_samples()["w"], *times, facts["compile_time"])


def zeros(chains: int = 1) -> dict[str, Tensor]:
    """Where the paper's chains start."""
    return {"w": torch.zeros(chains, data()[0].shape[1])}


def serial(
    method: Any,
    seed: int,
    batch_size: int | None = None,
    lr: Any = LR,
    thinning: int = THINNING,
    **options: Any,
) -> Run:
    """One chain; the paper's settings unless others are given."""
    where = {"precondition": None}  # as the paper has it, no other coordinates
    sampler = method(model, lr=lr, **where, init_strategy=zeros(), compile=True, **options)
    return timed(
        sampler,
        {"warmup_steps": 0, "thinning": 1},
        num_samples=DRAWS,
        warmup_steps=WARMUP,
        thinning=thinning,
        num_chains=1,
        batch_size=batch_size,
        seed=seed,
    )


def parallel(
    method: Any,
    seed: int,
    batch_size: int | None = None,
    lr: Any = LR,
    steps: int = CHAIN_STEPS,
    **options: Any,
) -> Run:
    """The last states of 5,000 chains, in one call."""
    where = {"precondition": None}  # as the paper has it, no other coordinates
    sampler = method(model, lr=lr, **where, init_strategy=zeros(CHAINS), compile=True, **options)
    return timed(
        sampler,
        {"thinning": 1},
        num_samples=1,
        warmup_steps=0,
        thinning=steps,
        num_chains=CHAINS,
        batch_size=batch_size,
        seed=seed,
    )


def variational(
    seed: int, structure: str = "diag", batch_size: int | None = None, lr: Any = 1e-3
) -> Run:
    """Adam with the paper's 8,000 steps of 0.001, unless another lr is given; from zero with sds
    of 0.1, where the library starts, and not of 1 as the paper does."""
    fit = ps.VI(
        model,
        structure=structure,
        optimizer=torchopt.adam(lr),
        sticking_the_landing=True,
        init_strategy=zeros(),
        compile=True,
    )
    run = timed(fit, {"num_steps": 1}, num_steps=VI_STEPS, batch_size=batch_size, seed=seed)
    return run._replace(draws=fit.sample(DRAWS)["w"])


# ---------------------------------------------------------------- the others


def nuts(seed: int, draws: int = DRAWS, warmup: int = WARMUP) -> Run:
    """Pyro's."""
    x, y, _ = data()
    pyro.set_rng_seed(seed)
    mcmc = MCMC(
        NUTS(model, jit_compile=True, ignore_jit_warnings=True),
        num_samples=draws,
        warmup_steps=warmup,
        initial_params={"w": torch.zeros(x.shape[1])},
        disable_progbar=True,
    )
    watch = Watch()
    mcmc.run(x, y)
    return Run(mcmc.get_samples()["w"], *watch.read())


def blackjax_regression() -> Any:
    """The benchmarks' regression, on these data and with the paper's step."""
    import jax.numpy as jnp
    import peer_blackjax as peer

    x, y, _ = data()
    known = peer.Logistic(len(x))
    known.x, known.y = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())
    known.lr = LR / len(x) ** 0.5  # its momentum is sqrt(N) of ours
    return known


def blackjax_loop(seed: int) -> Run:
    """BlackJAX's integrator, full batch, as in the paper: a jitted step in a Python loop."""
    import jax
    import peer_blackjax as peer

    known = blackjax_regression()

    def step(state: Any, key: Any) -> Any:
        key, ours = jax.random.split(key)
        return known.step(state, (known.x, known.y), ours), key

    state, key = peer.start(), jax.random.key(seed)
    watch = Watch()
    compiled = jax.jit(step).lower(state, key).compile()
    compiling = watch.read()[0]
    watch, draws = Watch(), []
    for number in range(WARMUP + DRAWS * THINNING):
        state, key = compiled(state, key)
        if number >= WARMUP and (number - WARMUP) % THINNING == THINNING - 1:
            draws.append(np.asarray(state[0]))
    return Run(torch.tensor(np.stack(draws)), *watch.read(), compiling)


def blackjax_scan(seed: int, batch_size: int | None = None) -> Run:
    """The same in `lax.scan`, all steps of the warm-up and then all others in one program."""
    import jax
    import peer_blackjax as peer

    known = blackjax_regression()

    def step(state: Any, chosen: Any, key: Any) -> Any:
        batch = (known.x, known.y) if batch_size is None else known.batch(chosen)
        return known.step(state, batch, key)

    keys = jax.random.split(jax.random.key(seed), 2)
    programs, watch = [], Watch()
    for draws in (WARMUP // THINNING, DRAWS):
        tape = peer.indices_and_keys(known.rows, batch_size or 1, draws, THINNING)
        run = jax.jit(peer.program(step, tape))
        programs.append(run.lower(peer.start(), keys[0]).compile())
    compiling = watch.read()[0]
    watch = Watch()
    state, _ = programs[0](peer.start(), keys[0])
    found = torch.tensor(np.asarray(programs[1](state, keys[1])[1]))
    return Run(found, *watch.read(), compiling)


def posteriors_sghmc(seed: int, batch_size: int | None = None) -> Run:
    """Its SGHMC on the traced Pyro model."""
    import posteriors
    from peer_posteriors import through_pyro

    x = data()[0]
    torch.manual_seed(seed)
    sghmc = posteriors.sgmcmc.sghmc.build(through_pyro, lr=LR, alpha=1.0, temperature=1 / len(x))
    state = sghmc.init({"w": torch.zeros(x.shape[1])}, momenta=0.0)
    watch, draws = Watch(), []
    for batch in batches(WARMUP + DRAWS * THINNING, batch_size):
        state, _ = sghmc.update(state, batch)
        draws.append(state.params["w"])
    times = watch.read()
    return Run(torch.stack(draws)[WARMUP + THINNING - 1 :: THINNING].detach(), *times)


def posteriors_vi(seed: int, batch_size: int | None = None) -> Run:
    """Its diagonal VI."""
    import posteriors
    from peer_posteriors import through_pyro

    x = data()[0]
    torch.manual_seed(seed)
    vi = posteriors.vi.diag.build(through_pyro, torchopt.adam(1e-3), temperature=1 / len(x))
    state = vi.init({"w": torch.zeros(x.shape[1])})
    watch = Watch()
    for batch in batches(VI_STEPS, batch_size):
        state, _ = vi.update(state, batch)
    times = watch.read()
    return Run(posteriors.vi.diag.sample(state, (DRAWS,))["w"].detach(), *times)


def batches(steps: int, batch_size: int | None) -> Any:
    """Of rows drawn with replacement."""
    x, y, _ = data()
    for _ in range(steps):
        if batch_size is None:
            yield x, y
        else:
            chosen = torch.randint(len(x), (batch_size,))
            yield x[chosen], y[chosen]


AUTO: dict[str, Any] = {"lr": "auto", "thinning": APART}
AUTO_FULL: dict[str, Any] = {"lr": "auto", "thinning": APART_FULL}
FALLING = torchopt.schedule.polynomial_schedule(1e-2, 1e-5, 1.0, VI_STEPS)
SEEDS, PARALLEL_SEEDS, FEW = range(10), range(3), range(2)

#: Name -> what runs for a seed, and for which.
CONTENDERS: dict[str, tuple[Callable[[int], Run], Sequence[int]]] = {
    "Pyro NUTS": (nuts, SEEDS),
    "BlackJAX SGHMC, full, Python loop": (blackjax_loop, SEEDS),
    "BlackJAX SGHMC, full, scan": (blackjax_scan, SEEDS),
    "BlackJAX SGHMC, 32, scan": (partial(blackjax_scan, batch_size=BATCH), SEEDS),
    "posteriors VI, full": (posteriors_vi, FEW),
    "posteriors VI, 32": (partial(posteriors_vi, batch_size=BATCH), FEW),
    "posteriors SGHMC, full": (posteriors_sghmc, FEW),
    "posteriors SGHMC, 32": (partial(posteriors_sghmc, batch_size=BATCH), FEW),
    "ours VI diag, full": (variational, SEEDS),
    "ours VI diag, 32": (partial(variational, batch_size=BATCH), SEEDS),
    "ours VI dense, full, falling lr": (
        partial(variational, structure="dense", lr=FALLING),
        SEEDS,
    ),
    "ours SGHMC, full": (partial(serial, ps.SGHMC), SEEDS),
    "ours SGHMC, 32": (partial(serial, ps.SGHMC, batch_size=BATCH), SEEDS),
    "ours parallel SGHMC, 32": (partial(parallel, ps.SGHMC, batch_size=BATCH), PARALLEL_SEEDS),
    "ours SGHMC, full, auto": (partial(serial, ps.SGHMC, **AUTO_FULL), SEEDS),
    "ours BAOA, full, auto": (partial(serial, ps.BAOA, **AUTO_FULL), SEEDS),
    "ours SGHMC, 32, auto": (partial(serial, ps.SGHMC, batch_size=BATCH, **AUTO), SEEDS),
    "ours BAOA, 32, auto": (partial(serial, ps.BAOA, batch_size=BATCH, **AUTO), SEEDS),
    "ours BAOA, 32, auto, control variates": (
        partial(serial, ps.BAOA, batch_size=BATCH, control_variates=True, **AUTO_FULL),
        SEEDS,
    ),
    "ours parallel BAOA, 32, auto": (
        partial(parallel, ps.BAOA, batch_size=BATCH, lr="auto"),
        PARALLEL_SEEDS,
    ),
    "ours parallel SGHMC, 32, auto, control variates": (
        partial(
            parallel,
            ps.SGHMC,
            batch_size=BATCH,
            lr="auto",
            precondition=None,
            control_variates=True,
        ),
        PARALLEL_SEEDS,
    ),
    "ours parallel BAOA, 32, auto, control variates": (
        partial(parallel, ps.BAOA, batch_size=BATCH, lr="auto", control_variates=True),
        PARALLEL_SEEDS,
    ),
    "ours parallel BAOA, full, auto, 200 steps": (
        partial(parallel, ps.BAOA, lr="auto", steps=200),
        PARALLEL_SEEDS,
    ),
}

PANELS = {
    "full batch (the paper's Figure 11)": [
        "Pyro NUTS",
        "BlackJAX SGHMC, full, scan",
        "ours SGHMC, full",
        "ours BAOA, full, auto",
        "ours VI diag, full",
    ],
    "batches of 32 (the paper's Figure 12)": [
        "Pyro NUTS",
        "ours SGHMC, 32",
        "ours parallel SGHMC, 32",
        "ours BAOA, 32, auto",
        "ours VI diag, 32",
    ],
}


# ---------------------------------------------------------------- how good draws are


def scores(draws: Tensor) -> Tensor:
    """The gradient of the whole log joint at every draw, `[n, 8]`."""
    x, y, _ = data()
    known = ps.LogPosterior(model, num_data=len(x))
    known.init(0, x, y)  # which looks at the model, and may not be under vmap
    return torch.vmap(lambda w: known.grad({"w": w}, (x, y))[0]["w"])(draws)


def ksd(draws: Tensor, sd: Tensor) -> float:
    """Squared, of every fifth draw, in units of the posterior's sds."""
    some = draws[:: len(draws) // KSD_DRAWS]
    return float(ps.metrics.ksd(some / sd, scores(some) * sd))


def published_ksd(draws: Tensor) -> float:
    """As the paper's script has it: the score over N, and the other sign before both cross terms
    of the kernel exp(-|x - y|^2 / 2)."""
    some = draws[:: len(draws) // KSD_DRAWS].double()
    s = scores(some.float()).double() / len(data()[0])
    apart = some[:, None] - some
    k = (-apart.square().sum(-1) / 2).exp()
    crossed = (apart * (s - s[:, None])).sum(-1)
    trace = some.shape[1] - apart.square().sum(-1)
    return float(((s @ s.T + crossed + trace) * k).mean().sqrt())


def errors(draws: Tensor, mean: Tensor, sd: Tensor) -> tuple[float, float]:
    """The largest error of a mean in posterior sds, and the largest relative one of an sd."""
    return (
        float(((draws.mean(0) - mean) / sd).abs().max()),
        float((draws.std(0) / sd - 1).abs().max()),
    )


def ess(draws: Tensor) -> float:
    """The least of the eight weights'."""
    return min(float(arviz.ess(column.numpy())) for column in draws.T)


def row(runs: list[Run], mean: Tensor, sd: Tensor) -> dict[str, Any]:
    """What the table says of a contender."""
    off = [errors(run.draws, mean, sd) for run in runs]
    found = [ksd(run.draws, sd) for run in runs]
    pooled = errors(torch.cat([run.draws for run in runs]), mean, sd)
    return {
        "seeds": len(runs),
        "seconds": statistics.mean(run.seconds for run in runs),
        "seconds_sd": statistics.stdev(run.seconds for run in runs),
        "cpu_seconds": statistics.mean(run.cpu_seconds for run in runs),
        "compile_seconds": runs[0].compile_seconds,
        "ess": statistics.mean(ess(run.draws) for run in runs),
        "mean_error": statistics.mean(error for error, _ in off),
        "sd_error": statistics.mean(error for _, error in off),
        "mean_error_pooled": pooled[0],
        "sd_error_pooled": pooled[1],
        "ksd": statistics.mean(found),
        "ksd_se": statistics.stdev(found) / len(found) ** 0.5,
        "published_ksd": statistics.mean(published_ksd(run.draws) for run in runs),
    }


def made_wrong(draws: Tensor, mean: Tensor, sd: Tensor) -> dict[str, dict[str, float]]:
    """Both discrepancies of good draws, and of what was done to them."""
    kinds = {
        "NUTS": draws,
        "ten times as wide": mean + 10 * (draws - mean),
        "shifted by 5 sds": draws + 5 * sd,
        "a tenth as wide": mean + 0.1 * (draws - mean),
    }
    return {
        name: {"published": published_ksd(kind), "squared, whitened": ksd(kind, sd)}
        for name, kind in kinds.items()
    }


def plot(runs: dict[str, Tensor]) -> None:
    """Figures 11 and 12."""
    names = data()[2]
    colors = ["0.75", "#0072B2", "#D55E00", "#009E73", "#CC79A7"]  # Okabe and Ito's
    styles = ["-", ":", "--", "-", "-."]
    figure = plt.figure(figsize=(11, 10), layout="constrained")
    halves = figure.subfigures(2, 1, hspace=0.05)
    for half, (title, contenders) in zip(halves, PANELS.items(), strict=True):
        for column, ax in enumerate(half.subplots(2, 4).ravel()):
            center = float(runs["Pyro NUTS"][:, column].mean())
            grid = np.linspace(center - 0.45, center + 0.45, 200)
            for name, color, style in zip(contenders, colors, styles, strict=True):
                density = gaussian_kde(runs[name][:, column].numpy(), 0.25)(grid)
                if name == "Pyro NUTS":
                    ax.fill_between(grid, density, color=color, label=name)
                else:
                    ax.plot(grid, density, style, color=color, label=name, lw=1.5)
            ax.set(xlabel=f"weight of {names[column]}", yticks=[], ylim=(0, None))
            ax.spines[["left", "top", "right"]].set_visible(False)
        half.suptitle(title)
        half.legend(*ax.get_legend_handles_labels(), ncol=5, loc="outside lower center")
    figure.savefig(FIGURE, dpi=110)


# ---------------------------------------------------------------- the whole


def main() -> None:
    """Runs all, prints the table, writes it and the figure."""
    sys.path.append(str(HERE.parents[1] / "benchmarks"))
    from circumstances import circumstances

    if loader() is None:
        raise SystemExit(f"no data in {DATA}: set PYRO_SCALE_DATA")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="warm-up of|VI")
    torch.set_num_threads(1)
    table, first = {}, {}
    with tempfile.TemporaryDirectory() as empty:  # so that every program is compiled once
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
        start = serial(ps.SGLD, 0).compile_seconds  # what the first compilation loads besides
        for name, (run, seeds) in CONTENDERS.items():
            runs = [run(seed) for seed in seeds]
            if run is nuts:
                everything = torch.cat([run.draws for run in runs])
                mean, sd = everything.mean(0), everything.std(0)
            table[name], first[name] = row(runs, mean, sd), runs[0].draws
            print(
                name, {key: float(f"{value:.3g}") for key, value in table[name].items()}, flush=True
            )
    found = {
        "circumstances": circumstances(VERSIONS),
        "threads": torch.get_num_threads(),
        "first_compilation_seconds": start,
        "reference": {"mean": mean.tolist(), "sd": sd.tolist()},
        "table": table,
        "made_wrong": made_wrong(first["Pyro NUTS"], mean, sd),
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    plot(first)


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    main()
