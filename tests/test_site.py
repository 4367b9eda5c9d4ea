"""The pages of the site that teach: every Python block runs, every command parses, and every output shown is what they print.

In a page, a fence of the language

- ``python`` runs, in one namespace with those before it; one whose first line is ``# NAME.py`` is written to that file instead;
- ``toml`` is written to the file that its first line names;
- ``console`` has commands. Those of shardplan parse, and those that are cheap run;
- ``text`` is what the fence before it prints, with ``...`` for any text.

Each page runs in a directory of its own, on simulated devices.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardplan.shell import cli

DOCS = Path(__file__).parent.parent / "docs"
PAGES = """first_plan reading_a_plan for_fsdp_and_tp clusters memory verifying testing processes papers""".split()
LONG = ("verify", "compare", "calibrate", "sweep", "place")
"""Commands that take long, or that start processes: they parse here, and those of `RUN` run in a slow test."""
FENCE = re.compile(r"^```(python|toml|console|text)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# (\S+\.(?:py|toml))\n")


@dataclass(frozen=True)
class Fence:
    """A block of a page, and the line of its first line of text."""

    page: Path
    language: str
    text: str
    line: int


def fences(name: str) -> Iterator[Fence]:
    page = DOCS / f"{name}.md"
    whole = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(whole):
        yield Fence(page, found[1], found[2], whole.count("\n", 0, found.start(2)) + 1)


def commands(text: str) -> list[list[str]]:
    """The commands of a console, each as its words."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if line.startswith("$ ")]


def run(fence: Fence, namespace: dict[str, Any]) -> str:
    """Runs a block and returns what it prints."""
    printed = io.StringIO()
    if written := FILE.match(fence.text):
        Path(written[1]).write_text(fence.text, encoding="utf-8")
    elif fence.language == "python":
        # lines before it, so that tracebacks have the lines of the page
        code = compile("\n" * (fence.line - 1) + fence.text, str(fence.page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
    elif fence.language == "console":
        for program, *words in commands(fence.text):
            if program == "shardplan" and words[0] not in LONG:
                with contextlib.redirect_stdout(printed):
                    assert cli.main(words) == 0, words
    return printed.getvalue()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory, from which files can be imported."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name: str, directory: Path) -> None:
    printed, namespace = "", {"__name__": "site"}
    for fence in fences(name):
        if fence.language != "text":
            printed = run(fence, namespace)
        elif not doctest.OutputChecker().check_output(fence.text, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE):
            pytest.fail(f"{fence.page.name}:{fence.line} shows another output than this:\n{printed}")


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_parse(name: str) -> None:
    parser = cli._parser()
    for fence in fences(name):
        for program, *words in commands(fence.text) if fence.language == "console" else ():
            if program == "shardplan":
                parser.parse_args(words)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_plan", "verifying"])
def test_the_verifications_of_a_page_pass(name: str, directory: Path, environment: dict[str, str]) -> None:
    """`shardplan verify` simulates devices, which a process can do only before JAX starts."""
    for fence in fences(name):
        if FILE.match(fence.text):
            run(fence, {})
        for program, *words in commands(fence.text) if fence.language == "console" else ():
            if program == "shardplan" and words[0] == "verify":
                command = [sys.executable, "-m", "shardplan", *words]
                subprocess.run(command, check=True, env=environment | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL)


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [p.stem for p in sorted(DOCS.glob("*.md")) if p.stem != "index" and f"\n{p.stem}\n" not in index] == []
