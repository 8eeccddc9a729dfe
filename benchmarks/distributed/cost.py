"""What a step costs on W ranks that share its batch out, and where more of them stop paying.

    seconds(W) = fixed + B/W row + sum(W),    sum(W) = 2 (W - 1) (latency + bytes / (W bandwidth))

`fixed` is what a step costs besides its rows (noise, prior, update), `row` what a row of the batch
costs, `bytes` the gradient's, and `sum` a ring's: 2 (W - 1) messages of a W-th of the vector each
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).

`make distributed` runs it on two ranks of one thread.  It measures steps of whole and of half
batches in one process (both at once), and sums of short and of long vectors; predicts the step of
two ranks; measures that; and extrapolates to other networks.
"""

import time
import warnings
from typing import NamedTuple

import torch
from gradients import classifier
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

import pyro_scale as ps

ROWS, STEPS, ROUNDS = 8192, 60, 3
#: What a message takes, in seconds, and bytes a second: published orders of magnitude.
NETWORKS = {"10 GbE": (50e-6, 1.1e9), "100 GbE": (20e-6, 11e9), "400 Gb InfiniBand": (5e-6, 45e9)}


class Cost(NamedTuple):
    """Seconds of a step: besides its rows, and for each row; and the bytes of its gradient."""

    fixed: float
    row: float
    num_bytes: int

    def step(self, rows, world, latency, bandwidth):
        """Seconds of a step on so many ranks."""
        return self.fixed + self.row * rows / world + self.sum(world, latency, bandwidth)

    def sum(self, world, latency, bandwidth):
        """Of which to sum the gradients up."""
        return 2 * (world - 1) * (latency + self.num_bytes / (world * bandwidth))

    def fewest(self, rows, latency, bandwidth, most=1024):
        """The number of ranks at which a step is the shortest."""
        worlds = [2**power for power in range(most.bit_length())]
        return min(worlds, key=lambda world: self.step(rows, world, latency, bandwidth))


def network(width):
    """Two hidden layers."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def median(call):
    """Of some rounds, all ranks at once."""
    found = []
    for _ in range(ROUNDS):
        distributed.barrier()
        found.append(call())
    return sorted(found)[ROUNDS // 2]


def seconds_of_sum(size):
    """Of one sum of so many numbers."""
    vector = torch.zeros(size)
    begun = time.perf_counter()
    for _ in range(20):
        distributed.all_reduce(vector)
    return (time.perf_counter() - begun) / 20


def main():
    """Prints what was measured, predicted and extrapolated."""
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("chain", "data"))
    torch.manual_seed(0)
    x, labels = torch.randn(ROWS, 64), torch.randint(10, (ROWS,))
    length = {"warmup_steps": STEPS - 1, "num_samples": 1, "thinning": 1, "num_chains": 1}

    def seconds_of_step(sampler, rows, **how):
        sampler.run((x, labels), batch_size=rows, seed=0, progress=False, **length, **how)
        return sampler.diagnostics().attrs["sampling_time"] / STEPS

    latency = median(lambda: seconds_of_sum(1)) / 2
    for width, rows in ((128, 2048), (960, 256), (960, 2048)):
        net = network(width)
        size = sum(weight.numel() for weight in net.parameters())
        bandwidth = 4 * size / (median(lambda n=size: seconds_of_sum(n)) - 2 * latency)
        sampler = ps.SGLD(classifier(ps.bayesianize(net)), lr=1e-6, compile=True)
        one, half = (
            median(lambda b=b, s=sampler: seconds_of_step(s, b, distributed=False))
            for b in (rows, rows // 2)
        )
        row = max(0.0, 2 * (one - half) / rows)
        cost = Cost(max(0.0, one - rows * row), row, 4 * size)
        two = median(lambda b=rows, s=sampler: seconds_of_step(s, b, mesh=mesh))
        if rank == 0:
            predicted = cost.step(rows, 2, latency, bandwidth)
            print(f"{size:,} weights, batches of {rows}: a step is {1e3 * one:.2f} ms on one rank")
            print(f"  on two, predicted {1e3 * predicted:.2f} ms, measured {1e3 * two:.2f}")
            local = f"{1e6 * latency:.0f} us, {bandwidth / 1e9:.2f} GB/s"
            for name, link in {f"here ({local})": (latency, bandwidth), **NETWORKS}.items():
                best = cost.fewest(rows, *link)
                gain = one / cost.step(rows, best, *link)
                print(f"  {name}: shortest on {best} ranks, {gain:.1f} times as fast as on one")
    distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
