"""The content of a drawing of a plan: the weight and the activation of each layer with their cuts, repeats folded.

As in Tofu's Figure 11, each column is an op of the forward pass that multiplies or looks up rows of a weight, in program order.
`shardplan.report.draw` renders it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardplan.graph import Node
from shardplan.graph.attention import weight_tensors
from shardplan.ir import Collective, Layout, Tensor, Use
from shardplan.schedule.planned import PlannedProgram

Cuts = tuple[tuple[int, ...], ...]
"""For each dim the axes that cut it, major first, as indices into `Drawing.axes`."""

_LONGEST_REPEAT = 128
"""The most columns that one repeat may have."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One tensor: its stored layout, the layout that the op reads, and the collectives in between.

    ``shown`` are the one or two dims that are drawn, vertical first.
    """

    kind: Literal["weight", "activation"]
    shape: tuple[int, ...]
    kept: Cuts
    read: Cuts
    moves: tuple[str, ...]
    shown: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """One op: the tensors that it reads, a weight first, and the collectives that bring its result into the stored layout.

    ``block`` and ``label`` are the last two words of the weight's path; without a weight, they are the last word of the op's
    scope, and QK, AV or the primitive. ``numbers`` are the numbers in that path or scope. ``trips`` is how often a loop around
    the op runs it.
    """

    block: str
    label: str
    numbers: tuple[int, ...]
    tiles: tuple[Tile, ...]
    gives: tuple[str, ...]
    trips: int = 1

    @property
    def looks(self) -> tuple[str, tuple[Tile, ...], tuple[str, ...]]:
        """How the column is drawn, without numbers in its name. Columns of equal looks may be folded."""
        return re.sub(r"\d+", "", f"{self.block}/{self.label}"), self.tiles, self.gives


@dataclass(frozen=True, slots=True)
class RepeatedColumns:
    """Columns that repeat ``times`` times, in a row or in a loop, each time with the same looks."""

    columns: tuple[Column, ...]
    times: int = 1


@dataclass(frozen=True, slots=True)
class Drawing:
    """A whole plan: ``axes`` are (name, size), slowest first."""

    axes: tuple[tuple[str, int], ...]
    runs: tuple[RepeatedColumns, ...]


def drawing(plan: PlannedProgram) -> Drawing:
    """The drawing of a plan."""
    graph = plan.graph
    origins = weight_tensors(graph, plan.free)
    products = plan.product_names
    columns = [c for node in graph.nodes if (c := _column(plan, node, origins, products.get(node.id))) is not None]
    return Drawing(tuple((f.name, f.size) for f in plan.factors), folded(columns))


# -- columns -----------------------------------------------------------------------------------------------------------


def _column(plan: PlannedProgram, node: Node, origins: Mapping[int, int], name: str | None) -> Column | None:
    """The column of an op; None if it is elementwise or backward, no product or lookup, or reads fewer than two tensors.

    ``name`` is the name of a product without a weight, if it has one.
    """
    use = plan.uses.get(node.id)
    description = node.signature.description
    if use is None or node.backward or node.signature.elementwise or description is None:
        return None
    slots = [i for i, t in enumerate(node.inputs) if t >= 0 and plan.layouts[t] is not None]
    weights = [i for i in slots if node.inputs[i] in origins]
    contracts = node.signature.contracts
    if len(slots) < 2 or not (contracts or (weights and node.inputs[weights[0]] != node.outputs[0])):
        return None
    weight = weights[-1] if weights else None
    if weight is None and not contracts:
        return None
    order = sorted(slots, key=lambda i: (i != weight, -i if weight is None else i))[:2]
    tiles = tuple(_tile(plan, node, use, i, origins if i == weight else {}) for i in order)
    path = node.op.scope if weight is None else plan.graph.input_paths[origins[node.inputs[weight]]]
    block, label = _names(path, None if weight is not None else name or node.op.primitive.replace("_general", ""))
    numbers = tuple(map(int, re.findall(r"\d+", path)))
    return Column(block, label, numbers, tiles, _gives(plan, node, use), max(1, round(node.weight)))


def _tile(plan: PlannedProgram, node: Node, use: Use, slot: int, origins: Mapping[int, int]) -> Tile:
    graph, t = plan.graph, node.inputs[slot]
    tensor, stored = graph.tensors[t], plan.layouts[t]
    assert stored is not None
    kept = _at_rest(plan, tensor, stored, origins.get(t))
    need = use.needs[slot] or stored
    kind = "weight" if t in origins else "activation"
    used = {d for d, (a, b) in enumerate(zip(kept.dims, need.dims, strict=True)) if a or b}
    return Tile(kind, tensor.shape, kept.dims, need.dims, _moves(plan, tensor, kept, need), _shown(tensor.shape, used, kind))


def _at_rest(plan: PlannedProgram, tensor: Tensor, stored: Layout, origin: int | None) -> Layout:
    """The weight's layout between steps, where the op reads a cast of it or a slice of a stack; else ``stored``."""
    if origin is None:
        return stored
    graph = plan.graph
    kept, shape = plan.layouts[graph.inputs[origin]], graph.tensors[graph.inputs[origin]].shape
    extra = len(shape) - len(tensor.shape)
    if kept is None or extra < 0 or shape[extra:] != tensor.shape or any(kept.dims[:extra]):
        return stored
    return Layout(kept.dims[extra:])


def _gives(plan: PlannedProgram, node: Node, use: Use) -> tuple[str, ...]:
    tensor = plan.graph.tensors[node.outputs[0]]
    stored = use.stored[0] or Layout.whole(len(tensor.shape))
    return _moves(plan, tensor, use.gives[0], stored)


def _moves(plan: PlannedProgram, tensor: Tensor, before: Layout, after: Layout) -> tuple[str, ...]:
    steps = plan.programs.between(tensor.shape, tensor.nbytes, before, after)
    return tuple(s.kind.short for s in steps if s.kind != Collective.SLICE)


def _shown(shape: tuple[int, ...], used: set[int], kind: str) -> tuple[int, ...]:
    """The two dims to draw: cut dims first, then an activation's first and last, then the largest."""
    last = len(shape) - 1

    def rank(d: int) -> tuple[bool, bool, int, int]:
        return d not in used, kind == "weight" or d not in (0, last), -shape[d], -d

    return tuple(sorted(sorted(range(len(shape)), key=rank)[:2]))


_NO_NAMES = frozenset({"params", "kernel", "weight", "w"})
"""Words of paths that do not tell weights apart."""


def _names(path: str, op: str | None) -> tuple[str, str]:
    """(block, label) from a path whose first word is the argument; with ``op``, the label is the op and the path its scope."""
    words = [w for w in path.split("/")[op is None :] if w not in _NO_NAMES and not w.isdigit() and not re.search(r"[(>]", w)]
    words = [w for w, _ in itertools.groupby(words)]
    label = op if op is not None else words.pop() if words else path
    return words[-1] if words else "", label


# -- repeats -----------------------------------------------------------------------------------------------------------


def folded(columns: Sequence[Column]) -> tuple[RepeatedColumns, ...]:
    """Columns with their repeats folded: first the repeat that saves most columns, then those to its left and right.

    Of equal savings, the columns with the fewest different numbers win, so that a run begins where a block does.

    >>> a, b = Column("", "a", (), (), ()), Column("", "b", (), (), ())
    >>> [(len(run.columns), run.times) for run in folded([a, b, a, b, a])]
    [(2, 2), (1, 1)]
    """
    ids: dict[object, int] = {}
    runs: list[RepeatedColumns] = []
    for trips, body in itertools.groupby(columns, key=lambda c: c.trips):
        inside = list(body)
        for run in _folded(inside, [ids.setdefault(c.looks, len(ids)) for c in inside]):
            runs.append(RepeatedColumns(run.columns, run.times * trips))
    return tuple(runs)


def _folded(columns: Sequence[Column], looks: Sequence[int]) -> list[RepeatedColumns]:
    best = _best_repeat(columns, looks)
    if best is None:
        return [RepeatedColumns(tuple(columns))] if columns else []
    start, period, times = best
    end = start + period * times
    left, right = _folded(columns[:start], looks[:start]), _folded(columns[end:], looks[end:])
    return [*left, RepeatedColumns(tuple(columns[start : start + period]), times), *right]


def _best_repeat(columns: Sequence[Column], looks: Sequence[int]) -> tuple[int, int, int] | None:
    """(start, columns of one repeat, times) of the repeat that saves most columns."""
    best: tuple[tuple[int, ...], tuple[int, int, int]] | None = None
    for period in range(1, min(_LONGEST_REPEAT, len(looks) // 2) + 1):
        run = 0
        for i in range(len(looks) - period - 1, -1, -1):
            run = run + 1 if looks[i] == looks[i + period] else 0  # columns from i on that equal those a period later
            times = run // period + 1
            if times > 1:
                numbers = len({c.numbers for c in columns[i : i + period]})
                key = ((times - 1) * period, -numbers, -period, -i)
                best = max(best, (key, (i, period, times))) if best is not None else (key, (i, period, times))
    return best[1] if best is not None else None
