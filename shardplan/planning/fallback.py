"""The results of planning so far: after an interrupt, the best of them becomes the plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardplan.planning.wanted import Planned, Wanted, cut_short, step_time_s
from shardplan.search.inference.anytime import unheard


@dataclass(frozen=True, slots=True)
class Fallback:
    """The results that searches have offered."""

    _offered: list[Planned] = field(default_factory=list[Planned])

    def offer(self, planned: Planned) -> None:
        """Takes a result."""
        self._offered.append(planned)

    def tell(self, wanted: Wanted) -> None:
        """Tells of the best of what was offered, and of the largest bound that is known for its factors and program."""
        fitting = [p for p in self._offered if p.found[1].best.fits(wanted.memory)]
        if wanted.best is unheard or not fitting or not wanted.objective.counts_time:
            return
        best = min(fitting, key=lambda p: step_time_s(p.found))
        alike = [p for p in fitting if p.program is best.program and p.found[0].factors == best.found[0].factors]
        wanted.best(step_time_s(best.found), max(p.found[1].bound.at_once_s for p in alike))

    def settle(self, best: Planned) -> None:
        """Keeps only the best result that was offered: the tables of the others are no longer needed."""
        self._offered[:] = [best]

    def best(self, limit: int) -> Planned | None:
        """The one with the shortest step that fits into ``limit`` bytes, with the others of its program; None if none fits."""
        fitting = [p for p in self._offered if p.found[1].best.fits(limit)]
        if not fitting:
            return None
        fitting.sort(key=lambda p: p.rank(limit))
        first = fitting[0]
        problem, outcome = cut_short(first.found, "interrupted")
        others = (p.found for p in fitting[1:] if p.program is first.program)
        tried = {t.factors: t for p in reversed(fitting) for t in p.found[1].tried}
        outcome = replace(outcome, others=(*outcome.others, *others), tried=tuple(tried.values()))
        return replace(first, found=(problem, outcome))
