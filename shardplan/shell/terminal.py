"""Prints reports and remarks: in colours on a terminal where the package rich is installed, else as they are."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from shardplan.report.colours import Span, Style, spans
from shardplan.report.report import Report

_STYLES: Mapping[Style, str] = {
    "title": "bold",
    "header": "dim",
    "name": "cyan",
    "plan": "bold",
    "good": "green",
    "warning": "yellow",
    "bad": "red",
}


def coloured(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether text for a stream has colours: not with NO_COLOR, else with FORCE_COLOR, else on terminals unless TERM=dumb.

    Without the package rich there are none.
    """
    if environment.get("NO_COLOR") or importlib.util.find_spec("rich") is None:
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return environment.get("TERM") != "dumb" and stream.isatty()


def show(report: Report, stream: TextIO | None = None) -> None:
    """Prints the text of a report to stdout."""
    marked = spans(report.text, passed=report.passed) if report.for_people else []
    _write(report.text, marked, sys.stdout if stream is None else stream)


def say(line: str, style: Style) -> None:
    """Prints one line to stderr."""
    _write(line, [Span(0, len(line), style)], sys.stderr)


def _write(text: str, marked: Sequence[Span], stream: TextIO) -> None:
    if not marked or not coloured(stream, os.environ):
        stream.write(f"{text}\n")
        return
    from rich.console import Console
    from rich.segment import Segments
    from rich.text import Text

    console = Console(file=stream, force_terminal=True, color_system="standard", no_color=False)
    shown = Text(text)
    for one in marked:
        shown.stylize(_STYLES[one.style], one.start, one.end)
    # segments are written unwrapped: a terminal breaks long lines as it does without colours
    console.print(Segments(shown.render(console, end="\n")), soft_wrap=True, end="")
