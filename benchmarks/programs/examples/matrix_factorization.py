"""Ratings as products of users' and items' factors, which rotate; predicted ratings do not."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

USERS, ITEMS, RANK = 12, 8, 2
rng = np.random.default_rng(24)
truth = rng.normal(size=(USERS, RANK)) @ rng.normal(size=(RANK, ITEMS))
cells = rng.choice(USERS * ITEMS, 70, replace=False)
user, item = cells // ITEMS, cells % ITEMS
rating = truth[user, item] + rng.normal(0, 0.5, 70)


def model(user, item, rating=None):
    with pyro.plate("users", USERS):
        u = pyro.sample("u", dist.Normal(torch.zeros(RANK), 1.0).to_event(1))
    with pyro.plate("items", ITEMS):
        v = pyro.sample("v", dist.Normal(torch.zeros(RANK), 1.0).to_event(1))
    pyro.deterministic("first_user", u[0] @ v.T)
    with pyro.plate("ratings", len(user)):
        mean = (u[user] * v[item]).sum(-1)
        return pyro.sample("rating", dist.Normal(mean, 0.5), obs=rating)


data = (
    torch.tensor(user),
    torch.tensor(item),
    torch.tensor(rating, dtype=torch.float32),
)
right = ("first_user",)
