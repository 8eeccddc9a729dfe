"""Tests of ranks against enumeration, simulation, closed forms and hand-worked numbers."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics.uniformity import (
    ecdf_band,
    ecdf_counts,
    holm,
    rank_coverage,
    uniformity_p_values,
)

#: Every set of S ranks among L draws is enumerated.
TINY = [(1, 1), (1, 2), (3, 2), (4, 3), (6, 2), (3, 5)]
#: Null sets; the standard error of a rate of 5% is 0.22%.
SETS = 10_000


def every_set(size, num_draws):
    """`[S, (L + 1)^S]`."""
    return torch.tensor(list(itertools.product(range(num_draws + 1), repeat=size))).T


def null_ranks(size, num_draws, sets=SETS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_draws + 1, (size, sets), generator=generator)


def statistics_of(ranks, num_draws):
    """Of each set, by scipy and from the definition."""
    r = np.arange(len(ranks) + 1)
    least = torch.full(ranks.shape[1:], torch.inf, dtype=torch.float64)
    for i in range(1, num_draws + 1):
        law = scipy.stats.binom(len(ranks), i / (num_draws + 1))
        levels = torch.as_tensor(2 * np.minimum(law.cdf(r), law.sf(r - 1)))
        least = least.minimum(levels[(ranks < i).sum(0)])
    return least


def leaves(ranks, num_draws, level=0.95):
    """Whether each set's ECDF leaves the band."""
    size = len(ranks)
    lower, upper = (each[:, None] * size for each in ecdf_band(size, num_draws, level))
    counts = ecdf_counts(ranks, num_draws)
    return ((counts < lower - 0.5) | (counts > upper + 0.5)).any(0)


# ------------------------------------------------------------------ p-values


@pytest.mark.parametrize(("size", "num_draws"), TINY)
def test_p_values_are_those_of_all_sets(size, num_draws):
    ranks = every_set(size, num_draws)
    statistics = statistics_of(ranks, num_draws)
    # one of another set that differs by rounding alone is the same
    expected = (statistics <= statistics[:, None] * (1 + 1e-9)).double().mean(1)
    torch.testing.assert_close(uniformity_p_values(ranks, num_draws), expected)


@pytest.mark.parametrize(("size", "num_draws"), [(20, 100), (50, 20), (200, 100), (1000, 100)])
def test_alarms_are_as_many_as_asked_for(size, num_draws):
    p_values = uniformity_p_values(null_ranks(size, num_draws), num_draws)
    assert 0.04 < float((p_values <= 0.05).double().mean()) < 0.06
    for level in (0.01, 0.05, 0.2, 0.5):  # never more than the level, but for chance
        error = math.sqrt(level * (1 - level) / SETS)
        assert float((p_values <= level).double().mean()) < level + 3.5 * error


def test_one_draw_is_the_binomial_test():
    """Ranks are 0 or 1: as many heads as a fair coin has."""
    for heads in range(21):
        ranks = torch.tensor([1] * heads + [0] * (20 - heads))
        expected = scipy.stats.binomtest(heads, 20).pvalue
        assert float(uniformity_p_values(ranks, 1)) == pytest.approx(expected)


def test_both_ends_are_alike():
    """Ranks counted from above have the same p-value: no off-by-one at either end."""
    for num_draws in (1, 4, 100):
        ranks = null_ranks(60, num_draws, sets=200)
        turned = uniformity_p_values(num_draws - ranks, num_draws)
        torch.testing.assert_close(uniformity_p_values(ranks, num_draws), turned, rtol=1e-9, atol=0)
    ends = torch.tensor([[0] * 4 + [5] * 26, [10] * 4 + [5] * 26]).T
    assert len(set(uniformity_p_values(ends, 10).tolist())) == 1


def test_small_deviations_of_many_ranks_are_found():
    """Draws whose sd is 10% too small, of a normal: the chance to find them is nearly 1."""
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(3000, 50, generator=generator, dtype=torch.float64)
    narrow = torch.special.ndtr(torch.special.ndtri(u) / 0.9)
    assert bool((uniformity_p_values((narrow * 101).long(), 100) < 0.05).double().mean() > 0.95)
    assert bool((uniformity_p_values((u * 101).long(), 100) < 0.05).double().mean() < 0.2)


def test_a_rank_too_many_at_an_end_is_found():
    """Ranks of 0 to 10 that are divided by 12 places, as if there were eleven draws."""
    ranks = null_ranks(2000, 10, sets=20)
    assert bool((uniformity_p_values(ranks, 11) < 1e-4).all())


def test_far_p_values_are_small_and_ordered():
    """Below 1e-9 they go on with Bonferroni's bound, which is above the exact one."""
    ranks = torch.full((200, 60), 5)
    for column in range(60):
        ranks[: 3 * column, column] = 0
        ranks[3 * column :, column] = null_ranks(200 - 3 * column, 10, 1)[:, 0]
    p_values = uniformity_p_values(ranks, 10)
    assert float(p_values.min()) < 1e-50
    assert bool((p_values > 0).all())
    assert bool((p_values[8:].diff() < 0).all())


def test_a_far_p_value_of_one_place_is_exact():
    ranks = torch.zeros(60, dtype=torch.int64)
    assert float(uniformity_p_values(ranks, 1)) == pytest.approx(2.0**-59, rel=1e-9, abs=0)


def test_elements_keep_their_places():
    ranks = null_ranks(40, 20, sets=12).reshape(40, 3, 4)
    p_values = uniformity_p_values(ranks, 20)
    assert p_values.shape == (3, 4)
    for i, j in itertools.product(range(3), range(4)):
        alone = uniformity_p_values(ranks[:, i, j], 20)
        torch.testing.assert_close(p_values[i, j], alone)


class TestDoubtful:
    def test_the_most_favorable_ranks_count(self):
        """All ranks that the doubtful ones might have: the bound is at least the largest p."""
        sure = torch.tensor([0, 0, 0, 2, 3])
        is_doubtful = torch.tensor([False] * 5 + [True] * 2)
        bounds = []
        for doubtful in itertools.product(range(5), repeat=2):
            ranks = torch.cat([sure, torch.tensor(doubtful)])
            bounds.append(float(uniformity_p_values(ranks, 4, is_doubtful)))
            assert float(uniformity_p_values(ranks, 4)) <= bounds[-1]
        assert len(set(bounds)) == 1  # what the ranks are is not looked at

    def test_few_doubtful_ranks_leave_a_clear_case_clear(self):
        ranks = torch.zeros(100, dtype=torch.int64)
        is_doubtful = torch.arange(100) < 10
        p_values = [uniformity_p_values(each, 9, is_doubtful) for each in (ranks, 9 - ranks)]
        assert float(p_values[0]) < 1e-30
        torch.testing.assert_close(*p_values)
        assert float(uniformity_p_values(ranks, 9, torch.ones(100, dtype=torch.bool))) == 1

    def test_none_changes_nothing(self):
        ranks, none = null_ranks(50, 9, sets=5), torch.zeros(50, dtype=torch.bool)
        assert uniformity_p_values(ranks, 9, none).equal(uniformity_p_values(ranks, 9))


# ------------------------------------------------------------------ bands


@pytest.mark.parametrize(
    ("size", "num_draws", "level"),
    [(1, 2, 0.95), (6, 3, 0.8), (20, 100, 0.95), (300, 50, 0.95), (300, 50, 0.5)],
)
def test_the_band_is_left_where_the_p_value_is_small(size, num_draws, level):
    ranks = null_ranks(size, num_draws, sets=2000)
    p_values = uniformity_p_values(ranks, num_draws)
    assert leaves(ranks, num_draws, level).equal(p_values <= 1 - level + 1e-9)


def test_the_band_of_one_place_is_a_binomial_interval():
    lower, upper = ecdf_band(1000, 1, 0.95)
    inside = scipy.stats.binom(1000, 0.5).cdf
    assert inside(1000 * float(upper)) - inside(1000 * float(lower) - 1) >= 0.95
    assert inside(1000 * float(upper) - 1) - inside(1000 * float(lower)) < 0.95


def test_the_band_is_symmetric_and_widest_in_the_middle():
    lower, upper = ecdf_band(500, 40)
    z = torch.arange(1, 41).double() / 41
    torch.testing.assert_close(lower, 1 - upper.flip(0))
    assert bool((lower < z).all())
    assert bool((upper > z).all())
    width = (upper - lower).tolist()
    assert width[0] < width[5] < width[19] == pytest.approx(max(width), abs=1.5 / 500)


def test_every_path_stays_inside_where_all_are_likely():
    lower, upper = ecdf_band(2, 2, 0.95)
    assert lower.tolist() == [0, 0]
    assert upper.tolist() == [1, 1]


# ------------------------------------------------------------------ Holm, coverage


def test_holm_by_hand():
    p = torch.tensor([0.01, 0.04, 0.03, 0.005], dtype=torch.float64)
    expected = torch.tensor([0.03, 0.06, 0.06, 0.02], dtype=torch.float64)
    torch.testing.assert_close(holm(p), expected)
    assert holm(torch.tensor([0.9, 0.8])).tolist() == [1, 1]
    assert holm(torch.tensor([0.3])).tolist() == pytest.approx([0.3])


@pytest.mark.parametrize("num_draws", [1, 3, 10, 99])
@pytest.mark.parametrize("level", [0.1, 0.5, 0.8, 0.95])
def test_coverage_of_all_ranks_is_the_level(num_draws, level):
    ranks = torch.arange(num_draws + 1)
    assert float(rank_coverage(ranks, num_draws, level)) == pytest.approx(level, abs=1e-12)


def test_coverage_by_ranks():
    """Of 19 draws the interval of 80% holds the ranks 2 to 17, of 20."""
    ranks = torch.tensor([[1, 2], [18, 17], [0, 9], [19, 10]])
    torch.testing.assert_close(rank_coverage(ranks, 19, 0.8), torch.tensor([0.0, 1.0]).double())
    assert float(rank_coverage(torch.tensor([0]), 4, 0.8)) == pytest.approx(0.5)
    assert float(rank_coverage(torch.tensor([4]), 4, 0.8)) == pytest.approx(0.5)


def test_counts():
    ranks = torch.tensor([[0, 3], [0, 3], [1, 0], [3, 3]])
    assert ecdf_counts(ranks, 3).tolist() == [[2, 1], [3, 1], [3, 1]]


WRONG = {
    "fractions": (
        lambda: uniformity_p_values(torch.rand(5), 9),
        r"torch.float32: pass .* integers",
    ),
    "too high": (lambda: ecdf_counts(torch.tensor([10]), 9), r"ranks lie in \[10, 10\].*0 to 9"),
    "negative": (lambda: rank_coverage(torch.tensor([-1]), 9, 0.5), r"\[-1, -1\]"),
    "none": (lambda: uniformity_p_values(torch.zeros(0, 2).long(), 9), r"shape \[0, 2\]"),
    "percents": (lambda: ecdf_band(10, 9, 95), "level=95: pass a probability"),
    "no draws": (lambda: ecdf_band(10, 0), "num_draws=0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    call, message = WRONG[name]
    with pytest.raises(ArgumentError, match=message):
        call()
