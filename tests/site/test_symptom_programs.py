"""The remedies on the page of symptoms run, each in the program of a reader who has the symptom.

A remedy is a few lines of a program. `READER` begins that program; `BEFORE` holds what a section's
reader has done besides.
"""

import re
import textwrap
import warnings

import pyro
import pytest
import torch
from places import ROOT

PAGE = (ROOT / "docs" / "symptoms.md").read_text()
PROGRAM = re.compile(r"^```py\n(.*?)^```", re.DOTALL | re.MULTILINE)

READER = """
import functools
import pyro, pyro.distributions as dist, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import pyro_scale as ps

N = 300
x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
y = x @ torch.tensor([1.0, -0.5, 0.0]) + 0.5
data = x, y
dataset = TensorDataset(x, y)
loader = DataLoader(dataset, batch_size=256)
how = dict(num_samples=20, warmup_steps=50, thinning=2, num_chains=2, seed=0)

def model(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
"""
RUN = "mcmc = ps.BAOA(model, lr=0.05).run((x, y), **how)"
#: By section: what its reader has done before.
BEFORE = {
    "slow": RUN,
    "not-compiled": "w = torch.ones(3)",
    "workers": 'ps.BAOA(model, lr=0.1).run(loader, checkpoint="run", **how)',
    "plate": "mean = torch.zeros(N)",
    "local-latent": "mean, s = torch.zeros(N), torch.ones(())",
    "discrete-latent": "weights = torch.ones(3) / 3",
    "no-observation": "mean = torch.zeros(N)",
    "batchnorm": "net = trained = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))",
    "dropout": "net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2))",
    "not-rows": """
import pandas
matrix = torch.eye(5)
frame = pandas.DataFrame({"time": [1.7e9, 1.7e9 + 60.0], "city": ["Oslo", "Bergen"]})
""",
    "memory": "mcmc = ps.BAOA(model, lr=0.05)\nmcmc.run = functools.partial(mcmc.run, **how)",
    "cuda-memory": RUN,
    "not-finite": """
try:
    ps.BAOA(model, lr=50.0).run((x, y), checkpoint="run", **how | {"num_samples": 500})
except ps.errors.NonFiniteError:
    pass
""",
    "ensemble": RUN + "\nx_test = x[:5]",
    "verdict": "mcmc = ps.BAOA(model).run((x, y), seed=0)",
    "divergences": """
def model(y, _=None):
    v = pyro.sample("v", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", len(y)):
        u = pyro.sample("u", dist.Normal(0.0, v.exp()))
        return pyro.sample("y", dist.Normal(u, 1.0), obs=y)

x, y = y, None
""",
    "step-size": RUN,
    "pareto-k": "fit = ps.Laplace(model).run((x, y))",
    "prediction-shape": RUN,
    "new-group": "mean, sd = torch.zeros(()), torch.ones(())",
    "params": """
def model(x, y=None):
    s = pyro.param("s", torch.tensor(1.0), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, s), obs=y)

"""
    + RUN,
    "log-likelihood": RUN,
    "arviz-1": RUN + "\nidata = mcmc.to_arviz()",
}


def sections():
    for section in PAGE.split("\n### ")[1:]:
        programs = PROGRAM.findall(section)
        if programs:
            yield re.search(r"\{ #([a-z0-9-]+) \}", section)[1], "".join(programs)


def test_the_readers_are_of_sections_with_a_program():
    assert set(BEFORE) <= {code for code, _ in sections()}


@pytest.mark.site
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("code", "program"), [pytest.param(*each, id=each[0]) for each in sections()]
)
def test_the_remedy_runs(code, program, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "program"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(READER + BEFORE.get(code, ""), names)
        exec(compile(textwrap.dedent(program), f"symptoms.md#{code}", "exec"), names)
    pyro.clear_param_store()
    torch.set_num_threads(1)
