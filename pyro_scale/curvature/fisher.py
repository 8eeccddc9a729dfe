"""The Fisher information of an observation's distribution in the arguments that the user gave it.

Three ways to it: closed forms (`fisher_families.py`), sums over finite supports, and the second
derivatives of the Kullback-Leibler divergence.  What none of them covers is `NoInformation`.
It is computed in float64, since differences of trigammas cancel in float32, and not under
`torch.func`; `base_of` and `own_arguments` go through that and vmap.  All of it can be traced:
what is checked of values has been checked before, as a step runs before it is traced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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

LARGEST_SUPPORT = 10_000  # values that are summed over

# ways to give the same thing, of which torch computes the others when they are read
_ALTERNATIVES = (
    ("probs", "logits"),
    ("covariance_matrix", "precision_matrix", "scale_tril"),
    ("gate", "gate_logits"),
)


class NoInformation(Exception):
    """The named family has no closed form here; it does not reach users."""


def base_of(fn: Any) -> Any:
    """The distribution whose arguments the user gave, without what is wrapped around it.

    That is `to_event`, masks, `expand`, and invertible transforms that depend on nothing: they
    leave the information as it is.  Its batch dimensions are those of `fn`, and then those that
    wrappers made event dimensions.

    Raises:
        NoInformation: a transform is not invertible, or its own tensors require grad.
    """
    *_, base = _layers(fn)
    return base


def mask_of(fn: Any) -> Tensor:
    """What the masks around a distribution let through: booleans that broadcast over
    `base_of(fn).batch_shape`."""
    layers = list(_layers(fn))
    rank = len(layers[-1].batch_shape)
    masks = [torch.as_tensor(f._mask) for f in layers if isinstance(f, dist.MaskedDistribution)]
    aligned = [m.reshape(m.shape + (1,) * (rank - m.dim())) if m.dim() else m for m in masks]
    return reduce(torch.logical_and, aligned, torch.ones((), dtype=torch.bool))


def own_arguments(base: Any) -> Arguments:
    """The arguments that the user gave, in the order of the class's `arg_constraints`.

    They carry the user's graph.  Of a mixture and the like, which have no tensors for arguments,
    the dict is empty even though they depend on something: `information` raises for them.

    Returns:
        name -> `[*batch_shape, *event]`, with the argument's own event dimensions.

    Raises:
        NoInformation: an argument does not have the shape that the class declares.
    """
    declared = _declared(base)
    derived = _derived(base, declared)
    values = {name: getattr(base, name, None) for name in declared if name not in derived}
    try:
        return {
            name: _expand(value, torch.Size(base.batch_shape), _event_dim(declared[name]))
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
        NoInformation: there is none, or no way to it here.
    """
    own = own_arguments(base)
    arguments = {name: value.detach().double() for name, value in own.items()}
    family = type(base)
    blocks = _closed_forms(family)
    if family is dist.DirichletMultinomial and base.total_count.max() > LARGEST_SUPPORT:
        raise NoInformation(family.__name__)
    discrete = any(_is_discrete(_declared(base)[name]) for name in names)
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
    dtypes = [own[name].dtype for name in names]
    return matrix.to(reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype())


def class_counts(base: Any, names: Sequence[str]) -> Tensor | None:
    """What one observation's classes are expected to count, p times the total, given that its
    logits are the only arguments: the information in them is diag(p) - p p^T times the total.

    Returns:
        `[*batch_shape, classes]`, without a graph; None of a distribution that is not such a one.
    """
    if tuple(names) != ("logits",) or _closed_forms(type(base)) is not CATEGORICAL:
        return None
    logits = own_arguments(base)["logits"]
    totals = torch.as_tensor(getattr(base, "total_count", 1))[..., None]
    chances = totals * logits.detach().double().softmax(-1)
    return chances.to(logits.dtype)


# ------------------------------------------------------------------ wrappers


def _layers(fn: Any) -> Iterator[Any]:
    """A distribution, the one that it wraps, the one that this wraps, and so on."""
    while fn is not None:
        yield fn
        fn = _wrapped_by(fn)


def _wrapped_by(fn: Any) -> Any | None:
    """What a distribution is wrapped around, with its batch shape, if anything."""
    if isinstance(fn, td.Independent | dist.MaskedDistribution):
        return fn.base_dist
    if isinstance(fn, dist.ExpandedDistribution):
        inner = fn.base_dist.expand(torch.Size(fn.batch_shape))
        if isinstance(inner, dist.ExpandedDistribution):  # it cannot be expanded itself
            raise NoInformation(type(inner.base_dist).__name__)
        return inner
    # torch makes some families of transforms of their arguments
    if isinstance(fn, td.TransformedDistribution) and not _closed_forms(type(fn)):
        if not _is_fixed_and_invertible(fn):
            raise NoInformation(type(fn).__name__)
        return fn.base_dist
    return None


def _is_fixed_and_invertible(fn: Any) -> bool:
    """Whether a distribution's transform can be undone, and depends on no tensor with a graph.

    Transforms keep tensors in attributes, modules, closures and each other, so it is tried out; on
    a matrix it is the identity that all of them take.
    """
    transform, inner = td.ComposeTransform(fn.transforms), fn.base_dist
    like = next(iter(own_arguments(base_of(inner)).values()), torch.ones(()))
    value = torch.ones(inner.batch_shape + inner.event_shape, dtype=like.dtype, device=like.device)
    if transform.domain.event_dim == 2:
        value = value.tril().triu()
    with torch.enable_grad():
        return transform.bijective and not transform(value).requires_grad


# ------------------------------------------------------------------ arguments


def _declared(base: Any) -> Mapping[str, Any]:
    """A distribution's arguments' constraints."""
    try:
        return base.arg_constraints
    except NotImplementedError:
        return {}


def _derived(base: Any, names: Mapping[str, Any]) -> set[str]:
    """Which arguments the user did not give, but one that they follow from."""
    holder = vars(getattr(base, "_categorical", base))  # one-hot and multinomial delegate to it
    derived: set[str] = set()
    for group in _ALTERNATIVES:
        present = [name for name in group if name in names]
        held = [name for name in holder if name in present]  # the constructor's before those read
        derived |= set(present) - set((held or present)[:1])
    return derived


def _event_dim(constraint: Any) -> int:
    try:
        return constraint.event_dim
    except NotImplementedError:  # it depends on the value
        return 0


def _is_discrete(constraint: Any) -> bool:
    try:
        return constraint.is_discrete
    except NotImplementedError:  # it depends on the value
        return False


def _expand(value: Tensor, batch_shape: torch.Size, event_dim: int) -> Tensor:
    """An argument over the whole batch.  Some of Pyro's classes declare less event dimensions than
    their arguments have, so what has the batch's shape already is left alone."""
    rank = len(batch_shape)
    if value.dim() >= rank + event_dim and value.shape[:rank] == batch_shape:
        return value
    return value.expand(batch_shape + value.shape[value.dim() - event_dim :])


def _rebuild(base: Any, arguments: Arguments, batch_shape: torch.Size) -> Any:
    """The same distribution of other arguments, as far as they say all of it."""
    try:
        fn = type(base)(**arguments, validate_args=False)
    except Exception:  # constructors that want something else, and fail in any way
        raise NoInformation(type(base).__name__) from None
    made = own_arguments(fn)
    same = made.keys() == arguments.keys() and all(
        is_tracing() or torch.allclose(made[name], value) for name, value in arguments.items()
    )
    if not same or fn.batch_shape != batch_shape:  # its arguments are not what it keeps
        raise NoInformation(type(base).__name__)
    return fn


# ------------------------------------------------------------------ three ways


def _is_known(family: type) -> bool:
    """Whether a family's density is torch's or Pyro's: with a user's own, the class that it was
    derived from says nothing of it."""
    density: Any = family.log_prob  # type: ignore[attr-defined]
    return density.__module__.split(".")[0] in ("torch", "pyro")


def _closed_forms(family: type) -> Blocks:
    """The blocks of a family, or of the one that it was derived from; none where it has none."""
    families = [parent for parent in family.__mro__ if parent in CLOSED_FORMS]
    return CLOSED_FORMS[families[0]] if families and _is_known(family) else {}


def _by_closed_form(
    base: Any, arguments: Arguments, names: Sequence[str], blocks: Blocks
) -> Tensor:
    # a multinomial's total count is an attribute and no argument; others than counts have one of 1
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
    # out of place, as vmap asks for where some arguments are a row's own and others are not
    return torch.cat([torch.cat([block(row, each) for each in names], -1) for row in names], -2)


def _by_enumeration(base: Any, arguments: Arguments, names: Sequence[str]) -> Tensor:
    """The mean of the scores' outer products over all values."""
    values, counted = _support(base)
    shape = torch.Size((len(values), *base.batch_shape))
    # each value has arguments of its own, so one backward pass gives all scores
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
    """(All values `[K, *batch_shape, *event_shape]`, whether they count `[K, *batch_shape]`)."""
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
    """The second derivatives of KL(now || other) in the other's arguments, where it is the same."""
    batch_shape = torch.Size(base.batch_shape)
    leaves = {name: a.clone() for name, a in arguments.items()}
    named = [leaves[name].requires_grad_() for name in names]
    with torch.enable_grad():
        other = _rebuild(base, leaves, batch_shape)
        try:
            divergence = td.kl_divergence(_rebuild(base, arguments, batch_shape), other)
            slopes = torch.autograd.grad(divergence.sum(), named, create_graph=True)
            slope = _flat(slopes, batch_shape)
            # elements of the batch do not know of each other, so all are derived at once
            rows = [
                _flat(torch.autograd.grad(column.sum(), named, retain_graph=True), batch_shape)
                for column in slope.unbind(-1)
            ]
        except (NotImplementedError, RuntimeError):  # no divergence, or no derivatives of it
            raise NoInformation(type(base).__name__) from None
    matrix = torch.stack(rows, -2).detach()
    # a divergence is least where both are the same; where it has a slope there, the support moves
    slopes_squared, least = slope.detach() ** 2, 1e-9 * matrix.diagonal(dim1=-2, dim2=-1).abs()
    if not is_tracing() and bool((slopes_squared > least).any()):
        raise NoInformation(type(base).__name__)
    return (matrix + matrix.mT) / 2


def _flat(parts: Sequence[Tensor], batch_shape: torch.Size) -> Tensor:
    """Arguments side by side, `[*batch_shape, m]`."""
    return torch.cat([part.reshape((*batch_shape, -1)) for part in parts], -1)
