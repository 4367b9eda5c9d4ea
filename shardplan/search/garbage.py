"""Python's garbage collector, kept out of the search."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """No collection inside: what the search drops is in no cycles, and each collection would walk all that JAX has loaded."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
