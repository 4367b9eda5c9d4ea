"""The *windows* of collectives: the compute that each can hide behind (`shardplan.cost.overlap`).

A collective moves a value from the op that makes it to an op that reads it. It can run beside the ops that the maker does not
depend on and that do not depend on the reader. The gather of a weight waits for nothing, so it hides behind the compute before
its reader. The reduction of a gradient hides behind the rest of the backward pass. Activations lie on the critical path and have
almost no window.

Windows are computed before layouts are chosen, with each op's compute spread evenly over all devices. Inside a loop, a window is
the window of one iteration. Windows are rounded to a few sizes, so that equal ops with similar windows share tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shardplan.constants import CONSTANTS
from shardplan.cost.overlap import Concurrency, Window
from shardplan.graph.nodes import Graph, Link, Node
from shardplan.graph.readers import images, read_as_slices
from shardplan.ir import Where
from shardplan.mesh import Device
from shardplan.search.problem.compute_prices import least_compute_s

Region = tuple[int, ...]
"""The loops around an op: the ids of their ops, outermost first."""


class Read(NamedTuple):
    """How the readers of a moved tensor take it: ``sliced``, in place from a bundle's buffer; ``image``, as a convolution's."""

    sliced: bool = False
    image: bool = False


WHOLE = Read()
"""Its readers need it as a block of its own."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a graph in seconds of one device, rounded; infinite if only the compute of the whole step limits them.

    ``operands[n, slot]`` is the window for moving an operand of node n into the layout in which it is read. ``results[n, r]`` is
    the window for moving a result into its stored layout, ``links[source, target]`` the window of a link between two tensors.
    ``sliced`` are the tensors that all readers can take from a bundle's buffer as they lie, ``images`` those that convolutions
    read.
    """

    operands: Mapping[tuple[int, int], Window]
    results: Mapping[tuple[int, int], Window]
    links: Mapping[tuple[int, int], Window]
    sliced: frozenset[int] = frozenset()
    images: frozenset[int] = frozenset()

    def among(self, company: Mapping[str, float]) -> Windows:
        """The same windows where at most so many bytes of each pool travel together."""

        def of(windows: Mapping[tuple[int, int], Window]) -> dict[tuple[int, int], Window]:
            return {at: w._replace(company=min(w.company, company.get(w.pool, 0.0))) for at, w in windows.items()}

        return replace(self, operands=of(self.operands), results=of(self.results), links=of(self.links))

    def read(self, tensor: int) -> Read:
        """How a tensor is read once it has moved."""
        return Read(tensor in self.sliced, tensor in self.images)


NO_WINDOWS = Windows({}, {}, {})
"""No communication hides."""


def windows_of(graph: Graph, device: Device, devices: int) -> Windows:
    """The windows of a graph whose compute is spread evenly over ``devices`` devices."""
    finder = _Finder(graph, device, devices)
    operands: dict[tuple[int, int], Window] = {}
    results: dict[tuple[int, int], Window] = {}
    links: dict[tuple[int, int], Window] = {}
    for region in sorted(finder.nodes_of):
        finder.region(region, operands, results, links)
    return Windows(operands, results, links, read_as_slices(graph), images(graph))


class _Finder:
    """The regions of a graph (the step, and each loop's body) with their nodes and links."""

    def __init__(self, graph: Graph, device: Device, devices: int) -> None:
        self.graph = graph
        self.regions, self.tensor_region = _regions(graph)
        self.node_region = [self._region_of(node.where) for node in graph.nodes]
        self.seconds = [least_compute_s(node.costed, device, devices) for node in graph.nodes]
        self.step_s = sum(s * node.weight for s, node in zip(self.seconds, graph.nodes, strict=True))
        self.nodes_of: dict[Region, list[Node]] = {(): []}
        for node, region in zip(graph.nodes, self.node_region, strict=True):
            for depth in range(len(region) + 1):
                self.nodes_of.setdefault(region[:depth], []).append(node)
        self.links_into: dict[Region, list[int]] = {}
        for k, link in enumerate(graph.links):
            region = min(self.tensor_region[link.source], self.tensor_region[link.target], key=len)
            self.links_into.setdefault(region, []).append(k)

    def _region_of(self, where: Where) -> Region:
        while where and where not in self.regions:
            where = where[:-1]
        return self.regions[where] if where else ()

    def region(
        self,
        region: Region,
        operands: dict[tuple[int, int], Window],
        results: dict[tuple[int, int], Window],
        links: dict[tuple[int, int], Window],
    ) -> None:
        """Adds the windows of one region's ops and links. A loop inside it counts as one op."""
        chain = _Chain(self, region)
        for node in self.nodes_of[region]:
            if self.node_region[node.id] != region:
                continue
            item = chain.item(node)
            for slot, t in enumerate(node.inputs):
                if t >= 0:
                    operands[node.id, slot] = self.window(chain, chain.makers(t), [item])
            for r, t in enumerate(node.outputs):
                results[node.id, r] = self.window(chain, [item], chain.readers(t))
        for k in self.links_into.get(region, ()):
            link = self.graph.links[k]
            makers, readers = chain.makers(link.source), chain.readers(link.target)
            links[link.source, link.target] = self.window(chain, makers, readers)

    def window(self, chain: _Chain, makers: Sequence[int], readers: Sequence[int]) -> Window:
        """The window for moving a value from its makers to its readers, rounded."""
        seconds = self.rounded(chain.concurrency.window(makers, readers), chain.weight)
        return chain.with_company(seconds, makers, readers)

    def rounded(self, window_s: float, weight: float) -> float:
        """A window that a step has ``weight`` times, rounded: all of them together are a power of two times the step's compute.

        0 where they are less than ``least_window`` of it. Outside of loops, infinite from ``whole_window`` on.
        """
        part = window_s * weight / self.step_s if self.step_s else 0.0
        if part < CONSTANTS.least_window:
            return 0.0
        if part >= CONSTANTS.whole_window and weight == 1.0:
            return math.inf
        return self.step_s * 2.0 ** round(math.log2(part)) / weight


class _Chain:
    """The items of a region in program order, and which of them can run at once. An item is an op, or a loop as a whole."""

    def __init__(self, finder: _Finder, region: Region) -> None:
        self.finder, self.depth = finder, len(region)
        self._items: dict[object, int] = {}
        self._made: dict[int, list[int]] = {}
        self._read: dict[int, list[int]] = {}
        self._joined: dict[int, list[int]] = {}
        self._left: dict[int, list[int]] = {}
        work: list[float] = []
        heavy: list[bool] = []
        self._heavy = heavy
        waits_for: list[set[int]] = []
        weights = (n.weight for n in finder.nodes_of[region] if finder.node_region[n.id] == region)
        self.weight = next(weights, 1.0)  # how often a step runs the region
        for link in self._links(region):
            self._joined.setdefault(link.target, []).append(link.source)
            self._left.setdefault(link.source, []).append(link.target)
        for node in finder.nodes_of[region]:
            key = self._key(node)
            if key not in self._items:
                self._items[key] = len(work)
                work.append(0.0)
                heavy.append(node.signature.contracts or not isinstance(key, int))
                waits_for.append(set())
            at = self._items[key]
            work[at] += finder.seconds[node.id] * (node.weight / self.weight)
            for t in node.inputs:
                if t >= 0:
                    self._read.setdefault(t, []).append(at)
                    waits_for[at].update(j for j in self.makers(t) if j < at)
            for t in node.outputs:
                self._made.setdefault(t, []).append(at)
        self.concurrency = Concurrency([sorted(w) for w in waits_for], work, heavy)

    def with_company(self, seconds: float, makers: Sequence[int], readers: Sequence[int]) -> Window:
        """A window of so many seconds, with the bytes that can travel together; none in a loop, whose carries are not known
        here.
        """
        if not self.depth and not self.concurrency.heavy_before(makers):
            return Window(seconds, "early", self._early_bytes)
        if not self.depth and not self.concurrency.heavy_after(readers):
            return Window(seconds, "late", self._late_bytes)
        return Window(seconds)

    @cached_property
    def _early_bytes(self) -> float:
        """The bytes of the values that heavy items read and that wait for no heavy item."""
        return self._bytes(t for t, at in self._read.items() if self._any_heavy(at) and not self._heavy_before(t))

    @cached_property
    def _late_bytes(self) -> float:
        """The bytes of the values that heavy items make and that no heavy item waits for."""
        return self._bytes(t for t, at in self._made.items() if self._any_heavy(at) and not self._heavy_after(t))

    def _any_heavy(self, items: Sequence[int]) -> bool:
        return any(self._heavy[i] for i in items)

    def _heavy_before(self, t: int) -> bool:
        return self.concurrency.heavy_before(self.makers(t))

    def _heavy_after(self, t: int) -> bool:
        return self.concurrency.heavy_after(self.readers(t))

    def _bytes(self, tensors: Iterable[int]) -> float:
        return float(sum(self.finder.graph.tensors[t].nbytes for t in tensors))

    def _links(self, region: Region) -> Iterator[Link]:
        """The links between tensors of this region and of its loops, without those that carry values to a next iteration."""
        finder = self.finder
        for depth_region, numbers in finder.links_into.items():
            if depth_region[: self.depth] != region:
                continue
            for k in numbers:
                link = finder.graph.links[k]
                inside = finder.tensor_region[link.source]
                if not (link.target in finder.graph.boundary and finder.tensor_region[link.target] == inside and inside != ()):
                    yield link

    def _key(self, node: Node) -> object:
        inner = self.finder.node_region[node.id]
        return node.id if len(inner) == self.depth else ("loop", inner[: self.depth + 1])

    def item(self, node: Node) -> int:
        """The item of a node."""
        return self._items[self._key(node)]

    def makers(self, t: int) -> Sequence[int]:
        """The items that make a tensor; none for an argument, or a tensor that enters the region."""
        return self._reach(t, self._made, self._joined)

    def readers(self, t: int) -> Sequence[int]:
        """The items that read a tensor; none for a result, or a tensor that leaves the region."""
        return self._reach(t, self._read, self._left)

    @staticmethod
    def _reach(t: int, known: Mapping[int, Sequence[int]], further: Mapping[int, Sequence[int]]) -> Sequence[int]:
        if t not in further:
            return known.get(t, ())
        found, waiting, seen = list[int](), [t], {t}
        while waiting:
            at = waiting.pop()
            found += known.get(at, ())
            new = [u for u in further.get(at, ()) if u not in seen]
            seen.update(new)
            waiting += new
        return found


def _regions(graph: Graph) -> tuple[dict[Where, Region], list[Region]]:
    """(the region of each body, the region of each tensor); bodies that run once belong to the region around them."""
    regions: dict[Where, Region] = {(): ()}
    tensor_region: dict[int, Region] = dict.fromkeys(graph.bodies.get((), ()), ())
    loops: dict[tuple[Where, int], Region] = {}
    for where, tensors in graph.bodies.items():
        if not where:
            continue
        outside = regions[where[:-1]]
        loop = where[:-1], where[-1][0]
        new = [t for t in tensors if t not in tensor_region]
        if loop not in loops and any(t in graph.boundary for t in new):
            loops[loop] = (*outside, len(loops))
        regions[where] = loops.get(loop, outside)
        tensor_region.update(dict.fromkeys(new, regions[where]))
    return regions, [tensor_region[t] for t in range(len(graph.tensors))]
