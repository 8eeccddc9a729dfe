"""The split-conformal threshold against sorting, and its coverage against the exact law.

Statistical tests have fixed seeds; were those drawn anew, a z beyond 4 would come once in 16,000
comparisons.
"""

import math
from fractions import Fraction

import pytest
import torch
from reference import normals

from pyro_scale import metrics
from pyro_scale.errors import ArgumentError


@pytest.mark.parametrize("alpha", ["0.01", "0.05", "0.1", "0.2", "0.3", "0.5", "0.9"])
def test_is_the_ceiling_of_a_fraction_th_smallest_score(alpha):
    for count in range(1, 130):
        scores = normals(count, seed=count)
        rank = math.ceil((count + 1) * (1 - Fraction(alpha)))
        expected = sorted(scores.tolist())[rank - 1] if rank <= count else math.inf
        assert metrics.conformal(scores, float(alpha)) == expected
        assert metrics.conformal(scores, 1 - (1 - float(alpha))) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keeps_the_type_and_takes_infinite_scores(dtype):
    scores = torch.tensor([-math.inf, 2.0, 1.0, math.inf], dtype=dtype)
    threshold = metrics.conformal(scores, 0.4)
    assert threshold.dtype == dtype
    assert threshold.shape == ()
    assert threshold == 2
    assert metrics.conformal(scores, 0.2) == math.inf


@pytest.mark.parametrize(("count", "alpha"), [(19, 0.1), (45, 0.2), (10, 0.1)])
def test_coverage_is_a_beta_variable(count, alpha):
    """That of a new score, given n of the calibration, which are uniform here: the threshold."""
    repetitions, rank = 4000, math.ceil(round((count + 1) * (1 - alpha), 9))
    scores = torch.rand(
        repetitions, count, dtype=torch.float64, generator=torch.Generator().manual_seed(count)
    )
    covered = torch.stack([metrics.conformal(each, alpha) for each in scores])
    mean, power = rank / (count + 1), repetitions**0.5
    assert abs(float(covered.mean() - mean) / float(covered.std()) * power) < 4
    squares = covered.square()
    second = mean * (rank + 1) / (count + 2)
    assert abs(float(squares.mean() - second) / float(squares.std()) * power) < 4


@pytest.mark.parametrize(
    ("scores", "alpha", "said"),
    [
        ([1.0], 0.1, "a list: pass a tensor"),
        (torch.arange(5), 0.1, "int64: pass float32"),
        (torch.zeros(0), 0.1, r"shape \[0\]: pass one score a row"),
        (torch.zeros(4, 2), 0.1, r"shape \[4, 2\]"),
        (torch.tensor([1.0, math.nan]), 0.1, "NaN"),
        (torch.ones(4), 0.0, r"alpha=0.0: pass a number in \(0, 1\)"),
        (torch.ones(4), 1, "alpha=1"),
        (torch.ones(4), math.nan, "alpha=nan"),
        (torch.ones(4), "0.1", "alpha='0.1'"),
    ],
)
def test_refuses(scores, alpha, said):
    with pytest.raises(ArgumentError, match=said):
        metrics.conformal(scores, alpha)
