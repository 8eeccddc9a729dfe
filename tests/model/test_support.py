"""Chains that leave the model's support though its gradient is finite there."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import of_rows
from repetitions import long_but
from runs import EVERY_STEP, QUIET

import pyro_scale as ps
from pyro_scale.errors import NonFiniteError
from pyro_scale.storage import files

Y = torch.tensor([0.5, 1.2, 2.0])
HOW = {**EVERY_STEP, **QUIET, "num_samples": 300, "num_chains": 2}


def nan_outside():
    w = pyro.sample("w", dist.Normal(1.0, 1.0))
    pyro.factor("c", (1.5 - w).log())  # finite gradient, NaN above 1.5


infinite_outside = of_rows(lambda b: dist.Uniform(0.0, b), b=lambda: dist.Uniform(0.0, 10.0))


def nan_above():
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.factor("c", torch.where(w > 1.5, torch.nan, 0.0))


MODELS = [(nan_outside, None, "c", "NaN"), (infinite_outside, Y, "y", "infinite")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "data", "site", "word", "compile"),
    long_but(
        [(*model, compile) for model in MODELS for compile in (False, True)],
        *[(*MODELS[0], False), (*MODELS[1], True)],
    ),
)
def test_a_chain_that_leaves_the_support_stops(model, data, site, word, compile, tmp_path):
    start = {"w": torch.full((2,), 1.0)} if data is None else {"b": torch.full((2,), 2.5)}
    sampler = ps.BAOA(model, lr=0.8, compile=compile, init_strategy=start)
    with pytest.raises(NonFiniteError, match="the log joint became NaN") as caught:
        sampler.run(data, **HOW, checkpoint=tmp_path)
    assert "state became" not in str(caught.value)
    assert f"site '{site}': its log density is {word}" in str(caught.value)
    found = ps.replay(tmp_path / "crash-dump-0", model)
    assert found.site == site
    assert f"its log density is {word}" in found.reason
    # the log joint that a step evaluates is that of the state before it
    last = files.read(tmp_path / "crash-dump-0", "crash dump")["steps"]
    assert not torch.isfinite(torch.tensor(last[-1]["log_joint"]))
    assert torch.isfinite(torch.tensor([step["log_joint"] for step in last[:-1]])).all()
    position = torch.as_tensor(last[-1]["state"]["position"])
    inside = position < 1.5 if data is None else 10 * position.sigmoid() > 2.0
    assert not inside.any()


@pytest.mark.parametrize("store", [None, False, "draws.zarr"])
def test_the_other_chains_go_on(store, tmp_path):
    how = {**HOW, "num_samples": 40, "store": tmp_path / store if store else store}
    start = {"w": torch.tensor([-1.5, 1.45])}
    sampler = ps.SGLD(nan_above, lr=0.005, compile=False, init_strategy=start)
    with pytest.raises(NonFiniteError, match="chain 1 at step") as caught:
        sampler.run(None, **how)
    assert "chains 0" in str(caught.value)
    if store is not False:
        assert sampler.get_samples()["w"].max() < 1.5
        assert sampler.to_arviz().sample_stats["lp"].notnull().all()


def test_only_steps_that_lead_to_draws_are_looked_at():
    """A chain may pass through the outside in warm-up."""

    def hole():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("c", torch.where((w > 20.0) & (w < 55.0), torch.nan, 0.0))

    start = {"w": torch.tensor([60.0])}
    sampler = ps.SGLD(hole, lr=0.2, compile=False, init_strategy=start)
    sampler.run(
        None, num_samples=50, thinning=1, num_chains=1, warmup_steps=100, seed=0, progress=False
    )
    assert sampler.get_samples()["w"].abs().max() < 6


def test_an_optimizer_stops_too():
    """MAP that is driven over the edge by its first step."""
    start = {"w": torch.tensor([1.4])}

    def model():
        w = pyro.sample("w", dist.Normal(3.0, 1.0))
        pyro.factor("c", torch.where(w > 1.5, torch.nan, 0.0))

    with pytest.raises(NonFiniteError, match="the log joint became NaN or infinite: start 0"):
        ps.MAP(model, init_strategy=start, compile=False).run(
            None, num_steps=200, seed=0, progress=False
        )
