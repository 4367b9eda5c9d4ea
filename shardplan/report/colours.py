"""Finds the parts of a report that stand out on a terminal, by the form that all reports share: titles, named facts and tables.

The text itself stays as it is. `shardplan.shell.terminal` decides whether to use colours, and prints the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Style = Literal["title", "header", "name", "plan", "good", "warning", "bad"]
"""The role of a part: a title, a table's header, a fact's name, the plan's row, or a status that needs attention."""

_RULE = re.compile(r" *-+(?:  -+)*")
_FACT = re.compile(r"([a-z][a-z ]{0,9}[a-z]) +(?=\S)|( {12})(?=\S)")
_PLANS = frozenset({"this plan", "the plan", "best"})
"""The cells that mark the row of the plan, or of the best of several."""
_CELLS: tuple[tuple[str, Style], ...] = (("missing|refused", "bad"), ("lacks .*", "warning"), ("present", "good"))
"""Cells that stand out in any column, each with its style."""
_FITS = "fits"
_LINES: tuple[tuple[str, Style], ...] = (("MISSING: ", "bad"), ("note: ", "warning"))
"""The prefixes of lines that stand out, each with its style."""


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a text from ``start`` to ``end``."""

    start: int
    end: int
    style: Style


def spans(text: str, *, passed: bool = True) -> list[Span]:
    """The parts of a report that stand out, in order. If the report's check failed, its title is marked bad."""
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    facts = _facts(lines)
    found: list[Span] = []
    columns: list[tuple[str, int, int]] = []
    for n, line in enumerate(lines):
        columns = _columns(lines, n) or (columns if line else [])
        if n < facts:
            own = _fact(line)
        elif columns:
            own = _in_table(lines, n, columns)
        elif n == 0 or _is_title(lines, n):
            own = [Span(0, len(line), "title" if passed or n else "bad")]
        else:
            own = [Span(0, len(line), style) for begins, style in _LINES if line.startswith(begins)]
        found += [Span(starts[n] + one.start, starts[n] + one.end, one.style) for one in own]
    return found


def _facts(lines: Sequence[str]) -> int:
    """The number of leading lines that are named facts in two columns."""
    count = next((n for n, line in enumerate(lines) if not line), len(lines))
    return count if count > 1 and all(_FACT.match(line) and line[11:12] == " " for line in lines[:count]) else 0


def _fact(line: str) -> list[Span]:
    name = line[:11].rstrip()
    if name == "note":
        return [Span(0, len(line), "warning")]
    return [*([Span(0, len(name), "name")] if name else []), *([Span(12, len(line), "plan")] if name == "step time" else [])]


def _is_title(lines: Sequence[str], n: int) -> bool:
    """Whether a line is the title of a table or of indented lines."""
    line, after = lines[n], [other for other in lines[n + 1 : n + 4] if other]
    if not line or line[0] == " " or lines[n - 1] or line.endswith(".") or not after:
        return False
    return after[0].startswith("  ") or any(_RULE.fullmatch(other) for other in lines[n + 2 : n + 4])


def _columns(lines: Sequence[str], n: int) -> list[tuple[str, int, int]]:
    """The columns (header, start, end) of the table whose header is line ``n``; empty if that line is no header."""
    if n + 1 == len(lines) or not _RULE.fullmatch(lines[n + 1]):
        return []
    return [(lines[n][m.start() : m.end()].strip(), m.start(), m.end()) for m in re.finditer("-+", lines[n + 1])]


def _in_table(lines: Sequence[str], n: int, columns: Sequence[tuple[str, int, int]]) -> list[Span]:
    line = lines[n]
    if _RULE.fullmatch(line) or _columns(lines, n):
        return [Span(0, len(line), "header")]
    cells = [(header, start, line[start:end].strip()) for header, start, end in columns]
    own = [Span(0, len(line), "plan")] if any(text in _PLANS for _, _, text in cells) else []
    for header, start, text in cells:
        own += [Span(at := line.index(text, start), at + len(text), style) for style in _cell(header, text)]
    return own


def _cell(header: str, text: str) -> Iterator[Style]:
    if header == _FITS and text == "no":
        yield "bad"
    for pattern, style in _CELLS:
        if re.fullmatch(pattern, text):
            yield style
