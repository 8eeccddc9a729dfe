"""Rows that ranks share out: sums over them and what is read of them are those of one process."""

import pytest
import torch
from test_workers import needs_gloo, results

pytestmark = [needs_gloo, pytest.mark.slow]

PROGRAM = "rows_on_ranks"
EXACT = [
    "dense, ggn",
    "dense, hessian",
    "dense, empirical_fisher",
    "diag, ggn",
    "diag, hessian",
    "diag, empirical_fisher",
    "many chunks",
    "some of the rows weighed",
    "starts",
    "where it is given",
    "loader",
    "stream",
    "own subsamples",
    "points",
    "one density",
    "fewer rows than ranks",
    "kron",
    "kron, many chunks",
    "kron, one row",
    "kron, corrected",
    "low rank",
    "update",
]
#: Where a search ends, and what hangs on it, is known to the precision of its last step.
LOOSER = {"points": 1e-8, "one density": 1e-8}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (found,) = results("cases", tmp_path_factory.mktemp("rows") / "1", 1, program=PROGRAM)
    return found["cases"]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """All that two processes find, the cases first, since to start them takes seconds each time."""
    return results("cases+mistakes", tmp_path_factory.mktemp("rows") / "2", 2, program=PROGRAM)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def shared(request, tmp_path_factory):
    if request.param == 2:
        found = request.getfixturevalue("on_two")
    else:
        folder = tmp_path_factory.mktemp("rows") / "n"
        found = results("cases", folder, request.param, program=PROGRAM)
    return [rank["cases"] for rank in found]


@pytest.mark.parametrize("case", EXACT)
def test_a_laplace_approximation_is_that_of_one_process(case, alone, shared):
    """The prior and every row count once, whoever has them; 403 rows do not divide evenly."""
    expected = alone["laplace"]["exact"][case]
    for found in shared:
        rank = found["laplace"]["exact"][case]
        for name in ("center", "precision", "evidence"):
            if name in expected:
                close = {"rtol": LOOSER.get(case, 1e-12), "atol": LOOSER.get(case, 1e-12)}
                torch.testing.assert_close(rank[name], expected[name], **close)
        if "pareto_k" in expected:
            close = {"rtol": 0, "atol": 1e-4, "equal_nan": True}
            torch.testing.assert_close(rank["pareto_k"], expected["pareto_k"], **close)
        for name, value in rank.items():
            first = shared[0]["laplace"]["exact"][case][name]
            torch.testing.assert_close(value, first, rtol=0, atol=0, equal_nan=True)


def test_a_drawn_curvature_is_drawn_anew_on_every_rank(alone, shared):
    """It estimates the GGN from one draw a row: to some percent, and ranks' draws are no copies of
    each other."""
    ggn = alone["laplace"]["exact"]["dense, ggn"]["precision"]
    for found in shared:
        drawn = found["laplace"]["drawn"]["monte_carlo"]["precision"]
        assert torch.equal(drawn, shared[0]["laplace"]["drawn"]["monte_carlo"]["precision"])
        torch.testing.assert_close(drawn, ggn, rtol=0, atol=0.3 * float(ggn.max()))


@pytest.mark.parametrize("method", ["sampler", "fit"])
@pytest.mark.parametrize(
    "what",
    [
        "log_likelihood",
        "of other data",
        "arviz",
        "loo",
        "elpd",
        "loo of some",
        "mean",
        "variance",
        "one row",
    ],
)
def test_what_is_read_is_what_one_process_reads(method, what, alone, shared):
    expected = alone["readings"][method][what]
    for found in shared:
        torch.testing.assert_close(found["readings"][method][what], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ["own subsamples", "one density", "stream"])
def test_data_of_any_kind_are_read(case, alone, shared):
    for found in shared:
        for name, expected in alone["readings"][case].items():
            torch.testing.assert_close(
                found["readings"][case][name], expected, rtol=1e-9, atol=1e-9
            )
    expected = alone["readings"]["fit"]["linear"]
    for found in shared:
        torch.testing.assert_close(found["readings"]["fit"]["linear"], expected)


@pytest.mark.parametrize("method", ["sampler", "fit"])
def test_predictive_draws_are_valid_and_alike_on_every_rank(method, alone, shared):
    """Draws of rows, 200 of each, have the means that they should; no two rows have the same."""
    means = shared[0]["readings"][method]["mean"]
    for found in shared:
        draws = found["readings"][method]["draws"]
        assert torch.equal(draws, shared[0]["readings"][method]["draws"])
        assert draws.shape == alone["readings"][method]["draws"].shape
        scores = (draws.double().mean(0) - means) / (means * (1 - means) / len(draws)).sqrt()
        assert float(scores.square().mean()) == pytest.approx(1.0, abs=0.25)
        assert len(torch.unique(draws, dim=1)[0]) > 0.95 * len(means)


@pytest.mark.parametrize("method", ["sampler", "fit"])
def test_conformal_sets_are_alike_on_every_rank(method, alone, shared):
    for found in shared:
        sets = found["readings"][method]["sets"]
        assert torch.equal(sets, shared[0]["readings"][method]["sets"])
        agreement = sets == alone["readings"][method]["sets"]  # but for their random parts
        assert agreement.double().mean() > 0.6


def test_what_all_rows_share_is_drawn_once(alone, shared):
    """Rows' draws have one shift in common, so they are not split up."""
    for found in [alone, *shared]:
        assert float(found["readings"]["spread of a shift among rows"].max()) < 1e-4


def test_rank_0_alone_reads_what_it_alone_has(alone, shared):
    assert shared[0]["rank 0"] == alone["rank 0"]
    assert all(found["rank 0"] is None for found in shared[1:])


def test_searches_for_modes_are_shared_out(alone, shared):
    """What they find is bit for bit what one process finds, and costs as much."""
    one, counts = alone["searches"], [found["searches"]["count"] for found in shared]
    assert one["count"] == 7
    assert counts == [len(range(rank, 7, len(shared))) for rank in range(len(shared))]
    assert one["cut short"] < one["passes"]
    for found in shared:
        for name in ("modes", "factors"):
            assert torch.equal(found["searches"][name], one[name])
        for name in ("passes", "searches", "evidence", "together", "cut short", "diagonal"):
            assert found["searches"][name] == one[name]


# ------------------------------------------------------------------ what goes wrong


@pytest.fixture(scope="module")
def mistakes(on_two):
    return [rank["mistakes"] for rank in on_two]


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("data", "RankError", ["rank 1 is on another run than rank 0", "data was"]),
        ("seed", "ArgumentError", ["rank 1 was called otherwise", "seed was 5, is 6"]),
        ("model", "RankError", ["rank 1 is on another run than rank 0", "sites['b']"]),
        ("curvature", "RankError", ["rank 1 is on another run than rank 0", "curvature was"]),
        ("no mode", "ArgumentError", ["no mode of the posterior could be found"]),
        ("rows", "DataError", ["the data hold 403 rows, not N = 500"]),
        ("predict", "ArgumentError", ["rank 1 was called otherwise", "data was 'tensors"]),
        ("reduce", "ArgumentError", ["rank 1 was called otherwise", "reduce was 'None'"]),
        ("calls", "RankError", ["every rank has to make the same calls in the same order"]),
    ],
)
def test_ranks_that_differ_are_told_before_the_work(mistakes, what, kind, words):
    for found in mistakes:
        assert found[what][0] == kind
        assert all(word in found[what][1] for word in words), found[what]


def test_an_error_on_one_rank_ends_all(mistakes):
    """Rank 1 cannot evaluate its rows; the next call goes well."""
    for found in mistakes:
        assert "not positive definite" in found["breaks"][1]
        assert found["afterwards"] == (1000, 403)
