"""The best plan over all factorings of a cluster: levels are taken apart as long as that gains.

Best first: of the factorings that gained, the fastest is split next, in every way that one more factor allows. A factoring is
searched from the solution of the one that it refines, which costs the same there (`shardplan.collectives.parts`): so it is never
worse. Nothing is split once the best is at the bound of every factoring: its compute, spread evenly over all devices.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardplan.collectives.parts import in_runs
from shardplan.constants import CONSTANTS
from shardplan.errors import ClusterError, PinError, ShardplanError
from shardplan.graph.nodes import Graph
from shardplan.ir import Factor
from shardplan.mesh import Cluster
from shardplan.planning.candidate_problem import candidate_problem
from shardplan.planning.splits import Alike, Work, alike, factor_choices, merged, splits, work_of
from shardplan.planning.wanted import Found, Known, Wanted
from shardplan.search.coarsening.coarsen import Coarse
from shardplan.search.inference.anytime import Stopped
from shardplan.search.inference.bound import least_s
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Tried
from shardplan.search.strategy.solve import Start, limit_costs, search


def best_of_factorings(graph: Graph, coarse: Coarse, cluster: Cluster, wanted: Wanted, known: Known) -> Found:
    """The best outcome over the factorings of a cluster, as a `Generator`."""
    return _Search(graph, coarse, cluster, wanted, known).best()


class _Search:
    """A search over factorings.

    ``found`` holds the outcome of each that was searched, and ``left_out`` why others were not. ``_split`` has the factoring
    that each refines, and ``_refused`` those that cannot hold the pins or have too many layouts. ``_seen`` has what is alike to
    those that were searched or refused.
    """

    def __init__(self, graph: Graph, coarse: Coarse, cluster: Cluster, wanted: Wanted, known: Known) -> None:
        self.graph, self.coarse, self.cluster, self.wanted, self.known = graph, coarse, cluster, wanted, known
        self.found: dict[tuple[Factor, ...], Found] = {}
        self.left_out: dict[tuple[Factor, ...], str] = {}
        self._split: dict[tuple[Factor, ...], tuple[Factor, ...]] = {}
        self._refused: dict[tuple[Factor, ...], ShardplanError] = {}
        self._seen: set[Alike] = {alike(cluster, factors) for factors in wanted.slower}
        self._progress = 0.0
        self.most = CONSTANTS.factorings_tried if len(graph.nodes) > CONSTANTS.small_step else 2 * CONSTANTS.factorings_tried

    def best(self) -> Found:
        """Searches the first factorings, then those that refine the best."""
        work = work_of(self.graph)
        stopped: Stopped = ""
        again = self.wanted.again
        first = factor_choices(self.cluster, work) if self.wanted.factors is None else (self.wanted.factors,)
        for factors in again or first:
            stopped = self._try(factors, again.get(factors)) or stopped
            if stopped and self._fastest()[1].best.fits(self.wanted.memory):
                break
        if not self.found:
            raise next(iter(self._refused.values()))
        free = self.wanted.factors is None
        if free and self.wanted.refine and not stopped:
            stopped = self._refine(work)
        if free and not stopped and not self.wanted.pins:
            stopped = self._merge()
        problem, outcome = self._fastest()
        others = [(p, o) for p, o in self.found.values() if p is not problem and o.best.fits(self.wanted.memory)]
        others.sort(key=lambda found: found[1].best.seconds)
        costs = limit_costs(outcome.best, [o for _, o in self.found.values()], self.wanted.memory)
        outcome = replace(outcome, tried=self._tried(), others=tuple(others), limit_costs=costs)
        return (problem, replace(outcome, stopped=stopped, exact=False)) if stopped else (problem, outcome)

    def _refine(self, work: Work) -> Stopped:
        """Splits factors, best first, as long as that gains."""
        waiting = list(self.found)
        while waiting:
            at = min(waiting, key=self._order)
            waiting.remove(at)
            parent = self.found[at]
            if parent[1].best.seconds <= least_s(parent[0]) * (1 + CONSTANTS.least_gain) and parent[1].best.fits(
                self.wanted.memory
            ):
                return ""  # every device computes its share and sends nothing
            for factors in splits(self.cluster, at, work):
                if alike(self.cluster, factors) in self._seen:
                    continue
                if why := self._why_not(at):
                    self.left_out[factors] = why
                    continue
                self.left_out.pop(factors, None)
                if stopped := self._try(factors, parent):
                    return stopped
                if factors in self.found and better(self.found[factors], parent, self.wanted.memory, gain=CONSTANTS.least_gain):
                    waiting.append(factors)
                    self._split[factors] = at
        return ""

    def _why_not(self, at: tuple[Factor, ...]) -> str:
        """Why this factoring is not split further; empty where it is."""
        if len(self.found) >= self.most:
            return f"{self.most} others were searched"
        if len(at) < 3 or self.found[at][1].exact:
            return ""
        if (of := self._split.get(at)) is not None and not self._worth(at, of):
            return f"the factoring that it refines gained under {CONSTANTS.refinement_gain:.1%}"
        fewer, more = (min((f for f in self.found if len(f) == n), key=self._order, default=None) for n in (len(at), len(at) + 1))
        if fewer is not None and more is not None and not self._worth(more, fewer):
            return f"another of {len(more)} factors gained under {CONSTANTS.refinement_gain:.1%}"
        return ""

    def _worth(self, finer: tuple[Factor, ...], coarser: tuple[Factor, ...]) -> bool:
        """Whether a factoring gained enough over another to be refined in turn."""
        return better(self.found[finer], self.found[coarser], self.wanted.memory, gain=CONSTANTS.refinement_gain)

    def _worth_s(self) -> float:
        """The seconds that a factoring must beat to be worth the search for a solution within the memory limit."""
        fitting = [o.best.seconds for _, o in self.found.values() if o.best.fits(self.wanted.memory)]
        return min(fitting, default=math.inf) * (1 - CONSTANTS.refinement_gain)

    def _merge(self) -> Stopped:
        """Merges neighbouring factors of a level that no layout keeps apart, where that is no slower."""
        best = self._fastest()
        while (fewer := merged(best[0], best[1].best.states)) is not None:
            if fewer not in self.found and (stopped := self._try(fewer, None)):
                return stopped
            if fewer not in self.found or better(best, self.found[fewer], self.wanted.memory):
                return ""
            best = self.found[fewer]
        return ""

    def _try(self, factors: tuple[Factor, ...], parent: Found | None) -> Stopped:
        """Searches a factoring, from the solutions of the one that it refines; what stopped that."""
        self._seen.add(alike(self.cluster, factors))
        try:
            problem, domains = candidate_problem(self.graph, self.coarse, self.cluster, factors, self.wanted, self.known)
        except PinError as error:
            return self._refuse(factors, str(error), error)
        except ClusterError as error:
            free = self.wanted.factors is None
            remedy = "describe the cluster with fewer levels" if free else "take the levels apart into fewer factors"
            return self._refuse(factors, str(error), ClusterError(f"{error}: {remedy}"))
        done = len(self.found)
        first, last = (0.0, 0.5) if not done else (0.5 + 0.5 * (done - 1) / self.most, min(1.0, 0.5 + 0.5 * done / self.most))

        def tell(what: str, part: float) -> None:
            self._progress = max(self._progress, first + (last - first) * part)
            if what != "done":
                self.wanted.observer(what, self._progress)

        starts = [] if parent is None else refined(problem, parent)
        outcome = search(
            problem,
            limit=self.wanted.memory,
            donated=self.wanted.donated,
            domains=domains,
            deadline=self.wanted.deadline,
            observer=tell,
            starts=starts,
            offer=lambda outcome: self._offer((problem, outcome)),
            worth_s=self._worth_s(),
        )
        problem.tidy()
        self.found[factors] = problem, outcome
        self._offer((problem, outcome))
        return outcome.stopped

    def _refuse(self, factors: tuple[Factor, ...], why: str, error: ShardplanError) -> Stopped:
        """Leaves a factoring out; ``error`` is raised if all are."""
        self.left_out[factors], self._refused[factors] = why, error
        return ""

    def _offer(self, found: Found) -> None:
        problem, outcome = found
        self.wanted.offer((problem, replace(outcome, tried=(self._row(found),))))

    def _order(self, factors: tuple[Factor, ...]) -> tuple[bool, float, int]:
        """An outcome that fits comes first, then the faster one (the smaller one if neither fits), then the one with fewer
        factors.
        """
        return *self.found[factors][1].best.rank(self.wanted.memory), len(factors)

    def _fastest(self) -> Found:
        """The best outcome so far; of equals, the one with the fewest factors."""
        order = sorted(self.found, key=len)
        best = self.found[order[0]]
        for factors in order[1:]:
            if better(self.found[factors], best, self.wanted.memory, gain=CONSTANTS.least_gain):
                best = self.found[factors]
        return best

    def _tried(self) -> tuple[Tried, ...]:
        """The factorings that were searched, in that order, and those left out."""
        rows = map(self._row, self.found.values())
        left = {
            factors: why
            for factors, why in self.left_out.items()
            if factors in self._refused or alike(self.cluster, factors) not in self._seen
        }
        return (*rows, *(Tried(factors, None, False, None, why) for factors, why in left.items()))

    def _row(self, found: Found) -> Tried:
        problem, outcome = found
        seconds = outcome.best.seconds
        if math.isinf(seconds):
            return Tried(problem.factors, None, False, None, "no layouts were found in which the step can run")
        bound_s = outcome.bound.unlimited_s or least_s(problem)
        return Tried(problem.factors, seconds, outcome.best.fits(self.wanted.memory), bound_s)


def refined(problem: Problem, parent: Found) -> list[Start]:
    """The solutions of a factoring in a problem over one that refines it: whole factors become all of their parts."""
    coarser, outcome = parent
    if len(problem.coarse.variables) != len(coarser.coarse.variables):
        return []  # pins have given arguments layouts of their own in one of the two
    of = [
        tuple(i for i, f in enumerate(problem.factors) if f.level == c.level and c.stride <= f.stride < c.stride * c.size)
        for c in coarser.factors
    ]
    known: dict[int, dict[int, int]] = {}

    def state(v: int, s: int) -> int:
        space, over = problem.space(v), coarser.space(v)
        if space.rank not in known:
            at = in_runs(space, over, of).tolist()
            known[space.rank] = {s: fine for fine, s in enumerate(at) if s >= 0}
        return known[space.rank][s]

    solutions = dict.fromkeys([outcome.best, outcome.free])
    return [Start(tuple(state(v, s) for v, s in enumerate(one.states)), one.keep, one.regather) for one in solutions]


def better(a: Found, b: Found, limit: int, *, gain: float = 0.0) -> bool:
    """Whether ``a`` comes before ``b``, faster by this part at least."""
    return a[1].best.rank(limit) < b[1].best.rank(limit, b[1].best.seconds * (1 - gain))
