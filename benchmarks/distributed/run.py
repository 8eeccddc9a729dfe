"""What sharing chains out among processes costs, beside processes that know nothing of each other.

`make distributed` prints, interleaved and with one thread a process:

- seconds of `run` with 2 W chains on W ranks, and of W processes at once with 2 chains each;
- the peak memory of the last rank with 2 chains a rank, as ranks become more.
"""

import json
import os
import resource
import subprocess
import sys
import time

import pyro
import pyro.distributions as dist
import torch

import pyro_scale as ps

ROUNDS, CHAINS_A_RANK = 5, 2
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def model(x, y=None):
    """Logistic regression."""
    w = pyro.sample("w", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def work(num_chains, num_samples):
    """One rank's part: seconds of the second run, which is compiled, and the peak memory."""
    torch.manual_seed(0)
    x = torch.randn(10_000, 8)
    y = (torch.rand(10_000) < torch.sigmoid(x.sum(1))).float()
    how = {"warmup_steps": 1000, "thinning": 200, "batch_size": 64, "num_chains": num_chains}
    sampler = ps.BAOA(model, lr=0.1, compile=True)
    sampler.run((x, y), num_samples=10, seed=0, progress=False, **how)
    begun = time.perf_counter()
    sampler.run((x, y), num_samples=num_samples, seed=0, progress=False, **how)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told = json.dumps({"seconds": time.perf_counter() - begun, "megabytes": peak})
    os.write(1, f"\n{told}\n".encode())  # at once, for ranks share the pipe


def finished(commands):
    """What every process of some commands has printed, all at once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    lines = [line for process in started for line in process.communicate()[0].splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def ranks(world, num_samples):
    """What so many ranks tell."""
    arguments = [__file__, str(CHAINS_A_RANK * world), str(num_samples)]
    return finished([[*TORCHRUN, f"--nproc-per-node={world}", *arguments]])


def independent(world, num_samples):
    """What so many processes by themselves tell."""
    return finished([[sys.executable, __file__, str(CHAINS_A_RANK), str(num_samples)]] * world)


def main():
    """Prints both comparisons."""
    world, num_samples = 2, 10_000
    ratios = []
    for _ in range(ROUNDS):
        alone = max(each["seconds"] for each in independent(world, num_samples))
        shared = max(each["seconds"] for each in ranks(world, num_samples))
        ratios.append(alone / shared)
        print(
            f"{world} processes {alone:.2f} s, {world} ranks {shared:.2f} s: {alone / shared:.3f}"
        )
    print(f"median {sorted(ratios)[ROUNDS // 2]:.3f} of independent processes")
    for world in (2, 4, 8):
        peaks = [each["megabytes"] for each in ranks(world, 5000)]
        print(
            f"{world} ranks: peak {min(peaks):.0f} MB of the least, {max(peaks):.0f} MB of the most"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
