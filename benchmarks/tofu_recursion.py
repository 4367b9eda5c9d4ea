"""Tofu's Table 1: the seconds of its search with recursion, and of one dynamic program over all of its steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from shardplan.constants import CONSTANTS
from shardplan.cost import BYTES
from shardplan.search.baselines.tofu_premise import everything_cut, everything_split
from shardplan.search.inference.solver import Solver
from shardplan.search.memory.liveness import liveness
from shardplan.search.problem.problem import Problem
from shardplan.search.strategy.recursion import recurse


@dataclass(frozen=True, slots=True)
class Searched:
    """Seconds and gigabytes of both searches. ``entries`` are those of the joint tables; too many (not ``exact``): a beam."""

    recursion_s: float
    recursion_gb: float
    joint_s: float
    joint_gb: float
    entries: int
    exact: bool


def searched(plan: Any) -> Searched:
    """Both searches of a plan for bytes, each with tables of its own, without the plan's tracing, polish and schedule."""
    began = time.perf_counter()
    solver = _solver(plan)
    stepped = recurse(solver, solver.problem.domains)
    recursion_s, began = time.perf_counter() - began, time.perf_counter()
    solver = _solver(plan)
    domains = everything_split(solver.problem, solver.problem.domains)
    order = solver.order(domains)
    joint, _ = solver.bounded("joint", domains)
    joint_s = time.perf_counter() - began
    # the tables count a byte as a picosecond
    gigabytes = [s.seconds * 1e12 / 1e9 for s in (stepped.solution, joint)]
    return Searched(recursion_s, gigabytes[0], joint_s, gigabytes[1], order.total, order.largest <= CONSTANTS.exact_entries)


def _solver(plan: Any) -> Solver:
    timed = plan.session.problem
    problem = Problem(timed.graph, timed.coarse, timed.cluster, timed.factors, objective=BYTES)
    return Solver(problem, liveness(problem, plan.session.donated), everything_cut(problem))
