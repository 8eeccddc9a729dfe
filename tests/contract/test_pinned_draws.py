"""Draws at a seed stay what they were: those of version 0.2.0, to rounding."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torchopt
from reference import double, normals

import pyro_scale as ps

X = normals(40, 2, seed=1)
Y = X @ double(1.0, -0.5) + 0.3 * normals(40, seed=2)
HOW = {"num_samples": 3, "warmup_steps": 4, "thinning": 2, "num_chains": 2, "seed": 7}


def with_unknown_noise(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
    sd = pyro.sample("sd", dist.HalfNormal(double(1.0)[0]))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, sd), obs=y)


RUNS = {
    "shuffled": lambda: ps.BAOA(with_unknown_noise, lr=0.05, compile=False),
    "anew": lambda: ps.SGNHT(with_unknown_noise, lr=0.05, compile=False),
    "at the mode": lambda: ps.SGLD(
        with_unknown_noise, lr="auto", precondition=None, control_variates=True, compile=False
    ),
    "free motion": lambda: ps.UBU(with_unknown_noise, lr=0.05, compile=False),
}
#: The last draw of the second chain: both weights, and the sd; the last ELBO.
LAST = {
    "shuffled": [1.3568033184441826, 0.33753672227702586, 2.9427888460313256],
    "anew": [1.3568024096414681, 0.3298739194963497, 2.9716566493691765],
    "at the mode": [1.1841180429898202, 0.3458253355132452, 2.035698840744132],
    "free motion": [1.2901148277315218, 0.28310112164557993, 2.8975956977591912],
    "VI": -486.01880955212755,
}


@pytest.mark.parametrize("name", RUNS)
def test_draws_are_those_of_version_0_2(name):
    draws = RUNS[name]().run((X, Y), batch_size=8, progress=False, **HOW)
    samples = draws.get_samples(group_by_chain=True)
    last = [*samples["w"][1, -1].tolist(), float(samples["sd"][1, -1])]
    assert last == pytest.approx(LAST[name], rel=1e-9)


def test_a_fit_is_that_of_version_0_2():
    fit = ps.VI(with_unknown_noise, optimizer=torchopt.adam(1e-2), compile=False)
    fit.run((X, Y), num_steps=20, batch_size=8, seed=7, progress=False)
    assert float(fit.trace[0, -1]) == pytest.approx(LAST["VI"], rel=1e-9)
