"""Pyro's own NUTS on the problems, one chain: `python benchmarks/exact/pyro_nuts.py NAME [draws]`.

Prints seconds of the processor, and what all of the problem's chains would take at 1,000 + 1,000
draws.  With fewer draws (as many of warm-up) that is a guess: long trees early in warm-up count
too much.
"""

from __future__ import annotations

import sys
import time
import warnings
from functools import partial
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import torch
from problems import problems
from pyro.infer import MCMC, NUTS

_LIB = SimpleNamespace(sample=pyro.sample, plate=pyro.plate, dist=dist, math=torch)


def main() -> None:
    """Runs and prints."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    problem = problems()[sys.argv[1]]()
    draws = int(sys.argv[2]) if len(sys.argv) > 2 else problem.draws
    data = {name: torch.as_tensor(value) for name, value in problem.data.items()}
    pyro.set_rng_seed(0)
    kernel = NUTS(partial(problem.model, _LIB))
    mcmc = MCMC(kernel, num_samples=draws, warmup_steps=draws, disable_progbar=True)
    begun = time.process_time()
    mcmc.run(**data)
    seconds = time.process_time() - begun
    whole = seconds * problem.draws / draws * problem.chains
    print(
        f"{sys.argv[1]}: {seconds:.1f} s for {draws} + {draws}, {whole:.0f} s for all", flush=True
    )


if __name__ == "__main__":
    main()
