"""Draws a plan as a picture file (needs matplotlib, the extra ``draw``).

Each column is an op. A rectangle is a tensor, its sides the logarithms of two dims. A line is a cut over one mesh axis; a
colour is one device.
"""

from __future__ import annotations

import colorsys
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from shardplan.errors import ShardplanError
from shardplan.report.drawing import Column, Cuts, Drawing, Tile

Axes = Any
"""matplotlib's ``Axes``, whose types are only partly known."""

FORMATS = ("png", "svg", "pdf")
"""The formats of picture files, by the file's suffix."""

_LINES = ("#111111", "#c0262d", "#1f5fa8", "#1e8449", "#8e44ad")
_WIDTHS = (1.5, 0.9, 0.6, 0.4)
_WHOLE = (0.93, 0.93, 0.93)
_MOST_PARTS = 32
"""A side with more parts than this is drawn with the cuts of its slower axes only; the text below it counts all parts."""
_PER_ROW = 16
_SHORTEST = 0.25
"""The side of a dim of size 1, as a fraction of the longest side."""
_SIZE, _GAP, _HEAD, _ROW = 0.8, 0.16, 0.85, 2.75
"""Inches: the longest side of a rectangle, the gap between columns, the height of the legend, the height of a row."""
_MARGIN = 0.4
"""Inches to the left of the columns, for the names of a row."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A column on the paper: its row and left edge. ``opens`` and ``closes`` count the repeat that begins or ends there."""

    column: Column
    row: int
    left: float
    opens: int
    closes: int


def picture_format(file: str) -> str:
    """The format that a file's suffix names.

    Raises:
        ShardplanError: if the suffix is none of `FORMATS`, or matplotlib is not installed.
    """
    suffix = Path(file).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        known = ", ".join(f".{f}" for f in FORMATS)
        raise ShardplanError(f"{file!r}: a drawing is written as {known}; end the file's name with one of these")
    _matplotlib()
    return suffix


def picture(drawn: Drawing, *, title: str, suffix: str) -> bytes:
    """The bytes of a picture file in the format ``suffix``. Equal plans give equal bytes."""
    figure = new_figure(dpi=120)
    places = list(_placed(drawn))
    rows = 1 + max((p.row for p in places), default=0)
    width, height = max(6.0, max((p.left for p in places), default=0.0) + _SIZE + 2 * _GAP), _HEAD + _ROW * rows
    figure.set_size_inches(width, height)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, width)
    axes.set_ylim(-height, 0)
    axes.axis("off")
    _legend(axes, drawn, title)
    longest = max((s for p in places for t in p.column.tiles for s in t.shape), default=2)
    for place in places:
        _column(axes, drawn, place, math.log2(max(longest, 2)))
    _blocks(axes, places)
    if not places:
        axes.text(width / 2, _top(0), "no product, convolution or lookup to draw", fontsize=9, ha="center", va="top")
    for row in range(rows if places else 0):
        for i, name in enumerate(("weights", "activations")):
            at = _top(row) - 1.06 * i - 0.03 - _SIZE / 2
            axes.text(_GAP, at, name, fontsize=6.4, rotation=90, ha="center", va="center", color="#555555")
    return rendered(figure, suffix)


def new_figure(dpi: int) -> Any:
    """An empty figure of matplotlib."""
    return _matplotlib()(dpi=dpi)


def _matplotlib() -> Any:
    """matplotlib's Figure. It comes without pyplot, which would keep figures and look for a screen."""
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ShardplanError("a drawing needs matplotlib, which is not installed: pip install 'shardplan[draw]'") from error


def rendered(figure: Any, suffix: str) -> bytes:
    """The bytes of a picture file, without the time at which it was made."""
    out = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[suffix]
    with import_module("matplotlib").rc_context({"svg.hashsalt": "shardplan"}):
        figure.savefig(out, format=suffix, metadata=undated)
    return out.getvalue()


def _placed(drawn: Drawing) -> Iterator[_Place]:
    """Columns from left to right, in rows. A repeat is not broken if it fits in one row."""
    chunks = list(_chunks(drawn))
    total = sum(len(columns) for columns, _ in chunks)
    wide = math.ceil(total / math.ceil(total / _PER_ROW)) + 1 if total else 1  # rows of about equal length
    row, left, count = 0, _MARGIN, 0
    for columns, times in chunks:
        for i, column in enumerate(columns):
            whole = len(columns) if i == 0 else 1
            if count and (count >= wide or whole <= wide < count + whole):
                row, left, count = row + 1, _MARGIN, 0
            repeated = times * (times > 1)
            yield _Place(column, row, left, repeated * (i == 0), repeated * (i == len(columns) - 1))
            left, count = left + _SIZE + _GAP, count + 1


def _chunks(drawn: Drawing) -> Iterator[tuple[tuple[Column, ...], int]]:
    """The columns to keep in one row, and their repeat count: a repeat, or the columns of one block."""
    for run in drawn.runs:
        if run.times > 1:
            yield run.columns, run.times
        else:
            for _, columns in itertools.groupby(run.columns, key=lambda c: c.block):
                yield tuple(columns), 1


# -- parts of the picture ----------------------------------------------------------------------------------------------


def _legend(axes: Axes, drawn: Drawing, title: str) -> None:
    axes.text(_MARGIN, -0.2, title, fontsize=9, weight="bold", va="center")
    x = _MARGIN
    for i, (name, size) in enumerate(drawn.axes):
        color, width = _line(i)
        axes.plot([x, x + 0.3], [-0.47, -0.47], color=color, lw=width, solid_capstyle="butt")
        text = f"cut over {name} ({size})"
        axes.text(x + 0.36, -0.47, text, fontsize=7, va="center")
        x += 0.55 + 0.062 * len(text)
    axes.text(
        _MARGIN, -0.68, "colour: one device's part; grey: whole on every device; red: how a tensor comes to the op",
        fontsize=6.4, va="center", color="#444444",
    )  # fmt: skip


def _column(axes: Axes, drawn: Drawing, place: _Place, longest: float) -> None:
    top = _top(place.row)
    middle = place.left + _SIZE / 2
    axes.text(middle, top + 0.02, place.column.label, fontsize=min(6.4, 90 / len(place.column.label)), ha="center", va="bottom")
    for i, tile in enumerate(place.column.tiles):
        above = top - 1.06 * i
        _tile(axes, drawn, tile, place.left, above - 0.03, longest)
        axes.text(middle, above - 0.86, _shape(drawn, tile), fontsize=4.7, ha="center", va="top")
        _moves(axes, middle, above - 0.945, tile.moves, "")
    _moves(axes, middle, top - 2.12, place.column.gives, "gives: ")


def _top(row: int) -> float:
    """The y coordinate at which a row's rectangles begin."""
    return -_HEAD - 0.42 - _ROW * row


def _moves(axes: Axes, x: float, y: float, moves: Sequence[str], before: str) -> None:
    """Write collectives below a rectangle; equal ones that follow each other share a line."""
    lines = [kind if n == 1 else f"{n} x {kind}" for kind, same in itertools.groupby(moves) if (n := len(list(same)))]
    if lines:
        axes.text(x, y, before + "\n".join(lines), fontsize=5.2, ha="center", va="top", color="#b3181f", linespacing=0.95)


def _blocks(axes: Axes, places: Sequence[_Place]) -> None:
    """Draw the names of blocks above their columns, and brackets around repeats."""
    start = opened = places[0] if places else None
    for place, after in itertools.zip_longest(places, places[1:]):
        assert start is not None
        top = _top(place.row)
        opened = place if place.opens else opened
        if place.closes and opened is not None:
            left = opened.left if opened.row == place.row else _MARGIN
            _bracket(axes, left - 0.07, place.left + _SIZE + 0.07, top, place.closes)
        same = after is not None and (after.column.block, after.row) == (place.column.block, place.row)
        if not same or place.closes or (after is not None and after.opens):
            middle = (start.left + place.left + _SIZE) / 2
            axes.text(middle, top + 0.15, place.column.block, fontsize=6.4, ha="center", va="bottom", color="#555555")
            start = after if after is not None else start


def _bracket(axes: Axes, left: float, right: float, top: float, times: int) -> None:
    bottom = top - 2.27
    axes.fill_between([left, right], bottom, top + 0.29, color="#f6f3ea", lw=0, zorder=-2)
    axes.text(right - 0.02, top + 0.3, f"x{times}", fontsize=9, weight="bold", ha="right", va="bottom")


def _tile(axes: Axes, drawn: Drawing, tile: Tile, left: float, top: float, longest: float) -> None:
    vertical, horizontal = tile.shown if len(tile.shown) == 2 else (None, *tile.shown[:1]) if tile.shown else (None, None)
    height, width = _side(tile, vertical, longest), _side(tile, horizontal, longest)
    x, y = left + (_SIZE - width) / 2, top - _SIZE + (_SIZE - height) / 2
    down, across = _parts(drawn, tile.kept, vertical), _parts(drawn, tile.kept, horizontal)
    for i, a in enumerate(down):
        for j, b in enumerate(across):
            axes.fill(
                [x + width * (j + dx) / len(across) for dx in (0, 1, 1, 0)],
                [y + height * (1 - (i + dy) / len(down)) for dy in (0, 0, 1, 1)],
                color=_color(drawn, tile.kept, {**a, **b}),
                lw=0,
            )
    for j in range(1, len(across)):
        _cut(axes, _changes(across[j - 1], across[j]), width / len(across), [x + width * j / len(across)] * 2, [y, y + height])
    for i in range(1, len(down)):
        _cut(axes, _changes(down[i - 1], down[i]), height / len(down), [x, x + width], [y + height * (1 - i / len(down))] * 2)
    axes.plot([x, x + width, x + width, x, x], [y, y, y + height, y + height, y], color="#777777", lw=0.5)


def _cut(axes: Axes, axis: int, part: float, x: Sequence[float], y: Sequence[float]) -> None:
    """Draw the line between two parts ``part`` inches wide; it is thinner where parts are narrow."""
    color, width = _line(axis)
    axes.plot(x, y, color=color, lw=min(width, 0.2 * 72 * part), solid_capstyle="butt")


def _side(tile: Tile, dim: int | None, longest: float) -> float:
    """The side of a rectangle in inches: the logarithm of the dim, scaled."""
    return _SIZE * (_SHORTEST if dim is None else _SHORTEST + (1 - _SHORTEST) * math.log2(max(tile.shape[dim], 1)) / longest)


def _parts(drawn: Drawing, cuts: Cuts, dim: int | None) -> list[dict[int, int]]:
    """The parts along a dim, each as its index along every axis that cuts the dim; only slower axes where parts are many."""
    parts: list[dict[int, int]] = [{}]
    for axis in cuts[dim] if dim is not None else ():
        finer = [part | {axis: i} for part in parts for i in range(drawn.axes[axis][1])]
        if len(finer) > _MOST_PARTS:
            break
        parts = finer
    return parts


def _changes(a: dict[int, int], b: dict[int, int]) -> int:
    """The axis whose cut separates two adjacent parts: the major one of the axes that change."""
    return next(axis for axis in a if a[axis] != b[axis])


def _color(drawn: Drawing, cuts: Cuts, part: dict[int, int]) -> tuple[float, float, float]:
    """The colour of the first device that holds the part; the more devices hold it, the paler."""
    sizes = [size for _, size in drawn.axes]
    cutting = {axis for fs in cuts for axis in fs}
    first = sum(part.get(axis, 0) * math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    total = math.prod(sizes)
    share = math.log(math.prod(sizes[a] for a in cutting)) / math.log(total) if total > 1 else 0.0
    r, g, b = colorsys.hls_to_rgb(first / max(total, 1), 0.76, 0.62)
    return tuple(w + (c - w) * share for c, w in zip((r, g, b), _WHOLE, strict=True))  # type: ignore[return-value]


def _line(axis: int) -> tuple[str, float]:
    """The colour and width (points) of a cut over this axis; slower axes get thicker lines."""
    return _LINES[axis % len(_LINES)], _WIDTHS[min(axis, len(_WIDTHS) - 1)]


def _shape(drawn: Drawing, tile: Tile) -> str:
    """The dims as text, each with the number of parts that it is stored in."""
    parts = [math.prod(drawn.axes[axis][1] for axis in axes) for axes in tile.kept]
    return " x ".join(f"{n}/{k}" if k > 1 else f"{n}" for n, k in zip(tile.shape, parts, strict=True))
