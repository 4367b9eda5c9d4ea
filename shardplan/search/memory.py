"""Peak memory of one device by liveness, and the prices that push a plan under a limit.

Each tensor that is stored in memory lives from the op that makes it to its last reader; resharded copies are values with
lifetimes of their own, and a weight's forward copy that the backward pass reads too lives in between. Elementwise results that
only elementwise ops read are fused away: those that the same pass reads, and those light enough to be computed again where the
other pass reads them, from values that are kept as well. What an op holds while it runs is in `shardplan.search.buffers`. A
donated input's buffer becomes the output that replaces it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.buffers import buffers, peak_tables
from shardplan.search.coarsen import FREE
from shardplan.search.pricing import Domain, Limits
from shardplan.search.problem import Problem
from shardplan.search.tables import Term, picoseconds
from shardplan.tdl import light

Assignment = Sequence[int]
"""For each variable its state."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """What lives when: parallel arrays over stored values (variable -1: whole on every device), in positions of the flat graph.

    ``copies`` lists (view, birth, death) of resharded copies, ``kept`` (backward view, birth, death) of forward copies that
    are kept.
    """

    nbytes: NDArray[np.float64]
    variable: NDArray[np.int64]
    birth: NDArray[np.int64]
    death: NDArray[np.int64]
    copies: tuple[tuple[int, float, int, int], ...]
    kept: tuple[tuple[int, float, int, int], ...]
    length: int


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
    _through_links(problem, birth, death)
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
        (graph.tensors[t].nbytes, coarse.of[t], b, death.get(t, b))
        for t, b in sorted(birth.items())
        if t not in alias and t not in fused and (coarse.of[t] != FREE or t in set(graph.inputs))
    ]
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    copies, kept = _copies(problem)
    return Liveness(
        np.array(columns[0], float),
        np.array(columns[1], np.int64),
        np.array(columns[2], np.int64),
        np.array(columns[3], np.int64),
        copies,
        kept,
        end + 1,
    )


def _through_links(problem: Problem, birth: dict[int, int], death: dict[int, int]) -> None:
    """A body's results become outer values when the body made them; what enters a body lives until it is last read there."""
    graph = problem.graph
    for link in graph.links:
        if link.source in birth:
            birth.setdefault(link.target, birth[link.source])
    for link in reversed(graph.links):
        if link.target in death:
            death[link.source] = max(
                death.get(link.source, 0), death[link.target] if link.target in graph.boundary else birth.get(link.target, 0)
            )


def _fused(problem: Problem, death: dict[int, int]) -> frozenset[int]:
    """The values that are never stored; what they are made of lives until they are read, which ``death`` is changed to say."""
    graph, of = problem.graph, problem.coarse.of
    readers: dict[int, list[int]] = {}
    for node in graph.nodes:
        for t in node.inputs:
            if t >= 0:
                readers.setdefault(t, []).append(node.id)
    ends = {*graph.outputs, *graph.inputs} | {t for link in graph.links for t in (link.source, link.target)}
    again = {n.signature.id: n.signature.description is not None and light(n.signature.description) for n in graph.nodes}
    fused: set[int] = set()
    for node in reversed(graph.nodes):
        alive = [t for t in dict.fromkeys(node.inputs) if t >= 0 and of[t] != FREE]
        cheap = again[node.signature.id]
        spread = cheap and all(graph.tensors[o].size > sum(graph.tensors[t].size for t in alive) for o in node.outputs)
        if not (node.signature.elementwise or spread):
            continue
        for t in node.outputs:
            using = [graph.nodes[r] for r in readers.get(t, ())]
            if t in ends or not all(u.signature.elementwise or _reduces(u.signature.call) for u in using):
                continue
            last = death.get(t, node.id)
            same = all(u.backward == node.backward for u in using)
            # a heavy one is computed once; a light one again in the other pass, if what it is made of is there anyway
            if (same and (cheap or len(using) <= 1)) or (cheap and all(death.get(u, 0) >= last for u in alive)):
                fused.add(t)
                death.update({u: max(death.get(u, 0), last) for u in alive})
    return frozenset(fused)


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


def local_bytes(problem: Problem, v: int, state: int) -> float:
    """The part of a variable's tensors that one device holds in this state."""
    return float(problem.resharder.space(len(problem.coarse.variables[v].shape)).local[state])


def profile(
    problem: Problem, live: Liveness, assignment: Assignment, keep: frozenset[int], limits: Limits | None = None
) -> NDArray[np.float64]:
    """[length]: bytes on one device at every point; ``keep`` are the backward views that reuse the forward copy."""
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
    return np.cumsum(change)[:-1] + buffers(problem, assignment, limits)


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
        key = len(variable.shape), domain
        if key not in memo:
            memo[key] = float(problem.resharder.space(key[0]).local[list(domain)].min())
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
    """Unary and pair terms that charge ``price`` seconds a byte at each of the points."""
    terms: list[Term] = []
    weight = np.zeros(len(problem.coarse.variables))
    for p in points:
        at = (live.birth <= p) & (live.death >= p) & (live.variable >= 0)
        np.add.at(weight, live.variable[at], live.nbytes[at])
    for v in np.flatnonzero(weight):
        space = problem.resharder.space(len(problem.coarse.variables[v].shape))
        terms.append(_interned(problem, (int(v),), picoseconds(price * weight[v] * space.local[list(domains[int(v)])])))
    for v, nbytes, first, last in live.copies:
        times = sum(first <= p <= last for p in points)
        of = problem.coarse.variables[v].of
        if times:
            space = problem.resharder.space(len(problem.coarse.variables[v].shape))
            costs = (
                price
                * times
                * nbytes
                * space.local[list(domains[int(v)])][None, :]
                * np.array([[a != b for b in domains[v]] for a in domains[of]], float)
            )
            terms.append(_interned(problem, (of, v), picoseconds(costs)))
    for scope, held in peak_tables(problem, Counter(points), domains, limits):
        terms.append(_interned(problem, scope, picoseconds(price * held)))
    return terms


def _interned(problem: Problem, scope: tuple[int, ...], costs: NDArray[np.int64]) -> Term:
    return Term(scope, *problem.store.intern(costs))


def keep_price(live: Liveness, points: Sequence[int], price: float) -> dict[int, float]:
    """Seconds that keeping each forward copy for the backward pass costs, per whole copy."""
    found: dict[int, list[float]] = {}
    for v, nbytes, first, last in live.kept:
        found.setdefault(v, []).append(price * nbytes * sum(first < p < last for p in points))
    return {v: sum(rows) / len(rows) for v, rows in found.items() if any(rows)}
