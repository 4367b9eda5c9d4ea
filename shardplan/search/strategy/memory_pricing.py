"""Plans within the memory limit: by prices on bytes where memory peaks, then by changes that no price can find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.constants import CONSTANTS
from shardplan.search.baselines.rivals import Rivals
from shardplan.search.inference.anytime import Watch
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.cost_tables import LONGEST_S
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.solution import Solution
from shardplan.search.strategy import repair
from shardplan.search.strategy.polish import polish


@dataclass(frozen=True, slots=True)
class Descent:
    """Finds solutions within a limit, from the best solution without one, ``free``.

    ``starts`` are further starting points, beside the baselines (``rivals``, None where they are not to be used); ``joint`` means
    that each price is solved jointly.
    """

    solver: Solver
    rivals: Rivals | None
    domains: Sequence[Domain]
    free: Solution
    starts: Sequence[Solution]
    joint: bool
    watch: Watch

    def within(self, limit: int) -> list[Solution]:
        """The solutions found for a limit; if none of them fits, the last one is the solution of `smallest`."""
        if limit < memory.floor_bytes(self.solver.problem, self.solver.live, self.domains):
            return [self.smallest()]  # no plan holds fewer bytes
        solutions = [*self._initial(limit), *self._priced(limit)]
        solutions += self._repaired(limit, solutions)
        if not any(s.fits(limit) for s in solutions):
            solutions.append(self.smallest())
        faster = repair.faster(self.solver, self.domains, limit, solutions)
        return solutions if faster is None else [*solutions, faster]

    def smallest(self) -> Solution:
        """The solution with the fewest bytes found; it does not depend on the limit, so a limit of that many bytes is met."""
        least = min([*self._initial(0), *self._priced(0)], key=lambda s: s.peak_bytes)
        return repair.smaller(self.solver, self.domains, least)

    def _initial(self, limit: int) -> list[Solution]:
        seeds = [] if self.rivals is None else self.rivals.seeds(self.domains, limit)
        return [self.free, *self.starts, *seeds]

    def _priced(self, limit: int) -> list[Solution]:
        """Solutions at one price on the bytes at every peak seen so far.

        The price rises until a solution fits. Then it becomes the price at which this solution and the last one that does not
        fit cost the same: any solution between them is cheaper than both at that price.
        """
        solver, watch, initial = self.solver, self.watch, [] if self.joint else self._initial(limit)

        def at(price: float) -> Solution:
            if self.joint:
                solutions.append(solver.minimum("plan", self.domains, points=points, price=price)[0])
            else:
                seed = min(initial, key=lambda s: s.seconds + price * max(0, s.peak_bytes - limit))
                solutions.append(polish(solver, self.domains, seed, watch, points=points, price=price))
            return solutions[-1]

        points, solutions = [solver.peak_point(self.free)], list[Solution]()
        price = min(max(self.free.seconds, 1e-6), LONGEST_S) / max(self.free.peak_bytes, 1)
        over = self.free
        for tried in range(CONSTANTS.memory_prices):
            watch.tell("memory", 0.7 + 0.2 * tried / CONSTANTS.memory_prices)
            if (solution := at(price)).fits(limit):
                break
            peak = solver.peak_point(solution)
            known = peak in points
            if not known:
                points.append(peak)
            if known or solution.peak_bytes > CONSTANTS.fell_little * over.peak_bytes:
                price *= CONSTANTS.dearer
            over = solution
            if price * self.free.peak_bytes > CONSTANTS.dearest_peak * LONGEST_S:
                break
        if not solutions[-1].fits(limit):
            return solutions
        inside = solutions[-1]
        for tried in range(CONSTANTS.closer_prices):
            watch.tell("memory", 0.9 + 0.05 * tried / CONSTANTS.closer_prices)
            saved = float((solver.held(over, points) - solver.held(inside, points)).sum())
            if saved <= 0 or not over.seconds < inside.seconds < LONGEST_S:
                break
            price = (inside.seconds - over.seconds) / saved
            solution = at(price)
            less = float((solver.held(over, points) - solver.held(solution, points)).sum())
            gained = over.seconds - solution.seconds + price * less
            peak = solver.peak_point(solution)
            new = not solution.fits(limit) and peak not in points
            if new:
                points.append(peak)
            elif gained <= 1e-9 * over.seconds:
                break
            if solution.fits(limit):
                inside = solution
            else:
                over = solution
        return solutions

    def _repaired(self, limit: int, solutions: Sequence[Solution]) -> list[Solution]:
        """The solutions just above the limit, changed until they fit, where that may beat those that fit already."""
        fitting = min((s.seconds for s in solutions if s.fits(limit)), default=float("inf"))
        over = [s for s in dict.fromkeys(solutions) if not s.fits(limit) and s.seconds < fitting]
        repaired: list[Solution] = []
        for start in sorted(over, key=lambda s: s.peak_bytes)[: CONSTANTS.repairs]:
            if all(s in d for s, d in zip(start.states, self.domains, strict=True)):
                self.watch.tell("memory", 0.95)
                better = repair.repaired(self.solver, self.domains, start, limit)
                repaired += [better] if better is not None else []
        return repaired
