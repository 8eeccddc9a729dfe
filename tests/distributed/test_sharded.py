"""Sharded networks: the draws of one process with the whole network, on any number of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repetitions import long_but
from test_workers import needs_gloo

from pyro_scale.rng.seeds import Purpose
from pyro_scale.rng.streams import NoiseStream, ShardNoise

PROGRAM = Path(__file__).parent / "sharded_on_ranks.py"
METHODS = ["SGLD", "SGHMC", "BAOA", "IVON", "MAP"]

pytestmark = needs_gloo


def torchrun(case, folder, world, **environment):
    """What each rank has found; without a world, a process by itself."""
    folder.mkdir(exist_ok=True, parents=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [sys.executable, *(torchrun if world else []), str(PROGRAM), case, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = [folder / f"rank-{rank}.pt" for rank in range(world or 1)]
    assert all(file.exists() for file in found), done.stdout + done.stderr
    return [torch.load(file, weights_only=False) for file in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def alone(folder):
    (found,) = torchrun("cases", folder / "alone", 0)
    return found


@pytest.fixture(scope="module")
def two(folder):
    return torchrun("cases", folder / "two", 2)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def ranks(request, folder):
    if request.param == 2:
        return request.getfixturevalue("two")
    return torchrun("cases", folder / "three", 3)


def close_sites(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_steps_are_those_of_one_process(name, alone, ranks):
    """Of batches that do not divide evenly, one of a single row among them; the prior of weights
    and of what is beside them counts once, noise is the same wherever it is drawn."""
    for rank in ranks:
        steps = zip(rank["steps"][name], alone["steps"][name], strict=True)
        for number, (found, expected) in enumerate(steps):
            close_sites(found[1], expected[1], 1e-12 if number == 0 else 1e-8)
            assert found[0] == pytest.approx(expected[0], rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGLD", "SGHMC", "BAOA", "MAP"])
def test_runs_are_those_of_one_process(name, alone, ranks):
    for rank in ranks:
        close_sites(rank["runs"][name], alone["runs"][name], 1e-8)


@pytest.mark.slow
def test_a_loader_has_the_batches_of_one_process(alone, ranks):
    for rank in ranks:
        close_sites(rank["loader"], alone["loader"], 1e-8)


@pytest.mark.slow
def test_draws_of_a_fit_do_not_depend_on_the_number_of_ranks(two, ranks):
    for rank in ranks:
        close_sites(rank["draws of a fit"], two[0]["draws of a fit"], 1e-8)
        assert rank["draws of a fit"]["0.weight"].shape == (4, 7, 5)


@pytest.mark.slow
def test_weights_are_dtensors_and_other_sites_tensors(two):
    kinds = two[0]["kind"]
    assert kinds.pop("sigma") == "Tensor"
    assert set(kinds.values()) == {"DTensor"}


@pytest.mark.slow
def test_predictions_are_of_all_rows_on_every_rank(alone, ranks):
    """Each rank computes a part of the rows, and of one row one of them."""
    for rank in ranks:
        for case in ("predictions", "one row"):
            found, expected = rank[case], alone[case]
            close_sites({"mean": found["mean"]}, {"mean": expected["mean"]}, 1e-8)
        assert rank["predictions"]["y"].shape == (4, 9)
        assert torch.equal(rank["predictions"]["y"], ranks[0]["predictions"]["y"])
        residuals = rank["predictions"]["y"] - rank["predictions"]["mean"]
        assert len(residuals.unique()) == 36


@pytest.mark.slow
def test_the_network_is_left_where_the_run_ends(alone, two):
    for rank in two:
        mode = {n: value[0] for n, value in alone["runs"]["MAP"].items() if n != "sigma"}
        close_sites(rank["network"], mode, 1e-8)


@pytest.mark.slow
def test_the_bound_counts_every_element_once(alone, ranks):
    for rank in ranks:
        torch.testing.assert_close(rank["trace"], alone["trace"], rtol=1e-10, atol=0)
        assert rank["linearized"][0] == "ArgumentError"


@pytest.mark.slow
def test_positions_are_float32_where_the_network_computes_in_bfloat16(two):
    for rank in two:
        half, full = rank["half"]["bf16"], rank["half"]["float32"]
        for name, value in half.items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, full[name], rtol=0, atol=0.05)
        weight = half["2.weight"]
        assert not torch.equal(weight, weight.bfloat16().float())
        assert not torch.equal(weight, full["2.weight"])


@pytest.mark.slow
def test_offloaded_parameters_move_alike(alone, two):
    for rank in two:
        steps = zip(rank["offloaded"], alone["steps"]["BAOA"], strict=True)
        for (_, found), (_, expected) in steps:
            close_sites(found, expected, 1e-8)


@pytest.mark.slow
def test_other_models_run_as_ever_beside_a_sharded_one(alone, two):
    for rank in two:
        close_sites(rank["unsharded"], alone["runs"]["BAOA"], 1e-8)


@pytest.mark.long
def test_ranks_can_have_the_same_parts(alone, tmp_path):
    """A mesh of two dimensions: two copies of the network, each on two ranks."""
    for rank in torchrun("copies", tmp_path, 4):
        for name, steps in rank.items():
            for (log_joint, found), expected in zip(steps, alone["steps"][name], strict=True):
                close_sites(found, expected[1], 1e-8)
                assert log_joint == pytest.approx(expected[0], rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("parts of the data", "RankError", "rank 1 is on another run than rank 0 (first batch was"),
        ("other data", "RankError", "rank 1 is on another run than rank 0 (data was"),
        ("other seeds", "ArgumentError", "rank 1 was called otherwise than rank 0 (seed was"),
        ("reduce", "ArgumentError", "reduce='mean': predict has none"),
        ("lr", "ArgumentError", "lr='auto'"),
        ("kernel", "ArgumentError", "SGNHT does not move sharded networks: use one of SGLD"),
        ("kernel of step", "ArgumentError", "UBU does not move sharded networks"),
        ("control variates", "ArgumentError", "control_variates: BAOA has none"),
        ("precondition", "ArgumentError", "precondition: BAOA has none"),
        ("chains", "ArgumentError", "pass num_chains=1"),
        ("warm-up", "ArgumentError", "warmup_steps='auto'"),
        ("store", "ArgumentError", "pass store=None"),
        ("batch size", "ArgumentError", "batch_size='auto'"),
        ("starts", "ArgumentError", "init_strategy: the weights of a sharded network start at"),
        ("VI", "ArgumentError", "VI does not move sharded networks"),
        ("Laplace", "ModelError", "gradients are nowhere as a whole"),
        ("gradient", "ModelError", "gradients are nowhere as a whole"),
        ("summary", "ArgumentError", "no process has whole draws of it"),
        ("prior's shape", "ArgumentError", "the prior of '0.weight' has shape [7, 5]"),
        ("prior's values", "ArgumentError", "use its shape alone"),
        ("prior's support", "ArgumentError", "it has to be on all real numbers"),
        ("rest", "ArgumentError", "the rest is frozen"),
        ("not all", "ArgumentError", "is not sharded, and others are"),
        ("no rows", "DataError", "no rows"),
        ("diverges", "NonFiniteError", "NaN or infinite at step"),
    ],
)
def test_what_sharded_networks_have_not_is_refused_on_all_ranks(what, kind, words, two):
    for rank in two:
        assert rank["refused"][what] is not None
        assert rank["refused"][what][0] == kind
        assert words in rank["refused"][what][1]


# ------------------------------------------------------------------ checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("world", long_but([1, 2, 3], 1))
def test_a_run_goes_on_on_any_number_of_processes(world, alone, two, folder):
    place = folder / "two" / str(world - 1)
    for found in torchrun("resume", place, world):
        close_sites(found, alone["runs"]["SGHMC"], 1e-8)


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "damaged"])
def test_the_state_before_is_taken_where_the_latest_is_not_whole(how, alone, two, folder, tmp_path):
    """A process that is killed while it writes leaves no facts; a changed byte is seen."""
    shutil.copytree(folder / "two" / "run", tmp_path / "run")
    latest = max(tmp_path.glob("run/state-*"), key=lambda path: int(path.name.split("-")[1]))
    if how == "killed":
        (latest / "facts").unlink()
    else:
        file = next(latest.glob("*.distcp"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    for found in torchrun("resume", tmp_path, 2):
        close_sites(found, alone["runs"]["SGHMC"], 1e-8)


# ------------------------------------------------------------------ noise


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_noise_does_not_depend_on_the_number_of_parts(world):
    """Parts of two tensors of 35 and 7 elements, and 3 elements that all have."""
    options = torch.float32, torch.device("cpu")
    whole = NoiseStream(5, [0], (2, 45), *options).at(11)[0]
    for rank in range(world):
        places = []
        for first, size in ((0, 35), (35, 7)):
            bounds = [min((rank + i) * -(-size // world), size) for i in (0, 1)]
            places.append((first + bounds[0], bounds[1] - bounds[0]))
        places.append((42, 3))
        found = ShardNoise(5, (2, 45), places, *options, Purpose.NOISE).at(11)
        expected = torch.cat([whole[:, first : first + count] for first, count in places], 1)
        assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_take_the_same_steps(alone, tmp_path):
    """With nccl; unmeasured."""
    for rank in torchrun("cases", tmp_path, 2, ON_CUDA="1"):
        for name in METHODS:
            for (_, found), (_, expected) in zip(
                rank["steps"][name], alone["steps"][name], strict=True
            ):
                close_sites(found, expected, 1e-8)
