"""Summaries of a predictive distribution, accumulated over blocks of draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_scale.curvature.fisher import NoInformation, base_of
from pyro_scale.errors import ArgumentError
from pyro_scale.metrics.calibration import central
from pyro_scale.metrics.conformal import Interval
from pyro_scale.metrics.decomposition import Uncertainty, of_entropies
from pyro_scale.model.draws import class_probs, draws
from pyro_scale.model.sites import Site, base_distribution

#: What `predict` can return instead of all draws; numbers are levels of quantiles.
Reduce = Literal["mean", "entropy", "variance"] | Sequence[float]

#: Families of directions, whose `mean` and `variance` are not those of their values.
_DIRECTIONS = (torch.distributions.VonMises, dist.VonMises3D, dist.ProjectedNormal)
#: Families over classes.
_CLASSES = (
    torch.distributions.Categorical,
    torch.distributions.OneHotCategorical,
    torch.distributions.Bernoulli,
)
#: Numbers that are sorted in one call.
_NUMBERS_SORTED = 2**23


class Means:
    """Accumulates the means over draws of several tensors (terms), in double precision. Attributes:
    `count`, the number of draws; `means`, one tensor for each term."""

    def __init__(self) -> None:
        self.count = 0
        self.means: list[Tensor] = []

    def add(self, terms: Sequence[Tensor]) -> None:
        """Adds a block of draws to the means.

        Args:
            terms: the block's draws of every term, `[draws, ...]` each.
        """
        means = [term.mean(0, dtype=torch.float64) for term in terms]
        self.count += len(terms[0])
        share = len(terms[0]) / self.count
        if not self.means:
            self.means = means
        else:  # a weighted mean: an infinite mean stays infinite
            pairs = zip(self.means, means, strict=True)
            self.means = [(1 - share) * mean + share * block for mean, block in pairs]


class Moments(Means):
    """Accumulates the means over draws of several terms, and the variance of the first one, which
    divides by the number of draws (Chan, Golub and LeVeque 1983)."""

    def __init__(self) -> None:
        super().__init__()
        self.variance = torch.zeros((), dtype=torch.float64)

    def add(self, terms: Sequence[Tensor]) -> None:
        first = terms[0].double()
        mean = first.mean(0)
        mean_before = self.means[0] if self.means else mean
        super().add(terms)
        share = len(first) / self.count
        within, between = (first - mean).square().mean(0), (mean - mean_before).square()
        self.variance = (1 - share) * (self.variance + share * between) + share * within


class Values:
    """Accumulator that keeps all draws of one term, `[draws, ...]`, for summaries that need them at
    once: quantiles and intervals."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def add(self, terms: Sequence[Tensor]) -> None:
        """Keeps a block of draws.

        Args:
            terms: tensors `[draws, ...]`, of which only the first is kept.
        """
        self.values.append(terms[0])

    @property
    def total(self) -> Tensor:
        """All draws in the order in which they were added, `[draws, ...]`."""
        return torch.cat(self.values)


class Reduction:
    """Base class of what `predict` returns of each site: all draws, or a summary that is
    accumulated over blocks of draws.

    Attributes:
        keeps_draws: whether all draws are returned, in the site's own dtype.
        observed_only: whether only observed sites have this summary, because it needs a
            distribution.
        accumulator: class that accumulates the terms over draws.
    """

    keeps_draws: ClassVar[bool] = False
    observed_only: ClassVar[bool] = True
    accumulator: ClassVar[type[Means | Values]] = Means

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        """The tensors of a site whose average over posterior draws the summary needs, such as mean
        and variance of its distribution.

        Args:
            site: the site in a run of the model at one posterior draw, or at several in leading
                dimensions.
        """
        raise NotImplementedError

    def total(self, draws: Any) -> Any:
        """The summary of a site, a tensor or a tuple of tensors, as `predict` returns it.

        Args:
            draws: accumulator of the class `accumulator`, to which the terms of all draws were
                added.
        """
        raise NotImplementedError

    def axis(self, site: Site, axis: int) -> int:
        """The axis of the rows in the summary, for joining chunks of rows, from the axis of the
        rows in the site's value. Axes are negative, counted from the right."""
        return axis


class AllDraws(Reduction):
    """All predictive draws of a site, `[draws, ...]`."""

    keeps_draws, observed_only, accumulator = True, False, Values

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        return (site.value,)

    def total(self, draws: Values) -> Tensor:
        return draws.total


class Mean(Reduction):
    """The predictive mean of a site, of its value's shape; for Categorical sites, the classes'
    probabilities in a last dimension."""

    observed_only = False

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        if site.kind != "observed":
            return (site.value,)
        if _is_categorical(site):
            return (class_probs(_base(site)),)
        return (_moment(site, "mean"),)

    def total(self, draws: Means) -> Tensor:
        return draws.means[0]

    def axis(self, site: Site, axis: int) -> int:
        return axis - 1 if _is_categorical(site) else axis


class Entropy(Reduction):
    """Entropies of the predictive distribution of classes, in nats, split into aleatoric and
    epistemic parts: the paper's equation 2."""

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        probs = _class_probs(site)
        return probs, torch.special.entr(probs).sum(-1)

    def total(self, draws: Means) -> Uncertainty:
        return of_entropies(*draws.means)

    def axis(self, site: Site, axis: int) -> int:
        return axis + 1 if is_one_hot(site) else axis


class Variance(Reduction):
    """Predictive variances, split into aleatoric and epistemic parts by the law of total
    variance.
    """

    accumulator = Moments

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        if _is_categorical(site):
            raise ArgumentError(
                f"reduce='variance': site '{site.name}' is categorical, and classes have no "
                "variance: pass reduce='entropy', or return_sites= without it"
            )
        return _moment(site, "mean"), _moment(site, "variance")

    def total(self, draws: Moments) -> Uncertainty:
        aleatoric, epistemic = draws.means[1], draws.variance
        return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)


@dataclass(frozen=True)
class Quantiles(Reduction):
    """Quantiles of the predictive draws, `[levels, ...]`.

    Attributes:
        levels: levels of the quantiles, from 0 to 1.
    """

    levels: tuple[float, ...]
    observed_only, accumulator = False, Values

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        if _is_categorical(site):
            raise ArgumentError(
                f"reduce={list(self.levels)}: site '{site.name}' is categorical, and classes have "
                "no order: pass reduce='mean' for their probabilities"
            )
        return (site.value,)

    def total(self, draws: Values) -> Tensor:
        values, columns = _columns(draws.total)
        levels = values.new_tensor(self.levels)
        quantiles = [levels.new_empty(len(levels), 0)]  # torch has none of no elements
        quantiles += [column.quantile(levels, dim=0) for column in columns if column.numel()]
        return torch.cat(quantiles, dim=1).reshape(len(levels), *values.shape[1:])


@dataclass(frozen=True)
class Central(Reduction):
    """The central interval of the predictive draws, as lower and upper ends.

    Args:
        level: probability inside the interval.
        repeats: number of predictive draws for each draw of the posterior.
    """

    level: float
    repeats: int
    observed_only, accumulator = False, Values

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        if self.repeats > 1 and site.kind == "observed":
            return (draws(site.fn, self.repeats),)
        return (site.value.expand(self.repeats, *site.value.shape),)

    def total(self, draws: Values) -> Interval:
        values, columns = _columns(draws.total.flatten(0, 1))
        level = torch.tensor([self.level], dtype=torch.float64, device=values.device)
        ends = zip(*(central(column, level) for column in columns), strict=True)
        lower, upper = (torch.cat(end, 1).reshape(values.shape[1:]) for end in ends)
        return Interval(lower, upper)


@dataclass(frozen=True)
class Ranked(Reduction):
    """For each class, the total predictive probability of the classes that are more probable,
    `[..., classes]`: sets of the most probable classes follow from it.

    Args:
        randomized: whether a uniform fraction of the class's probability is added.  The result is
            then the score of adaptive prediction sets (Romano, Sesia and Candes 2020): uniform if
            the observed class is a draw from these probabilities.
    """

    randomized: bool

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        return (_class_probs(site),)

    def total(self, draws: Means) -> Tensor:
        ordered, order = draws.means[0].sort(dim=-1, descending=True, stable=True)
        scores = ordered.cumsum(-1) - ordered
        if self.randomized:
            scores = scores + ordered * torch.rand_like(ordered[..., :1])
        return torch.zeros_like(scores).scatter(-1, order, scores)

    def axis(self, site: Site, axis: int) -> int:
        return axis if is_one_hot(site) else axis - 1


_BY_NAME: dict[str, type[Reduction]] = {"mean": Mean, "entropy": Entropy, "variance": Variance}


def as_reduction(reduce: Reduce | Reduction | None) -> Reduction:
    """The reduction that a user's `reduce=` names; all draws for None.

    Args:
        reduce: "mean", "entropy", "variance", levels of quantiles, a reduction (returned as it is),
            or None.

    Raises:
        ArgumentError: `reduce` is none of these.
    """
    if reduce is None:
        return AllDraws()
    if isinstance(reduce, Reduction):
        return reduce
    if isinstance(reduce, str) and reduce in _BY_NAME:
        return _BY_NAME[reduce]()
    levels = reduce.tolist() if isinstance(reduce, Tensor) else reduce
    if isinstance(levels, list | tuple) and levels and all(map(_is_level, levels)):
        return Quantiles(tuple(levels))
    raise ArgumentError(
        f"reduce={reduce!r}: pass one of {list(_BY_NAME)}, or quantiles' levels from 0 to 1, such "
        "as [0.05, 0.5, 0.95]"
    )


def _columns(values: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Draws as floats, and the same numbers as matrices small enough to be sorted in one call.

    Returns:
        (The draws, `[draws, ...]`; matrices `[draws, elements]`, which together have all elements).
    """
    values = values if values.is_floating_point() else values.float()
    table = values.reshape(len(values), values.shape[1:].numel())
    return values, table.split(max(1, _NUMBERS_SORTED // len(values)), dim=1)


def _is_level(level: object) -> bool:
    return isinstance(level, int | float) and 0 <= level <= 1


def _base(site: Site) -> Any:
    """A site's distribution without the wrappers of `to_event` and masks; the distribution itself
    if its base cannot be found, as with transforms."""
    try:
        return base_of(site.fn)
    except NoInformation:
        return site.fn


def _is_categorical(site: Site) -> bool:
    """Whether a site is observed and Categorical, so that its values are numbers of classes."""
    return site.kind == "observed" and isinstance(_base(site), torch.distributions.Categorical)


def is_of_classes(site: Site) -> bool:
    """Whether an observed site is Categorical, OneHotCategorical or Bernoulli, so that its values
    are classes."""
    return isinstance(_base(site), _CLASSES)


def is_one_hot(site: Site) -> bool:
    """Whether an observed site is OneHotCategorical, so that its values' last dimension is that of
    the classes."""
    return isinstance(_base(site), torch.distributions.OneHotCategorical)


def _class_probs(site: Site) -> Tensor:
    """The probabilities of an observed site's classes, `[..., classes]`; of 0 and 1 for a
    Bernoulli.

    Raises:
        ArgumentError: the site has no classes.
    """
    base = _base(site)
    if isinstance(base, torch.distributions.Categorical):
        return class_probs(base)
    if isinstance(base, torch.distributions.OneHotCategorical):
        return base.probs
    if isinstance(base, torch.distributions.Bernoulli):
        return torch.stack([1 - base.probs, base.probs], -1)
    raise ArgumentError(
        f"reduce='entropy': site '{site.name}' is a {type(base).__name__}, which has no classes: "
        "pass reduce='variance', or return_sites= without it"
    )


def _moment(site: Site, which: Literal["mean", "variance"]) -> Tensor:
    """The mean or variance, elementwise, of an observed site's distribution in closed form.

    Raises:
        ArgumentError: there is no closed form.
    """
    fn = base_distribution(site.fn)
    try:
        if isinstance(fn, _DIRECTIONS):
            raise NotImplementedError
        return getattr(fn, which)
    except (NotImplementedError, AttributeError) as error:
        has_no_draws = site.value.is_floating_point() and bool(site.value.isnan().all())
        fix = (
            "give its class one, or a sample() method"
            if has_no_draws
            else "pass quantiles' levels, such as reduce=[0.05, 0.5, 0.95]"
        )
        raise ArgumentError(
            f"reduce: there is no {which} in closed form for site '{site.name}' "
            f"({type(fn).__name__}): {fix}"
        ) from error
