"""Within the memory limit: prices on bytes where memory peaks, then what no price can find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.search import exchange, repair
from shardplan.search.anytime import Watch
from shardplan.search.polish import polish
from shardplan.search.pricing import Domain
from shardplan.search.rivals import Rivals
from shardplan.search.solver import Solution, Solver

REPAIRS = 3
"""So many solutions that hold too much are changed until they fit."""


@dataclass(frozen=True, slots=True)
class Descent:
    """The way from the best solution without a limit, ``free``, to those within one.

    ``starts`` are where a search that is not ``joint`` may begin anew, beside the baselines.
    """

    solver: Solver
    rivals: Rivals
    domains: Sequence[Domain]
    free: Solution
    starts: Sequence[Solution]
    joint: bool
    watch: Watch

    def within(self, limit: int) -> list[Solution]:
        """What was found for a limit; where all of it holds too much, the last is what `smallest` gives."""
        found = [*self._begun(limit), *self._priced(limit)]
        found += self._repaired(limit, found)
        if not any(s.fits(limit) for s in found):
            found.append(self.smallest())
        faster = exchange.faster(self.solver, self.domains, limit, found)
        return found if faster is None else [*found, faster]

    def smallest(self) -> Solution:
        """The fewest bytes that are found, in the same way whatever the limit is: a limit of so many bytes is met."""
        least = min([*self._begun(0), *self._priced(0)], key=lambda s: s.peak_bytes)
        return exchange.smaller(self.solver, self.domains, least)

    def _begun(self, limit: int) -> list[Solution]:
        return [self.free, *self.starts, *self.rivals.seeds(self.domains, limit)]

    def _priced(self, limit: int) -> list[Solution]:
        """One price on the bytes at every peak met so far, by bisection."""
        solver, watch, begun = self.solver, self.watch, [] if self.joint else self._begun(limit)

        def at(price: float) -> Solution:
            if self.joint:
                return solver.minimum("plan", self.domains, points=points, price=price)[0]
            seed = min(begun, key=lambda s: s.seconds + price * max(0, s.peak_bytes - limit))
            return polish(solver, self.domains, seed, watch, points=points, price=price)

        points = [solver.peak_point(self.free)]
        found: list[Solution] = []
        low, high = 0.0, max(self.free.seconds, 1e-6) / max(self.free.peak_bytes, 1)
        for tried in range(24):
            watch.tell("memory", 0.7 + 0.2 * tried / 24)
            solution = at(high)
            found.append(solution)
            peak = solver.peak_point(solution)
            if solution.fits(limit):
                break
            if peak not in points:
                points.append(peak)
            else:
                low, high = high, high * 8
            if high > 1e3:
                break
        if not found[-1].fits(limit):
            return found
        for tried in range(7):
            watch.tell("memory", 0.9 + 0.1 * tried / 7)
            middle = (low * high) ** 0.5 if low else high / 8
            solution = at(middle)
            found.append(solution)
            if solution.fits(limit):
                high = middle
            else:
                peak = solver.peak_point(solution)
                if peak not in points:
                    points.append(peak)
                low = middle
        return found

    def _repaired(self, limit: int, found: Sequence[Solution]) -> list[Solution]:
        """Those just above the limit, changed until they fit: where that may beat what fits already."""
        fitting = min((s.seconds for s in found if s.fits(limit)), default=float("inf"))
        over = [s for s in dict.fromkeys(found) if not s.fits(limit) and s.seconds < fitting]
        repaired: list[Solution] = []
        for start in sorted(over, key=lambda s: s.peak_bytes)[:REPAIRS]:
            if all(s in d for s, d in zip(start.states, self.domains, strict=True)):
                self.watch.tell("memory", 0.95)
                better = repair.repaired(self.solver, self.domains, start, limit)
                repaired += [better] if better is not None else []
        return repaired
