"""What is measured of a run besides its draws."""

from __future__ import annotations

from dataclasses import dataclass

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
        expected: on a Gaussian posterior at this step size, without minibatches,
            `[latent sites]`; NaN where that is not known.
    """

    measured: Tensor
    expected: Tensor
