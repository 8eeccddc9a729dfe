"""Measurements of a run besides its draws: variances of minibatch gradients, and temperatures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True)
class GradientNoise:
    """The effect of minibatch gradient noise on a run, to first order in lr and for minibatches
    drawn with replacement.

    Attributes:
        inflation: factor by which gradient noise raises the temperature of each latent element,
            `[latents]`; None if there is no theory for the sampler.
        variance: variance of the minibatch gradient of the log joint divided by N, the number of
            rows of the data, for each latent element, `[latents]`.
        reduction: factor by which control variates reduce that variance, `[latents]`; None without
            control variates.
    """

    inflation: Tensor | None
    variance: Tensor
    reduction: Tensor | None = None


@dataclass(frozen=True)
class Kinetic:
    """The kinetic temperature of the momenta, N p^2 / (mass T) on average: 1 for small steps
    without minibatch noise, more if noise heats the chains.

    Attributes:
        measured: kinetic temperature averaged over each site's elements, at several times of the
            run ("moments"), `[chains, moments, latent sites]`.
        expect: function without arguments that returns the attribute `expected`, which takes a
            while for large models.
    """

    measured: Tensor
    expect: Callable[[], Tensor]

    @cached_property
    def expected(self) -> Tensor:
        """The kinetic temperature that theory predicts for a Gaussian posterior at this step size,
        without minibatches, `[latent sites]`; NaN where there is no theory."""
        return self.expect()

    @classmethod
    def of(cls, measured: Tensor, expected: Tensor) -> Self:
        """A `Kinetic` from measured temperatures `[chains, moments, latent sites]` and from
        expected temperatures `[latent sites]` that have been computed already, such as those read
        from a file.
        """
        return cls(measured, lambda: expected)

    def __reduce__(self) -> Any:
        return Kinetic.of, (self.measured, self.expected)


@dataclass(frozen=True)
class VirialTemperature:
    """The temperature of the draws, estimated by the virial theorem (from positions times
    gradients); 1 if draws are of the posterior.

    Attributes:
        parts: terms whose mean over draws is a temperature, for some of the draws, `[chains, those
            draws, latent sites, 2]`. The last dimension has (mean term of the site's elements, term
            of the site's steepest element).
        num_draws: number of independent draws that would have about these errors; None if read
            from a file.
        elements: (temperature, its standard error) of each element, `[2, D]`; None if read from a
            file, which has `parts` only.
    """

    parts: Tensor
    num_draws: int | None = None
    elements: Tensor | None = None


@dataclass(frozen=True)
class Measurements:
    """Measurements of a run besides its draws; each is None where it was not made.

    Attributes:
        gradient_noise: the effect of minibatch gradient noise.
        virial: the temperature of the draws.
        kinetic: the temperature of the momenta.
    """

    gradient_noise: GradientNoise | None = None
    virial: VirialTemperature | None = None
    kinetic: Kinetic | None = None
