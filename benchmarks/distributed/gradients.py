"""What a step costs whose gradient is summed over ranks, beside DDP with SGD and noise.

`make distributed` runs it on two ranks of one thread: a network of 1e6 weights, batches of 256 of
which each rank has half; a step of `ps.SGLD(mesh=)`, and one of DistributedDataParallel, its
backward pass, SGD and `torch.randn` of the same size, interleaved.

It also prints what a sum over ranks takes: its latency, and the time for one gradient.
"""

import os
import time
import warnings

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import pyro_scale as ps

ROWS, BATCH, STEPS, ROUNDS = 4096, 256, 200, 7


def network():
    """About a million weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 960), nn.ReLU(), nn.Linear(960, 960), nn.ReLU(), nn.Linear(960, 10)]
    return nn.Sequential(*layers)


def seconds_of(call, repeats=1):
    """Of each of some calls, on average."""
    distributed.barrier()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begun) / repeats


def main():
    """Prints seconds a step, and of a sum."""
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("chain", "data"))
    torch.manual_seed(0)
    x, labels = torch.randn(ROWS, 64), torch.randint(10, (ROWS,))
    sampler = ps.SGLD(classifier(ps.bayesianize(network())), lr=1e-6, compile=True)
    plain = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-6)
    size = sum(weight.numel() for weight in plain.parameters())
    share = BATCH // world

    def ours(steps):
        how = {"warmup_steps": steps - 1, "num_samples": 1, "thinning": 1, "num_chains": 1}
        sampler.run((x, labels), batch_size=BATCH, seed=0, progress=False, mesh=mesh, **how)
        return sampler.diagnostics().attrs["sampling_time"] / steps

    def theirs(steps):
        begun = time.perf_counter()
        for _ in range(steps):
            rows = torch.randint(ROWS, (BATCH,))[rank * share : (rank + 1) * share]
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(x[rows]), labels[rows]).backward()
            torch.randn(size)
            optimizer.step()
        return (time.perf_counter() - begun) / steps

    ours(STEPS)  # compiled once
    ratios, spent = [], []
    for _ in range(ROUNDS):
        pair = []
        for call in (ours, theirs):
            distributed.barrier()
            pair.append(call(STEPS))
        spent.append(pair)
        ratios.append(pair[0] / pair[1])
    few, many = torch.zeros(1), torch.zeros(size)
    latency = seconds_of(lambda: distributed.all_reduce(few), 200)
    transfer = seconds_of(lambda: distributed.all_reduce(many), 20) - latency
    if rank == 0:
        for one, other in spent:
            print(f"{1e3 * one:.1f} ms a step, DDP {1e3 * other:.1f}: {one / other:.2f}")
        print(f"median {sorted(ratios)[ROUNDS // 2]:.2f} of DDP + SGD + randn, {size:,} weights")
        sums = f"{1e3 * latency:.2f} ms + {1e3 * transfer:.1f} ms for {4 * size:,} bytes"
        print(f"a sum over ranks: {sums}")
    distributed.destroy_process_group()


def classifier(net):
    """A Pyro model of a network."""
    import pyro
    import pyro.distributions as dist

    def model(x, labels=None):
        logits = net(x)
        with pyro.plate("data", len(x)):
            pyro.sample("labels", dist.Categorical(logits=logits), obs=labels)

    return model


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
