"""The progress of long work."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardplan.report.tables import seconds


@dataclass(frozen=True, slots=True)
class Standing:
    """The progress of work: its stage, the share that is done (0 to 1; None if unknown), the seconds of the best plan so far
    (infinite without one), and a lower bound on them (0 without one).
    """

    stage: str = ""
    share: float | None = None
    best_s: float = math.inf
    least_s: float = 0.0

    @property
    def best(self) -> str:
        """The best plan so far, as text; empty without one.

        >>> Standing("", None, 0.0103, 0.01).best
        'best 10.3 ms, gap 3.0%'
        """
        if not math.isfinite(self.best_s):
            return ""
        gap = f", gap {max(self.best_s / self.least_s - 1, 0.0):.1%}" if self.least_s > 0 else ""
        return f"best {seconds(self.best_s)}{gap}"
