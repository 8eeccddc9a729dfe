"""README's program, timed stage by stage: what a user waits for in a new process.

`python benchmarks/first_run.py [BAOA | NUTS]` prints the seconds of each stage as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable


class Stages:
    """Seconds since the last stage ended, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._clock, self._start = clock, clock()

    def end(self, name: str) -> None:
        """Ends a stage."""
        now = self._clock()
        self.seconds[name] = now - self._start
        self._start = now


def main(
    method: str,
    imported: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds of imports, data, run, summary, report and predictions.

    Args:
        method: name of the sampler.
        imported: function that is called once the package is imported; None for none.
        clock: function that returns seconds.
    """
    stages = Stages(clock)
    import pyro
    import pyro.distributions as dist
    import torch

    stages.end("import torch, pyro")
    import pyro_scale as ps

    stages.end("import pyro_scale")
    if imported is not None:
        imported()
    from sklearn.datasets import load_breast_cancer

    x, y = (torch.tensor(a, dtype=torch.float32) for a in load_breast_cancer(return_X_y=True))
    x = ((x - x.mean(0)) / x.std(0))[:, [0, 1, 4]]
    stages.end("data")

    def model(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    mcmc = getattr(ps, method)(model).run((x, y), seed=0, progress=False)
    stages.end("run")
    mcmc.summary()
    stages.end("summary")
    str(mcmc.report())
    stages.end("report")
    mcmc.predict(x[:5], reduce="mean")
    stages.end("predict")
    return stages.seconds


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] if len(sys.argv) > 1 else "BAOA")))
