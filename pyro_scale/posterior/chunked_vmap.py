"""A function of one vector, vmapped over many vectors in chunks that fit into memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_scale.core.exclusive import exclusive, own_generator
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.model.guards import trace_modules

#: Bytes of the largest tensor that one vmapped call may make.
CHUNK_BYTES = 2**24


def vmap_in_chunks(
    function: Callable[[Tensor], Any], blocks: Iterable[Tensor], random: bool = False
) -> Iterator[Any]:
    """Yields a function's values at all vectors, in order, one chunk of vectors after another:
    pytrees of tensors `[n, ...]`, such that a vmapped call fits into memory.

    Functions that vmap does not support are called vector by vector. The size of a chunk follows
    from the memory that one call takes, not from how the vectors are divided into blocks; random
    numbers are therefore the same for any division.

    Args:
        function: function from a vector `[D]` to a pytree of tensors.
        blocks: the vectors, in blocks `[n, D]`; at least one block, whose first vector is used to
            measure memory.
        random: whether the function draws from torch's generator.
    """
    blocks = iter(blocks)
    first_block = next(blocks)
    with torch.no_grad(), _RandnNormals(), without_vmap_warnings():
        with exclusive, trace_modules():  # modules may be in another mode than during the run
            size = max(1, CHUNK_BYTES // _largest_tensor(function, first_block[0].clone()))
        vmapped = torch.vmap(function, randomness="different" if random else "error")
        chunks = _split_evenly(size, itertools.chain([first_block], blocks))
        first = next(chunks)
        try:
            with exclusive:  # other threads may seed torch's generator
                values = vmapped(first)
        except (RuntimeError, NotImplementedError):  # of the model, or of one of Pyro's samplers
            for vector in itertools.chain(first, itertools.chain.from_iterable(chunks)):
                with exclusive:
                    values = pytree.tree_map(lambda value: value[None], function(vector))
                yield values
            return
        yield values
        for chunk in chunks:
            with exclusive:
                values = vmapped(chunk)
            yield values


def _split_evenly(size: int, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields all vectors in order in chunks `[size, D]`, however they are divided into `blocks`
    `[n, D]`; the last chunk may be smaller."""
    waiting: list[Tensor] = []
    for block in blocks:
        waiting.append(block)
        if sum(map(len, waiting)) >= size:
            *full, last = _concatenate(waiting).split(size)
            yield from full
            waiting = [last]
    yield _concatenate(waiting)


def _concatenate(blocks: list[Tensor]) -> Tensor:
    """The blocks `[n_i, D]` joined along their first dimension, one tensor `[n, D]`; a single block
    is returned without a copy."""
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _largest_tensor(function: Callable[[Tensor], Any], vector: Tensor) -> int:
    """The bytes of the largest tensor that a call of the function at this vector, `[D]`, makes: an
    estimate of the memory that a vmapped call takes for each vector."""
    with own_generator(), _LargestTensor() as sizes:
        function(vector)
    return sizes.nbytes


class _RandnNormals(TorchFunctionMode):
    """Context in which `torch.normal` of two tensors and `Tensor.normal_` draw by `torch.randn`
    instead, which `torch.vmap` supports; for models whose distributions draw normal numbers under
    vmap."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.normal and len(args) == 2 and all(isinstance(a, Tensor) for a in args):
            mean, sd = torch.broadcast_tensors(*args)
            return mean + sd * torch.randn(mean.shape, dtype=mean.dtype, device=mean.device)
        if func is Tensor.normal_ and len(args) == 1 and not kwargs:
            return torch.randn(args[0].shape, dtype=args[0].dtype, device=args[0].device)
        return func(*args, **(kwargs or {}))


class _LargestTensor(TorchDispatchMode):
    """Context that records, in the attribute `nbytes`, the size in bytes of the largest memory that
    a torch operation inside of it returns; to choose how many vectors are vmapped together."""

    nbytes = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return outputs
