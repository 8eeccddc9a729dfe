"""How far below those of most draws the log joint of a draw of the posterior may be.

Where minus the log joint of exact draws has an exponential tail or a lighter one, two quantiles
give the tail's scale, and the scale tells how far the lowest of all draws may be.
`docs/diagnostics.md` has the derivation, and the false alarms of simulations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Stray:
    """Thresholds of the check for draws that are too low in log joint to be of the posterior."""

    #: Quantiles of minus the log joint that give the scale of its tail. Up to 5% of draws may be
    #: stray; more of them raise the virial temperature.
    lower: float = 0.75
    upper: float = 0.95
    #: How far the lowest draw may be beyond the upper quantile, in scales of the tail and logs of
    #: the number of draws. An exponential tail exceeds 1 in about 5% of runs. 3 leaves room for
    #: quantiles of few effective draws: exact draws of heavy tails, 40 or more, exceed it in at
    #: most 0.4% of simulations.
    margin: float = 3.0
    #: Lowest draws at which the log joint of all rows is computed.
    checked: int = 20


STRAY = Stray()


def usual_fall(falls: Tensor) -> tuple[float, float]:
    """(Minus the log joint of the draw at the upper quantile; how much larger it may be at the
    lowest draw), in nats.

    Args:
        falls: minus the log joint of every draw, in descending order.
    """
    lower, upper = (float(falls[int((1 - p) * len(falls))]) for p in (STRAY.lower, STRAY.upper))
    scale = max(1.0, (upper - lower) / math.log((1 - STRAY.lower) / (1 - STRAY.upper)))
    return upper, STRAY.margin * math.log(len(falls)) * scale
