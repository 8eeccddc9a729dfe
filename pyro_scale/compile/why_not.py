"""Why a model cannot be compiled, in words."""

from __future__ import annotations

import re

from pyro_scale.errors import Code

_NO_COMPILER = "there is no C++ compiler"


def why_not(error: Exception) -> str:
    """Why a model cannot be compiled, in one line, from whatever was raised."""
    if isinstance(error, FileNotFoundError) or "InvalidCxxCompiler" in str(error):
        return f"{_NO_COMPILER}: {error}"
    first = str(error).strip().partition("\n")[0][:300]
    compilers_own = re.search(r"^.*\berror: .*$", str(error), re.MULTILINE)
    if compilers_own:
        first = f"{first}: {compilers_own[0].strip()[:300]}"
    if "tracing tensor" in first:
        return "it reads a tensor's value in Python: .item(), float(), bool(), an if"
    if "DynamicOutputShape" in type(error).__name__:
        return f"the shape of a result depends on values: {first}"
    return f"{type(error).__name__}: {first}"


def section_on(reason: str) -> Code:
    """Where the page of symptoms has more on such a reason."""
    return "no-compiler" if reason.startswith(_NO_COMPILER) else "not-compiled"
