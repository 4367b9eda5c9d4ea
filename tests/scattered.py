"""Plans that no search would choose: every layout drawn at random, and ways to cut ops that are not the cheapest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.search.problem.cost_tables import BIG
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.solution import Solution
from shardplan.shell.plan_of_step import Plan


class _AnyStrategy(Extractor):
    """Takes half of the time any strategy that is possible."""

    rng: np.random.Generator

    def chosen(self, seconds: NDArray[np.float64]) -> int:
        """Any strategy that is possible, or the cheapest."""
        possible = np.flatnonzero(np.isfinite(seconds) & (seconds < BIG / 1e12))
        return int(self.rng.choice(possible)) if self.rng.random() < 0.5 else super().chosen(seconds)


def scattered(plan: Plan, seed: int, *, tries: int = 20) -> Plan | None:
    """The plan with layouts drawn at random; None where none of the draws is possible."""
    problem, rng = plan.session.problem, np.random.default_rng(seed)
    for _ in range(tries):
        states = tuple(_state(problem, v, rng) for v in range(len(problem.domains)))
        if problem.seconds(states, {}) >= BIG / 1e12:
            continue
        extractor = _AnyStrategy(problem)
        extractor.rng = rng
        solution = Solution("scattered", states, frozenset(), False, 0.0, plan.session.solution.peak)
        return plan.at(replace(plan.session, extractor=extractor, solution=solution))
    return None


def _state(problem: Any, v: int, rng: np.random.Generator) -> int:
    """A state, one that is partial seldom: then others around it have to be, too."""
    domain = np.array(problem.domains[v])
    whole = domain[~problem.space(v).partial[domain]]
    return int(rng.choice(whole if rng.random() < 0.8 else domain))
