"""The compute stream of a device and its collectives: kernels run one after another, collectives as soon as links are free.

While both run, each slows the other by a factor (Galvatron, section 3.4: about 1.3). The times are exact, not sampled.
"""

# pyright: strict
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(eq=False, slots=True)
class Flight:
    """A started collective: its remaining seconds if it ran alone, and the links that it holds. It ends at 0 seconds."""

    remaining_s: float
    links: frozenset[int]


@dataclass(frozen=True, slots=True)
class Spent:
    """The time of a device in seconds.

    ``compute_s`` and ``communication_s`` are the sums of kernels and of collectives, each alone. Of the ``seconds`` that passed,
    both ran at once for ``overlapped_s``, and only collectives ran for ``exposed_s``.
    """

    seconds: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    overlapped_s: float = 0.0

    @property
    def hidden_s(self) -> float:
        """The part of ``communication_s`` that ran beside kernels, or at once over several links."""
        return max(self.communication_s - self.exposed_s, 0.0)

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        """The sum of these seconds and ``times`` the ``other`` ones."""
        return Spent(*(a + times * b for a, b in zip(self.values, other.values, strict=True)))

    @property
    def values(self) -> tuple[float, ...]:
        """All fields, in their order."""
        return self.seconds, self.compute_s, self.communication_s, self.exposed_s, self.overlapped_s


Mark = tuple[Spent, tuple[tuple[Flight, float], ...]]
"""A state to return to: the time spent so far, and the remaining seconds of each collective under way."""


class Streams:
    """One stream of kernels, and the collectives under way in the order in which they were started.

    A collective runs while no earlier one holds one of its links. So collectives over one link run one after another, those over
    different levels at once. ``contention`` is the factor by which kernels and collectives slow each other; 1 means not at all.
    """

    def __init__(self, contention: float) -> None:
        self.contention = contention
        self.spent = Spent()
        self.flights: list[Flight] = []

    def start(self, seconds: float, links: frozenset[int]) -> Flight:
        """Starts a collective that takes these seconds alone; it runs as soon as its links are free."""
        flight = Flight(seconds, links)
        if seconds > 0:
            self.flights.append(flight)
            self.spent = replace(self.spent, communication_s=self.spent.communication_s + seconds)
        return flight

    def compute(self, seconds: float) -> None:
        """Runs a kernel that takes these seconds alone."""
        self.spent = replace(self.spent, compute_s=self.spent.compute_s + seconds)
        while seconds > 0 and self.flights:
            work = min(seconds, *(f.remaining_s for f in self.running))
            passed = work * self.contention
            self.spent = self.spent.plus(Spent(seconds=passed, overlapped_s=passed))
            seconds -= work
            self._advance(work)
        self.spent = self.spent.plus(Spent(seconds=seconds))

    def wait(self, flight: Flight) -> None:
        """Runs no kernel until a collective has ended."""
        while flight in self.flights:
            passed = min(f.remaining_s for f in self.running)
            self.spent = self.spent.plus(Spent(seconds=passed, exposed_s=passed))
            self._advance(passed)

    def drain(self) -> None:
        """Waits for all collectives."""
        for flight in tuple(self.flights):
            self.wait(flight)

    def mark(self) -> Mark:
        """The present state, for `back`."""
        return self.spent, tuple((f, f.remaining_s) for f in self.flights)

    def back(self, mark: Mark) -> None:
        """Returns to the state of a mark."""
        self.spent, flights = mark
        for flight, remaining_s in flights:
            flight.remaining_s = remaining_s
        self.flights = [flight for flight, _ in flights]

    @property
    def running(self) -> Sequence[Flight]:
        """The collectives that run now, as no earlier one holds their links."""
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
