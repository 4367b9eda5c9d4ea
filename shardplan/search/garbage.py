"""Python's garbage collector, kept out of the search."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """No collection inside: what the search drops is in no cycles, and each collection would walk all that JAX has loaded.

    What it keeps counts as old then: the next collection of young objects does not walk it.
    """
    was = gc.isenabled()
    try:  # an interrupt may be raised as soon as it is off
        gc.disable()
        yield
    finally:
        if was:
            if not gc.get_freeze_count():  # what somebody froze stays frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
