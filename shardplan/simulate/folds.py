"""Loops of many equal iterations: the task graph has a few of them, and one stands for the rest.

An iteration begins when the one before it has ended. So if two consecutive iterations run alike, and nothing else runs beside
them, all that follow run alike, too: the state of all streams is the same at the beginning of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardplan.simulate.engine import SimulatedRun


@dataclass(frozen=True, slots=True)
class Fold:
    """An iteration that stands for ``more`` iterations after it, too: the ``size`` tasks up to and including ``last``.

    The ``size`` tasks before them are the iteration before it.
    """

    last: int
    size: int
    more: int


def unfolded(run: SimulatedRun, folds: tuple[Fold, ...]) -> SimulatedRun | None:
    """The run in which each folded iteration is stretched over all iterations that it stands for; inner loops come first.

    Returns None if an iteration does not run like the one before it, or if other tasks run beside it. Then more iterations must
    be written out.
    """
    start, end = run.start.copy(), run.end.copy()
    seconds = run.graph.seconds.copy()
    ids = np.arange(len(start))
    for fold in folds:
        before, own = (slice(fold.last + 1 - n * fold.size, fold.last + 1 - (n - 1) * fold.size) for n in (2, 1))
        first, begin, until = end[before.start - 1], end[own.start - 1], end[fold.last]
        alike = all(np.array_equal(x[before] - first, x[own] - begin) for x in (start, end))
        others = (ids < before.start) | (ids > fold.last)
        if not alike or (others & (start < until) & (end > first)).any():
            return None
        seconds[own] *= 1 + fold.more
        late = (start > until) | ((start == until) & (ids > fold.last))
        longer = fold.more * (until - begin)
        for x in (start, end):
            x[own] += fold.more * (x[own] - begin)
            x[late] += longer
    return replace(run, graph=replace(run.graph, seconds=seconds), start=start, end=end)
