"""Runs on several processes: the draws of one, whoever moves the chains, and whoever dies."""

import contextlib
import importlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import on_ranks
import pytest
import torch
from repetitions import long_but
from torch import distributed as dist

import pyro_scale as ps
from pyro_scale.distributed.shares import Rows
from pyro_scale.distributed.workers import ALONE, Workers
from pyro_scale.run.by_rank import check_rows_can_be_shared
from pyro_scale.run.resume import Journal

HERE = Path(__file__).parent
PROGRAM = "on_ranks"
CASES = long_but(
    ["eager", "compiled", "everywhere", "loader", "stream", "untuned", "untuned batches", "points"],
    *["eager", "compiled", "untuned", "points"],
)
#: Of those, what is too short to be compiled.
EAGER = {"eager", "everywhere", "loader", "stream", "points"}
#: What the same two processes do.
TOGETHER = ["cases", "errors", "mesh-1-2"]

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo"
)
pytestmark = needs_gloo


def start(case, folder, world, agent=True, program=PROGRAM, names=()):
    """The processes: one of torchrun's, or the ranks themselves."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    arguments = [str(HERE / f"{program}.py"), case, str(folder), *names]
    if world == 1:
        return [subprocess.Popen([sys.executable, *arguments], env=environment, **how)]
    if agent:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        return [subprocess.Popen([sys.executable, *torchrun, *arguments], env=environment, **how)]
    group = folder / f"group-{time.time_ns()}"
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={
                **environment,
                "RANK": str(rank),
                "WORLD": str(world),
                "GROUP": str(group),
            },
            **how,
        )
        for rank in range(world)
    ]


def results(case, folder, world, agent=True, program=PROGRAM, names=()):
    """What each rank has found; None of those that left nothing.  One rank is this process."""
    said = []
    if world == 1:
        folder.mkdir(exist_ok=True)
        importlib.import_module(program).main(case, folder, *names)
    else:
        processes = start(case, folder, world, agent, program, names)
        said = [process.communicate(timeout=600)[0] for process in processes]
    files = [folder / f"rank-{rank}.pt" for rank in range(world)]
    assert any(file.exists() for file in files), said
    return [torch.load(f, weights_only=False) if f.exists() else None for f in files]


def asked(request):
    """The cases of this file's tests that are run in this session."""
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params.get("case") for item in items if hasattr(item, "callspec")]
    return [*dict.fromkeys(case for case in cases if case)]


def alike(request):
    return ["ignored", *(name for name in asked(request) if name in on_ranks.CASES)]


def on_a_mesh(request):
    return ["loader", "trajectory", *asked(request)]


@pytest.fixture(scope="module")
def alone(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "1"
    (found,) = results("cases", folder, 1, names=alike(request))
    return found


@pytest.fixture(scope="module")
def on_two(request, tmp_path_factory):
    """All that two processes find, one thing after another, in some 40 s, since to start them and
    to load the compiler takes seconds each time."""
    folder, names = tmp_path_factory.mktemp("ranks") / "2", [*alike(request), *on_a_mesh(request)]
    found = results("+".join(TOGETHER), folder, 2, names=dict.fromkeys(names))
    return folder, {case: [rank[case] for rank in found] for case in TOGETHER}


@pytest.fixture(scope="module", params=long_but([2, 3, 8], 2))
def shared(request, alone, tmp_path_factory):
    if request.param == 2:
        return request.getfixturevalue("on_two")[1]["cases"]
    return results("cases", tmp_path_factory.mktemp("ranks") / "n", request.param, names=alone)


def same_bits(case, found, expected):
    """Compiled programs give the same bits; a vmapped step rounds by how many chains it moves."""
    if case in EAGER:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    else:
        assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_draws_are_those_of_one_process(case, alone, shared):
    """Rank 0 has all, others those of chains rank, rank + world, ..."""
    expected, has_all = alone[case], case in ("everywhere", "points")
    for rank, found in enumerate(shared):
        own = slice(None) if rank == 0 or has_all else slice(rank, None, len(shared))
        for name in ("w", "lp"):
            same_bits(
                case, torch.as_tensor(found[case][name]), torch.as_tensor(expected[name][own])
            )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_diagnostics_of_all_chains(case, alone, shared):
    for found in shared:
        if case not in EAGER:
            for part in ("summary", "diagnostics"):
                assert found[case][part] == alone[case][part]
            assert found[case]["attrs"].get("report") == alone[case]["attrs"].get("report")
            continue
        for part in ("summary", "diagnostics"):
            for column, values in alone[case][part].items():
                assert found[case][part][column] == pytest.approx(values, rel=1e-6, nan_ok=True)


@pytest.mark.slow
def test_a_group_can_be_ignored(alone, shared):
    for found in shared:
        assert torch.equal(found["ignored"]["w"], alone["ignored"]["w"])


# ------------------------------------------------------------------ batches shared out


@pytest.fixture(scope="module")
def on_one(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh") / "1"
    (found,) = results("mesh-1-1", folder, 1, names=on_a_mesh(request))
    return found


@pytest.fixture(
    scope="module", params=[(1, 2), pytest.param((2, 2), marks=pytest.mark.long)], ids=str
)
def on_mesh(request, tmp_path_factory):
    case = "-".join(["mesh", *map(str, request.param)])
    if case in TOGETHER:
        folder, together = request.getfixturevalue("on_two")
        found = together[case]
    else:
        folder, world = tmp_path_factory.mktemp("mesh") / "n", math.prod(request.param)
        found = results(case, folder, world, names=on_a_mesh(request))
    (alone,) = results("alone", folder, 1)
    return [{**each, "gone on with alone": alone} for each in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tolerance"),
    long_but(
        [
            ("one step", 1e-12),
            ("small batches", 1e-12),
            ("trajectory", 1e-8),
            ("compiled", 1e-8),
            ("compiled points", 1e-8),
            ("whole data", 1e-8),
            ("loader", 1e-8),
            ("stream", 1e-8),
            ("frozen base", 1e-8),
            ("frozen base, whole data", 1e-8),
            ("points", 1e-8),
            ("rows by rank", 1e-12),  # 300 and 103 of them
            ("streams by rank", 1e-12),
        ],
        *[("one step", 1e-12), ("small batches", 1e-12), ("trajectory", 1e-8)],
        *[("compiled", 1e-8), ("loader", 1e-8), ("frozen base", 1e-8)],
        *[("rows by rank", 1e-12), ("streams by rank", 1e-12)],
    ),
)
def test_gradients_over_ranks_are_those_of_one_process(case, tolerance, on_one, on_mesh):
    """Batches of 21, 1 and 403 rows on two ranks do not divide evenly: the prior and every row
    count once, and noise is the same on both."""
    for rank in on_mesh:
        torch.testing.assert_close(rank[case]["w"], on_one[case]["w"], rtol=0, atol=tolerance)
        assert torch.equal(rank[case]["w"], on_mesh[0][case]["w"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    long_but(
        [
            *["MAP", "MAP by torch.optim", "MAP, compiled", "MAP that stops", "MAP to the mode"],
            *["MAP, rows by rank", "VI", "VI, dense", "IVON"],
        ],
        *["MAP", "MAP, rows by rank", "VI"],
    ),
)
def test_fits_over_ranks_are_those_of_one_process(case, on_one, on_mesh):
    """Every rank has all starts, their last values, spreads and traces."""
    for rank in on_mesh:
        torch.testing.assert_close(rank[case], on_one[case], rtol=1e-9, atol=1e-8)


@pytest.mark.slow
def test_rows_of_each_rank_alone_count_alike(on_mesh):
    """Parts of 300 and 103 rows, in batches of 21 of each; what needs all rows is refused."""
    for rank in on_mesh:
        assert torch.isfinite(rank["batches by rank"]["w"]).all()
        assert torch.equal(rank["batches by rank"]["w"], on_mesh[0]["batches by rank"]["w"])
        assert "lr='auto'" in rank["rows by rank, untuned"][1]


@pytest.mark.slow
def test_ranks_draw_their_own_rows_apart(on_mesh):
    """Otherwise rows at the same places of two ranks' parts would come together in every batch."""
    one, other = on_mesh[0]["places read"], on_mesh[1]["places read"]
    assert len(one) > 200
    assert one[-200:] != other[-200:]


@pytest.mark.slow
def test_rows_by_rank_that_do_not_go_together_are_refused_on_all(on_mesh):
    for rank in on_mesh:
        kind, message = rank["too few rows"]
        assert kind == "DataError"
        assert "batch_size=21 is more than the 6 rows" in message
    if len(on_mesh) == 4:
        for rank in on_mesh:
            assert "at the same place along 'data'" in rank["other rows in a team"][1]


@pytest.mark.slow
def test_ranks_that_share_batches_tell_the_same(on_mesh):
    for rank in on_mesh:
        assert repr(rank["diagnostics"]) == repr(on_mesh[0]["diagnostics"])


@pytest.mark.slow
def test_a_rank_reads_its_own_rows_alone(on_one, on_mesh):
    """But for what the preflight and the checks afterwards read."""
    assert all(rank["rows read"] < 0.75 * on_one["rows read"] for rank in on_mesh)


@pytest.mark.slow
def test_ranks_that_share_batches_go_on_with_a_checkpoint_and_one_process_with_theirs(
    on_one, on_mesh
):
    whole = on_one["trajectory"]["w"]
    for rank in on_mesh:
        resumed, alone = rank["gone on with"]["w"], rank["gone on with alone"]["w"]
        torch.testing.assert_close(resumed, whole[:, :15], rtol=0, atol=1e-8)
        torch.testing.assert_close(alone, whole, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_steps_with_a_sum_over_ranks_are_compiled(on_mesh):
    assert {rank["program"] for rank in on_mesh} == {"compiled step"}


@pytest.mark.slow
def test_what_cannot_be_shared_out_is_refused(on_mesh):
    for rank in on_mesh:
        assert "subsamples by itself in plate 'data'" in rank["own subsamples"][1]
        assert "max_seconds" in rank["clock"][1]


@pytest.mark.slow
def test_a_model_that_fails_on_one_rank_ends_all(on_mesh):
    for rank in on_mesh:
        kind, message = rank["fails"]
        assert kind == "RankError"
        assert "the model has failed at a step: on rank 1, RuntimeError: no such rows" in message


# ------------------------------------------------------------------ what goes wrong


@pytest.fixture(scope="module")
def errors(on_two):
    return on_two[1]["errors"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("data", "RankError", ["rank 1 is on another run than rank 0", "data was"]),
        ("seed", "ArgumentError", ["rank 1 was called otherwise than rank 0", "seed was 5, is 6"]),
        ("length", "ArgumentError", ["rank 1 was called otherwise", "num_samples was 50, is 51"]),
        (
            "checkpoint",
            "ArgumentError",
            ["rank 1 was called otherwise", "checkpoint was not there"],
        ),
        ("who keeps", "ArgumentError", ["'all' on some ranks and 'auto' on others"]),
        ("model", "RankError", ["rank 1 is on another run than rank 0", "sites['b']"]),
        ("starts", "RankError", ["rank 1 is on another run than rank 0", "starts was"]),
        ("version", "RankError", ["rank 1 is on another run than rank 0", "version was"]),
        ("bad argument", "ArgumentError", ["num_chains was 8, is 0"]),
        ("bad data", "DataError", ["first dimensions differ", "symptoms.html#not-rows"]),
        ("few", "ArgumentError", ["num_chains=1 on 2 processes", "distributed=False"]),
    ],
)
def test_ranks_that_differ_all_stop_before_the_first_step(errors, what, kind, words):
    for found in errors:
        assert found[what][0] == kind
        assert all(word in found[what][1] for word in words)
        assert found[what][1].count("symptoms.html") <= 1


@pytest.mark.slow
def test_a_chain_that_breaks_on_one_rank_lets_the_others_finish(errors):
    """Chain 3, rank 1's, breaks; all ranks are told, and the next run goes well."""
    for rank, found in enumerate(errors):
        (kind, message), draws = found["breaks"]
        assert kind == "NonFiniteError"
        assert "chain 3 at step" in message
        assert len(draws) == (7 if rank == 0 else 3)
        assert torch.isfinite(draws).all()
        assert len(found["afterwards"]["w"]) == (8 if rank == 0 else 4)


@pytest.mark.slow
@pytest.mark.parametrize("world", long_but([2, 3], 2))
def test_a_rank_that_dies_is_named(world, tmp_path):
    """Without torchrun, which would end the others by itself."""
    found = results("dies", tmp_path, world, agent=False)
    assert found.pop(1) is None
    for kind, message in found:
        assert kind == "RankError"
        assert "rank 1 has not reached" in message


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_nonsense_is_refused(value):
    with pytest.raises(
        ps.errors.ArgumentError, match=r"distributed=.*: pass 'auto', 'all' or False"
    ):
        Workers.from_group(value)


def test_a_group_that_passes_no_tensors_of_processors_on_is_refused():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(
            ps.errors.ArgumentError, match=r"the process group's backend is.*cpu:gloo,cuda:nccl"
        ):
            Workers.from_group("auto")
        assert Workers.from_group(False).is_alone
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_mesh_of_another_device_is_refused():
    def problem(device):
        rows = Rows(rank=0, world=2, group=None, device=device)
        return SimpleNamespace(
            workers=SimpleNamespace(rows=rows),
            positions=torch.zeros(1, 2),
            data=None,
            log_posterior=SimpleNamespace(model_info=SimpleNamespace(own_plate=None)),
        )

    check_rows_can_be_shared(problem("cpu"))
    with pytest.raises(ps.errors.ArgumentError, match="of cuda devices, and the model is on cpu"):
        check_rows_can_be_shared(problem("cuda"))


@pytest.mark.parametrize(("world", "size"), [(2, 21), (3, 2), (8, 5), (4, 403), (3, 1)])
def test_every_row_belongs_to_one_rank(world, size):
    """Ranks without a row have one that does not count."""
    ranks = [Rows(rank, world, None, "cpu") for rank in range(world)]
    assert sum(rank.weight(size) for rank in ranks) == pytest.approx(1, abs=1e-15)
    own = [list(range(size))[rank.of(size)] for rank in ranks]
    assert all(own)
    counted = [
        row for rank, rows in zip(ranks, own, strict=True) if rank.weight(size) for row in rows
    ]
    assert counted == list(range(size))


def test_a_process_by_itself_talks_to_nobody():
    assert ALONE.gather(3, "") == ALONE.gather_at_first(3, "") == [3]
    assert ALONE.broadcast(3, "") == 3
    assert list(ALONE.chains(4)) == [0, 1, 2, 3]
    assert Workers.from_group("auto") is ALONE


@pytest.mark.long
def test_the_example_runs(tmp_path):
    pytest.importorskip("sklearn")
    example = Path(__file__).parents[2] / "examples/distributed.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(example)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.count("draws of all chains: [8, 500, 30]") == 1
    assert "YES" in done.stdout


# ------------------------------------------------------------------ checkpoints


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    (found,) = results("checkpoint", tmp_path_factory.mktemp("ranks") / "whole", 1)
    return found


def killed(folder, world, seconds, case="checkpoint", seed=0):
    """Kills one of the ranks some time after its first checkpoint; the others end by themselves,
    unless they still wait for it to join the group."""
    begun = time.time()
    processes = start(case, folder, world, agent=False)

    def has_begun():
        files = (folder / "run").glob("**/state-*")
        with contextlib.suppress(FileNotFoundError):  # replaced meanwhile
            return any(file.stat().st_mtime > begun for file in files)
        return True

    while not has_begun() and any(process.poll() is None for process in processes):
        time.sleep(0.01)
    time.sleep(seconds)
    victim = random.Random(seed).choice(processes)
    victim.send_signal(signal.SIGKILL)
    for process in processes:
        try:
            process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@pytest.mark.long
@pytest.mark.parametrize(("worlds", "seconds"), [((3, 2), 0.2), ((2, 1), 0.1), ((1, 3), 0.1)])
def test_a_killed_run_goes_on_on_any_number_of_processes(worlds, seconds, uninterrupted, tmp_path):
    first, then = worlds
    killed(tmp_path, first, seconds)
    for file in tmp_path.glob("rank-*"):
        file.unlink()
    found = results("resume", tmp_path, then, agent=False)
    assert torch.equal(found[0]["w"], uninterrupted["w"])
    assert (found[0]["lp"] == uninterrupted["lp"]).all()
    # and a finished run has nothing left to do, on another number of processes
    again = results("resume", tmp_path, 1)
    assert torch.equal(again[0]["w"], uninterrupted["w"])


@pytest.mark.slow
def test_a_directory_of_parts_is_no_place_for_another_run(tmp_path):
    """Its chains would go on from whichever run is further."""
    part = tmp_path / "part-0.1.0"
    part.mkdir()
    (part / "draws-0").touch()
    with pytest.raises(ps.errors.ArgumentError, match="holds the checkpoints of a run"):
        Journal.open(tmp_path, 60.0, None)


@pytest.mark.long
def test_twenty_kills_lose_nothing(uninterrupted, tmp_path):
    """Of random ranks at random times, each time on another number of processes."""
    draw = random.Random(1)
    for kill in range(20):
        case = "resume" if list((tmp_path / "run").glob("**/state-*")) else "checkpoint"
        killed(tmp_path, draw.choice([1, 2, 3, 4]), draw.random(), case, seed=kill)
    found = results("resume", tmp_path, 2, agent=False)
    assert torch.equal(found[0]["w"], uninterrupted["w"])
