"""What each process of a test of sharded networks does: `torchrun sharded_on_ranks.py CASE FOLDER`.

By itself it runs the same methods on the network as a whole.  Each process writes what it found to
`FOLDER/rank-<rank>.pt`.
"""

import os
import shutil
import sys
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
import torchopt
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pyro_scale as ps

RANK = int(os.environ.get("RANK", -1))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
DEVICE = "cuda" if os.environ.get("ON_CUDA") else "cpu"
if __name__ == "__main__":  # pytest, which looks for doctests here, keeps its own
    torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
X = torch.randn(101, 5)
Y = torch.sin(X.sum(1)) + 0.1 * torch.randn(101)
#: Rows of the batches of 20 steps: they divide unevenly, and of one row a rank has none.
SIZES = [20, 21, 1, 50, 7] * 4
BY_HAND = {"num_samples": 10, "warmup_steps": 5, "thinning": 3, "batch_size": 21}
if RANK < 0:  # of a sharded network, there is but one
    BY_HAND["num_chains"] = 1
QUIET = {"progress": False, "seed": 3}
METHODS = {
    "SGLD": lambda model, **how: ps.SGLD(model, lr=1e-3, **how),
    "SGHMC": lambda model, **how: ps.SGHMC(model, lr=0.01, **how),
    "BAOA": lambda model, **how: ps.BAOA(model, lr=0.01, **how),
    "IVON": lambda model, **how: ps.IVON(model, first_curvature=50.0, **how),
    "MAP": lambda model, **how: ps.MAP(model, optimizer=torchopt.adam(1e-2), **how),
}


def plain_network(dtype=torch.float64):
    torch.manual_seed(1)
    layers = nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1)
    return nn.Sequential(*layers).to(dtype).to(DEVICE)


def sharded(shape=(WORLD,), dtype=torch.float64, **how):
    """Weights of 7 and of 1 row on 2 or 3 ranks: uneven parts, and some without elements."""
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
    net = plain_network(dtype)
    for layer in (net[0], net[2], net[4]):
        fully_shard(layer, mesh=mesh, **how)
    return fully_shard(net, mesh=mesh, **how)


def regression_with(net, **how):
    """A regression with a network; its noise is a latent beside the weights."""
    bayes = ps.bayesianize(net, **how)

    def model(x, y=None):
        sigma = pyro.sample("sigma", dist.LogNormal(x.new_zeros(()), 1.0))
        mean = bayes(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.deterministic("mean", mean)
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    return model


def whole(samples):
    """Draws on every rank, in the processor's memory."""
    gathered = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in samples.items()}
    return {name: value.cpu() for name, value in gathered.items()}


def mine(rows):
    """This rank's part of a batch; all of it in one process."""
    rank = max(RANK, 0)
    return rows[rank * len(rows) // WORLD : (rank + 1) * len(rows) // WORLD]


def new_net(**how):
    return plain_network() if RANK < 0 else sharded(**how)


def stepped(name, **how):
    """(Log joint, latents) after each of 20 steps, each rank with rows of its own."""
    method = METHODS[name](regression_with(new_net(**how)), num_data=101)
    torch.manual_seed(7)
    trace, place = [], 0
    for size in SIZES:
        rows = torch.arange(place, place + size) % 101
        place += size
        log_joint = method.step(mine(X[rows]), mine(Y[rows]))
        if name == "IVON":  # its mean: draws of it have noise of their own
            fit = None if RANK < 0 else method.posterior
            position = method.fit.centers[0] if RANK < 0 else fit.positions[0]
            layout = method.fit.layout if RANK < 0 else fit.layout
            params = layout.unflatten(position[None])
            shards = {} if RANK < 0 else fit.problem.shards
            values = {n: shards[n].whole(v) if n in shards else v for n, v in params.items()}
        else:
            values = method.get_samples()
        trace.append((log_joint, whole(values)))
    return trace


def run_method(name, data=(X, Y), **how):
    method = METHODS[name](regression_with(new_net()))
    lengths = BY_HAND if name not in ("IVON", "MAP") else {"num_steps": 20, "batch_size": 21}
    return method.run(data, **lengths | QUIET | how)


def by_loader():
    """Rows are read by index; every rank has the whole data set."""
    loader = DataLoader(TensorDataset(X, Y), 21, shuffle=True)
    how = {key: value for key, value in BY_HAND.items() if key != "batch_size"}
    fit = METHODS["BAOA"](regression_with(new_net())).run(loader, **how, **QUIET)
    return whole(fit.get_samples())


class StoppedError(Exception):
    pass


def checkpointed(folder, resume=False, stops_at=None):
    """A run that ends once it has written a state, or goes on with what is there."""
    path = Path(folder) / "run"
    model = regression_with(new_net())

    def stopping(x, y=None):
        if (path / f"state-{stops_at}").exists():
            raise StoppedError
        model(x, y)

    where = {"resume" if resume else "checkpoint": path}
    method = ps.SGHMC(stopping, lr=0.01)
    seed = {} if resume else {"seed": 3}
    try:
        method.run((X, Y), **BY_HAND, progress=False, checkpoint_every=0.0, **where, **seed)
    except StoppedError:
        return None
    return whole(method.get_samples())


def error_of(call):
    """The error's class and message."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def refused():
    net = sharded()
    model = regression_with(net)

    def by_hand(method, **how):
        return lambda: method.run((X, Y), **BY_HAND | QUIET | how)

    half = plain_network()
    fully_shard(half[0], mesh=init_device_mesh(DEVICE, (WORLD,)))
    done = by_hand(ps.BAOA(model, lr=0.01))()
    batch = X[:9], Y[:9]
    moved = (X + max(RANK, 0), Y)
    seeds = QUIET | {"seed": 3 + max(RANK, 0)}
    lengths = {key: value for key, value in BY_HAND.items() if key != "batch_size"}
    rows = TensorDataset(X, Y)
    parts = DataLoader(rows, 10, sampler=DistributedSampler(rows))
    calls = {
        "parts of the data": lambda: ps.BAOA(model, lr=0.01, num_data=101).run(
            parts, **lengths, **QUIET
        ),
        "other data": lambda: ps.BAOA(model, lr=0.01).run(moved, **BY_HAND, **QUIET),
        "other seeds": lambda: ps.BAOA(model, lr=0.01).run((X, Y), **BY_HAND, **seeds),
        "reduce": lambda: done.predict(X[:9], reduce="mean"),
        "lr": by_hand(ps.BAOA(model)),
        "kernel": by_hand(ps.SGNHT(model, lr=0.01)),
        "kernel of step": lambda: ps.UBU(model, lr=0.01, num_data=101).step(*batch),
        "control variates": by_hand(ps.BAOA(model, lr=0.01, control_variates=True)),
        "precondition": by_hand(ps.BAOA(model, lr=0.01, precondition="diag")),
        "chains": by_hand(ps.BAOA(model, lr=0.01), num_chains=4),
        "warm-up": by_hand(ps.BAOA(model, lr=0.01), warmup_steps="auto"),
        "store": by_hand(ps.BAOA(model, lr=0.01), store=False),
        "batch size": by_hand(ps.BAOA(model, lr=0.01), batch_size="auto"),
        "starts": by_hand(ps.BAOA(model, lr=0.01, init_strategy={"0.bias": torch.zeros(1, 7)})),
        "VI": lambda: ps.VI(model).run((X, Y), num_steps=3, **QUIET),
        "Laplace": lambda: ps.Laplace(model).run((X, Y)),
        "gradient": lambda: ps.LogPosterior(model, 101).grad({"sigma": torch.zeros(())}, batch),
        "summary": done.summary,
        "prior's shape": lambda: ps.bayesianize(
            net, prior=lambda _, w: dist.Normal(torch.zeros(w.shape), 1.0)
        ),
        "prior's values": lambda: ps.bayesianize(net, prior=lambda _, w: dist.Normal(0, w.std())),
        "prior's support": lambda: ps.bayesianize(net, prior=dist.HalfNormal(1.0)),
        "rest": lambda: ps.bayesianize(net, rest="point"),
        "not all": lambda: ps.bayesianize(half),
        "no rows": lambda: ps.BAOA(model, lr=0.01, num_data=101).step(X[:0], Y[:0]),
        "diverges": by_hand(ps.SGLD(model, lr=1e3)),
    }
    return {name: error_of(call) for name, call in calls.items()}


def in_half_precision():
    """A float32 network that computes in bfloat16, beside the same in float32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    found = {}
    for name, how in {"bf16": {"mp_policy": policy}, "float32": {}}.items():
        method = ps.BAOA(regression_with(sharded(dtype=torch.float32, **how)), lr=0.01)
        method.run((X.float(), Y.float()), **BY_HAND, **QUIET)
        found[name] = whole(method.get_samples())
    return found


def cases(folder):
    found = {"steps": {name: stepped(name) for name in METHODS}}
    found["runs"] = {n: whole(run_method(n).get_samples()) for n in METHODS if n != "IVON"}
    found["loader"] = by_loader()
    if RANK < 0:
        found["trace"] = run_method("IVON").trace
    baoa = run_method("BAOA")
    torch.manual_seed(5)
    found["predictions"] = baoa.predict(X[:9], num_samples=4)
    found["one row"] = baoa.predict(X[:1], return_sites=["mean"])
    if RANK < 0:
        return found
    ivon = run_method("IVON")
    found["draws of a fit"] = whole(ivon.get_samples(4))
    found["kind"] = {name: type(v).__name__ for name, v in baoa.get_samples().items()}
    found["linearized"] = error_of(lambda: ivon.predict(X[:9], num_samples=2, linearized=True))
    found["trace"] = ivon.trace
    net = sharded()
    ps.MAP(regression_with(net), optimizer=torchopt.adam(1e-2)).run(
        (X, Y), num_steps=20, batch_size=21, **QUIET
    )
    found["network"] = whole({name: weight.detach() for name, weight in net.named_parameters()})
    found["refused"] = refused()
    found["half"] = in_half_precision()
    offloaded = stepped("BAOA", offload_policy=CPUOffloadPolicy(pin_memory=DEVICE == "cuda"))
    found["offloaded"] = offloaded
    plain = ps.BAOA(regression_with(plain_network()), lr=0.01)  # while there are sharded ones
    plain.run((X, Y), **BY_HAND | QUIET, num_chains=1, distributed=False)
    found["unsharded"] = plain.get_samples()
    if WORLD == 2:
        checkpointed(folder, stops_at=17)
        distributed.barrier()
        if RANK == 0:
            for number in range(3):
                shutil.copytree(Path(folder) / "run", Path(folder) / f"{number}" / "run")
    return found


def main(case, folder):
    warnings.simplefilter("ignore")
    if RANK >= 0:
        backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
        if DEVICE == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group(backend)
    if case == "cases":
        found = cases(folder)
    elif case == "copies":  # the same parts on two ranks each
        found = {name: stepped(name, shape=(2, WORLD // 2)) for name in ("BAOA", "IVON")}
    elif case == "checkpoint":
        found = checkpointed(folder)
    else:
        found = checkpointed(folder, resume=True)
    torch.save(found, Path(folder) / f"rank-{max(RANK, 0)}.pt")
    if RANK >= 0:
        distributed.barrier()  # what ends first takes the others' store with it


if __name__ == "__main__":
    main(*sys.argv[1:])
