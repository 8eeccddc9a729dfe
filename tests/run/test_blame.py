"""Which site is told to have made a chain NaN or infinite."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torchopt
from reference import normals

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, NonFiniteError

X = normals(60, 2).float()
Y = X @ torch.tensor([1.0, -1.0]) + normals(60, seed=1).float()
STARTS = {"v": torch.zeros(2), "w": torch.zeros(2, 2)}
WALL = r"(chain|start) \d at step \d+, site 'wall': its log density is NaN"


def model(x, y, bound=1.03):
    v = pyro.sample("v", dist.Normal(0.0, 1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.factor("wall", 0.1 * torch.sqrt(bound - w[0]))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w + v, 1.0), obs=y)


STEPS = {"num_samples": 400, "warmup_steps": 0, "thinning": 1, "num_chains": 2, "seed": 0}


@pytest.mark.parametrize("batch_size", [None, 20])
@pytest.mark.parametrize("method", [ps.BAOA, ps.SGHMC, ps.SGLD, ps.SGNHT, ps.UBU])
def test_samplers_name_the_site_the_chain_and_the_step(method, batch_size):
    sampler = method(model, lr=0.3, init_strategy=STARTS, compile=False)
    with pytest.raises(NonFiniteError, match=WALL) as raised:
        sampler.run((X, Y), batch_size=batch_size, progress=False, **STEPS)
    assert "step size" not in str(raised.value)
    assert "Site 'wall' has no log density at values that chains visit" in str(raised.value)


@pytest.mark.slow
def test_compiled_chains_name_the_same():
    messages = set()
    for how in ("auto", False):
        sampler = ps.BAOA(model, lr=0.3, friction=1.0, init_strategy=STARTS, compile=how)
        with pytest.raises(NonFiniteError, match=WALL) as raised:
            sampler.run((X, Y), progress=False, **STEPS)
        messages.add(str(raised.value).partition(".")[0])
    assert len(messages) == 1


@pytest.mark.parametrize(
    "fit",
    [
        lambda m: ps.MAP(m, optimizer=torchopt.sgd(1.0), init_strategy=STARTS, compile=False),
        lambda m: ps.VI(m, optimizer=torchopt.adam(0.1), init_strategy=STARTS, compile=False),
        lambda m: ps.IVON(m, lr=0.5, init_strategy=STARTS, compile=False),
    ],
    ids=["MAP", "VI", "IVON"],
)
def test_optimizers_name_the_site_the_start_and_the_step(fit):
    with pytest.raises(NonFiniteError, match=WALL):
        fit(model).run((X, Y), num_steps=300, num_chains=2, seed=0, progress=False)


def test_the_particle_that_broke_the_others_is_the_one_that_is_named():
    with pytest.raises(NonFiniteError, match=r"particle \d+ at step \d+, site 'wall'"):
        ps.SVGD(model, compile=False).run((X, Y), num_steps=300, seed=0, progress=False)


@pytest.mark.parametrize("method", [ps.BAOA, ps.MAP])
def test_single_steps_name_the_site_on_their_own_batch(method):
    def on_some(x, y):  # NaN on one batch alone
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.factor("root", w[0] * (1.5 - x[:, 0]).sqrt())
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    calm = X[:, 0] < 1.5
    options = {"lr": 0.1, "friction": 1.0} if method is ps.BAOA else {}
    fit = method(on_some, num_data=60, **options)
    fit.step(X[calm][:10], Y[calm][:10])
    with pytest.raises(NonFiniteError, match="at step 1, site 'root': its log density is NaN"):
        fit.step(X[~calm], Y[~calm])


def test_a_step_size_above_the_stable_range_is_still_the_reason_of_chains_that_run_away():
    sampler = ps.SGLD(lambda x, y: model(x, y, 1e30), lr=50.0, init_strategy=STARTS, compile=False)
    with pytest.raises(NonFiniteError, match="step size above the stable range"):
        sampler.run((X, Y), progress=False, **STEPS)


@pytest.mark.slow
def test_a_warm_up_in_which_every_chain_breaks_names_the_site():
    with pytest.raises(ArgumentError, match="log density of site 'wall' is NaN"):
        ps.BAOA(model).run((X, Y), seed=0, progress=False)
