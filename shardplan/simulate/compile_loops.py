"""Compiles the loops of the simulators by Numba, which may be missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
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
    return {function.__name__: space[function.__name__] for function in functions}
