"""README.md and the pages of docs/: every Python block runs, every command parses, and every output shown is what they print.

In a page, a fence of the language

- ``python`` runs, in one namespace with those before it, which begins with the page's names in `tests.site_names.GIVEN`; one
  whose first line is ``# NAME.py`` is written to that file instead, and ``NOT_RUN`` lists those that do not run;
- ``toml`` is written to the file that its first line names;
- ``console`` has commands. Those of shardplan parse, and they run where all of the console are cheap;
- ``text`` is what the fence before it prints, with ``...`` for any text.

Each page runs in a directory of its own, on simulated devices. Examples with ``>>>`` are doctests (`tests/tdl/test_docs.py`).
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shardplan
from shardplan.shell import cli
from tests.site_names import GIVEN

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FILES = {page.stem: page for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
SLOW = ("first_plan", "for_fsdp_and_tp", "memory", "pipelines", "reading_a_plan", "replanning", "testing", "verifying")
"""Pages that take over two seconds. README.md does too, but is read first."""
NOT_RUN = {
    ("processes", "jax.distributed.initialize()"): "several processes; tests/emit/trained_by.py has a program of this form",
    ("accuracy", "jax.shard_map(jnp.sum"): "the program that ends the process under jaxlib 0.11.2",
    ("verifying", "verify fault.py:norms"): "the compiler of jaxlib 0.10.2 alone is at fault",
    ("tdl", "lambda b, d: Sum("): "an expression of the description language, whose names only `shardplan.tdl` gives",
}
"""Blocks that are not run, by page and text, each with the reason."""
LONG = ("verify", "compare", "calibrate", "sweep", "place")
"""Commands that take long or start processes: a console that has one only parses. Slow tests run verifications and tests."""
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
    page = FILES[name]
    whole = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(whole):
        yield Fence(page, found[1], found[2], whole.count("\n", 0, found.start(2)) + 1)


PAGES = [name for name in FILES if any(True for _ in fences(name))]


def not_run(fence: Fence) -> list[tuple[str, str]]:
    """The keys of ``NOT_RUN`` that name this block."""
    return [(page, text) for page, text in NOT_RUN if page == fence.page.stem and text in fence.text]


def shardplan_commands(fence: Fence) -> list[list[str]]:
    """The words behind ``shardplan`` in each such command of a console; none for other fences."""
    lines = fence.text.replace("\\\n", " ").splitlines() if fence.language == "console" else []
    given = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if line.startswith("$ ")]
    return [words for program, *words in given if program == "shardplan"]


def run(fence: Fence, namespace: dict[str, Any]) -> str:
    """Runs a block and returns what it prints."""
    printed = io.StringIO()
    if written := FILE.match(fence.text):
        Path(written[1]).write_text(fence.text, encoding="utf-8")
    elif fence.language == "python" and not not_run(fence):
        # lines before it, so that tracebacks have the lines of the page
        code = compile("\n" * (fence.line - 1) + fence.text, str(fence.page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
    elif fence.language == "console":
        given = shardplan_commands(fence)
        for words in given if not any(words[0] in LONG for words in given) else ():
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


@pytest.mark.parametrize("name", [pytest.param(p, marks=pytest.mark.slow) if p in SLOW else p for p in PAGES])
def test_a_page_runs(name: str, directory: Path) -> None:
    printed, namespace = "", {"__name__": "site", **GIVEN.get(name, dict)()}
    for fence in fences(name):
        if fence.language != "text":
            printed = run(fence, namespace)
        elif not doctest.OutputChecker().check_output(fence.text, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE):
            pytest.fail(f"{fence.page.name}:{fence.line} shows another output than this:\n{printed}")


@pytest.mark.slow
def test_the_tests_of_the_readme_pass(directory: Path, environment: dict[str, str]) -> None:
    (block,) = (fence for fence in fences("README") if "def test_" in fence.text)
    given = (
        "import shardplan\nfrom tests.site_names import step, trained\n\nstate, batch = trained()['state'], trained()['batch']\n"
    )
    Path("test_plan.py").write_text(given + block.text, encoding="utf-8")
    assert_tests_pass(environment)


def test_blocks_that_do_not_run_are_there() -> None:
    assert sorted(key for name in FILES for fence in fences(name) for key in not_run(fence)) == sorted(NOT_RUN)


@pytest.mark.parametrize("name", FILES)
def test_python_stands_in_fences(name: str) -> None:
    """An indented block is a command, a text or TOML: Python in it would not run."""
    text = re.sub(
        r"^```.*?^```$|^<!-- (?:checked|printed) .*?^<!-- end -->$", "", FILES[name].read_text("utf-8"), flags=re.M | re.S
    )
    for block in re.findall(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+", text):
        assert not is_python(textwrap.dedent(block)), block


def is_python(text: str) -> bool:
    """Whether it parses as Python and not as TOML."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        with contextlib.suppress(SyntaxError):
            return bool(ast.parse(text).body)
    return False


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_parse(name: str) -> None:
    parser, _ = cli._parser()
    for fence in fences(name):
        for words in shardplan_commands(fence):
            parser.parse_args(words)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_plan", "verifying"])
def test_the_verifications_of_a_page_pass(name: str, directory: Path, environment: dict[str, str]) -> None:
    """`shardplan verify` simulates devices, which a process can do only before JAX starts."""
    for fence in fences(name):
        if FILE.match(fence.text):
            run(fence, {})
        for words in () if not_run(fence) else shardplan_commands(fence):
            if words[0] in ("plan", "verify"):
                subprocess.run([sys.executable, "-m", "shardplan", *words], check=True, env=environment)


@pytest.mark.slow
def test_the_tests_of_a_page_pass(directory: Path, environment: dict[str, str]) -> None:
    for fence in fences("testing"):
        if FILE.match(fence.text):
            run(fence, {})
    assert_tests_pass(environment)


def assert_tests_pass(environment: dict[str, str]) -> None:
    """The two tests in this directory pass, as a user runs them: when they save their plans, and when they compare them."""
    for option in ("--update-plans", "-q"):
        command = [sys.executable, "-m", "pytest", "-p", "shardplan.shell.pytest_plugin", "--shardplan-devices", "8", option]
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
        assert "2 passed" in done.stdout, done.stdout


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [p.stem for p in sorted(DOCS.glob("*.md")) if p.stem != "index" and f"\n{p.stem}\n" not in index] == []


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^\.\. auto\w+:: shardplan\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted([*shardplan.__all__, "testing"])
