"""A pure function of tensors as a graph of tensor operations.

Dynamo cannot trace Pyro's handlers; `make_fx` only sees the operations that they lead to.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from pyro_scale.compile.by_piece import update_by_piece
from pyro_scale.core.onednn import without_onednn


class Constant(NamedTuple):
    """A tensor that a function reads besides its arguments: a frozen weight, a buffer, a number.

    Attributes:
        tensor: as compiled code reads it.
        origin: what the function read, which is gone by now if it was made when it was run.
    """

    tensor: Tensor
    origin: weakref.ref[Tensor]


@dataclass(frozen=True)
class Graph:
    """A function: flat tensors in, flat tensors out.

    Attributes:
        module: the graph, whose inputs are the function's arguments and then the constants.
        constants: what else the function reads.
        examples: one tensor for every input.
        output_dtypes: of its outputs.
    """

    module: fx.GraphModule
    constants: list[Constant]
    examples: list[Tensor]
    output_dtypes: list[torch.dtype]


def trace(function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]) -> Graph:
    """The graph of a function for arguments like these.

    Args:
        function: of tensors, which gives tensors.
        examples: its arguments; no two of them, and none that the function reads by itself, may be
            one tensor object.

    Raises:
        Exception: whatever the function raises when it cannot be traced.
    """
    dtypes: list[torch.dtype] = []

    def outputs(*arguments: Tensor) -> list[Tensor]:
        # what is carried on and what is given out must not share memory
        tensors = [tensor.clone() for tensor in function(*arguments)]
        dtypes[:] = [tensor.dtype for tensor in tensors]
        return tensors

    with torch.no_grad(), without_onednn():
        traced = make_fx(outputs, tracing_mode="real", decomposition_table=_DECOMPOSITIONS)
        module = traced(*examples)
    _spread_failures(module)
    _write_dtypes(module)
    update_by_piece(module)
    constants = _lift_constants(module)
    return Graph(module, constants, [*examples, *(each.tensor for each in constants)], dtypes)


def is_tracing() -> bool:
    """Whether what is called now is being recorded."""
    return get_proxy_mode() is not None


def as_input(constant: Tensor) -> Tensor:
    """A constant as compiled code reads it, in the same memory where that can be."""
    return constant.detach().resolve_conj().resolve_neg()


def _accumulate(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A running sum or product, element by element: Inductor has no kernel for it."""

    def decompose(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        if x.dim() == 0 or x.is_complex() or not 0 < x.shape[dim] <= _MOST_RUNNING:
            return NotImplemented
        own = x.dtype if x.is_floating_point() else torch.int64  # as torch adds integers up
        first, *others = x.to(dtype or own).unbind(dim)
        return torch.stack(list(itertools.accumulate(others, combine, initial=first)), dim)

    return decompose


#: Elements of a running sum or product that is written out.
_MOST_RUNNING = 32
_DECOMPOSITIONS = {
    torch.ops.aten.cumsum.default: _accumulate(operator.add),
    torch.ops.aten.cumprod.default: _accumulate(operator.mul),
}


def _write_dtypes(module: fx.GraphModule) -> None:
    """Writes down the dtype of tensors that the function makes without naming one, such as
    torch.eye(3): the default may be another when the graph is compiled."""
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or node.all_input_nodes:
            continue
        takes_dtype = any(argument.name == "dtype" for argument in schema.arguments)
        if takes_dtype and node.kwargs.get("dtype") is None:
            node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}
    module.recompile()


def _spread_failures(module: fx.GraphModule) -> None:
    """A factorization that fails gives NaN, where the function would raise an error: of many
    chains, the others go on."""
    graph, ops = module.graph, torch.ops.aten
    for check in graph.find_nodes(op="call_function", target=ops._linalg_check_errors.default):
        info = check.args[0]
        factors = [node for node in info.args[0].users if node.args[1] == 0]
        graph.erase_node(check)
        for factor in factors:
            with graph.inserting_after(max(factor, info)):
                failed = graph.call_function(ops.ne.Scalar, (info, 0))
            for _ in range(factor.meta["val"].dim() - info.meta["val"].dim()):
                with graph.inserting_after(failed):
                    failed = graph.call_function(ops.unsqueeze.default, (failed, -1))
            with graph.inserting_after(failed):
                whole = graph.call_function(ops.masked_fill.Scalar, (factor, failed, torch.nan))
            factor.replace_all_uses_with(whole)
            whole.replace_input_with(whole, factor)
    module.recompile()


def _lift_constants(module: fx.GraphModule) -> list[Constant]:
    """Makes inputs of the tensors that the graph holds."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    inputs: dict[str, fx.Node] = {}
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        if node.target not in inputs:
            with graph.inserting_after(last):
                last = inputs[node.target] = graph.placeholder(f"constant_{len(inputs)}")
        node.replace_all_uses_with(inputs[node.target])
        graph.erase_node(node)
    origins = [operator.attrgetter(name)(module) for name in inputs]
    constants = [Constant(as_input(origin), weakref.ref(origin)) for origin in origins]
    held = [*module.named_buffers(), *module.named_parameters()]
    for name in {name.partition(".")[0] for name, _ in held}:
        delattr(module, name)  # or Inductor makes inputs of them once more
    module.recompile()
    return constants
