"""The progress bar: tqdm, with what is known of the steps."""

from __future__ import annotations

import math
import sys
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm
from tqdm.notebook import tqdm_notebook

#: Lines of a run in a log, about.
_LINES = 10
_IN_A_NOTEBOOK = issubclass(tqdm, tqdm_notebook)


class Progress:
    """A bar over steps that shows its rate and, whenever it is redrawn, what steps are worth.  In a
    log (stderr is no terminal, nor a notebook's) it is some ten lines.

    Args:
        total: steps; None where that is not known beforehand.
        title: what is run.
        show: False for no bar at all.
        objective: what the number that steps are worth is called.
    """

    def __init__(self, total: int | None, title: str, show: bool, objective: str = "log joint"):
        self._title, self._objective = title, objective
        self._is_logged = not sys.stderr.isatty() and not _IN_A_NOTEBOOK
        rarely: dict[str, Any] = {}
        if self._is_logged:
            every = math.inf if total is None else total / _LINES
            rarely = {"miniters": every, "mininterval": 0, "maxinterval": math.inf}
        self._bar = tqdm(total=total, desc=title, disable=not show, unit="step", **rarely)

    def say(self, what: str) -> None:
        """What is going on, behind the title."""
        self._bar.set_description_str(f"{self._title}, {what}", refresh=not self._is_logged)

    def update(self, steps: int, value: float | None = None) -> None:
        """So many more steps, and the objective's value after them, where it is known."""
        if self._bar.update(steps) and value is not None:
            self.show(f"{self._objective} {value:.5g}")

    def go_to(self, step: int) -> None:
        """So many steps in all."""
        self._bar.update(max(0, step - self._bar.n))

    def show(self, what: str) -> None:
        """What is known of the steps, when the bar is next redrawn."""
        self._bar.set_postfix_str(what, refresh=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
