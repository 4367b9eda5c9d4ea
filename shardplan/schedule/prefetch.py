"""When a weight is gathered again for the backward pass: shortly before its reader.

A barrier ties the gather to a value of the backward pass, so that the compiler does not keep the forward copy instead. If that
value were one that the reader waits for, the gather would delay the reader. So the barrier ties it to a value that the reader of
an earlier gather waits for. The gather then runs beside the compute in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardplan.constants import CONSTANTS
from shardplan.schedule.instructions import Barrier, Instruction, results_of


@dataclass(slots=True)
class Ties:
    """The barriers in one body's list of instructions.

    ``places`` has, for each reader of a weight that is gathered again, its place in the list and a value that it waits for.
    ``again`` is the place of the last barrier before recomputed ops (None: there is none yet). ``behind`` are the results of all
    barriers.
    """

    places: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    again: int | None = None
    behind: set[int] = field(default_factory=set[int])

    def tie(self, out: list[Instruction], value: int, late: int, new: Callable[[], int]) -> int:
        """Adds a barrier for ``value`` to the instructions ``out``, and returns its result.

        The barrier waits for the value that an earlier reader waits for (``gathers_ahead``), or, if that or ``value`` is made
        only after that reader, for ``late``. ``new`` numbers a new value.
        """
        self.places.append((len(out), late))
        at, held = self.places[max(0, len(self.places) - 1 - CONSTANTS.gathers_ahead)]
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
        """Adds a barrier, so that ops recomputed from ``values`` wait for the ``late`` values; its results, for both in order."""
        results = tuple(new() for _ in (*values, *late))
        self.again = len(out)
        self.behind.update(results)
        out.append(Barrier((*values, *late), results, len(late)))
        return results

    def entered(self, out: list[Instruction], values: Sequence[int], new: Callable[[], int]) -> dict[int, int]:
        """Passes ``values`` through the last barrier before recomputed ops too, so their gathers need not wait for the next one.

        Returns the result of the barrier for each value; nothing if there is no such barrier.
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
