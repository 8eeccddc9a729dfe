"""Measurements of a run besides its draws: minibatch noise and temperatures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True)
class GradientNoise:
    """The effect of minibatch gradient noise, to first order in lr and for batches drawn with
    replacement.

    Attributes:
        inflation: factor on the temperature, `[latents]`; None if the kernel has no theory.
        variance: of the gradient of the log joint over N, `[latents]`.
        reduction: factor by which control variates reduce that variance, `[latents]`; None without
            control variates.
    """

    inflation: Tensor | None
    variance: Tensor
    reduction: Tensor | None = None


@dataclass(frozen=True)
class Kinetic:
    """The kinetic temperature of the momenta, relative to the temperature of the run.

    Attributes:
        measured: mean over each site's elements, at several moments of the run, `[chains, moments,
            latent sites]`.
        expect: computes `expected`, which takes a while for large models.
    """

    measured: Tensor
    expect: Callable[[], Tensor]

    @cached_property
    def expected(self) -> Tensor:
        """The value on a Gaussian posterior at this step size, without minibatches, `[latent
        sites]`; NaN where there is no theory."""
        return self.expect()

    @classmethod
    def of(cls, measured: Tensor, expected: Tensor) -> Self:
        """Kinetic temperatures whose expected values are computed already."""
        return cls(measured, lambda: expected)

    def __reduce__(self) -> Any:
        return Kinetic.of, (self.measured, self.expected)


@dataclass(frozen=True)
class VirialTemperature:
    """The temperature of the draws by the virial theorem.

    Attributes:
        parts: for a subset of draws, `[chains, subset, latent sites, 2]`: the mean over a site's
            elements, and the value of the site's steepest element.
        elements: temperature and its standard error for each element, `[2, D]`; None if read from
            a file, which has `parts` only.
    """

    parts: Tensor
    elements: Tensor | None = None


@dataclass(frozen=True)
class Measurements:
    """Measurements of a run besides its draws; None where there is none.

    Attributes:
        gradient_noise: the effect of minibatches.
        virial: the temperature of the draws.
        kinetic: the temperature of the momenta.
    """

    gradient_noise: GradientNoise | None = None
    virial: VirialTemperature | None = None
    kinetic: Kinetic | None = None
