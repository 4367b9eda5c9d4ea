"""Loops of many equal iterations: the graph of a step writes out a few, and one of them stands for the rest.

An iteration begins when the one before it has ended. So if two in a row run alike, and nothing else runs beside them, all that
follow run alike, too: the state of all streams is the same when each begins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardplan.cost.simulator import Run


@dataclass(frozen=True, slots=True)
class Fold:
    """An iteration of the ``size`` tasks up to ``last``, which ends it, stands for ``more`` iterations behind it, too.

    The iteration before it is as long, and is written out.
    """

    last: int
    size: int
    more: int


def unfolded(run: Run, folds: tuple[Fold, ...]) -> Run | None:
    """The run with each folded iteration as long as all that it stands for, inner loops before outer ones.

    None if an iteration does not run like the one before it, or not alone: then more must be written out.
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
