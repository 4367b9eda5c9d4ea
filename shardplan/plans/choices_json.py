"""The choices of a plan as JSON values, by the path of each body and the numbers of its tensors and ops.

Each layout and each use is written once, in a table, because many tensors and ops share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.ir import PAIRS, BodyChoices, Choices, Copy, Layout, Reducer, Use, Where

_REDUCERS: tuple[Reducer, ...] = ("sum", "prod", "max", "min", "and", "or", *PAIRS)


@dataclass(frozen=True, slots=True)
class Layouts:
    """A table of layouts: ``rows`` holds them, ``numbers`` gives the row of each layout while a plan is written."""

    rows: list[Layout]
    numbers: dict[Layout, int]

    @classmethod
    def empty(cls) -> Layouts:
        """An empty table, to write to."""
        return cls([], {})

    @classmethod
    def parsed(cls, rows: Iterable[Any], factors: int) -> Layouts:
        """The table of a file.

        Raises:
            ValueError: for a layout that uses a factor that does not exist, or a factor twice.
        """
        result = [_layout(row, factors) for row in rows]
        return cls(result, {})

    @property
    def json(self) -> list[Any]:
        """The table as JSON values."""
        return [[[list(dim) for dim in x.dims], list(x.partial), x.reducer] for x in self.rows]

    def number(self, layout: Layout | None) -> int | None:
        """The row of a layout; a new layout is appended."""
        if layout is None:
            return None
        if layout not in self.numbers:
            self.numbers[layout] = len(self.rows)
            self.rows.append(layout)
        return self.numbers[layout]

    def of(self, number: Any) -> Layout | None:
        """The layout in a row."""
        if number is None:
            return None
        if type(number) is not int or not 0 <= number < len(self.rows):
            raise ValueError(f"no layout {number!r}: the file has {len(self.rows)}")
        return self.rows[number]

    def some(self, number: Any) -> Layout:
        """The layout in a row; the row must not be None."""
        result = self.of(number)
        if result is None:
            raise ValueError("a layout is missing")
        return result


def choices_json(choices: Choices, layouts: Layouts) -> dict[str, Any]:
    """The choices as JSON values; their layouts are added to the table."""
    uses: dict[Use, int] = {}
    bodies = [
        {
            "where": [list(step) for step in where],
            "layouts": [layouts.number(layout) for layout in body.layouts],
            "uses": [[op, uses.setdefault(use, len(uses))] for op, use in sorted(body.uses.items())],
            "reads": [[op, slot, copy] for (op, slot), copy in sorted(body.reads.items())],
        }
        for where, body in sorted(choices.bodies.items())
    ]
    return {
        "bodies": bodies,
        "uses": [
            {
                "loops": list(use.loops),
                "needs": [layouts.number(x) for x in use.needs],
                "gives": [layouts.number(x) for x in use.gives],
                "stored": [layouts.number(x) for x in use.stored],
                "compute_s": use.compute_s,
            }
            for use in uses
        ],
        "copies": [[layouts.number(c.layout), c.source, c.backward] for c in choices.copies],
    }


def choices_from(content: Mapping[str, Any], layouts: Layouts, factors: int) -> Choices:
    """The choices of a file.

    Raises:
        ValueError: for a number that is in no table.
    """
    uses = [_use(row, layouts, factors) for row in content["uses"]]
    copies = tuple(_copy(row, layouts, len(content["copies"])) for row in content["copies"])
    bodies: dict[Where, BodyChoices] = {}
    for row in content["bodies"]:
        where = tuple((int(op), int(body)) for op, body in row["where"])
        bodies[where] = BodyChoices(
            tuple(layouts.of(n) for n in row["layouts"]),
            {int(op): uses[_row(n, len(uses), "use")] for op, n in row["uses"]},
            {(int(op), int(slot)): _row(n, len(copies), "copy") for op, slot, n in row["reads"]},
        )
    return Choices(bodies, copies)


def _row(number: Any, count: int, what: str) -> int:
    if type(number) is not int or not 0 <= number < count:
        raise ValueError(f"no {what} {number!r}: the file has {count}")
    return number


def _layout(row: Any, factors: int) -> Layout:
    dims, partial, reducer = row
    layout = Layout(tuple(tuple(int(f) for f in dim) for dim in dims), tuple(int(f) for f in partial), _reducer(reducer))
    used = [*(f for dim in layout.dims for f in dim), *layout.partial]
    if len(set(used)) < len(used) or not set(used) <= set(range(factors)):
        raise ValueError(f"a layout uses the factors {used}: each must be below {factors} and occur once")
    return layout


def _reducer(text: Any) -> Reducer:
    for known in _REDUCERS:
        if text == known:
            return known
    raise ValueError(f"unsupported reducer={text!r}")


def _use(row: Mapping[str, Any], layouts: Layouts, factors: int) -> Use:
    loops = tuple(int(loop) for loop in row["loops"])
    if len(loops) != factors:
        raise ValueError(f"a use cuts loops for {len(loops)} factors, the plan has {factors}")
    return Use(
        loops,
        tuple(layouts.of(n) for n in row["needs"]),
        tuple(layouts.some(n) for n in row["gives"]),
        tuple(layouts.of(n) for n in row["stored"]),
        float(row["compute_s"]),
    )


def _copy(row: Sequence[Any], layouts: Layouts, count: int) -> Copy:
    number, source, backward = row
    if not isinstance(backward, bool):
        raise ValueError(f"backward={backward!r} of a copy is neither true nor false")
    return Copy(layouts.some(number), None if source is None else _row(source, count, "copy"), backward)
