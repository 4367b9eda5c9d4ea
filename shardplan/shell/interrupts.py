"""Ctrl-C on the command line: heard wherever it comes, and told before what it came."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType

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
    """Interrupts that others drop are raised all the same.

    Python drops every exception in some callbacks, one of which is JAX's in the garbage collector (during tracing it is
    often what runs when the signal comes): such an interrupt comes again a moment later. Modules in C, while they are
    imported, make an `ImportError` of it.
    """
    came: list[int] = []
    with _dropped_again(), _noted(came):
        try:
            yield
        except ImportError as error:
            if came:
                raise KeyboardInterrupt from error
            raise


@contextmanager
def _dropped_again() -> Iterator[None]:
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


@contextmanager
def _noted(came: list[int]) -> Iterator[None]:
    """Adds to ``came`` the interrupts that come inside; only the main thread hears of any."""
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        usual(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
