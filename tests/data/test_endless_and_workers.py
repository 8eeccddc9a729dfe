"""Loaders that do not end, and loaders whose workers do."""

import gc
import itertools
import os
import signal
import threading
from multiprocessing.connection import Connection

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import normal_mean
from runs import QUIET
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import pyro_scale as ps
from pyro_scale.data.loaders import worker_error
from pyro_scale.errors import DataError

N = 600
ROWS = 1 + torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BY_HAND = {"num_samples": 20, "warmup_steps": 20, "thinning": 1, "num_chains": 2, **QUIET}


normal = normal_mean(sd=10.0, name="mean")


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(20, dtype=torch.float64)


class Cycle:
    def __iter__(self):
        return itertools.cycle(ROWS.split(20))


LOADERS = {
    "a data set": lambda: DataLoader(Endless(), batch_size=None),
    "an iterable": Cycle,
}
#: What takes all rows.
PASSES = {
    "BAOA": lambda loader: ps.BAOA(normal, num_data=N).run(loader, **QUIET),
    "SGHMC": lambda loader: ps.SGHMC(normal, precondition=None, num_data=N).run(loader, **QUIET),
    "control variates": lambda loader: ps.BAOA(
        normal, lr=0.01, control_variates=True, num_data=N
    ).run(loader, **BY_HAND),
    "Laplace": lambda loader: ps.Laplace(normal, num_data=N).run(loader, **QUIET),
    "EKF": lambda loader: ps.EKF(normal, num_data=N).run(loader, **QUIET),
    "NUTS": lambda loader: ps.NUTS(normal, num_data=N).run(loader, **QUIET),
    "sbc": lambda loader: ps.sbc(ps.BAOA(normal, num_data=N), loader, num_simulations=20, **QUIET),
}


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_through_a_loader_without_an_end_says_so(name, loader):
    with pytest.raises(DataError, match=r"has given 620 rows in one pass, more than N = 600"):
        PASSES[name](LOADERS[loader]())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_scale.errors.PyroScaleWarning")
@pytest.mark.parametrize("loader", LOADERS)
def test_steps_that_take_no_pass_run_on_it(loader):
    run = ps.BAOA(normal, lr=0.01, num_data=N).run(LOADERS[loader](), **BY_HAND)
    assert run.get_samples()["mean"].shape == (40,)
    with pytest.raises(DataError, match="620 rows in one pass"):
        run.log_likelihood()
    fit = ps.VI(normal, num_data=N).run(LOADERS[loader](), num_steps=5, **QUIET)
    assert fit.fit.log_posterior.num_data == N


class Sharded(IterableDataset):
    """As torch's documentation has it."""

    def __iter__(self):
        worker = get_worker_info()
        return iter(ROWS if worker is None else ROWS[worker.id :: worker.num_workers])

    def __len__(self):
        return N


@pytest.mark.slow
def test_nuts_takes_all_rows_of_a_stream():
    """And not its first batch for all of them."""
    draws = ps.NUTS(normal).run(DataLoader(Sharded(), batch_size=20), **QUIET).get_samples()["mean"]
    precision = N + 0.01
    z = (draws.mean() - ROWS.sum() / precision) * precision**0.5
    assert abs(z) < 5 / 1000**0.5  # of 4,000 draws, at least 1,000 are worth as much
    assert draws.std() * precision**0.5 == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lr", [0.001, pytest.param("auto", marks=pytest.mark.long)])
def test_streams_with_workers_give_the_same_draws(lr):
    """One worker reads the rows in their order, two in turn: batch by batch of each."""
    how = {**BY_HAND, "num_chains": 1, "num_samples": 60}
    draws = [
        ps.BAOA(normal, lr=lr)
        .run(DataLoader(Sharded(), batch_size=32, num_workers=workers), **how)
        .get_samples()["mean"]
        for workers in (0, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert draws[2].shape == draws[0].shape


class Ends(Dataset):
    """A data set whose worker is gone after so many rows."""

    def __init__(self, how, left):
        self.how, self.left = how, left

    def __len__(self):
        return N

    def __getitem__(self, i):
        self.left -= 1
        if self.left < 0:
            self.how()
        return ROWS[i]


class EndsInOrder(Ends, IterableDataset):
    def __iter__(self):
        return (self[i] for i in range(N))


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory_to_share():
    raise RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("data", [Ends, EndsInOrder])
@pytest.mark.parametrize("left", [5, 400])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (killed, "killed|exited unexpectedly"),
        (lambda: os._exit(3), "exited unexpectedly"),
        (out_of_memory_to_share, r"out of shared memory.*/dev/shm"),
    ],
    ids=["killed", "ended", "no shared memory"],
)
def test_a_worker_that_dies_is_an_error_with_its_reason(how, reason, left, data):
    loader = DataLoader(data(how, left), batch_size=32, num_workers=2)
    settings = {**BY_HAND, "num_samples": 400, "num_chains": 1}
    with pytest.raises(DataError, match=rf"a worker of the loader .*({reason})") as raised:
        ps.BAOA(normal, lr=0.001, compile=False).run(loader, **settings)
    assert raised.value.code == "workers"


class EndsOnce(IterableDataset):
    """A data set whose worker is killed once, and runs to its end from then on."""

    def __init__(self, flag):
        self.flag = flag

    def __iter__(self):
        if not self.flag.exists():
            self.flag.touch()
            killed()
        return iter(ROWS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_loader_that_keeps_its_workers_runs_again_after_one_died(tmp_path):
    data = EndsOnce(tmp_path / "ended")
    loader = DataLoader(data, batch_size=32, num_workers=1, persistent_workers=True)
    sampler = ps.BAOA(normal, lr=0.001, compile=False, num_data=N)
    with pytest.raises(DataError, match="a worker of the loader"):
        sampler.run(loader, **BY_HAND)
    assert sampler.run(loader, **BY_HAND).get_samples()["mean"].shape == (40,)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fails", [killed, lambda: 1 / 0], ids=["killed", "an error of its own"])
def test_pipes_of_workers_are_closed_once(fails, monkeypatch):
    """Closed twice, the second time may close a file that was opened since."""
    failed, close = [], Connection._close

    def closing(connection, *args):
        try:
            close(connection, *args)
        except OSError as error:
            failed.append(error)

    monkeypatch.setattr(Connection, "_close", closing)
    gc.collect()
    gc.disable()  # the error's cycle of references is collected at once below
    try:
        for _ in range(5):
            loader = DataLoader(Ends(fails, 5), batch_size=32, num_workers=2)
            with pytest.raises((DataError, ZeroDivisionError)):
                ps.BAOA(normal, lr=0.001, compile=False).run(loader, **BY_HAND)
            del loader
    finally:
        gc.enable()
    feeding = [thread for thread in threading.enumerate() if thread.name == "QueueFeederThread"]
    gc.collect()
    for thread in feeding:
        thread.join(10)
    assert not failed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "want of memory"),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is", "out of shared memory"),
        ("DataLoader worker (pid 7) exited unexpectedly with exit code 1.", "own code ended it"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "most often it ran out of memory"),
        ("DataLoader timed out after 5 seconds", "timeout="),
        ("received 0 items of ancdata", "set_sharing_strategy"),
    ],
)
def test_what_torch_says_of_workers(text, reason):
    assert reason in str(worker_error(RuntimeError(text)))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2"),
        FileNotFoundError("/data/torch_rows"),
        ConnectionError("the data set's own"),
        ValueError("Caught ValueError in DataLoader worker process 0"),
    ],
)
def test_errors_of_the_data_sets_own_stay(error):
    assert worker_error(error) is None


@pytest.mark.filterwarnings("ignore::pyro_scale.errors.PyroScaleWarning")
def test_what_torch_tells_the_main_thread_of_workers_is_told_with_its_reason():
    """It raises in whatever the main thread does."""

    def model(x):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    with pytest.raises(DataError, match=r"a worker of the loader .* want of memory"):
        ps.explain(model, ROWS)


def padded(rows):
    """To the longest of the batch, whose rows are as long as they are large."""
    return torch.ones(len(rows), 1 + int(10 * max(row.abs() for row in rows)), dtype=torch.float64)


def of_lengths(x):
    mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=x.dtype), 10.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x.mean(1))


@pytest.mark.filterwarnings("ignore::pyro_scale.errors.PyroScaleWarning")
@pytest.mark.parametrize(
    "run",
    [
        lambda loader: ps.BAOA(of_lengths).run(loader, **QUIET),
        lambda loader: ps.BAOA(of_lengths, lr=0.1).run(loader, **BY_HAND),
        lambda loader: ps.NUTS(of_lengths).run(loader, **QUIET),
        lambda loader: ps.VI(of_lengths).run(loader, num_steps=20, num_chains=2, **QUIET),
    ],
    ids=["BAOA", "BAOA by hand", "NUTS", "VI"],
)
def test_batches_padded_to_their_own_longest_are_to_be_padded_alike(run):
    loader = DataLoader(list(ROWS), batch_size=32, shuffle=True, collate_fn=padded)
    with pytest.raises(DataError, match=r"batches differ in the shape .* pad all rows to one"):
        run(loader)
