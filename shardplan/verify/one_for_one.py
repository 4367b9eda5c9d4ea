"""Matches each planned collective to its instruction in a compiled program, by the named scope of both.

XLA leaves out a collective if another one has the same result, or if nothing needs it, by rules of arithmetic that no schedule
repeats. Such a collective was handed to XLA exactly as planned, and is *folded* in the compiled program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardplan.collectives.issued import Send
from shardplan.cost import priced_bytes, wire_bytes
from shardplan.emit.manual import OWN
from shardplan.hlo.meter import HloCollective, operands
from shardplan.ir import Collective
from shardplan.verify.emitted import Call

_DISABLED = "cpu-all-reduce-combiner,cse_barrier_expander,while-loop-invariant-code-motion,small-while-loop-hoisting"
UNTOUCHED = {"xla_disable_hlo_passes": _DISABLED}
"""Options that keep XLA's CPU compiler from merging collectives, undoing barriers, moving gathers out of loops, and making
kernels of whole loops, in which it cannot compile a barrier."""

_SCOPE = re.compile(r"(?:^|/)((?:(?:move|bundle)\d+\.\d+)|(?:reblock\d+\.\d+)|(?:halo\d+\.\d+\.\d+\.(?:lo|hi)))(?=/|$)")


@dataclass(frozen=True, slots=True)
class MatchedCollective:
    """A collective of the plan, of the compiled program, or both: ``nbytes`` of a device's operand, run ``times`` a step."""

    scope: str
    kind: Collective
    groups: int
    nbytes: int
    times: float
    planned: int
    compiled: int
    line: str
    folded: int = 0

    @property
    def matched(self) -> bool:
        """Whether the plan and the program agree, except for what XLA folded."""
        return self.planned == self.compiled + self.folded

    @property
    def wire_bytes(self) -> float:
        """The bytes that a device sends in a step as compiled, ring convention."""
        return self._each_bytes * self.times * self.compiled

    @property
    def planned_bytes(self) -> float:
        """The bytes that a device sends in a step as planned, without what XLA folded, ring convention."""
        return self._each_bytes * self.times * (self.planned - self.folded)

    @property
    def _each_bytes(self) -> float:
        return wire_bytes(self.kind, self.groups or 2, priced_bytes(self.kind, self.groups, self.nbytes))

    @property
    def json(self) -> dict[str, Any]:
        """The row as JSON values."""
        return {
            "kind": self.kind,
            "groups": self.groups,
            "bytes": self.nbytes,
            "times": self.times,
            "planned": self.planned,
            "compiled": self.compiled,
            "folded": self.folded,
            "scope": self.scope,
            "source": self.line,
        }


def one_for_one(planned: Sequence[Send], hlo_text: str) -> tuple[MatchedCollective, ...]:
    """The collectives of plan and program in the order of the plan, then those that only the program has.

    A loop that is compiled unrolled has each collective several times, with as many runs in total. A loop of unknown trip count
    may have a known one once compiled: its collectives are counted as often as the program runs them.
    """
    lines = {s.scope: s.line for s in planned}
    open_ended = {s.scope for s in planned if not s.known}
    ours = _by_call([_planned(s) for s in planned])
    theirs = _by_call([_compiled(c, n, ours) for c, n in operands(hlo_text) if f"/{OWN}/" not in c.op_name])
    pairs: list[MatchedCollective] = []
    for call in dict.fromkeys((*ours, *theirs)):
        line = str(lines.get(call[0], ""))
        rows = _rows(ours.get(call, Counter()), theirs.get(call, Counter()), open_ended=call[0] in open_ended)
        pairs += [MatchedCollective(*call, times=times, planned=n, compiled=m, line=line) for times, n, m in rows]
    return tuple(pairs)


def _by_call(found: Sequence[tuple[Call, float]]) -> dict[Call, Counter[float]]:
    """For each call, the number of its places by how often they run."""
    result: dict[Call, Counter[float]] = {}
    for call, times in found:
        result.setdefault(call, Counter())[times] += 1
    return result


def _rows(ours: Counter[float], theirs: Counter[float], *, open_ended: bool) -> list[tuple[float, int, int]]:
    """(times, planned, compiled) for one call."""
    runs = sum(times * n for times, n in theirs.items())
    if open_ended and theirs:
        return [(runs / theirs.total(), ours.total(), theirs.total())]
    if sum(times * n for times, n in ours.items()) == runs:
        return [(times, n, n) for times, n in ours.items()]
    return [(times, ours[times], theirs[times]) for times in dict.fromkeys((*ours, *theirs))]


def _planned(send: Send) -> tuple[Call, float]:
    return (send.scope, send.kind, _ways(send.groups, send.kind), send.nbytes), send.times


def folded(pairs: Sequence[MatchedCollective], emitted: Mapping[Call, int]) -> tuple[MatchedCollective, ...]:
    """The pairs, with the count that XLA folded for those that were ``emitted`` as planned (see `shardplan.verify.emitted`)."""
    return tuple(
        replace(p, folded=max(p.planned - p.compiled, 0))
        if emitted.get((p.scope, p.kind, p.groups, p.nbytes), 0) == p.planned
        else p
        for p in pairs
    )


def _ways(groups: Sequence[Sequence[int]], kind: Collective) -> int:
    return 0 if kind == Collective.PERMUTE else len(groups[0])


def _compiled(collective: HloCollective, text_bytes: int, ours: Mapping[Call, Any]) -> tuple[Call, float]:
    """A compiled collective. If its width in the text is as planned, it was not widened, though it may look so."""
    scopes = _SCOPE.findall(collective.op_name)
    ways = 0 if collective.kind == Collective.PERMUTE else collective.group_size
    scope = scopes[-1] if scopes else ""
    narrow: Call = (scope, collective.kind, ways, collective.operand_bytes)
    text: Call = (scope, collective.kind, ways, text_bytes)
    return text if narrow not in ours and text in ours else narrow, float(collective.trips)
