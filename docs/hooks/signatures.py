"""Constructors in full: `help` shows every option in place of `**options`, and so do the pages."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

_OPTIONS = re.compile(r"^    options: .*\n(?:     +\S.*\n)*", flags=re.MULTILINE)


class Signatures(griffe.Extension):
    """Takes the parameters that `**options: Unpack[...]` stands for from the class itself, and what
    is said of them from the classes that they are passed on to."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Replace `**options` by what Python knows of it, in the signature and in the docstring,
        which a class may have without a constructor of its own."""
        own = cls.members.get("__init__")
        parameters = own.parameters if isinstance(own, griffe.Function) else griffe.Parameters()
        options = [p.name for p in parameters if str(p.annotation).startswith("Unpack[")]
        mentions = bool(cls.docstring) and _OPTIONS.search(cls.docstring.value)
        if not options and not mentions:
            return
        documented = griffe.dynamic_import(cls.path)
        signature = inspect.signature(documented).parameters
        if options:
            del parameters[options[0]]
            for name, parameter in signature.items():
                if name not in parameters:
                    parameters.add(
                        griffe.Parameter(
                            name,
                            annotation=str(parameter.annotation),
                            kind=griffe.ParameterKind.keyword_only,
                            default=repr(parameter.default),
                        )
                    )
        if mentions:
            said = {}
            for base in reversed(documented.__mro__[1:]):
                said |= _said_of_parameters(base)
            missing = [name for name in signature if name not in _said_of_parameters(documented)]
            entries = [f"    {name}: {said[name]}".replace("\n", "\n        ") for name in missing]
            text = "".join(f"{entry}\n" for entry in entries)
            cls.docstring.value = _OPTIONS.sub(lambda _: text, cls.docstring.value)


def _said_of_parameters(documented: type) -> dict[str, str]:
    """What the docstring of a class says of each parameter, without the indentation."""
    sections = griffe.Docstring(inspect.getdoc(documented) or "").parse("google", warnings=False)
    return {
        parameter.name: parameter.description
        for section in sections
        if section.kind is griffe.DocstringSectionKind.parameters
        for parameter in section.value
    }
