"""How much a run may take."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import normals

from pyro_scale.data.open import open_data
from pyro_scale.kernels import SGLD
from pyro_scale.run import budget as budget_module
from pyro_scale.run.budget import Budget
from pyro_scale.run.problem import as_log_posterior, prepare

CHAINS, N = 3, 40


def problem(batch_size=None):
    def model(y):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()).double(), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    data = open_data(normals(N), batch_size)
    log_posterior = as_log_posterior(model, data.num_data)
    return prepare(log_posterior, data, SGLD(lr=1.0), None, CHAINS, 0)


@pytest.mark.parametrize("num_samples", [1, 1000, 200_000, 10**6])
def test_there_are_200_passes_for_each_draw(num_samples):
    """And 200,000 at least: of the whole data as many steps, of batches more."""
    passes = 200 * max(1000, num_samples)
    budget = Budget.from_arguments(None, num_samples, None)
    assert budget.steps(problem()) == passes
    assert budget.steps(problem(8)) == passes * N // 8
    assert budget.most_rows(problem(8)) == passes * N * CHAINS
    assert budget.after(1000, N).steps(problem()) == passes - 334


def test_rows_that_are_passed_are_all():
    budget = Budget.from_arguments(6000, 200_000, None)
    assert budget.steps(problem()) == 6000 // (N * CHAINS)
    assert budget.after(10**6, N).steps(problem()) == 0


def test_a_run_that_goes_on_to_more_draws_makes_the_same_choices():
    """What is chosen has a budget of its own, unless rows are counted."""
    some, more = (Budget.from_arguments(None, count, None).of_tuning for count in (10, 10**6))
    assert some == more
    assert more.steps(problem()) == 200_000
    counted = Budget.from_arguments(6000, 50, None)
    assert counted.of_tuning == counted


def test_stages_end_at_their_share_of_the_seconds(monkeypatch):
    """Compilation is no part of a stage."""
    now = [1000.0]
    monkeypatch.setattr(budget_module.time, "monotonic", lambda: now[0])
    budget = Budget.from_arguments(None, 100, 50)
    ends = [
        budget.until(stage).seconds_left for stage in ("searches", "windows", "pilots", "draws")
    ]
    assert ends == pytest.approx([10, 20, 27.5, 40])
    assert budget.until("windows", compile_seconds=20).seconds_left == pytest.approx(32)
    now[0] += 21
    assert budget.until("windows").is_over
    assert budget.until("windows").seconds_left == 0
    assert not budget.until("pilots").is_over
    assert not budget.is_over
    unlimited = Budget.from_arguments(None, 100, None)
    assert unlimited.until("windows", compile_seconds=20) is unlimited
