"""The data, and the settings that all contenders share."""

from __future__ import annotations

import numpy as np

#: Of SGHMC on the log joint over N at temperature 1/N, which is how ours is parametrized.
FRICTION = 1.0

#: Step sizes; momentum SGD has learning rate lr^2 and momentum 1 - lr friction.
LOGISTIC_LR, MLP_LR = 0.05, 0.1

#: Steps from one draw to the next.
LOGISTIC_THINNING, MLP_THINNING = 5, 100

#: Rows of a batch.
LOGISTIC_BATCH, MLP_BATCH = 32, 128

#: Steps before the first draw that is compared with the others'.
WARMUP = 2000


def logistic_data(rows: int, columns: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Rows x `[rows, columns]` and labels y `[rows]` of a logistic regression, float32."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns), dtype=np.float32)
    p = 1 / (1 + np.exp(-x @ np.linspace(-1, 1, columns)))
    return x, (rng.random(rows) < p).astype(np.float32)


def digits(rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits, x `[1797, 64]` in [0, 1] and y; `rows` of them drawn anew."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    chosen = slice(None) if rows is None else np.random.default_rng(0).integers(len(x), size=rows)
    return (x[chosen] / 16).astype(np.float32), y[chosen].astype(np.int64)


def in_nats(lr: float, rows: int) -> tuple[float, float]:
    """The same (lr, friction) for a sampler of the log joint itself at temperature 1.

    Its momentum is sqrt(N) of ours: p' = sqrt(N) p, lr' = lr / sqrt(N), friction' = sqrt(N)
    friction give the same path theta.  (BlackJAX; posteriors also takes ours as they are.)
    """
    return lr / rows**0.5, FRICTION * rows**0.5
