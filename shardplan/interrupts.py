"""Ctrl-C on the command line: heard wherever it comes, and told before what it came."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN_S = 0.01


@contextmanager
def before(what: str) -> Iterator[None]:
    """An interrupt inside has ``before what`` as its message, unless it has one already."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(str(error) or f"before {what}") from error


@contextmanager
def heard() -> Iterator[None]:
    """Interrupts that come where Python drops every exception are raised again a moment later.

    JAX has a callback in the garbage collector; during tracing and the search it is often what runs when the signal comes.
    """
    others = sys.unraisablehook

    def hook(dropped: UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            # from a thread, for an interrupt that is asked for in here is raised in here, and dropped too
            again = threading.Timer(_AGAIN_S, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            others(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = others
