"""What a check of a run finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

#: Whether means and sds are within a tenth of a posterior sd, and 5%; or whether draws are those of
#: an ensemble, which is not the posterior.
Verdict: TypeAlias = Literal["yes", "no", "unknown", "ensemble"]


@dataclass(frozen=True)
class Finding:
    """One check of one site.

    Attributes:
        site: whose; empty for the whole run.
        check: what was looked at.
        verdict: of the check.
        told: what was found, with figures.
        advice: what to try.
    """

    site: str
    check: str
    verdict: Verdict
    told: str
    advice: str = ""


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Ensemble, if any is; else no, if any is; else unknown, if any is."""
    kinds: tuple[Verdict, ...] = ("ensemble", "no", "unknown")
    return next((kind for kind in kinds if kind in verdicts), "yes")
