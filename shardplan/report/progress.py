"""A progress bar for long work: silent for the first second, and where the stream is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from shardplan.report.tables import seconds

_WIDTH = 24
_REDRAW_S = 0.1


class Progress:
    """An observer of work that draws a progress bar: ``progress(stage, share)``.

    The bar appears on ``stream`` (standard error) once the work has lasted ``after_s`` seconds, and only on a terminal. Used as a
    context manager it wipes the bar at the end.

    >>> with Progress() as progress:
    ...     for done in range(3):
    ...         progress("searching", done / 3)
    """

    def __init__(
        self, stream: TextIO | None = None, *, after_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._after_s = after_s
        self._clock = clock
        self._watched = self._stream.isatty()
        self._start_s = clock()
        self._drawn_s = -float("inf")
        self._width = 0

    def __call__(self, stage: str, share: float | None = None) -> None:
        """Report the stage, and the share of the whole that is done (0 to 1; None if unknown)."""
        now = self._clock()
        lasted_s = now - self._start_s
        if not self._watched or lasted_s < self._after_s or now - self._drawn_s < _REDRAW_S:
            return
        self._drawn_s = now
        self._write(bar(stage, share, lasted_s))

    def close(self) -> None:
        """Wipe the bar, if one was drawn."""
        if self._width:
            self._write("")
            self._stream.write("\r")
            self._stream.flush()

    def _write(self, line: str) -> None:
        # spaces overwrite the end of a longer line before
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def bar(stage: str, share: float | None, lasted_s: float) -> str:
    """One line of progress.

    >>> bar("searching", 0.25, 2.5)
    'searching  [######..................]  25%  2.50 s'
    >>> bar("tracing", None, 2.5)
    'tracing  2.50 s'
    """
    if share is None:
        return f"{stage}  {seconds(lasted_s)}"
    share = min(max(share, 0.0), 1.0)
    full = int(share * _WIDTH)
    return f"{stage}  [{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%}  {seconds(lasted_s)}"
