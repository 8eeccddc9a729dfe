"""The progress bar (tqdm), with the latest value of the log joint or of another objective."""

from __future__ import annotations

import math
import sys
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

#: Approximate number of lines that a run writes into a log.
_LINES = 10
#: Without an import of `tqdm.notebook`, which imports IPython.
_IN_A_NOTEBOOK = any(kind.__module__ == "tqdm.notebook" for kind in tqdm.__mro__)


class Progress:
    """A bar over steps that shows the rate of steps and the objective's value, whenever the bar is
    redrawn. In a log (stderr is neither a terminal nor a notebook), about ten lines are written in
    all.

    Args:
        total: number of steps; None if it is not known beforehand.
        title: name of what runs, which is shown before the bar.
        show: False for no bar at all.
        objective: name of the number that is shown after the bar.
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
        """Shows a text about the current activity after the bar's title."""
        self._bar.set_description_str(f"{self._title}, {what}", refresh=not self._is_logged)

    def update(self, steps: int, value: float | None = None) -> None:
        """Advances the bar by `steps` steps, and shows the objective's value; None leaves the value
        shown as it is."""
        if self._bar.update(steps) and value is not None:
            self.show(f"{self._objective} {value:.5g}")

    def go_to(self, step: int) -> None:
        """Advances the bar to step number `step`; does nothing if the bar is there already, or
        beyond."""
        self._bar.update(max(0, step - self._bar.n))

    def show(self, what: str) -> None:
        """Sets the text after the bar, which is shown when the bar is next redrawn."""
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
