"""Every page in Chromium: as it loads, as it reads, in the dark and on a phone; and the search."""

from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.site

DESK = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"}
PHONE = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}

#: What people type, and the page that answers it.
SEARCHES = {
    "R-hat of weights": "symptoms",
    "CUDA out of memory": "symptoms",
    "PlateError": "symptoms",
    "loss is NaN": "symptoms",
    "which method": "which-method",
    "laplace-torch": "coming-from/laplace-torch",
    "step size": "step_sizes",
    "LoRA": "frozen",
    "checkpoint resume": "guide/checkpoints",
    "sbc": "calibration",
}

AUDITS = Path(__file__).with_name("audits.js")


def addresses():
    """Every page: the documentation's and the notebooks'."""
    docs = ((ROOT / "docs", path) for path in (ROOT / "docs").rglob("*.md"))
    books = ((ROOT, path) for path in (ROOT / "notebooks").rglob("*.ipynb"))
    found = (path.relative_to(top).with_suffix(".html").as_posix() for top, path in [*docs, *books])
    return sorted(name for name in found if "checkpoints/" not in name)


@contextmanager
def opened(browser, url, view):
    """A page, and what its console and its requests complained of."""
    page, complaints = browser.new_page(**view), []
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(request.url))
    page.on("response", lambda answer: answer.status >= 400 and complaints.append(answer.url))
    page.goto(url, wait_until="load")
    page.add_script_tag(path=AUDITS)
    yield page, complaints
    page.close()


@pytest.mark.parametrize("name", addresses())
def test_a_page_loads_and_reads_well(browser, address, name):
    with opened(browser, address + name, DESK) as (page, complaints):
        page.wait_for_load_state("networkidle")
        levels = page.evaluate("audits.headings()")
        blocks = page.locator("article pre:has(code), article .jp-CodeCell").count()
        buttons = page.locator("article .md-code__button, article clipboard-copy").count()
        nameless = page.locator("article img:not([alt]), article img[alt='']").count()
        faint = page.evaluate("audits.faint()")
    assert complaints == []
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    assert nameless == 0
    assert blocks == 0 or buttons > 0
    assert faint == {}


@pytest.mark.parametrize("name", addresses())
def test_a_page_reads_on_a_phone_in_the_dark(browser, address, name):
    with opened(browser, address + name, PHONE) as (page, complaints):
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        wide, faint = page.evaluate("audits.wide()"), page.evaluate("audits.faint()")
    assert complaints == []
    assert max(int(part) for part in dark.strip("rgba()").split(",")[:3]) < 80
    assert wide == []
    assert faint == {}


@pytest.mark.parametrize("phrase", SEARCHES)
@pytest.mark.parametrize("where", ["server", "disk"])
def test_the_search_finds(browser, address, site, where, phrase):
    url = address if where == "server" else site.as_uri() + "/"
    with opened(browser, url + "index.html", DESK) as (page, complaints):
        page.locator("input[name=query]").press_sequentially(phrase, delay=20)
        page.wait_for_selector(".md-search-result__link", timeout=60_000)
        links = page.locator(".md-search-result__item > .md-search-result__link")
        first = [links.nth(i).get_attribute("href") for i in range(min(5, links.count()))]
    assert complaints == []
    assert any(SEARCHES[phrase] in link for link in first), first
