"""Constructors in full: `help` shows every option in place of `**options`, and so do the pages."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Takes the parameters that `**options: Unpack[...]` stands for from the class itself, and what
    is said of them from the classes that they are passed on to."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace `**options` by what Python knows of it, in the signature and in the docstring."""
        options = [p for p in func.parameters if str(p.annotation).startswith("Unpack[")]
        if not options:
            return
        documented = griffe.dynamic_import(func.parent.path)
        del func.parameters[options[0].name]
        said = {}
        for base in reversed(documented.__mro__[1:]):
            said |= _said_of_parameters(base)
        entries = []
        for name, parameter in inspect.signature(documented).parameters.items():
            if name not in func.parameters:
                func.parameters.add(
                    griffe.Parameter(
                        name,
                        annotation=str(parameter.annotation),
                        kind=griffe.ParameterKind.keyword_only,
                        default=repr(parameter.default),
                    )
                )
                entries.append(f"    {name}: {said[name]}".replace("\n", "\n        ") + "\n")
        docstring = func.parent.docstring
        docstring.value = re.sub(
            r"^    options: .*\n(?:     +\S.*\n)*", "".join(entries), docstring.value, flags=re.M
        )


def _said_of_parameters(documented: type) -> dict[str, str]:
    """What the docstring of a class says of each parameter, without the indentation."""
    sections = griffe.Docstring(inspect.getdoc(documented) or "").parse("google", warnings=False)
    return {
        parameter.name: parameter.description
        for section in sections
        if section.kind is griffe.DocstringSectionKind.parameters
        for parameter in section.value
    }
