"""The built site, a server of it on this machine, and a browser."""

import functools
import http.server
import shutil
import threading

import pytest
from places import ROOT

BUILT = ROOT / "site"


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def site():
    if not (BUILT / "index.html").exists():
        pytest.skip("no site: `make docs` builds it")
    return BUILT


@pytest.fixture(scope="session")
def address(site):
    handler = functools.partial(Handler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no browser: install chromium")
    with playwright.sync_playwright() as started:
        with_browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield with_browser
        with_browser.close()
