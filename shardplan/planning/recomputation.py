"""The best plan of a step, unchanged or, where the memory limit costs time, with activations recomputed.

Each choice of parts to recompute is a program of its own (`shardplan.remat`), searched like any other: all parts, all but
contractions, and as few parts as pay of the better of these two.
"""

from __future__ import annotations

from dataclasses import replace

from shardplan.constants import CONSTANTS
from shardplan.cost import compute
from shardplan.graph.nodes import Graph
from shardplan.ir import Program
from shardplan.planning.searcher import Searcher
from shardplan.planning.wanted import Planned, Wanted, step_time_s
from shardplan.remat import (
    Policy,
    RecomputedPart,
    Remat,
    Without,
    find,
    rematerialised,
)
from shardplan.search.inference import anytime


def recomputed(searcher: Searcher, program: Program) -> Planned:
    """The best plan of the step, unchanged or with parts recomputed; none where the limit costs nothing."""
    graph = searcher.flat(program)
    unfinished = Remat(note="the search was interrupted before")
    plain = searcher.planned(program, graph, _part(searcher.wanted, 0, 0.4, half=True), unfinished)
    outcome = plain.found[1]
    if outcome.limit_costs == 0 and not outcome.stopped:
        return _annotated(plain, None, "the memory limit costs nothing")
    parts = all_parts(program, graph)
    if not parts:
        return _annotated(plain, None, "the step keeps nothing for a backward pass that could be computed again")
    without = Without(step_time_s(plain.found), outcome.best.peak_bytes, outcome.best.fits(searcher.wanted.memory))
    searcher.fallback.settle(plain)
    best = _with_parts(_over(searcher, plain), plain, parts, without)
    note = "" if best.remat.parts else "computing activations again was not faster"
    return _annotated(best, without, note)


def _over(searcher: Searcher, plain: Planned) -> Searcher:
    """The same search over the factors of a plan alone."""
    if searcher.wanted.axes is not None:
        return searcher
    return replace(searcher, wanted=replace(searcher.wanted, factors=plain.found[0].factors))


def _with_parts(searcher: Searcher, plain: Planned, parts: dict[Policy, tuple[RecomputedPart, ...]], without: Without) -> Planned:
    wanted, memory = searcher.wanted, searcher.wanted.memory
    best, last = plain, plain
    step = 0.6 / (len(parts) + CONSTANTS.fewer_parts)
    start = 0.4
    for policy, choice in parts.items():
        last = _try(searcher, plain.program, _part(wanted, start, start + step, half=True), Remat(choice, policy, without))
        start += step
        best = _better(last, best, memory)
        searcher.fallback.settle(best)
    chosen = best.remat.parts
    low, high = 0, len(chosen)
    while high - low > 1 and start < 1.0 - step / 2 and not anytime.late(wanted.deadline):
        middle = (low + high) // 2
        fewer = replace(best.remat, parts=chosen[:middle])
        last = _try(searcher, plain.program, _part(wanted, start, start + step), fewer)
        start += step
        if _better(last, best, memory) is last:
            best, high = last, middle
        else:
            low = middle
        searcher.fallback.settle(best)
    return best


def _try(searcher: Searcher, program: Program, wanted: Wanted, remat: Remat) -> Planned:
    with_parts = rematerialised(program, remat.parts)
    return searcher.planned(with_parts, searcher.flat(with_parts), wanted, remat)


def _better(a: Planned, b: Planned, limit: int) -> Planned:
    """The one that comes first; of equals the second."""
    return a if a.rank(limit) < b.rank(limit) else b


def _part(wanted: Wanted, first: float, end: float, *, half: bool = False) -> Wanted:
    """The conditions for a share of the whole search: its progress and, with ``half``, half of the time left."""
    deadline = wanted.deadline
    if half and deadline is not None:
        deadline -= max(0.0, deadline - anytime.now_s()) / 2

    def tell(what: str, part: float) -> None:
        wanted.observer(what, first + (end - first) * part)

    return replace(wanted, deadline=deadline, observer=tell)


def all_parts(program: Program, graph: Graph) -> dict[Policy, tuple[RecomputedPart, ...]]:
    """The parts that may be recomputed under each policy; policies with equal parts are listed once."""
    heavy = {
        (n.where, n.op.id)
        for n in graph.nodes
        if n.signature.description is not None and compute.is_contraction(n.signature.description)
    }
    found: dict[Policy, tuple[RecomputedPart, ...]] = {}
    for policy in ("all", "light"):
        parts = find(program, lambda where, op_id: (where, op_id) in heavy, policy)
        if parts and parts not in found.values():
            found[policy] = parts
    return found


def _annotated(planned: Planned, without: Without | None, note: str) -> Planned:
    return replace(planned, remat=replace(planned.remat, without=without, note=note))
