"""Ctrl-C on the command line: no interrupt is lost, and its message names the event that it preceded."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType

_RETRY_S = 0.01


@contextmanager
def before(what: str) -> Iterator[None]:
    """Sets the message of an interrupt inside to ``before what``, unless it has one already."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(str(error) or f"before {what}") from error


@contextmanager
def heard() -> Iterator[Callable[[], None]]:
    """Raises interrupts inside even where other code drops them.

    Python drops every exception in some callbacks. One is JAX's callback in the garbage collector, which often runs during
    tracing. A dropped interrupt is sent again a moment later. C modules turn an interrupt during their import into an
    `ImportError`, which becomes a `KeyboardInterrupt` again.

    Some C code clears an interrupt silently. The yielded function raises `KeyboardInterrupt` if one has arrived. It is for code
    that handles no interrupt itself and so goes on only if one was lost.
    """
    signals: list[int] = []

    def check() -> None:
        if signals:
            raise KeyboardInterrupt

    with _retry_dropped(), _recorded(signals):
        try:
            yield check
        except ImportError as error:
            if signals:
                raise KeyboardInterrupt from error
            raise


@contextmanager
def _retry_dropped() -> Iterator[None]:
    previous_hook = sys.unraisablehook

    def hook(dropped: UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            # from a thread: an interrupt sent from inside this hook would be raised here and dropped too
            timer = threading.Timer(_RETRY_S, _thread.interrupt_main)
            timer.daemon = True
            timer.start()
        else:
            previous_hook(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook


@contextmanager
def _recorded(signals: list[int]) -> Iterator[None]:
    """Appends the interrupts that arrive inside to ``signals``; only the main thread receives them."""
    previous_handler = signal.getsignal(signal.SIGINT)
    if not callable(previous_handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def record(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        previous_handler(number, frame)

    signal.signal(signal.SIGINT, record)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
