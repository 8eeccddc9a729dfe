"""Separates the part of a log posterior that depends on the rows alone, such as a frozen network.

The log posterior is recorded as a graph of tensor operations on params and rows, and the part that
does not depend on the params is cut off. The cut goes through tensors that have one entry for every
row of the batch and depend on that row alone: features. They are computed once for every row of
the data, whatever the number of chains and steps.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pyro_scale.core import rows
from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.exclusive import exclusive, raise_if_from_handler, without_onednn
from pyro_scale.core.rows import Arguments
from pyro_scale.model import derivatives
from pyro_scale.model.classify import close
from pyro_scale.model.diagnose import error_in_short
from pyro_scale.model.log_posterior import LogPosterior, Params

#: Tolerance in roundings for sums in another order.
_ROUNDINGS = 1000.0


@dataclass(frozen=True)
class FrozenBase:
    """A log posterior in two parts, for a network whose first layers are frozen: features (outputs
    of the frozen layers, which depend on the rows alone and can be computed once), and the log
    joint density as a function of params and features.

    Both parts are for batches of one size, that of the batch they were recorded on.

    Attributes:
        num_data: N, the number of rows of the whole data set.
        names: names of the params, in the order in which `head` takes them.
        base: computes the features from the rows: tensors in, list of tensors out.
        head: computes (log joint, log prior, each row's log likelihood) from params and features.
    """

    num_data: int
    names: tuple[str, ...]
    base: fx.GraphModule
    head: fx.GraphModule

    def features(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """The outputs of the frozen layers for a batch of B rows: a tuple of tensors `[B, ...]`,
        one for each place in the graph where frozen and other operations were separated. Pass them
        as the `batch` of the other methods.
        """
        with torch.no_grad():
            return tuple(self.base(*rows.leaves(arguments)))

    def __call__(
        self, params: Params, batch: Arguments, indices: Tensor | None = None
    ) -> Evaluation:
        """The log joint density, as `LogPosterior.__call__` returns it.

        Args:
            params: unconstrained values by site.
            batch: features of the batch's rows, as `features` returns them, in place of the rows.
            indices: not used.
        """
        return Evaluation(*self.head(*(params[name] for name in self.names), *batch))

    def grad(
        self, params: Params, batch: Arguments, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """The gradient of the log joint density with respect to the params, and the evaluation, as
        `LogPosterior.grad` returns them.

        Args:
            params: unconstrained values by site.
            batch: the frozen layers' outputs for B rows of data, in place of these rows.
            indices: not used.
        """
        return derivatives.gradient(lambda p: self(p, batch), params)

    def plain_grad(
        self, params: Params, batch: Arguments, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """As `grad`, by `torch.autograd` instead of `torch.func`: for models that `torch.func` does
        not support.

        Args:
            params: unconstrained values by site.
            batch: the frozen layers' outputs for B rows of data, in place of these rows.
            indices: not used.
        """
        return derivatives.plain_gradient(lambda p: self(p, batch), params)

    def row_gradients(
        self, params: Params, batch: Arguments, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The gradient of each row's log likelihood with respect to the params, `[B, *shape]` by
        site, not multiplied by N/B.

        Args:
            params: unconstrained values by site.
            batch: the frozen layers' outputs for B rows of data, in place of these rows.
            indices: not used, as features are not subsampled by the model.
        """
        return derivatives.row_gradients(lambda p: self(p, batch).log_lik, params)


class NoBase(Exception):
    """Raised, with the reason as its argument, if a log posterior cannot be separated into frozen
    layers and the rest (see `FrozenBase`). Callers catch it and run the whole model at every step.
    """


def frozen_base(
    log_posterior: LogPosterior,
    params: Params,
    arguments: Arguments,
    others: Sequence[Arguments] = (),
) -> FrozenBase:
    """A `FrozenBase`: the log posterior separated into features of the rows (outputs of the
    network's frozen layers), which can be computed once, and a function of params and features.

    Args:
        log_posterior: a model that has weights that are neither latent nor point-estimated.
        params: unconstrained values by site, any possible ones.
        arguments: a batch, as the model's arguments.
        others: further batches of the same size, on which the two parts are compared with the log
            posterior: a constant in the graph may have been computed from the first batch.

    Raises:
        NoBase: there is no work to save, or the model cannot be recorded or cut.
    """
    size = rows.count(arguments)
    if size is None or size < 2:
        raise NoBase("a batch is one row")
    _check_gradients(log_posterior, params, arguments)
    try:
        graph = _record(log_posterior, params, arguments)
        is_feature = _find_features(graph, len(params), arguments, size)
    except Exception as error:  # errors of the model or of make_fx
        raise_if_from_handler(error)
        raise NoBase(f"the model cannot be recorded ({error_in_short(error)})") from error
    cut = _features_of_head(graph, is_feature)
    placeholders = graph.graph.find_nodes(op="placeholder")
    base = _subgraph(graph, placeholders[len(params) :], cut)
    if not any(_is_work(node) for node in base.graph.nodes):
        raise NoBase("no work is done on the rows before params come in")
    (output,) = graph.graph.find_nodes(op="output")
    head = _subgraph(graph, [*placeholders[: len(params)], *cut], list(output.args[0]))
    parts = FrozenBase(log_posterior.num_data, tuple(params), base, head)
    backwards = rows.take(arguments, torch.arange(size).flip(0))
    _compare(parts, log_posterior, params, [backwards, *others])
    return parts


def _record(log_posterior: LogPosterior, params: Params, arguments: Arguments) -> fx.GraphModule:
    """A graph of tensor operations that computes (log joint, log prior, each row's log likelihood);
    its inputs are the params, then the tensors of rows."""

    def evaluate(*flat: Tensor) -> tuple[Tensor, ...]:
        leaves = iter(flat)
        params_of_graph = {name: next(leaves) for name in params}
        batch = rows.map_rows(lambda _: next(leaves), arguments)
        return tuple(log_posterior(params_of_graph, batch))

    # make_fx identifies tensors by object: copies, so that none is one that the model holds too
    examples = [value.detach().clone() for value in [*params.values(), *rows.leaves(arguments)]]
    # attention by matrix products, which go through vmap and have a derivative
    with exclusive, torch.no_grad(), without_onednn(), sdpa_kernel(SDPBackend.MATH):
        return make_fx(torch.func.functionalize(evaluate))(*examples)


def _find_features(
    graph: fx.GraphModule, num_params: int, arguments: Arguments, size: int
) -> dict[fx.Node, bool]:
    """A dict from every node of the graph that depends on the rows and not on the params to whether
    the node is a feature: a tensor `[B, ...]` with an entry for every row that depends on that row
    alone.

    Args:
        graph: the graph of `_record`.
        num_params: number of the graph's inputs that are params, which come first.
        arguments: the batch, as the model's arguments.
        size: B, rows of the batch.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")[num_params:]
    inputs = dict(zip(placeholders, rows.leaves(arguments), strict=True))
    # the same rows among other rows and at other places
    order = torch.arange(size - 1, -1, -1) // 2
    with torch.no_grad():
        values = _evaluate(graph, inputs)
        reordered = _evaluate(graph, {node: leaf[order] for node, leaf in inputs.items()})

    def is_feature(node: fx.Node, value: Any) -> bool:
        has_rows = isinstance(value, Tensor) and value.shape[:1] == (size,)
        return node in inputs or (has_rows and _same(value[order], reordered[node]))

    return {node: is_feature(node, value) for node, value in values.items()}


def _evaluate(graph: fx.GraphModule, inputs: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Any]:
    """The values of all nodes of a graph that can be computed from some of its inputs, by node;
    nodes that depend on other inputs, or on no input, are left out.

    Args:
        graph: the graph.
        inputs: values of the inputs that are known.
    """
    constants, values = dict[fx.Node, Any](), dict[fx.Node, Any](inputs)
    computed = ChainMap(values, constants)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constants[node] = getattr(graph, str(node.target))
        elif node.op == "call_function" and all(n in computed for n in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), computed.__getitem__)
            target = values if any(n in values for n in node.all_input_nodes) else constants
            target[node] = node.target(*args, **kwargs)
    return values


def _features_of_head(graph: fx.GraphModule, is_feature: Mapping[fx.Node, bool]) -> list[fx.Node]:
    """The nodes at which the graph is cut, in the graph's order: the features that the part of the
    graph with params needs as inputs. A node that depends on the rows and is no feature is computed
    anew in that part.

    Args:
        graph: the graph of `_record`.
        is_feature: whether a node is a feature, for nodes that depend on the rows alone.
    """
    cut, uncut = set[fx.Node](), set[fx.Node]()
    for node in reversed(graph.graph.nodes):  # in this order, users of a node come before it
        if node not in is_feature or node in uncut:
            cut |= {n for n in node.all_input_nodes if is_feature.get(n)}
            uncut |= {n for n in node.all_input_nodes if not is_feature.get(n)}
    return [node for node in graph.graph.nodes if node in cut]


def _subgraph(
    graph: fx.GraphModule, inputs: Collection[fx.Node], outputs: Iterable[fx.Node]
) -> fx.GraphModule:
    """A new graph that computes the nodes `outputs` of a graph, returned as a tuple, from the nodes
    `inputs`, which are its arguments.
    """
    part = fx.Graph()
    copies = {node: part.placeholder(node.name) for node in inputs}
    for node in graph.graph.nodes:
        computable = node.op != "placeholder" and all(n in copies for n in node.all_input_nodes)
        if computable and node not in copies and node.op != "output":
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in outputs))
    part.eliminate_dead_code()
    return fx.GraphModule(graph, part)


def _is_work(node: fx.Node) -> bool:
    """Whether a node is an expensive operation: a matrix product, a convolution or attention."""
    from torch.utils.flop_counter import flop_registry  # few need it, and it takes 6 ms

    return getattr(node.target, "overloadpacket", None) in flop_registry


def _compare(
    parts: FrozenBase, log_posterior: LogPosterior, params: Params, batches: Sequence[Arguments]
) -> None:
    """Checks on each batch, at other params each time, that the two parts together have the same
    log joint and gradient as the log posterior. Returns None if so.

    Raises:
        NoBase: they differ by more than rounding.
    """
    for number, batch in enumerate(batches, start=1):
        moved = {name: value + 0.1 * number for name, value in params.items()}
        try:
            slope, value = parts.plain_grad(moved, parts.features(batch))
            expected, full = log_posterior.plain_grad(moved, batch)
        except Exception as error:  # errors of operations on tensors of other sizes
            raise_if_from_handler(error)
            raise NoBase("sizes inside of the model change from batch to batch") from error
        pairs = [*zip(value, full, strict=True), *((slope[n], expected[n]) for n in expected)]
        if not all(_same(mine, theirs) for mine, theirs in pairs):
            raise NoBase(
                "the recorded model gives other values than the model on another batch: it passes "
                "rows to NumPy or to Python"
            )


class _HiddenUse(TorchFunctionMode):
    """Torch function mode that detects whether code uses tensors with an autograd history under
    `torch.no_grad`. After such a use, its attribute `is_found` is True.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled, self.is_found = True, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            self._enabled = bool(args[0])
        elif not self._enabled:
            leaves = pytree.tree_leaves((args, kwargs))
            self.is_found |= any(isinstance(x, Tensor) and x.grad_fn is not None for x in leaves)
        return func(*args, **(kwargs or {}))


def _check_gradients(log_posterior: LogPosterior, params: Params, arguments: Arguments) -> None:
    """Checks that the model does not use params under `torch.no_grad`: the recorded graph would let
    gradients through there. Returns None if it does not.

    Raises:
        NoBase: the model uses params under `torch.no_grad`.
    """
    with torch.enable_grad():
        leaves = {n: value.detach().requires_grad_() for n, value in params.items()}
        # views have an autograd history
        views = {n: value.view_as(value) for n, value in leaves.items()}
        with _HiddenUse() as use:
            log_posterior(views, arguments)
    if use.is_found:
        raise NoBase("the model uses params under torch.no_grad")


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and equal elements, up to the rounding of sums in
    another order; infinities and NaN must be at the same elements."""
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
