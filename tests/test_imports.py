"""Every module is imported without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for room in ("shardplan", "models")
    for path in (ROOT / room).rglob("*.py")
    if path.name != "__main__.py"
)


@pytest.mark.quick
def test_every_module_is_imported_without_a_warning(environment: dict[str, str]) -> None:
    code = f"import importlib\nfor name in {MODULES}: importlib.import_module(name)"
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert len(MODULES) > 200
