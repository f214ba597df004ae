"""The docs site (`make docs`): it builds without a warning, loads nothing from elsewhere, and finds words."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import browser
import pytest

from ports import answering

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("DOCS_VENV") or Path(sys.prefix) / "docs") / "bin" / "sphinx-build"
#: Attributes by which a page loads something. A link (`a`) waits for its reader.
LOADS = {"src", "srcset", "href", "poster", "data", "style"}


class Loads(HTMLParser):
    """The addresses elsewhere from which a page loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "a":
            values = [value or "" for name, value in attrs if name in LOADS]
            self.found += [value for value in values if re.search(r"(?:[a-z]+:)?//", value)]

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "style":
            self.found += outside(data)


def outside(style: str) -> list[str]:
    """Addresses that a style sheet loads."""
    return re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)", style)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not BUILD.exists():
        pytest.skip("Sphinx is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [str(BUILD), "-W", "--keep-going", "--quiet", "-c", "docs", ".", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


@pytest.mark.slow
def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert {page.name for page in pages} >= {"index.html", "README.html", "operating.html", "search.html"}
    assert [(page.name, found) for page in pages if (found := Loads(page.read_text()).found)] == []
    styles = [outside(style.read_text()) for style in site.rglob("*.css")]
    assert len(styles) > 2
    assert not any(styles)


@pytest.mark.slow
def test_the_search_index_finds_a_word(site: Path) -> None:
    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    pages = {index["docnames"][number] for number in index["terms"]["quarantin"]}
    assert {"docs/protocol", "docs/transports"} <= pages < set(index["docnames"])


@pytest.mark.slow
@pytest.mark.skipif(not browser.installed(), reason="chromium and chromedriver are not installed")
def test_a_reader_searches_the_files_and_sees_diagrams(site: Path, tmp_path: Path) -> None:
    loaded = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    with browser.browser(tmp_path) as page:
        page.open(f"{site.as_uri()}/index.html")
        page.until("return location.pathname", lambda path: path.endswith("/README.html"))
        page.open(f"{site.as_uri()}/search.html?q=quarantine")
        page.until(
            "return [...document.querySelectorAll('.search a')].map(a => a.getAttribute('href'))",
            lambda links: "docs/protocol.html" in {link.partition("#")[0] for link in links},
        )
        files = functools.partial(SimpleHTTPRequestHandler, directory=site)
        with answering(files) as url:  # a browser does not tell which files a page loads
            page.open(f"{url}/docs/protocol.html")
            page.until("return document.querySelectorAll('pre.mermaid > svg').length", (4).__eq__)
            names = page.run(loaded)
            assert any("/mermaid.js" in name for name in names)
            assert [name for name in names if not name.startswith(url)] == []
