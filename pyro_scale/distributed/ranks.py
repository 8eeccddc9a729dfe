"""The processes of a run, what each does of it, and what they tell each other.

Every process takes the same decisions from the same facts.  They talk between stages, never
within steps.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import pickle
import secrets
import threading
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

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

#: What `distributed=` can be.
Distributed = Literal["auto", "all", False]
#: How long a rank waits for the others, in a group that is made here: ranks wait for the slowest.
_TIMEOUT = timedelta(days=7)
#: Seconds after which a rank says that it waits.
_LONG = 60.0
#: How long the others are waited for once one has died, to tell which.
_PATIENCE = timedelta(seconds=5)


class Ranks:
    """The processes of a run; each has a number, its rank.

    All of them call the same methods in the same order.  What one of them raises is raised in the
    others at their next call, and a `RankError` where one has died.

    Args:
        rank: of this process.
        world: how many there are.
        keeps_all: whether every rank keeps all draws; else rank 0 does, and others keep those of
            their own chains.
        teams: how the chains are shared out: (this rank's team, how many there are); a team each
            by default.
        rows: this rank's part of every batch of its team; None where it takes all.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        keeps_all: bool = True,
        teams: tuple[int, int] | None = None,
        rows: Rows | None = None,
    ):
        self.rank, self.world, self.keeps_all = rank, world, keeps_all
        self.team, self.num_teams = teams or (rank, world)
        self.rows = rows
        self._calls, self._is_over = 0, False
        self._name = secrets.token_hex(8)
        if not self.is_alone:
            self._name = self.of_first(self._name, "the beginning of a run")
            if len(set(self.of_all(keeps_all, "who keeps draws"))) > 1:
                self._is_over = True  # on all ranks
                raise ArgumentError(
                    "distributed='all' on some ranks and 'auto' on others: pass the same on all"
                )

    @classmethod
    def of(cls, distributed: Distributed, mesh: DeviceMesh | None = None) -> Ranks:
        """Those of torch's process group, if there is one or if torchrun started this process.

        A group that is there already stays as it is; one that is made here ends with the process.

        Args:
            distributed: as `run` takes it.
            mesh: of dimensions "chain" and "data": ranks that differ in the latter alone move the
                same chains, on a part of each batch.

        Raises:
            ArgumentError: another value than "auto", "all" or False; a group that cannot pass
                tensors of processors on; a mesh of other dimensions, or not of all ranks.
        """
        if distributed not in ("auto", "all", False):
            raise ArgumentError(f"distributed={distributed!r}: pass 'auto', 'all' or False")
        if distributed is False or not dist.is_available():
            return ALONE
        if not dist.is_initialized():
            if not dist.is_torchelastic_launched():
                return ALONE
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            with _telling("processes to call run"):
                dist.init_process_group(backend, timeout=_TIMEOUT)
            atexit.register(_end)
        elif dist.get_world_size() > 1 and "gloo" not in _backends():
            raise ArgumentError(
                f"the process group's backend is {_backends()}, which passes no tensors of "
                "processors on: make it with backend='cpu:gloo,cuda:nccl', or pass "
                "distributed=False to leave it alone"
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

    @property
    def is_alone(self) -> bool:
        """Whether there is but one."""
        return self.world == 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which shows progress, warns and keeps all draws."""
        return self.rank == 0

    @property
    def has_all(self) -> bool:
        """Whether this rank is one that keeps all draws."""
        return self.keeps_all or self.is_first

    def own_rows(self, count: int, num_data: int | None, digest: str) -> int:
        """Has every rank of a team take its data for rows of its own; N.

        Args:
            count: of this rank's rows.
            num_data: N, of which every rank then has an equal part; by default the sum of counts.
            digest: of some of them, which tells them from others.

        Raises:
            ArgumentError: batches are not shared out, so that chains would see these rows alone;
                or teams have other rows, so that their chains would be on different posteriors.
        """
        if self.rows is None:
            raise ArgumentError(
                "rows_by_rank=True: a chain that sees the rows of one rank alone is not on the "
                "posterior of all: pass mesh= with two ranks or more along 'data', which sum their "
                "gradients"
            )
        own = count if num_data is None else 1
        told = self.of_all((self.team, self.rows.rank, own, digest), "the number of rows")
        first: dict[int, Any] = {}
        for rank, (_, place, *rows) in enumerate(told):
            of, known = first.setdefault(place, (rank, rows))
            if rows != known:
                raise ArgumentError(
                    f"rows_by_rank=True: ranks {of} and {rank} are at the same place along 'data' "
                    "and have other rows, so their chains would be on different posteriors: pass "
                    "the same rows on all ranks of mesh.get_local_rank('data')"
                )
        total = sum(rows[0] for _, rows in first.values())
        self.rows = self.rows._replace(share=own / total)
        return num_data or total

    @property
    def if_there(self) -> Ranks:
        """These, while their group is there; afterwards this process by itself."""
        return self if not self.is_alone and dist.is_initialized() else ALONE

    @property
    def share(self) -> Share:
        """What this rank takes of work that ranks share out."""
        return Share(self.rank, self.world)

    def chains(self, count: int) -> range:
        """The numbers of this rank's chains, of so many in all."""
        return range(self.team, count, self.num_teams)

    def check(self, num_chains: int) -> None:
        """Refuses fewer chains than ranks, or than teams of ranks.

        Raises:
            ArgumentError: there are.
        """
        if num_chains < self.num_teams:
            raise ArgumentError(
                f"num_chains={num_chains} on {self.world} processes leaves some without a chain: "
                f"pass num_chains={self.num_teams} or more, start fewer processes, share batches "
                "out as well (mesh=), or pass "
                "distributed=False to run all chains on each"
            )

    # ------------------------------------------------------------------ what they tell each other

    def of_all(self, value: T, what: str) -> list[T]:
        """Every rank's value, by rank.

        Args:
            value: this rank's; anything that can be pickled.
            what: it is, in words.

        Raises:
            RankError: another rank has failed, or is somewhere else.
        """
        if self.is_alone:
            return [value]
        self._meet(what)
        values: list[Any] = [None] * self.world
        self._call(what, lambda: dist.all_gather_object(values, value))
        return values

    def at_first(self, value: T, what: str) -> list[T] | None:
        """Every rank's value, by rank, on rank 0; None on others.

        Raises:
            RankError: another rank has failed, or is somewhere else.
        """
        if self.is_alone:
            return [value]
        self._meet(what)
        values: list[Any] | None = [None] * self.world if self.is_first else None
        self._call(what, lambda: dist.gather_object(value, values))
        return values

    def of_first(self, value: T, what: str) -> T:
        """Rank 0's value.

        Raises:
            RankError: another rank has failed, or is somewhere else.
        """
        if self.is_alone:
            return value
        self._meet(what)
        values = [value]
        self._call(what, lambda: dist.broadcast_object_list(values))
        return values[0]

    def in_turn(self, own: Sequence[T], what: str, device: torch.device) -> list[T]:
        """The items of all ranks, in their order, given those of this rank's share.

        Args:
            own: pytrees of tensors.
            what: they are, in words.
            device: where their tensors come to be.

        Raises:
            RankError: another rank has failed, or is somewhere else.
        """
        if self.is_alone:
            return list(own)
        told = self.of_all(_to(list(own), torch.device("cpu")), what)
        rounds = range(max(map(len, told)))
        items = [each[turn] for turn in rounds for each in told if turn < len(each)]
        return [_to(item, device) for item in items]

    # of those that work for rank 0, and do not ask each other what has become of them

    @property
    def is_over(self) -> bool:
        """Whether a rank has failed, so that nothing more can be told."""
        return self._is_over

    def tell(self, value: T, what: str) -> T:
        """Rank 0's value, which others wait for."""
        values = [value]
        self._call(what, lambda: dist.broadcast_object_list(values))
        return values[0]

    def add_up(self, vector: Tensor, what: str) -> Tensor:
        """The sum over ranks of a vector in a processor's memory, which takes its place: the same
        bits on all."""
        self._call(what, lambda: dist.all_reduce(vector))
        return vector

    def least(self, count: int) -> int:
        """Tells the others a count of this rank's, within steps: no rank waits for another.

        Returns:
            The least that ranks have told; 0 where not all have.
        """
        if self.is_alone:
            return count
        store = dist.distributed_c10d._get_default_store()
        places = [f"pyro_scale/{self._name}/count/{rank}" for rank in range(self.world)]
        try:
            store.set(places[self.rank], str(count))
            return min(map(int, store.multi_get(places))) if store.check(places) else 0
        except RuntimeError:  # who holds it is gone, as will be said when ranks meet
            return 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Ends on all ranks if it ends on one.

        Raises:
            RankError: another rank has failed.
        """
        if self.is_alone:
            yield
            return
        try:
            with warnings.catch_warnings():
                if not self.is_first:  # which would say the same
                    warnings.simplefilter("ignore", PyroScaleWarning)
                yield
        except BaseException as error:
            if not self._is_over:
                with contextlib.suppress(PyroScaleError):
                    self._meet("the end", error)
            raise
        self._meet("the end")

    def _meet(self, what: str, error: BaseException | None = None) -> None:
        """Waits for the others, and learns what became of them."""
        self._calls += 1
        told: list[Any] = [None] * self.world
        mine = None if error is None else (type(error), format(error), code_of(error))
        self._call(what, lambda: dist.all_gather_object(told, (what, mine)))
        failed = [(rank, why) for rank, (_, why) in enumerate(told) if why is not None]
        elsewhere = [rank for rank, (where, _) in enumerate(told) if where != what]
        self._is_over = bool(failed or elsewhere)
        if error is not None:
            return
        if failed:
            rank, (kind, why, code) = failed[0]
            if issubclass(kind, PyroScaleError):
                raise kind(f"rank {rank}: {why}", code=code)
            raise RankError(f"rank {rank} has failed, so this one ends: {kind.__name__}: {why}")
        if elsewhere:
            raise RankError(
                f"rank {elsewhere[0]} is at {told[elsewhere[0]][0]}, this one at {what}: every "
                "rank has to make the same calls in the same order"
            )

    def _call(self, what: str, call: Any) -> None:
        """Calls torch; names the ranks that have not come, if it cannot go on."""
        place = f"pyro_scale/{self._name}/{self._calls}"
        store = dist.distributed_c10d._get_default_store()
        try:
            store.set(f"{place}/{self.rank}", "")
            with _telling(f"ranks at {what}"):
                call()
        except KeyboardInterrupt:  # what the others say next would be taken for something else
            self._is_over = True
            raise
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            self._is_over = True
            missing = [rank for rank in range(self.world) if not _comes(store, f"{place}/{rank}")]
            who = f"rank {' or '.join(map(str, missing))}" if missing else "a rank"
            raise RankError(
                f"{who} has not come to {what}: it has died, or waits for longer than the process "
                f"group's timeout; its own output says why ({error})"
            ) from error


#: A process by itself.
ALONE = Ranks()


@contextlib.contextmanager
def _telling(whom: str) -> Iterator[None]:
    """Says for whom this process waits, if it waits for long."""
    text = f"waiting for other {whom}, for {_LONG:.0f} s: every rank has to make the same calls"
    timer = threading.Timer(_LONG, _LOG.warning, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _to(values: T, device: torch.device) -> T:
    """A pytree of tensors there."""
    moved: T = pytree.tree_map_only(Tensor, lambda value: value.to(device), values)
    return moved


def _comes(store: Any, name: str) -> bool:
    """Whether a rank comes to a place soon; it is not there if the one that holds the store is
    gone."""
    try:
        store.wait([name], _PATIENCE)
    except RuntimeError:
        return False
    return True


def code_of(error: BaseException) -> Code | None:
    """The code of an error of ours; None of others."""
    return error.code if isinstance(error, PyroScaleError) else None


def _backends() -> str:
    return str(dist.get_backend_config())


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
