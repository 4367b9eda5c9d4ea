"""A sharding of the arguments, priced with the layouts that another partitioner gives to all other values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shardplan.graph.nodes import Graph, Node
from shardplan.ir import Layout, Partial, Split
from shardplan.search.coarsening.coarsen import FREE, coarsen, tied
from shardplan.search.coarsening.variables import Sets
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.composite_strategies import Cuts
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.pricing import Limits
from shardplan.search.problem.problem import Domain, Problem
from shardplan.search.session import Session
from shardplan.search.strategy.pins import for_pins, pinned_domains
from shardplan.search.strategy.polish import polish


def partitioned(session: Session, layouts: Mapping[int, Layout]) -> tuple[Session, float]:
    """(the session in which the values inside the step have these ``layouts``, by tensor, wherever its pins leave a choice; the
    share of those values' bytes that lie so).

    Only tensors of equal layouts share a variable. An op is cut only as its operands or results are: a partitioner computes whole
    what is whole. Copies are chosen by cost alone: the memory limit is ignored, as XLA's partitioner ignores it.
    """
    own = session.problem
    layouts = _tied(session.graph, layouts)
    coarse = coarsen(session.graph, "none", kinds=_kinds(session.graph, layouts))
    problem = Problem(session.graph, coarse, own.cluster, own.factors, objective=own.objective, like=own, company=own.company)
    problem = for_pins(problem, session.pins)
    free = pinned_domains(problem, session.pins)
    domains = _held(problem, free, layouts)
    share = _share(problem, free, domains, layouts)
    solver = Solver(problem, memory.liveness(problem, session.donated))
    cuts = {n: _cuts(problem, problem.graph.nodes[n], domains) for n in problem.coarse.joins}
    domains = _scattered(problem, cuts, free, domains)
    solution, _ = solver.minimum("given", domains, limits=Limits(cuts))
    return replace(session, problem=problem, solution=solution, bound=None, extractor=Extractor.of(problem)), share


def refitted(session: Session) -> Session:
    """The session with the best layouts under pins that are not those of its solution."""
    solver = Solver(session.problem, memory.liveness(session.problem, session.donated))
    domains = pinned_domains(session.problem, session.pins)
    start = solver.minimum("given", [(s,) if s in d else d for s, d in zip(session.solution.states, domains, strict=True)])[0]
    return session.at(polish(solver, domains, start))


def _tied(graph: Graph, layouts: Mapping[int, Layout]) -> dict[int, Layout]:
    """The layouts, by tensor. Tensors that must have the same layout take the one that most of their bytes have."""
    sets = Sets(len(graph.tensors))
    for one, other in tied(graph):
        sets.union(one, other)
    votes: dict[int, Counter[Layout]] = {}
    for t, layout in layouts.items():
        votes.setdefault(sets.find(t), Counter())[layout] += graph.tensors[t].nbytes
    return {t: votes[root].most_common(1)[0][0] for t in range(len(graph.tensors)) if (root := sets.find(t)) in votes}


def _kinds(graph: Graph, layouts: Mapping[int, Layout]) -> list[object]:
    """[tensors]: equal for tensors of equal layouts, up to dims of one element; None for those without a layout."""
    kinds: list[object] = [None] * len(graph.tensors)
    for t, layout in layouts.items():
        kinds[t] = tuple(dim for dim, n in zip(layout.dims, graph.tensors[t].shape, strict=True) if n > 1)
    return kinds


def _share(problem: Problem, free: Sequence[Domain], held: Sequence[Domain], layouts: Mapping[int, Layout]) -> float:
    """The share of tensors' bytes that lie in ``held`` as ``layouts`` say, among those with a choice in ``free``; 1 if none has
    one. A tensor without a layout of its own counts if its variable is decided.
    """
    known = total = 0
    for t, tensor in enumerate(problem.graph.tensors):
        v = problem.coarse.of[t]
        if v == FREE or len(free[v]) == 1:
            continue
        total += tensor.nbytes
        if len(held[v]) == 1 and layouts.get(t) in (None, problem.resharder.layout(tensor.shape, held[v][0])):
            known += tensor.nbytes
    return known / total if total else 1.0


def _held(problem: Problem, domains: Sequence[Domain], layouts: Mapping[int, Layout]) -> list[Domain]:
    """The domains, each cut down to the inferred state of its variable if it contains that."""
    held = list(domains)
    numbers: dict[tuple[int, tuple[int, ...]], dict[Layout, int]] = {}
    for t, layout in layouts.items():
        v, shape = problem.coarse.of[t], problem.graph.tensors[t].shape
        if v == FREE:
            continue
        if (v, shape) not in numbers:
            numbers[v, shape] = {problem.resharder.layout(shape, s): s for s in domains[v]}
        state = numbers[v, shape].get(layout)
        if state is not None:
            held[v] = (state,)
    return held


def _scattered(problem: Problem, cuts: Mapping[int, Cuts], free: Sequence[Domain], domains: Sequence[Domain]) -> list[Domain]:
    """The domains, in which a sum over devices may be left split over them: where its readers split it, compilers turn the
    all-reduce and the slices into a reduce-scatter.
    """
    result = list(domains)
    for n, own in cuts.items():
        node = problem.graph.nodes[n]
        over = {f for f, loops in enumerate(own) for loop in loops if loop >= 0 and _reduces(problem, node, loop, f)}
        for t in node.outputs:
            v = problem.coarse.of[t]
            if over and v != FREE and len(domains[v]) == 1:
                shape = problem.coarse.variables[v].shape
                inferred = problem.resharder.layout(shape, domains[v][0])
                states = [s for s in free[v] if _refines(problem.resharder.layout(shape, s), inferred, over)]
                result[v] = tuple(sorted({*domains[v], *result[v], *states}))
    return result


def _reduces(problem: Problem, node: Node, loop: int, f: int) -> bool:
    """Whether cutting a loop of an op over a factor leaves terms of a sum."""
    strategy = node.signature.cut(loop, problem.sizes[f])
    return strategy is not None and any(isinstance(p, Partial) for p in strategy.results)


def _refines(layout: Layout, inferred: Layout, over: Collection[int]) -> bool:
    """Whether a layout splits as the inferred one does, and further over these factors alone."""
    rows = zip(layout.dims, inferred.dims, strict=True)
    return not layout.partial and all(set(b) <= set(a) and set(a) - set(b) <= set(over) for a, b in rows)


def _cuts(problem: Problem, node: Node, domains: Sequence[Domain]) -> Cuts:
    """For each factor the loops of an op that may be cut over it: those along which it splits all that they index, if any; else
    those along which it splits a result; else those along which it splits an operand, or none (-1). A value of undecided layout
    decides nothing: a loop that indexes no other may be cut, too.
    """
    signature, description = node.signature, node.signature.description
    sides = (*((t, False, i) for i, t in enumerate(node.inputs) if t >= 0), *((t, True, r) for r, t in enumerate(node.outputs)))
    split: list[set[tuple[bool, int, int]]] = [set() for _ in problem.sizes]
    undecided: set[tuple[bool, int]] = set()
    for t, result, index in sides:
        v = problem.coarse.of[t]
        if v != FREE and len(domains[v]) > 1:
            undecided.add((result, index))
        elif v != FREE:
            layout = problem.resharder.layout(problem.graph.tensors[t].shape, domains[v][0])
            for d, factors in enumerate(layout.dims):
                for f in factors:
                    split[f].add((result, index, d))

    def splits(f: int, loop: int) -> list[tuple[bool, bool]] | None:
        """(whether it is a result, whether the factor splits it there) for each operand and result that the loop indexes and
        whose layout is decided; None if it indexes only others.
        """
        strategy = signature.cut(loop, problem.sizes[f])
        placed = () if strategy is None else (*enumerate(strategy.operands), *enumerate(strategy.results))
        count = 0 if strategy is None else len(strategy.operands)
        indexed = [(n >= count, i, p.dim) for n, (i, p) in enumerate(placed) if isinstance(p, Split)]
        known = [(result, (result, i, dim) in split[f]) for result, i, dim in indexed if (result, i) not in undecided]
        return known if known or not indexed else None

    def may(f: int) -> frozenset[int]:
        found = {loop: splits(f, loop) for loop in range(0 if description is None else len(description.loops))}
        agreed = frozenset(loop for loop, own in found.items() if own and all(cut for _, cut in own))
        given = frozenset(loop for loop, own in found.items() if own and (True, True) in own)
        some = (loop for loop, own in found.items() if own is None or any(cut for _, cut in own))
        return agreed or given or frozenset({-1, *some})

    return tuple(may(f) for f in range(len(problem.sizes)))
