"""A sharding of the arguments, priced with the layouts that another partitioner gives to all other values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from shardplan.ir import Layout
from shardplan.search.coarsening.coarsen import coarsen
from shardplan.search.inference import anytime
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.problem import Domain, Problem
from shardplan.search.session import Session
from shardplan.search.strategy.pins import for_pins, pinned_domains
from shardplan.search.strategy.solve import search

_NO_LIMIT = 2**62
"""More bytes than any device has: the partitioner does not know the memory limit."""


def partitioned(session: Session, layouts: Mapping[int, Layout]) -> Session:
    """The session in which the values inside the step have these ``layouts``, by tensor, wherever its pins leave a choice.

    Copies of values, and how ops are cut, are chosen as is best with them. Tensors that share a variable have the layout that
    most of their bytes have.
    """
    own = session.problem
    coarse = coarsen(session.graph, "none")
    problem = Problem(session.graph, coarse, own.cluster, own.factors, objective=own.objective, like=own, company=own.company)
    problem = for_pins(problem, session.pins)
    domains = _held(problem, pinned_domains(problem, session.pins), layouts)
    outcome = search(
        problem, limit=_NO_LIMIT, donated=session.donated, domains=domains, deadline=None, observer=anytime.silent
    )
    return replace(session, problem=problem, solution=outcome.best, rivals=outcome.rivals, bound=None, extractor=Extractor.of(problem))


def _held(problem: Problem, domains: tuple[Domain, ...], layouts: Mapping[int, Layout]) -> list[Domain]:
    """The domains, each cut down to the layout that most bytes of its variable have among those that it contains."""
    votes: dict[int, Counter[Layout]] = {}
    for t, layout in layouts.items():
        v = problem.coarse.of[t]
        if v >= 0 and len(problem.coarse.variables[v].shape) == len(layout.dims):
            votes.setdefault(v, Counter())[layout] += problem.graph.tensors[t].nbytes
    result = list(domains)
    for v, counted in votes.items():
        shape = problem.coarse.variables[v].shape
        numbers = {problem.resharder.layout(shape, s): s for s in domains[v]}
        known = [layout for layout, _ in counted.most_common() if layout in numbers]
        if known:
            result[v] = (numbers[known[0]],)
    return result
