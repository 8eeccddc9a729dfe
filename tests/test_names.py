"""What people write who come from Pyro, and what they are told."""

import arviz
import pyro
import pyro.distributions as dist
import pytest
import torch
from both_arviz import IS_1
from pyro.infer import MCMC
from pyro.infer.autoguide import AutoNormal

import pyro_scale as ps
from pyro_scale.errors import ArgumentError

QUIET = {"progress": False, "seed": 0}
X = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)


def model(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def run(**how):
    return ps.BAOA(model, lr=0.1, compile=False).run((X, Y), **{"num_samples": 5, **QUIET, **how})


WRONG = {
    "the model's arguments one by one": (
        lambda: ps.BAOA(model, lr=0.1).run(X, Y, num_samples=5),
        r"BAOA.run takes 1 positional .* not 2: pass .* run\(\(x, y\), ...\)",
    ),
    "num_warmup": (lambda: run(num_warmup=5), r"no argument 'num_warmup': .* warmup_steps="),
    "a typo": (lambda: run(num_chain=5), r"no argument 'num_chain': did you mean num_chains=\?"),
    "a hyperparameter of run's": (
        lambda: ps.BAOA(model, lr=0.1, num_samples=5),
        r"no hyperparameter 'num_samples'.*: pass it to run\(\)",
    ),
    "an argument of the constructor's": (
        lambda: run(temperature=0.5),
        "no argument 'temperature': pass it to the constructor",
    ),
    "a misspelt hyperparameter": (
        lambda: ps.BAOA(model, lr=0.1, fricton=1.0),
        r"no hyperparameter 'fricton'.*did you mean friction=\?",
    ),
    "a guide": (lambda: ps.VI(model, AutoNormal(model)), "a guide is made by structure="),
    "a named guide": (lambda: ps.VI(model, guide=AutoNormal(model)), "VI makes its own guide"),
    "optim": (lambda: ps.VI(model, optim=None), "'optim': here it is optimiser="),
    "optimizer": (lambda: ps.MAP(model, optimizer=None), "'optimizer': here it is optimiser="),
    "lr of VI": (lambda: ps.VI(model, lr=0.1), r"'lr': here it is optimiser=torchopt.adam\(lr\)"),
    "Pyro's optimiser": (
        lambda: ps.VI(model, optimiser=pyro.optim.Adam({"lr": 0.1})),
        "pass one of TorchOpt's",
    ),
    "steps of a sampler": (lambda: run(num_steps=5), "here it is num_samples=, warmup_steps="),
    "an interval": (lambda: run().summary(prob=0.9), r"no argument 'prob': .* arviz.summary"),
    "no data": (lambda: ps.BAOA(model, lr=0.1).run(), "BAOA.run: missing a required argument"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_the_right_one(name):
    call, said = WRONG[name]
    with pytest.raises(ArgumentError, match=said):
        call()


def test_a_call_that_python_refuses_is_a_type_error_too():
    with pytest.raises(TypeError, match="num_warmup"):
        run(num_warmup=5)


def test_pyros_mcmc_is_told_that_it_is_not_needed():
    with pytest.raises(AttributeError, match=r"BAOA is no kernel .* ps.BAOA\(model, ...\).run"):
        MCMC(ps.BAOA(model, lr=0.1), num_samples=5, disable_progbar=True).run(X, Y)


@pytest.mark.skipif(IS_1, reason="ArviZ 1 has no converter of Pyro's own")
def test_arvizs_converter_is_told_that_it_is_not_needed():
    with pytest.raises(AttributeError, match=r"call .to_arviz\(\)"):
        arviz.from_pyro(run())


def test_a_method_says_what_it_is():
    given = "BAOA(lr=0.1, temperature=1, friction=1, mass=1)"
    assert repr(ps.BAOA(model, lr=0.1)) == f"<{given}, not run>"
    assert repr(run(num_chains=3)) == f"<{given}, N = 20, 3 x 5 draws>"
    assert repr(ps.VI(model, structure="dense")).startswith("<VI(structure=dense")
    fit = ps.Laplace(model).run((X, Y), progress=False)
    assert repr(fit) == "<Laplace(structure=dense), N = 20, starts: 1>"
    with pytest.raises(AttributeError, match="'BAOA' object has no attribute 'colour'"):
        run().colour  # noqa: B018


def test_torch_does_not_ask_for_issues_to_be_filed(recwarn):
    """Of what vmap takes one by one, on which nobody can act."""

    def one_by_one(y):
        probs = pyro.sample("probs", dist.Beta(2.0, 2.0))
        with pyro.plate("data", len(y)):
            places = torch.searchsorted(torch.linspace(0, 1, 5) * probs, y)
            pyro.sample("y", dist.Normal(places.float(), 1.0), obs=y)

    ps.explain(one_by_one, Y)
    ps.BAOA(one_by_one, lr=0.01).run(Y, num_samples=3, **QUIET)
    assert not [each for each in recwarn if "performance drop" in str(each.message)]
