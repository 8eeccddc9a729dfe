"""Records a pure function of tensors as a graph of tensor operations.

Dynamo cannot trace Pyro's handlers; `make_fx` sees only the operations that these handlers execute.
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
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from pyro_scale.compile.by_piece import update_by_piece
from pyro_scale.core.exclusive import without_onednn


class Constant(NamedTuple):
    """A tensor that a traced function reads besides its arguments: a frozen weight, a buffer, a
    number.

    Attributes:
        tensor: the tensor as compiled code reads it.
        origin: weak reference to the tensor that the function read; dead if the function made that
            tensor itself.
    """

    tensor: Tensor
    origin: weakref.ref[Tensor]


@dataclass(frozen=True)
class Graph:
    """A traced function from tensors to tensors, as a graph of torch operations.

    Attributes:
        module: graph, whose inputs are the function's arguments, then the constants.
        constants: tensors that the function reads besides its arguments.
        examples: a tensor for every input of the graph.
        output_dtypes: dtype of each output.
    """

    module: fx.GraphModule
    constants: list[Constant]
    examples: list[Tensor]
    output_dtypes: list[torch.dtype]


def trace(function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]) -> Graph:
    """Records a function as a graph of torch operations, for arguments of the examples' shapes and
    dtypes.

    Args:
        function: function from tensors to a sequence of tensors.
        examples: arguments to run the function on: different tensor objects, and none that the
            function also reads as a constant.

    Raises:
        Exception: whatever a function raises that cannot be traced, such as one that reads a
            tensor's value in Python.
    """
    dtypes: list[torch.dtype] = []

    def outputs(*arguments: Tensor) -> list[Tensor]:
        # an output must not share memory with another one or with an input
        tensors = [tensor.clone() for tensor in function(*arguments)]
        dtypes[:] = [tensor.dtype for tensor in tensors]
        return tensors

    # all nodes share one mode for their shapes; by default, each makes one, which reads the stack
    shapes = TracingContext(FakeTensorMode())
    with torch.no_grad(), without_onednn(), tracing(shapes):
        traced = make_fx(outputs, tracing_mode="real", decomposition_table=_DECOMPOSITIONS)
        module = traced(*examples)
    _spread_failures(module)
    _write_dtypes(module)
    update_by_piece(module)
    constants = _lift_constants(module)
    return Graph(
        module, constants, [*examples, *(constant.tensor for constant in constants)], dtypes
    )


def is_tracing() -> bool:
    """Whether the code that runs now is being recorded by `trace`: it must not read tensors' values
    then.
    """
    return get_proxy_mode() is not None


def as_input(constant: Tensor) -> Tensor:
    """The tensor by which compiled code reads a constant: detached, without conjugation or negation
    bits, in the same memory if possible.
    """
    return constant.detach().resolve_conj().resolve_neg()


def _accumulate(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A function that computes a cumulative sum or product along a dimension by operations on
    elements. It is passed to `make_fx` as a decomposition, since Inductor has no C++ kernel for
    these two.

    Args:
        combine: function of two tensors that adds or multiplies.
    """

    def decompose(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        if x.dim() == 0 or x.is_complex() or not 0 < x.shape[dim] <= _MOST_CUMULATIVE:
            return NotImplemented
        default = x.dtype if x.is_floating_point() else torch.int64  # torch's dtype of such sums
        first, *others = x.to(dtype or default).unbind(dim)
        return torch.stack(list(itertools.accumulate(others, combine, initial=first)), dim)

    return decompose


#: Largest number of elements of a cumulative sum or product that is decomposed.
_MOST_CUMULATIVE = 32
_DECOMPOSITIONS = {
    torch.ops.aten.cumsum.default: _accumulate(operator.add),
    torch.ops.aten.cumprod.default: _accumulate(operator.mul),
}


def _write_dtypes(module: fx.GraphModule) -> None:
    """Writes a dtype into all operations of a graph that create a tensor without one, such as
    torch.eye(3), in place: torch's default dtype may have changed when the graph is compiled.
    """
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or node.all_input_nodes:
            continue
        takes_dtype = any(argument.name == "dtype" for argument in schema.arguments)
        if takes_dtype and node.kwargs.get("dtype") is None:
            node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}


def _spread_failures(module: fx.GraphModule) -> None:
    """Changes a graph so that a factorization that fails gives NaN instead of an error: only one
    chain of a batch is then affected."""
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
                masked = graph.call_function(ops.masked_fill.Scalar, (factor, failed, torch.nan))
            factor.replace_all_uses_with(masked)
            masked.replace_input_with(masked, factor)


def _lift_constants(module: fx.GraphModule) -> list[Constant]:
    """Turns the tensors that a graph contains into further inputs of the graph, after the
    function's arguments. Returns a list of these tensors, in the inputs' order.
    """
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
        delattr(module, name)  # or Inductor turns them into inputs again
    module.recompile()  # Python code of all changes to the graph: it takes milliseconds
    return constants
