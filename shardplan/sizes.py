"""Sizes as users write them, and counts as users read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .errors import ShardplanError


def parse_bytes(text: object, *, what: str = "memory limit") -> int:
    """``"70GiB"``, ``"80GB"``, ``"512 MiB"``, ``"1e9"`` or a number, as bytes. ``what`` names the value in errors."""
    if isinstance(text, int | float) and not isinstance(text, bool) and math.isfinite(text):
        value = int(text)
    elif not isinstance(text, str):
        raise ShardplanError(f"{what} {text!r} is not a size: give bytes, or text such as '70GiB'")
    else:
        units = {
            "": 1,
            "B": 1,
            "KB": 10**3,
            "MB": 10**6,
            "GB": 10**9,
            "TB": 10**12,
            "KIB": 2**10,
            "MIB": 2**20,
            "GIB": 2**30,
            "TIB": 2**40,
        }
        digits = text.strip().rstrip("BKMGTIbkmgti ")
        unit = text.strip()[len(digits) :].strip().upper()
        try:
            value = int(float(digits) * units[unit])
        except (ValueError, KeyError, OverflowError):
            raise ShardplanError(
                f"{what} {text!r} is not a size: write bytes, or a number with a unit from KB to TB or from KiB to TiB"
            ) from None
    if value <= 0:
        raise ShardplanError(f"{what} {text!r} is not positive: give at least 1 byte")
    return value


def counted(number: int, one: str, several: str = "") -> str:
    """A number with its noun, whose plural is ``several`` (by default with an s).

    >>> counted(1, "loss", "losses"), counted(0, "loss", "losses"), counted(2, "operator")
    ('1 loss', '0 losses', '2 operators')
    """
    return f"{number} {one if number == 1 else several or f'{one}s'}"


def axes_text(axes: Mapping[Any, int]) -> str:
    """The axes of a mesh with their sizes.

    >>> axes_text({"node": 2, "gpu": 4}), axes_text({})
    ('node=2 x gpu=4', 'one device')
    """
    return " x ".join(f"{name}={size}" for name, size in axes.items()) or "one device"
