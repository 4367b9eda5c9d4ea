"""What tests of the command line stand on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folder_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[Any]) -> Callable[[str], Path]:
    """A function that writes ``small.py`` with a text into a directory of its own, which becomes the current one."""

    def made(text: str) -> Path:
        (tmp_path / "small.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.delitem(sys.modules, "small", raising=False)
        return tmp_path

    return made
