"""The Fisher information of an observation's distribution in the arguments that the user gave it.

There are three ways to compute it: closed forms (`fisher_families.py`), sums over finite supports,
and second derivatives of the Kullback-Leibler divergence.  Other distributions raise
`NoInformation`.  The information is computed in float64, because differences of trigammas cancel in
float32, and not under `torch.func`; `base_of` and `own_arguments` work under it and under vmap.
All functions can be traced.  Checks of values are then skipped: a step runs before it is traced.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

from pyro_scale.compile.trace import is_tracing
from pyro_scale.curvature.fisher_families import CATEGORICAL, CLOSED_FORMS, Blocks

Arguments = dict[str, Tensor]

#: Most values of a support to sum over.
LARGEST_SUPPORT = 10_000
#: Alternative arguments: torch computes the others from the one that the user gave.
_ALTERNATIVES = (
    ("probs", "logits"),
    ("covariance_matrix", "precision_matrix", "scale_tril"),
    ("gate", "gate_logits"),
)


class NoInformation(Exception):
    """Raised with a distribution's class name if its Fisher information cannot be computed. Callers
    catch it, so users do not see it."""


def base_of(fn: Any) -> Any:
    """The distribution inside wrappers: the one whose arguments the user gave.

    Wrappers are `to_event`, masks, `expand`, and invertible transforms with constant parameters;
    they do not change the information.  The batch dimensions are those of `fn`, followed by those
    that wrappers turned into event dimensions.

    Raises:
        NoInformation: a transform is not invertible, or its parameters require grad.
    """
    *_, base = _layers(fn)
    return base


def mask_of(fn: Any) -> Tensor:
    """All masks around a distribution combined: booleans that broadcast over
    `base_of(fn).batch_shape`, False at elements that do not count.
    """
    layers = list(_layers(fn))
    rank = len(layers[-1].batch_shape)
    masks = [torch.as_tensor(f._mask) for f in layers if isinstance(f, dist.MaskedDistribution)]
    aligned = [m.reshape(m.shape + (1,) * (rank - m.dim())) if m.dim() else m for m in masks]
    return reduce(torch.logical_and, aligned, torch.ones((), dtype=torch.bool))


def own_arguments(base: Any) -> Arguments:
    """The arguments that the user gave to a distribution, such as `loc` and `scale`, with their
    autograd graph, in the order of `arg_constraints`. Not those that torch computes from others
    (such as `probs` from `logits`).

    The dict is empty for a mixture and the like, whose arguments are not tensors, though these
    depend on something: `information` raises for them.

    Returns:
        name -> `[*batch_shape, *event]`, with the argument's own event dimensions.

    Raises:
        NoInformation: an argument does not have the shape that the class declares.
    """
    declared = _read(base, "arg_constraints", {})
    derived = _derived(base, declared)
    values = {name: getattr(base, name, None) for name in declared if name not in derived}
    try:
        return {
            name: _expand(
                value, torch.Size(base.batch_shape), _read(declared[name], "event_dim", 0)
            )
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
    except RuntimeError:
        raise NoInformation(type(base).__name__) from None


def information(base: Any, names: Sequence[str]) -> Tensor:
    """The Fisher information of one observation in some of its distribution's arguments.

    Args:
        base: a distribution, from `base_of`.
        names: some of its `own_arguments`.

    Returns:
        `[*batch_shape, m, m]`, symmetric, positive semi-definite and without a graph; m counts the
        elements of the named arguments, each flattened, one after another.

    Raises:
        NoInformation: it does not exist, or none of the three ways applies.
    """
    originals = own_arguments(base)
    arguments = {name: value.detach().double() for name, value in originals.items()}
    family = type(base)
    blocks = _closed_forms(family)
    if family is dist.DirichletMultinomial and base.total_count.max() > LARGEST_SUPPORT:
        raise NoInformation(family.__name__)
    declared = _read(base, "arg_constraints", {})
    discrete = any(_read(declared[name], "is_discrete", False) for name in names)
    if blocks and all((name, name) in blocks for name in names):
        matrix = _by_closed_form(base, arguments, names, blocks)
    elif not names or discrete:
        raise NoInformation(family.__name__)
    elif base.has_enumerate_support:
        matrix = _by_enumeration(base, arguments, names)
    elif _is_known(family):
        matrix = _by_divergence(base, arguments, names)
    else:
        raise NoInformation(family.__name__)
    dtypes = [originals[name].dtype for name in names]
    return matrix.to(reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype())


def class_counts(base: Any, names: Sequence[str]) -> Tensor | None:
    """Expected counts of an observation's classes, for distributions whose arguments are logits.

    With p the counts over their total, the information in the logits is diag(p) - p p^T times the
    total.

    Returns:
        `[*batch_shape, classes]`, without a graph; None for other distributions or arguments.
    """
    if tuple(names) != ("logits",) or _closed_forms(type(base)) is not CATEGORICAL:
        return None
    logits = own_arguments(base)["logits"]
    totals = torch.as_tensor(getattr(base, "total_count", 1))[..., None]
    counts = totals * logits.detach().double().softmax(-1)
    return counts.to(logits.dtype)


# ------------------------------------------------------------------ wrappers


def _layers(fn: Any) -> Iterator[Any]:
    """Yields a distribution, the distribution that it wraps, and so on to the innermost."""
    while fn is not None:
        yield fn
        fn = _wrapped_by(fn)


def _wrapped_by(fn: Any) -> Any | None:
    """The distribution directly inside a wrapper (`to_event`, a mask, `expand`, a transform), with
    the wrapper's batch shape; None if `fn` wraps none.
    """
    if isinstance(fn, td.Independent | dist.MaskedDistribution):
        return fn.base_dist
    if isinstance(fn, dist.ExpandedDistribution):
        inner = fn.base_dist.expand(torch.Size(fn.batch_shape))
        if isinstance(inner, dist.ExpandedDistribution):  # its class does not define expand
            raise NoInformation(type(inner.base_dist).__name__)
        return inner
    # some of torch's families are transformed distributions themselves
    if isinstance(fn, td.TransformedDistribution) and not _closed_forms(type(fn)):
        if not _is_fixed_and_invertible(fn):
            raise NoInformation(type(fn).__name__)
        return fn.base_dist
    return None


def _is_fixed_and_invertible(fn: Any) -> bool:
    """Whether a distribution's transform is invertible and its parameters do not require grad.

    Transforms keep tensors in attributes, modules, closures and each other, so the transform is
    applied to a value: to ones, or to the identity, which all transforms of matrices accept.
    """
    transform, inner = td.ComposeTransform(fn.transforms), fn.base_dist
    like = next(iter(own_arguments(base_of(inner)).values()), torch.ones(()))
    value = torch.ones(inner.batch_shape + inner.event_shape, dtype=like.dtype, device=like.device)
    if transform.domain.event_dim == 2:
        value = value.tril().triu()
    with torch.enable_grad():
        return transform.bijective and not transform(value).requires_grad


# ------------------------------------------------------------------ arguments


def _read(owner: Any, name: str, default: Any) -> Any:
    """An attribute of a distribution or a constraint; `default` if reading it raises
    `NotImplementedError`, as torch does where the class has none or it depends on a value.
    """
    try:
        return getattr(owner, name)
    except NotImplementedError:
        return default


def _derived(base: Any, names: Container[str]) -> set[str]:
    """The names in `names` that are not the user's own arguments: torch computes them from another
    one, such as `probs` from `logits`.
    """
    holder = vars(getattr(base, "_categorical", base))  # one-hot and multinomial delegate to it
    derived: set[str] = set()
    for group in _ALTERNATIVES:
        present = [name for name in group if name in names]
        stored = [name for name in holder if name in present]  # the constructor's come first
        derived |= set(present) - set((stored or present)[:1])
    return derived


def _expand(value: Tensor, batch_shape: torch.Size, event_dim: int) -> Tensor:
    """A distribution's argument expanded to the whole batch, `[*batch_shape, *event]`, where
    `event` are the last `event_dim` dimensions.

    An argument that already begins with the batch's shape is left alone, because some of Pyro's
    classes declare fewer event dimensions than their arguments have.
    """
    rank = len(batch_shape)
    if value.dim() >= rank + event_dim and value.shape[:rank] == batch_shape:
        return value
    return value.expand(batch_shape + value.shape[value.dim() - event_dim :])


def _rebuild(base: Any, arguments: Arguments, batch_shape: torch.Size) -> Any:
    """A distribution of the same class with other arguments.

    Raises:
        NoInformation: these arguments do not determine it.
    """
    try:
        fn = type(base)(**arguments, validate_args=False)
    except Exception:  # the constructor has other arguments, and may fail in any way
        raise NoInformation(type(base).__name__) from None
    stored = own_arguments(fn)
    same = stored.keys() == arguments.keys() and all(
        is_tracing() or torch.allclose(stored[name], value) for name, value in arguments.items()
    )
    if not same or fn.batch_shape != batch_shape:
        raise NoInformation(type(base).__name__)
    return fn


# ------------------------------------------------------------------ three ways


def _is_known(family: type) -> bool:
    """Whether the log density of a class of distributions is torch's or Pyro's own code. False for
    a user's class with a `log_prob` of its own, for which closed forms may be wrong.
    """
    density: Any = family.log_prob  # type: ignore[attr-defined]
    return density.__module__.split(".")[0] in ("torch", "pyro")


def _closed_forms(family: type) -> Blocks:
    """The closed forms of the Fisher information of a class of distributions (or of the class that
    it is derived from): functions by names of arguments; empty if there are none.
    """
    families = [parent for parent in family.__mro__ if parent in CLOSED_FORMS]
    return CLOSED_FORMS[families[0]] if families and _is_known(family) else {}


def _by_closed_form(
    base: Any, arguments: Arguments, names: Sequence[str], blocks: Blocks
) -> Tensor:
    """The Fisher information in the named arguments, `[*batch_shape, m, m]`, from closed forms of
    its blocks; arguments that have no block together are independent."""
    # a multinomial's total count is an attribute and no argument; other families count as 1
    count = getattr(base, "total_count", 1)
    attributes = SimpleNamespace(**{"total_count": count, **arguments})
    batch_shape = torch.Size(base.batch_shape)
    sizes = {name: math.prod(arguments[name].shape[len(batch_shape) :]) for name in names}
    like = next(iter(arguments.values()))

    def block(row: str, column: str) -> Tensor:
        if (form := blocks.get((row, column))) is not None:
            return form(attributes).reshape((*batch_shape, sizes[row], sizes[column]))
        if (column, row) in blocks:
            return block(column, row).mT
        return like.new_zeros((*batch_shape, sizes[row], sizes[column]))

    if not names:
        return like.new_zeros((*batch_shape, 0, 0))
    # not in place, which vmap does not support where only some arguments differ by row
    return torch.cat([torch.cat([block(row, column) for column in names], -1) for row in names], -2)


def _by_enumeration(base: Any, arguments: Arguments, names: Sequence[str]) -> Tensor:
    """The Fisher information in the named arguments, `[*batch_shape, m, m]`, as the expected outer
    product of the score (the log density's gradient): a sum over the finite support."""
    values, counted = _support(base)
    shape = torch.Size((len(values), *base.batch_shape))
    # a copy of the arguments for each value, so one backward pass gives all scores
    leaves = {name: a.expand(shape[:1] + a.shape).clone() for name, a in arguments.items()}
    named = [leaves[name].requires_grad_() for name in names]
    with torch.enable_grad():
        log_prob = _rebuild(base, leaves, shape).log_prob(values)
        scores = _flat(torch.autograd.grad(log_prob.sum(), named), shape)
    probs = torch.where(counted, log_prob.detach().exp(), 0)
    if not is_tracing() and not torch.allclose(probs.sum(0), torch.ones_like(probs[0]), atol=1e-4):
        raise NoInformation(type(base).__name__)
    scores = torch.where((probs > 0).unsqueeze(-1), scores, 0)
    return torch.einsum("k...,k...i,k...j->...ij", probs, scores, scores)


def _support(base: Any) -> tuple[Tensor, Tensor]:
    """(All K values of a distribution's support, `[K, *batch_shape, *event_shape]`; whether a value
    is in the support of each element of the batch, `[K, *batch_shape]`).

    Raises:
        NoInformation: the support cannot be enumerated, or is too large.
    """
    batch_shape, support = torch.Size(base.batch_shape), base.support
    if isinstance(support, constraints.integer_interval):  # elements may differ in their bounds
        low, high = (torch.as_tensor(b) for b in (support.lower_bound, support.upper_bound))
        count = int(high.max()) + 1
        values = torch.arange(int(low.min()), count, dtype=torch.float64, device=high.device)
        values = values.reshape((-1,) + (1,) * len(batch_shape)).expand((-1, *batch_shape))
        counted = (values >= low) & (values <= high)
        values = values.clamp(low, high)
    else:
        try:
            values = base.enumerate_support()
        except NotImplementedError:
            raise NoInformation(type(base).__name__) from None
        counted = torch.ones(
            values.shape[: 1 + len(batch_shape)], dtype=torch.bool, device=values.device
        )
    if len(values) > LARGEST_SUPPORT:
        raise NoInformation(type(base).__name__)
    return values, counted


def _by_divergence(base: Any, arguments: Arguments, names: Sequence[str]) -> Tensor:
    """The Fisher information in the named arguments, `[*batch_shape, m, m]`, as the second
    derivatives of KL(p || q) with respect to the arguments of q, at q = p.

    Raises:
        NoInformation: torch has no such divergence, or the support depends on the arguments.
    """
    batch_shape = torch.Size(base.batch_shape)
    leaves = {name: a.clone() for name, a in arguments.items()}
    named = [leaves[name].requires_grad_() for name in names]
    with torch.enable_grad():
        other = _rebuild(base, leaves, batch_shape)
        try:
            divergence = td.kl_divergence(_rebuild(base, arguments, batch_shape), other)
            slopes = torch.autograd.grad(divergence.sum(), named, create_graph=True)
            slope = _flat(slopes, batch_shape)
            # elements of the batch are independent, so one backward pass serves all of them
            rows = [
                _flat(torch.autograd.grad(column.sum(), named, retain_graph=True), batch_shape)
                for column in slope.unbind(-1)
            ]
        except (NotImplementedError, RuntimeError):  # no divergence, or no derivatives of it
            raise NoInformation(type(base).__name__) from None
    matrix = torch.stack(rows, -2).detach()
    # at q = p the divergence has its minimum; a slope there means that the support moves
    slopes_squared, least = slope.detach() ** 2, 1e-9 * matrix.diagonal(dim1=-2, dim2=-1).abs()
    if not is_tracing() and bool((slopes_squared > least).any()):
        raise NoInformation(type(base).__name__)
    return (matrix + matrix.mT) / 2


def _flat(parts: Sequence[Tensor], batch_shape: torch.Size) -> Tensor:
    """The values of a distribution's arguments, flattened and concatenated for each element of the
    batch: `[*batch_shape, m]`.
    """
    return torch.cat([part.reshape((*batch_shape, -1)) for part in parts], -1)
