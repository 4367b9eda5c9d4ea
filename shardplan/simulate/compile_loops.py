"""Compiles the loops of the simulators by Numba, which may be missing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

Functions = tuple[Callable[..., Any], ...]


@cache
def compiled(functions: Functions) -> dict[str, Callable[..., Any]] | None:
    """Functions of one module, which call each other, compiled by Numba, by name; None if Numba is not installed.

    They allocate nothing: counting references to their arrays would take most of the time.
    """
    try:
        numba = import_module("numba")
    except ImportError:
        return None
    space: dict[str, Any] = dict(functions[0].__globals__)  # each function sees the compiled ones in place of the others
    for function in functions:
        name = function.__name__
        space[name] = numba.njit(_nrt=False, cache=True)(FunctionType(function.__code__, space, name))
        if (stats := getattr(space[name], "stats", None)) is not None:  # None if Numba is told not to compile
            pattern = f"{Path(function.__code__.co_filename).stem}.{name}-*.nbi"
            forget_unreadable(Path(stats.cache_path), pattern, numba.__version__)
    return {function.__name__: space[function.__name__] for function in functions}


def forget_unreadable(directory: Path, pattern: str, version: str) -> None:
    """Deletes the indexes of compiled functions that name a class which an upgrade has renamed, or that are cut off: this
    ``version`` of Numba fails on such an index before it looks whether the source has changed.
    """
    for index in directory.glob(pattern):
        try:
            with index.open("rb") as file:
                if pickle.load(file) == version:  # of another version, Numba does not read on either
                    pickle.load(file)
        except FileNotFoundError:
            continue  # another process was faster
        except (AttributeError, ImportError, EOFError, pickle.UnpicklingError):
            index.unlink(missing_ok=True)
