"""ps.NUTS on a problem: a line with a seed in, a line with what it took out."""

from __future__ import annotations

import ctypes
import sys
import time
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from answers import Answer, answer
from problems import least_ess, problems

import pyro_scale as ps
from pyro_scale.compile.inductor import build_library
from pyro_scale.exact.log_density import EarlierFunction, log_density

LIB = SimpleNamespace(sample=pyro.sample, plate=pyro.plate, dist=dist, math=torch)
#: Calls a function of `compile/cpp_function.py` over and over, along its gradient.
_CALLS = """
#include <cstddef>
typedef int (*Function)(size_t, const double*, double*, double*, const void*);
extern "C" void call(Function f, size_t size, double* x, double* gradient, const void* inputs,
                     long count) {
    double value;
    for (long i = 0; i < count; ++i) {
        f(size, x, gradient, &value, inputs);
        for (size_t j = 0; j < size; ++j) x[j] += 1e-12 * gradient[j];
    }
}
"""


def _seconds_per_gradient(density: Any, start: torch.Tensor) -> float:
    native, library = density.native, ctypes.CDLL(build_library(_CALLS))
    x, gradient = start.double().clone(), torch.empty_like(start)

    def call(count: int) -> float:
        pointers = (ctypes.c_void_p(each.data_ptr()) for each in (x, gradient))
        begun = time.process_time()
        library.call(
            ctypes.c_void_p(native.address),
            ctypes.c_size_t(native.size),
            *pointers,
            ctypes.c_void_p(native.inputs_address),
            ctypes.c_long(count),
        )
        return time.process_time() - begun

    count = 1
    while call(count) < 0.2:
        count *= 4
    return call(count) / count


def main() -> None:
    """Answers seeds until there are no more."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    problem = problems()[sys.argv[1]]()
    data = {name: torch.as_tensor(value) for name, value in problem.data.items()}
    nuts = ps.NUTS(partial(problem.model, LIB), num_data=problem.num_data)
    quiet: dict[str, Any] = {"num_chains": problem.chains, "progress": False}
    begun = time.perf_counter()
    nuts.run(data, num_samples=2, warmup_steps=2, seed=0, **quiet)
    first = time.perf_counter() - begun
    ready = nuts._problem(data, 1, None, 0)
    start = ready.positions[0]
    params = ready.engine.layout.unflatten(start)
    density = log_density(
        ready.log_posterior, ready.data.first(), params, 1.0, True, EarlierFunction()
    )
    gradient = _seconds_per_gradient(density, start)

    def run(seed: int) -> Answer:
        cpu, wall = time.process_time(), time.perf_counter()
        nuts.run(
            data, num_samples=problem.draws, warmup_steps=problem.draws, seed=seed + 1, **quiet
        )
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        result = nuts.posterior.draws
        samples = nuts.get_samples(group_by_chain=True)
        return Answer(
            cpu=cpu,
            wall=wall,
            ess=least_ess({name: value.numpy() for name, value in samples.items()}),
            gradients=int(result.sample_stats["n_steps"].sum()),
            divergences=int(result.sample_stats["diverging"].sum()),
            program=result.attrs["program"],
            first=first,
            gradient=gradient,
        )

    answer(run)


if __name__ == "__main__":
    main()
