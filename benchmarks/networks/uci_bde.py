"""sklearn-contrib-bde (microcanonical Langevin ensembles) on the splits of `uci.py`.

Its documentation's example of a regression, as it is: two hidden layers of 16, eight members,
5,000 steps of warm-up, 2,000 of sampling, a network of mean and scale.  Needs an environment of
its own with sklearn-contrib-bde 1.0.2 (JAX); writes results/uci_bde.json, which `uci.py` prints.

    OMP_NUM_THREADS=1 python benchmarks/networks/uci_bde.py [--sets boston yacht] [--splits 20]
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import math
import time
import warnings

import numpy as np
import torch
from bde import BdeRegressor
from bde.loss import GaussianNLL
from uci import arguments, record, standardized

import pyro_scale as ps

SETTINGS = {
    "hidden_layers": [16, 16],
    "n_members": 8,
    "epochs": 200,
    "validation_split": 0.15,
    "lr": 1e-3,
    "weight_decay": 1e-4,
    "warmup_steps": 5000,
    "n_samples": 2000,
    "n_thinning": 2,
    "patience": 10,
}


def fit(name: str, split: int) -> dict[str, float]:
    """One split's scores and seconds."""
    x, y, x_test, y_test, unit = standardized(name, split)
    begun, cpu = time.perf_counter(), time.process_time()
    regressor = BdeRegressor(seed=split, loss=GaussianNLL(), **SETTINGS)
    regressor.fit(x=x.double().numpy(), y=y.double().numpy())
    raw = np.asarray(regressor.predict(x_test.double().numpy(), raw=True))
    draws = torch.tensor(raw).flatten(0, 1).double()  # [members * draws, rows, (mean, scale)]
    scale = torch.nn.functional.softplus(draws[..., 1]) + 1e-6
    seconds = {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - cpu,
    }
    log_lik = torch.distributions.Normal(draws[..., 0], scale).log_prob(y_test.double())
    density = ps.metrics.log_predictive_density(log_lik).mean()
    error = ps.metrics.rmse(draws[..., 0].mean(0), y_test.double())
    return {"rmse": float(error) * unit, "ll": float(density) - math.log(unit), **seconds}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asked = arguments(__doc__)
    record("uci_bde", asked.splits, dict.fromkeys(asked.sets, SETTINGS), fit, asked.fresh)
