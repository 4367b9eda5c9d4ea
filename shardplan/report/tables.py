"""Numbers with units and tables, in plain text: three significant digits, columns that line up."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

NEAR = 1e-6
"""The relative difference up to which two predicted durations count as equal: far above what rounding leaves of sums of doubles,
far below the three digits that are printed."""

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_RATES = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?\s?([A-Za-z%/]{1,5})?|-|inf|nan|")


def seconds(duration_s: float) -> str:
    """A duration.

    >>> [seconds(t) for t in (0.0123, 4.5e-6, 0.9999, 75.04, 7325.0)]
    ['12.3 ms', '4.50 us', '1.00 s', '1 min 15 s', '2 h 2 min']
    """
    if duration_s < 0:
        return "-" + seconds(-duration_s)
    if not math.isfinite(duration_s) or duration_s == 0:
        return f"{duration_s:g} s"
    # 59.95 s and more would be rounded to 60.0 s
    if duration_s >= 59.95:
        whole = round(duration_s)
        if whole < 3600:
            return f"{whole // 60} min {whole % 60} s"
        minutes = round(duration_s / 60)
        return f"{minutes // 60} h {minutes % 60} min"
    return _scaled(duration_s, _TIMES, 1000)


def size(nbytes: float) -> str:
    """A number of bytes, in powers of 1024.

    >>> [size(n) for n in (512, 1536, 1610612736, 1048575)]
    ['512 B', '1.50 KiB', '1.50 GiB', '1.00 MiB']
    """
    if nbytes < 0:
        return "-" + size(-nbytes)
    if not math.isfinite(nbytes) or nbytes < 1024:
        return f"{nbytes:.4g} B"
    return _scaled(nbytes, tuple((1024.0**i, unit) for i, unit in reversed(list(enumerate(_SIZES)))), 1024)


def rate(bytes_per_s: float) -> str:
    """A bandwidth, in powers of 1000 as vendors give it.

    >>> [rate(b) for b in (450e9, 8e9, 3.35e12)]
    ['450 GB/s', '8.00 GB/s', '3.35 TB/s']
    """
    if not math.isfinite(bytes_per_s) or bytes_per_s < 1:
        return f"{bytes_per_s:.3g} B/s"
    return _scaled(bytes_per_s, _RATES, 1000)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], align: str | None = None) -> str:
    """Rows under underlined headers, two spaces between columns, no space at the ends of lines.

    ``align`` has ``l`` or ``r`` for each column; without it, columns of numbers are right-aligned and others left-aligned. A
    cell that is None stays empty.

    >>> print(table(["plan", "step"], [["fsdp", "12.3 ms"], ["data parallel", "140 ms"]]))
    plan              step
    -------------  -------
    fsdp           12.3 ms
    data parallel   140 ms
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    assert all(len(row) == len(headers) for row in cells), "a row has another number of cells than there are headers"
    columns = [[row[at] for row in cells] for at in range(len(headers))]
    sides = align if align is not None else "".join(_side(column) for column in columns)
    assert len(sides) == len(headers), f"align {sides!r} is not one letter for each column"
    widths = [max(map(len, [header, *column])) for header, column in zip(headers, columns, strict=True)]
    lines = [list(headers), ["-" * width for width in widths], *cells]
    return "\n".join(_line(line, widths, sides) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], sides: str) -> str:
    padded = (c.rjust(w) if side == "r" else c.ljust(w) for c, w, side in zip(cells, widths, sides, strict=True))
    return "  ".join(padded).rstrip()


def _side(column: Sequence[str]) -> str:
    return "r" if any(column) and all(_NUMBER.fullmatch(cell) for cell in column) else "l"


def _scaled(value: float, units: Sequence[tuple[float, str]], base: int) -> str:
    """The value in the largest unit in which it is at least 1 after rounding; ``units`` go from large to small."""
    for at, (scale, unit) in enumerate(units):
        shown = _three_digits(value / scale)
        if float(shown) >= 1 or at == len(units) - 1:
            larger = at > 0 and float(shown) >= base
            return f"{_three_digits(value / units[at - 1][0])} {units[at - 1][1]}" if larger else f"{shown} {unit}"
    raise AssertionError("no units")


def _three_digits(value: float) -> str:
    """Three significant digits, trailing zeros kept, never an exponent."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    # Rounding up may add a digit: 9.996 is 10.0.
    digits = 2 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(digits, 0)}f}"


def device_ranges(devices: Sequence[int]) -> str:
    """Device numbers in the given order, runs of neighbours as ranges.

    >>> device_ranges((0, 1, 2, 3)), device_ranges((1, 4, 5, 6)), device_ranges((3, 1))
    ('0-3', '1, 4-6', '3, 1')
    """
    runs: list[list[int]] = []
    for d in devices:
        if runs and runs[-1][-1] == d - 1:
            runs[-1].append(d)
        else:
            runs.append([d])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
