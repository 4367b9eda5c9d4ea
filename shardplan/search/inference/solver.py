"""Solves one problem many times: its minimum in given domains, at given prices on bytes, under given limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shardplan.search.inference.anytime import Watch
from shardplan.search.inference.beam import Found, best
from shardplan.search.inference.eliminate import Eliminator, Order, find_order
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.cost_tables import seconds_of
from shardplan.search.problem.pricing import Domain, Limits
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Peak, Solution


class Solver:
    """Solves one problem under many restrictions and prices. ``limits`` apply where a call gives none.

    A ``watch`` sees every solution and may end the search.
    """

    def __init__(self, problem: Problem, live: memory.Liveness, limits: Limits | None = None, watch: Watch | None = None) -> None:
        self.problem, self.live, self.limits, self.watch = problem, live, limits, watch
        self.eliminator = Eliminator(problem.store) if watch is None else Eliminator(problem.store, watch.check)
        self._orders: dict[tuple[int, ...], Order] = {}

    def order(self, domains: Sequence[Domain]) -> Order:
        """The elimination order for domains of these sizes."""
        sizes = tuple(len(d) for d in domains)
        if sizes not in self._orders:
            self._orders[sizes] = find_order(self.problem.scopes_on(domains), self.problem.ops.sizes(domains))
        return self._orders[sizes]

    def minimum(
        self,
        name: str,
        domains: Sequence[Domain],
        *,
        regather: bool = False,
        points: Sequence[int] = (),
        price: float = 0.0,
        order: Order | None = None,
        limits: Limits | None = None,
    ) -> tuple[Solution, float]:
        """(the cheapest assignment found in these domains, its cost in seconds with prices); infinite where none is feasible."""
        limits = self.limits if limits is None else limits
        keep_s = self._keep_prices(regather, points, price)
        states, result = self._solve(domains, keep_s, points, price, order, limits)
        priced_s = seconds_of(result.cost)
        return self.rate(name, states, keep_s, regather, limits, seconds=None if points else priced_s), priced_s

    def bounded(self, name: str, domains: Sequence[Domain]) -> tuple[Solution, float]:
        """(the cheapest assignment found in these domains, a lower bound in seconds).

        The two are equal where the optimum is proved; the assignment's seconds are infinite where none was found.
        """
        states, result = self._solve(domains, {}, (), 0.0, None, self.limits)
        solution = self.rate(name, states, {}, False, self.limits, seconds=seconds_of(result.cost))
        return solution, seconds_of(result.bound)

    def _solve(
        self,
        domains: Sequence[Domain],
        keep_s: Mapping[int, float],
        points: Sequence[int],
        price: float,
        order: Order | None,
        limits: Limits | None,
    ) -> tuple[tuple[int, ...], Found]:
        self.problem.tidy()
        self.eliminator.tidy()
        terms = self.problem.terms(domains, keep_s, limits)
        if points:
            terms += memory.price_terms(self.problem, self.live, points, price, domains, limits)
        sizes = self.problem.ops.sizes(domains, limits)
        result = best(self.eliminator, terms, sizes, order or self.order(domains))
        return tuple(d[i] for d, i in zip(domains, result.assignment, strict=False)), result

    def rate(
        self,
        name: str,
        states: tuple[int, ...],
        keep_s: Mapping[int, float],
        regather: bool,
        limits: Limits | None = None,
        *,
        seconds: float | None = None,
    ) -> Solution:
        """The solution of these states, with its peak. ``seconds`` are those without prices; computed where not given."""
        limits = self.limits if limits is None else limits
        keep = frozenset(v for v in self.problem.backward_views if self.problem.keeps(v, states, keep_s.get(v, 0.0)))
        if seconds is None:
            seconds = self.problem.seconds(states, self.problem.regathered(keep), limits)
        peak = Peak(partial(memory.peak, self.problem, self.live, states, keep, limits))
        solution = Solution(name, states, keep, regather, seconds, peak, limits)
        if self.watch is not None:
            self.watch.take(solution)
        return solution

    def again(self, solution: Solution, limits: Limits | None = None) -> Solution:
        """A solution of another problem over the same factors, priced in this one."""
        return self.rate(solution.name, solution.states, self.problem.regathered(solution.keep), solution.regather, limits)

    def unlimited(self, solution: Solution, within: Sequence[Domain] | None = None) -> Solution:
        """The same layouts with every op cut the best way; never slower.

        ``within`` are domains that hold these layouts and whose tables exist: costs are looked up there if no op is
        `Ops.opened`.
        """
        keep_s = self.problem.regathered(solution.keep)
        seconds = None if within is None or self.problem.ops.opened(within) else self._lookup(solution.states, within, keep_s)
        return self.rate(solution.name, solution.states, keep_s, solution.regather, seconds=seconds)

    def _lookup(self, states: Sequence[int], domains: Sequence[Domain], keep_s: Mapping[int, float]) -> float:
        at = [domain.index(s) for domain, s in zip(domains, states, strict=True)]
        tables = self.problem.store.tables
        terms = self.problem.terms(domains, keep_s, self.limits)
        return seconds_of(sum(t.constant + int(tables[t.table][tuple([at[v] for v in t.scope])]) for t in terms))

    def peak_point(self, solution: Solution) -> int:
        """The point of the step at which the solution's memory peaks."""
        return int(self._profile(solution).argmax())

    def held(self, solution: Solution, points: Sequence[int]) -> NDArray[np.float64]:
        """[points]: the bytes that a device holds there."""
        return self._profile(solution)[list(points)]

    def _profile(self, solution: Solution) -> NDArray[np.float64]:
        return memory.profile(self.problem, self.live, solution.states, solution.keep, solution.limits)

    def _keep_prices(self, regather: bool, points: Sequence[int], price: float) -> dict[int, float]:
        if regather:
            return self.problem.regathered(frozenset())
        return memory.keep_price(self.live, points, price) if points else {}
