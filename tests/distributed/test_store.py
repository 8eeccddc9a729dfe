"""Runs on several processes whose draws are on disk, or nowhere: those of one process."""

import json

import numpy as np
import pytest
import torch
import xarray
from test_workers import killed, needs_gloo, results

pytest.importorskip("zarr")
#: Seconds to start and compile, for what `test_workers` and the store's own tests say in part.
pytestmark = [needs_gloo, pytest.mark.slow, pytest.mark.long]


def on(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return folder, results("stores", folder, world)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder, (found,) = on(1, tmp_path_factory)
    return folder, found


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def shared(request, tmp_path_factory):
    return on(request.param, tmp_path_factory)


def files_of(store):
    """All that a store holds but for its run's name and times, by path."""

    def plain(found):
        if not isinstance(found, dict):
            return found
        left_out = {"run", "sampling_time", "compile_time", "tuning_time"}
        return {key: plain(value) for key, value in found.items() if key not in left_out}

    return {
        str(file.relative_to(store)): plain(json.loads(file.read_text()))
        if file.name.startswith(".z")
        else file.read_bytes()
        for file in store.rglob("*")
        if file.is_file()
    }


def posterior_of(store):
    tree = xarray.open_datatree(store, engine="zarr", chunks=None)
    return tree.posterior


def same_dicts(actual, expected):
    assert actual.keys() == expected.keys()
    for name, parts in expected.items():
        for part, value in parts.items():
            assert torch.equal(actual[name][part].nan_to_num(-7), value.nan_to_num(-7)), (
                name,
                part,
            )


@pytest.mark.parametrize("case", ["compiled", "everywhere", "points"])
def test_a_store_is_that_of_one_process(case, alone, shared):
    """File by file, and nothing beside it is left."""
    there, here = (folder / f"{case}.zarr" for folder, _ in (alone, shared))
    expected, actual = files_of(there), files_of(here)
    assert expected.keys() == actual.keys()
    assert len(expected) > 8 * 7
    for name, value in expected.items():
        if not name.startswith(".z") and "/.z" not in name:
            assert actual[name] == value, name
    draws = posterior_of(here)
    assert draws.w.shape == (8, 50, 3)
    np.testing.assert_array_equal(draws.w, posterior_of(there).w)
    assert list(here.parent.glob("*.lock")) == []


@pytest.mark.parametrize("case", ["compiled", "everywhere", "points"])
def test_ranks_read_their_draws_from_it(case, alone, shared):
    """Rank 0 all of them, others those of their own chains, or all."""
    expected, ranks = alone[1][case], shared[1]
    for rank, found in enumerate(ranks):
        has_all = rank == 0 or case != "compiled"
        own = slice(None) if has_all else slice(rank, None, len(ranks))
        assert torch.equal(found[case]["w"], expected["w"][own])
        np.testing.assert_array_equal(found[case]["lp"], expected["lp"][own])
        for part in ("summary", "diagnostics"):
            assert found[case][part] == expected[part]


def test_what_draws_come_to_is_that_of_one_process_on_every_rank(alone, shared):
    """Bit for bit: means, sds, quantiles, R-hat and ESS, and the tables."""
    sums, *tables = alone[1]["nowhere"]
    for found in shared[1]:
        own, *others = found["nowhere"]
        same_dicts(own, sums)
        assert others == tables


def test_a_path_that_is_there_or_differs_is_refused_on_all_ranks(shared):
    for found in shared[1]:
        kind, message = found["exists"]
        assert kind == "ArgumentError"
        assert "compiled.zarr' is there already" in message
        kind, message = found["another"]
        assert kind == "ArgumentError"
        assert "rank 1 was called otherwise than rank 0 (store was" in message
    assert not list(shared[0].glob("rank-*.zarr"))


@pytest.mark.parametrize("case", ["breaks", "all of rank 1 break"])
def test_chains_that_break_let_the_others_finish(case, alone, shared):
    """Also those of one rank, all of which stop: the store is that of one process."""
    (there, expected), (here, ranks) = alone, shared
    found, other = (posterior_of(folder / f"{case}.zarr").w.values for folder in (here, there))
    assert found.shape == (8, 50, 3)
    torch.testing.assert_close(*map(torch.as_tensor, (found, other)), equal_nan=True)
    assert np.isnan(found).all((1, 2)).sum() == (1 if case == "breaks" else 4)
    for rank, told in enumerate(ranks):
        assert told[case][0] == "NonFiniteError"
        assert "chain 3 at step" in told[case][1]
        draws, sums = told[f"{case}, draws"], told[f"{case}, nowhere"]
        if draws is None:
            assert rank == 1
            continue
        assert torch.isfinite(draws).all()
        for part, value in expected[f"{case}, nowhere"]["w"].items():
            torch.testing.assert_close(sums["w"][part], value, equal_nan=True)


def test_a_full_disk_of_one_rank_ends_all_and_is_named(shared):
    """Readers see the draws that all chains have."""
    folder, ranks = shared
    for found in ranks:
        kind, message = found["full"]
        assert kind == "FileError"
        assert f"rank {len(ranks) - 1}: the draws cannot be written" in message
    draws = posterior_of(folder / "full.zarr")
    assert 0 < draws.sizes["draw"] < 50
    assert torch.isfinite(torch.as_tensor(draws.w.values)).all()


# ------------------------------------------------------------------ going on


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """By how draws are kept, what a run of one process has found."""
    folder = tmp_path_factory.mktemp("whole")
    return {kind: results(f"{kind}-begin", folder / kind, 1)[0] for kind in ("stored", "nowhere")}


@pytest.mark.long
def test_a_killed_run_without_draws_goes_on_to_the_same_moments(uninterrupted, tmp_path):
    """Sums and sketches of chains that were added up together go on apart.  Numbers come to them
    in other blocks, which rounds otherwise, and puts other neighbors into clusters."""
    killed(tmp_path, 3, 0.2, case="nowhere-begin")
    expected = uninterrupted["nowhere"]["moments"]["w"]
    for found in results("nowhere-resume", tmp_path, 2, agent=False):
        for part, value in found["moments"]["w"].items():
            close = {"rtol": 1e-9, "atol": 0.02 if part == "quantiles" else 0.0}
            torch.testing.assert_close(value, expected[part], **close)


@pytest.mark.long
@pytest.mark.parametrize("worlds", [(3, 2), (2, 1)])
def test_a_killed_run_with_a_store_goes_on_to_the_same_store(worlds, uninterrupted, tmp_path):
    """On fewer processes, then longer on one more: parts are at different steps, and so are the
    files of their chains."""
    first, then = worlds
    killed(tmp_path, first, 0.2, case="stored-begin")
    seen = posterior_of(tmp_path / "draws.zarr").w.values
    expected = uninterrupted["stored"]["draws"]["w"].numpy()
    assert seen.shape[1] < 10_000
    np.testing.assert_array_equal(seen, expected[:, : seen.shape[1]])  # readers: whole draws
    found = results("stored-resume", tmp_path, then, agent=False)
    np.testing.assert_array_equal(posterior_of(tmp_path / "draws.zarr").w, expected)
    assert torch.equal(found[0]["draws"]["w"], torch.as_tensor(expected))
    longer = results("stored-extend", tmp_path, then + 1, agent=False)
    assert longer[0]["draws"]["w"].shape == (8, 12_000, 3)
    np.testing.assert_array_equal(
        posterior_of(tmp_path / "draws.zarr").w.values[:, :10_000], expected
    )
