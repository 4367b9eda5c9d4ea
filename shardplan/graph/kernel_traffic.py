"""The memory traffic that each op of a step adds to the kernels that XLA compiles for GPUs.

A kernel reads each stored value once, however many of its ops use it, and writes what a later kernel reads. Which ops share a
kernel follows XLA's rules (as jaxlib 0.10.2 and 0.12.0.1 compile for H100s: docs/accuracy.md, Compute), in this order:

1. An elementwise op (or any other whose elements are computed one by one) is part of its readers' kernels. Where it has several,
   it is computed in each, unless they would read more than it costs to store it. Products, library calls and control flow read
   stored values alone. But a matrix product widens its operands and narrows its result itself.
2. A reduction along rows, its operands and what is computed from rows and their results are one kernel: a softmax, a
   normalisation. It reads its operands twice where such a sum is stored too, or where two sums do not depend on each other. Rows
   longer than ``longest_row`` are reduced like columns: the readers of their sums are in another kernel.
3. Kernels that run over the same elements are one where one reads what the other stores, or both read the same value
   (multi-output fusion), unless a third lies between them. Reductions along rows and along columns are never in one kernel.

A transpose ends a kernel, and so do reductions and updates in place. Reductions of more than ``longest_row`` or
``longest_column`` elements to one take a second kernel. Elements are counted before the op is cut.

A library that runs ops as they are called, such as PyTorch without compilation, has kernels for its own functions and no others.
Ops of two calls then never share a kernel. Slices and broadcasts are views, and a product adds its own call's bias.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from shardplan.constants import CONSTANTS
from shardplan.graph.nodes import Graph, Node, Signature, Traffic
from shardplan.graph.values import BufferUses
from shardplan.tdl.index import loops_of

_Order = Literal["", "row", "column"]
_Of = Callable[[int], int]
"""Gives the kernel into which a kernel has been merged, by their numbers."""


def with_traffic(graph: Graph, *, call_of: Callable[[Node], Hashable] | None = None) -> Graph:
    """The graph with the traffic of each node in its costed signature; equal ops with equal traffic share one.

    ``call_of`` names the call of a library that runs calls one by one; without it, all ops are compiled together.
    """
    known: dict[tuple[int, Traffic], Signature] = {}
    first = 1 + max((node.signature.id for node in graph.nodes), default=0)

    def costed(node: Node, own: Traffic) -> Signature:
        key = node.signature.id, own
        if key not in known:
            known[key] = node.signature.with_traffic(first + len(known), own)
        return known[key]

    rows = zip(graph.nodes, _Model(graph, call_of).traffic(), strict=True)
    return replace(graph, nodes=tuple(replace(node, costed=costed(node, own)) for node, own in rows))


@dataclass(slots=True)
class _Kernel:
    """A kernel while it grows.

    It has its nodes, ending with ``last``; the values that it reads, each with (node, slot, bytes); those that it stores; the
    number of elements that it runs over; and the order of its reductions. A ``closed`` one takes no others in.
    """

    nodes: set[int]
    last: int
    reads: dict[int, tuple[int, int, int]]
    stores: set[int] = field(default_factory=set[int])
    size: int = 0
    order: _Order = ""
    closed: bool = False


class _Model:
    """The kernels of one graph."""

    def __init__(self, graph: Graph, call_of: Callable[[Node], Hashable] | None = None) -> None:
        self.graph = graph
        self.call_of = call_of
        self.calls = [None if call_of is None else call_of(node) for node in graph.nodes]
        self.values = BufferUses(graph, None if call_of is None else self.calls)
        self.kernels: dict[int, _Kernel] = {}  # by their last node
        self.within: dict[int, set[int]] = {}  # by node: the kernels that compute it
        self.behind = self.values.bytes_behind()  # by buffer: the bytes from which a kernel can compute it

    def traffic(self) -> tuple[Traffic, ...]:
        """The traffic of each node."""
        for node in reversed(self.graph.nodes):
            if node.id not in self.values.renamed:
                self._place(node)
        parts = self._merged()
        return self._charged(parts)

    # -- 1. what is computed where it is read ---------------------------------------------------------------------------

    def _place(self, node: Node) -> None:
        """Makes a node part of its readers' kernels, or gives it one of its own."""
        homes = self._homes(node)
        if homes is None:
            self.kernels[node.id] = _Kernel({node.id}, node.id, {}, set(node.outputs), *self._extent(node))
            homes = {node.id}
        self.within[node.id] = homes
        for home in homes:
            kernel = self.kernels[home]
            kernel.nodes.add(node.id)
            for t in node.outputs:
                kernel.reads.pop(t, None)
            for slot, t, nbytes in self._operands(node):
                before = kernel.reads.get(t)
                if before is None or before[2] < nbytes:
                    kernel.reads[t] = node.id, slot, nbytes

    def _homes(self, node: Node) -> set[int] | None:
        """The kernels that compute a node for themselves; None where it is stored."""
        if node.signature.part != "loop" or any(t in self.values.kept for t in node.outputs):
            return None
        readers = [r for t in node.outputs for r in self.values.readers.get(t, ())]
        if not readers:
            return set()
        if any(r.signature.part in ("product", "copy", "alone") or r.weight != node.weight for r in readers):
            return None
        if any(self.calls[r.id] != self.calls[node.id] for r in readers) and any(t >= 0 for t in node.inputs):
            return None
        homes = set[int]().union(*(self.within[r.id] for r in readers))
        if len(homes) <= 1:
            return homes
        size = sum(self.graph.tensors[t].nbytes for t in node.outputs)
        operands = [(t, min(nbytes, self.behind.get(t, nbytes))) for _, t, nbytes in self._operands(node)]
        repeated_bytes = sum(nbytes for home in homes for t, nbytes in operands if t not in self.kernels[home].reads)
        return homes if repeated_bytes <= sum(nbytes for _, nbytes in operands) + size * (1 + len(homes)) else None

    def _operands(self, node: Node) -> Iterator[tuple[int, int, int]]:
        """(slot, buffer, bytes) of what a node reads."""
        whole = {t: self.values.shown.get(t, self.graph.tensors[t].nbytes) for t in node.inputs if t >= 0}
        made = sum(self.graph.tensors[t].nbytes for t in node.outputs)
        for slot, t in enumerate(node.inputs):
            if t < 0:
                continue
            if node.signature.part == "update" and slot == 0:
                if node.signature.combines:
                    yield 0, self.values.name[t], round(whole[t] * _updated(node))
                continue
            yield slot, self.values.name[t], min(whole[t], made) if slot == 0 and node.signature.slices else whole[t]

    def _extent(self, node: Node) -> tuple[int, _Order, bool]:
        """The element count, reduction order and closedness of the kernel that ends at this node."""
        call = node.signature.call
        match node.signature.part:
            case "reduction":
                size = math.prod(call.operands[0]) if call.operands else 1
                return size, _order(node), False
            case "loop":
                return max((math.prod(shape) for shape in call.results), default=1), "", False
            case _:
                return max((math.prod(shape) for shape in call.results), default=1), "", True

    # -- 2 and 3. kernels over the same elements ------------------------------------------------------------------------

    def _merged(self) -> dict[int, int]:
        """The kernel that each kernel has been joined to."""
        into = {k: k for k in self.kernels}

        def of(k: int) -> int:
            while into[k] != k:
                k = into[k]
            return k

        touched: dict[int, list[int]] = {}
        for k in sorted(self.kernels):
            for t in (*self.kernels[k].stores, *self.kernels[k].reads):
                touched.setdefault(t, []).append(k)
        for t in sorted(touched):
            maker = self.values.maker.get(t)
            n = self.graph.tensors[t].size
            if maker is not None and maker.id in self.kernels and self.kernels[maker.id].order == "row":
                n = self.kernels[maker.id].size
            if n <= 1:
                continue
            alike = [k for k in touched[t] if self.kernels[k].size == n and not self.kernels[k].closed]
            for a, b in itertools.combinations(alike, 2):
                one, other = of(a), of(b)
                if one != other and self._may_join(one, other, of):
                    self._join(one, other, into)
        return {k: of(k) for k in self.kernels}

    def _may_join(self, a: int, b: int, of: _Of) -> bool:
        """Whether two kernels over the same elements may become one (rule 3)."""
        one, other = self.kernels[a], self.kernels[b]
        if one.size != other.size or {one.order, other.order} == {"row", "column"}:
            return False
        if self.calls[one.last] != self.calls[other.last]:
            return False
        first, last = self.graph.nodes[one.last], self.graph.nodes[other.last]
        if first.weight != last.weight or self._waits(one, other) or self._waits(other, one):
            return False
        return not self._between(a, b, of) and not self._between(b, a, of)

    def _waits(self, one: _Kernel, other: _Kernel) -> bool:
        """Whether one reads sums over the other that are complete only when it has ended: any but those along its rows."""
        makers = (self.values.maker[t] for t in other.stores if t in one.reads)
        return any(maker.signature.part == "reduction" and _order(maker) != "row" for maker in makers)

    def _between(self, a: int, b: int, of: _Of) -> bool:
        """Whether a third kernel reads what ``a`` stores, and makes what ``b`` reads, directly or not."""
        end = max(self.kernels[b].nodes)
        waiting = [k for k in self._after(a, of) if k != b]
        seen = set(waiting)
        while waiting:
            k = waiting.pop()
            for after in self._after(k, of):
                if after == b:
                    return True
                if after not in seen and min(self.kernels[after].nodes) <= end:
                    if len(seen) == CONSTANTS.farthest_kernel:
                        return True
                    seen.add(after)
                    waiting.append(after)
        return False

    def _after(self, k: int, of: _Of) -> Iterator[int]:
        """The kernels that read what a kernel stores."""
        for t in self.kernels[k].stores:
            for reader in self.values.readers.get(t, ()):
                for home in self.within.get(reader.id, ()):
                    found = of(home)
                    if found != k and t in self.kernels[found].reads:
                        yield found

    def _join(self, a: int, b: int, into: dict[int, int]) -> None:
        """Merges ``b`` into ``a``. If both read a value, the larger read is kept. A value that either stores is not read."""
        one, other = self.kernels[a], self.kernels[b]
        into[b] = a
        stores = one.stores | other.stores
        for t, read in other.reads.items():
            before = one.reads.get(t)
            if before is None or before[2] < read[2]:
                one.reads[t] = read
        one.reads = {t: read for t, read in one.reads.items() if t not in stores}
        one.nodes |= other.nodes
        one.stores, one.order, one.last = stores, one.order or other.order, max(one.last, other.last)

    # -- what the kernels move ------------------------------------------------------------------------------------------------

    def _charged(self, parts: Mapping[int, int]) -> tuple[Traffic, ...]:
        """The traffic of each node: a kernel's reads, writes and launches are charged to its own nodes."""
        graph = self.graph
        reads = [[0.0] * len(node.inputs) for node in graph.nodes]
        writes = [[0.0] * len(node.outputs) for node in graph.nodes]
        launches = [0.0] * len(graph.nodes)
        kernels = [self.kernels[k] for k in sorted(set(parts.values()))]
        needed = self.values.kept.union(*(kernel.reads for kernel in kernels))
        for kernel in kernels:
            stored = [t for t in kernel.stores if t in needed]
            if not stored and graph.nodes[kernel.last].signature.part in ("loop", "reduction", "transpose"):
                continue  # nothing reads it
            if graph.nodes[kernel.last].signature.part == "copy":
                continue  # its seconds are those of the host's link
            passes = self._passes(kernel, stored)
            launches[kernel.last] += passes
            for t in stored if self.call_of is None else ():
                launches[kernel.last] += _splits(self.values.maker[t])
            for n, slot, nbytes in kernel.reads.values():
                reads[n][slot] += passes * nbytes / max(1, graph.tensors[graph.nodes[n].inputs[slot]].nbytes)
            for t in stored:
                maker = self.values.maker[t]
                writes[maker.id][maker.outputs.index(t)] += _updated(maker) * self.values.narrowed.get(t, 1.0)
        self._charge_stacks(reads, writes, launches)
        self._charge_counters(launches)
        for node in graph.nodes:  # a filter is copied to the library's order, unless the kernel that makes it writes it so
            if node.signature.filter == "result":
                writes[node.id][0] += 2
                launches[node.id] += 1
            elif node.signature.filter and node.inputs[1] >= 0 and self.values.name[node.inputs[1]] not in self.values.maker:
                reads[node.id][1] += 2
                launches[node.id] += 1
        return tuple(Traffic(tuple(r), tuple(w), n) for r, w, n in zip(reads, writes, launches, strict=True))

    def _passes(self, kernel: _Kernel, stored: Sequence[int]) -> int:
        """How often a kernel reads its operands: twice where it stores both elements that depend on sums along its rows and such
        a sum, or where two such sums do not depend on each other; once otherwise (XLA's kernels of rows have one result and a
        chain of sums).
        """
        if kernel.order != "row" or self.call_of is not None:
            return 1
        behind: set[int] = set()  # what depends on a sum
        siblings = False
        sums: set[int] = set()
        for n in sorted(kernel.nodes):
            node = self.graph.nodes[n]
            after = any(t >= 0 and self.values.name[t] in behind for t in node.inputs)
            if node.signature.part == "reduction":
                siblings |= bool(sums) and not after
                sums.update(node.outputs)
                behind.update(node.outputs)
            elif after:
                behind.update(node.outputs)
        ends = [t for t in stored if t in behind and t not in sums]
        return 2 if ends and (siblings or sums.intersection(stored)) else 1

    def _charge_stacks(self, reads: list[list[float]], writes: list[list[float]], launches: list[float]) -> None:
        """Charges what loops move in addition to their ops.

        Stacks are filled with zeros first. A kernel of its own copies a value to its stack if the loop also reads it, or if no
        elementwise op makes it. Slices that products read are copied.
        """
        for t in sorted(self.values.stacked):
            maker, readers = self.values.maker.get(t), self.values.readers.get(t, [])
            if self.graph.tensors[t].hosted:
                continue
            if maker is not None:
                copies = bool(readers) or maker.signature.part not in ("loop", "transpose")
                writes[maker.id][maker.outputs.index(t)] += (1 + 2 * copies) * self.values.narrowed.get(t, 1.0)
                launches[maker.id] += copies
            elif readers:
                slot = self.values.slot(readers[0], t)
                reads[readers[0].id][slot] += 3 * self.values.shown_part(readers[0].inputs[slot])
                launches[readers[0].id] += 1
        for t in sorted({self.values.name[k.target] for k in self.graph.links if k.lift > 0}):
            product = next((r for r in self.values.readers.get(t, ()) if r.signature.part == "product"), None)
            if product is not None:
                slot = self.values.slot(product, t)
                reads[product.id][slot] += 2 * self.values.shown_part(product.inputs[slot])
                launches[product.id] += 1

    def _charge_counters(self, launches: list[float]) -> None:
        """Each iteration of a scan counts itself, in a kernel of its own."""
        graph = self.graph
        passed = {k.source if k.lift < 0 else k.target for k in graph.links if k.lift} | {*graph.carries}
        bodies = {where for where, tensors in graph.bodies.items() if not passed.isdisjoint(tensors)}
        last = {node.where: node.id for node in graph.nodes if node.where in bodies and launches[node.id]}
        for n in last.values():
            launches[n] += 1


def _updated(node: Node) -> float:
    """The part of its result that a node writes."""
    call, slot = node.signature.call, node.signature.update
    return 1.0 if slot is None else min(1.0, math.prod(call.operands[slot]) / max(1, math.prod(call.results[0])))


def _order(node: Node) -> _Order:
    """Whether a reduction runs along rows of its first operand, short enough for one kernel to hold, or along other dims."""
    along_rows, count = _reduced(node)
    whole = math.prod(node.signature.call.results[0]) == 1
    return "row" if along_rows and count <= CONSTANTS.longest_row and not whole else "column"


def _splits(node: Node) -> bool:
    """Whether a reduction takes a second kernel, which adds up the parts of the first."""
    if node.signature.part != "reduction":
        return False
    along_rows, count = _reduced(node)
    return count > (CONSTANTS.longest_row if along_rows else CONSTANTS.longest_column)


def _reduced(node: Node) -> tuple[bool, int]:
    """Whether a reduction runs along rows (the last dims of its first operand, or all), and the element count of one sum."""
    description = node.signature.description
    assert description is not None
    for operand, indices in description.accesses:
        if operand == 0:
            summed = [any(description.loops[v].reducer is not None for v in loops_of(ix)) for ix in indices]
            shape = node.signature.call.operands[0]
            dims = [reduced for reduced, n in zip(summed, shape, strict=True) if n > 1]
            count = math.prod(n for reduced, n in zip(summed, shape, strict=True) if reduced)
            return dims == sorted(dims), count
    return False, 1
