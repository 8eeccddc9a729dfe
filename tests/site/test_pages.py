"""What needs no browser: links, pictures, and that every public name has its place."""

import inspect
import re
from urllib.parse import unquote

import pytest
from bs4 import BeautifulSoup
from places import ROOT

import pyro_scale as ps

pytestmark = pytest.mark.site


@pytest.fixture(scope="session")
def pages(site):
    found = {}
    for path in sorted(site.rglob("*.html")):
        found[path] = BeautifulSoup(path.read_text(), "html.parser")
    return found


def test_links_lead_somewhere(site, pages):
    ids = {path: {tag["id"] for tag in soup.find_all(id=True)} for path, soup in pages.items()}
    dead = []
    for path, soup in pages.items():
        if path.name == "404.html":  # its links start at the address of the site
            continue
        for tag in soup.find_all(["a", "img", "script", "link"]):
            link = tag.get("href") or tag.get("src") or ""
            if not link or re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = unquote(link).partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.is_file() or (anchor and anchor not in ids.get(target, {anchor})):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


def test_nothing_is_fetched_from_elsewhere(site, pages):
    fetched = [
        f"{path.relative_to(site)}: {tag.get('src') or tag.get('href')}"
        for path, soup in pages.items()
        for tag in soup.find_all(["img", "script", "iframe", "link"])
        if re.match(r"(https?:)?//", tag.get("src") or tag.get("href") or "")
        and tag.get("rel") != ["canonical"]
    ]
    assert fetched == []


def test_every_public_name_is_on_an_api_page(pages):
    entries = {
        tag["id"]
        for path, soup in pages.items()
        if path.parent.name == "api"
        for tag in soup.find_all(["h2", "h3", "h4"], id=True)
    }
    modules = {"pyro_scale": ps, "pyro_scale.metrics": ps.metrics, "pyro_scale.kernels": ps.kernels}
    wanted = {
        f"{module}.{name}": f"{vars(found)[name].__module__}.{name}"
        for module, found in modules.items()
        for name in found.__all__
        if not inspect.ismodule(vars(found)[name])
    }
    wanted |= {
        f"pyro_scale.errors.{name}": ""
        for name, value in vars(ps.errors).items()
        if getattr(value, "__module__", "") == ps.errors.__name__
        and inspect.isclass(value)
        and not name.startswith("_")
    }
    missing = [name for name, origin in wanted.items() if not {name, origin} & entries]
    assert missing == []


@pytest.mark.parametrize("method", [ps.BAOA, ps.SGLD, ps.pSGLD, ps.SGHMC, ps.SGNHT])
def test_a_page_has_every_option_with_its_default(pages, method):
    (samplers,) = (soup for path, soup in pages.items() if path.match("api/samplers.html"))
    heading = next(h for h in samplers.find_all("h2") if h["id"].endswith(f".{method.__name__}"))
    shown = heading.find_next("code", string=None).find_next("pre").get_text()
    for name, parameter in inspect.signature(method).parameters.items():
        told = re.search(rf"\b{name}:[^=]*?(?: = ([^,\n]+))?,\n", shown)
        assert told, f"{name} is not in {shown}"
        assert (told[1] is None) == (parameter.default is parameter.empty), name


def test_every_page_is_in_the_navigation():
    """mkdocs warns of pages that are not, but not of pages that are named twice."""
    named = re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text().split("nav:")[1])
    there = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(there)
