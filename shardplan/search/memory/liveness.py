"""Peak memory of one device by liveness, and the prices that push a plan under a limit.

Each tensor that is stored in memory lives from the op that makes it to its last reader; resharded copies are values with
lifetimes of their own, and a weight's forward copy that the backward pass reads too lives in between. Elementwise results that
only elementwise ops read are fused away: those that the same pass reads, and those light enough to be computed again where the
other pass reads them, from values that are kept as well. What an op holds while it runs is in `buffers`. A donated
input's buffer becomes the output that replaces it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.graph.flattening import Graph
from shardplan.graph.loops import Loops, loops_of
from shardplan.search.coarsening.coarsen import FREE
from shardplan.search.memory.buffers import Buffers
from shardplan.search.problem.pricing import Domain, Limits
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.tables import Term, picoseconds
from shardplan.tdl import light

SLACK = 0.01
"""Of a byte: sums of parts of tensors are that exact."""

Assignment = Sequence[int]
"""For each variable its state."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """What lives when: parallel arrays over stored values (variable -1: whole on every device), in positions of the flat graph.

    ``copies`` lists (view, bytes, birth, death) of resharded copies, ``kept`` (backward view, bytes, birth, death) of forward
    copies that are kept, ``entering`` what enters a loop in another layout: that copy lives as long as the loop, and up to the
    next loop that reads it in the same one (``between``), for XLA makes equal copies once.
    """

    nbytes: NDArray[np.float64]
    variable: NDArray[np.int64]
    birth: NDArray[np.int64]
    death: NDArray[np.int64]
    copies: tuple[tuple[int, float, int, int], ...]
    kept: tuple[tuple[int, float, int, int], ...]
    entering: tuple[Entering, ...]
    between: tuple[tuple[Entering, Entering], ...]
    buffers: Buffers
    length: int

    def stored_at(self, point: int, variables: int) -> NDArray[np.float64]:
        """[variables + 1]: whole bytes of each variable's values that are stored at a point; last, what has no variable."""
        at = (self.birth <= point) & (self.death >= point)
        held = np.zeros(variables + 1)
        np.add.at(held, self.variable[at], self.nbytes[at])
        return held


@dataclass(frozen=True, slots=True)
class Entering:
    """A value that a loop reads, ``nbytes`` of it whole: variable ``outer`` before the loop, ``inner`` in its body.

    ``stacked``: the loop takes it slice by slice, so that ``inner`` has a dim less. It is resharded before the loop, if at all.
    """

    outer: int
    inner: int
    stacked: bool
    nbytes: float
    birth: int
    death: int

    def moved(self, problem: Problem, outer: Domain, inner: Domain) -> NDArray[np.bool_]:
        """[outer, inner]: whether the layouts differ."""
        shapes = [problem.coarse.variables[v].shape for v in (self.inner, self.outer)]
        lifted = problem.lifted(inner, *shapes) if self.stacked else inner
        return np.not_equal.outer(np.array(outer), np.array(lifted))


def liveness(problem: Problem, donated: frozenset[int] = frozenset()) -> Liveness:
    """Lifetimes of a problem's values; ``donated`` are the positions of donated inputs."""
    graph, coarse = problem.graph, problem.coarse
    end = len(graph.nodes)
    birth: dict[int, int] = {}
    death: dict[int, int] = {}
    for node in graph.nodes:
        for t in node.outputs:
            birth.setdefault(t, node.id)
        for t in node.inputs:
            if t >= 0:
                death[t] = node.id
                if t in graph.boundary:
                    birth.setdefault(t, node.id)
    loops = loops_of(graph)
    _through_links(graph, loops, birth, death)
    replaced = {i: o for o, i in zip(graph.outputs, graph.feedback, strict=True) if i is not None}
    alias: set[int] = set()
    for i, t in enumerate(graph.inputs):
        birth[t] = 0
        if i not in donated or i in replaced:
            death[t] = end
        if i in donated and i in replaced and replaced[i] != t:
            alias.add(replaced[i])
    for t in graph.outputs:
        if t >= 0:
            death[t] = end
    fused = _fused(problem, death)
    rows = [
        (graph.tensors[t].nbytes, coarse.of[t], b, death.get(t, b), t)
        for t, b in sorted(birth.items())
        if t not in alias and t not in fused and (coarse.of[t] != FREE or t in set(graph.inputs))
    ]
    copies, kept = _copies(problem)
    stacks, entering, constant = _around_loops(problem, loops)
    rows = [row for row in rows if row[4] not in constant] + stacks
    columns = list(zip(*rows, strict=True)) or [(), (), (), (), ()]
    return Liveness(
        np.array(columns[0], float),
        np.array(columns[1], np.int64),
        np.array(columns[2], np.int64),
        np.array(columns[3], np.int64),
        copies,
        kept,
        tuple(e for row in entering.values() for e in row),
        tuple(pair for row in entering.values() for pair in itertools.pairwise(sorted(row, key=lambda e: e.birth))),
        Buffers(problem, frozenset(alias)),
        end + 1,
    )


def _through_links(graph: Graph, loops: Loops, birth: dict[int, int], death: dict[int, int]) -> None:
    """What a loop reads lives as long as it runs; what it carries is replaced in place; its results are there when it ends."""
    for link in graph.links:
        left = loops.left(link)
        if link.source in birth and link.target not in graph.boundary:
            birth.setdefault(link.target, birth[link.source] if left is None else left.last + 1)
    for link in reversed(graph.links):
        if link.target in graph.boundary:
            loop = loops.of[link.target]
            if loops.of.get(link.source) is loop:  # the carry of the next iteration
                death[link.source] = max(death.get(link.source, 0), loop.last)
            elif link.target in death:
                until = death[link.target] if link.target in loops.carries else loop.last
                death[link.source] = max(death.get(link.source, 0), until)
        elif link.target in death and loops.left(link) is None:
            death[link.source] = max(death.get(link.source, 0), birth.get(link.target, 0))


def _fused(problem: Problem, death: dict[int, int]) -> frozenset[int]:
    """The values that are never stored; what they are made of lives until they are read, which ``death`` is changed to say."""
    graph, of = problem.graph, problem.coarse.of
    readers = _readers(graph)
    ends = {*graph.outputs, *graph.inputs} | {t for link in graph.links for t in (link.source, link.target)}
    every = {n.signature.id: n.signature.description for n in graph.nodes}
    again = {s: description is not None and light(description) for s, description in every.items()}
    summed = _summed(graph, readers)
    fused: set[int] = set()
    for node in reversed(graph.nodes):
        alive = [t for t in dict.fromkeys(node.inputs) if t >= 0 and of[t] != FREE]
        cheap = again[node.signature.id]
        spread = cheap and all(graph.tensors[o].size > sum(graph.tensors[t].size for t in alive) for o in node.outputs)
        if not (node.signature.elementwise or spread):
            continue
        for t in node.outputs:
            using = [graph.nodes[r] for r in readers.get(t, ())]
            if t in ends or t in summed or not all(u.signature.elementwise or _reduces(u.signature.call) for u in using):
                continue
            last = death.get(t, node.id)
            same = all(u.backward == node.backward for u in using)
            # a heavy one is computed once; a light one again in the other pass, if what it is made of is there anyway
            if (same and (cheap or len(using) <= 1)) or (cheap and all(death.get(u, 0) >= last for u in alive)):
                fused.add(t)
                death.update({u: max(death.get(u, 0), last) for u in alive})
    return frozenset(fused)


def _summed(graph: Graph, readers: Mapping[int, Sequence[int]]) -> set[int]:
    """Sums of contractions' results alone (also transposed), each read once: the terms of a gradient.

    A product is added in place to what was summed before (a GEMM's beta), so that the terms do not wait for each other.
    """
    terms: set[int] = set()
    found: set[int] = set()
    for node in graph.nodes:
        added = node.signature.adds and terms.issuperset(node.inputs)
        if added or node.signature.contracts or (node.signature.moves and node.inputs[0] in terms):
            terms.update(t for t in node.outputs if len(readers.get(t, ())) == 1)
        if added:
            found.update(node.outputs)
    return found


def _readers(graph: Graph) -> dict[int, list[int]]:
    readers: dict[int, list[int]] = {}
    for node in graph.nodes:
        for t in node.inputs:
            if t >= 0:
                readers.setdefault(t, []).append(node.id)
    return readers


def _reduces(call: object) -> bool:
    from shardplan.tdl import Call

    assert isinstance(call, Call)
    return len(call.operands) == 1 and all(len(r) < len(call.operands[0]) for r in call.results)


def _copies(problem: Problem) -> tuple[tuple[tuple[int, float, int, int], ...], tuple[tuple[int, float, int, int], ...]]:
    reads: dict[tuple[int, int], list[int]] = {}
    for (n, slot), v in sorted(problem.coarse.read.items()):
        reads.setdefault((v, problem.graph.nodes[n].inputs[slot]), []).append(n)
    copies: list[tuple[int, float, int, int]] = []
    kept: list[tuple[int, float, int, int]] = []
    for (v, t), nodes in reads.items():
        variable = problem.coarse.variables[v]
        nbytes = float(problem.graph.tensors[t].nbytes)
        copies.append((v, nbytes, min(nodes), max(nodes)))
        if variable.kind == "backward" and (variable.sibling, t) in reads:
            kept.append((v, nbytes, max(reads[variable.sibling, t]), min(nodes)))
    return tuple(copies), tuple(kept)


def _around_loops(
    problem: Problem, loops: Loops
) -> tuple[list[tuple[float, int, int, int, int]], dict[int, list[Entering]], frozenset[int]]:
    """(rows of the stacks that loops fill, what enters loops by tensor outside, what takes no memory of its own inside).

    The latter is what does not change in the loop: the buffer outside, or a free value that is made where it is used.
    """
    graph, of = problem.graph, problem.coarse.of
    stacks: list[tuple[float, int, int, int, int]] = []
    entering: dict[int, list[Entering]] = {}
    constant: set[int] = set()
    readers = _readers(graph) if graph.links else {}
    for link in graph.links:
        left = loops.left(link)
        if link.lift < 0 and left is not None:
            v = of[link.source] if of[link.source] != FREE else of[link.target]
            stacks.append((float(graph.tensors[link.target].nbytes), v, left.since, left.last, link.target))
        if link.target in graph.boundary and link.target not in loops.carries and link.source != link.target:
            loop, outer, inner = loops.of[link.target], of[link.source], of[link.target]
            if not link.lift and (
                outer != FREE or all(graph.nodes[n].signature.elementwise for n in readers.get(link.target, ()))
            ):
                constant.add(link.target)
            if FREE not in (outer, inner) and (link.lift or outer != inner):
                nbytes = float(graph.tensors[link.source].nbytes)
                entered = Entering(outer, inner, link.lift > 0, nbytes, loop.first, loop.last)
                entering.setdefault(link.source, []).append(entered)
    return stacks, entering, frozenset(constant)


def local_bytes(problem: Problem, v: int, state: int) -> float:
    """The part of a variable's tensors that one device holds in this state."""
    return float(problem.local(v, (state,))[0])


def profile(
    problem: Problem, live: Liveness, assignment: Assignment, keep: frozenset[int], limits: Limits | None = None
) -> NDArray[np.float64]:
    """[length]: bytes on one device at every point; ``keep`` are the backward views that reuse the forward copy."""
    held = _stored(problem, live, assignment, keep)
    np.add.at(held, *live.buffers.held(assignment, limits))
    return held


def peak(
    problem: Problem,
    live: Liveness,
    assignment: Assignment,
    keep: frozenset[int],
    limits: Limits | None,
    limit: int | None = None,
) -> tuple[int, bool]:
    """(the peak of `profile`, True), or (bytes within ``limit`` that it does not exceed, False) where these take less work.

    That is where no op exceeds it though all hold their operands and results whole.
    """
    held = _stored(problem, live, assignment, keep)
    if limit is not None:
        surely = held.copy()
        nodes, nbytes = live.buffers.most
        surely[nodes] += nbytes
        if (most := whole_bytes(surely.max())) <= limit:
            return most, False
    np.add.at(held, *live.buffers.held(assignment, limits))
    return whole_bytes(held.max()), True


def _stored(problem: Problem, live: Liveness, assignment: Assignment, keep: frozenset[int]) -> NDArray[np.float64]:
    """[length]: `profile` without the buffers of ops."""
    parts = np.array([*(local_bytes(problem, v, s) for v, s in enumerate(assignment)), 1.0])
    change = _changes(live, parts)
    for v, nbytes, first, last in live.copies:
        if assignment[v] != assignment[problem.coarse.variables[v].of]:
            change[first] += nbytes * parts[v]
            change[last + 1] -= nbytes * parts[v]
    for v, nbytes, first, last in live.kept:
        if v in keep and assignment[v] != assignment[problem.coarse.variables[v].of]:
            change[first + 1] += nbytes * parts[v]
            change[last] -= nbytes * parts[v]
    for e in live.entering:
        if e.moved(problem, (assignment[e.outer],), (assignment[e.inner],))[0, 0]:
            change[e.birth] += e.nbytes * parts[e.inner]
            change[e.death + 1] -= e.nbytes * parts[e.inner]
    for e, after in live.between:
        same = assignment[e.inner] == assignment[after.inner] and e.stacked == after.stacked and after.birth > e.death
        if same and e.moved(problem, (assignment[e.outer],), (assignment[e.inner],))[0, 0]:
            change[e.death + 1] += e.nbytes * parts[e.inner]
            change[after.birth] -= e.nbytes * parts[e.inner]
    return np.cumsum(change)[:-1]


def whole_bytes(nbytes: float) -> int:
    """A device's bytes, rounded up: a third of a tensor is seldom a whole number. ``SLACK`` of one is rounding of the sum."""
    return math.ceil(nbytes - SLACK)


def _changes(live: Liveness, parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """[length + 1]: what stored values take and give back at every point, ``parts`` the share of each variable on a device."""
    held = live.nbytes * parts[live.variable]
    change = np.zeros(live.length + 1)
    np.add.at(change, live.birth, held)
    np.add.at(change, live.death + 1, -held)
    return change


def floor_bytes(problem: Problem, live: Liveness, domains: Sequence[Domain]) -> int:
    """Bytes of a device that no assignment of these domains stays below: every value at its smallest, nothing copied."""
    memo: dict[tuple[int, Domain], float] = {}
    least: list[float] = []
    for variable, domain in zip(problem.coarse.variables, domains, strict=True):
        key = problem.space(variable.id).rank, domain
        if key not in memo:
            memo[key] = float(problem.local(variable.id, domain).min())
        least.append(memo[key])
    return int(np.cumsum(_changes(live, np.array([*least, 1.0]))).max())


def price_terms(
    problem: Problem,
    live: Liveness,
    points: Sequence[int],
    price: float,
    domains: Sequence[Domain],
    limits: Limits | None = None,
) -> list[Term]:
    """Terms that charge ``price`` seconds a byte at each of the points, for what is stored then and the buffers of the op.

    An op with a variable for its strategy may take a slower one with smaller buffers, all others take the fastest, as `profile`
    does: priced costs of the two are not to be compared.
    """
    terms: list[Term] = []
    count = len(problem.coarse.variables)
    stored = sum((live.stored_at(p, count)[:-1] for p in points), np.zeros(count))
    for v in map(int, np.flatnonzero(stored)):
        terms.append(_interned(problem, (v,), picoseconds(price * stored[v] * problem.local(v, domains[v]))))
    for v, nbytes, first, last in live.copies:
        times = sum(first <= p <= last for p in points)
        of = problem.coarse.variables[v].of
        if times:
            other = np.not_equal.outer(np.array(domains[of]), np.array(domains[v]))
            costs = price * times * nbytes * problem.local(v, domains[v])[None, :] * other
            terms.append(_interned(problem, (of, v), picoseconds(costs)))
    for e in live.entering:
        times = sum(e.birth <= p <= e.death for p in points)
        if times:
            local = problem.local(e.inner, domains[e.inner])
            costs = price * times * e.nbytes * local[None, :] * e.moved(problem, domains[e.outer], domains[e.inner])
            same = e.outer == e.inner
            scope = (e.outer,) if same else (e.outer, e.inner)
            terms.append(_interned(problem, scope, picoseconds(np.diag(costs) if same else costs)))
    joins = set(problem.coarse.joins)
    opened = problem.ops.opened(domains)
    for p in points:
        if p in opened:
            scope = problem.ops.slots(problem.graph.nodes[p])[0]
            for v, nbytes in zip(scope, live.buffers.by_strategy(problem.graph.nodes[p], domains, limits), strict=True):
                terms.append(_interned(problem, (opened[p], v), picoseconds(price * nbytes)))
        elif p in joins:
            scope, nbytes = live.buffers.table(problem.graph.nodes[p], limits, domains)
            if nbytes.any():
                terms.append(_interned(problem, scope, picoseconds(price * nbytes)))
    return terms


def _interned(problem: Problem, scope: tuple[int, ...], costs: NDArray[np.int64]) -> Term:
    return Term(scope, *problem.store.intern(costs))


def keep_price(live: Liveness, points: Sequence[int], price: float) -> dict[int, float]:
    """Seconds that keeping each forward copy for the backward pass costs, per whole copy."""
    found: dict[int, list[float]] = {}
    for v, nbytes, first, last in live.kept:
        found.setdefault(v, []).append(price * nbytes * sum(first < p < last for p in points))
    return {v: sum(rows) / len(rows) for v, rows in found.items() if any(rows)}
