"""When did coal mining disasters become rarer: a change point, enumerated over the years."""

import pyro
import pyro.distributions as dist
import torch

disasters = torch.tensor(
    [4, 5, 4, 0, 1, 4, 3, 4, 0, 6, 3, 3, 4, 0, 2, 6, 3, 3, 5, 4, 5, 3, 1, 4, 4, 1, 5, 5]
    + [3, 4, 2, 5, 2, 2, 3, 4, 2, 1, 3, 2, 2, 1, 1, 1, 1, 3, 0, 0, 1, 0, 1, 1, 0, 0, 3, 1]
    + [0, 3, 2, 2, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 2, 1, 0, 0, 0, 1, 1, 0, 2, 3, 3, 1, 1]
    + [2, 1, 1, 1, 1, 2, 4, 2, 0, 0, 1, 4, 0, 0, 0, 1, 0.0],
)


def model(disasters):
    years = len(disasters)
    early = pyro.sample("early", dist.Exponential(1.0))
    late = pyro.sample("late", dist.Exponential(1.0))
    change = pyro.sample(
        "change", dist.Categorical(torch.ones(years)), infer={"enumerate": "parallel"}
    )
    rate = torch.where(torch.arange(years) < change, early, late)
    with pyro.plate("years", years):
        pyro.sample("disasters", dist.Poisson(rate), obs=disasters)


data = (disasters,)
right = ("early", "late")
