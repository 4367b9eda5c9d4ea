"""Each planned collective beside its instruction in a compiled program: they are told by the named scope that both stand in.

XLA leaves out a collective whose result it finds to be that of another one, or not to be needed: by rules of arithmetic that no
schedule repeats. Such a one was handed to XLA exactly as planned, and is *folded* in the compiled program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardplan.emit.hlo import HloCollective, Kind, operands, wire_bytes
from shardplan.schedule import Send

_DISABLED = "cpu-all-reduce-combiner,cse_barrier_expander,while-loop-invariant-code-motion,small-while-loop-hoisting"
UNTOUCHED = {"xla_disable_hlo_passes": _DISABLED}
"""Options that keep XLA's CPU compiler from merging collectives, undoing barriers, moving gathers out of loops, and making
kernels of whole loops, in which it cannot compile a barrier."""

_SCOPE = re.compile(r"(?:^|/)((?:(?:move|bundle)\d+\.\d+)|(?:reblock\d+\.\d+)|(?:halo\d+\.\d+\.\d+\.(?:lo|hi)))(?=/|$)")


_Key = tuple[str, Kind, int, int, float]


@dataclass(frozen=True, slots=True)
class Pair:
    """A collective of the plan, of the compiled program, or both: bytes are a device's operand's, each ``times`` a step."""

    scope: str
    kind: Kind
    groups: int
    nbytes: int
    times: float
    planned: int
    compiled: int
    line: str
    folded: int = 0

    @property
    def matched(self) -> bool:
        """Whether the plan and the program agree, but for what XLA folded."""
        return self.planned == self.compiled + self.folded

    @property
    def wire_bytes(self) -> float:
        """What a device sends in a step as compiled, ring convention."""
        return self._each_bytes * self.times * self.compiled

    @property
    def planned_bytes(self) -> float:
        """What a device sends in a step as planned, ring convention."""
        return self._each_bytes * self.times * self.planned

    @property
    def _each_bytes(self) -> float:
        result = self.nbytes * self.groups if self.kind == "all-gather" else self.nbytes
        return wire_bytes(self.kind, self.nbytes, result, self.groups or 2)

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


def one_for_one(planned: Sequence[Send], hlo_text: str) -> tuple[Pair, ...]:
    """Every collective of the plan and of the program in the order of the plan, then what the program has beside it."""
    lines = {s.scope: s.line for s in planned}
    ours = Counter((s.scope, s.kind, _ways(s.groups, s.kind), s.nbytes, s.times) for s in planned)
    theirs: Counter[_Key] = Counter()
    for collective, text_bytes in operands(hlo_text):
        narrow, text = _key(collective), _key(replace(collective, operand_bytes=text_bytes))
        # one of the width that was planned was not widened, though it may look so
        theirs[text if narrow not in ours and text in ours else narrow] += 1
    rows = [*ours, *(key for key in theirs if key not in ours)]
    return tuple(Pair(*key, planned=ours[key], compiled=theirs[key], line=str(lines.get(key[0], ""))) for key in rows)


def folded(pairs: Sequence[Pair], emitted: Mapping[tuple[str, Kind, int, int], int]) -> tuple[Pair, ...]:
    """The pairs, with what XLA folded of those that were ``emitted`` as planned (see `shardplan.emit.emitted`)."""
    return tuple(
        replace(p, folded=max(p.planned - p.compiled, 0))
        if emitted.get((p.scope, p.kind, p.groups, p.nbytes), 0) == p.planned
        else p
        for p in pairs
    )


def _ways(groups: Sequence[Sequence[int]], kind: str) -> int:
    return 0 if kind == "collective-permute" else len(groups[0])


def _key(collective: HloCollective) -> _Key:
    scopes = _SCOPE.findall(collective.op_name)
    ways = 0 if collective.kind == "collective-permute" else collective.group_size
    return scopes[-1] if scopes else "", collective.kind, ways, collective.operand_bytes, float(collective.trips)
