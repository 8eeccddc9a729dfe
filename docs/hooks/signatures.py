"""Constructors' signatures in full: `help` shows every option in place of `**options`, and so do
the pages."""

from __future__ import annotations

import inspect
from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Takes the parameters that `**options: Unpack[...]` stands for from the class itself."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace `**options` by what Python knows of it."""
        options = [p for p in func.parameters if str(p.annotation).startswith("Unpack[")]
        if not options:
            return
        constructor = getattr(griffe.dynamic_import(func.parent.path), func.name)
        del func.parameters[options[0].name]
        for name, parameter in inspect.signature(constructor).parameters.items():
            if name not in func.parameters:
                func.parameters.add(
                    griffe.Parameter(
                        name,
                        annotation=str(parameter.annotation),
                        kind=griffe.ParameterKind.keyword_only,
                        default=repr(parameter.default),
                    )
                )
