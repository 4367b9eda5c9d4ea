"""What lives when: every value that takes memory, as bytes over an interval of the step, with its condition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.problem import Problem

Kind = Literal["stored", "copy", "kept", "entering", "between"]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """``nbytes`` of a variable's values (-1: of none, whole on every device), alive at the points ``first`` to ``last``.

    The kind says when it takes memory:

    - ``stored``: always.
    - ``copy``: a view, where its layout is not that of ``source``, the variable that it is made from.
    - ``kept``: the forward copy between its last forward reader and the first backward one, where the backward view keeps it.
    - ``entering``: what a loop reads in another layout than ``source`` has outside; the copy lives as long as the loop.
      ``stacked``: the loop takes it slice by slice, so that the variable has a dim less than its source.
    - ``between``: an entering copy up to the ``next`` loop that reads the value in the same layout: XLA makes equal copies once.
    """

    kind: Kind
    variable: int
    nbytes: float
    first: int
    last: int
    source: int = -1
    stacked: bool = False
    next: int = -1

    def __contains__(self, point: int) -> bool:
        """Whether it may be alive at a point of the step."""
        return self.first <= point <= self.last

    def times(self, points: Sequence[int]) -> int:
        """At how many of these points it may be alive."""
        return sum(p in self for p in points)

    @property
    def scope(self) -> tuple[int, ...]:
        """The distinct variables of `moved`."""
        return (self.source,) if self.source == self.variable else (self.source, self.variable)

    def holds(self, problem: Problem, assignment: Sequence[int], keep: frozenset[int]) -> bool:
        """Whether it takes memory in an assignment; ``keep`` are the backward views that reuse the forward copy."""
        if self.kind == "stored":
            return True
        if self.kind == "kept" and self.variable not in keep:
            return False
        if self.kind == "between" and assignment[self.variable] != assignment[self.next]:
            return False
        return bool(assignment[self.source] != self._outside(problem, (assignment[self.variable],))[0])

    def moved(self, problem: Problem, domains: Sequence[Domain]) -> NDArray[np.bool_]:
        """[source, variable]: whether their layouts differ; [source] where both are one variable."""
        differ = np.not_equal.outer(np.array(domains[self.source]), np.array(self._outside(problem, domains[self.variable])))
        return np.diag(differ) if self.source == self.variable else differ

    def held(self, problem: Problem, domains: Sequence[Domain]) -> NDArray[np.float64]:
        """The bytes of a device over `scope`, where the lifetime is conditional on `moved` alone."""
        return self.nbytes * problem.local(self.variable, domains[self.variable]) * self.moved(problem, domains)

    def _outside(self, problem: Problem, states: Domain) -> Domain:
        """The states of the variable as those of its source, which may have a dim more."""
        if not self.stacked:
            return states
        shapes = [problem.coarse.variables[v].shape for v in (self.variable, self.source)]
        return problem.lifted(states, *shapes)


class Lifetimes:
    """All lifetimes of a step of ``length`` points: ``stored`` ones, held as arrays too, and ``conditional`` ones."""

    def __init__(self, every: Sequence[Lifetime], length: int) -> None:
        self.length = length
        self.stored = tuple(x for x in every if x.kind == "stored")
        self.conditional = tuple(x for x in every if x.kind != "stored")
        self._nbytes = np.array([x.nbytes for x in self.stored], float)
        self._variable = np.array([x.variable for x in self.stored], np.int64)
        self._first = np.array([x.first for x in self.stored], np.int64)
        self._last = np.array([x.last for x in self.stored], np.int64)

    def of(self, *kinds: Kind) -> Iterator[Lifetime]:
        """The conditional ones of these kinds."""
        return (x for x in self.conditional if x.kind in kinds)

    def stored_at(self, point: int, variables: int) -> NDArray[np.float64]:
        """[variables + 1]: whole bytes of each variable's values that are stored at a point; last, what has no variable."""
        at = (self._first <= point) & (self._last >= point)
        held = np.zeros(variables + 1)
        np.add.at(held, self._variable[at], self._nbytes[at])
        return held

    def changes(self, parts: NDArray[np.float64]) -> NDArray[np.float64]:
        """[length + 1]: what stored values take and give back at every point; ``parts`` is each variable's share on a device."""
        held = self._nbytes * parts[self._variable]
        change = np.zeros(self.length + 1)
        np.add.at(change, self._first, held)
        np.add.at(change, self._last + 1, -held)
        return change
