"""The order of a placed step: its tasks and transfers as they are issued, with predicted times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardplan.regions.tasks import Key, PlacedTaskGraph, Task, Transfer


@dataclass(frozen=True, slots=True)
class Issue:
    """A task or a transfer, with predicted seconds from the start of the step. ``last``: the values, by group, that nothing reads
    after it.
    """

    what: Task | Transfer
    start_s: float
    end_s: float
    last: tuple[tuple[int, Key], ...] = ()


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The tasks and transfers that are issued, in order."""

    issues: tuple[Issue, ...]

    @property
    def step_time_s(self) -> float:
        """When the last task or transfer ends."""
        return max((i.end_s for i in self.issues), default=0.0)

    def busy_s(self, graph: PlacedTaskGraph, group: int) -> float:
        """How long the devices of a group compute."""
        own = (i for i in self.issues if isinstance(i.what, Task) and graph.pieces[i.what.piece].group == group)
        return sum(i.end_s - i.start_s for i in own)


def with_last(graph: PlacedTaskGraph, issues: Sequence[Issue]) -> tuple[Issue, ...]:
    """The issues, each with the values that nothing reads after it."""
    seen = {(r.group, r.key) for r in graph.results if r is not None}
    found: list[Issue] = []
    for issue in reversed(issues):
        match issue.what:
            case Task() as task:
                group = graph.pieces[task.piece].group
                used = [(group, key) for key in (*task.reads, *task.makes)]
            case Transfer() as transfer:
                used = [(transfer.source, transfer.key)]
        last = tuple(dict.fromkeys(u for u in used if u not in seen))
        seen.update(last)
        found.append(replace(issue, last=last))
    return tuple(found[::-1])
