"""The bar comes late, only where somebody watches, and leaves nothing behind."""

from __future__ import annotations

import io

from shardplan.report.progress import Progress


class Terminal(io.StringIO):
    """A stream that is a terminal, and the line that one sees on it."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        line: list[str] = []
        for piece in self.getvalue().split("\r"):
            line[: len(piece)] = piece
        return "".join(line).rstrip()


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_short_work_shows_nothing() -> None:
    stream, clock = Terminal(), Clock()
    with Progress(stream, clock=clock) as progress:
        for done in range(10):
            clock.now_s = done * 0.1
            progress("searching", done / 10)
    assert stream.getvalue() == ""


def test_long_work_shows_a_bar_and_wipes_it() -> None:
    stream, clock = Terminal(), Clock()
    with Progress(stream, clock=clock) as progress:
        clock.now_s = 1.5
        progress("searching", 0.25)
        assert stream.shown() == "searching  [######..................]  25%  1.50 s"
        clock.now_s = 2.5
        progress("polishing")
        assert stream.shown() == "polishing  2.50 s"
    assert stream.shown() == ""


def test_a_bar_is_not_drawn_faster_than_one_can_see() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock=clock)
    for step in range(1000):
        clock.now_s = 1 + step * 0.001
        progress("searching", step / 1000)
    assert stream.getvalue().count("\r") <= 11


def test_a_file_or_a_pipe_gets_no_bar() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(stream, clock=clock) as progress:
        clock.now_s = 5.0
        progress("searching", 0.5)
    assert stream.getvalue() == ""
