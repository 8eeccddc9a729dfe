"""Tensors of which every rank has a part: torch's DTensors, as `fully_shard` makes of weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from pyro_scale.distributed.shares import Rows
from pyro_scale.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

#: What to do instead of sharding a tensor in another way.
_AS_FSDP = "shard the whole network by torch.distributed.fsdp.fully_shard, along dimension 0"


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; who has none has not loaded that part of torch."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor: some rows of it, which lie one after another.

    Attributes:
        shape: the whole tensor's.
        rows: which of its rows are here.
        mesh: the ranks that have the parts.
        dim: the mesh's dimension along which they differ.
    """

    shape: torch.Size
    rows: slice
    mesh: DeviceMesh
    dim: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Shard:
        """A weight's.

        Raises:
            ArgumentError: it is whole on every rank, or in parts of another kind than rows.
        """
        if not is_sharded(tensor):
            raise ArgumentError(f"weight '{name}' is not sharded, and others are: {_AS_FSDP}")
        whole: Any = tensor
        dims = [i for i, placement in enumerate(whole.placements) if placement.is_shard()]
        others = [place for i, place in enumerate(whole.placements) if i not in dims]
        by_rows = [i for i in dims if whole.placements[i].is_shard(0)]
        if len(dims) != 1 or dims != by_rows or not all(o.is_replicate() for o in others):
            raise ArgumentError(
                f"weight '{name}' is placed as {whole.placements}, not along its first dimension "
                f"alone: {_AS_FSDP}"
            )
        mesh, (dim,) = whole.device_mesh, dims
        size = tensor.shape[0]
        per_rank = -(-size // mesh.size(dim))
        first = min(mesh.get_local_rank(dim) * per_rank, size)
        return cls(tensor.shape, slice(first, min(first + per_rank, size)), mesh, dim)

    @property
    def first(self) -> int:
        """The number of its first element, among the tensor's."""
        return self.rows.start * self.shape[1:].numel()

    @property
    def local_shape(self) -> torch.Size:
        """Its own."""
        return torch.Size((self.rows.stop - self.rows.start, *self.shape[1:]))

    def whole(self, draws: Tensor) -> DTensor:
        """Values of this part, `[n, *local_shape]`, as a DTensor `[n, *shape]` of all parts."""
        from torch.distributed import tensor

        placements: list[Any] = [tensor.Replicate()] * self.mesh.ndim
        placements[self.dim] = tensor.Shard(1)
        shape = torch.Size((len(draws), *self.shape))
        stride = torch.empty(shape, device="meta").stride()
        return tensor.DTensor.from_local(
            draws, self.mesh, placements, run_check=False, shape=shape, stride=stride
        )


@dataclass(frozen=True)
class Holders:
    """The ranks among which a network is shared out.

    Attributes:
        rows: this rank's part of every batch.
        copies: how many of them have the same part of the network.
        device: of what they tell each other.
    """

    rows: Rows
    copies: int
    device: torch.device

    @classmethod
    def of(cls, shards: Iterable[Shard]) -> Holders:
        """Those of all shards of a model.

        Raises:
            ArgumentError: not all are of one mesh, or it has two dimensions and not all ranks.
        """
        first, *others = list(shards)
        mesh = first.mesh
        if any(other.mesh != mesh or other.dim != first.dim for other in others):
            raise ArgumentError("networks are sharded over different meshes: pass one to both")
        if mesh.ndim > 1 and mesh.size() != dist.get_world_size():
            raise ArgumentError(
                f"mesh {mesh} has {mesh.size()} of {dist.get_world_size()} ranks: pass one of all "
                "ranks, or of one dimension"
            )
        rank: int = mesh.get_local_rank() if mesh.ndim == 1 else dist.get_rank()
        group: Any = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
        copies = mesh.size() // mesh.size(first.dim)
        device = torch.device(mesh.device_type)
        return cls(Rows(rank, mesh.size(), group, mesh.device_type), copies, device)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that shows progress and writes what all have."""
        return self.rows.rank == 0

    def total(self, vector: Tensor) -> Tensor:
        """The sum over ranks, on the device that the vector is on."""
        moved = vector.detach().to(self.device, copy=True)
        dist.all_reduce(moved, group=self.rows.group)
        return moved.to(vector.device)

    def of_first(self, value: Any) -> Any:
        """The first rank's value: anything that can be pickled."""
        values = [value]
        dist.broadcast_object_list(values, group=self.rows.group, group_src=0)
        return values[0]

    def of_all(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, by rank; `what` it is, in words."""
        values: list[Any] = [None] * self.rows.world
        dist.all_gather_object(values, value, group=self.rows.group)
        return values
