"""What sharing rows out among ranks saves, beside one process.

`make distributed` runs it on two ranks of one thread: a logistic regression of 400,000 rows and 20
columns in float64; `Laplace`, and then `predict(reduce="mean")`, `log_likelihood` and `loo` of 100
draws, on rank 0 by itself (`distributed=False`) and on both (`"all"`), interleaved.
"""

import os
import time
import warnings

import pyro
import pyro.distributions as dist
import torch
from torch import distributed

import pyro_scale as ps

ROWS, COLUMNS, DRAWS, ROUNDS = 400_000, 20, 100, 3


def model(x, y=None):
    """A logistic regression."""
    zeros = torch.zeros(COLUMNS, dtype=torch.float64)
    w = pyro.sample("w", dist.Normal(zeros, 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def seconds_of(call):
    """(Of a call of rank 0's, or of all ranks' at once; of this rank's processor)."""
    begun, worked = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begun, time.process_time() - worked


def main():
    """Prints seconds of each."""
    distributed.init_process_group("gloo")
    is_first = distributed.get_rank() == 0
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    y = (torch.rand(ROWS) < torch.sigmoid(x[:, 0])).double()
    few = x[: ROWS // 10], y[: ROWS // 10]
    how = {"seed": 0, "progress": False}
    fits = {}

    def fit(who):
        fits[who] = ps.Laplace(model).run((x, y), distributed=who, **how)

    def sampled(who):
        method = ps.SGLD(model, lr=1e-4)
        steps = {"num_samples": DRAWS // 2, "warmup_steps": 0, "thinning": 1, "num_chains": 2}
        return method.run(few, batch_size=100, distributed=who, **steps, **how)

    draws = {"all": sampled("all"), False: sampled(False)}
    calls = {
        "Laplace": fit,
        "predict": lambda who: fits[who].predict(x, num_samples=DRAWS, reduce="mean"),
        "log_likelihood": lambda who: draws[who].log_likelihood(),
        "loo": lambda who: draws[who].loo(),
    }
    for name, call in calls.items():
        spent = {False: [], "all": []}
        for _ in range(ROUNDS):
            for who, seconds in spent.items():
                distributed.barrier()
                if is_first or who == "all":
                    seconds.append(seconds_of(lambda call=call, who=who: call(who)))
        by_rank = [None] * distributed.get_world_size()
        distributed.all_gather_object(by_rank, spent)
        (one, alone), *_ = sorted(by_rank[0][False])
        (shared, _), *_ = sorted(by_rank[0]["all"])
        busiest = max(min(cpu for _, cpu in rank["all"]) for rank in by_rank)
        if is_first:
            print(f"{name}: {shared:.2f} s on {len(by_rank)} ranks, {one:.2f} on one")
            print(f"    {busiest:.2f} s of the busiest rank's processor, {alone:.2f} of one's")
    distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
