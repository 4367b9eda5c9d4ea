"""A program that forwards standard input to stderr, each line at once, and keeps the compiler's warnings of a last resort.

At the mark (its argument) or at the end of the input, it writes these to its standard output. It imports nothing of shardplan, so
that it starts fast.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress

LAST_RESORT = b"Involuntary full rematerialization"
"""The words of a line that is kept."""
_ENDS_WITHIN_S = 1.0
"""Who marks the end closes the pipe next. If the pipe is still open after so long, another process holds it."""


def main() -> None:
    """Reads up to the mark or the end, and forwards what still comes after the mark."""
    kept, after, marked = _sorted_lines(sys.argv[1].encode())
    with os.fdopen(1, "wb") as out:
        out.writelines(kept)
    _forward(after)
    if marked:
        _forward_rest()


def _forward_rest() -> None:
    """Forwards to the end of the input: in a fork, so that nobody waits for it, once the input stays open."""
    waited_for = True
    while True:
        if waited_for and not select.select([0], [], [], _ENDS_WITHIN_S)[0]:
            if os.fork():
                return
            waited_for = False
        text = os.read(0, 65536)
        if not text:
            return
        _forward(text)


def _sorted_lines(mark: bytes) -> tuple[list[bytes], bytes, bool]:
    """Forwards lines up to the mark: (the lines that were kept, what came after the mark, whether it came)."""
    kept: list[bytes] = []
    line, after, marked = b"", b"", b""
    while not marked and (more := os.read(0, 65536)):
        text, marked, after = (line + more).partition(mark)
        *whole, line = text.split(b"\n")
        for row in whole:
            _sort(row + b"\n", kept)
    _sort(line, kept)
    return kept, after, bool(marked)


def _sort(line: bytes, kept: list[bytes]) -> None:
    """Keeps a line, or forwards it."""
    if LAST_RESORT in line:
        kept.append(line)
    else:
        _forward(line)


def _forward(text: bytes) -> None:
    with suppress(OSError):  # nobody reads stderr
        os.write(2, text)


if __name__ == "__main__":
    main()
