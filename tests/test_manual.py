"""The manual in a browser: `make test-docs` builds it. ``PAGED_MANUAL`` names its folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import pytest

MANUAL = Path(__file__).parent.parent / os.environ.get("PAGED_MANUAL", "")
BROWSER = shutil.which("chromium")

pytestmark = [
    pytest.mark.skipif("PAGED_MANUAL" not in os.environ, reason="PAGED_MANUAL names no manual"),
    pytest.mark.skipif(BROWSER is None, reason="chromium is not installed"),
]


class Page(HTMLParser):
    """What a page shows: its links, the places that one can lead to, its text."""

    def __init__(self, url: str, source: str) -> None:
        super().__init__()
        self.url = url
        self.links: set[str] = set()
        self.places: set[str] = {""}
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag == "a" and found.get("href"):
            self.links.add(urljoin(self.url, found["href"] or ""))
        self.places.add(found.get("id") or "")

    def handle_data(self, data: str) -> None:
        self.text += data


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Serve the manual on this machine; return its address."""
    handler = partial(Quiet, directory=str(MANUAL))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def shown(url: str) -> Page:
    """Open a page, let its scripts run, and return what it shows then."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--virtual-time-budget=8000", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return Page(url, done.stdout)


def test_each_link_leads_somewhere(site: str) -> None:
    """From the first page on, each is opened once; a link into a page finds its place there."""
    pages: dict[str, Page] = {}
    waiting = [urljoin(site, "index.html")]
    while waiting:
        url = waiting.pop()
        pages[url] = shown(url)
        targets = {urldefrag(link).url for link in pages[url].links if link.startswith(site)}
        leading = {link for link in targets if link.endswith(".html")}
        waiting += sorted(leading - set(pages) - set(waiting))
        missing = [link for link in targets if not (MANUAL / link.removeprefix(site)).exists()]
        assert not missing, url
    assert len(pages) > 20
    for page in pages.values():
        for link in page.links:
            target, place = urldefrag(link)
            if target in pages:
                assert place in pages[target].places, f"{page.url} leads to {link}"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("chain_digests", "paged_ops.blocks.chain_digests"),
        ("flash_attn_with_kvcache", "paged_ops.integrations.flash_attn"),
        ("sliding window", "Semantics: what the ops mean"),
    ],
)
def test_the_search_finds_a_name(site: str, words: str, found: str) -> None:
    page = shown(f"{site}search.html?q={words.replace(' ', '+')}")
    assert found in page.text


def test_the_first_page_says_where_to_go(site: str) -> None:
    page = shown(urljoin(site, "index.html"))
    for reader in ("transformers", "I write an engine", "I own an Ascend 910B"):
        assert reader in page.text
    assert "PagedAttention(num_heads=8" in page.text
    assert "never run on an NPU" in page.text
