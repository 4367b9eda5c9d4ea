"""Lifetimes: every value that takes memory, as bytes over an interval of the step, with its condition."""

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
    """A value of ``nbytes`` (as a whole tensor), alive at the points ``first`` to ``last``.

    ``tensor`` is the value's number in the flat graph. ``variable`` is -1 for a value that is whole on every device. The kind
    says when the value takes memory:

    - ``stored``: always.
    - ``copy``: a view, where its layout differs from that of ``source``, the variable that it copies.
    - ``kept``: the forward copy between its last forward reader and the first backward one, where the backward view keeps it.
    - ``entering``: a copy of ``source`` for a loop that reads it in another layout; it lives as long as the loop.
      ``stacked``: the loop takes it slice by slice, so the variable has one dim fewer than its source.
    - ``between``: an entering copy, until the ``next`` loop that reads the value in the same layout: XLA makes equal copies once.
    """

    kind: Kind
    tensor: int
    variable: int
    nbytes: float
    first: int
    last: int
    source: int = -1
    stacked: bool = False
    next: int = -1

    def __contains__(self, point: int) -> bool:
        """Whether the value may be alive at a point of the step."""
        return self.first <= point <= self.last

    def times(self, points: Sequence[int]) -> int:
        """The number of these points at which the value may be alive."""
        return sum(p in self for p in points)

    @property
    def scope(self) -> tuple[int, ...]:
        """The distinct variables of `moved`."""
        return (self.source,) if self.source == self.variable else (self.source, self.variable)

    def holds(self, problem: Problem, assignment: Sequence[int], keep: frozenset[int]) -> bool:
        """Whether the value takes memory in an assignment; ``keep`` are the backward views that reuse the forward copy."""
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
        """Bytes on one device, with the axes of `moved`, for a lifetime whose only condition is `moved`."""
        return self.nbytes * problem.local(self.variable, domains[self.variable]) * self.moved(problem, domains)

    def _outside(self, problem: Problem, states: Domain) -> Domain:
        """The states of the variable as states of its source, which may have one more dim."""
        if not self.stacked:
            return states
        shapes = [problem.coarse.variables[v].shape for v in (self.variable, self.source)]
        return problem.lifted(states, *shapes)


class Lifetimes:
    """All lifetimes of a step of ``length`` points: the ``stored`` ones (also as arrays) and the ``conditional`` ones."""

    def __init__(self, lifetimes: Sequence[Lifetime], length: int) -> None:
        self.length = length
        self.stored = tuple(x for x in lifetimes if x.kind == "stored")
        self.conditional = tuple(x for x in lifetimes if x.kind != "stored")
        self._nbytes = np.array([x.nbytes for x in self.stored], float)
        self._variable = np.array([x.variable for x in self.stored], np.int64)
        self._first = np.array([x.first for x in self.stored], np.int64)
        self._last = np.array([x.last for x in self.stored], np.int64)

    def of(self, *kinds: Kind) -> Iterator[Lifetime]:
        """The conditional lifetimes of these kinds."""
        return (x for x in self.conditional if x.kind in kinds)

    def stored_at(self, point: int, variables: int) -> NDArray[np.float64]:
        """[variables + 1]: unsplit bytes of each variable's values stored at a point; last, of values without a variable."""
        at = (self._first <= point) & (self._last >= point)
        held = np.zeros(variables + 1)
        np.add.at(held, self._variable[at], self._nbytes[at])
        return held

    def changes(self, parts: NDArray[np.float64]) -> NDArray[np.float64]:
        """[length + 1]: the change in stored bytes at every point; ``parts`` is each variable's fraction on a device."""
        held = self._nbytes * parts[self._variable]
        change = np.zeros(self.length + 1)
        np.add.at(change, self._first, held)
        np.add.at(change, self._last + 1, -held)
        return change
