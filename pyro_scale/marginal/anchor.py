"""The anchor of the nodes: the integrated posterior's mode, and the members' expansions there.

Nodes and mode are found by turns: the members' latents are expanded at their modes given the
globals, and the globals move to the mode of the posterior over these nodes.  This is done with a
sample of the units first; all of them take a few gradients.
"""

from __future__ import annotations

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
from pyro_scale.marginal.integrated import Integrated, columns_of, flat_columns
from pyro_scale.marginal.local_sites import LocalSites
from pyro_scale.marginal.nodes import (
    Expansion,
    cholesky,
    derivatives,
    solve,
    solve_transposed,
)
from pyro_scale.model.log_posterior import LogPosterior
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
        local_near: largest Newton step, in sds of the member's latents, at its mode.
        chunk: members whose derivatives are computed together.
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
    local_near: float = 1e-3
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
    """The model with its local latents summed out, and the data with its columns.

    Attributes:
        model: the integrated model.
        arguments: the arguments of that model for all units.
        layout: the globals' order in a position.
        gaussian: Gaussian of the unconstrained globals at the anchor.
        bias: predicted bias of its nodes.
        num_flat: members whose likelihood is not log-concave at the anchor.
        passes: passes through all members with all their nodes that the search took.
    """

    model: Integrated
    arguments: tuple[Arguments, dict[str, Tensor]]
    layout: Layout
    gaussian: Dense
    bias: Bias
    num_flat: int
    passes: float


def find_anchor(local: LocalSites, units: Any, seed: int) -> Anchor:
    """Finds the mode of the integrated posterior given all units, expands every member's likelihood
    there, and chooses the number of nodes.

    Args:
        local: the local part of the model.
        units: all units, as the arguments of `local.model`.
        seed: seed of the sample of units.

    Raises:
        SiteError: there is no mode, or no number of nodes is enough.
        DataError: a member's density is NaN or infinite.
    """
    search = _Search(local, units, seed)
    ascent = search.of_sample()
    position, expansion, num_flat = search.of_all(ascent)
    count, bias, precision = search.choose_count(position, expansion)
    arguments = units, columns_of(expansion, search.num_units)
    gaussian = Dense.from_precision(position.double(), precision)
    model = Integrated(local, count)
    members = local.model.members(units).count
    bad = f"; {num_flat:,} are not log-concave" if num_flat else ""
    model.description = (
        f"{local.names} summed out over {model.num_nodes} nodes of each of {members:,} "
        f"{local.unit}s (predicted bias {bias.largest_mean:.2g} sds in means, "
        f"{bias.largest_sd:.1%} in sds; placed in {search.passes:.0f} passes{bad})"
    )
    return Anchor(model, arguments, search.layout, gaussian, bias, num_flat, search.passes)


class _Search:
    """The search for the anchor; counts its passes.

    Attributes:
        num_units: N, the number of units.
        layout: the globals' order in a position.
        passes: passes through all members with all their nodes so far.
    """

    def __init__(self, local: LocalSites, units: Arguments, seed: int):
        self._local, self._units, self._seed = local, units, seed
        self.num_units = rows.count(units) or 1
        self.passes = 0.0
        counts = [k for k in ANCHOR.counts if k**local.num_dims <= ANCHOR.most_nodes]
        self._counts = counts
        random = generator(seed, 0, Purpose.SEARCH)
        chosen = torch.randperm(self.num_units, generator=random)[: ANCHOR.sample].sort().values
        self._chosen = chosen
        self._sample = rows.take(units, chosen)
        members = local.model.members(self._sample).count
        flat = torch.zeros(members, local.num_dims)
        self._start = Expansion(flat, flat, flat.new_zeros(*flat.shape, local.num_dims))
        density = self._density(self._middle, self._sample, self._start)
        first = density.log_posterior.start(density.data.first(), seed)
        self.layout = Layout.from_tensors(first)
        self._first = self.layout.flatten(first)

    @property
    def _middle(self) -> int:
        return self._counts[min(1, len(self._counts) - 1)]

    def _density(self, count: int, units: Arguments, expansion: Expansion) -> FullDataDensity:
        """The integrated posterior given some units as if they were all."""
        size = rows.count(units) or 1
        log_posterior = LogPosterior(Integrated(self._local, count), size)
        data = TensorData((units, columns_of(expansion, size)), size)
        log_posterior.prepare(rows.take(data.arguments, slice(0, 16)))
        layout = self.layout if hasattr(self, "layout") else Layout((), (), ())
        return FullDataDensity(log_posterior, data, layout)

    def _values(self, density: FullDataDensity, position: Tensor) -> dict[str, Tensor]:
        """Constrained values of the globals at a position, by site."""
        return density.log_posterior.constrain(self.layout.unflatten(position))

    def of_sample(self) -> Ascent:
        """The mode of the integrated posterior given a sample of the units, as if it were all."""
        share = len(self._chosen) / self.num_units
        density = self._density(self._middle, self._sample, self._start)
        position, expansion = torch.zeros_like(self._first), self._start
        if not bool(density.grad(position)[0].isfinite()):
            position = self._first
        for _ in range(ANCHOR.rounds):
            values = self._values(density, position)
            expansion, _ = self._expand(values, self._sample, expansion.center, share)
            density = self._density(self._middle, self._sample, expansion)
            ascent = ascend(density, position, most_steps=ANCHOR.steps)
            self.passes += share * density.passes * len(ascent.path)
            step = (ascent.position - position).double()
            position = ascent.position
            if ascent.is_mode and float(step @ ascent.precision @ step) < ANCHOR.moved**2:
                return ascent
        raise SiteError(
            f"site {self._local.names}: with these summed out, no mode of the other latents was "
            "found to place nodes by: give the model proper priors, or pass all rows "
            "(batch_size=None)",
            code="local-latent",
        )

    def of_all(self, ascent: Ascent) -> tuple[Tensor, Expansion, int]:
        """(The mode given all units, `[D]`; all members' expansion there; the number of members
        whose likelihood is not log-concave), from the mode given the sample."""
        position = ascent.position
        members = self._local.model.members(self._units).count
        center = torch.zeros(members, self._local.num_dims).to(position)
        density = self._density(self._middle, self._sample, self._start)
        expansion, num_flat = self._expand(self._values(density, position), self._units, center)
        if len(self._chosen) == self.num_units:
            return position, expansion, num_flat
        density = self._density(self._middle, self._units, expansion)
        matrix = ascent.precision / len(self._chosen)
        places = torch.arange(len(position))
        near = ANCHOR.moved**2 * len(position)
        refined = newton_refine(density, position, lambda _: matrix.to(position), places, near)
        self.passes += 4
        values = self._values(density, refined.position)
        expansion, num_flat = self._expand(values, self._units, expansion.center)
        return refined.position, expansion, num_flat

    def choose_count(self, position: Tensor, expansion: Expansion) -> tuple[int, Bias, Tensor]:
        """(The fewest nodes whose bias is small; that bias; the precision of the globals given all
        units, `[D, D]` in float64)."""
        columns: Any = rows.take(columns_of(expansion, self.num_units), self._chosen)
        sample, share = flat_columns(columns), len(self._chosen) / self.num_units
        for count in self._counts:
            parts = []
            for nodes in (count, 2 * count + 1):
                density = self._density(nodes, self._sample, sample)
                parts.append(density.derivatives(position))
                self.passes += share * density.passes * nodes / self._middle
            (_, slope, hessian), (_, better_slope, better_hessian) = parts
            precision = -self.num_units * better_hessian.double()
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
            f"{bias.largest_sd:.1%}: pass all rows (batch_size=None)",
            code="local-latent",
        )

    def _expand(
        self,
        values: Mapping[str, Tensor],
        units: Arguments,
        center: Tensor,
        share: float = 1.0,
    ) -> tuple[Expansion, int]:
        """(The expansion of all members' likelihoods at their modes given the globals; the number
        of those that are not log-concave), chunk by chunk.

        Args:
            values: constrained values of the globals, by site.
            units: the units.
            center: where the search for the members' modes begins, `[n, d]`.
            share: the units, as a fraction of all.
        """
        parts, total = [], 0
        for chunk, begin in self._chunks(units):
            members = self._local.model.members(chunk).count
            start = center[begin : begin + members]
            expansion, num_flat, steps = expand(self._local, values, chunk, start)
            parts.append(expansion)
            total += num_flat
            weight = share * members / len(center)
            self.passes += weight * steps * (2 + self._local.num_dims) / self._middle
        return Expansion(*(torch.cat(columns) for columns in zip(*parts, strict=True))), total

    def _chunks(self, units: Arguments) -> Iterator[tuple[Arguments, int]]:
        """Yields (a chunk of the units, the number of members before it)."""
        count, begin = rows.count(units) or 1, 0
        largest = max(leaf[0].numel() for leaf in rows.leaves(units))
        size = max(1, ANCHOR.chunk // largest)
        for first in range(0, count, size):
            chunk = rows.take(units, slice(first, first + size))
            yield chunk, begin
            begin += self._local.model.members(chunk).count


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


def expand(
    local: LocalSites, values: Mapping[str, Tensor], units: Arguments, z: Tensor
) -> tuple[Expansion, int, int]:
    """(The expansion of the members' likelihoods at the modes of their latents given the globals;
    the number of members whose likelihood is not log-concave there; Newton steps taken).

    Args:
        local: the local part of the model.
        values: constrained values of the globals, by site.
        units: a batch of units.
        z: where the search begins, `[n, d]`.

    Raises:
        DataError: a member's density is NaN or infinite.
    """
    joint = partial(local.log_joint, values, arguments=units)
    value, steps = joint(z), 0
    _check_finite(local, value)
    while steps < ANCHOR.local_steps:
        steps += 1
        slope, hessian = derivatives(joint, z)
        root = cholesky(-hessian)
        scaled = solve(root, slope)
        step = solve_transposed(root, scaled)
        ahead = joint(z + step)
        for _ in range(8):
            worse = ~(ahead >= value - 1e-4 * (1 + value.abs()))
            if not bool(worse.any()):
                break
            step = torch.where(worse[:, None], step / 4, step)
            ahead = joint(z + step)
        better = (ahead >= value - 1e-4 * (1 + value.abs()))[:, None]
        z, value = torch.where(better, z + step, z), torch.where(better[:, 0], ahead, value)
        if not bool((scaled.abs() > ANCHOR.local_near).any()):
            break
    slope, hessian = derivatives(partial(local.log_lik, values, arguments=units), z)
    eigenvalues, axes = torch.linalg.eigh(-hessian)
    precision = axes @ (eigenvalues.clamp(min=0)[..., None] * axes.mT)
    is_flat = eigenvalues[:, 0] < -1e-4 * (1 + eigenvalues.abs().amax(1))
    return Expansion(z, slope, precision), int(is_flat.sum()), steps


def _check_finite(local: LocalSites, value: Tensor) -> None:
    bad = (~value.isfinite()).nonzero()
    if len(bad):
        raise DataError(
            f"site '{local.observed}': the log density of {local.unit} {int(bad[0])} is NaN or "
            f"infinite given {local.names}: leave it out, or look at its data",
            code="not-finite",
        )
