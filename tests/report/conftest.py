"""The fixture that looks at a page in a browser."""

from __future__ import annotations

import json
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report.pages import CHROMIUM, FLAGS, Probe


class _Body(HTMLParser):
    """The attributes of a page's body."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: dict[str, str | None] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self.attributes = dict(attrs)


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    """``probe(page, script, width)`` -> what the script returns in the browser; faults of the page fail the test."""

    def run(page: str, script: str, width: int = 1280) -> Any:
        assert CHROMIUM is not None
        listens = "<script>window.faults = []; addEventListener('error', (e) => faults.push(e.message))</script>"
        asks = (
            "<script>addEventListener('load', () => { let said; "
            f"try {{ said = (() => {{ {script} }})(); }} catch (error) {{ faults.push(String(error)); }} "
            "parent.document.body.dataset.probe = JSON.stringify({ faults, said }); })</script>"
        )
        head, found, tail = page.rpartition("</body>")
        assert found
        inner = head.replace("<head>", "<head>" + listens, 1) + asks + found + tail
        # in a frame of its own: windows are no narrower than 500 pixels
        frame = f'<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{escape(inner)}"></iframe>'
        file = tmp_path / "page.html"
        file.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{frame}</body>", encoding="utf-8")
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        answer = _Body(done.stdout).attributes.get("data-probe")
        assert answer is not None, done.stderr[-2000:]
        found_in_page = json.loads(answer)
        assert found_in_page["faults"] == []
        return found_in_page.get("said")

    return run
