"""Peak memory of one device by liveness, and the prices that push a plan under a limit.

A stored tensor lives from the op that makes it to its last reader. Resharded copies have lifetimes of their own; a weight's
forward copy that the backward pass reuses also lives between the two. Elementwise results that only elementwise ops and
reductions read are fused away if one pass reads them, or if they are light and the other pass can compute them again from values
that are alive anyway. `buffers` has the bytes that an op holds while it runs. An output that replaces a donated input takes its
buffer. An input in host memory takes memory from the first op that reads it to the last, and the output that replaces it from
the op that makes it to its last reader. Values that the step copies to host memory take none while they lie there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.constants import CONSTANTS
from shardplan.graph.loops import Loops, loops_of
from shardplan.graph.nodes import Graph, Node
from shardplan.search.coarsening.coarsen import FREE
from shardplan.search.memory.buffers import Buffers
from shardplan.search.memory.lifetimes import Lifetime, Lifetimes
from shardplan.search.problem.cost_tables import Term, picoseconds
from shardplan.search.problem.pricing import Domain, Limits
from shardplan.search.problem.problem import Problem
from shardplan.tdl import Call, light

Assignment = Sequence[int]
"""The state of each variable."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """The memory of a step: the lifetimes of its values, in positions of the flat graph, and the buffers of its ops."""

    lifetimes: Lifetimes
    buffers: Buffers


def liveness(
    problem: Problem,
    donated: frozenset[int] = frozenset(),
    offloaded: frozenset[int] | None = None,
    back: frozenset[int] = frozenset(),
) -> Liveness:
    """Lifetimes of a problem's values; ``donated`` are the positions of donated inputs, ``offloaded`` the positions of inputs in
    host memory (None: the graph's own). The tensors ``back`` count as if they were on the device.
    """
    hosted = problem.graph.offloaded if offloaded is None else offloaded
    elsewhere = frozenset(t.id for t in problem.graph.tensors if t.hosted) - back
    key = "lifetimes", donated, hosted, elsewhere, problem.cluster.device.platform
    lifetimes, alias = problem.coarse.once(key, lambda: _lifetimes(problem, donated, hosted, elsewhere))
    return Liveness(lifetimes, Buffers(problem, alias))


def _lifetimes(
    problem: Problem, donated: frozenset[int], hosted: frozenset[int], elsewhere: frozenset[int]
) -> tuple[Lifetimes, frozenset[int]]:
    """(lifetimes of a problem's values except those ``elsewhere``, the tensors that take a donated argument's memory)."""
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
    fetched = _fetched(graph, loops, [graph.inputs[i] for i in hosted])
    for i, t in enumerate(graph.inputs):
        if i in hosted:
            continue
        birth[t] = 0
        if i not in donated or i in replaced:
            death[t] = end
        if i in donated and i in replaced and replaced[i] != t:
            alias.add(replaced[i])
    birth |= fetched
    for t, i in zip(graph.outputs, graph.feedback, strict=True):
        if t >= 0 and i not in hosted:
            death[t] = end
    fused = _fused(problem, death)
    entering, constant = _entering(problem, loops)
    inputs = set(graph.inputs)
    stored = [
        Lifetime("stored", t, coarse.of[t], graph.tensors[t].nbytes, b, death.get(t, b))
        for t, b in sorted(birth.items())
        if t not in alias
        and t not in fused
        and t not in constant
        and t not in elsewhere
        and (coarse.of[t] != FREE or t in inputs)
    ]
    every = [*stored, *_stacks(problem, loops, elsewhere), *_copies(problem), *entering]
    return Lifetimes(every, end + 1), frozenset(alias)


def _fetched(graph: Graph, loops: Loops, tensors: Sequence[int]) -> dict[int, int]:
    """The first point at which each of these inputs is read; those that nothing reads are left out."""
    first = {link.source: loops.of[link.target].first for link in reversed(graph.links) if link.target in graph.boundary}
    for node in reversed(graph.nodes):
        first |= {t: min(node.id, first.get(t, node.id)) for t in node.inputs}
    return {t: first[t] for t in tensors if t in first}


def _through_links(graph: Graph, loops: Loops, birth: dict[int, int], death: dict[int, int]) -> None:
    """Extends lifetimes over loops: operands live as long as the loop, carries are replaced in place, results follow it."""
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
    """The values that are never stored. Their operands live until they are read: ``death`` is changed accordingly."""
    graph = problem.graph
    readers = _readers(graph)
    ends = {*graph.outputs, *graph.inputs} | {t for link in graph.links for t in (link.source, link.target)}
    every = {n.signature.id: n.signature.description for n in graph.nodes}
    cheap = {s: description is not None and light(description) for s, description in every.items()}
    copied = {t for n in graph.nodes if n.signature.part == "copy" for t in (*n.inputs, *n.outputs)}
    stored = ends | copied | _summed(graph, readers)
    fused: set[int] = set()
    across: set[int] = set()  # values that an op of the other pass reads
    backward = {node.id for node in graph.nodes if node.backward}
    for node in reversed(graph.nodes):
        if not (node.signature.elementwise or (cheap[node.signature.id] and _spread(problem, node))):
            continue
        if cheap[node.signature.id] and stored.isdisjoint(node.outputs) and _moves_to_backward(problem, node, readers, backward):
            backward.add(node.id)
        for t in node.outputs:
            using = [graph.nodes[r] for r in readers.get(t, ())]
            if t in stored or not all(u.signature.elementwise or _reduces(u.signature.call) for u in using):
                continue
            if any((u.id in backward) != (node.id in backward) for u in using):
                across.add(t)
            elif cheap[node.signature.id] or len(using) <= 1:  # a heavy value is computed once in a pass
                fused.add(t)
                death.update({u: max(death.get(u, 0), death.get(t, node.id)) for u in _operands(problem, node)})
    return _computed_again(problem, fused, across, cheap, death)


def _moves_to_backward(problem: Problem, node: Node, readers: Mapping[int, Sequence[int]], backward: Set[int]) -> bool:
    """Whether a forward op is computed where the backward pass reads it: nothing else reads it, and its operands are no larger.

    The derivative of tanh is such an op: JAX places it behind the tanh itself.
    """
    tensors = problem.graph.tensors
    reading = {r for t in node.outputs for r in readers.get(t, ())}
    least = min((tensors[t].nbytes for t in node.outputs), default=0)
    return bool(reading) and reading <= backward and sum(tensors[u].nbytes for u in set(_operands(problem, node))) <= least


def _computed_again(
    problem: Problem, fused: set[int], across: set[int], cheap: Mapping[int, bool], death: dict[int, int]
) -> frozenset[int]:
    """``fused``, and the members of ``across`` that the other pass computes again: from stored values that it reads, or from
    smaller ones.

    XLA's compiler for GPUs computes roots and transcendentals again rather than store them; other ops are computed again only if
    they are ``cheap``. A stored value takes the memory of a value from which it is computed, if nothing reads that one later.
    ``death`` is changed accordingly.
    """
    heavy = problem.cluster.device.platform == "gpu"
    tensors, inputs = problem.graph.tensors, set(problem.graph.inputs)
    sources: dict[int, frozenset[int]] = {}  # by fused value: the stored values that it is computed from
    pure: set[int] = set()  # fused values that cheap ops alone compute from stored ones
    for node in problem.graph.nodes:
        if not (fused.intersection(node.outputs) or node.signature.elementwise or cheap[node.signature.id]):
            continue
        operands = _operands(problem, node)
        of = frozenset(s for u in operands for s in sources.get(u, (u,)))
        light_way = cheap[node.signature.id] and all(u in pure for u in operands if u in sources)
        for t in node.outputs:
            until = death.get(t, node.id)
            late = [u for u in of if death.get(u, 0) < until]
            smaller = sum(tensors[u].nbytes for u in late) < tensors[t].nbytes
            if t in fused or (t in across and (heavy or light_way) and smaller):
                sources[t] = of
                pure |= {t} if light_way else set()
                death.update(dict.fromkeys(late, until))
            elif node.signature.elementwise:
                _take_place(problem, node, t, of, inputs, death)
    return frozenset(sources)


def _take_place(problem: Problem, node: Node, result: int, of: frozenset[int], inputs: Set[int], death: dict[int, int]) -> None:
    """Frees a value that is read last here, of those that the op computes its result from: the result takes its memory."""
    graph, variable = problem.graph, problem.coarse.of
    for t in sorted(of):
        alike = variable[t] == variable[result] != FREE and graph.tensors[t].nbytes == graph.tensors[result].nbytes
        if alike and death.get(t) == node.id and t not in inputs and t not in graph.boundary:
            death[t] = node.id - 1
            return


def _operands(problem: Problem, node: Node) -> list[int]:
    """The operands of an op that take memory."""
    return [t for t in dict.fromkeys(node.inputs) if t >= 0 and problem.coarse.of[t] != FREE]


def _spread(problem: Problem, node: Node) -> bool:
    """Whether an op's results are larger than all its operands."""
    tensors = problem.graph.tensors
    return all(tensors[o].size > sum(tensors[t].size for t in _operands(problem, node)) for o in node.outputs)


def _summed(graph: Graph, readers: Mapping[int, Sequence[int]]) -> set[int]:
    """Sums of contractions' results (also transposed) and of such sums, each read once: a gradient summed from its terms.

    Each product is added in place to the sum so far (a GEMM's beta), so the terms do not wait for each other.
    """
    terms: set[int] = set()
    result: set[int] = set()
    for node in graph.nodes:
        added = node.signature.adds and terms.issuperset(node.inputs)
        if added or node.signature.contracts or (node.signature.moves and node.inputs[0] in terms):
            terms.update(t for t in node.outputs if len(readers.get(t, ())) == 1)
        if added:
            result.update(node.outputs)
    return result


def _readers(graph: Graph) -> dict[int, list[int]]:
    readers: dict[int, list[int]] = {}
    for node in graph.nodes:
        for t in node.inputs:
            if t >= 0:
                readers.setdefault(t, []).append(node.id)
    return readers


def _reduces(call: Call) -> bool:
    """Whether a call reduces its one operand."""
    return len(call.operands) == 1 and all(len(r) < len(call.operands[0]) for r in call.results)


def _copies(problem: Problem) -> Iterator[Lifetime]:
    """The lifetimes of resharded copies, and of forward copies kept for the backward pass."""
    reads: dict[tuple[int, int], list[int]] = {}
    for (n, slot), v in sorted(problem.coarse.read.items()):
        reads.setdefault((v, problem.graph.nodes[n].inputs[slot]), []).append(n)
    for (v, t), nodes in reads.items():
        variable = problem.coarse.variables[v]
        nbytes = float(problem.graph.tensors[t].nbytes)
        yield Lifetime("copy", t, v, nbytes, min(nodes), max(nodes), variable.of)
        if variable.kind == "backward" and (variable.sibling, t) in reads:
            first, last = max(reads[variable.sibling, t]) + 1, min(nodes) - 1
            if first <= last:
                yield Lifetime("kept", t, v, nbytes, first, last, variable.of)


def _stacks(problem: Problem, loops: Loops, elsewhere: frozenset[int]) -> Iterator[Lifetime]:
    """The lifetimes of the stacks that loops fill, those ``elsewhere`` left out."""
    graph, of = problem.graph, problem.coarse.of
    for link in graph.links:
        left = loops.left(link)
        if link.lift < 0 and left is not None and link.target not in elsewhere:
            v = of[link.source] if of[link.source] != FREE else of[link.target]
            yield Lifetime("stored", link.target, v, float(graph.tensors[link.target].nbytes), left.since, left.last)


def _entering(problem: Problem, loops: Loops) -> tuple[list[Lifetime], frozenset[int]]:
    """(lifetimes of copies that enter loops in another layout, tensors that take no memory of their own inside).

    The latter do not change in the loop: they are the buffer outside, or a free value that is made where it is used.
    """
    graph, of = problem.graph, problem.coarse.of
    entering: dict[int, list[Lifetime]] = {}
    constant: set[int] = set()
    readers = _readers(graph) if graph.links else {}
    for link in graph.links:
        if link.target in graph.boundary and link.target not in loops.carries and link.source != link.target:
            loop, outer, inner = loops.of[link.target], of[link.source], of[link.target]
            if not link.lift and (
                outer != FREE or all(graph.nodes[n].signature.elementwise for n in readers.get(link.target, ()))
            ):
                constant.add(link.target)
            if FREE not in (outer, inner) and (link.lift or outer != inner):
                nbytes = float(graph.tensors[link.source].nbytes)
                entered = Lifetime("entering", link.source, inner, nbytes, loop.first, loop.last, outer, link.lift > 0)
                entering.setdefault(link.source, []).append(entered)
    every = [e for row in entering.values() for e in row]
    for row in entering.values():
        for e, after in itertools.pairwise(sorted(row, key=lambda e: e.first)):
            if e.stacked == after.stacked and after.first > e.last:
                kind, until = "between", after.first - 1
                every.append(replace(e, kind=kind, first=e.last + 1, last=until, next=after.variable))
    return every, frozenset(constant)


def local_part(problem: Problem, v: int, state: int) -> float:
    """The fraction of a variable's tensors that one device holds in this state."""
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
    """(the peak of `profile`, True), or (an upper bound of it within ``limit``, False).

    The bound takes less work: it assumes that every op holds its operands and results whole.
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
    parts = np.array([*(local_part(problem, v, s) for v, s in enumerate(assignment)), 1.0])
    change = live.lifetimes.changes(parts)
    for life in live.lifetimes.conditional:
        if life.holds(problem, assignment, keep):
            change[life.first] += life.nbytes * parts[life.variable]
            change[life.last + 1] -= life.nbytes * parts[life.variable]
    return np.cumsum(change)[:-1]


def whole_bytes(nbytes: float) -> int:
    """A device's bytes, rounded up: a third of a tensor is seldom a whole number. ``rounding_bytes`` allows for rounding."""
    return math.ceil(nbytes - CONSTANTS.rounding_bytes)


def floor_bytes(problem: Problem, live: Liveness, domains: Sequence[Domain]) -> int:
    """A lower bound on the peak over these domains: every stored value at its smallest, no copies, no buffers."""
    memo: dict[tuple[int, Domain], float] = {}
    least: list[float] = []
    for variable, domain in zip(problem.coarse.variables, domains, strict=True):
        key = problem.space(variable.id).rank, domain
        if key not in memo:
            memo[key] = float(problem.local(variable.id, domain).min())
        least.append(memo[key])
    return int(np.cumsum(live.lifetimes.changes(np.array([*least, 1.0]))).max())


def price_terms(
    problem: Problem,
    live: Liveness,
    points: Sequence[int],
    price: float,
    domains: Sequence[Domain],
    limits: Limits | None = None,
) -> list[Term]:
    """Terms that charge ``price`` seconds a byte at each of the points, for stored values, copies and the buffers of the op.

    An op with a variable for its strategy may take a slower one with smaller buffers. All others take the fastest, as `profile`
    does. Do not compare priced costs of the two.
    """
    terms: list[Term] = []
    count = len(problem.coarse.variables)
    stored = sum((live.lifetimes.stored_at(p, count)[:-1] for p in points), np.zeros(count))
    for v in map(int, np.flatnonzero(stored)):
        terms.append(_interned(problem, (v,), picoseconds(price * stored[v] * problem.local(v, domains[v]))))
    for life in live.lifetimes.of("copy", "entering"):
        times = life.times(points)
        if times:
            terms.append(_interned(problem, life.scope, picoseconds(price * times * life.held(problem, domains))))
    joins = set(problem.coarse.joins)
    opened = problem.ops.opened(domains)
    for p in points:
        if p in opened:
            scope, strategy = problem.ops.slots(problem.graph.nodes[p])[0], opened[problem.standing_for(p, limits)]
            for v, nbytes in zip(scope, live.buffers.by_strategy(problem.graph.nodes[p], domains, limits), strict=True):
                terms.append(_interned(problem, (strategy, v), picoseconds(price * nbytes)))
        elif p in joins:
            scope, nbytes = live.buffers.table(problem.graph.nodes[p], limits, domains)
            if nbytes.any():
                terms.append(_interned(problem, scope, picoseconds(price * nbytes)))
    return terms


def _interned(problem: Problem, scope: tuple[int, ...], costs: NDArray[np.int64]) -> Term:
    return Term(scope, *problem.store.intern(costs))


def keep_price(live: Liveness, points: Sequence[int], price: float) -> dict[int, float]:
    """The price of keeping a forward copy for each backward view, in seconds per whole copy."""
    result: dict[int, list[float]] = {}
    for life in live.lifetimes.of("kept"):
        result.setdefault(life.variable, []).append(price * life.nbytes * life.times(points))
    return {v: sum(rows) / len(rows) for v, rows in result.items() if any(rows)}
