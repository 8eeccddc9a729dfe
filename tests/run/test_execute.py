"""Runs that are repeated at half the step size because steps threw draws out of the posterior."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_scale as ps
from pyro_scale.run import execute

ROWS = torch.linspace(-1, 1, 20)


def model(x):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=x)


def run(sampler=ps.BAOA, **how):
    return sampler(model).run(ROWS, num_samples=200, seed=0, progress=False, **how)


def test_the_step_is_halved(monkeypatch):
    """Once, as no draw is too low at half of it; the report says why."""
    plain, answers = run(), iter([True, False])
    monkeypatch.setattr(execute, "_throws", lambda _: next(answers))
    halved = run()
    lr = halved.posterior.attrs["lr"]
    assert lr == plain.posterior.attrs["lr"] / 2
    assert bool((halved.posterior.draws.sample_stats["lr"] == lr).all())
    why = f"lr={lr:.2g}: halved 1 time, as steps threw draws out of the posterior"
    assert halved.report().choices["step size"].startswith(why)


def test_it_is_not_halved_for_ever(monkeypatch):
    plain = run()
    monkeypatch.setattr(execute, "_throws", lambda _: True)
    assert run().posterior.attrs["lr"] == plain.posterior.attrs["lr"] / 4


def test_a_budget_that_is_spent_is_kept(monkeypatch):
    """Rows for one run, not for a second one."""
    monkeypatch.setattr(execute, "_throws", lambda _: True)
    most = 200_000
    few = run(max_rows=most)
    passes = sum(float(n) for name, n in few.posterior.attrs.items() if name.startswith("passes_"))
    assert 20 * passes <= most
    assert "halved" not in few.report().choices["step size"]


@pytest.mark.parametrize(
    ("sampler", "how", "place", "seen"),
    [
        (ps.BAOA, {}, 150, True),
        (ps.BAOA, {}, slice(0, 20), False),  # on the way in
        (ps.BAOA, {"batch_size": 10}, 150, False),  # an estimate of the log joint
        (ps.GHMC, {}, 150, False),
    ],
)
def test_what_counts_as_thrown(sampler, how, place, seen):
    """A draw 300 nats below the others, of four chains of 200; no exact draw."""
    plan = run(sampler, **how)._last.plan
    trajectory = plan.execute("test")
    assert not execute._throws(trajectory)
    trajectory.draws.log_joint[1, place] -= 300
    assert execute._throws(trajectory) == seen
