"""Ops that cost the same in the same variables, as the equal layers of a deep step do: one term stands for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardplan.search.problem.ops import Ops
from shardplan.search.problem.pricing import Limits
from shardplan.search.problem.summands import Summand


@dataclass(frozen=True, slots=True)
class Classes:
    """Which ops of a problem cost the same. ``first[n]`` is the op that stands for op n. ``summands`` are the summands of the
    problem, without ops that another one stands for, each with the number of summands that it counts for. ``limits`` are the
    limits under which ops are told apart (None: no limits tell them apart).
    """

    first: Mapping[int, int]
    summands: Sequence[tuple[Summand, int]]
    limits: Limits | None


class OpClasses:
    """The classes of the ops of a problem, under any limits; worked out once for each."""

    def __init__(self, summands: Sequence[Summand], ops: Ops) -> None:
        self._summands, self._ops = summands, ops
        self._under: dict[int, Classes] = {}

    def under(self, limits: Limits | None) -> Classes:
        """The classes where these limits hold: ops are alike only if they may take the same strategies."""
        if limits is not None and not limits.cuts:
            limits = None  # all ops treat the groups alike
        found = self._under.get(id(limits))  # the classes keep the limits alive, so no id is reused
        if found is None:
            first: dict[tuple[object, ...], int] = {}
            of: dict[int, int] = {}
            for s in self._summands:
                if s.kind == "op":
                    allowed = None if limits is None else limits.of(s.at)
                    of[s.at] = first.setdefault((s.scope, self._ops.key(s.at), allowed), s.at)
            times = Counter(of.values())
            rows = [(s, n) for s in self._summands if (n := times[s.at] if s.kind == "op" else 1)]
            found = self._under[id(limits)] = Classes(of, rows, limits)
        return found
