"""When a copy of a weight may be gathered again for the backward pass: a little before it is read.

A barrier ties the gather to a value of the backward pass, so that a compiler does not keep the forward copy instead. Tied to what
the reader itself waits for, the gather would hold the reader up. So the barrier stands earlier: where an earlier gather's reader
waits for that value. The gathers in between run beside the compute that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardplan.schedule.instructions import Barrier, Instruction, results_of

AHEAD = 2
"""A gather may begin where the reader of the gather this many before it begins: at most this many more copies are held."""


@dataclass(slots=True)
class Ties:
    """The barriers of one body's instructions: ``places`` are those of readers that gather weights again, with a value that each
    waits for; ``again`` is the place of the last barrier before what is computed again. ``behind`` are results of barriers.
    """

    places: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    again: int | None = None
    behind: set[int] = field(default_factory=set[int])

    def tie(self, out: list[Instruction], value: int, late: int, new: Callable[[], int]) -> int:
        """The value behind a barrier that waits for ``late``, or for what an earlier reader waits for."""
        self.places.append((len(out), late))
        at, held = self.places[max(0, len(self.places) - 1 - AHEAD)]
        if any(value in results_of(i) or held in results_of(i) for i in out[at:]):
            at, held = len(out), late
        results = new(), new()
        self._insert(out, at, Barrier((value, held), results, 1))
        self.behind.update(results)
        return results[0]

    def _insert(self, out: list[Instruction], at: int, barrier: Barrier) -> None:
        out.insert(at, barrier)
        self.places = [(place + (place >= at), late) for place, late in self.places]
        if self.again is not None and self.again >= at:
            self.again += 1

    def held(self, out: list[Instruction], values: Sequence[int], late: Sequence[int], new: Callable[[], int]) -> tuple[int, ...]:
        """What is computed again from these values waits for the ``late`` ones too; the results of the barrier for both."""
        results = tuple(new() for _ in (*values, *late))
        self.again = len(out)
        self.behind.update(results)
        out.append(Barrier((*values, *late), results, len(late)))
        return results

    def entered(self, out: list[Instruction], values: Sequence[int], new: Callable[[], int]) -> dict[int, int]:
        """Arguments behind the barrier of what was computed again before: their gathers need not wait for the next one.

        By value, the result of the barrier; empty where there is none.
        """
        if self.again is None:
            return {}
        barrier = out[self.again]
        assert isinstance(barrier, Barrier)
        results = {value: new() for value in dict.fromkeys(values)}
        self.behind.update(results.values())
        head = len(barrier.values) - barrier.late
        out[self.again] = Barrier(
            (*barrier.values[:head], *results, *barrier.values[head:]),
            (*barrier.results[:head], *results.values(), *barrier.results[head:]),
            barrier.late,
        )
        return results
