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

#: What `predict` can keep instead of all draws: numbers are quantiles' levels.
Reduce = Literal["mean", "entropy", "variance"] | Sequence[float]

#: Families whose mean and variance are no expectations of their values.
_DIRECTIONS = (torch.distributions.VonMises, dist.VonMises3D, dist.ProjectedNormal)
#: Families of classes.
_CLASSES = (
    torch.distributions.Categorical,
    torch.distributions.OneHotCategorical,
    torch.distributions.Bernoulli,
)
#: Numbers that are sorted at once.
_SORTED = 2**23


class Means:
    """Means of terms over draws, in double precision."""

    def __init__(self) -> None:
        self.count = 0
        self.means: list[Tensor] = []

    def add(self, terms: Sequence[Tensor]) -> None:
        """Adds the terms of some draws, `[draws, ...]` each."""
        new = [term.mean(0, dtype=torch.float64) for term in terms]
        self.count += len(terms[0])
        share = len(terms[0]) / self.count
        if not self.means:
            self.means = new
        else:  # so that what is infinite stays so
            pairs = zip(self.means, new, strict=True)
            self.means = [(1 - share) * mean + share * more for mean, more in pairs]


class Moments(Means):
    """Them, and the first term's variance; some draws are added to others as in Chan, Golub and
    LeVeque (1983)."""

    def __init__(self) -> None:
        super().__init__()
        self.variance = torch.zeros((), dtype=torch.float64)

    def add(self, terms: Sequence[Tensor]) -> None:
        first = terms[0].double()
        mean = first.mean(0)
        before = self.means[0] if self.means else mean
        super().add(terms)
        share = len(first) / self.count
        within, between = (first - mean).square().mean(0), (mean - before).square()
        self.variance = (1 - share) * (self.variance + share * between) + share * within


class Values:
    """Values of draws."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def add(self, terms: Sequence[Tensor]) -> None:
        """Adds those of some draws, `[draws, ...]`."""
        self.values.append(terms[0])

    def by_column(self) -> tuple[Tensor, Sequence[Tensor]]:
        """(The values of all draws `[draws, ...]`, as floats; the same as `[draws, elements]`, some
        elements at a time)."""
        values = torch.cat(self.values)
        values = values if values.is_floating_point() else values.float()
        table = values.reshape(len(values), values.shape[1:].numel())
        return values, table.split(max(1, _SORTED // len(values)), dim=1)


class Reduction:
    """What is kept.

    Attributes:
        observed_only: whether it takes a distribution, and not only a value.
        gathered: what the terms of draws are gathered in.
    """

    observed_only: ClassVar[bool] = True
    gathered: ClassVar[type[Means | Values]] = Means

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        """What a draw of the posterior adds (or several, in dimensions before the site's)."""
        raise NotImplementedError

    def total(self, draws: Any) -> Any:
        """What comes out: a tensor, or a tuple of them."""
        raise NotImplementedError

    def axis(self, site: Site, axis: int) -> int:
        """The rows' axis in what comes out, given that in the site's value, from the right."""
        return axis


class Mean(Reduction):
    """The predictive mean; of a site of classes, their probabilities in a last dimension."""

    observed_only = False

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        return (_mean(site),)

    def total(self, draws: Means) -> Tensor:
        return draws.means[0]

    def axis(self, site: Site, axis: int) -> int:
        return axis - 1 if _is_classes(site) else axis


class Entropy(Reduction):
    """Entropies of classes, in nats: the paper's equation 2."""

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        probs = _class_probs(site)
        return probs, torch.special.entr(probs).sum(-1)

    def total(self, draws: Means) -> Uncertainty:
        return of_entropies(*draws.means)

    def axis(self, site: Site, axis: int) -> int:
        return axis + 1 if is_one_hot(site) else axis


class Variance(Reduction):
    """Variances: the law of total variance."""

    gathered = Moments

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        if _is_classes(site):
            raise ArgumentError(
                f"reduce='variance': site '{site.name}' is of classes, which have no variance: "
                "pass reduce='entropy', or return_sites= without it"
            )
        return _moment(site, "mean"), _moment(site, "variance")

    def total(self, draws: Moments) -> Uncertainty:
        aleatoric, epistemic = draws.means[1], draws.variance
        return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)


@dataclass(frozen=True)
class Quantiles(Reduction):
    """Quantiles of the predictive draws, `[levels, ...]`."""

    levels: tuple[float, ...]
    observed_only, gathered = False, Values

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        if site.kind == "observed" and _is_classes(site):
            raise ArgumentError(
                f"reduce={list(self.levels)}: site '{site.name}' is of classes, which have no "
                "order: pass reduce='mean' for their probabilities"
            )
        return (site.value,)

    def total(self, draws: Values) -> Tensor:
        values, columns = draws.by_column()
        levels = values.new_tensor(self.levels)
        quantiles = [levels.new_empty(len(levels), 0)]  # torch has none of no elements
        quantiles += [column.quantile(levels, dim=0) for column in columns if column.numel()]
        return torch.cat(quantiles, dim=1).reshape(len(levels), *values.shape[1:])


class Flat(Values):
    """Values of draws, several of each, all alike."""

    def add(self, terms: Sequence[Tensor]) -> None:
        self.values.append(terms[0].flatten(0, 1))


@dataclass(frozen=True)
class Central(Reduction):
    """The central interval of the predictive draws.

    Args:
        level: the probability in it.
        repeats: how many values are drawn for each draw of the posterior.
    """

    level: float
    repeats: int
    observed_only, gathered = False, Flat

    def terms(self, site: Site) -> tuple[Tensor, ...]:
        if self.repeats > 1 and site.kind == "observed":
            return (draws(site.fn, self.repeats),)
        return (site.value.expand(self.repeats, *site.value.shape),)

    def total(self, draws: Values) -> Interval:
        values, columns = draws.by_column()
        level = torch.tensor([self.level], dtype=torch.float64, device=values.device)
        ends = zip(*(central(column, level) for column in columns), strict=True)
        lower, upper = (torch.cat(end, 1).reshape(values.shape[1:]) for end in ends)
        return Interval(lower, upper)


@dataclass(frozen=True)
class Ranked(Reduction):
    """The probability of all classes that are more probable than a class, `[..., classes]`.

    Args:
        randomized: whether a random part of the class's own is added, which makes it the score of
            adaptive prediction sets (Romano, Sesia and Candes 2020): uniform if an observation is
            a draw from these probabilities.
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


def reduction_of(reduce: Reduce | Reduction) -> Reduction:
    """What is asked for.

    Raises:
        ArgumentError: it is none of these.
    """
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


def _is_level(level: object) -> bool:
    return isinstance(level, int | float) and 0 <= level <= 1


def _base(site: Site) -> Any:
    try:
        return base_of(site.fn)
    except NoInformation:
        return site.fn


def _is_classes(site: Site) -> bool:
    return site.kind == "observed" and isinstance(_base(site), torch.distributions.Categorical)


def is_of_classes(site: Site) -> bool:
    """Whether an observed site's values are classes: their numbers, one of them hot, or 0 and 1."""
    return isinstance(_base(site), _CLASSES)


def is_one_hot(site: Site) -> bool:
    """Whether the classes are the last dimension of an observed site's values."""
    return isinstance(_base(site), torch.distributions.OneHotCategorical)


def _class_probs(site: Site) -> Tensor:
    base = _base(site)
    if isinstance(base, torch.distributions.Categorical):
        return class_probs(base)
    if isinstance(base, torch.distributions.OneHotCategorical):
        return base.probs
    if isinstance(base, torch.distributions.Bernoulli):
        return torch.stack([1 - base.probs, base.probs], -1)
    raise ArgumentError(
        f"reduce='entropy': site '{site.name}' is a {type(base).__name__}, not of classes: pass "
        "reduce='variance', or return_sites= without it"
    )


def _mean(site: Site) -> Tensor:
    if site.kind != "observed":
        return site.value
    return class_probs(_base(site)) if _is_classes(site) else _moment(site, "mean")


def _moment(site: Site, which: Literal["mean", "variance"]) -> Tensor:
    fn = base_distribution(site.fn)
    try:
        if isinstance(fn, _DIRECTIONS):
            raise NotImplementedError  # theirs are of directions
        return getattr(fn, which)
    except (NotImplementedError, AttributeError) as error:
        no_draws = site.value.is_floating_point() and bool(site.value.isnan().all())
        fix = (
            "give its class one, or a sample() method"
            if no_draws
            else "pass quantiles' levels, such as reduce=[0.05, 0.5, 0.95]"
        )
        raise ArgumentError(
            f"reduce: there is no {which} in closed form for site '{site.name}' "
            f"({type(fn).__name__}): {fix}"
        ) from error
