"""What a run took, and how a process is asked for it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """Of one run.

    Attributes:
        cpu: seconds of the processor, of all threads.
        wall: seconds.
        ess: the least effective sample size.
        gradients: of all chains, after warm-up.
        divergences: after warm-up.
        program: how the log density was evaluated.
        first: seconds of the first call, with compilation.
        gradient: seconds of one, called by compiled code.
    """

    cpu: float
    wall: float
    ess: float
    gradients: int
    divergences: int
    program: str
    first: float
    gradient: float


def answer(run: Callable[[int], Answer]) -> None:
    """A seed a line in, an answer a line out."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(run(int(line)))), flush=True)
