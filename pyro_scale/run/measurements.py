"""What is measured of a run besides its draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True)
class GradientNoise:
    """What minibatches did, to first order in lr and as if drawn anew.

    Attributes:
        inflation: by what they multiplied the temperature, `[latents]`; None where the kernel has
            no theory.
        variance: of the gradient of the log joint over N, `[latents]`.
        reduction: by what control variates divided that variance, `[latents]`; None without.
    """

    inflation: Tensor | None
    variance: Tensor
    reduction: Tensor | None = None


@dataclass(frozen=True)
class Kinetic:
    """The kinetic temperature over the one that was asked for.

    Attributes:
        measured: at some moments of the run, `[chains, moments, latent sites]`, each the mean
            over a site's elements.
        expect: gives `expected` when it is asked for, as it takes a while for large models.
    """

    measured: Tensor
    expect: Callable[[], Tensor]

    @cached_property
    def expected(self) -> Tensor:
        """On a Gaussian posterior at this step size, without minibatches, `[latent sites]`; NaN
        where that is not known."""
        return self.expect()

    @classmethod
    def of(cls, measured: Tensor, expected: Tensor) -> Self:
        """What is known already."""
        return cls(measured, lambda: expected)

    def __reduce__(self) -> Any:
        return Kinetic.of, (self.measured, self.expected)


@dataclass(frozen=True)
class VirialTemperature:
    """The temperature of the draws by the virial theorem.

    Attributes:
        parts: of some draws, `[chains, some, latent sites, 2]`: the mean over a site's elements,
            and that of the site's steepest element.
        elements: each element's temperature and its standard error, `[2, D]`; None in files, which
            keep `parts` alone.
    """

    parts: Tensor
    elements: Tensor | None = None


@dataclass(frozen=True)
class Measurements:
    """What was measured of a run besides its draws; each is None where it is not known.

    Attributes:
        gradient_noise: of minibatches.
        virial: temperature of the draws.
        kinetic: temperature of the momenta.
    """

    gradient_noise: GradientNoise | None = None
    virial: VirialTemperature | None = None
    kinetic: Kinetic | None = None
