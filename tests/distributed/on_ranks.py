"""What each process of a test does, `torchrun on_ranks.py CASES FOLDER NAMES`; tests call it, too.

Each writes what it found to `FOLDER/rank-<rank>.pt`; of several cases with + between, by case.
"""

import itertools
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

import pyro
import pyro.distributions as dist
import torch
import torchopt
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import pyro_scale as ps
from pyro_scale.errors import FileError
from pyro_scale.infer.method import NotRun
from pyro_scale.posterior import sinks
from pyro_scale.run import resume
from pyro_scale.storage import zarr_store

RANK = int(os.environ.get("RANK", 0))
torch.manual_seed(0)
X = torch.randn(403, 3, dtype=torch.float64)
W = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
Y = (torch.rand(403, dtype=torch.float64) < torch.sigmoid(X @ W)).double()
QUIET = {"progress": False, "seed": 5}
BY_HAND = {"num_samples": 50, "warmup_steps": 70, "thinning": 3, "num_chains": 8, **QUIET}


def model(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def with_param(x, y=None):
    b = pyro.param("b", torch.zeros((), dtype=torch.float64))
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)


def subsampling(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))
    with pyro.plate("data", 403, subsample_size=21) as rows:
        pyro.sample("y", dist.Bernoulli(logits=x[rows] @ w), obs=y[rows])


class Rows(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))

    def __len__(self):
        return len(X)


class RowByRow(Dataset):
    """Read by index, a row at a time; it knows which rows this process has read."""

    def __init__(self, rows=slice(None)):
        self.read, self.rows = [], (X[rows], Y[rows])

    def __len__(self):
        return len(self.rows[0])

    def __getitem__(self, index):
        self.read.append(index)
        return tuple(column[index] for column in self.rows)


def join_group():
    """As a user's own launcher does, where torchrun has not started this process."""
    if "GROUP" in os.environ:
        world = int(os.environ["WORLD"])
        where = f"file://{os.environ['GROUP']}"
        distributed.init_process_group("gloo", init_method=where, rank=RANK, world_size=world)


def found(fit):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "w": fit.get_samples(group_by_chain=True)["w"],
            "lp": fit.to_arviz(log_likelihood=False).sample_stats["lp"].values,
            "summary": fit.summary().to_dict(),
            "diagnostics": fit.diagnostics().to_dict(),
            "attrs": {k: v for k, v in fit.diagnostics().attrs.items() if "time" not in k},
        }


def run(method, data, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return method.run(data, **how)


def baoa_by_hand(**how):
    return found(run(ps.BAOA(model, lr=0.05), (X, Y), batch_size=20, **BY_HAND | how))


CASES = {
    "eager": baoa_by_hand,
    "compiled": lambda: found(
        run(ps.SGHMC(model, lr=0.05, compile=True), (X, Y), batch_size=20, **BY_HAND)
    ),
    "everywhere": lambda: baoa_by_hand(distributed="all"),
    "ignored": lambda: baoa_by_hand(distributed=False, num_chains=2),
    "loader": lambda: found(
        run(ps.BAOA(model, lr=0.05), DataLoader(TensorDataset(X, Y), 20, shuffle=True), **BY_HAND)
    ),
    "stream": lambda: found(run(ps.BAOA(model, lr=0.05), DataLoader(Rows(), 20), **BY_HAND)),
    "untuned": lambda: found(run(ps.BAOA(model), (X, Y), num_samples=40, num_chains=8, **QUIET)),
    "untuned batches": lambda: found(
        run(ps.BAOA(model), (X, Y), num_samples=20, num_chains=8, batch_size=50, **QUIET)
    ),
    "points": lambda: found(run(ps.BAOA(with_param, lr=0.05), (X, Y), batch_size=20, **BY_HAND)),
}


def error_of(call):
    """The error's class and message."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def other_on_rank_1(what):
    data, how, how_model = (X, Y), dict(BY_HAND), model
    starts = torch.ones(8, 3, dtype=torch.float64)
    if RANK == 1:
        match what:
            case "data":
                data = (X + 1, Y)
            case "seed":
                how["seed"] = 6
            case "length":
                how["num_samples"] = 51
            case "bad argument":
                how["num_chains"] = 0
            case "checkpoint":
                how["checkpoint"] = "somewhere"
            case "who keeps":
                how["distributed"] = "all"
            case "bad data":
                data = (X[:10], Y)
            case "model":
                how_model = with_param
            case "starts":
                starts[5] += 1e-2
            case "version":
                with mock.patch.object(resume, "version", return_value="0.0"):
                    return error_of(
                        lambda: run(ps.BAOA(model, lr=0.05), data, batch_size=20, **how)
                    )
    sampler = ps.BAOA(how_model, lr=0.05, init_strategy={"w": starts})
    return error_of(lambda: run(sampler, data, batch_size=20, **how))


def dies_on_rank_1():
    def kill(step):
        if RANK == 1:
            os._exit(7)
        return 0.05

    return error_of(lambda: run(ps.BAOA(model, lr=kill), (X, Y), batch_size=20, **BY_HAND))


def breaks_chain_3():
    sampler, error = breaking([3])
    return error, sampler.get_samples(group_by_chain=True)["w"]


def breaking(chains, **how):
    """Chains whose start is so far out that steps of this size diverge there."""
    starts = torch.zeros(8, 3, dtype=torch.float64)
    starts[chains] = 1e3

    def quartic(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))
        pyro.factor("quartic", -(w**4).sum())
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(w.sum(), 1.0), obs=x[:, 0])

    sampler = ps.BAOA(quartic, lr=0.05, init_strategy={"w": starts})
    return sampler, error_of(lambda: run(sampler, (X,), batch_size=20, **BY_HAND, **how))


def checkpointed(folder, seconds=0.05, resume=False, **how):
    where = {"resume" if resume else "checkpoint": Path(folder) / "run"}

    how = BY_HAND | {"num_samples": 10_000, "thinning": 40, **how}
    method = ps.BAOA(model, lr=0.05, compile=True)
    return run(method, (X, Y), batch_size=20, checkpoint_every=seconds, **where, **how)


def moments(fit):
    return {name: each._asdict() for name, each in fit.moments().items()}


def stores(folder):
    """Runs that keep draws on disk, or none; files hold seven draws of a chain."""
    folder = Path(folder)

    def kept(name, sampler, **how):
        how = {"batch_size": 20, "store": folder / f"{name}.zarr", **BY_HAND, **how}
        return run(sampler, (X, Y), **how)

    def compiled():
        return ps.SGHMC(model, lr=0.05, compile=True)

    result = {
        "compiled": found(kept("compiled", compiled())),
        "everywhere": found(kept("everywhere", compiled(), distributed="all")),
        "points": found(kept("points", ps.SGHMC(with_param, lr=0.05, compile=True))),
        "exists": error_of(lambda: kept("compiled", compiled())),
        "another": error_of(lambda: kept(f"rank-{RANK}", compiled())),
    }
    fit = kept("nowhere", compiled(), store=False, num_samples=300)
    result["nowhere"] = moments(fit), fit.summary().to_dict(), fit.diagnostics().to_dict()
    for name, chains in (("breaks", [3]), ("all of rank 1 break", [1, 3, 5, 7])):
        sampler, result[name] = breaking(chains, store=folder / f"{name}.zarr")
        counted, _ = breaking(chains, store=False)
        none = isinstance(counted._last, NotRun)  # a rank whose chains have all stopped
        result[f"{name}, nowhere"] = None if none else moments(counted)
        result[f"{name}, draws"] = None if none else sampler.get_samples(group_by_chain=True)["w"]
    result["full"] = error_of(lambda: on_a_full_disk(kept, compiled()))
    return result


def on_a_full_disk(kept, sampler):
    """That of the last rank is, at its third file."""
    write, files = zarr_store.DrawStore.write, []
    last = int(os.environ.get("WORLD_SIZE", 1)) - 1

    def full(*args):
        files.append(args)
        if last == RANK and len(files) > 2:
            raise FileError("the draws cannot be written (No space left on device)")
        write(*args)

    zarr_store.DrawStore.write = full
    try:
        kept("full", sampler)
    finally:
        zarr_store.DrawStore.write = write


def resumable(folder, kind, case):
    """A run that goes on after it was killed, its draws on disk or nowhere."""
    store = Path(folder) / "draws.zarr" if kind == "stored" else False
    draws = 12_000 if case == "extend" else 10_000
    fit = checkpointed(folder, resume=case != "begin", store=store, num_samples=draws)
    return {"moments": moments(fit), "draws": None if store is False else found(fit)}


def fails_on_rank_1():
    """A model that raises on one rank of the mesh, some time after it has been understood."""
    calls = itertools.count()

    def failing(x, y=None):
        model(x, y)
        if RANK == 1 and next(calls) == 60:
            raise RuntimeError("no such rows")

    return failing


def frozen_base():
    """A last layer on a fixed network."""
    torch.manual_seed(2)
    layers = [torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)]
    net = ps.bayesianize(torch.nn.Sequential(*layers).double(), include="2")

    def classifier(x, y=None):
        logits = net(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    return classifier


#: All rows, or those of this rank along "data", which are not as many as the other's.
HALF = (
    slice(None) if "RANK" not in os.environ else slice(0, 300) if RANK % 2 == 0 else slice(300, 403)
)
OWN_ROWS = X[HALF], Y[HALF]


class OwnStream(IterableDataset):
    """The rows of this rank."""

    def __iter__(self):
        return iter(zip(*OWN_ROWS, strict=True))

    def __len__(self):
        return len(OWN_ROWS[0])


def places_read(drawn):
    """Of 200 rows of each rank's own."""
    own = RowByRow(slice(200 * (RANK % 2), 200 * (RANK % 2) + 200))
    how = {"num_chains": 2, "batch_size": "auto", "rows_by_rank": "RANK" in os.environ}
    drawn(ps.BAOA(model, lr=0.05), DataLoader(own, 21), **how)
    return own.read


def on_mesh(shape, folder, names):
    """Runs whose batches are shared out, of which some have names; the same without a mesh in one
    process."""
    mesh = None
    if "RANK" in os.environ:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("chain", "data"))

    def ran(sampler, data=(X, Y), **how):
        length = {"num_samples": 20, "warmup_steps": 20, "thinning": 2}
        how = {"mesh": mesh, "distributed": "all", "batch_size": 21, **length, **QUIET, **how}
        return run(sampler, data, **how)

    def drawn(*args, **how):
        return ran(*args, **how).get_samples(group_by_chain=True)

    def fitted(method, data=(X, Y), **how):
        how = {"mesh": mesh, "batch_size": 21, "num_steps": 60, "num_chains": 2, **QUIET, **how}
        fit = run(method, data, **how).fit
        spread = [gaussian.variance for gaussian in fit.gaussians]
        return {"w": torch.cat([fit.centers, *(each[None] for each in spread)]), "lp": fit.trace}

    def begun_and_resumed():
        where, how = Path(folder) / "mesh", {"num_chains": 2}
        drawn(ps.SGHMC(model, lr=0.05), num_samples=10, checkpoint=where, **how)
        return drawn(ps.SGHMC(model, lr=0.05), num_samples=15, resume=where, **how)

    few_rows = 6 if RANK % 2 else 403
    falling = torchopt.schedule.polynomial_schedule(0.1, 1e-3, 1.0, 60)
    few = {"num_chains": 2, "warmup_steps": 0, "thinning": 1}
    by_rank = few | {"num_samples": 3, "rows_by_rank": mesh is not None}
    compiled = ran(ps.SGHMC(model, lr=0.05, compile=True), num_chains=2)
    read_by_index = RowByRow()
    loader = DataLoader(read_by_index, 21, shuffle=True)
    runs = {
        "one step": lambda: drawn(ps.BAOA(model, lr=0.05), num_samples=1, **few),
        "small batches": lambda: drawn(ps.SGLD(model, lr=0.05), num_samples=9, batch_size=1, **few),
        "trajectory": lambda: drawn(ps.SGHMC(model, lr=0.05), num_chains=2),
        "compiled points": lambda: drawn(ps.BAOA(with_param, lr=0.05, compile=True), num_chains=2),
        "whole data": lambda: drawn(ps.BAOA(model, lr=0.05), num_chains=2, batch_size=None),
        "loader": lambda: drawn(ps.BAOA(model, lr=0.05), loader, num_chains=2, batch_size="auto"),
        "stream": lambda: drawn(
            ps.BAOA(model, lr=0.05), DataLoader(Rows(), 21), num_chains=2, batch_size="auto"
        ),
        "frozen base": lambda: renamed(drawn(ps.BAOA(frozen_base(), lr=0.05), num_chains=2)),
        "frozen base, whole data": lambda: renamed(
            drawn(ps.BAOA(frozen_base(), lr=0.05), num_chains=2, batch_size=None)
        ),
        "points": lambda: drawn(ps.BAOA(with_param, lr=0.05), num_chains=2),
        "MAP": lambda: fitted(ps.MAP(model)),
        "MAP by torch.optim": lambda: fitted(
            ps.MAP(model, optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
        ),
        "MAP, compiled": lambda: fitted(ps.MAP(model, compile=True)),
        "MAP that stops": lambda: fitted(
            ps.MAP(model, optimizer=torchopt.adam(0.05), early_stopping=True), num_steps=5000
        ),
        "MAP to the mode": lambda: fitted(ps.MAP(model, structure="dense"), batch_size=None),
        "VI": lambda: fitted(ps.VI(model, optimizer=torchopt.adam(falling), num_particles=2)),
        "VI, dense": lambda: fitted(ps.VI(model, structure="dense")),
        "IVON": lambda: fitted(ps.IVON(model), data=DataLoader(Rows(), 21), batch_size=None),
        "MAP, rows by rank": lambda: fitted(
            ps.MAP(model), OWN_ROWS, batch_size=None, rows_by_rank=mesh is not None
        ),
        "rows by rank": lambda: drawn(
            ps.BAOA(model, lr=0.05), OWN_ROWS, batch_size=None, **by_rank
        ),
        "streams by rank": lambda: drawn(
            ps.BAOA(model, lr=0.05),
            DataLoader(OwnStream(), len(OWN_ROWS[0])),
            batch_size="auto",
            **by_rank,
        ),
    }
    named = {name: call() for name, call in runs.items() if name in names}
    return named | {
        "compiled": compiled.get_samples(group_by_chain=True),
        "program": compiled.diagnostics().attrs["program"],
        "rows read": len(read_by_index.read),
        "few starts": error_of(lambda: fitted(ps.MAP(model), num_chains=1))
        if shape[0] > 1
        else None,
        "batches by rank": drawn(
            ps.BAOA(model, lr=0.05), OWN_ROWS, **by_rank | {"num_samples": 50}
        ),
        "rows by rank, untuned": error_of(
            lambda: drawn(ps.BAOA(model), num_chains=2, rows_by_rank=True)
        ),
        "gone on with": begun_and_resumed(),
        "places read": places_read(drawn),
        "too few rows": error_of(
            lambda: drawn(ps.BAOA(model, lr=0.05), (X[:few_rows], Y[:few_rows]), **by_rank)
        ),
        "other rows in a team": error_of(
            lambda: drawn(ps.BAOA(model, lr=0.05), (X[RANK:], Y[RANK:]), batch_size=None, **by_rank)
        ),
        "diagnostics": compiled.diagnostics().to_dict(),
        "own subsamples": error_of(
            lambda: drawn(ps.BAOA(subsampling, lr=0.05), num_chains=2, batch_size=None)
        ),
        "clock": error_of(lambda: drawn(ps.BAOA(model, lr=0.05), num_chains=2, max_seconds=9.0)),
        "fails": error_of(lambda: drawn(ps.BAOA(fails_on_rank_1(), lr=0.05), num_chains=2)),
    }


def renamed(samples):
    """The weights of the last layer in place of those of `model`."""
    return {"w": torch.cat([value.flatten(2) for value in samples.values()], -1)}


def main(cases, folder, *names):
    join_group()
    found = {case: found_in(case, folder, names) for case in cases.split("+")}
    torch.save(found if "+" in cases else found[cases], Path(folder) / f"rank-{RANK}.pt")


def found_in(case, folder, names):
    if case == "cases":
        return {name: CASES[name]() for name in names if name in CASES}
    if case == "errors":
        kinds = ("data", "seed", "length", "checkpoint", "who keeps", "bad argument")
        kinds += ("bad data", "model", "starts", "version")
        result = {kind: other_on_rank_1(kind) for kind in kinds}
        result["few"] = error_of(lambda: baoa_by_hand(num_chains=1))
        result["breaks"] = breaks_chain_3()
        result["afterwards"] = baoa_by_hand()
        return result
    if case.startswith("mesh"):
        return on_mesh(tuple(int(size) for size in case.split("-")[1:]), folder, names)
    if case == "alone":  # goes on with what a mesh has begun
        how = BY_HAND | {"num_samples": 20, "warmup_steps": 20, "thinning": 2, "num_chains": 2}
        goes_on = ps.SGHMC(model, lr=0.05)
        run(goes_on, (X, Y), batch_size=21, resume=Path(folder) / "mesh", **how)
        return goes_on.get_samples(group_by_chain=True)
    if case == "dies":
        return dies_on_rank_1()
    if case == "stores":
        with mock.patch.object(sinks, "BUFFERING", sinks.Buffering(file_draws=7)):
            return stores(folder)
    if "-" in case:
        often = sinks.Buffering(file_draws=500, wait_seconds=0.05, wait_times=0)
        with mock.patch.object(sinks, "BUFFERING", often):
            return resumable(folder, *case.split("-"))
    return found(checkpointed(folder, resume=case == "resume"))


if __name__ == "__main__":
    main(*sys.argv[1:])
