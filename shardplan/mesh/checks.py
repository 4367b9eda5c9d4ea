"""Checks of the figures of a cluster. Each raises `ClusterError` with the place of the figure."""

from __future__ import annotations

import math
import re

from ..errors import ClusterError

MOST_SECONDS = 1000.0
"""The longest latency or launch that is accepted: a longer one is a mistake of units."""
LARGEST_PART = 2.0
"""The largest efficiency: fits against assumed bandwidths end a little above 1, never at 90 (a percentage)."""
NAME = re.compile(r"[\w.\-]+")


def check_positive(value: float, where: str) -> None:
    """Raise `ClusterError` unless the value is a finite number above zero."""
    if not _is_number(value) or not math.isfinite(value) or value <= 0:
        raise ClusterError(f"must be a finite number above 0, got {value!r}", where=where)


def check_at_least(value: float, least: float, where: str) -> None:
    """Raise `ClusterError` unless the value is a finite number of at least ``least``."""
    if not _is_number(value) or not math.isfinite(value) or value < least:
        raise ClusterError(f"must be a finite number of at least {least:g}, got {value!r}", where=where)


def check_seconds(value: float, where: str) -> None:
    """Raise `ClusterError` unless the value is from 0 to `MOST_SECONDS`."""
    check_at_least(value, 0.0, where)
    if value > MOST_SECONDS:
        raise ClusterError(f"must be at most {MOST_SECONDS:g} seconds, got {value!r}: are these microseconds?", where=where)


def check_part(value: float, where: str) -> None:
    """Raise `ClusterError` unless the value is an efficiency: above 0, at most `LARGEST_PART`."""
    check_positive(value, where)
    if value > LARGEST_PART:
        raise ClusterError(f"must be a fraction of the hardware's rate, such as 0.9 for 90%, got {value!r}", where=where)


def check_name(value: str, where: str) -> None:
    """Raise `ClusterError` for a level name that cannot stand in the text of a reduction program, like ``a, b`` or ``root``."""
    if not NAME.fullmatch(value) or value == "root":
        raise ClusterError(
            f"must be letters, digits, '_', '-' and '.', but not 'root', a word of reduction programs, got {value!r}: rename it",
            where=where,
        )


def check_count(value: int, where: str) -> None:
    """Raise `ClusterError` unless the value is a whole number above zero."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ClusterError(f"must be a whole number above 0, got {value!r}", where=where)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
