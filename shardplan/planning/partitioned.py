"""A sharding of the arguments, priced with the layouts that another partitioner gives to all other values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardplan.graph.nodes import Node
from shardplan.ir import Layout, Split
from shardplan.search.coarsening.coarsen import FREE, coarsen
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.composite_strategies import Cuts
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.pricing import Limits
from shardplan.search.problem.problem import Domain, Problem
from shardplan.search.session import Session
from shardplan.search.strategy.pins import for_pins, pinned_domains


def partitioned(session: Session, layouts: Mapping[int, Layout]) -> Session:
    """The session in which the values inside the step have these ``layouts``, by tensor, wherever its pins leave a choice.

    Tensors that share a variable have the layout that most of their bytes have. An op is cut only as its operands or results are:
    a partitioner computes whole what lies whole. Which copies are made is chosen as is best, whatever the memory limit, of which
    a partitioner knows nothing.
    """
    own = session.problem
    coarse = coarsen(session.graph, "none")
    problem = Problem(session.graph, coarse, own.cluster, own.factors, objective=own.objective, like=own, company=own.company)
    problem = for_pins(problem, session.pins)
    domains = _held(problem, pinned_domains(problem, session.pins), layouts)
    solver = Solver(problem, memory.liveness(problem, session.donated))
    limits = Limits({n: _cuts(problem, problem.graph.nodes[n], domains) for n in problem.coarse.joins})
    solution, _ = solver.minimum("given", domains, limits=limits)
    return replace(session, problem=problem, solution=solution, bound=None, extractor=Extractor.of(problem))


def _held(problem: Problem, domains: Sequence[Domain], layouts: Mapping[int, Layout]) -> list[Domain]:
    """The domains, each cut down to the state that most bytes of its variable have among those that it contains."""
    votes: dict[int, Counter[int]] = {}
    numbers: dict[tuple[int, tuple[int, ...]], dict[Layout, int]] = {}
    for t, layout in layouts.items():
        v, tensor = problem.coarse.of[t], problem.graph.tensors[t]
        if v == FREE:
            continue
        if (v, tensor.shape) not in numbers:
            numbers[v, tensor.shape] = {problem.resharder.layout(tensor.shape, s): s for s in domains[v]}
        state = numbers[v, tensor.shape].get(layout)
        if state is not None:
            votes.setdefault(v, Counter())[state] += tensor.nbytes
    return [(votes[v].most_common(1)[0][0],) if v in votes else domain for v, domain in enumerate(domains)]


def _cuts(problem: Problem, node: Node, domains: Sequence[Domain]) -> Cuts:
    """For each factor the loops of an op over which an operand or a result is split by it; -1, no cut, where there is none."""
    signature, description = node.signature, node.signature.description
    sides = (*((t, False, i) for i, t in enumerate(node.inputs) if t >= 0), *((t, True, r) for r, t in enumerate(node.outputs)))
    split: list[set[tuple[bool, int, int]]] = [set() for _ in problem.sizes]
    for t, result, index in sides:
        v = problem.coarse.of[t]
        if v != FREE:
            layout = problem.resharder.layout(problem.graph.tensors[t].shape, domains[v][0])
            for d, factors in enumerate(layout.dims):
                for f in factors:
                    split[f].add((result, index, d))

    def over(f: int, loop: int) -> bool:
        strategy = signature.cut(loop, problem.sizes[f])
        placed = () if strategy is None else (*enumerate(strategy.operands), *enumerate(strategy.results))
        count = 0 if strategy is None else len(strategy.operands)
        return any(isinstance(p, Split) and (n >= count, i, p.dim) in split[f] for n, (i, p) in enumerate(placed))

    loops = range(0 if description is None else len(description.loops))
    return tuple(frozenset(loop for loop in loops if over(f, loop)) or frozenset({-1}) for f in range(len(problem.sizes)))
