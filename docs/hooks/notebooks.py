"""The notebooks as pages, and the gallery of them.

A notebook says in its metadata, under `pyro_scale`, what the gallery shows: kind, level, minutes, a
summary, and which cell's figure is the thumbnail.  Each cell with a figure has its alt text in its
own metadata, under `alt`.
"""

from __future__ import annotations

import base64
import html
import io
import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import links
import mathml
from bs4 import BeautifulSoup
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File
from PIL import Image

KINDS = {
    "tutorial": "Tutorials",
    "how-to": "How-tos",
    "experiment": "Experiments",
    "paper": "The paper's experiments",
}
LEVELS = "beginner", "intermediate", "advanced"
CARDS = "<!-- gallery -->"
THUMBNAIL_WIDTH = 640
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$", re.DOTALL)


@dataclass(frozen=True)
class Notebook:
    """One notebook and what it says of itself."""

    path: Path

    @property
    def uri(self) -> str:
        """Where it is on the site."""
        return self.path.as_posix()

    @cached_property
    def content(self) -> dict[str, Any]:
        """The file."""
        return json.loads(self.path.read_text(encoding="utf-8"))

    @property
    def card(self) -> dict[str, Any]:
        """What the gallery shows."""
        return self.content["metadata"]["pyro_scale"]

    @property
    def kind(self) -> str:
        """The gallery's group."""
        return "paper" if "paper" in self.path.parts else self.card["kind"]

    @property
    def title(self) -> str:
        """The first heading."""
        return "".join(self.content["cells"][0]["source"]).splitlines()[0].lstrip("# ")

    @property
    def thumbnail(self) -> str | None:
        """Where its small picture is on the site."""
        return f"img/gallery/{self.path.stem}.png" if "thumbnail" in self.card else None

    def figures(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Each figure's cell, and its PNG in base 64."""
        for cell in self.content["cells"]:
            for output in cell.get("outputs", ()):
                if png := output.get("data", {}).get("image/png"):
                    yield cell, png if isinstance(png, str) else "".join(png)

    def small_picture(self) -> bytes:
        """The thumbnail, as PNG."""
        cell = self.content["cells"][self.card["thumbnail"]]
        png = next(png for other, png in self.figures() if other is cell)
        picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
        picture.thumbnail((THUMBNAIL_WIDTH, THUMBNAIL_WIDTH))
        small = io.BytesIO()
        picture.save(small, "PNG", optimize=True)
        return small.getvalue()


def notebooks() -> list[Notebook]:
    """All of them, within a kind those for beginners first, then the shortest."""
    found = [Notebook(path) for path in Path("notebooks").rglob("*.ipynb")]
    found = [book for book in found if ".ipynb_checkpoints" not in book.path.parts]
    return sorted(found, key=lambda b: (LEVELS.index(b.card["level"]), b.card["minutes"], b.title))


def by_kind() -> dict[str, list[Notebook]]:
    """The gallery's groups."""
    return {
        name: [book for book in notebooks() if book.kind == kind] for kind, name in KINDS.items()
    }


def on_config(config: Any) -> Any:
    """Put the notebooks below the gallery."""
    for entry in config.nav:
        if entry.get("Gallery") == "gallery.md":
            groups = [
                {name: [{book.title: book.uri} for book in books]}
                for name, books in by_kind().items()
            ]
            entry["Gallery"] = ["gallery.md", *groups]
    return config


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Any, config: Any) -> Any:
    """Add the notebooks, the pictures beside them, and thumbnails."""
    pictures = [picture.as_posix() for picture in Path("notebooks").rglob("*.png")]
    for uri in [book.uri for book in notebooks()] + pictures:
        files.append(File(uri, str(Path.cwd()), config.site_dir, config.use_directory_urls))
    for book in notebooks():
        if book.thumbnail is not None:
            files.append(File.generated(config, book.thumbnail, content=book.small_picture()))
    return files


def _card(book: Notebook) -> str:
    card = book.card
    picture = ""
    if book.thumbnail is not None:
        alt = book.content["cells"][card["thumbnail"]]["metadata"]["alt"]
        picture = f"![{alt}]({book.thumbnail}){{ loading=lazy }}\n\n    "
    minutes = "1 minute" if card["minutes"] == 1 else f"{card['minutes']} minutes"
    return (
        f"-   {picture}**[{book.title}]({book.uri})**\n\n"
        f"    {card['summary']}\n\n    *{card['level']}, {minutes}*\n"
    )


def _group(name: str, books: list[Notebook]) -> str:
    cards = "\n".join(map(_card, books))
    return f'## {name}\n\n<div class="grid cards" markdown>\n\n{cards}\n</div>\n'


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the cards where the gallery has its mark."""
    if CARDS not in markdown:
        return markdown
    groups = [_group(name, books) for name, books in by_kind().items()]
    return markdown.replace(CARDS, "\n".join(groups))


def on_page_content(content: str, page: Any, config: Any, **_: Any) -> str:
    """Finish a notebook's page: links, formulas, alt texts, no script from elsewhere, and a place
    behind the documentation's pages in a search."""
    if not page.file.src_uri.endswith(".ipynb"):
        return content
    page.meta["search"] = {"boost": 0.5}
    soup = BeautifulSoup(content, "html.parser")
    for script in soup.find_all("script"):
        if "mathjax" in str(script).lower() or "mermaid" in str(script):
            script.decompose()
    for anchor in soup.select("a.anchor-link"):
        anchor["class"] = "headerlink"  # which a search leaves out of titles
    for anchor in soup.find_all("a", href=True):
        anchor["href"] = _site_link(anchor["href"], page.file.src_uri, config)
    for cell in soup.select(".jp-MarkdownOutput"):
        _draw_formulas(cell)
    alts = (cell["metadata"].get("alt") for cell, _ in Notebook(Path(page.file.src_uri)).figures())
    for image, alt in zip(soup.select(".jp-RenderedImage img"), alts, strict=False):
        image["alt"] = alt or ""
    return str(soup)


def _site_link(href: str, page: str, config: Any) -> str:
    """A notebook's link on the site; in the notebook it is a path from its own file."""
    if re.match(r"[a-z]+:|#", href):
        return href
    target, mark, anchor = href.partition("#")
    folder = posixpath.dirname(page)
    path = posixpath.normpath(posixpath.join(folder, target))
    if path.startswith("docs/") and path.endswith(".md"):
        target = posixpath.relpath(path.removeprefix("docs/"), folder)
    elif not path.startswith("notebooks/"):
        target = links.resolve("../" + path, "", config.extra["repository"])
    return re.sub(r"\.(md|ipynb)$", ".html", target) + mark + anchor


def _draw_formulas(cell: Any) -> None:
    """Replace the formulas in a cell of text."""
    for text in cell.find_all(string=True):
        if text.find_parent(["code", "pre"]) is None and "$" in text:
            drawn = FORMULA.sub(
                lambda match: mathml.render(
                    html.unescape(match[1] or match[2]), block=match[1] is not None
                ),
                html.escape(str(text), quote=False),
            )
            if drawn != str(text):
                text.replace_with(BeautifulSoup(drawn, "html.parser"))
