"""The bar comes late, only where somebody watches, says what the best plan is, and leaves nothing behind."""

from __future__ import annotations

import io
import os
import re
import select
import time

import pytest

from shardplan.report.progress import Progress
from shardplan.report.standing import Standing

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


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


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.parametrize("plain", [True, False])
def test_short_work_shows_nothing(plain: bool) -> None:
    stream, clock = Terminal(), Clock()
    with Progress(stream, clock=clock, plain=plain) as progress:
        for done in range(10):
            clock.now_s = done * 0.1
            progress("searching", done / 10)
            progress.draw()
    assert stream.getvalue() == ""


def test_long_work_shows_a_bar_and_wipes_it() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock=clock, plain=True)
    clock.now_s = 1.5
    progress("searching", 0.25)
    progress.draw()
    assert stream.shown() == "searching  [######..................]  25%  1.50 s"
    clock.now_s = 2.5
    progress("polishing")
    progress.draw()
    assert stream.shown() == "polishing  2.50 s"
    progress.close()
    assert stream.shown() == ""


@pytest.mark.parametrize("plain", [True, False])
def test_the_gap_closes_as_better_plans_are_found(plain: bool) -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock=clock, plain=plain)
    clock.now_s = 2.0
    seen: list[str] = []
    for best_s, least_s in ((0.02, 0.0), (0.015, 0.01), (0.0103, 0.01), (0.0099, 0.01)):
        progress("searching", 0.5)
        progress.best(best_s, least_s)
        progress.draw()
        seen += re.findall(r"best [\d.]+ ms(?:, gap [\d.]+%)?", ESCAPE.sub("", stream.getvalue()))[-1:]
    progress.close()
    assert seen == ["best 20.0 ms", "best 15.0 ms, gap 50.0%", "best 10.3 ms, gap 3.0%", "best 9.90 ms, gap 0.0%"]


def test_no_plan_is_no_best_plan() -> None:
    assert Standing("searching", 0.5).best == ""


def test_the_bar_in_colours_has_the_same_words_and_is_wiped() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock=clock, plain=False)
    clock.now_s = 2.0
    progress("point [1] of 2: searching", 0.25)
    progress.best(0.0103, 0.01)
    progress.draw()
    text = ESCAPE.sub("", stream.getvalue())
    assert all(word in text for word in ("point [1] of 2: searching", "25%", "2.00 s", "best 10.3 ms, gap 3.0%", "\u2501"))
    progress.close()
    assert stream.getvalue().rstrip("\n").endswith("\x1b[2K")


def test_a_thread_draws_while_work_says_nothing() -> None:
    stream = Terminal()
    with Progress(stream, after_s=0.0, plain=True) as progress:
        progress("tracing")
        for _ in range(500):
            if stream.getvalue().count("tracing") > 1:
                break
            time.sleep(0.02)
    assert stream.getvalue().count("tracing") > 1
    assert stream.shown() == ""


def test_a_line_is_no_wider_than_the_terminal() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock=clock, plain=True)
    clock.now_s = 2.0
    progress("x" * 200, 0.5)
    progress.draw()
    assert len(stream.shown()) == 79


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_file_a_pipe_or_a_dumb_terminal_gets_no_bar(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    stream, clock = Terminal() if term == "dumb" else io.StringIO(), Clock()
    with Progress(stream, clock=clock) as progress:
        clock.now_s = 5.0
        progress("searching", 0.5)
        progress.draw()
    assert stream.getvalue() == ""


def test_a_terminal_that_closes_ends_the_bar_alone() -> None:
    stream = Terminal()
    with Progress(stream, after_s=0.0, plain=True) as progress:
        stream.close()
        progress("searching", 0.5)
        time.sleep(0.05)


@pytest.mark.parametrize("plain", [True, False])
def test_the_bar_is_seen_while_its_descriptor_is_redirected(plain: bool) -> None:
    """As standard error is during a compilation."""
    terminal, end = os.openpty()
    seen = b""
    with os.fdopen(end, "w") as stream, open(os.devnull, "w") as nowhere, Progress(stream, after_s=0.0, plain=plain) as progress:
        os.dup2(nowhere.fileno(), end)
        progress("compiling")
        while b"compiling" not in seen and select.select([terminal], [], [], 10.0)[0]:
            seen += os.read(terminal, 4096)
    os.close(terminal)
    assert b"compiling" in seen
