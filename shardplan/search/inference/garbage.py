"""Python's garbage collector, kept out of the search."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """Turns the collector off inside: the search drops no cycles, and each collection would walk all that JAX has loaded.

    At the end every live object becomes old, so that the next collection of young objects does not walk it; but not if objects
    are frozen. Python 3.12 itself freezes its immortal objects in a full collection, and after that nothing becomes old.
    """
    enabled = gc.isenabled()
    try:  # an interrupt may come as soon as the collector is off
        gc.disable()
        yield
    finally:
        try:
            if enabled and not gc.get_freeze_count():  # objects that somebody else froze stay frozen
                _make_old()
        finally:
            if enabled:
                gc.enable()


def _make_old() -> None:
    try:
        gc.freeze()
    finally:
        gc.unfreeze()
