"""A trajectory that is extended against one that was planned so."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_scale as ps
from pyro_scale.run.extend import extended
from pyro_scale.run.run import Trajectory


def model(x):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=x)


@pytest.mark.parametrize("batch_size", [None, 5])
def test_it_is_the_run_at_twice_the_thinning(batch_size):
    """Bit for bit: every second draw, and as many new ones."""
    kept = []

    def run(thinning, twice):
        sampler = ps.BAOA(model, lr=0.3, friction=1.0, compile=False)
        how = {"warmup_steps": 3, "num_chains": 2, "seed": 1, "progress": False}
        x = torch.linspace(-1, 1, 20)
        sampler.run(x, num_samples=6, thinning=thinning, batch_size=batch_size, **how)
        if not twice:
            return sampler.posterior.draws.positions
        plan = sampler._last.plan
        trajectory = plan.execute("test")
        longer = extended(trajectory, "test")
        assert isinstance(longer, Trajectory)
        kept.append(longer.plan.steps.thinning)
        return longer.draws.positions

    assert torch.equal(run(2, twice=True), run(4, twice=False))
    assert kept == [4]
