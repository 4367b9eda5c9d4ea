"""The collectives of a plan for the HTML page, with one row for those of equal layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shardplan.collectives.issued import PlannedCollective
from shardplan.report.paths import grouped

_ARRAYS = 24
"""The most arrays that are named in a row."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Collectives of one kind, size and source line that move arrays whose names differ only in numbers.

    ``times`` counts all their runs in a step; ``wire_bytes``, ``seconds`` and ``exposed_s`` are totals. ``arrays`` are the
    names of the arrays that they move, with one pattern for names that differ in numbers; empty for values without a name.
    """

    kind: str
    axes: tuple[str, ...]
    program: str
    source: str
    nbytes: float
    times: float
    wire_bytes: float
    seconds: float
    exposed_s: float
    arrays: tuple[str, ...]


@dataclass(slots=True)
class _Row:
    first: PlannedCollective
    times: float = 0.0
    wire_bytes: float = 0.0
    seconds: float = 0.0
    exposed_s: float = 0.0
    arrays: dict[str, None] = field(default_factory=dict[str, None])

    def add(self, c: PlannedCollective) -> None:
        self.times += c.times
        self.wire_bytes += c.wire_bytes * c.times
        self.seconds += c.seconds * c.times
        self.exposed_s += (c.seconds - c.hideable_s) * c.times
        self.arrays |= dict.fromkeys(_names(c))


def folded_collectives(collectives: Iterable[PlannedCollective]) -> tuple[CollectiveRow, ...]:
    """The rows, slowest first. Their figures add up to the plan's."""
    rows: dict[object, _Row] = {}
    for c in collectives:
        key = c.kind, c.axes, c.program, c.source, c.bytes, _folded(c.arrays)
        rows.setdefault(key, _Row(c)).add(c)
    ordered = sorted(rows.values(), key=lambda r: (-r.seconds, r.first.kind.value, r.first.source, r.first.tensor))
    return tuple(map(_finished, ordered))


def _finished(row: _Row) -> CollectiveRow:
    names = tuple(group.pattern for group in grouped(row.arrays))
    more = (f"and {len(names) - _ARRAYS} more",) if len(names) > _ARRAYS else ()
    one = row.first
    return CollectiveRow(
        kind=one.kind.value,
        axes=one.axes,
        program=one.program,
        source=one.source,
        nbytes=one.bytes,
        times=row.times,
        wire_bytes=row.wire_bytes,
        seconds=row.seconds,
        exposed_s=row.exposed_s,
        arrays=(*names[:_ARRAYS], *more),
    )


def _names(c: PlannedCollective) -> Iterator[str]:
    """The names of the arrays that move; a value between ops has none."""
    return (name for name in (c.tensor, *c.along) if not name.startswith("value "))


def _folded(name: str) -> str:
    """A name with ``*`` for each number that stands alone in its path.

    >>> _folded("gradient of state/0/blocks/11/mlp/up/kernel")
    'gradient of state/*/blocks/*/mlp/up/kernel'
    """
    return re.sub(r"(?<=/)\d+(?=/|$)", "*", re.sub(r"^value \d+", "value", name))
