"""A progress bar for long work: hidden for the first second, and if the stream is no terminal."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self, TextIO

from shardplan.report.standing import Standing
from shardplan.report.tables import seconds

_WIDTH = 24
_REDRAW_S = 0.25


class Bar(Protocol):
    """A line on a terminal that is redrawn in place."""

    def draw(self, standing: Standing, lasted_s: float) -> None:
        """Draws the line in place of the one before."""
        ...

    def wipe(self) -> None:
        """Removes the line."""
        ...


class Progress:
    """An observer of work that draws a progress bar: ``progress(stage, share)``, and ``progress.best(seconds, bound)`` for the
    best plan so far and a lower bound on its seconds.

    Inside its context a thread draws the bar on ``stream`` (standard error), from ``after_s`` seconds on, and only on a
    terminal (not with TERM=dumb); the calls themselves draw nothing. It draws on a descriptor of its own, so that it is seen
    while the stream's is redirected. The bar is wiped at the end. If ``plain``, the package rich is not used.

    >>> with Progress() as progress:
    ...     for done in range(3):
    ...         progress("searching", done / 3)
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        after_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        plain: bool = importlib.util.find_spec("rich") is None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._after_s, self._clock, self._plain = after_s, clock, plain
        self._watched = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._start_s = clock()
        self._standing = Standing()
        self._bar: Bar | None = None
        self._own: TextIO | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardplan-progress", daemon=True)

    def __call__(self, stage: str, share: float | None = None) -> None:
        """Tells the stage, and the share of the whole that is done (0 to 1; None if unknown)."""
        self._standing = replace(self._standing, stage=stage, share=share)

    def best(self, best_s: float, least_s: float) -> None:
        """Tells the seconds of the best plan so far (infinite without one) and a lower bound on them (0 if none is known)."""
        self._standing = replace(self._standing, best_s=best_s, least_s=least_s)

    def draw(self) -> None:
        """Draws the bar in its present state if work has lasted long enough."""
        lasted_s = self._clock() - self._start_s
        if not self._watched or lasted_s < self._after_s or not self._standing.stage:
            return
        if self._bar is None:
            self._bar = _PlainBar(self._stream) if self._plain else _rich_bar(self._stream)
        self._bar.draw(self._standing, lasted_s)

    def close(self) -> None:
        """Ends the drawing, and wipes the bar if there is one."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.wipe()
        if self._own is not None:
            with suppress(OSError):  # the terminal is gone
                self._own.close()

    def _run(self) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone
            self._ended.wait(self._after_s)
            while not self._ended.is_set():
                self.draw()
                self._ended.wait(_REDRAW_S)

    def __enter__(self) -> Self:
        if self._watched:
            self._own = _duplicate(self._stream)
            self._stream = self._own or self._stream
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _duplicate(stream: TextIO) -> TextIO | None:
    """The stream on a descriptor of its own; None for one that has no descriptor."""
    with suppress(OSError, ValueError):
        return os.fdopen(os.dup(stream.fileno()), "w", encoding=stream.encoding, errors=stream.errors)
    return None


class _PlainBar:
    """The bar in ASCII."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._width = stream, 0

    def draw(self, standing: Standing, lasted_s: float) -> None:
        # a wrapped line could not be overwritten
        self._write(bar(standing, lasted_s)[: _columns(self._stream) - 1])

    def wipe(self) -> None:
        self._write("")
        self._stream.write("\r")
        self._stream.flush()

    def _write(self, line: str) -> None:
        # spaces overwrite the end of a longer previous line
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)


def _columns(stream: TextIO) -> int:
    """The width of a terminal; 80 if it is unknown."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def _rich_bar(stream: TextIO) -> Bar:
    from shardplan.report.rich_bar import RichBar

    return RichBar(stream)


def bar(standing: Standing, lasted_s: float) -> str:
    """One line of progress.

    >>> bar(Standing("searching", 0.25), 2.5)
    'searching  [######..................]  25%  2.50 s'
    >>> bar(Standing("tracing", None, 0.0103, 0.01), 2.5)
    'tracing  2.50 s  best 10.3 ms, gap 3.0%'
    """
    parts = [standing.stage, seconds(lasted_s), standing.best]
    if standing.share is not None:
        share = min(max(standing.share, 0.0), 1.0)
        full = int(share * _WIDTH)
        parts.insert(1, f"[{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%}")
    return "  ".join(filter(None, parts))
