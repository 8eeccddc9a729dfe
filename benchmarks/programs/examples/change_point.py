"""When did coal mining disasters become rarer: a change point, enumerated over the years."""

import pyro
import pyro.distributions as dist
import torch

# one digit a year, 1851 to 1961
counts = (
    "45401434063340263354531441553425223421322111130010110031"
    "0322011101010002100011023311211112420014000100000100101"
)
disasters = torch.tensor([float(count) for count in counts])


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
