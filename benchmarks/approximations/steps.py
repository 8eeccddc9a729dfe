"""Steps of variational inference and of the extended Kalman filter: logistic regression with 8
columns, batches of 32."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import torch
import torchopt
from models import logistic_model
from problems import LOGISTIC_BATCH, logistic_data
from protocol import Timing
from pyro import poutine
from torch import Tensor

import pyro_scale as ps

ROWS, COLUMNS = 768, 8
#: Batches that filters go through, and of those the eager ones.
FILTERED_BATCHES, EAGER_BATCHES = 600, 24
#: Steps over which Adam's lr falls, after which fits no longer move by much: from, to.
SETTLING, LR, LAST_LR = 3000, 1e-2, 1e-4
#: Steps after which compiled and eager fits are compared.
COMPARED = 300
#: Sds of q at first.
FIRST_SD = 0.1
Batch = tuple[Tensor, Tensor]


def _data() -> Batch:
    x, y = logistic_data(ROWS, COLUMNS)
    return torch.from_numpy(x), torch.from_numpy(y)


def _row(mean: Tensor, sd: Tensor) -> np.ndarray:
    """A fit as the only row of a timing's draws: means, then sds."""
    return torch.cat([mean, sd])[None].detach().numpy()


# ------------------------------------------------------------------ variational inference


def _adam(lr: str = "linear") -> Any:
    """Adam with an lr that falls in a line, by a power of the step, or not at all."""
    lrs = {
        "linear": torchopt.schedule.polynomial_schedule(LR, LAST_LR, 1.0, SETTLING),
        "exponential": torchopt.schedule.exponential_decay(
            LR, (LAST_LR / LR) ** (1 / SETTLING), end_value=LAST_LR
        ),
        "constant": LR,
    }
    return torchopt.adam(lrs[lr])


def vi_ours(
    structure: str, steps: int, compile: bool = True, sticking: bool = True, lr: str = "linear"
) -> Callable[[], Timing]:
    """`ps.VI.run`: a step, and a step's share of the whole run with its compilation cached."""
    options: dict[str, Any] = {"sticking_the_landing": sticking, "compile": compile}
    vi = ps.VI(logistic_model, structure=structure, optimizer=_adam(lr), **options)
    data, seeds = _data(), iter(range(1000))

    def run(steps: int) -> Any:
        settings = {"num_steps": steps, "batch_size": LOGISTIC_BATCH, "progress": False}
        return vi.run(data, seed=next(seeds), **settings)

    run(steps if compile else 100)

    def timing() -> Timing:
        begin = time.perf_counter()
        fit = run(steps).fit
        whole = time.perf_counter() - begin
        gaussian = fit.gaussians[0]
        seconds = {"": fit.attrs["sampling_time"] / steps, "the whole run()": whole / steps}
        return Timing(seconds, draws=_row(gaussian.mean, gaussian.variance.sqrt()))

    return timing


def through_pyro(params: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """The Pyro model's log joint over N, which is posteriors' convention (temperature 1/N)."""
    trace = poutine.trace(poutine.condition(logistic_model, data=params)).get_trace(*batch)
    trace.compute_log_prob()
    prior, likelihood = trace.nodes["w"], trace.nodes["y"]
    value = prior["log_prob_sum"] / ROWS + likelihood["log_prob_sum"] / len(batch[0])
    return value, torch.tensor([])


def by_hand(params: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """The same in few operations."""
    (x, y), w = batch, params["w"]
    z = x @ w
    value = (y * z - torch.nn.functional.softplus(z)).mean() - 0.5 * torch.dot(w, w) / ROWS
    return value, torch.tensor([])


def vi_posteriors(
    structure: str, density: str, steps: int, sticking: bool = True
) -> Callable[[], Timing]:
    """`posteriors.vi.diag` or `.dense`, a Python loop over its update."""
    import posteriors

    pyro.enable_validation(False)
    x, y = _data()
    module, log_posterior = getattr(posteriors.vi, structure), globals()[density]
    first: Any = {"init_log_sds": float(np.log(FIRST_SD))}
    if structure == "dense":
        first = {"init_L": FIRST_SD}
    first["stl"] = sticking
    transform = module.build(log_posterior, _adam(), temperature=1 / ROWS, **first)
    state = transform.init({"w": torch.zeros(COLUMNS)})

    def run(state: Any, steps: int) -> Any:
        for _ in range(steps):
            chosen = torch.randint(ROWS, (LOGISTIC_BATCH,))
            state, _ = transform.update(state, (x[chosen], y[chosen]))
        return state

    state = run(state, SETTLING)

    def timing() -> Timing:
        nonlocal state
        begin = time.perf_counter()
        state = run(state, steps)
        seconds = time.perf_counter() - begin
        if structure == "dense":
            factor = posteriors.utils.L_from_flat(state.L_factor)
            sd = factor.square().sum(1).sqrt()
        else:
            sd = state.log_sd_diag["w"].exp()
        return Timing({"": seconds / steps}, draws=_row(state.params["w"], sd))

    return timing


def vi_pyro(guide: str, steps: int) -> Callable[[], Timing]:
    """Pyro's `SVI` with an automatic guide, such as `AutoDiagonalNormal`."""
    from pyro.infer import SVI, Trace_ELBO, autoguide
    from pyro.optim import ClippedAdam

    pyro.enable_validation(False)
    x, y = _data()

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", pyro.distributions.Normal(torch.zeros(COLUMNS), 1.0).to_event(1))
        with pyro.plate("data", ROWS, subsample=torch.arange(len(x))):  # scales by N/B
            pyro.sample("y", pyro.distributions.Bernoulli(logits=x @ w), obs=y)

    made = getattr(autoguide, guide)(model, init_scale=FIRST_SD)
    falling = {"lr": LR, "lrd": (LAST_LR / LR) ** (1 / SETTLING), "clip_norm": 1e9}
    inference = SVI(model, made, ClippedAdam(falling), Trace_ELBO())

    def run(steps: int) -> None:
        for _ in range(steps):
            chosen = torch.randint(ROWS, (LOGISTIC_BATCH,))
            inference.step(x[chosen], y[chosen])

    run(SETTLING)

    def timing() -> Timing:
        begin = time.perf_counter()
        run(steps)
        seconds = time.perf_counter() - begin
        posterior = made.get_posterior()
        return Timing({"": seconds / steps}, draws=_row(posterior.mean, posterior.variance.sqrt()))

    return timing


# ------------------------------------------------------------------ whole runs


def falling(method: str, structure: str, lr: str, way: str = "compiled") -> Callable[[], Timing]:
    """A step of `ps.MAP` or `ps.VI` by the kind of its lr; the fit that is compared is that of 300
    steps, compiled or eager."""
    options: dict[str, Any] = {"optimizer": _adam(lr)}
    if method == "VI":
        options |= {"structure": structure, "sticking_the_landing": True}
    made = getattr(ps, method)(logistic_model, compile=way == "compiled", **options)
    data = _data()

    def run(steps: int) -> Any:
        settings = {"num_steps": steps, "batch_size": LOGISTIC_BATCH, "progress": False}
        return made.run(data, seed=0, **settings).fit

    steps = 50_000 if way == "compiled" else COMPARED
    run(COMPARED)

    def timing() -> Timing:
        seconds = run(steps).attrs["sampling_time"] / steps
        fit = run(COMPARED)
        sd = fit.gaussians[0].variance.sqrt() if fit.gaussians else torch.ones(COLUMNS)
        return Timing({"": seconds}, draws=_row(fit.centers[0], sd))

    return timing


def first_and_later(method: str, structure: str, steps: int) -> Callable[[], Timing]:
    """Whole runs of `ps.VI` or `ps.EKF`: of an object that has run before, of a new one, and the
    first one of all, whose code is not compiled yet."""
    os.environ["PYRO_SCALE_CACHE_DIR"] = tempfile.mkdtemp()
    settings: dict[str, Any] = {"batch_size": LOGISTIC_BATCH, "seed": 0, "progress": False}
    if method == "VI":
        data, options = _data(), {"optimizer": _adam(), "sticking_the_landing": True}
        settings["num_steps"] = steps
    else:
        x, y = logistic_data(steps * LOGISTIC_BATCH, COLUMNS)
        data, options = (torch.from_numpy(x), torch.from_numpy(y)), {"num_data": len(x)}

    def new() -> Any:
        return getattr(ps, method)(logistic_model, structure=structure, compile=True, **options)

    def seconds(method: Any) -> float:
        begin = time.perf_counter()
        method.run(data, **settings)
        return time.perf_counter() - begin

    earlier = new()
    first = seconds(earlier)
    of_first = earlier.fit.gaussians[0]

    def timing() -> Timing:
        of_new, again = seconds(new()), seconds(earlier)
        found = earlier.fit.gaussians[0]
        apart = (found.mean - of_first.mean).abs().max() / of_first.variance.sqrt().min()
        timed = {"": again, "a new object": of_new, "the first of all": first}
        return Timing(timed, draws=np.array([[float(apart)]]))

    return timing


# ------------------------------------------------------------------ the extended Kalman filter


def _filtered_data() -> tuple[Batch, list[Batch]]:
    """Rows that a filter sees once, and the same in batches."""
    x, y = map(torch.from_numpy, logistic_data(FILTERED_BATCHES * LOGISTIC_BATCH, COLUMNS))
    return (x, y), list(zip(x.split(LOGISTIC_BATCH), y.split(LOGISTIC_BATCH), strict=True))


def ekf_ours(structure: str, curvature: str, way: str = "run") -> Callable[[], Timing]:
    """`ps.EKF`: a step of `run`, and a step's share of the whole run with its compilation cached;
    `"step"`: batch by batch, compiled; `"eager"`: few steps of an eager run."""
    data, batches = _filtered_data()
    of: dict[str, Any] = {"structure": structure, "curvature": curvature}
    filtering = ps.EKF(logistic_model, compile=way != "eager", num_data=len(data[0]), **of)

    def run(num_rows: int | None = None) -> float:
        part = tuple(tensor[:num_rows] for tensor in data)
        begin = time.perf_counter()
        filtering.run(part, batch_size=LOGISTIC_BATCH, seed=0, progress=False)
        return time.perf_counter() - begin

    def one_by_one() -> dict[str, float]:
        run(LOGISTIC_BATCH)
        begin = time.perf_counter()
        for batch in batches[1:]:
            filtering.step(*batch)
        return {"": (time.perf_counter() - begin) / (len(batches) - 1)}

    def at_once() -> dict[str, float]:
        whole = run()
        share = {"": filtering.fit.attrs["fitting_time"], "the whole run()": whole}
        return {part: seconds / len(batches) for part, seconds in share.items()}

    def eager() -> dict[str, float]:
        run(EAGER_BATCHES * LOGISTIC_BATCH)
        return {"": filtering.fit.attrs["fitting_time"] / EAGER_BATCHES}

    measure = {"run": at_once, "step": one_by_one, "eager": eager}[way]

    def timing() -> Timing:
        seconds = measure()
        gaussian = filtering.fit.gaussians[0]
        row = _row(gaussian.mean, gaussian.variance.sqrt())
        return Timing(seconds, draws=None if way == "eager" else row)

    timing()
    return timing


def ekf_posteriors(structure: str) -> Callable[[], Timing]:
    """`posteriors.ekf.diag_fisher` or `.dense_fisher`.

    They take means of a batch's rows where Bayes' rule takes sums, so that lr is the batch's size.
    `dense_fisher` of posteriors 0.1.3 subtracts the Fisher information where it is to be added, so
    that its precision soon is not positive: it is timed at a small lr, and its numbers are not
    those of a filter.
    """
    import posteriors

    _, batches = _filtered_data()
    nothing = torch.tensor([])

    def rows(params: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        z = batch[0] @ params["w"]
        return batch[1] * z - torch.nn.functional.softplus(z), nothing

    module = getattr(posteriors.ekf, f"{structure}_fisher")
    lr = LOGISTIC_BATCH if structure == "diag" else 1e-3
    transform = module.build(rows, lr=float(lr), per_sample=True)

    def timing() -> Timing:
        state = transform.init({"w": torch.zeros(COLUMNS)})
        begin = time.perf_counter()
        for batch in batches:
            state, _ = transform.update(state, batch)
        seconds = (time.perf_counter() - begin) / len(batches)
        sd = state.cov.diagonal().sqrt() if structure == "dense" else state.sd_diag["w"]
        return Timing({"": seconds}, draws=_row(state.params["w"], sd))

    timing()
    return timing
