"""NUTS against long runs of Pyro's own NUTS, on models with constrained, hierarchical, enumerated
and time-series structure.

Pyro's moments are in `pyro_nuts_references.json`, written by `benchmarks/exact/pyro_reference.py`;
both sample the models of `benchmarks/exact/nuts_models.py`.  There are 178 comparisons of means and
mean squares: were seeds drawn anew, one would be beyond 4 errors by chance about once in 90 times.
Pyro's variances of `local_level` are some 1 % below those of quadrature, within its errors.
"""

import json
import math
import sys
from pathlib import Path

import arviz
import pytest
from places import ROOT

import pyro_scale as ps

sys.path.insert(0, str(ROOT / "benchmarks" / "exact"))
from nuts_models import POSTERIORS, elements, mean_and_error

pytest.importorskip("nutpie")
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("float64")]

REFERENCES = json.loads((Path(__file__).parent / "pyro_nuts_references.json").read_text())
MOST_R_HAT, MOST_ERRORS = 1.01, 4.0


def test_references_are_of_all_models_and_have_converged():
    assert set(REFERENCES) == set(POSTERIORS)
    for reference in REFERENCES.values():
        assert reference["how"]["chains"] >= 4
        for element in reference["elements"].values():
            assert element["r_hat"] < MOST_R_HAT
            assert element["ess"] > 1000


def errors_apart(column, expected):
    """By how many combined Monte Carlo errors draws `[chains, draws]` are off: their mean, and the
    mean of squares about Pyro's mean."""
    moments = {"mean": column, "square": (column - expected["mean"]) ** 2}
    apart = {}
    for moment, values in moments.items():
        mean, error = mean_and_error(values)
        error = math.hypot(error, expected[f"{moment}_mcse"])
        apart[moment] = (mean - expected[moment]) / error
    return apart


@pytest.mark.parametrize("name", POSTERIORS)
def test_means_and_mean_squares_are_those_of_pyro(name):
    posterior = POSTERIORS[name]()
    nuts = ps.NUTS(posterior.model)
    nuts.run(posterior.data or None, num_samples=4000, seed=1, progress=False)
    assert nuts.posterior.draws.attrs["program"] == "compiled log density"
    columns = elements(nuts.get_samples(group_by_chain=True))
    expected = REFERENCES[name]["elements"]
    assert set(columns) == set(expected)
    for element, column in columns.items():
        assert float(arviz.rhat(column)) < MOST_R_HAT, element
        apart = errors_apart(column, expected[element])
        assert max(map(abs, apart.values())) < MOST_ERRORS, (element, apart)


def test_a_shift_of_a_tenth_of_an_sd_is_noticed():
    """And a scale that is 7 % too large."""
    posterior = POSTERIORS["logistic"]()
    nuts = ps.NUTS(posterior.model).run(posterior.data, num_samples=4000, seed=1, progress=False)
    columns = elements(nuts.get_samples(group_by_chain=True))
    for element, column in columns.items():
        expected = REFERENCES["logistic"]["elements"][element]
        shifted = column + 0.1 * expected["sd"]
        assert errors_apart(shifted, expected)["mean"] > MOST_ERRORS
        wider = expected["mean"] + 1.07 * (column - expected["mean"])
        assert errors_apart(wider, expected)["square"] > MOST_ERRORS
