"""Calibration of a conjugate normal model, by ranks among draws of known posteriors."""

import math
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from both_arviz import dataset_of, groups_of

from pyro_scale.calibration.ranks import describe_ranks
from pyro_scale.calibration.results import SBC, SBCComparison
from pyro_scale.errors import ArgumentError
from pyro_scale.metrics.uniformity import uniformity_p_values

#: Rows of a simulated data set, whose noise has an sd of 1; the prior has an sd of 2.
ROWS, PRIOR_SD = 9, 2.0
#: The posterior's variance, which is the same for all data.
VARIANCE = 1 / (ROWS + 1 / PRIOR_SD**2)


def conjugate_sbc(
    size=400, num_draws=50, *, sd_factor=1.0, shift=0.0, seed=0, failed=None, slow=(), elements=3
):
    """Draws from posteriors of normal means, off by a factor and a shift in posterior sds, and the
    log likelihood, ranks by numpy."""
    rng = np.random.default_rng(seed)
    mu = PRIOR_SD * rng.standard_normal((size, elements))
    mean_of_rows = mu + rng.standard_normal((size, elements)) / ROWS**0.5
    center = VARIANCE * ROWS * mean_of_rows + shift * VARIANCE**0.5
    noise = rng.standard_normal((num_draws, size, elements))
    draws = center + sd_factor * VARIANCE**0.5 * noise

    def log_likelihood(at):
        return -ROWS / 2 * (at - mean_of_rows)[..., 0] ** 2

    def split(values, of):
        return {"loc": values[..., 0], "beta": values[..., 1:], "loglik": of}

    def tensors(parts):
        return {name: torch.as_tensor(np.asarray(value)) for name, value in parts.items()}

    lik, true_lik = log_likelihood(draws), log_likelihood(mu)
    return SBC(
        ranks=tensors(split((draws < mu).sum(0), (lik < true_lik).sum(0))),
        num_draws=num_draws,
        true=tensors(split(mu, true_lik)),
        mean=tensors(split(draws.mean(0), lik.mean(0))),
        sd=tensors(split(draws.std(0, ddof=1), lik.std(0, ddof=1))),
        ess=torch.full((size,), 50.0),
        failed=failed or {},
        slow=slow,
        seeds=range(size),
        attrs={"method": "exact", "lr": [0.1, 0.2]},
        of_data=["loglik"],
    )


@pytest.fixture(scope="module")
def exact_sbc():
    return conjugate_sbc()


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


# ------------------------------------------------------------------ the table


def test_the_table_of_exact_draws_is_as_theory_has_it(exact_sbc):
    table, size = exact_sbc.summary(), exact_sbc.num_simulations
    assert list(table.index) == ["loc", "beta[0]", "beta[1]", "loglik"]
    of_means = table.loc[["loc", "beta[0]", "beta[1]"]]
    # a mean of 50 draws and their sd: a t-like spread
    sd = math.sqrt((1 + 1 / 50) * 49 / 47)
    assert (of_means.z_score.abs() < 3.5 * sd / size**0.5).all()
    assert (of_means.z_score_sd - sd).abs().max() < 3.5 * sd / (2 * size) ** 0.5
    # the sampled prior variance has a relative error of sqrt(2 / S)
    assert ((1 - of_means.contraction) / (VARIANCE / PRIOR_SD**2) - 1).abs().max() < 0.3
    assert np.isnan(table.contraction["loglik"])
    for level in (0.5, 0.8, 0.95):
        error = math.sqrt(level * (1 - level) / size)
        assert (table[f"coverage_{100 * level:.0f}"] - level).abs().max() < 3.5 * error


def test_the_table_by_its_definitions(exact_sbc):
    table, ranks = exact_sbc.summary(), exact_sbc.ranks["beta"][:, 1]
    u = np.arange(1, 51) / 51
    ecdf = np.array([(ranks.numpy() < i).mean() for i in range(1, 51)])
    row = table.loc["beta[1]"]
    assert row.ecdf_deviation == pytest.approx(np.abs(ecdf - u).max())
    assert row.p_value == pytest.approx(float(uniformity_p_values(ranks, 50)))
    z = (exact_sbc.mean["beta"] - exact_sbc.true["beta"])[:, 1] / exact_sbc.sd["beta"][:, 1]
    assert row.z_score == pytest.approx(float(z.mean()))
    assert row.z_score_sd == pytest.approx(float(z.std(correction=0)))
    p = sorted(table.p_value)
    assert table.p_holm.min() == pytest.approx(4 * p[0])


def test_signs_and_factors():
    """Draws that are too high have positive z-scores, narrow ones wide z-scores and low coverage.

    A normal's central interval of 95% with an sd of half the right one holds 67.3%."""
    table = conjugate_sbc(4000, 99, sd_factor=0.5, shift=0.25).summary(["loc"]).loc["loc"]
    factor = 1 + 3 / (4 * 98)  # of 1 / sd of 99 draws
    assert table.z_score == pytest.approx(0.5 * factor, abs=3.5 * 2 / 4000**0.5)
    assert table.z_score_sd == pytest.approx(2, abs=0.1)
    assert conjugate_sbc(4000, 99, sd_factor=0.5).summary().coverage_95["loc"] == pytest.approx(
        0.673, abs=0.026
    )
    assert 1 - table.contraction == pytest.approx(0.25 * VARIANCE / PRIOR_SD**2, rel=0.1)


def test_some_quantities(exact_sbc):
    table = exact_sbc.summary(["beta"])
    assert list(table.index) == ["beta[0]", "beta[1]"]
    assert table.equals(exact_sbc.summary().loc[table.index])  # adjusted for all
    table.loc["beta[0]", "p_value"] = 7.0
    assert exact_sbc.summary().p_value["beta[0]"] <= 1


def test_a_matrix_is_named_by_rows_and_columns():
    sbc = conjugate_sbc(20, 5)
    shaped = {"w": sbc.ranks["beta"].repeat(1, 3).reshape(20, 3, 2)}
    values = {"w": shaped["w"].double()}
    made = SBC(shaped, 5, values, values, values, sbc.ess, {}, [], range(20))
    assert list(made.summary().index)[:3] == ["w[0, 0]", "w[0, 1]", "w[1, 0]"]
    assert made.elements["w[2, 1]"].equal(shaped["w"][:, 2, 1])


def test_moments_of_broken_runs_are_left_out_but_not_their_ranks():
    sbc = conjugate_sbc()
    sbc.mean["loc"][7], sbc.sd["loc"][8], sbc.ranks["loc"][7] = torch.nan, 0.0, 0
    row = sbc.summary().loc["loc"]
    z = ((sbc.mean["loc"] - sbc.true["loc"]) / sbc.sd["loc"])[[*range(7), *range(9, 400)]]
    assert row.z_score == pytest.approx(float(z.mean()))
    assert row.z_score_sd == pytest.approx(float(z.std(correction=0)))
    assert math.isfinite(row.contraction)
    assert row.p_value == pytest.approx(float(uniformity_p_values(sbc.ranks["loc"], 50)))


# ------------------------------------------------------------------ the verdict


WRONG = {
    "narrow": ({"sd_factor": 0.6}, "pile up at both ends: draws are too narrow"),
    "wide": ({"sd_factor": 1.6}, "pile up in the middle: draws are too wide"),
    "high": ({"shift": 0.6}, "are too low: draws are too high"),
    "low": ({"shift": -0.6}, "are too high: draws are too low"),
}


def test_exact_draws_are_calibrated(exact_sbc):
    assert exact_sbc.verdict == "calibrated"
    text = str(exact_sbc).splitlines()
    assert text[0].startswith("CALIBRATED: 4 elements have uniform ranks in 400 simulations of 50")
    assert text[1:] == ["Each simulation is one chain."]
    assert "CALIBRATED" in repr(exact_sbc)
    assert "<table" in exact_sbc._repr_html_()


@pytest.mark.slow
def test_exact_draws_are_seldom_miscalibrated():
    """In at most 5% of repetitions, but for chance: 3.1 standard errors."""
    verdicts = [conjugate_sbc(100, 20, seed=seed).verdict for seed in range(1, 201)]
    assert verdicts.count("miscalibrated") <= 20


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_draws_are_miscalibrated_and_described(kind):
    how, words = WRONG[kind]
    sbc = conjugate_sbc(**how)
    assert sbc.verdict == "miscalibrated"
    text = str(sbc)
    assert "MISCALIBRATED: " in text.splitlines()[0]
    lines = {line.partition(":")[0]: line for line in text.splitlines()[1:]}
    assert words in lines["loc"]
    assert words in lines["beta[1]"]


def test_ranks_of_any_other_shape():
    ranks = torch.arange(400) % 2 * 3 + 3  # 3 and 6 of 0 to 9
    assert "middle" in describe_ranks(ranks, 9)
    assert "uneven" in describe_ranks(torch.tensor([1, 4, 5, 8] * 3), 9)
    assert "uneven" in describe_ranks(torch.tensor([0, 1] * 8), 1)  # two ranks have no spread
    assert "too low" in describe_ranks(torch.zeros(40).long(), 1)


class TestDoubt:
    def test_a_few_broken_simulations_leave_the_verdict(self):
        sbc = conjugate_sbc(failed={3: "NonFiniteError: chain 0"}, slow=[3, 11, 12])
        assert sbc.verdict == "calibrated"
        assert "Failed, 1 of 400 simulations: 3 (NonFiniteError: chain 0)" in str(sbc)
        slow = "Too few effective draws, 3 of 400 simulations: 3 (ESS 50), 11 (ESS 50), 12"
        assert slow in str(sbc)

    def test_many_make_it_unknown(self):
        sbc = conjugate_sbc(slow=range(4))  # 1%
        assert sbc.verdict == "calibrated"
        sbc = conjugate_sbc(slow=range(3), failed={3: "", 399: ""})
        assert sbc.verdict == "unknown"
        assert str(sbc).startswith(
            "NOT KNOWN: 5 of 400 simulations of 50 draws failed or were slow"
        )

    def test_what_they_cannot_change_is_known(self):
        assert conjugate_sbc(sd_factor=0.4, slow=range(20)).verdict == "miscalibrated"
        assert conjugate_sbc(sd_factor=0.4, slow=range(395)).verdict == "unknown"

    def test_ranks_of_broken_simulations_alone_are_no_proof(self):
        sbc = conjugate_sbc(failed=dict.fromkeys(range(40), "broke"))
        for ranks in sbc.ranks.values():
            ranks[:40] = 0
        assert float(sbc.summary().p_holm.max()) < 0.001
        assert sbc.verdict == "unknown"

    def test_long_lists_are_cut(self):
        text = str(conjugate_sbc(slow=range(15)))
        assert "9 (ESS 50) and 5 more" in text


# ------------------------------------------------------------------ plots


def drawn(figure):
    return [ax for ax in figure.axes if ax.get_visible()]


def test_the_plot_has_differences_and_bands(exact_sbc):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = exact_sbc.plot()
        figure.canvas.draw()
    panels = drawn(figure)
    assert [ax.get_title().partition(" ")[0] for ax in panels] == list(exact_sbc.summary().index)
    x, y = panels[1].get_lines()[-1].get_data()
    ranks = exact_sbc.ranks["beta"][:, 0].numpy()
    np.testing.assert_allclose(y[1:-1], [(ranks < i).mean() - i / 51 for i in range(1, 51)])
    assert (x[0], y[0]) == (0, 0)
    assert (x[-1], y[-1]) == pytest.approx((1, 0))
    assert figure.get_supylabel() == "ECDF - uniform"
    assert "95%" in figure.get_supxlabel()


def test_lines_change_color_where_the_p_value_is_small():
    sbc = conjugate_sbc(60, 20, sd_factor=0.8, elements=12)
    table = sbc.summary()
    colors = {}
    for ax in drawn(sbc.plot()):
        label = ax.get_title().partition("  ")[0]
        colors.setdefault(bool(table.p_value[label] <= 0.05), set()).add(
            ax.get_lines()[-1].get_color()
        )
    assert {len(each) for each in colors.values()} == {1}
    assert colors[True] != colors[False]


@pytest.mark.slow
def test_of_many_elements_the_least_likely_are_drawn():
    sbc = conjugate_sbc(50, 10, elements=40)
    figure = sbc.plot()
    panels = drawn(figure)
    shown = [ax.get_title().partition("  ")[0] for ax in panels]
    table = sbc.summary()
    assert len(panels) == 20
    assert set(shown) == set(table.p_value.sort_values(kind="stable").index[:20])
    assert "20 of 41 elements" in figure.get_supxlabel()
    assert len(drawn(sbc.plot(["loc"]))) == 1


@pytest.mark.parametrize("what", ["summary", "plot"])
def test_unknown_quantities_are_named(exact_sbc, what):
    with pytest.raises(ArgumentError, match=r"no quantity 'gamma': use \['loc', 'beta'"):
        getattr(exact_sbc, what)(["gamma"])
    with pytest.raises(ArgumentError, match=r"var_names='loc': pass a list"):
        getattr(exact_sbc, what)("loc")


# ------------------------------------------------------------------ ArviZ


def test_the_tree_has_pits_as_arviz_plots_takes_them(exact_sbc):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = exact_sbc.to_datatree()
    assert groups_of(tree) == {"prior_sbc"}
    group = dataset_of(tree["prior_sbc"])
    assert group["loc"].dims == ("chain", "draw")
    assert group["beta"].dims == ("chain", "draw", "beta_dim_0")
    assert dict(group.sizes) == {"chain": 1, "draw": 400, "beta_dim_0": 2}
    pit = group["beta"].values[0]
    assert pit.min() > 0
    assert pit.max() < 1
    np.testing.assert_allclose(pit * 51 - 0.5, exact_sbc.ranks["beta"].numpy(), atol=1e-12)
    assert group.attrs == {"method": "exact", "lr": "[0.1, 0.2]", "num_draws": 50}


# ------------------------------------------------------------------ several


class TestComparison:
    @pytest.fixture(scope="class")
    def compared(self):
        return SBCComparison({"lr .03": conjugate_sbc(), "lr .3": conjugate_sbc(sd_factor=0.6)})

    def test_is_a_mapping(self, compared):
        assert list(compared) == ["lr .03", "lr .3"]
        assert compared["lr .3"].verdict == "miscalibrated"
        assert "lr .1" not in compared

    def test_tables_are_below_each_other(self, compared):
        table = compared.summary(["beta"])
        assert table.index.names == ["setting", "element"]
        assert list(table.index) == [(s, e) for s in compared for e in ("beta[0]", "beta[1]")]
        assert table.loc["lr .3"].equals(compared["lr .3"].summary(["beta"]))

    def test_a_line_a_setting(self, compared):
        lines = str(compared).splitlines()
        assert lines[0].startswith("lr .03: CALIBRATED")
        assert lines[1].startswith("lr .3: MISCALIBRATED")

    @pytest.mark.slow
    def test_the_plot_has_a_row_a_setting(self, compared):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure = compared.plot()
            figure.canvas.draw()
        titles = [ax.get_title().partition("  ")[0] for ax in drawn(figure)]
        assert titles == [f"{s}\n{e}" for s in compared for e in compared[s].elements]

    def test_settings_may_have_other_elements(self):
        wide = conjugate_sbc(50, 10, elements=12)
        figure = SBCComparison({"few": conjugate_sbc(50, 10), "many": wide}).plot()
        assert "6 of 13 elements" in figure.get_supxlabel()
        assert len(drawn(figure)) >= 6
