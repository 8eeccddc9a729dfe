"""How many threads a run computes on, and what other threads notice of it: nothing."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import normals

import pyro_scale as ps
from pyro_scale.core import thread_count

LENGTH = {"num_samples": 5, "warmup_steps": 5, "thinning": 1, "num_chains": 1}


@pytest.fixture
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    yield
    torch.set_num_threads(before)


def in_new_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def threads_of_run(rows):
    """The number of threads while a regression's model runs at last."""
    x = normals(rows, 8, seed=1).float()
    during = []

    def model(x, y):
        during.append(torch.get_num_threads())
        w = pyro.sample("w", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    data = x, x.sum(1)
    ps.BAOA(model, lr=0.01, compile=False).run(data, **LENGTH, seed=0, progress=False)
    return during[-1]


@pytest.mark.parametrize(("rows", "count"), [(100, 1), (1_000_000, 2)])
def test_small_models_run_on_one_thread_and_large_ones_on_all(two_threads, rows, count):
    assert threads_of_run(rows) == count
    assert torch.get_num_threads() == 2


def test_an_error_leaves_the_number_as_it_was(two_threads):
    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))
        raise RuntimeError("of the model")

    with pytest.raises(RuntimeError, match="of the model"):
        ps.BAOA(model).run(None, **LENGTH, progress=False)
    assert torch.get_num_threads() == 2


def test_other_threads_keep_their_numbers(two_threads):
    with thread_count.restored_threads():
        thread_count.choose_threads(lambda: 1)
        assert in_new_thread(torch.get_num_threads) == 2
        in_new_thread(lambda: torch.set_num_threads(3))
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    assert in_new_thread(torch.get_num_threads) == 3


def test_a_run_in_a_run_may_use_all_threads(two_threads):
    with thread_count.restored_threads():
        thread_count.choose_threads(lambda: 1)
        with thread_count.restored_threads():
            thread_count.choose_threads(lambda: 2**30)
            assert torch.get_num_threads() == thread_count.available_threads() == 2
        assert torch.get_num_threads() == 1


def output_of(code):
    """What a program of two threads prints in a new process, which has no other threads."""
    begin = "import os, threading, time, torch\nfrom pyro_scale.core import thread_count\n"
    begin += "torch.set_num_threads(2)\nos.sched_getaffinity = lambda _: {0, 1}\n"
    command = [sys.executable, "-c", begin + textwrap.dedent(code)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stderr == ""
    return ran.stdout.split()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_threads_of_a_large_model_are_more_than_cores_and_end_with_the_run():
    """GNU's OpenMP then lets waiting threads sleep."""
    code = """
        def count():
            time.sleep(0.5)  # a thread that has been joined is there for a moment
            return len(os.listdir("/proc/self/task"))
        torch.ones(2**20).sum()
        before = count()
        with thread_count.restored_threads():
            thread_count.choose_threads(lambda: 2**20)
            print(count() - before)
            thread_count.choose_threads(lambda: 2**30)
            print(count() - before)
        print(count() - before)
    """
    assert output_of(code) == ["0", "3", "0"]  # three threads share, on two cores


@pytest.mark.parametrize("work", [1, 2**30], ids=["small", "large"])
def test_a_run_may_outlive_the_main_thread(work):
    code = f"""
        main = threading.current_thread()
        def run():
            main.join()
            with thread_count.restored_threads():
                thread_count.choose_threads(lambda: {work})
                print(torch.get_num_threads())
        threading.Thread(target=run).start()
    """
    assert output_of(code) == ["1" if work == 1 else "2"]


def test_nothing_is_counted_for_one_thread(two_threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
    with thread_count.restored_threads():
        thread_count.choose_threads(lambda: pytest.fail("counted"))
        assert torch.get_num_threads() == 1


def test_outside_of_runs_nothing_is_chosen(two_threads):
    thread_count.choose_threads(lambda: 1)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("quota", "count"),
    [("max 100000", 2), ("50000 100000", 1), ("150000 100000", 2), ("", 2), ("nonsense", 2)],
)
def test_no_more_threads_than_the_container_has_cores(
    two_threads, tmp_path, monkeypatch, quota, count
):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(thread_count, "_QUOTA", tmp_path / "cpu.max")
    assert thread_count.available_threads() == count


def test_no_more_threads_than_cores_of_the_process(two_threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    assert thread_count.available_threads() == 1


@pytest.mark.parametrize(
    ("function", "products", "elements"),
    [
        (lambda x: x + 1, 0, 6),
        (lambda x: x @ x.T, 12, 0),
        (lambda x: x.mT, 0, 0),
        (lambda x: torch.linalg.cholesky(x.mT @ x + torch.eye(3)), 18 + 27, 9 + 9),
        (lambda x: torch.tensor(1.0), 0, 0),
    ],
)
def test_arithmetic(function, products, elements):
    x = torch.ones(2, 3)
    with thread_count.Arithmetic() as counted:
        function(x)
    assert counted.elements == elements
    assert counted.total == pytest.approx(products / 16 + elements)


def test_functions_that_are_computed_one_by_one_are_counted_apart():
    x = torch.ones(2, 3)
    with thread_count.Arithmetic() as counted:
        x.lgamma() + x.exp()
        x.logsumexp(1)
    assert counted.special == 12
    assert counted.elements == 24


SMALL = textwrap.dedent("""
    import torch, pyro, pyro.distributions as dist, pyro_scale as ps
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(30), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
    x = torch.linspace(-1, 1, 569 * 30).sin().reshape(569, 30)
    sampler = ps.BAOA(model, lr=0.1, precondition=None, compile=True)
    length = {"num_samples": 20, "warmup_steps": 20, "thinning": 1, "num_chains": 1}
    sampler.run((x, x[:, 0]), **length, batch_size=None, seed=0, progress=False)
    draws = sampler.get_samples()["w"].double().sum(1)
    print(sampler.diagnostics().attrs["program"], x.double().sum().item().hex())
    print(*[one.hex() for one in draws.tolist()])
""")


def draws_with(number):
    """The small model's program, what its data add up to, and each draw, in a process that is told
    a number of threads: which of them is another says where a difference came from."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if number is not None:
        environment["OMP_NUM_THREADS"] = number
    command = [sys.executable, "-c", SMALL]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.fixture(scope="module")
def draws_of_one_thread():
    return draws_with("1")


@pytest.mark.slow
@pytest.mark.parametrize("number", ["0", "64", "many", None])
def test_draws_do_not_depend_on_the_environment(number, draws_of_one_thread):
    """Small models: whatever the number of threads is said to be, the draws are those of one."""
    assert draws_with(number) == draws_of_one_thread
