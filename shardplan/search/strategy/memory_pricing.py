"""Within the memory limit: prices on bytes where memory peaks, then what no price can find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.search.baselines.rivals import Rivals
from shardplan.search.inference.anytime import Watch
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.solution import Solution
from shardplan.search.problem.tables import LONGEST_S
from shardplan.search.strategy import repair
from shardplan.search.strategy.polish import polish

REPAIRS = 3
"""So many solutions that hold too much are changed until they fit."""

_RISES = 24  # so often the price on bytes is tried at most, eightfold where no new point is met or the last one brought little

_LOWER = 0.98  # it brought little if the peak is still above this part of what it was

_DEAR = 16  # so many times that all that peaks may cost: no entry of a table is dearer than one, but many small ones add up

_CLOSER = 7  # so many prices between two are tried at most


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
        if limit < memory.floor_bytes(self.solver.problem, self.solver.live, self.domains):
            return [self.smallest()]  # there is no plan below that
        found = [*self._begun(limit), *self._priced(limit)]
        found += self._repaired(limit, found)
        if not any(s.fits(limit) for s in found):
            found.append(self.smallest())
        faster = repair.faster(self.solver, self.domains, limit, found)
        return found if faster is None else [*found, faster]

    def smallest(self) -> Solution:
        """The fewest bytes that are found, in the same way whatever the limit is: a limit of so many bytes is met."""
        least = min([*self._begun(0), *self._priced(0)], key=lambda s: s.peak_bytes)
        return repair.smaller(self.solver, self.domains, least)

    def _begun(self, limit: int) -> list[Solution]:
        return [self.free, *self.starts, *self.rivals.seeds(self.domains, limit)]

    def _priced(self, limit: int) -> list[Solution]:
        """One price on the bytes at every peak met so far.

        It rises until a solution fits. Then it is that at which this one and the last that does not fit cost the same: what is
        cheaper than both there lies between them.
        """
        solver, watch, begun = self.solver, self.watch, [] if self.joint else self._begun(limit)

        def at(price: float) -> Solution:
            if self.joint:
                found.append(solver.minimum("plan", self.domains, points=points, price=price)[0])
            else:
                seed = min(begun, key=lambda s: s.seconds + price * max(0, s.peak_bytes - limit))
                found.append(polish(solver, self.domains, seed, watch, points=points, price=price))
            return found[-1]

        points, found = [solver.peak_point(self.free)], list[Solution]()
        price = min(max(self.free.seconds, 1e-6), LONGEST_S) / max(self.free.peak_bytes, 1)
        over = self.free
        for tried in range(_RISES):
            watch.tell("memory", 0.7 + 0.2 * tried / _RISES)
            if (solution := at(price)).fits(limit):
                break
            peak = solver.peak_point(solution)
            known = peak in points
            if not known:
                points.append(peak)
            if known or solution.peak_bytes > _LOWER * over.peak_bytes:
                price *= 8
            over = solution
            if price * self.free.peak_bytes > _DEAR * LONGEST_S:
                break
        if not found[-1].fits(limit):
            return found
        inside = found[-1]
        for tried in range(_CLOSER):
            watch.tell("memory", 0.9 + 0.05 * tried / _CLOSER)
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
