"""The plan of a program whose graph equals that of a planned one: the same layouts, where these fit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from shardplan.errors import PinError
from shardplan.graph.flattening import parameters_key
from shardplan.graph.nodes import Graph
from shardplan.ir import Program, Where
from shardplan.planning.candidate_problem import candidate_problem
from shardplan.planning.planner import Made, session_of
from shardplan.planning.scheduled import scheduled
from shardplan.planning.searcher import Searcher
from shardplan.planning.wanted import Planned
from shardplan.remat import Remat
from shardplan.search.baselines.rivals import Rivals
from shardplan.search.coarsening.coarsen import coarsen
from shardplan.search.inference.bound import Bound
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory


def planned_likewise(program: Program, searcher: Searcher, of: Made) -> Made | None:
    """The plan of a program in the layouts and cuts of a planned one; None where their graphs differ, or where it does not fit.

    The pins of the searcher hold. Clusters are equal but for their names. Graphs are equal if their ops are, op by op, and read
    and make the same tensors; only stacks may have other lengths, as in stages with unequally many microbatches in flight.
    """
    known, graph = of.session, searcher.flat(program)
    if not known.problem.shares_prices(searcher.cluster, searcher.wanted.objective) or _structure(graph) != _structure(
        known.graph
    ):
        return None
    over, coarse = known.problem.factors, coarsen(graph, known.problem.coarse.one_choice)
    wanted = replace(searcher.wanted, objective=known.problem.objective, company=known.problem.company)
    try:
        problem, domains = candidate_problem(graph, coarse, searcher.cluster, over, wanted, {over: known.problem})
    except PinError:
        return None
    states = known.solution.states
    if len(domains) != len(states) or not all(s in domain for s, domain in zip(states, domains, strict=True)):
        return None
    live = memory.liveness(problem, wanted.donated)
    solver = Solver(problem, live)
    best = solver.again(known.solution, known.solution.limits)
    if not best.fits(wanted.memory):
        return None
    bound = Bound(problem, live, domains, free=best, chosen=best, limit=wanted.memory, unlimited_s=None)
    outcome = replace(
        of.planned.found[1], best=best, rivals=Rivals(solver), bound=bound, exact=False, smallest=None, free=best, others=()
    )
    planned = Planned(program, (problem, outcome), Remat())
    session = session_of(program, planned.found, wanted, tuple(searcher.replicate))
    return Made(planned, session, scheduled(session) if wanted.backend == "explicit" else None, of.stopped)


def _structure(graph: Graph) -> Hashable:
    """The ops of a graph with what they read and make, without names, and without the lengths of stacks."""
    bodies: dict[Where, int] = {}  # numbered in the order in which they begin
    return (
        tuple(
            (
                (n.signature.call.primitive, parameters_key(n.signature.call.params), n.inputs, n.outputs),
                (n.weight, n.backward, bodies.setdefault(n.where, len(bodies))),
            )
            for n in graph.nodes
        ),
        tuple((link.source, link.target, link.lift, link.weight) for link in graph.links),
        tuple((len(t.shape), t.shape[t.id in graph.stacks :], t.dtype) for t in graph.tensors),
        (graph.inputs, graph.outputs, graph.feedback),
    )
