"""Python's garbage collector, kept out of the search."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """No collection inside: what the search drops is in no cycles, and each collection would walk all that JAX has loaded."""
    was = gc.isenabled()
    try:  # an interrupt may be raised as soon as it is off
        gc.disable()
        yield
    finally:
        if was:
            gc.enable()
