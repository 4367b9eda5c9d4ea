"""Python's garbage collector, kept out of the search."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """No collection inside: what the search drops is in no cycles, and each collection would walk all that JAX has loaded.

    All that there is by its end counts as old then, so that the next collection of young objects does not walk what it keeps.
    """
    was = gc.isenabled()
    try:  # an interrupt may be raised as soon as it is off
        gc.disable()
        yield
    finally:
        try:
            if was and not gc.get_freeze_count():  # what somebody froze stays frozen
                _grown_old()
        finally:
            if was:
                gc.enable()


def _grown_old() -> None:
    try:
        gc.freeze()
    finally:
        gc.unfreeze()
