"""Takes the part of a log posterior out that depends on the rows alone, such as a frozen network.

The log posterior is recorded as a graph of tensor operations on params and rows, and the part that
does not depend on the params is cut off.  The cut goes through tensors that have one row for every
row of the batch and depend on that row alone: features.  They are computed once for every row of
the data, whatever the number of chains and steps.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive, raise_if_from_handler, without_onednn
from pyro_scale.core.rows import Arguments
from pyro_scale.model import derivatives
from pyro_scale.model.classify import close
from pyro_scale.model.log_posterior import LogPosterior, Params
from pyro_scale.model.scaling import Evaluation

#: By how much sums in another order may differ.
_ROUNDINGS = 1000.0


@dataclass(frozen=True)
class FrozenBase:
    """A log posterior of features: the rows' own part of it, and the rest.

    Both are for batches of one size, that of the first.

    Attributes:
        num_data: N.
        names: of the params, in the order in which the rest takes them.
        base: rows -> features, both lists of tensors.
        rest: params and features -> log joint, log prior, log likelihood.
    """

    num_data: int
    names: tuple[str, ...]
    base: fx.GraphModule
    rest: fx.GraphModule

    def features(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """The features of a batch, `[B, ...]` each."""
        with torch.no_grad():
            return tuple(self.base(*rows.leaves(arguments)))

    def __call__(self, params: Params, batch: Any, indices: Tensor | None = None) -> Evaluation:
        """The evaluation of `LogPosterior`, on a batch of features in place of rows."""
        return Evaluation(*self.rest(*(params[name] for name in self.names), *batch))

    def grad(
        self, params: Params, batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """As `LogPosterior.grad`."""
        return derivatives.gradient(lambda p: self(p, batch), params)

    def plain_grad(
        self, params: Params, batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """As `LogPosterior.plain_grad`."""
        return derivatives.plain_gradient(lambda p: self(p, batch), params)

    def row_gradients(
        self, params: Params, batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As `LogPosterior.row_gradients`."""
        return derivatives.row_gradients(lambda p: self(p, batch).log_lik, params)


class NoBase(Exception):
    """Why a log posterior is left whole."""


def frozen_base(
    log_posterior: LogPosterior,
    params: Params,
    arguments: Arguments,
    others: Sequence[Arguments] = (),
) -> FrozenBase:
    """The log posterior with its frozen base taken out.

    Args:
        log_posterior: a model with weights that are fixed.
        params: anywhere.
        arguments: a batch.
        others: batches of its size, on which the parts must give what the whole gives: what was
            a number for one batch may change with the next.

    Raises:
        NoBase: there is none worth it, or it cannot be told from the rest.
    """
    size = rows.count(arguments)
    if size is None or size < 2:
        raise NoBase("a batch is one row")
    _check_gradients(log_posterior, params, arguments)
    try:
        graph = _record(log_posterior, params, arguments)
        values = _values_of_rows(graph, len(params), arguments, size)
    except Exception as error:  # of the model, of make_fx
        raise_if_from_handler(error)
        reason = str(error).strip().partition("\n")[0][:200]
        raise NoBase(f"the model cannot be recorded ({type(error).__name__}: {reason})") from error
    cut = _cut(graph, values)
    base = _part(graph, [n for n in values if n.op == "placeholder"], cut)
    if not any(_is_work(node) for node in base.graph.nodes):
        raise NoBase("params come in before any work is done on the rows alone")
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"][: len(params)]
    (result,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    rest = _part(graph, [*placeholders, *cut], list(result))
    found = FrozenBase(log_posterior.num_data, tuple(params), base, rest)
    turned = rows.take(arguments, torch.arange(size).flip(0))
    _compare(found, log_posterior, params, [turned, *others])
    return found


def _record(log_posterior: LogPosterior, params: Params, arguments: Arguments) -> fx.GraphModule:
    """The log posterior as a graph: of the params, then of the rows."""

    def evaluated(*flat: Tensor) -> tuple[Tensor, ...]:
        leaves = iter(flat)
        here = {name: next(leaves) for name in params}
        batch = rows.map_rows(lambda _: next(leaves), arguments)
        return tuple(log_posterior(here, batch))

    # make_fx knows tensors by identity: one that the model holds too would be taken for it
    examples = [value.detach().clone() for value in [*params.values(), *rows.leaves(arguments)]]
    # attention by matrix products, which go through vmap and have a derivative
    with exclusive, torch.no_grad(), without_onednn(), sdpa_kernel(SDPBackend.MATH):
        return make_fx(torch.func.functionalize(evaluated))(*examples)


def _values_of_rows(
    graph: fx.GraphModule, num_params: int, arguments: Arguments, size: int
) -> dict[fx.Node, bool]:
    """What depends on the rows and not on the params -> whether it is features: has a row for
    every row, which depends on that row alone."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    leaves = rows.leaves(arguments)
    values = dict(zip(placeholders[num_params:], leaves, strict=True))
    with torch.no_grad():
        here = _evaluate(graph, values)
        order = torch.arange(size - 1, -1, -1) // 2  # others' rows, in other places
        there = _evaluate(graph, {node: leaf[order] for node, leaf in values.items()})

    def is_feature(node: fx.Node, value: Any) -> bool:
        has_rows = isinstance(value, Tensor) and value.shape[:1] == (size,)
        return node in values or (has_rows and _same(value[order], there[node]))

    return {node: is_feature(node, value) for node, value in here.items()}


def _evaluate(graph: fx.GraphModule, given: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    """The values of all that follows from some placeholders and constants alone: tensors that
    depend on a placeholder."""
    constants, found = dict[fx.Node, Any](), dict[fx.Node, Any](given)
    known = ChainMap(found, constants)
    for node in graph.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            constants[node] = getattr(graph, str(node.target))
        elif node.op == "call_function" and all(each in known for each in inputs):
            arguments, named = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            here = found if any(each in found for each in inputs) else constants
            here[node] = node.target(*arguments, **named)
    return found


def _cut(graph: fx.GraphModule, values: Mapping[fx.Node, bool]) -> list[fx.Node]:
    """The features that the rest needs: what is none of these is left to the rest."""
    needed, cut = list[fx.Node](), dict[fx.Node, None]()
    for node in graph.graph.nodes:
        if node not in values:
            needed += [each for each in node.all_input_nodes if each in values]
    while needed:
        node = needed.pop()
        if values[node]:
            cut[node] = None
        else:
            needed += [each for each in node.all_input_nodes if each in values]
    return [node for node in graph.graph.nodes if node in cut]


def _part(graph: fx.GraphModule, given: list[fx.Node], wanted: list[fx.Node]) -> fx.GraphModule:
    """The part of a graph that leads from some values to others."""
    part = fx.Graph()
    known = {node: part.placeholder(node.name) for node in given}
    for node in _leading_to(wanted, set(given)):
        known[node] = part.node_copy(node, lambda n: known[n])
    part.output(tuple(known[node] for node in wanted))
    return fx.GraphModule(graph, part)


def _leading_to(wanted: list[fx.Node], given: set[fx.Node]) -> Iterator[fx.Node]:
    """The nodes between, in the order of the graph."""
    needed, left = set[fx.Node](), list(wanted)
    while left:
        node = left.pop()
        if node not in given and node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    yield from (node for node in next(iter(wanted)).graph.nodes if node in needed)


def _is_work(node: fx.Node) -> bool:
    """Whether it is a matrix product, a convolution, attention."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


def _compare(
    base: FrozenBase, log_posterior: LogPosterior, params: Params, batches: Sequence[Arguments]
) -> None:
    """Compares the parts with the whole, each time at other params.

    Raises:
        NoBase: they differ.
    """
    for away, batch in enumerate(batches, start=1):
        moved = {name: value + 0.1 * away for name, value in params.items()}
        try:
            slope, value = base.plain_grad(moved, base.features(batch))
            expected, full = log_posterior.plain_grad(moved, batch)
        except Exception as error:  # of operations, on tensors of other sizes
            raise_if_from_handler(error)
            raise NoBase("sizes inside of the model change from batch to batch") from error
        pairs = [*zip(value, full, strict=True), *((slope[n], expected[n]) for n in expected)]
        if not all(_same(mine, theirs) for mine, theirs in pairs):
            raise NoBase(
                "recorded, the model gives something else on another batch: it hands rows to "
                "NumPy or to Python"
            )


class _HiddenUse(TorchFunctionMode):
    """Notices what is done to tensors with a gradient under `torch.no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled, self.found = True, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            self._enabled = bool(args[0])
        elif not self._enabled:
            leaves = pytree.tree_leaves((args, kwargs))
            self.found |= any(isinstance(x, Tensor) and x.grad_fn is not None for x in leaves)
        return func(*args, **(kwargs or {}))


def _check_gradients(log_posterior: LogPosterior, params: Params, arguments: Arguments) -> None:
    """Refuses a model that uses params under no_grad, which a graph does not know of."""
    with torch.enable_grad():
        leaves = {n: value.detach().requires_grad_() for n, value in params.items()}
        here = {n: value.view_as(value) for n, value in leaves.items()}  # with a history
        with _HiddenUse() as use:
            log_posterior(here, arguments)
    if use.found:
        raise NoBase("the model uses params under torch.no_grad")


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal, to the rounding of sums in another order; infinite and NaN where the other is."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    finite = torch.isfinite(one)
    if not torch.equal(one.nan_to_num(0.0)[~finite], other.nan_to_num(0.0)[~finite]):
        return False
    one, other = one[finite], other[finite]
    size = max(1.0, float(one.abs().max())) if len(one) else 1.0
    return close(one / size, other / size, roundings=_ROUNDINGS)
