"""The anchor of the nodes: the integrated posterior's mode, and the members' modes there.

Both are found by turns: the members' latents move to their modes given the globals, and the globals
to the mode of the posterior over these nodes.  This is done with a sample of the units first; all
of them take a few gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.gaussian import Dense
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.modes import newton_refine
from pyro_scale.curvature.newton import Ascent, ascend
from pyro_scale.data.sources import TensorData
from pyro_scale.errors import DataError, SiteError
from pyro_scale.marginal.integrated import Integrated, column_of
from pyro_scale.marginal.local_sites import (
    SAMPLE_ALL,
    LocalLatent,
    LocalSites,
    draw_from_prior,
)
from pyro_scale.marginal.nodes import (
    best_of,
    derivatives,
    gauss_hermite,
    gaussians_at,
    newton_step,
)
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.observation_checks import inside_support, outside_support
from pyro_scale.model.sites import Site
from pyro_scale.rng.seeds import Purpose, generator


@dataclass(frozen=True)
class AnchorPolicy:
    """Numbers by which the anchor and the nodes are chosen.

    Attributes:
        sample: units with which the search begins; their curvature serves for all.
        rounds: most turns of nodes and mode.
        steps: Newton steps of the globals in a turn.
        moved: distance of the mode from one turn to the next, in posterior sds, that ends the
            search: nodes change with its square.
        counts: numbers of nodes of a dimension that are tried, ascending.
        most_nodes: most nodes of a member.
        mean_bias: largest predicted bias of a mean, in posterior sds.
        sd_bias: largest predicted relative bias of an sd.
        local_steps: most Newton steps to a member's mode.
        local_gain: gain of a Newton step, in nats, below which a member is at its mode.
        tries: fewest searches for other modes of members, from draws of their priors.
        refining: passes that the steps through all units count as.
        chunk: rows whose derivatives are computed together.
    """

    sample: int = 2000
    rounds: int = 12
    steps: int = 4
    moved: float = 0.3
    counts: tuple[int, ...] = (5, 7, 9, 15, 31)
    most_nodes: int = 1000
    mean_bias: float = 0.02
    sd_bias: float = 0.01
    local_steps: int = 30
    local_gain: float = 1e-4
    tries: int = 512
    refining: float = 4.0
    chunk: int = 2**17


ANCHOR = AnchorPolicy()


class Bias(NamedTuple):
    """Predicted bias of the posterior over K nodes a dimension, compared with 2K + 1.

    Attributes:
        means: bias of each global's mean, in posterior sds, `[D]`.
        sds: relative bias of each global's sd, `[D]`.
    """

    means: Tensor
    sds: Tensor

    @property
    def is_small(self) -> bool:
        """Whether every bias is within what is allowed."""
        return self.largest_mean <= ANCHOR.mean_bias and self.largest_sd <= ANCHOR.sd_bias

    @property
    def largest_mean(self) -> float:
        """The largest bias of a mean, in posterior sds."""
        return float(self.means.abs().max())

    @property
    def largest_sd(self) -> float:
        """The largest relative bias of an sd."""
        return float(self.sds.abs().max())


class Anchor(NamedTuple):
    """The model with its local latents summed out, and the data with its column.

    Attributes:
        model: the integrated model.
        arguments: the arguments of that model for all units.
        layout: the globals' order in a position.
        gaussian: Gaussian of the unconstrained globals at the anchor.
        bias: predicted bias of the nodes.
    """

    model: Integrated
    arguments: tuple[Arguments, Tensor]
    layout: Layout
    gaussian: Dense
    bias: Bias

    @property
    def latents(self) -> tuple[LocalLatent, ...]:
        """The latents that are summed out."""
        return self.model.local.latents


def find_anchor(
    local: LocalSites, units: Any, seed: int, examined: dict[int, LogPosterior] | None = None
) -> Anchor:
    """Finds the mode of the integrated posterior given all units and the members' modes there, and
    chooses the number of nodes.

    Args:
        local: the local part of the model.
        units: all units, as the arguments of `local.model`.
        seed: seed of the sample of units.
        examined: integrated models after their preflight, by the number of units, from searches on
            other data of the same shapes; those of this search are added.

    Raises:
        SiteError: there is no mode, or no number of nodes is enough.
        DataError: a member's density is NaN or infinite.
    """
    search = _Search(local, units, seed, {} if examined is None else examined)
    ascent = search.of_sample()
    position, modes, num_flat = search.of_all(ascent)
    count, bias, precision = search.choose_count(position, modes)
    slots = local.model.used_slots(units)
    members = len(modes) if slots is None else int(slots.sum())
    unsure = f"; at {num_flat:,} no mode was found" if num_flat else ""
    unseen = search.unseen_share(position, modes, count) + num_flat / len(modes)
    model = Integrated(local, count, search.is_far, unseen_bias=unseen * math.sqrt(members))
    model.description = (
        f"{local.names} summed out over {model.num_nodes} nodes of each of {members:,} "
        f"{local.unit}s (predicted bias {bias.largest_mean:.2g} sds in means, "
        f"{bias.largest_sd:.2g} of sds; placed in {search.passes:.0f} passes{unsure})"
    )
    arguments = units, column_of(modes, search.num_units)
    gaussian = Dense.from_precision(position.double(), precision)
    return Anchor(model, arguments, search.layout, gaussian, bias)


class _Search:
    """The search for the anchor; counts its passes.

    Attributes:
        num_units: N, the number of units.
        is_far: whether there are so few units that globals may be far from the anchor.
        layout: the globals' order in a position.
        passes: passes through all members with all their nodes so far.
    """

    def __init__(
        self,
        local: LocalSites,
        units: Arguments,
        seed: int,
        examined: dict[int, LogPosterior],
    ):
        self._local, self._units, self._examined = local, units, examined
        self.num_units = rows.count(units) or 1
        self.passes = 0.0
        self._counts = [k for k in ANCHOR.counts if k**local.num_dims <= ANCHOR.most_nodes]
        self._middle = self._counts[min(1, len(self._counts) - 1)]
        random = generator(seed, 0, Purpose.SEARCH)
        self._chosen = torch.randperm(self.num_units, generator=random)[: ANCHOR.sample].sort()[0]
        self.is_far = len(self._chosen) == self.num_units
        self._sample = rows.take(units, self._chosen)
        self._start = torch.zeros(local.model.members(self._sample).count, local.num_dims)
        self._log_posterior, data = self._integrate(self._middle, self._sample, self._start)
        first = self._log_posterior.start(data.first(), seed)
        self.layout = Layout.from_tensors(first)
        self._first = self.layout.flatten(first)

    def _integrate(
        self, count: int, units: Arguments, modes: Tensor
    ) -> tuple[LogPosterior, TensorData]:
        """(The integrated model of some units as if they were all; its data)."""
        size = rows.count(units) or 1
        data = TensorData((units, column_of(modes, size)), size)
        model = Integrated(self._local, count, self.is_far)
        if size not in self._examined:
            self._examined[size] = log_posterior = LogPosterior(model, size)
            log_posterior.prepare(rows.take(data.arguments, slice(0, 16)))
        # sites and scaling are the same for every number of nodes
        info = self._examined[size].model_info
        log_posterior = self._examined[size].of_model(model, size, lambda *_: info)
        log_posterior.prepare(data.arguments)
        return log_posterior, data

    def _density(self, count: int, units: Arguments, modes: Tensor) -> FullDataDensity:
        """The integrated posterior given some units as if they were all."""
        return FullDataDensity(*self._integrate(count, units, modes), self.layout)

    def _values(self, position: Tensor) -> dict[str, Tensor]:
        """Constrained values of the globals at a position, by site."""
        return self._log_posterior.constrain(self.layout.unflatten(position))

    def of_sample(self) -> Ascent:
        """The mode of the integrated posterior given a sample of the units, as if it were all."""
        share = len(self._chosen) / self.num_units
        density = self._density(self._middle, self._sample, self._start)
        position, modes = torch.zeros_like(self._first), self._start
        if not bool(density.grad(position)[0].isfinite()):
            position = self._first
        path = []
        for _ in range(ANCHOR.rounds):
            values = self._values(position)
            modes, _ = self._modes(values, self._sample, modes, share)
            density = self._density(self._middle, self._sample, modes)
            ascent = ascend(density, position, most_steps=ANCHOR.steps)
            self.passes += share * density.passes * len(ascent.path)
            step = (ascent.position - position).double()
            position = ascent.position
            if ascent.is_mode and float(step @ ascent.precision @ step) < ANCHOR.moved**2:
                return ascent
            path.append(ascent)
        # there is no mode, as in a centered hierarchy of the globals: the most mass on the way
        best = max(path, key=_log_mass)
        if not math.isfinite(_log_mass(best)):
            raise SiteError(
                f"site {self._local.names}: with these summed out, there is nowhere to place nodes "
                f"by: the density is not finite, or rises without end; {SAMPLE_ALL}",
                code="local-latent",
            )
        return best._replace(precision=_positive(best.precision), is_mode=False)

    def of_all(self, ascent: Ascent) -> tuple[Tensor, Tensor, int]:
        """(The mode given all units, `[D]`; all members' modes there, `[n, d]`; the number of
        members without one), from the mode given the sample."""
        position = ascent.position
        members = self._local.model.members(self._units).count
        start = torch.zeros(members, self._local.num_dims).to(position)
        modes, num_flat = self._modes(self._values(position), self._units, start)
        if len(self._chosen) == self.num_units or not ascent.is_mode:
            return position, modes, num_flat
        density = self._density(self._middle, self._units, modes)
        matrix = (ascent.precision / len(self._chosen)).to(position)
        near = ANCHOR.moved**2 * len(position)
        places = torch.arange(len(position))
        refined = newton_refine(density, position, lambda _: matrix, places, near)
        self.passes += ANCHOR.refining
        modes, num_flat = self._modes(self._values(refined.position), self._units, modes)
        return refined.position, modes, num_flat

    def choose_count(self, position: Tensor, modes: Tensor) -> tuple[int, Bias, Tensor]:
        """(The fewest nodes whose bias is small; that bias; the precision of the globals given all
        units, `[D, D]` in float64)."""
        share = len(self._chosen) / self.num_units
        sample = column_of(modes, self.num_units)[self._chosen].flatten(0, 1)
        for count in self._counts:
            parts = []
            for nodes in (count, 2 * count + 1):
                density = self._density(nodes, self._sample, sample)
                parts.append(density.derivatives(position))
                self.passes += share * density.passes * nodes / self._middle
            (_, slope, hessian), (_, better_slope, better_hessian) = parts
            precision = _positive(-self.num_units * better_hessian.double())
            bias = _bias(
                self.num_units * (slope - better_slope).double(),
                -self.num_units * (hessian - better_hessian).double(),
                precision,
            )
            if bias.is_small:
                return count, bias, precision
        raise SiteError(
            f"site {self._local.names}: {self._counts[-1]} nodes a dimension do not sum it out: "
            f"means would be off by {bias.largest_mean:.2g} sds and sds by "
            f"{bias.largest_sd:.1%}; {SAMPLE_ALL}",
            code="local-latent",
        )

    def unseen_share(self, position: Tensor, modes: Tensor, count: int) -> float:
        """The mean over members of the mass at other modes that lie beyond the nodes, as a share.

        Args:
            position: the globals at the anchor, `[D]`.
            modes: all members' modes there, `[n, d]`.
            count: nodes of a dimension.
        """
        sample, repeats = len(self._chosen), -(-ANCHOR.tries // len(self._chosen))
        again = torch.arange(sample).repeat(repeats)
        units, values = rows.take(self._sample, again), self._values(position)
        own = column_of(modes, self.num_units)[self._chosen[again]].flatten(0, 1)
        log_joint = partial(self._local.log_joint, values, arguments=units)
        start = draw_from_prior(self._local, values, units)
        start = torch.where(log_joint(start).isfinite()[:, None], start, own)
        other, _, steps = find_modes(self._local, values, units, start)
        self.passes += repeats * sample / self.num_units * steps * (4 + own.shape[1]) / self._middle
        here, there = gaussians_at(log_joint, own), gaussians_at(log_joint, other)
        gain = log_joint(other) - log_joint(own) + there.log_volume - here.log_volume
        distance = (here.root.mT @ (other - own)[..., None]).square().sum((1, 2)).sqrt()
        reach = float(gauss_hermite(2 * count + 1, 1)[0].max())
        shares = torch.where(distance > reach, gain.sigmoid(), 0.0)
        return float(shares.reshape(repeats, -1).amax(0).mean())

    def _modes(
        self,
        values: Mapping[str, Tensor],
        units: Arguments,
        start: Tensor,
        share: float = 1.0,
    ) -> tuple[Tensor, int]:
        """(The modes of all members' latents given the globals, `[n, d]`; the number of members
        without one), chunk by chunk.

        Args:
            values: constrained values of the globals, by site.
            units: the units.
            start: where the search for the modes begins, `[n, d]`.
            share: the units, as a fraction of all.
        """
        parts, total = [], 0
        for chunk, begin in self._chunks(units):
            members = self._local.model.members(chunk).count
            z = start[begin : begin + members]
            if share == 1:
                _check_supports(self._local.run(values, z, chunk))
            modes, num_flat, steps = find_modes(self._local, values, chunk, z)
            parts.append(modes)
            total += num_flat
            weight = share * members / len(start)
            self.passes += weight * steps * (4 + self._local.num_dims) / self._middle
        return torch.cat(parts), total

    def _chunks(self, units: Arguments) -> Iterator[tuple[Arguments, int]]:
        """Yields (a chunk of the units, the number of members before it)."""
        count, begin = rows.count(units) or 1, 0
        largest = max(leaf[0].numel() for leaf in rows.leaves(units))
        size = max(1, ANCHOR.chunk // largest)
        for first in range(0, count, size):
            chunk = rows.take(units, slice(first, first + size))
            yield chunk, begin
            begin += self._local.model.members(chunk).count


def _log_mass(ascent: Ascent) -> float:
    """log of the density times the volume of the Gaussian of its curvature, where a search ended,
    in nats and up to a constant."""
    if not bool(ascent.precision.isfinite().all()):
        return -math.inf
    return ascent.value - float(torch.linalg.slogdet(_positive(ascent.precision))[1]) / 2


def _positive(precision: Tensor) -> Tensor:
    """The matrix with the absolute values of its eigenvalues, and none much below the largest."""
    eigenvalues, axes = torch.linalg.eigh(precision)
    least = torch.finfo(torch.float32).eps * eigenvalues.abs().max()
    return axes @ (eigenvalues.abs().clamp(min=least)[:, None] * axes.mT)


def _bias(slope: Tensor, excess: Tensor, precision: Tensor) -> Bias:
    """The bias of a density with other nodes, at the mode.

    Args:
        slope: gradient of its log joint minus that with more nodes, `[D]`.
        excess: its precision minus that with more nodes, `[D, D]`.
        precision: the precision with more nodes, `[D, D]`.
    """
    covariance = torch.linalg.inv(precision)
    own = torch.linalg.inv(precision + excess)
    sds = covariance.diagonal().sqrt()
    return Bias(own @ slope / sds, own.diagonal().clamp(min=0).sqrt() / sds - 1)


def find_modes(
    local: LocalSites, values: Mapping[str, Tensor], units: Arguments, z: Tensor
) -> tuple[Tensor, int, int]:
    """(The modes of the members' latents given the globals, `[n, d]`; the number of members where
    none was found; Newton steps taken).

    Args:
        local: the local part of the model.
        values: constrained values of the globals, by site.
        units: a batch of units.
        z: where the search begins, `[n, d]`.

    Raises:
        DataError: a member's density is NaN or infinite.
    """
    log_joint = partial(local.log_joint, values, arguments=units)
    value, steps = log_joint(z), 0
    _check_finite(local, value)
    gain, reach = torch.full_like(value, torch.inf), torch.ones_like(value)
    while steps < ANCHOR.local_steps and bool((gain > ANCHOR.local_gain).any()):
        ahead = newton_step(log_joint, z)
        step = reach[:, None] * (ahead.center - z)
        predicted = (ahead.root.mT @ step[..., None]).square().sum((1, 2)) / reach
        z, new = best_of(log_joint, z, step)
        # where curvature is slight, a step may be far too long: then a shorter one is tried
        is_too_long = new <= value
        gain, value, steps = torch.where(is_too_long, predicted, new - value), new, steps + 1
        reach = torch.where(is_too_long, reach / 20, 1.0)
    eigenvalues = torch.linalg.eigvalsh(-derivatives(log_joint, z)[1])[:, 0]
    is_flat = (eigenvalues <= 0) | (gain > 1)
    return z, int(is_flat.sum()), steps


def _check_supports(sites: Mapping[str, Site]) -> None:
    for site in sites.values():
        if site.kind == "observed" and site.validates and not bool(inside_support(site).all()):
            raise SiteError(outside_support(site), code="observed-value")


def _check_finite(local: LocalSites, value: Tensor) -> None:
    bad = (~value.isfinite()).nonzero()
    if len(bad):
        raise DataError(
            f"site '{local.observed}': the log density of a {local.unit} is NaN or infinite given "
            f"{local.names}: look at its data, or at the model's values for it",
            code="not-finite",
        )
