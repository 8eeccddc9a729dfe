"""Links to files that are no pages: notebooks are pages of the site, the rest is on GitHub.

In the repository such a link is a path from the page to the file, so that it works there too.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(\]\(|href=\"|src=\")((?:(?:\.\./)+|figures/)[^)#\"\s]+)")


def resolve(link: str, page: str, repository: str) -> str:
    """The link on the site for a relative one on `page`, a path from docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    if path.startswith("docs/") and not path.startswith("docs/figures/"):
        return link
    if path.startswith("notebooks/") and Path(path).suffix in {".ipynb", ".png"}:
        return posixpath.relpath(path, posixpath.dirname(page) or ".")
    kind = "tree" if Path(path).is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/main/{path}"


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace the links that leave docs/."""

    def replace(match: re.Match[str]) -> str:
        return match[1] + resolve(match[2], page.file.src_uri, config.extra["repository"])

    return LINK.sub(replace, markdown)
