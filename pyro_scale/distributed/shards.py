"""Weights of which every rank has a part: torch's DTensors, as `fully_shard` makes them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from pyro_scale.distributed.shares import Rows
from pyro_scale.distributed.workers import Workers
from pyro_scale.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

#: What to do instead of sharding a tensor in another way.
_AS_FSDP = "shard the whole network by torch.distributed.fsdp.fully_shard, along dimension 0"


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor of `torch.distributed`, as the weights of a network are that is
    divided among processes. That part of torch is not imported if it is not in use.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass(frozen=True)
class Shard:
    """This rank's part of a weight that is divided among ranks: consecutive indices of the weight's
    first dimension.

    Attributes:
        shape: shape of the whole weight.
        rows: slice of the weight's first dimension that this rank has.
        mesh: the device mesh of the ranks that have the parts.
        dim: the dimension of the mesh along which ranks have different parts.
    """

    shape: torch.Size
    rows: slice
    mesh: DeviceMesh
    dim: int

    @classmethod
    def from_weight(cls, name: str, tensor: Tensor) -> Shard:
        """A `Shard` that describes which part of a weight this rank has.

        Args:
            name: name of the weight in its network, for messages.
            tensor: the weight, a DTensor.

        Raises:
            ArgumentError: the weight is whole on every rank, or not divided along its first
                dimension alone.
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
        """The index of the first element of this rank's part among all elements of the whole
        weight, flattened.
        """
        return self.rows.start * self.shape[1:].numel()

    @property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's part of the weight: `[rows of the part, *shape[1:]]`, with 0
        rows if this rank has none.
        """
        return torch.Size((self.rows.stop - self.rows.start, *self.shape[1:]))

    @property
    def copies(self) -> int:
        """The number of ranks, this one included, that hold this same part of the weight: the size
        of the device mesh divided by the number of different parts. 1 unless the mesh has a second
        dimension, along which the network is replicated.
        """
        return self.mesh.size() // self.mesh.size(self.dim)

    def whole(self, draws: Tensor) -> DTensor:
        """Values of the whole weight as one DTensor `[n, *shape]`, put together from the parts of
        all ranks without moving data.

        Args:
            draws: n values of this rank's part, `[n, *local_shape]`.
        """
        from torch.distributed import tensor

        placements: list[Any] = [tensor.Replicate()] * self.mesh.ndim
        placements[self.dim] = tensor.Shard(1)
        shape = torch.Size((len(draws), *self.shape))
        stride = torch.empty(shape, device="meta").stride()
        return tensor.DTensor.from_local(
            draws, self.mesh, placements, run_check=False, shape=shape, stride=stride
        )


def workers_of(shards: Iterable[Shard]) -> Workers:
    """The ranks among which networks are sharded, as the processes of a run: all move one chain
    together, each rank on its rows of every minibatch.

    Args:
        shards: this rank's parts of the networks' weights.

    Raises:
        ArgumentError: networks have different meshes; or the mesh has two dimensions and lacks some
            of the ranks.
    """
    mesh = common_mesh(shards)
    rank: int = mesh.get_local_rank() if mesh.ndim == 1 else dist.get_rank()
    group: Any = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    rows = Rows(rank, mesh.size(), group, mesh.device_type)
    return Workers(rank, mesh.size(), teams=(0, 1), rows=rows, group=group)


def common_mesh(shards: Iterable[Shard]) -> DeviceMesh:
    """The one device mesh over which all weights are sharded.

    Args:
        shards: this rank's parts of the weights.

    Raises:
        ArgumentError: weights have different meshes; or the mesh has two dimensions and lacks some
            of the ranks.
    """
    first, *others = shards
    mesh = first.mesh
    if any(other.mesh != mesh or other.dim != first.dim for other in others):
        raise ArgumentError("networks are sharded over different meshes: pass one to both")
    if mesh.ndim > 1 and mesh.size() != dist.get_world_size():
        raise ArgumentError(
            f"mesh {mesh} has {mesh.size()} of {dist.get_world_size()} ranks: pass one of all "
            "ranks, or of one dimension"
        )
    return mesh
