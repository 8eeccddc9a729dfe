"""A resumed run has the choices of the first one, whatever its number of draws."""

import pyro
import pyro.distributions as dist
import torch

import pyro_scale as ps


def two_modes(y):
    m = pyro.sample("m", dist.Normal(0.0, 3.0))
    pyro.factor("modes", torch.logsumexp(torch.stack([-8 * (m - 2) ** 2, -8 * (m + 2) ** 2]), 0))


def test_a_run_of_chains_that_mix_slowly_is_extended_to_the_longer_one(tmp_path):
    """Their thinning is limited by a budget, which is that of 1,000 draws for all runs."""
    how = {"seed": 0, "progress": False}
    y = torch.zeros(3)
    ps.BAOA(two_modes).run((y,), num_samples=100, checkpoint=tmp_path, **how)
    longer = ps.BAOA(two_modes).run((y,), num_samples=150, resume=tmp_path, **how)
    whole = ps.BAOA(two_modes).run((y,), num_samples=150, **how)
    assert longer.posterior.attrs["thinning"] == whole.posterior.attrs["thinning"]
    draws = longer.get_samples(group_by_chain=True)["m"]
    assert torch.equal(draws, whole.get_samples(group_by_chain=True)["m"])
