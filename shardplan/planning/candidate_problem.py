"""The problem of one candidate: over its factors, held to the pins, with prices that the problems before it share."""

from __future__ import annotations

from shardplan.constants import CONSTANTS
from shardplan.errors import ClusterError
from shardplan.graph.nodes import Graph
from shardplan.ir import Factor
from shardplan.mesh import Cluster
from shardplan.planning.wanted import Known, Wanted
from shardplan.search.coarsening.coarsen import Coarse
from shardplan.search.problem.problem import Domain, Problem
from shardplan.search.strategy.pins import for_pins, pinned_domains


def candidate_problem(
    graph: Graph, coarse: Coarse, cluster: Cluster, over: tuple[Factor, ...], wanted: Wanted, known: Known
) -> tuple[Problem, tuple[Domain, ...]]:
    """The problem over some factors, which is put into ``known``, and the layouts that the pins leave to each variable.

    Raises:
        PinError: if these factors cannot hold the pins.
        ClusterError: if a value has more than ``most_layouts`` layouts. The caller adds the remedy.
    """
    like = known.get(over) or next(iter(known.values()), None)
    problem = known[over] = Problem(graph, coarse, cluster, over, objective=wanted.objective, like=like, company=wanted.company)
    _check_layouts(problem)
    problem = for_pins(problem, wanted.pins)
    return problem, pinned_domains(problem, wanted.pins)


def _check_layouts(problem: Problem) -> None:
    """Refuses a problem in which a value has more than ``most_layouts`` layouts."""
    count, v = max(((len(domain), v) for v, domain in enumerate(problem.domains)), default=(0, 0))
    if count > CONSTANTS.most_layouts:
        sizes = ", ".join(f"{f.name}={f.size}" for f in problem.factors)
        raise ClusterError(
            f"over {len(problem.factors)} factors ({sizes}) a value of shape {list(problem.coarse.variables[v].shape)} has "
            f"{count} layouts, and at most {CONSTANTS.most_layouts} can be searched"
        )
