"""More of posteriordb's linear regressions, in the units that they were published in.

A method of first order gets nowhere in them: intercepts are thousands of sds from 0, and columns
are nearly one another.  Their moments are known by quadrature.
"""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
from entry import Posterior, Tensors
from regressions import (
    ALPHA,
    BETA,
    design,
    flat_scale,
    half_cauchy,
    half_normal,
    kilpisjarvi_exact,
    linear,
    nes,
    simulated,
)
from torch import Tensor


def earn_height(d: dict[str, Any]) -> Tensors:
    """Dollars by inches."""
    return design(d["height"]), d["earn"]


def log10earn_height(d: dict[str, Any]) -> Tensors:
    """Digits of dollars by inches."""
    return design(d["height"]), d["earn"].log10()


def logearn_height(d: dict[str, Any]) -> Tensors:
    """Log dollars by inches."""
    return design(d["height"]), d["earn"].log()


def logearn_height_male(d: dict[str, Any]) -> Tensors:
    """... and sex."""
    return design(d["height"], d["male"]), d["earn"].log()


def logearn_interaction(d: dict[str, Any]) -> Tensors:
    """... and their product."""
    return design(d["height"], d["male"], d["height"] * d["male"]), d["earn"].log()


def logearn_logheight_male(d: dict[str, Any]) -> Tensors:
    """Log dollars by log inches and sex."""
    return design(d["height"].log(), d["male"]), d["earn"].log()


def kidscore_momhsiq(d: dict[str, Any]) -> Tensors:
    """A child's test score by the mother's school and IQ."""
    return design(d["mom_hs"], d["mom_iq"]), d["kid_score"]


def kidscore_interaction(d: dict[str, Any]) -> Tensors:
    """... and their product."""
    return design(d["mom_hs"], d["mom_iq"], d["mom_hs"] * d["mom_iq"]), d["kid_score"]


def kidscore_interaction_c(d: dict[str, Any]) -> Tensors:
    """The same, centered at the means."""
    hs, iq = (d[name] - d[name].mean() for name in ("mom_hs", "mom_iq"))
    return design(hs, iq, hs * iq), d["kid_score"]


def kidscore_interaction_c2(d: dict[str, Any]) -> Tensors:
    """The same, centered at round numbers."""
    hs, iq = d["mom_hs"] - 0.5, d["mom_iq"] - 100
    return design(hs, iq, hs * iq), d["kid_score"]


def kidscore_mom_work(d: dict[str, Any]) -> Tensors:
    """By when the mother went back to work, in four classes."""
    classes = ((d["mom_work"] == k).double() for k in (2, 3, 4))
    return design(*classes), d["kid_score"]


def mesquite(d: dict[str, Any]) -> Tensors:
    """A bush's weight in grams by its measures."""
    names = ("diam1", "diam2", "canopy_height", "total_height", "density", "group")
    return design(*(d[name] for name in names)), d["weight"]


def logmesquite(d: dict[str, Any]) -> Tensors:
    """Their logarithms."""
    names = ("diam1", "diam2", "canopy_height", "total_height", "density")
    return design(*(d[name].log() for name in names), d["group"]), d["weight"].log()


def _of_canopy(d: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms of the canopy's volume, area and shape."""
    area = d["diam1"] * d["diam2"]
    return (area * d["canopy_height"]).log(), area.log(), (d["diam1"] / d["diam2"]).log()


def logmesquite_logva(d: dict[str, Any]) -> Tensors:
    """By volume and area."""
    volume, area, _ = _of_canopy(d)
    return design(volume, area, d["group"]), d["weight"].log()


def logmesquite_logvas(d: dict[str, Any]) -> Tensors:
    """... shape, height and density."""
    rest = d["total_height"].log(), d["density"].log(), d["group"]
    return design(*_of_canopy(d), *rest), d["weight"].log()


def logmesquite_logvash(d: dict[str, Any]) -> Tensors:
    """... shape and height."""
    return design(*_of_canopy(d), d["total_height"].log(), d["group"]), d["weight"].log()


def kilpisjarvi(x: Tensor, y: Tensor) -> None:
    """A line by the years as they are numbered, around 4000: intercept and slope are one."""
    alpha = pyro.sample("alpha", dist.Normal(*ALPHA))
    beta = pyro.sample("beta", dist.Normal(*BETA))
    sigma = pyro.sample("sigma", flat_scale())
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(alpha + beta * x, sigma), obs=y)


_COLUMNS = {
    "earnings-earn_height": (earn_height, 119),
    "earnings-log10earn_height": (log10earn_height, 119),
    "earnings-logearn_height": (logearn_height, 119),
    "earnings-logearn_height_male": (logearn_height_male, 119),
    "earnings-logearn_interaction": (logearn_interaction, 119),
    "earnings-logearn_logheight_male": (logearn_logheight_male, 119),
    "kidiq_with_mom_work-kidscore_interaction_c": (kidscore_interaction_c, 43),
    "kidiq_with_mom_work-kidscore_interaction_c2": (kidscore_interaction_c2, 43),
    "kidiq_with_mom_work-kidscore_mom_work": (kidscore_mom_work, 43),
    "mesquite-mesquite": (mesquite, None),
    "mesquite-logmesquite": (logmesquite, None),
    "mesquite-logmesquite_logva": (logmesquite_logva, None),
    "mesquite-logmesquite_logvas": (logmesquite_logvas, None),
    "mesquite-logmesquite_logvash": (logmesquite_logvash, None),
    **{f"nes{year}-nes": (nes, 64) for year in (1972, 1976, 1980, 1984, 1988, 1992, 2000)},
}

RAW_UNITS = (
    *(linear(name, "in raw units", read, size) for name, (read, size) in _COLUMNS.items()),
    linear("kidiq-kidscore_momhsiq", "in raw units", kidscore_momhsiq, 43, half_cauchy(2.5)),
    linear(
        "kidiq-kidscore_interaction", "in raw units", kidscore_interaction, 43, half_cauchy(2.5)
    ),
    linear("sblrc-blr", "in raw units", simulated, 10, half_normal(10.0), 10.0),
    Posterior(
        "kilpisjarvi_mod-kilpisjarvi",
        "in raw units",
        kilpisjarvi,
        lambda d: (d["x"], d["y"]),
        sites=("alpha", "beta", "sigma"),
        exact=kilpisjarvi_exact,
    ),
)
