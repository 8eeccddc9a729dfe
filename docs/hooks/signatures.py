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
        """Replace `**options` by what Python knows of it, in the signature and in the docstring."""
        function = cls.members.get("__init__")
        parameters = function.parameters if isinstance(function, griffe.Function) else []
        options = [p for p in parameters if str(p.annotation).startswith("Unpack[")]
        text = cls.docstring.value if cls.docstring else ""
        if not options and not _OPTIONS.search(text):  # a class may inherit the signature
            return
        documented = griffe.dynamic_import(cls.path)
        signature = inspect.signature(documented).parameters
        if options:
            del parameters[options[0].name]
            for name in [name for name in signature if name not in parameters]:
                annotation, default = str(signature[name].annotation), repr(signature[name].default)
                kind = griffe.ParameterKind.keyword_only
                parameters.add(
                    griffe.Parameter(name, annotation=annotation, kind=kind, default=default)
                )
        if not _OPTIONS.search(text):
            return
        said = {}
        for base in reversed(documented.__mro__[1:]):
            said |= _said_of_parameters(base)
        entries = []
        for name in [name for name in signature if name not in _said_of_parameters(documented)]:
            entries.append(f"    {name}: {said[name]}".replace("\n", "\n        ") + "\n")
        cls.docstring.value = _OPTIONS.sub(lambda _: "".join(entries), text)


def _said_of_parameters(documented: type) -> dict[str, str]:
    """What the docstring of a class says of each parameter, without the indentation."""
    sections = griffe.Docstring(inspect.getdoc(documented) or "").parse("google", warnings=False)
    return {
        parameter.name: parameter.description
        for section in sections
        if section.kind is griffe.DocstringSectionKind.parameters
        for parameter in section.value
    }
