"""A device's compute stream beside its collectives, exactly: kernels one after another, collectives as the links allow.

While both are busy, both run at a fraction of their speed (Galvatron, section 3: what overlaps is slowed about 1.3 times on both
sides).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(eq=False, slots=True)
class Flight:
    """A collective that was started: the seconds that it still takes alone, and the links that it holds.  It ends at 0."""

    remaining_s: float
    links: frozenset[int]


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a device.

    ``compute_s`` and ``communication_s`` are what kernels and collectives take alone. Of the ``seconds`` that passed, both were
    busy in ``overlapped_s``, collectives alone in ``exposed_s``.
    """

    seconds: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    overlapped_s: float = 0.0

    @property
    def hidden_s(self) -> float:
        """Seconds that collectives would take alone and that passed while kernels ran."""
        return max(self.communication_s - self.exposed_s, 0.0)

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        """These seconds and so many times the others."""
        return Spent(*(a + times * b for a, b in zip(self.values, other.values, strict=True)))

    @property
    def values(self) -> tuple[float, ...]:
        """All fields, in their order."""
        return self.seconds, self.compute_s, self.communication_s, self.exposed_s, self.overlapped_s


Mark = tuple[Spent, tuple[tuple[Flight, float], ...]]
"""A moment: the seconds until then, and what each collective under way still takes."""


class Streams:
    """One stream of kernels, and collectives that begin in the order of their starts.

    A collective runs while no earlier one holds one of its links: those of one link follow one another, those of different levels
    run at once. ``contention`` is by how much kernels and collectives slow each other, 1 for not at all.
    """

    def __init__(self, contention: float) -> None:
        self.contention = contention
        self.spent = Spent()
        self.flights: list[Flight] = []

    def start(self, seconds: float, links: frozenset[int]) -> Flight:
        """A collective that may begin now."""
        flight = Flight(seconds, links)
        if seconds > 0:
            self.flights.append(flight)
            self.spent = replace(self.spent, communication_s=self.spent.communication_s + seconds)
        return flight

    def compute(self, seconds: float) -> None:
        """Runs a kernel that takes so many seconds alone."""
        self.spent = replace(self.spent, compute_s=self.spent.compute_s + seconds)
        while seconds > 0 and self.flights:
            work = min(seconds, *(f.remaining_s for f in self.running))
            passed = work * self.contention
            self.spent = self.spent.plus(Spent(seconds=passed, overlapped_s=passed))
            seconds -= work
            self._advance(work)
        self.spent = self.spent.plus(Spent(seconds=seconds))

    def wait(self, flight: Flight) -> None:
        """Holds the kernels until a collective has ended."""
        while flight in self.flights:
            passed = min(f.remaining_s for f in self.running)
            self.spent = self.spent.plus(Spent(seconds=passed, exposed_s=passed))
            self._advance(passed)

    def drain(self) -> None:
        """Waits for all collectives."""
        for flight in tuple(self.flights):
            self.wait(flight)

    def mark(self) -> Mark:
        """What is under way now, for `back`."""
        return self.spent, tuple((f, f.remaining_s) for f in self.flights)

    def back(self, mark: Mark) -> None:
        """Undoes all that happened since a mark was taken."""
        self.spent, flights = mark
        for flight, remaining_s in flights:
            flight.remaining_s = remaining_s
        self.flights = [flight for flight, _ in flights]

    @property
    def running(self) -> Sequence[Flight]:
        """The collectives that hold their links."""
        held: set[int] = set()
        result: list[Flight] = []
        for flight in self.flights:
            if held.isdisjoint(flight.links):
                result.append(flight)
            held |= flight.links
        return result

    def _advance(self, work: float) -> None:
        for flight in self.running:
            flight.remaining_s -= work
        self.flights = [f for f in self.flights if f.remaining_s > 0]
