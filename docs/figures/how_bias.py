"""Position variance of each sampler on a Gaussian, against the step size: docs/img/how-bias.svg.

Closed forms of docs/how/samplers.md, at friction 1, mass 1, precision 1 and temperature 1.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

OUT = Path(__file__).parents[1] / "img" / "how-bias.svg"
BLUE, ORANGE, GREEN, RED = "#0072B2", "#B87800", "#007A59", "#D55E00"


def ubu(h):
    t, u = np.tanh(h / 4), h
    s = t / (h / 4)
    top = (1 + t**2) * (1 - 3 * t**2 - s) + u * t * (t**4 + 4 * t**2 - 1 + s * (1 - t**2))
    return 1 + u / 4 * top / (t * (1 + t**2 - u * t))


def sghmc(h):
    return (4 - 2 * h) / (4 - 2 * h - h**2)


def euler(h):
    return 2 * (2 + h**2 - h) / ((1 - h) * (4 + h**2 - 2 * h))


plt.rcParams.update({"font.size": 12, "svg.fonttype": "none", "font.family": "sans-serif"})
figure, axes = plt.subplots(figsize=(7.6, 4.2))
h = np.linspace(0.01, 1.99, 400)
lines = [
    ("SGHMC, both\nfrom the old\nstate", euler, 0.60, RED, (0, (1, 1)), (0.49, 1.82)),
    ("SGHMC", sghmc, 1.05, BLUE, "--", (0.88, 1.32)),
    ("SGLD", lambda h: 1 / (1 - h / 2), 1.2, ORANGE, "-.", (0.42, 1.47)),
    ("BAOA", np.ones_like, 1.99, "#000000", "-", (1.72, 1.04)),
    ("UBU", ubu, 1.95, GREEN, (0, (5, 1, 1, 1, 1, 1)), (1.72, 0.78)),
]
for name, variance, most, color, style, place in lines:
    steps = h[h < most]
    axes.plot(steps, variance(steps), color=color, linestyle=style, linewidth=2.4)
    axes.annotate(name, place, color=color, ha="left", va="center")
axes.set(xlim=(0, 2), ylim=(0.5, 2), xlabel="step size (lr)")
axes.set_ylabel("position variance over the posterior's")
axes.grid(alpha=0.25)
axes.spines[["top", "right"]].set_visible(False)
figure.patch.set_facecolor("white")
figure.tight_layout()
figure.savefig(OUT, metadata={"Date": None})
