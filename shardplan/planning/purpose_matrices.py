"""Plans for given sizes of purposes: the best of all parallelism matrices with these rows (P2, section 3.1, for a whole step).

Each factor may cut the loops of its purpose alone, in every contraction that has such loops; what the other ops do, and how
tensors lie, stays free. Weights are stored whole over the factors of ``data``, and split over those of ``fsdp``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardplan.errors import AxisError, ClusterError, PinError, ShardplanError
from shardplan.graph.nodes import Graph
from shardplan.ir import Factor
from shardplan.mesh import Cluster, factors, matrices
from shardplan.planning.candidate_problem import candidate_problem
from shardplan.planning.wanted import Found, Known, Wanted
from shardplan.search.baselines.recipes import Restriction
from shardplan.search.baselines.rivals import Rivals, solved
from shardplan.search.coarsening.coarsen import FREE, Coarse
from shardplan.search.inference import anytime
from shardplan.search.inference.anytime import Incumbent, OutOfTimeError, Stopped, Watch
from shardplan.search.inference.bound import Bound
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.composite_strategies import Cuts
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.pricing import Domain, Limits
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution, Tried
from shardplan.search.strategy.memory_pricing import Descent
from shardplan.search.strategy.polish import polish
from shardplan.search.strategy.purposes import ContractionLoops, LoopKind, Purpose, purposes
from shardplan.search.strategy.solve import Outcome, limit_costs
from shardplan.sizes import axes_text

_KINDS: Mapping[Purpose, LoopKind | None] = {
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


def restricted(problem: Problem, domains: Sequence[Domain], of: Sequence[Purpose], loops: ContractionLoops) -> Restriction:
    """The problem in which each factor cuts only the loops of its purpose, in ops that have any."""
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


def _cuts(problem: Problem, loops: ContractionLoops, n: int, of: Sequence[Purpose]) -> Cuts:
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


def best_of_matrices(graph: Graph, coarse: Coarse, cluster: Cluster, wanted: Wanted, known: Known) -> Found:
    """The best outcome over all parallelism matrices of ``wanted.axes``, as a `Generator`.

    A search with axes is never asked ``again``: each multiplier searches every matrix.

    Raises:
        ClusterError: also if the step has nothing to cut for a purpose.
    """
    search = _Search(graph, coarse, cluster, wanted, known)
    stopped = search.run()
    return search.best(stopped)


class _Search:
    """A search over parallelism matrices.

    ``found`` has the outcome of each that was searched and uses every axis, ``refused`` the errors of the others, ``tried`` a row
    for each.
    """

    def __init__(self, graph: Graph, coarse: Coarse, cluster: Cluster, wanted: Wanted, known: Known) -> None:
        assert wanted.axes is not None
        self.graph, self.coarse, self.cluster, self.wanted, self.axes = graph, coarse, cluster, wanted, wanted.axes
        self.known = known
        self.found: list[Found] = []
        self.tried: list[Tried] = []
        self.refused: list[ShardplanError] = []

    def run(self) -> Stopped:
        """Searches every matrix, or those over the factors that are asked for; what stopped that."""
        factors = self.wanted.factors
        choices = [own for own in laid(self.cluster, self.axes) if factors is None or own[0] == factors]
        for n, (over, of) in enumerate(choices):
            self._try(over, of, n / len(choices), 1 / len(choices))
            if anytime.late(self.wanted.deadline) and self.found:
                return "time budget" if n + 1 < len(choices) else self.found[-1][1].stopped
        return ""

    def best(self, stopped: Stopped) -> Found:
        """The best outcome of the search; the others that fit come with it."""
        if not self.found:
            raise (
                self.refused[0] if self.refused else ClusterError(f"no plan has the axes {axes_text(self.axes)}: leave axes= out")
            )
        (problem, outcome), *others = sorted(self.found, key=lambda f: f[1].best.rank(self.wanted.memory))
        if stopped:
            outcome.rivals.close()
        fitting = tuple((p, o) for p, o in others if o.best.fits(self.wanted.memory))
        costs = limit_costs(outcome.best, [o for _, o in self.found], self.wanted.memory)
        ended = stopped or outcome.stopped
        return problem, replace(outcome, tried=tuple(self.tried), stopped=ended, others=fitting, limit_costs=costs)

    def _try(self, over: tuple[Factor, ...], of: tuple[Purpose, ...], first: float, share: float) -> None:
        """Searches one matrix."""
        wanted = self.wanted
        wanted.observer("axes", first)
        try:
            problem, domains = candidate_problem(self.graph, self.coarse, self.cluster, over, wanted, self.known)
        except PinError as error:
            return self._leave_out(over, error)
        except ClusterError as error:
            return self._leave_out(over, ClusterError(f"axes={axes_text(self.axes)}: {error}: give fewer axes"))
        loops = ContractionLoops(problem)
        _check_used(loops, self.axes)
        outcome = _outcome(problem, restricted(problem, domains, of, loops), of, wanted, lambda part: first + share * part)
        if outcome is None:
            return None
        if unused := _unused((problem, outcome)):
            return self._leave_out(over, _refusal((problem, outcome), unused, wanted))
        self.found.append((problem, outcome))
        row = Tried(over, outcome.best.seconds, outcome.best.fits(wanted.memory), None)
        self.tried.append(row)
        wanted.offer((problem, replace(outcome, tried=(row,))))
        return None

    def _leave_out(self, over: tuple[Factor, ...], error: ShardplanError) -> None:
        self.refused.append(error)
        self.tried.append(Tried(over, None, False, None, str(error)))


def _outcome(
    problem: Problem, r: Restriction, of: Sequence[Purpose], wanted: Wanted, progress: Callable[[float], float]
) -> Outcome | None:
    """The best solution of one matrix as an outcome: the fastest that fits, or the smallest. The best so far at the deadline."""
    live = memory.liveness(problem, wanted.donated)
    incumbent = Incumbent(wanted.memory)
    watch = Watch(incumbent, r.domains, wanted.deadline, lambda _, part: wanted.observer("axes", progress(part)))
    free: Solution | None = None
    stopped: Stopped = ""
    try:
        free = best_restricted(lambda limits: Solver(problem, live, limits, watch), r)
        if free is None:
            return None
        if not free.fits(wanted.memory):
            Descent(Solver(problem, live, r.limits, watch), None, r.domains, free, (), False, watch).within(wanted.memory)
    except OutOfTimeError:
        stopped = "time budget"
    watch.close()
    assert incumbent.best is not None, "a search that has ended has a solution"
    best = replace(incumbent.best, name="plan")
    free = free or best
    bound = Bound(problem, live, r.domains, free=free, chosen=best, limit=max(wanted.memory, best.peak_bytes), unlimited_s=None)
    return Outcome(best, Rivals(Solver(problem, live)), bound, False, best, free, stopped, purposes=tuple(of))


def _unused(found: Found) -> tuple[int, ...]:
    """The factors that a solution does not use for their purpose: each must serve its purpose, and factors of one purpose must
    meet in some product.
    """
    problem, outcome = found
    decisions, loops = Extractor.of(problem).decide(outcome.best), ContractionLoops(problem)
    met = dict.fromkeys(outcome.purposes, False)
    for node in loops.contractions:
        use, kinds = decisions.uses.get(node.id), loops.kinds(node)
        if use is None:
            continue
        for purpose in met:
            cut = [kinds.get(loop) for loop, own in zip(use.loops, outcome.purposes, strict=True) if own == purpose]
            met[purpose] |= all(kind == _KINDS[purpose] for kind in cut)
    rows = enumerate(zip(outcome.purposes, purposes(problem, decisions), strict=True))
    return tuple(f for f, (of, shares) in rows if of != "replica" and not (met[of] and of in dict(shares)))


def _refusal(found: Found, unused: Sequence[int], wanted: Wanted) -> AxisError:
    """The reason why a matrix does not serve a purpose: none of the loops of that purpose can be cut so often."""
    problem, outcome = found
    assert wanted.axes is not None
    purpose = outcome.purposes[unused[0]]
    size, loops = wanted.axes[purpose], ContractionLoops(problem)
    extents = {
        node.signature.description.loops[v].extent
        for node in loops.contractions
        if node.signature.description is not None
        for v, kind in loops.kinds(node).items()
        if kind == _KINDS[purpose]
    }
    had = ", ".join(map(str, sorted(extents)))
    what = "no weight that it reads is stored split by" if purpose == "fsdp" else "nothing is cut by"
    divides = any(extent % size == 0 for extent in extents)
    pins = f", or leave out the pins on {', '.join(map(repr, wanted.pins))}" if wanted.pins and divides else ""
    return AxisError(
        f"axes={axes_text(wanted.axes)}: {what} {size} for {purpose!r}; the loops that {purpose!r} cuts have the extents {had}: "
        f"give sizes that divide them and the weights{pins}",
        purpose=purpose,
        size=size,
        loops=_KINDS[purpose],
    )


def _check_used(loops: ContractionLoops, axes: Mapping[Purpose, int]) -> None:
    """Refuses a purpose whose loops no contraction of the step has."""
    kinds = {kind for node in loops.contractions for kind in loops.kinds(node).values()}
    for purpose, size in axes.items():
        if size > 1 and _KINDS[purpose] is not None and _KINDS[purpose] not in kinds:
            message = f"axes: no product of this step has a loop for {purpose!r}: leave it out, or give it size 1"
            raise AxisError(message, purpose=purpose, size=size, loops=_KINDS[purpose])
