"""Reads users' data loaders, without changing their state or torch's."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

from pyro_scale.core import rows
from pyro_scale.core.exclusive import own_generator
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import DataError


def is_iterable_style(loader: Any) -> bool:
    """Whether a loader is torch's DataLoader over an IterableDataset, which cannot be read by
    index.
    """
    return isinstance(loader, torch_data.DataLoader) and isinstance(
        loader.dataset, torch_data.IterableDataset
    )


def read_by_index(
    loader: torch_data.DataLoader[Any],
    order: Iterable[list[int]],
    seed: int,
    device: torch.device | None,
) -> Iterator[Arguments]:
    """Yields the user's rows in batches of our choice, as the model's arguments, with the loader's
    workers and collate function.

    Args:
        loader: the user's loader, over a data set that can be read by index.
        order: row indices of each batch.
        seed: seed of torch's generator, for data sets that draw augmentations.
        device: device to which batches are moved; None to leave them where they are.
    """
    workers = {}
    if loader.num_workers > 0:
        workers = {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
            "worker_init_fn": loader.worker_init_fn,
        }
    reloader = torch_data.DataLoader(
        loader.dataset,
        batch_sampler=order,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        **workers,
    )
    return (receive(batch, device) for batch, _ in isolate(reloader, seed))


def isolate(
    loader: Iterable[Any], seed: int, state: Mapping[str, Any] | None = None
) -> Iterator[tuple[Any, dict[str, Any] | None]]:
    """Yields the batches of one pass over a loader, with a random generator of its own.

    Samplers, and data sets that draw augmentations, use torch's generator, which is seeded for
    them; other code does not see the seeded one.

    Args:
        loader: the user's loader.
        seed: seed of the generator.
        state: state from which to continue; None for the beginning. Only torchdata's
            `StatefulDataLoader` has states.

    Yields:
        (Batch, loader's state before the batch; None for a loader without states).
    """
    stateful: Any = loader if hasattr(loader, "load_state_dict") else None
    with own_generator(seed):
        if state is not None:
            stateful.load_state_dict(state["loader"])
        loaded = iter(loader)
        drawn = torch.random.get_rng_state() if state is None else state["generator"]
    while True:
        before = None
        if stateful is not None:
            before = {"loader": stateful.state_dict(), "generator": drawn}
        with own_generator():
            torch.random.set_rng_state(drawn)
            try:
                batch = next(loaded)
            except StopIteration:
                return
            except Exception as error:
                if not getattr(loader, "num_workers", 0):
                    raise
                dead = worker_error(error, loaded)
                if dead or not getattr(loader, "persistent_workers", False):
                    _stop_workers(loader, loaded)
                if dead is None:
                    raise
                raise dead from error
            drawn = torch.random.get_rng_state()
        yield batch, before


def _stop_workers(loader: Any, loaded: Iterator[Arguments]) -> None:
    """Stops the workers of `loaded`, an iterator of `loader`, now. The error that is raised keeps
    the iterator in a cycle of references; if Python collects that cycle later, multiprocessing
    closes the workers' pipes twice, the second time perhaps a file that has been opened since. A
    loader that keeps its workers starts new ones when it is read again.
    """
    if callable(stop := getattr(loaded, "_shutdown_workers", None)):
        stop()
    if getattr(loader, "persistent_workers", False):
        loader._iterator = None


#: Cause and advice by a pattern of torch's message about a worker or of how it ended; the first
#: pattern that matches counts.
_DEATHS = {
    r"shared memory|file </torch_|Bus error|SIGBUS": "out of shared memory: give the machine more "
    "of /dev/shm (docker run --shm-size), or pass",
    r"ancdata": "out of file descriptors: call "
    "torch.multiprocessing.set_sharing_strategy('file_system') first, or pass",
    r"signal: Killed|SIGKILL": "it was killed, most often for want of memory: pass",
    r"exit code": "its own code ended it, as num_workers=0 would show: pass",
    r"worker \(pid|Pin memory thread": "most often it ran out of memory: pass",
    r"DataLoader timed out": "it read for longer than the loader's timeout=: raise that, or pass",
}


def worker_error(error: BaseException, loaded: Any = None) -> DataError | None:
    """The error that explains why a worker process of a loader died; None if `error` has another
    cause, such as the data set's code. Returns the error and does not raise it.

    Args:
        error: exception that torch raised.
        loaded: iterator of the loader, whose processes have exit codes; None if it is not known.
    """
    text = str(error).strip()
    place = traceback.extract_tb(error.__traceback__)[-1:]
    is_broken = isinstance(error, OSError | EOFError) and "multiprocessing" in str(place)
    is_known = type(error) is RuntimeError and any(re.search(death, text) for death in _DEATHS)
    if not (is_broken or is_known):
        return None
    codes = {getattr(worker, "exitcode", None) for worker in getattr(loaded, "_workers", ())}
    ends = [_in_words(code) for code in codes if code not in (None, 0, -signal.SIGTERM)]
    shown = "; ".join([*text.splitlines()[-1:], *ends]) or type(error).__name__
    reasons = [why for pattern, why in _DEATHS.items() if re.search(pattern, shown)]
    why = reasons[0] if reasons else "most often it ran out of memory: pass"
    return DataError(
        f"a worker of the loader exited unexpectedly ({shown}): {why} a loader with fewer workers "
        "or num_workers=0, and go on with resume=",
        code="workers",
    )


def _in_words(exit_code: int) -> str:
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


def receive(batch: Any, device: torch.device | None) -> Arguments:
    """The model's arguments from a loader's batch (tensors, or a tuple or dict of them), moved to a
    device; left where they are if `device` is None.

    Raises:
        DataError: an argument is not a tensor although it has rows.
    """
    arguments = rows.as_arguments(batch)
    check_tensors(arguments)
    return to_device(arguments, device)


def check_tensors(arguments: Arguments) -> None:
    """Raises for sparse matrices and the like among the arguments, which would pass as constants.

    Raises:
        DataError: there is one; the message names the argument.
    """
    for name, leaf in rows.named_leaves(arguments):
        if not isinstance(leaf, Tensor) and getattr(leaf, "ndim", 0) > 0:
            raise DataError(
                f"argument {name} is a {type(leaf).__name__}, not a tensor, so its rows would not "
                "be known as rows: pass an array of it (.toarray())",
                code="not-rows",
            )


def to_device(arguments: Arguments, device: torch.device | None) -> Arguments:
    """The arguments with their tensors of rows moved to a device; left where they are if `device`
    is None. Lazy negations and conjugations are resolved.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device or tensor.device).resolve_conj().resolve_neg()

    return rows.map_rows(move, arguments)
