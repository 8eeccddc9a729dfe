"""What methods are predicted to take: counts of the policy times rates of a fixed machine."""

import pyro.distributions as dist
import pytest
import torch
from models import normal, of_rows
from reference import normals

from pyro_scale.data.open import open_data
from pyro_scale.kernels import Hyperparameters
from pyro_scale.run.problem import as_log_posterior, prepare
from pyro_scale.tuning import costs as costs_module
from pyro_scale.tuning.costs import RATES, Costs

X = normals(400, 3, seed=0).float()
line = of_rows(lambda x, beta: dist.Normal(x @ beta, 1.0), beta=normal(3))


def costs_of(num_rows, model=line, num_samples=500, num_chains=4):
    data = X[:num_rows], X[:num_rows, 0]
    opened = open_data(data, None, None, None)
    log_posterior = as_log_posterior(model, opened.num_data)
    problem = prepare(log_posterior, opened, Hyperparameters(), None, 1, 0)
    return Costs(problem, num_samples, num_chains)


@pytest.mark.parametrize("method", ["nuts", "ghmc"])
def test_work_is_counted_per_row(method):
    one, two, four = (getattr(costs_of(n), method) for n in (100, 200, 400))
    assert four - two == pytest.approx(2 * (two - one), rel=1e-6)
    assert two > one


def test_a_gradient_is_its_elements():
    """300 more rows are so many more elements, at the rate of elements, and multiplications of a
    matrix and a vector, at that of products."""
    params = {"beta": torch.zeros(3)}
    totals = []
    for num_rows in (100, 400):
        density = costs_of(num_rows).problem.log_posterior
        counted = costs_module.arithmetic(density, params, (X[:num_rows], X[:num_rows, 0]))
        totals.append((counted.elements, counted.total - counted.elements))
    elements, products = (b - a for a, b in zip(*totals, strict=True))
    assert products > 0
    assert elements > 5 * 300
    expected = elements * RATES.element + products * RATES.product
    assert costs_of(400).gradient - costs_of(100).gradient == pytest.approx(expected, rel=1e-6)


def test_methods_take_so_many_gradients():
    """NUTS 10 for each draw, those of warm-up included, and 5% for the searches after it."""
    costs = costs_of(100, num_samples=500, num_chains=3)
    assert costs.nuts == pytest.approx(1.05 * 3 * 1500 * 10 * costs.gradient)
    assert costs.ghmc == pytest.approx(3 * 10_000 * costs.gradient)
