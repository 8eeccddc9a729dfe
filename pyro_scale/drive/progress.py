"""The progress bar: tqdm, with the current log joint."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from torch import Tensor
from tqdm.auto import tqdm


class Progress:
    """A bar over steps that shows its rate and, whenever it is redrawn, the log joint.

    Args:
        total: steps.
        title: what is run.
        show: False for no bar at all.
    """

    def __init__(self, total: int, title: str, show: bool):
        self._bar = tqdm(total=total, desc=title, disable=not show, unit="step")

    def update(self, log_joint: Tensor) -> None:
        """One more step; the chains' log joint is read only when the bar is redrawn."""
        if self._bar.update(1):
            self._bar.set_postfix_str(f"log joint {float(log_joint.mean()):.5g}", refresh=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
