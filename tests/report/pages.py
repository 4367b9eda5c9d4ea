"""What tests of HTML pages share: their parts, and a browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --virtual-time-budget=4000"
    " --window-size=1600,1000 --dump-dom"
).split()

NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium or google-chrome on the path (Debian: apt-get install chromium)"
)
"""The mark of tests that look at a page in a browser. The summary of `make test` gives the reason where they are skipped."""

Probe = Callable[..., Any]
"""``probe(page, script, width)`` -> what the script returns in the browser; faults of the page fail the test."""

WIDE = """
  const wide = [...document.querySelectorAll("body *")].filter((e) => !e.closest(".wide, .skip, svg"))
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + "." + e.className);
  return {ready: document.body.dataset.ready, width: innerWidth, scroll: document.documentElement.scrollWidth, wide,
    sections: [...document.querySelectorAll("section")].map((s) => [s.id, s.getBoundingClientRect().height])};
"""


class Parsed(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.noscript: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)
        if tag in ("script", "style"):
            (self.scripts if tag == "script" else self.styles).append("")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] == "script":
            self.scripts[-1] += data
        elif self._inside and self._inside[-1] == "style":
            self.styles[-1] += data
        elif "noscript" in self._inside:
            self.noscript.append(data)

    @property
    def data(self) -> dict[str, Any]:
        """The JSON in the page."""
        return json.loads(self.scripts[0])


def assert_needs_no_network(text: str) -> None:
    page = Parsed(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "source", "video"), tag
        assert "src" not in attributes, (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#"), (tag, attributes)
    assert "@import" not in text
    assert text.count("http") == text.count("http://www.w3.org/2000/svg") + text.count("http-equiv")
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
