"""The figures in ``docs/``, each printed by the command in its marker.

``python benchmarks/docs_tables.py [WORD ...] [--list]``, or ``make docs-tables ONLY="WORD ..."``

A marker is a comment above the block that its command printed, with the commit that printed it:

    <!-- printed by `python benchmarks/tofu.py` at 1a2b3c4 -->
    ...
    <!-- end -->

The command runs again, and what it prints replaces the block: tables in Markdown as they are, other text as a code block. A
WORD restricts this to markers that contain it. ``checked by`` in place of ``printed by`` marks a command that takes seconds: a
test compares its block (`tests/test_docs_tables.py`). The working tree must be committed, so that the commit in a marker is the
one that printed it; commands that keep their results (`by_hand`, the proof's fences) print older ones too.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(
    r"<!-- (?P<how>printed|checked) by `(?P<command>[^`]+)` at (?P<commit>\w+) -->\n(?P<text>.*?)<!-- end -->", re.S
)


@dataclass(frozen=True, slots=True)
class Block:
    """What a command printed, in a page. ``checked``: a test runs the command."""

    page: Path
    command: str
    commit: str
    text: str
    checked: bool


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    for found in _BLOCK.finditer(page.read_text()):
        yield Block(page, found["command"], found["commit"], found["text"], found["how"] == "checked")


def pages() -> list[Path]:
    """The pages that may have blocks."""
    return [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]


def printed(command: str) -> str:
    """What a command prints, as it stands in a page. Its errors go to stderr. Raises CalledProcessError if it fails."""
    program, *words = shlex.split(command)
    assert program == "python", f"{command}: a command in a page starts with python"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = done.stdout.strip("\n").splitlines()
    if any(line.startswith("|") for line in lines):
        return "\n".join(lines) + "\n"
    return "".join(f"    {line}".rstrip() + "\n" for line in lines)


def renew(block: Block, commit: str) -> None:
    """Runs a block's command and writes its page anew, whole."""
    text, whole = printed(block.command), block.page.read_text()
    how = "checked" if block.checked else "printed"

    def marker(commit: str, text: str) -> str:
        return f"<!-- {how} by `{block.command}` at {commit} -->\n{text}<!-- end -->"

    before = marker(block.commit, block.text)
    assert whole.count(before) == 1, f"{block.page}: {block.command} has changed, or stands there twice"
    part = block.page.with_suffix(".part")
    part.write_text(whole.replace(before, marker(commit, f"\n{text}\n")))
    part.replace(block.page)


def main(argv: Sequence[str] | None = None) -> int:
    """Renews the blocks, or lists them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only markers that contain one of these")
    parser.add_argument("--list", action="store_true", help="lists the markers and runs nothing")
    given = parser.parse_args(argv)
    chosen = [
        block
        for page in pages()
        for block in blocks(page)
        if not given.words or any(word in f"{page.name} {block.command}" for word in given.words)
    ]
    if given.list:
        print("\n".join(f"{b.page.relative_to(ROOT)}: {b.command} at {b.commit}" for b in chosen))
        return 0
    changed = _git("status", "--porcelain", "--", ".", ":!docs", ":!README.md")
    if changed:
        parser.error(f"commit these first, so that the marker names the code that ran:\n{changed}")
    for block in chosen:
        print(f"{block.page.relative_to(ROOT)}: {block.command}", file=sys.stderr, flush=True)
        renew(block, _git("rev-parse", "--short", "HEAD"))
    return 0


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
