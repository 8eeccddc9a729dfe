"""Whether a run's draws are right: every element against its true mean and sd."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import arviz
from entry import Posterior, Tensors, elements
from torch import Tensor
from truth import exact_elements

#: Right is a mean within so many posterior sds and an sd within such a part of itself, plus so many
#: standard errors of the run's (at most `OWN`) and of the reference.
MEAN, SD, ERRORS = 0.1, 0.05, 3.0
OWN = 0.03, 0.02
#: And beyond these a run is far off.
FAR_MEAN, FAR_SD = 0.25, 0.25


class Errors(NamedTuple):
    """How far a run is off.

    Attributes:
        mean: the largest error of a mean, in posterior sds.
        sd: the largest of an sd, in itself.
        is_right: whether all are within the tolerance.
    """

    mean: float
    sd: float
    is_right: bool

    @property
    def is_far(self) -> bool:
        """Whether some element is far off."""
        return not (self.mean <= FAR_MEAN and self.sd <= FAR_SD)


#: Of a run without draws.
NOTHING = Errors(math.inf, math.inf, False)


def stored_truth() -> dict[str, Any]:
    """The stored references of all posteriors."""
    folder = Path(__file__).parent
    files = folder / "truth.json", folder / "jobs" / "truth.json"
    return {k: v for file in files for k, v in json.loads(file.read_text()).items()}


def truth_of(posterior: Posterior, data: Tensors, known: Mapping[str, Any]) -> dict[str, Any]:
    """Each element's moments: by quadrature, or else from `truth.json`."""
    if posterior.exact is None:
        return known[posterior.same_as or posterior.name]["elements"]
    exact = exact_elements(posterior, data)
    return {name: {"mean": 0.0, "sd": 0.0, **each} for name, each in exact.items()}


def judge(values: dict[str, Tensor], sites: tuple[str, ...], truth: Mapping[str, Any]) -> Errors:
    """The errors of draws `[chains, draws, ...]` by site, at the elements that the truth has."""
    mean = sd = 0.0
    is_right = True
    found = elements(values, sites)
    for name, true in truth.items():
        array = found[name].double().numpy()
        true_mean, true_sd = (true.get(f"exact_{m}", true[m]) for m in ("mean", "sd"))
        mean_error = abs(float(array.mean()) - true_mean) / true_sd
        sd_error = abs(float(array.std()) / true_sd - 1)
        own = float(arviz.mcse(array)) / true_sd, float(arviz.mcse(array, method="sd")) / true_sd
        others = (0.0, 0.0)
        if "exact_mean" not in true:
            others = (true["mcse"] / true_sd, (2 * true["ess"]) ** -0.5)
        is_right &= mean_error < MEAN + ERRORS * math.hypot(min(own[0], OWN[0]), others[0])
        is_right &= sd_error < SD + ERRORS * math.hypot(min(own[1], OWN[1]), others[1])
        mean, sd = max(mean, mean_error), max(sd, sd_error)
    return Errors(mean, sd, is_right)
