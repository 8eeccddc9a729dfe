"""Formulas as MathML, which browsers draw by themselves: no script, no font, no network."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

MARKED = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def render(latex: str, *, block: bool) -> str:
    """The MathML of one formula, given as LaTeX without its dollars."""
    return convert(latex.strip(), display="block" if block else "inline")


def _replace(match: re.Match[str]) -> str:
    latex = html.unescape(match[2]).strip()
    return render(latex[2:-2], block=match[1] == "div")


def on_page_content(content: str, **_: Any) -> str:
    """Replace what Arithmatex has marked."""
    return MARKED.sub(_replace, content)
