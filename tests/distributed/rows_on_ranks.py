"""What each process does of tests of rows that ranks share out: `torchrun rows_on_ranks.py CASES
FOLDER`; also called by a test."""

import sys
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pyro
import pyro.distributions as dist
import torch
from on_ranks import BY_HAND, QUIET, RANK, Rows, X, Y, error_of, model, run, subsampling, with_param
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.data.open import open_data
from pyro_scale.distributed.workers import Workers
from pyro_scale.kernels import SGLD
from pyro_scale.run.problem import as_log_posterior, prepare
from pyro_scale.tuning import diagonal_modes, modes

KINDS = ("ggn", "hessian", "empirical_fisher")
ZERO = torch.zeros((), dtype=torch.float64)


def process(x, y=None):
    """One density of all rows."""
    height = pyro.sample("height", dist.LogNormal(ZERO, 1.0))
    near = torch.exp(-torch.cdist(x, x).square() / 2)
    covariance = height * near + 0.1 * torch.eye(len(x), dtype=x.dtype)
    pyro.sample("y", dist.MultivariateNormal(torch.zeros_like(x[:, 0]), covariance), obs=y)


def with_shift(x, y=None):
    """Rows that share what is drawn anew."""
    w = pyro.sample("w", dist.Normal(ZERO.expand(3), 1.0).to_event(1))
    shift = pyro.sample("shift", dist.Normal(w.sum(), 1.0), obs=ZERO + 0.3)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w + shift, 1e-6), obs=y)


def scaled_network(x, y=None):
    w = pyro.sample("w", dist.Normal(ZERO.expand(3, 4), 1.0).to_event(2))
    b = pyro.sample("b", dist.Normal(ZERO.expand(4), 1.0).to_event(1))
    v = pyro.sample("v", dist.Normal(ZERO.expand(4), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(ZERO, 0.1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=scale * ((x @ w + b).tanh() @ v)), obs=y)


WEIGHTS = {
    "w": torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4),
    "b": torch.linspace(0, 1, 4, dtype=torch.float64),
    "v": torch.linspace(1, -1, 4, dtype=torch.float64),
    "scale": ZERO + 1.2,
}


def laplace_numbers(a_model=model, data=(X, Y), how=(), **asked):
    fit = run(ps.Laplace(a_model, **asked), data, **QUIET, **dict(how)).fit
    return {
        "center": fit.centers,
        "precision": torch.stack([each.precision for each in fit.gaussians]),
        "evidence": torch.tensor(fit.attrs["log_evidence"], dtype=torch.float64),
        "distance": torch.tensor(fit.attrs["distance"], dtype=torch.float64),
        "pareto_k": torch.tensor(fit.attrs.get("pareto_k", torch.nan), dtype=torch.float64),
    }


def updated():
    fit = run(ps.Laplace(model), (X[:200], Y[:200]), **QUIET)
    fit = fit.update((X[200:], Y[200:]), progress=False).fit
    return {"center": fit.centers, "precision": fit.gaussians[0].precision}


def laplaces():
    loader = DataLoader(TensorDataset(X, Y), 20)
    exact = {
        **{f"dense, {kind}": laplace_numbers(structure="dense", curvature=kind) for kind in KINDS},
        **{f"diag, {kind}": laplace_numbers(structure="diag", curvature=kind) for kind in KINDS},
        "many chunks": laplace_numbers(how={"batch_size": 10}),
        "some of the rows weighed": laplace_numbers(data=(X.repeat(40, 1), Y.repeat(40))),
        "starts": laplace_numbers(how={"num_chains": 2}),
        "where it is given": laplace_numbers(how={"mode": {"w": 0.5 + torch.zeros(3)}}),
        "loader": laplace_numbers(data=loader),
        "stream": laplace_numbers(data=DataLoader(Rows(), 20)),
        "own subsamples": laplace_numbers(subsampling),
        "points": laplace_numbers(with_param),
        "one density": laplace_numbers(process, data=(X[:60], Y[:60])),
        "fewer rows than ranks": laplace_numbers(data=(X[:2], Y[:2])),
        "kron": laplace_numbers(scaled_network, structure="kron", how={"mode": WEIGHTS}),
        "kron, many chunks": laplace_numbers(
            scaled_network, structure="kron", how={"mode": WEIGHTS, "batch_size": 10}
        ),
        "kron, one row": laplace_numbers(
            scaled_network, (X[:1], Y[:1]), structure="kron", how={"mode": WEIGHTS}
        ),
        "kron, corrected": laplace_numbers(
            scaled_network,
            structure="kron",
            corrected=True,
            how={"mode": WEIGHTS, "batch_size": 10},
        ),
        "low rank": laplace_numbers(
            scaled_network, structure="low_rank", rank=3, how={"mode": WEIGHTS}
        ),
        "update": updated(),
    }
    drawn = {"monte_carlo": laplace_numbers(curvature="monte_carlo")}
    return {"exact": exact, "drawn": drawn}


def read(method):
    some = method.loo(num_rows=7)
    every = method.loo()
    unlike = method.predict(X, num_samples=200)["y"]
    means = method.predict(X, num_samples=200, reduce="mean")["y"]
    return {
        "log_likelihood": method.log_likelihood()["y"],
        "of other data": method.log_likelihood(data=(X[:2], Y[:2]))["y"],
        "arviz": torch.as_tensor(method.to_arviz().log_likelihood["y"].values.copy()),
        "loo": torch.stack([every.pointwise, every.pareto_k]),
        "elpd": torch.tensor([every.elpd, every.se, some.elpd, some.subsampling_se]),
        "loo of some": torch.stack([some.pointwise, some.pareto_k, some.rows.double()]),
        "mean": means,
        "variance": torch.stack(method.predict(X, reduce="variance", batch_size=50)["y"]),
        "one row": method.predict(X[:1], reduce="mean")["y"],
        "draws": unlike,
        "sets": method.predict(X[:99], interval=0.9, calibrate=(X[100:200], Y[100:200]))["y"],
    }


def readings():
    everywhere = {"distributed": "all"}
    sampler = run(ps.BAOA(model, lr=0.05), (X, Y), batch_size=20, **BY_HAND, **everywhere)
    fit = run(ps.Laplace(model), (X, Y), **QUIET, **everywhere)
    own = run(ps.Laplace(subsampling), (X, Y), **QUIET, **everywhere)
    joint = run(ps.Laplace(process), (X[:60], Y[:60]), **QUIET, **everywhere)
    stream = run(ps.Laplace(model), DataLoader(Rows(), 20), **QUIET, **everywhere)
    shifted = run(ps.Laplace(with_shift), (X, X[:, 0]), **QUIET, **everywhere)
    away = X @ shifted.get_samples(200)["w"].T
    shifts = shifted.predict(X, num_samples=200)["y"] - away.T
    return {
        "sampler": read(sampler),
        "fit": read(fit) | {"linear": fit.predict(X, linearized=True, reduce="mean")["y"]},
        "own subsamples": own.log_likelihood(),
        "one density": {"mean": joint.predict(X[:60], reduce="mean")["y"]},
        "stream": stream.log_likelihood(),
        "spread of a shift among rows": shifts.std(1),
    }


def by_rank_0_alone():
    """What reads data where draws are on rank 0 waits for nobody."""
    sampler = run(ps.BAOA(model, lr=0.05), (X, Y), batch_size=20, **BY_HAND)
    fit = run(ps.Laplace(model), (X, Y), **QUIET)
    return [read(each)["log_likelihood"].shape for each in (sampler, fit)] if RANK == 0 else None


def mistakes():
    """Of rank 1."""
    is_1, other = RANK == 1, (X + (RANK == 1), Y)
    fit = run(ps.Laplace(model), (X, Y), **QUIET, distributed="all")
    quiet = QUIET | ({"seed": 6} if is_1 else {})
    return {
        "data": error_of(lambda: run(ps.Laplace(model), other, **QUIET)),
        "seed": error_of(lambda: run(ps.Laplace(model), (X, Y), **quiet)),
        "model": error_of(lambda: run(ps.Laplace(with_param if is_1 else model), (X, Y), **QUIET)),
        "curvature": error_of(
            lambda: run(ps.Laplace(model, curvature=KINDS[is_1]), (X, Y), **QUIET)
        ),
        "no mode": error_of(lambda: run(ps.Laplace(endless), (X, Y), **QUIET)),
        "rows": error_of(lambda: run(ps.Laplace(model, num_data=500), (X, Y), **QUIET)),
        "breaks": error_of(breaks_on_rank_1),
        "predict": error_of(lambda: fit.predict(other[0])),
        "reduce": error_of(lambda: fit.predict(X, reduce="mean" if is_1 else None)),
        "calls": error_of(fit.loo if is_1 else fit.log_likelihood),
        "afterwards": fit.log_likelihood()["y"].shape,
    }


def breaks_on_rank_1():
    def grad(density, position):
        raise torch.linalg.LinAlgError("not positive definite")

    with mock.patch.object(FullDataDensity, "grad", grad if RANK == 1 else FullDataDensity.grad):
        run(ps.Laplace(model), (X, Y), **QUIET)


def endless(x, y=None):
    """Which has no mode."""
    w = pyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), ()))
    pyro.factor("up", w.square())
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(0 * w, 1.0), obs=y)


def wells(x):
    """Two modes; and at w = 0 no mode for Newton's method to leave without a search of its own."""
    w = pyro.sample("w", dist.Normal(ZERO.expand(2), 3.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(w.square().sum(), 1.0), obs=2 + x[:, 0])


def searches():
    """How many each rank does; what they find, and what they take if their time is over."""
    counted, search = [], modes._search
    with Workers.from_group("auto").together():
        opened = open_data((X,), None, None, None)
        log_posterior = as_log_posterior(wells, opened.num_data)
        problem = prepare(log_posterior, opened, SGLD(lr=1.0), None, 7, 0)
    density = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)

    def found(is_over=bool, find=modes.find_modes, **more):
        workers = Workers.from_group("auto")
        with workers.together():
            share_out = partial(workers.map, what="searches", device=torch.device("cpu"))
            limits = modes.SearchLimits(is_over=is_over, map=share_out)
            return find(density, problem.positions, 1.0, **more, limits=limits)

    def count(*args):
        counted.append(args)
        return search(*args)

    one_at_a_time = mock.patch.object(FullDataDensity, "at_once", 1)
    with one_at_a_time, mock.patch.object(modes, "_search", count):
        every = found(seed=0)
    return {
        "count": len(counted),
        "passes": every.evaluations,
        "searches": [mode.searches for mode in every.modes],
        "modes": torch.stack([mode.gaussian.mean for mode in every.modes]),
        "factors": torch.stack([mode.gaussian.scale_tril for mode in every.modes]),
        "evidence": [mode.log_evidence for mode in every.modes],
        "together": [mode.log_evidence for mode in found(seed=0).modes],
        "cut short": found(lambda: True, seed=0).evaluations,
        "diagonal": [
            (mode.gaussian.mean.tolist(), mode.gaussian.sd.tolist(), mode.searches)
            for mode in found(find=diagonal_modes.find_diagonal_modes).modes
        ],
    }


def every_case():
    return {
        "laplace": laplaces(),
        "readings": readings(),
        "rank 0": by_rank_0_alone(),
        "searches": searches(),
    }


def main(cases, folder):
    found = {case: {"cases": every_case, "mistakes": mistakes}[case]() for case in cases.split("+")}
    torch.save(found, Path(folder) / f"rank-{RANK}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
