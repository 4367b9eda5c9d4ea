"""The figures in docs/ are printed by commands: `benchmarks/docs_tables.py`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import docs_tables
from benchmarks.docs_tables import Block, blocks, pages, printed, renew

BLOCKS = [block for page in pages() for block in blocks(page)]
CHECKED = [block for block in BLOCKS if block.checked]


@pytest.mark.parametrize("block", CHECKED, ids=[block.command for block in CHECKED])
def test_a_page_says_what_its_command_prints(block: Block) -> None:
    assert block.text.strip("\n") == printed(block.command).strip("\n"), "make docs-tables"


@pytest.mark.parametrize("page", pages(), ids=[page.name for page in pages()])
def test_a_table_of_figures_stands_in_a_block(page: Path) -> None:
    """A right-aligned column is one of figures."""
    text = page.read_text()
    for block in blocks(page):
        text = text.replace(block.text, "")
    assert [line for line in text.splitlines() if re.fullmatch(r"\|[ :|-]*---:[ :|-]*", line)] == []


def test_no_block_is_malformed_or_empty() -> None:
    for page in pages():
        marked = page.read_text().count("<!-- end -->")
        assert marked == len(re.findall(r"<!-- (?:printed|checked) by ", page.read_text())) == len(list(blocks(page)))
    assert [block.command for block in BLOCKS if not block.text.strip()] == []


def test_the_commands_are_there() -> None:
    for block in BLOCKS:
        words = shlex.split(block.command)
        path = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
        assert (docs_tables.ROOT / path).exists(), block.command


def test_a_block_is_renewed_with_what_its_command_prints(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- printed by `python -c \"print('7 of 9')\"` at 0000 -->\nold\n<!-- end -->\n\nafter\n")
    (block,) = blocks(page)
    renew(block, "1234")
    assert page.read_text() == (
        "before\n\n<!-- printed by `python -c \"print('7 of 9')\"` at 1234 -->\n\n    7 of 9\n\n<!-- end -->\n\nafter\n"
    )
    (again,) = blocks(page)
    assert (again.commit, again.checked) == ("1234", False)
