"""Plans for given sizes of purposes: the best of all parallelism matrices with these rows (P2, section 3.1, for a whole step).

Each factor may cut the loops of its purpose alone, in every contraction that has such loops; what the other ops do, and how
tensors lie, stays free. Weights are stored whole over the factors of ``data``, and split over those of ``fsdp``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from shardplan.collectives.reshard import Family
from shardplan.errors import ClusterError, PinError
from shardplan.graph.flattening import Graph
from shardplan.ir import Factor
from shardplan.mesh import Cluster, factors, matrices
from shardplan.search.baselines.recipes import Restriction
from shardplan.search.baselines.rivals import Rivals, solved
from shardplan.search.coarsening.coarsen import FREE, Coarse
from shardplan.search.inference import anytime
from shardplan.search.inference.anytime import Incumbent, OutOfTimeError, Stopped, Watch
from shardplan.search.inference.bound import Bound
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.pricing import Domain, Limits
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution, Tried
from shardplan.search.problem.strategies import Cuts
from shardplan.search.strategy.factoring_search import Found, Wanted, check_layouts
from shardplan.search.strategy.memory_pricing import Descent
from shardplan.search.strategy.pins import for_pins, pinned_domains
from shardplan.search.strategy.polish import polish
from shardplan.search.strategy.purposes import Kind, Loops, Purpose, purposes
from shardplan.search.strategy.solve import Outcome

_KINDS: Mapping[Purpose, Kind | None] = {
    "data": "batch",
    "fsdp": "batch",
    "tensor": "tensor",
    "sequence": "sequence",
    "expert": "expert",
    "replica": None,
}


def laid(cluster: Cluster, sizes: Mapping[Purpose, int]) -> Iterator[tuple[tuple[Factor, ...], tuple[Purpose, ...]]]:
    """Every parallelism matrix of these axes, as factors with the purpose of each.

    The parts of a switch have the order of the axes: on it, all places are alike. On rings and buses they have every order.
    """
    names = tuple(sizes)
    for matrix in matrices(cluster.shape, tuple(sizes.values())):
        columns = [[i for i, n in enumerate(column) if n > 1] for column in zip(*matrix.rows, strict=True)]
        orders = [
            [tuple(own)] if level.kind == "switch" else list(itertools.permutations(own))
            for level, own in zip(cluster.levels, columns, strict=True)
        ]
        for placed in itertools.product(*orders):
            parts = {cluster.levels[j].name: [matrix.rows[i][j] for i in own] for j, own in enumerate(placed) if own}
            yield factors(cluster, parts), tuple(names[i] for own in placed for i in own)


def restricted(problem: Problem, domains: Sequence[Domain], of: Sequence[Purpose], loops: Loops) -> Restriction:
    """The problem in which each factor cuts the loops of its purpose alone, where an op has any."""
    result = list(domains)
    for t in sorted(problem.coarse.parameters & loops.root.keys()):
        v = problem.coarse.of[t]
        if v != FREE and t in problem.graph.inputs:
            result[v] = _stored(problem, v, domains[v], of)
    cuts = {node.id: _cuts(problem, loops, node.id, of) for node in loops.contractions}
    parts: dict[Purpose, list[int]] = {}
    for f, purpose in enumerate(of):
        parts.setdefault(purpose, []).append(f)
    return Restriction("plan", tuple(result), Limits(cuts), False, tuple(map(tuple, parts.values())))


def _stored(problem: Problem, v: int, domain: Domain, of: Sequence[Purpose]) -> Domain:
    """The layouts of a weight that are whole over ``data`` and split over most of ``fsdp``."""
    roles = problem.space(v).roles[list(domain)]
    data, sharded = [f for f, p in enumerate(of) if p == "data"], [f for f, p in enumerate(of) if p == "fsdp"]
    whole = (roles[:, data] < 0).all(axis=1)
    parts = np.where(roles[:, sharded] >= 0, np.array(problem.sizes)[sharded], 1).prod(axis=1)
    best = parts[whole].max(initial=0)
    return tuple(s for s, keep in zip(domain, whole & (parts == best), strict=True) if keep) or domain


def _cuts(problem: Problem, loops: Loops, n: int, of: Sequence[Purpose]) -> Cuts:
    signature, kinds = problem.graph.nodes[n].signature, loops.kinds(problem.graph.nodes[n])

    def may(f: int, purpose: Purpose) -> frozenset[int]:
        wanted = (v for v, kind in kinds.items() if kind == _KINDS[purpose])
        return frozenset(v for v in wanted if signature.cut(v, problem.sizes[f]) is not None) or frozenset({-1})

    return tuple(may(f, purpose) for f, purpose in enumerate(of))


def best_restricted(solver_of: Callable[[Limits], Solver], r: Restriction) -> Solution | None:
    """The best solution of a restriction; None where there is none."""
    solver = solver_of(r.limits)
    problem = solver.problem
    start = r
    if len(problem.sizes) > 2:  # first the factors of one purpose alike, then each on its own
        limits = replace(r.limits, groups=r.parts)
        start = replace(r, domains=problem.together(r.domains, r.parts), limits=limits)
    solution, seconds = solved(solver, start)
    if math.isinf(seconds) and start is not r:
        solution, seconds = solved(solver, r)
    if math.isinf(seconds):
        return None
    solution = solver.rate("plan", solution.states, problem.regathered(solution.keep), False, r.limits)
    return polish(solver, r.domains, solution)


def best_of_matrices(graph: Graph, coarse: Coarse, cluster: Cluster, wanted: Wanted) -> Found:
    """The best outcome over all parallelism matrices of the purposes that are wanted. It may not fit.

    Raises:
        PinError: if no matrix can hold the pins.
        ClusterError: if the step has nothing to cut for a purpose.
    """
    assert wanted.axes is not None
    family: Family = {}
    found: dict[tuple[tuple[Factor, ...], tuple[Purpose, ...]], Found] = {}
    refusals: list[PinError] = []
    stopped: Stopped = ""
    choices = list(laid(cluster, wanted.axes))
    for n, (over, of) in enumerate(choices):
        if stopped:
            break
        wanted.observer("axes", n / len(choices))
        problem = Problem(graph, coarse, cluster, over, objective=wanted.objective, family=family)
        check_layouts(problem)
        try:
            problem = for_pins(problem, wanted.pins)
            domains = pinned_domains(problem, wanted.pins)
        except PinError as error:
            refusals.append(error)
            continue
        loops = Loops(problem)
        _check_used(loops, of)
        try:
            outcome = _outcome(problem, restricted(problem, domains, of, loops), of, wanted)
        except KeyboardInterrupt:
            if not any(o.best.fits(wanted.memory) for _, o in found.values()):
                raise
            stopped = "interrupted"
            continue
        if outcome is not None:
            found[over, of] = problem, outcome
        if wanted.deadline is not None and anytime.now_s() >= wanted.deadline and found:
            stopped = "time budget"
    if not found:
        raise refusals[0] if refusals else ClusterError(f"no plan has the axes {_text(wanted.axes)}: leave axes= out")
    ranked = sorted(found.values(), key=lambda f: _rank(f[1].best, wanted.memory))
    used = [f for f in ranked if not _unused(f)]
    if not used:
        raise _refusal(ranked[0], _unused(ranked[0]), wanted)
    tried = tuple(Tried(over, o.best.seconds, o.best.fits(wanted.memory), None) for (over, _), (_, o) in found.items())
    (problem, outcome), *others = used
    if stopped:
        outcome.rivals.close()
    fitting = tuple((p, o) for p, o in others if o.best.fits(wanted.memory))
    return problem, replace(outcome, tried=tried, stopped=stopped, others=fitting)


def _outcome(problem: Problem, r: Restriction, of: Sequence[Purpose], wanted: Wanted) -> Outcome | None:
    """The best solution of one matrix, as an outcome."""
    live = memory.liveness(problem, wanted.donated)
    free = best_restricted(lambda limits: Solver(problem, live, limits), r)
    if free is None:
        return None
    best = replace(free if free.fits(wanted.memory) else _within_memory(problem, live, r, free, wanted), name="plan")
    bound = Bound(problem, live, r.domains, free=free, chosen=best, limit=max(wanted.memory, best.peak_bytes), unlimited_s=None)
    return Outcome(best, Rivals(Solver(problem, live)), bound, False, best, free, purposes=tuple(of))


def _within_memory(problem: Problem, live: memory.Liveness, r: Restriction, free: Solution, wanted: Wanted) -> Solution:
    """The fastest solution of a restriction that fits; where none does, the smallest. At the deadline, the best so far."""
    watch = Watch(Incumbent(wanted.memory, free), r.domains, wanted.deadline)
    with suppress(OutOfTimeError):
        Descent(Solver(problem, live, r.limits, watch), None, r.domains, free, (), False, watch).within(wanted.memory)
    assert watch.incumbent.best is not None
    return watch.incumbent.best


def _unused(found: Found) -> tuple[int, ...]:
    """The factors that a solution uses for nothing of what they are wanted for."""
    problem, outcome = found
    used = purposes(problem, Extractor(problem).decide(outcome.best))
    rows = enumerate(zip(outcome.purposes, used, strict=True))
    return tuple(f for f, (wanted, shares) in rows if wanted != "replica" and wanted not in dict(shares))


def _refusal(found: Found, unused: Sequence[int], wanted: Wanted) -> ClusterError:
    """Why no matrix does what is wanted: the loops of the purpose, of which none can be cut so often."""
    problem, outcome = found
    purpose, factor = outcome.purposes[unused[0]], problem.factors[unused[0]]
    loops = Loops(problem)
    extents = {
        node.signature.description.loops[v].extent
        for node in loops.contractions
        if node.signature.description is not None
        for v, kind in loops.kinds(node).items()
        if kind == _KINDS[purpose]
    }
    had = ", ".join(map(str, sorted(extents)))
    stored = f"no weight that it reads is stored split over {factor.name}={factor.size}"
    what = stored if purpose == "fsdp" else f"nothing is cut by {factor.size}"
    pins = f", or leave out the pins on {', '.join(map(repr, wanted.pins))}" if wanted.pins else ""
    return ClusterError(
        f"axes={_text(wanted.axes or {})}: {what} for {purpose!r}; the loops that {purpose!r} cuts have the extents {had}: "
        f"give sizes that divide them and the weights{pins}"
    )


def _check_used(loops: Loops, of: Sequence[Purpose]) -> None:
    """Refuses a purpose whose loops no contraction of the step has."""
    kinds = {kind for node in loops.contractions for kind in loops.kinds(node).values()}
    for purpose in dict.fromkeys(of):
        if _KINDS[purpose] is not None and _KINDS[purpose] not in kinds:
            raise ClusterError(f"axes: no product of this step has a loop for {purpose!r}: leave it out, or give it size 1")


def _rank(best: Solution, limit: int) -> tuple[bool, float]:
    return (False, best.seconds) if best.fits(limit) else (True, float(best.peak_bytes))


def _text(axes: Mapping[Purpose, int]) -> str:
    return " x ".join(f"{name}={n}" for name, n in axes.items())
