"""Metrics against closed forms, loops, scikit-learn and exchangeability; plots against both."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from matplotlib.figure import Figure

from pyro_scale import metrics
from pyro_scale.errors import ArgumentError
from pyro_scale.metrics.reliability import reliability

DTYPES = [torch.float32, torch.float64]


def random(*shape, seed=0, dtype=torch.float64):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def probabilities(*shape, seed=0, dtype=torch.float64):
    """Probabilities far from uniform."""
    return (6 * random(*shape, seed=seed)).softmax(-1).to(dtype)


def classified(rows=300, classes=4, dtype=torch.float64):
    """Labels of the probabilities, so that bins' gaps have either sign."""
    probs = probabilities(rows, classes)
    labels = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(1))[:, 0]
    return probs.to(dtype), labels


def rounding(dtype):
    return {"rtol": 0, "atol": 30 * torch.finfo(dtype).eps}


def rounds_to(value, expected, dtype=torch.float64):
    assert value.dtype == dtype
    torch.testing.assert_close(value, torch.as_tensor(expected, dtype=dtype), **rounding(dtype))


def entropy(p):
    return -sum(q * math.log(q) for q in p if q > 0)


# ------------------------------------------------------------------ uncertainty


class TestUncertainty:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_parts_are_entropies_in_nats(self, dtype):
        probs = probabilities(7, 2, 3, 5, dtype=dtype)
        probs[0, 0, 0] = torch.tensor([0, 0, 1.0, 0, 0])
        parts = metrics.uncertainty(probs)
        for i, j in itertools.product(range(2), range(3)):
            draws = probs[:, i, j].double().numpy()
            total, aleatoric = entropy(draws.mean(0)), np.mean([entropy(p) for p in draws])
            rounds_to(parts.total[i, j], total, dtype)
            rounds_to(parts.aleatoric[i, j], aleatoric, dtype)
            rounds_to(parts.epistemic[i, j], total - aleatoric, dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("draws", "expected"),
        [
            ([[1, 0], [0, 1]], (math.log(2), 0, math.log(2))),
            ([[0.5, 0.5], [0.5, 0.5]], (math.log(2), math.log(2), 0)),
            ([[0.25] * 4], (math.log(4), math.log(4), 0)),
            ([[0, 0, 1], [0, 0, 1]], (0, 0, 0)),
        ],
    )
    def test_limits(self, draws, expected, dtype):
        for part, value in zip(
            metrics.uncertainty(torch.tensor(draws, dtype=dtype)), expected, strict=True
        ):
            rounds_to(part, value, dtype)

    def test_one_draw_or_equal_draws_have_no_epistemic_part_and_never_a_negative_one(self):
        one = probabilities(1, 2000, 10, dtype=torch.float32)
        assert (metrics.uncertainty(one).epistemic == 0).all()
        equal = metrics.uncertainty(one.expand(7, 2000, 10)).epistemic
        assert (equal >= 0).all()
        assert equal.max() < 1e-6

    def test_order_of_draws_and_classes_does_not_matter_and_that_of_rows_is_kept(self):
        probs = probabilities(5, 6, 3)
        expected = metrics.uncertainty(probs)
        shuffled = metrics.uncertainty(probs.flip(0, 2)[:, [3, 1, 2, 0, 5, 4]])
        for part, value in zip(shuffled, expected, strict=True):
            rounds_to(part, value[[3, 1, 2, 0, 5, 4]])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_variance_is_that_of_the_mixture(self, dtype):
        means, variances = random(6, 4, 2, dtype=dtype), random(6, 4, 2, seed=1, dtype=dtype)
        parts = metrics.variance(means, variances)
        m, v = means.double().numpy(), variances.double().numpy()
        rounds_to(parts.total, (m**2 + v).mean(0) - m.mean(0) ** 2, dtype)
        rounds_to(parts.aleatoric, v.mean(0), dtype)
        rounds_to(parts.epistemic, m.var(0), dtype)
        assert torch.equal(parts.total, parts.aleatoric + parts.epistemic)


# ------------------------------------------------------------------ classification


def brier_by_loop(probs, labels):
    return np.mean(
        [
            sum((q - (k == y)) ** 2 for k, q in enumerate(p))
            for p, y in zip(probs, labels, strict=True)
        ]
    )


def ece_by_loop(probs, labels, bins):
    gap = 0.0
    for b in range(bins):
        own = [i for i, p in enumerate(probs) if b / bins < p.max() <= (b + 1) / bins]
        gap += abs(sum(float(probs[i].argmax() == labels[i]) - probs[i].max() for i in own))
    return gap / len(probs)


class TestClassification:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("integers", [torch.int64, torch.uint8])
    def test_scores_are_those_of_loops_and_of_scikit_learn(self, dtype, integers):
        probs, labels = classified(dtype=dtype)
        p, y = probs.double().numpy(), labels.numpy()
        given = (probs, labels.to(integers))
        rounds_to(metrics.accuracy(*given), sklearn.metrics.accuracy_score(y, p.argmax(1)), dtype)
        normalized = p / p.sum(1, keepdims=True)
        rounds_to(metrics.nll(*given), sklearn.metrics.log_loss(y, normalized), dtype)
        rounds_to(metrics.brier(*given), brier_by_loop(p, y), dtype)
        for bins in (1, 10):
            rounds_to(metrics.ece(*given, bins=bins), ece_by_loop(p, y, bins), dtype)
        rounds_to(metrics.ece(*given), ece_by_loop(p, y, 15), dtype)

    def test_order_of_rows_and_classes_does_not_matter(self):
        probs, labels = classified()
        for score in (metrics.accuracy, metrics.nll, metrics.brier, metrics.ece):
            rounds_to(score(probs.flip(0, 1), 3 - labels.flip(0)), score(probs, labels))

    @pytest.mark.parametrize(
        ("right", "expected"), [(True, (1, 0, 0, 0)), (False, (0, math.inf, 2, 1))]
    )
    def test_certain_predictions(self, right, expected):
        probs, labels = torch.eye(3).double(), torch.arange(3)
        labels = labels if right else labels.roll(1)
        for score, value in zip(
            (metrics.accuracy, metrics.nll, metrics.brier, metrics.ece), expected, strict=True
        ):
            assert score(probs, labels) == value

    def test_bins_are_closed_on_the_right_and_of_equal_classes_the_first_counts(self):
        probs = torch.tensor([[0.5, 0.5, 0], [0.5, 0.25, 0.25], [0, 0, 1], [0, 0.75, 0.25]])
        binned = reliability(probs, torch.tensor([0, 1, 2, 1]), bins=4)
        assert binned.rows.tolist() == [0, 2, 1, 1]
        assert binned.accuracy[1:].tolist() == [0.5, 1, 1]
        assert binned.confidence[1:].tolist() == [0.5, 0.75, 1]
        assert binned.accuracy[0].isnan()
        assert metrics.accuracy(probs[:1], torch.tensor([1])) == 0

    def test_a_calibrated_predictors_ece_is_its_bias(self):
        """A sum of half normals, whose mean and variance are known; 4.5 sds come once in 10^5."""
        rows = 20_000
        p = random(rows)
        probs, labels = torch.stack([1 - p, p], -1), (random(rows, seed=1) < p).long()
        binned = reliability(probs, labels, 15)
        variance = (binned.rows * binned.confidence * (1 - binned.confidence)).nan_to_num()
        mean = (variance * 2 / math.pi).sqrt().sum() / rows
        sd = (variance.sum() * (1 - 2 / math.pi)).sqrt() / rows
        assert abs(metrics.ece(probs, labels) - mean) < 4.5 * sd

    def test_a_million_rows_of_float32_add_up(self):
        probs = torch.tensor([0.999, 0.001]).expand(2_000_000, 2)
        labels = torch.zeros(2_000_000, dtype=torch.long)
        assert float(metrics.ece(probs, labels)) == pytest.approx(0.001, rel=1e-4)


# ------------------------------------------------------------------ ranking


class TestRanking:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("grid", [5, 10**6])  # many ties, and none
    def test_auroc_counts_pairs(self, dtype, grid):
        inside = (grid * random(60)).floor().to(dtype)
        outside = (grid * random(45, seed=1)).floor().to(dtype) + grid // 5
        pairs = [(a < b) + (a == b) / 2 for a in inside.tolist() for b in outside.tolist()]
        rounds_to(metrics.auroc(inside, outside), np.mean(pairs), dtype)
        rounds_to(metrics.auroc(outside, inside), 1 - np.mean(pairs), dtype)
        truth = np.repeat([0, 1], [60, 45])
        by_sklearn = sklearn.metrics.roc_auc_score(truth, torch.cat([inside, outside]))
        rounds_to(metrics.auroc(inside, outside), by_sklearn, dtype)

    def test_auroc_depends_on_the_order_of_scores_alone(self):
        inside, outside = torch.tensor([18.0, 19.0, -math.inf]), torch.tensor([20.0, 21.0])
        assert metrics.auroc(inside, outside) == 1
        assert metrics.auroc(inside, outside.double()).dtype == torch.float64
        rounds_to(
            metrics.auroc(random(9).exp(), random(8).exp()), metrics.auroc(random(9), random(8))
        )

    def test_selective_accuracy_is_a_mean_over_the_order_of_ties(self):
        scores = [0.2, 0.1, 0.2, 0.5, 0.2, 0.4, 0.1]
        correct = [True, True, False, False, False, True, False]
        orders = [
            order
            for order in itertools.permutations(range(7))
            if all(scores[a] <= scores[b] for a, b in itertools.pairwise(order))
        ]
        expected = [
            np.mean([np.mean([correct[i] for i in o[:k]]) for o in orders]) for k in range(1, 8)
        ]
        given = torch.tensor(scores).double(), torch.tensor(correct)
        rounds_to(metrics.selective_accuracy(*given, torch.arange(1, 8) / 7), expected)

    @pytest.mark.parametrize(
        ("coverage", "rows"), [(1e-9, 1), (0.14, 1), (0.16, 2), (0.7, 7), (1, 10), (0.949, 9)]
    )
    def test_selective_accuracy_of_the_nearest_whole_number_of_rows(self, coverage, rows):
        correct = torch.tensor([True, False, True, True, False, False, True, True, True, False])
        value = metrics.selective_accuracy(torch.arange(10).double(), correct, coverage)
        rounds_to(value, correct[:rows].double().mean())

    def test_shape_and_dtype_of_selective_accuracy(self):
        value = metrics.selective_accuracy(
            random(9, dtype=torch.float32), random(9, seed=1) < 0.5, torch.full((2, 3), 0.5)
        )
        assert (value.shape, value.dtype) == ((2, 3), torch.float32)


# ------------------------------------------------------------------ calibration


def in_turn(values):
    """Each value is once the observation, and the others its draws: `[n - 1, n]`, `[n]`."""
    n = len(values)
    others = [torch.cat([values[:i], values[i + 1 :]]) for i in range(n)]
    return torch.stack(others, 1), values


class TestCalibration:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("num_draws", [1, 2, 37])
    def test_pit_of_exchangeable_draws_is_uniform(self, num_draws, dtype):
        draws, y = in_turn(random(num_draws + 1, dtype=dtype))
        values = metrics.pit(draws, y)
        rounds_to(
            values.sort().values,
            (torch.arange(num_draws + 1).double() + 0.5) / (num_draws + 1),
            dtype,
        )
        assert values.argsort().equal(y.argsort())

    def test_ties_count_half_and_at_random_they_leave_it_uniform(self):
        """The chi-squared test of 20 cells would fail once in 10^5."""
        counts = (4 * random(20, 20_000).square()).floor()
        draws, y = counts[1:], counts[0]
        below, equal = (draws < y).sum(0), (draws == y).sum(0)
        rounds_to(metrics.pit(draws, y), (below + equal.double() / 2 + 0.5) / 20)
        assert float(metrics.pit(*in_turn(counts[:, 0])).mean()) == pytest.approx(0.5, abs=1e-12)

        values = metrics.pit(draws, y, torch.Generator().manual_seed(1))
        ranks = (values * 20 - 0.5).round().long()
        rounds_to(values, (ranks.double() + 0.5) / 20)
        assert ((below <= ranks) & (ranks <= below + equal)).all()
        frequencies = ranks.bincount(minlength=20).numpy()
        assert len(frequencies) == 20
        assert scipy.stats.chisquare(frequencies).pvalue > 1e-5

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_coverage_of_exchangeable_draws_is_its_level(self, dtype):
        draws, y = in_turn(random(100, dtype=dtype))
        levels = torch.tensor([[0.02, 0.5], [0.9, 0.98]], dtype=dtype)
        rounds_to(metrics.coverage(draws, y, levels), levels, dtype)
        rounds_to(metrics.coverage(*in_turn(random(20, dtype=dtype))), 0.9, dtype)

    @pytest.mark.parametrize("level", [0.13, 0.5, 0.877])
    def test_coverage_is_that_of_the_quantiles(self, level):
        draws, y = random(23, 50, 4), random(50, 4, seed=1)
        ends = [(1 - level) / 2, (1 + level) / 2]
        low, high = np.quantile(draws.numpy(), ends, axis=0, method="weibull")
        expected = np.mean((low <= y.numpy()) & (y.numpy() <= high))
        rounds_to(metrics.coverage(draws, y, level), expected)

    def test_ends_of_the_interval_count_as_inside(self):
        draws = torch.arange(1.0, 20.0)[:, None].expand(19, 4)
        y = torch.tensor([1, 19, 0, 20])
        for level in (0.9, torch.tensor(0.9), torch.tensor(0.9).double()):
            assert metrics.coverage(draws, y, level) == 0.5


# ------------------------------------------------------------------ regression


class TestRegression:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_log_predictive_density_is_that_of_the_mean_likelihood(self, dtype):
        log_lik = (10 * random(8, 5) - 8).to(dtype)
        expected = log_lik.double().exp().mean(0).log()
        rounds_to(metrics.log_predictive_density(log_lik), expected, dtype)
        far = metrics.log_predictive_density(log_lik.double() - 1000)  # exp would be 0
        torch.testing.assert_close(far, expected - 1000, rtol=1e-15, atol=1e-12)
        nothing = torch.full((3, 1), -math.inf, dtype=dtype)
        assert metrics.log_predictive_density(nothing) == -math.inf

    def test_rmse(self):
        mean, y = random(6, 2), random(6, 2, seed=1)
        rounds_to(metrics.rmse(mean, y), math.sqrt(np.mean((mean - y).numpy() ** 2)))


# ------------------------------------------------------------------ all


def test_new_tensors_are_made_where_the_inputs_are():
    """With another default device, what forgets the inputs' does not fit them."""
    probs, labels = classified(40)
    correct, scores = probs.argmax(-1) == labels, probs[:, 0].clone()
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        values = [
            metrics.uncertainty(probs[None]).total,
            metrics.nll(probs, labels),
            metrics.brier(probs, labels),
            metrics.ece(probs, labels),
            metrics.auroc(scores, scores),
            metrics.selective_accuracy(scores, correct, 0.5),
            metrics.pit(probs.T, scores, generator),
            metrics.coverage(probs, probs[0], 0.5),
        ]
    assert {value.device.type for value in values} == {"cpu"}


P, Y = probabilities(5, 3), torch.tensor([0, 1, 2, 1, 0])
V = random(5)
DRAWS = random(7, 5)
nan = torch.tensor([math.nan] * 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.uncertainty(P[0]), r"\[3\].*\[draws, \.\.\., classes\].*softmax.*stack"),
        (lambda: metrics.uncertainty(P[:0]), r"\[0, 3\].*at least one draw"),
        (lambda: metrics.uncertainty(P.log()), r"sum to 1 .*\.softmax\(-1\) of logits"),
        (lambda: metrics.uncertainty(DRAWS), r"torch.stack\(\[1 - p, p\], -1\) of Bernoulli"),
        (lambda: metrics.uncertainty(1.001 * P), r"sums lie in \[1.001, 1.001\]"),
        (lambda: metrics.uncertainty(torch.tensor([[1.5, -0.5]])), "probs must be >= 0"),
        (lambda: metrics.uncertainty(P * math.nan), "sums lie in"),
        (lambda: metrics.uncertainty(P.half()), r"probs is torch.float16: .*probs.float\(\)"),
        (lambda: metrics.uncertainty(P.numpy()), r"probs is a ndarray: .*torch.as_tensor\(probs\)"),
        (lambda: metrics.variance(DRAWS, V), r"means .*\[7, 5\].*variances \[5\].*expand_as"),
        (lambda: metrics.variance(V[0], V[0]), "at least one draw"),
        (lambda: metrics.variance(V[:0], V[:0]), "at least one draw"),
        (lambda: metrics.variance(V, -V), "variances has negative .*not their logs"),
        (lambda: metrics.accuracy(P[None], Y), r"probs has shape \[1, 5, 3\].*probs.mean\(0\)"),
        (lambda: metrics.nll(V, Y), r"probs has shape \[5\]: pass \[rows, classes\].*stack"),
        (lambda: metrics.nll(P[:0], Y[:0]), "at least one row"),
        (lambda: metrics.brier(P.log(), Y), "softmax"),
        (lambda: metrics.brier(P, Y.double()), r"labels is torch.float64: .*labels.long\(\)"),
        (lambda: metrics.brier(P, Y > 0), r"labels is torch.bool"),
        (lambda: metrics.brier(P, [0]), "labels is list: pass a tensor"),
        (lambda: metrics.ece(P, Y[:4]), r"labels has shape \[4\]: .*\[5\]"),
        (lambda: metrics.ece(P, Y - 1), r"labels lie in \[-1, 1\].*0 to 2"),
        (lambda: metrics.ece(P, Y + 1), r"labels lie in \[1, 3\].*0 to 2: count classes from 0"),
        (lambda: metrics.ece(P, Y, bins=0), "bins=0: pass an int >= 1"),
        (lambda: metrics.ece(P, Y, bins=1.5), "bins=1.5: pass an int"),
        (lambda: metrics.auroc(P, V), r"inside has shape \[5, 3\]: pass one score a row"),
        (lambda: metrics.auroc(V, V[:0]), r"outside has shape \[0\].*at least one"),
        (lambda: metrics.auroc(V, nan), "outside has NaN.*leave those rows out"),
        (lambda: metrics.auroc(V, Y), "outside is torch.int64"),
        (lambda: metrics.selective_accuracy(nan, V > 0, 1), "uncertainty has NaN"),
        (lambda: metrics.selective_accuracy(V, V, 1), r"correct is not boolean.*argmax"),
        (lambda: metrics.selective_accuracy(V, V[:4] > 0, 1), r"correct has shape \[4\].*\[5\]"),
        (lambda: metrics.selective_accuracy(V, V > 0, 0), r"coverage=0: .*\(0, 1\]"),
        (lambda: metrics.selective_accuracy(V, V > 0, 1.1), r"coverage=1.1"),
        (lambda: metrics.pit(DRAWS.T, V), r"draws has shape \[5, 7\] and y \[5\]: pass draws"),
        (lambda: metrics.pit(DRAWS, V[:, None]), r"y \[5, 1\]"),
        (lambda: metrics.pit(DRAWS, 1.0), "y float"),
        (lambda: metrics.pit(DRAWS.long(), V), "draws is torch.int64"),
        (lambda: metrics.pit(DRAWS, nan), "y has NaN or infinite values: leave"),
        (lambda: metrics.pit(DRAWS[:0], V), r"draws is empty, \[0, 5\]"),
        (lambda: metrics.coverage(DRAWS / 0, V), "draws has NaN or infinite"),
        (
            lambda: metrics.coverage(DRAWS, V),
            "level=0.9: 7 draws resolve levels up to 0.75: .*more",
        ),
        (lambda: metrics.coverage(DRAWS, V, 90), r"level=90: .*\(0, 1\)"),
        (lambda: metrics.coverage(DRAWS, V, 1.0), r"level=1.0: .*\(0, 1\)"),
        (lambda: metrics.log_predictive_density(DRAWS[:0]), r"log_lik .*\[0, 5\].*one draw"),
        (lambda: metrics.log_predictive_density(V[0]), r"log_lik has shape \[\]"),
        (lambda: metrics.rmse(V[:, None], V), r"mean has shape \[5, 1\] and y \[5\].*mean\(0\)"),
        (lambda: metrics.rmse(V[:0], V[:0]), "at least one row"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


# ------------------------------------------------------------------ plots


@pytest.fixture
def ax():
    return Figure().subplots()


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


class TestPlots:
    def test_reliability_shows_the_bins_with_wilsons_bars(self, ax):
        probs, labels = classified()
        assert metrics.plot_reliability(probs, labels, bins=10, ax=ax) is ax
        binned = reliability(probs, labels, 10)
        confidence, accuracy, rows = (part[binned.rows > 0].numpy() for part in binned)
        diagonal, line = ax.get_lines()
        np.testing.assert_array_equal(diagonal.get_xydata(), [[0, 0], [1, 1]])
        np.testing.assert_allclose(line.get_xydata(), np.stack([confidence, accuracy], 1))
        assert legend(ax) == ["calibrated", f"ECE {metrics.ece(probs, labels, 10):.3f}"]

        bars, points = ax.collections
        for segment, x, y, n in zip(bars.get_segments(), confidence, accuracy, rows, strict=True):
            assert (segment[:, 0] == x).all()
            for p, sign in zip(segment[:, 1], (-1, 1), strict=True):
                assert p - y == pytest.approx(sign * math.sqrt(p * (1 - p) / n), abs=1e-12)
        areas = points.get_sizes()
        np.testing.assert_allclose(areas - areas.min(), 250 * (rows - rows.min()) / 300)

    def test_risk_is_one_less_selective_accuracy(self, ax):
        scores, correct = random(150), random(150, seed=1) < 0.7
        assert metrics.plot_risk_coverage(scores, correct, ax=ax) is ax
        coverage, risk = ax.get_lines()[0].get_xydata().T
        np.testing.assert_allclose(coverage, np.arange(2, 151) / 150, rtol=1e-6)
        expected = metrics.selective_accuracy(scores, correct, torch.tensor(coverage))
        np.testing.assert_allclose(risk, 1 - expected)
        assert ax.get_legend() is None

    def test_methods_share_axes(self, ax):
        probs, labels = classified()
        for name, p in {"A": probs, "B": probs.flip(1)}.items():
            metrics.plot_reliability(p, labels, ax=ax, label=name)
        assert len(ax.get_lines()) == 3
        assert [text.split(",")[0] for text in legend(ax)] == ["calibrated", "A", "B"]

        ax = Figure().subplots()
        for name, wrong in {"low": 0.1, "high": 0.9}.items():
            metrics.plot_risk_coverage(random(500), random(500, seed=1) > wrong, ax, name)
        assert legend(ax) == ["low", "high"]
        assert ax.get_ylim()[0] == 0
        assert ax.get_ylim()[1] > max(line.get_ydata().max() for line in ax.get_lines())

    def test_without_axes_a_figure_is_made_and_not_shown(self, monkeypatch):
        import matplotlib.pyplot as plt

        monkeypatch.setattr(plt, "show", lambda *_: pytest.fail("shown"))
        before = plt.get_fignums()
        gradient = classified()[0].requires_grad_()
        made = metrics.plot_reliability(gradient, classified()[1])
        other = metrics.plot_risk_coverage(gradient[:, 0], gradient[:, 0] < 0.5, label="own")
        assert made.figure is not other.figure
        for number in set(plt.get_fignums()) - set(before):
            plt.close(number)
