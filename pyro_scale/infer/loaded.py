"""Methods that are loaded from a file: they have a posterior, and cannot be run."""

from __future__ import annotations

from typing import Any, Never

from pyro_scale.errors import NotRunError


class Loaded:
    """What comes before a method's own class in an object that `load` gives."""

    def run(self, *args: Any, **kwargs: Any) -> Never:
        """Refuses: the file has no hyperparameters to run with.

        Raises:
            NotRunError: always.
        """
        name = type(self).__name__
        raise NotRunError(
            f"this {name} was loaded from a file, which holds results only, so it cannot be run: "
            f"make a new one, {name}(model, ...). To start from a loaded fit, pass it as "
            "init_strategy, or its as_prior() as the model"
        )

    step = begin = update = step_size_bias = run
