"""The processes of a run: each one's part of the work, and their messages.

All processes make the same decisions, from the same settings and measurements. They exchange
messages between the stages of a run, and within its steps only if they share out rows.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import pickle
import secrets
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils import _pytree as pytree

from pyro_scale.distributed.shares import Rows, Share
from pyro_scale.errors import ArgumentError, Code, PyroScaleError, PyroScaleWarning, RankError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LOG = logging.getLogger("pyro_scale")

T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")

#: Values of the argument `distributed=`.
Distributed = Literal["auto", "all", False]
#: Timeout of a process group that is made here: ranks wait for the slowest one.
_TIMEOUT = timedelta(days=7)
#: Seconds after which a rank logs that it is waiting.
_LONG = 60.0
#: How long to wait for ranks that may be alive after one has died, to find out which one.
_PATIENCE = timedelta(seconds=5)


class RankFailure(NamedTuple):
    """An error on one rank, in a form that can be sent to the other ranks.

    Attributes:
        kind: the error's class.
        message: the error's text.
        code: section of the documentation on the error; None if the error is not one of this
            library, or has no section.
    """

    kind: type[BaseException]
    message: str
    code: Code | None

    @classmethod
    def from_error(cls, error: BaseException) -> Self:
        """A description of an error that can be pickled and sent to other ranks: its class, text
        and section of the documentation.
        """
        code = error.code if isinstance(error, PyroScaleError) else None
        return cls(type(error), format(error), code)

    def as_error(self, rank: int, otherwise: str = "") -> PyroScaleError:
        """The error to raise on other ranks: of the same class if that is one of this library,
        otherwise a `RankError`. Returned, not raised.

        Args:
            rank: number of the rank on which the error was raised.
            otherwise: text that a `RankError` has between the rank's number and the name of the
                error's class.
        """
        if issubclass(self.kind, PyroScaleError):
            return self.kind(f"rank {rank}: {self.message}", code=self.code)
        return RankError(f"rank {rank}{otherwise}: {self.kind.__name__}: {self.message}")


class Workers:
    """The processes of a run, numbered from 0; the number of a process is its rank.

    All processes have to call the same methods in the same order. An error that one of them raises
    is raised by the others at their next call, and a `RankError` if one has died.

    Args:
        rank: number of this process.
        world: number of processes.
        keeps_all: True if every rank keeps the draws of all chains; if False, rank 0 does, and the
            others keep those of their own chains.
        teams: (this rank's team, number of teams), where chains are divided among teams. The ranks
            of a team move the same chains. None if each rank is a team of its own.
        rows: this rank's part of every minibatch of its team; None if the rank takes all rows.
        group: torch's process group of these ranks; None for the default group.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        keeps_all: bool = True,
        teams: tuple[int, int] | None = None,
        rows: Rows | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        self.rank, self.world, self.keeps_all = rank, world, keeps_all
        self.team, self.num_teams = teams or (rank, world)
        self.rows = rows
        self._group = group
        self._calls, self._is_over = 0, False
        self._name = secrets.token_hex(8)
        if not self.is_alone:
            self._name = self.broadcast(self._name, "the beginning of a run")
            if len(set(self.gather(keeps_all, "who keeps draws"))) > 1:
                self._is_over = True  # on all ranks
                raise ArgumentError(
                    "distributed='all' on some ranks and 'auto' on others: pass the same on all"
                )

    @classmethod
    def from_group(cls, distributed: Distributed, mesh: DeviceMesh | None = None) -> Workers:
        """The ranks of torch's process group, if there is one or if torchrun started this process;
        otherwise `ALONE`.

        An existing group stays as it is; a group that is made here ends with the process.

        Args:
            distributed: the user's argument of `run`: "auto" or "all" to share the work among ranks
                ("all": every rank keeps all draws), False for this process alone.
            mesh: device mesh with dimensions "chain" and "data". Ranks that differ only along
                "data" move the same chains, each on a part of every minibatch. None if ranks share
                out chains only.

        Raises:
            ArgumentError: `distributed` has another value than "auto", "all" or False; the group
                cannot send CPU tensors; the mesh has other dimensions, or lacks some of the ranks.
        """
        if distributed not in ("auto", "all", False):
            raise ArgumentError(f"distributed={distributed!r}: pass 'auto', 'all' or False")
        if distributed is False or not dist.is_available():
            return ALONE
        if not dist.is_initialized():
            if not dist.is_torchelastic_launched():
                return ALONE
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            with _log_if_long("processes to call run"):
                dist.init_process_group(backend, timeout=_TIMEOUT)
            atexit.register(_end_group)
        elif dist.get_world_size() > 1 and "gloo" not in _backends():
            raise ArgumentError(
                f"the process group's backend is {_backends()}, which cannot send CPU tensors: "
                "make the group with backend='cpu:gloo,cuda:nccl', or pass distributed=False to "
                "ignore it"
            )
        if dist.get_world_size() == 1:
            return ALONE
        rank, world, keeps_all = dist.get_rank(), dist.get_world_size(), distributed == "all"
        if mesh is None:
            return cls(rank, world, keeps_all)
        if mesh.mesh_dim_names != ("chain", "data") or mesh.size() != world:
            raise ArgumentError(
                f"mesh={mesh!r}: pass init_device_mesh(device, (C, D), mesh_dim_names=('chain', "
                f"'data')) with C D = {world}, the number of processes"
            )
        teams = mesh.get_local_rank("chain"), mesh.size(0)
        place, group = mesh.get_local_rank("data"), mesh.get_group("data")
        part = Rows(place, mesh.size(1), group, mesh.device_type)
        return cls(rank, world, keeps_all, teams, part if part.world > 1 else None)

    @classmethod
    def that_are_left(cls) -> Workers:
        """The processes that are still connected after a run: those of torch's process group if it
        still exists, otherwise this process alone (`ALONE`).
        """
        return cls.from_group("all") if dist.is_available() and dist.is_initialized() else ALONE

    @property
    def is_alone(self) -> bool:
        """Whether there is one process only."""
        return self.world == 1

    @property
    def is_first(self) -> bool:
        """Whether this process is rank 0, which shows progress, warns, and keeps the draws of all
        chains.
        """
        return self.rank == 0

    @property
    def has_all(self) -> bool:
        """Whether this rank keeps the draws of all chains after a run, and not only those of its
        own chains.
        """
        return self.keeps_all or self.is_first

    def use_rows_by_rank(self, count: int, num_data: int | None, digest: str) -> int:
        """Declares that every rank was called with rows of its own (`rows_by_rank=True`), and
        returns N, the number of rows of the whole data.

        Args:
            count: this rank's number of rows.
            num_data: N as the user passed it, of which every rank then has an equal part; None for
                the sum of the ranks' numbers of rows.
            digest: hash of this rank's rows, to compare them with those of other teams.

        Raises:
            ArgumentError: ranks do not divide minibatches among themselves, so that chains would
                see these rows alone; or teams have different rows, so that their chains would have
                different posteriors.
        """
        if self.rows is None:
            raise ArgumentError(
                "rows_by_rank=True: without a mesh, each chain would see the rows of one rank "
                "only: pass mesh= with two or more ranks along 'data', which sum their gradients"
            )
        weight = count if num_data is None else 1
        facts = self.gather((self.rows.rank, weight, digest), "the number of rows")
        first: dict[int, Any] = {}
        for rank, (place, *rows) in enumerate(facts):
            other_rank, other_rows = first.setdefault(place, (rank, rows))
            if rows != other_rows:
                raise ArgumentError(
                    f"rows_by_rank=True: ranks {other_rank} and {rank} are at the same place along "
                    "'data' and have different rows, so their chains would have different "
                    "posteriors: pass the same rows on all ranks with the same "
                    "mesh.get_local_rank('data')"
                )
        total = sum(rows[0] for _, rows in first.values())
        self.rows = self.rows._replace(share=weight / total)
        return num_data or total

    @property
    def read_together(self) -> bool:
        """Whether computations on a run's draws are divided among processes by rows of data: there
        are several processes, and each has all draws and all rows.
        """
        return self.keeps_all and self.has_all_rows and not self.is_alone

    @property
    def has_all_rows(self) -> bool:
        """Whether this process was called with all rows of the data; False if each process was
        called with other rows (`rows_by_rank=True`).
        """
        return self.rows is None or self.rows.share is None

    @property
    def share(self) -> Share:
        """The items of a sequence that this process works on, where all processes divide a sequence
        among themselves: every n-th one, with n processes.
        """
        return Share(self.rank, self.world)

    def chains(self, count: int) -> range:
        """The numbers of the chains that this rank moves, of `count` chains in all; ranks of one
        team have the same.
        """
        return range(self.team, count, self.num_teams)

    def check(self, num_chains: int) -> None:
        """Checks that there are enough chains for every team of ranks to have one. Returns None if
        so.

        Raises:
            ArgumentError: there are fewer chains than teams.
        """
        if num_chains < self.num_teams:
            raise ArgumentError(
                f"num_chains={num_chains} on {self.world} processes leaves some without a chain: "
                f"pass num_chains={self.num_teams} or more, start fewer processes, share batches "
                "out as well (mesh=), or run all chains on each process (distributed=False)"
            )

    # ------------------------------------------------------------------ messages

    def gather(self, value: T, what: str) -> list[T]:
        """A list of every rank's `value`, in the order of ranks, on every rank. All ranks must call
        this.

        Args:
            value: this rank's value; anything that can be pickled.
            what: name of the value in error messages.

        Raises:
            RankError: another rank has failed, or makes another call.
        """
        if self.is_alone:
            return [value]
        self._meet(what)
        values: list[Any] = [None] * self.world
        self._call(what, lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def gather_at_first(self, value: T, what: str) -> list[T] | None:
        """A list of every rank's `value`, in the order of ranks, on rank 0; None on the other
        ranks. All ranks must call this; `what` is the value's name in error messages.

        Raises:
            RankError: another rank has failed, or makes another call.
        """
        if self.is_alone:
            return [value]
        self._meet(what)
        values: list[Any] | None = [None] * self.world if self.is_first else None
        self._call(what, lambda: dist.gather_object(value, values, self._root, self._group))
        return values

    def broadcast(self, value: T, what: str) -> T:
        """Rank 0's value, on every rank; the `value` that other ranks pass is ignored. All ranks
        must call this; `what` is the value's name in error messages.

        Raises:
            RankError: another rank has failed, or makes another call.
        """
        if self.is_alone:
            return value
        self._meet(what)
        return self.broadcast_unchecked(value, what)

    def map(
        self, function: Callable[[Item], T], items: Iterable[Item], what: str, device: torch.device
    ) -> list[T]:
        """A list of function(item) for all items, in their order, on every process. Each process
        computes some of them.

        Args:
            function: function of an item that returns a pytree of tensors.
            items: the items, the same on all processes.
            what: name of the results in error messages.
            device: device of the returned tensors.

        Raises:
            RankError: another rank has failed, or makes another call.
        """
        return self.gather_shares([function(item) for item in self.share.of(items)], what, device)

    def gather_shares(self, items: Sequence[T], what: str, device: torch.device) -> list[T]:
        """The items of all processes in their original order, on every process. Each process passes
        the items that the attribute `share` assigned to it.

        Args:
            items: this process's items, pytrees of tensors.
            what: name of the items in error messages.
            device: device of the returned tensors.

        Raises:
            RankError: another rank has failed, or makes another call.
        """
        if self.is_alone:
            return list(items)
        by_rank = self.gather(_to_device(list(items), torch.device("cpu")), what)
        rounds = range(max(map(len, by_rank)))
        ordered = [part[turn] for turn in rounds for part in by_rank if turn < len(part)]
        return [_to_device(item, device) for item in ordered]

    def agree(self, holds: bool, what: str) -> bool:
        """Whether a condition is true on all processes: True, on every process, if each of them
        passes `holds=True`. `what` is the condition's name in error messages.

        Raises:
            RankError: another rank has failed, or makes another call.
        """
        return all(self.gather(holds, what))

    def reduce(self, function: Callable[[list[T]], Result], value: T, what: str) -> Result:
        """The result of a function of the list of all processes' values, in the order of ranks.
        Rank 0 computes it, every rank gets it. `what` is the values' name in error messages.

        Raises:
            RankError: another rank has failed, or makes another call.
        """
        values = self.gather_at_first(value, what)
        return self.broadcast(None if values is None else function(values), what)  # type: ignore[return-value]

    # messages without a check that all ranks are well, for ranks that serve rank 0 (sums.py)

    @property
    def is_over(self) -> bool:
        """Whether the processes can no longer exchange messages, because a rank has failed or been
        interrupted.
        """
        return self._is_over

    def broadcast_unchecked(self, value: T, what: str) -> T:
        """Rank 0's value, on every rank; as `broadcast`, but without a check that no rank has
        raised an error. `what` is the value's name in error messages."""
        values = [value]
        self._call(what, lambda: dist.broadcast_object_list(values, self._root, self._group))
        return values[0]

    def sum(self, vector: Tensor, what: str) -> Tensor:
        """The sum of a CPU tensor over ranks, bitwise the same on all. The tensor itself is
        overwritten, and returned. `what` is its name in error messages."""
        self._call(what, lambda: dist.all_reduce(vector, group=self._group))
        return vector

    def least(self, count: int) -> int:
        """The smallest of the counts (such as draws written to disk) that ranks have published so
        far, after this rank's `count` has been published; 0 if a rank has published none. No rank
        waits, so this may be called within steps.
        """
        if self.is_alone:
            return count
        store = _store()
        places = [f"pyro_scale/{self._name}/count/{rank}" for rank in range(self.world)]
        try:
            store.set(places[self.rank], str(count))
            return min(map(int, store.multi_get(places))) if store.check(places) else 0
        # the process that holds the store has ended; the next message raises the error
        except RuntimeError:
            return 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A context for a block that all ranks run: if the block ends with an error on one rank,
        the others raise an error at the end of the block, or at their next message. Warnings of
        this library are shown by rank 0 only.

        Raises:
            RankError: another rank has failed.
        """
        if self.is_alone:
            yield
            return
        try:
            with warnings.catch_warnings():
                if not self.is_first:  # rank 0 gives the same warnings
                    warnings.simplefilter("ignore", PyroScaleWarning)
                yield
        except BaseException as error:
            if not self._is_over:
                with contextlib.suppress(PyroScaleError):
                    self._meet("the end", error)
            raise
        self._meet("the end")

    def _meet(self, what: str, error: BaseException | None = None) -> None:
        """Waits for all ranks, and raises if one of them has failed or makes another call.

        Args:
            what: name of the call in error messages; ranks must pass the same.
            error: the error that this rank tells the others, in which case nothing is raised here;
                None if it has none.
        """
        self._calls += 1
        states: list[Any] = [None] * self.world
        failure = None if error is None else RankFailure.from_error(error)
        state = what, failure
        self._call(what, lambda: dist.all_gather_object(states, state, group=self._group))
        failed = [(rank, of_rank) for rank, (_, of_rank) in enumerate(states) if of_rank]
        elsewhere = [rank for rank, (place, _) in enumerate(states) if place != what]
        self._is_over = bool(failed or elsewhere)
        if error is not None:
            return
        if failed:
            rank, of_rank = failed[0]
            raise of_rank.as_error(rank, " has failed, so this one ends")
        if elsewhere:
            raise RankError(
                f"rank {elsewhere[0]} is at {states[elsewhere[0]][0]}, this one at {what}: every "
                "rank has to make the same calls in the same order"
            )

    def _call(self, what: str, call: Any) -> None:
        """Makes a call of `torch.distributed`. If the call fails, raises an error that names the
        ranks that have not made the same call.

        Args:
            what: name of the call in error messages.
            call: function without arguments that makes the call.

        Raises:
            RankError: the call has failed, as a rank has died or the group's timeout was too short.
        """
        place, store = f"pyro_scale/{self._name}/{self._calls}", _store()
        try:
            store.set(f"{place}/{self.rank}", "")
            with _log_if_long(f"ranks at {what}"):
                call()
        except KeyboardInterrupt:  # the next message would be mistaken for the one that is missing
            self._is_over = True
            raise
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            self._is_over = True
            missing = [rank for rank in range(self.world) if not _comes(store, f"{place}/{rank}")]
            who = f"rank {' or '.join(map(str, missing))}" if missing else "a rank"
            raise RankError(
                f"{who} has not reached {what}: it has died, or the process group's timeout was "
                f"too short; see its own output ({error})"
            ) from error

    @property
    def _root(self) -> int:
        """The number that rank 0 of these processes has in torch's default process group."""
        return 0 if self._group is None else dist.get_global_rank(self._group, 0)


#: A process by itself.
ALONE = Workers()


@contextlib.contextmanager
def _log_if_long(whom: str) -> Iterator[None]:
    """A context that logs a warning if its block, in which this process waits for other processes,
    takes longer than 60 seconds. `whom` says for which processes.
    """
    text = f"waiting for other {whom}, for {_LONG:.0f} s: every rank has to make the same calls"
    timer = threading.Timer(_LONG, _LOG.warning, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _to_device(values: T, device: torch.device) -> T:
    """A pytree in which all tensors are on the device; other leaves are unchanged."""
    moved: T = pytree.tree_map_only(Tensor, lambda value: value.to(device), values)
    return moved


def _store() -> Any:
    """The key-value store of torch's default process group, which all processes can read and
    write."""
    return dist.distributed_c10d._get_default_store()


def _comes(store: Any, name: str) -> bool:
    """Whether a key is, or appears within 5 seconds, in the store that all processes can read;
    False also if the store is gone, because the process that holds it has ended.
    """
    try:
        store.wait([name], _PATIENCE)
    except RuntimeError:
        return False
    return True


def _backends() -> str:
    return str(dist.get_backend_config())


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
