"""What XLA's partitioner adds to a step: the array behind each compiled collective, its source line, and arrays that are gathered
whole and cut again.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.hlo.flow import HloUse, Value, source, uses
from shardplan.hlo.meter import HloCollective, collectives_of, pieces_of
from shardplan.hlo.text import Module, parse_module
from shardplan.hlo.undo import Undo
from shardplan.ir import Collective

_ARGUMENT = re.compile(r"leaves\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective of a compiled program: ``argument`` is the leaf that it moves as it comes, -1 for other values.

    ``op_name`` is JAX's name of the op, ``line`` the user's line ("" if unknown).
    ``cut_again``: all of its readers cut the gathered result into pieces that differ between devices, so it replicates a value to
    partition it in another way.
    """

    collective: HloCollective
    argument: int
    op_name: str
    line: str
    cut_again: bool


def sent_by(hlo_text: str) -> list[Sent]:
    """The collectives of a program whose step takes ``*leaves``, in the order of the text, as `shardplan.hlo.measure` counts."""
    module = parse_module(hlo_text)
    undo, result = Undo(module), list[Sent]()
    for computation, instruction, collective in collectives_of(module):
        value = Value(computation, instruction)
        named = _ARGUMENT.fullmatch(_op_name(module, Value(computation, computation.instructions[instruction.operands[0]])))
        again = collective.kind == Collective.ALL_GATHER and len(instruction.operands) == 1 and undo.cut_again(value)
        line = module.lines.get(instruction.frame, "") or _line_of_reader(module, value)
        for piece in pieces_of(undo, computation, instruction, collective):
            result.append(Sent(piece, int(named[1]) if named else -1, instruction.op_name, line, again))
    return result


def _op_name(module: Module, value: Value | None) -> str:
    """The name of the op that made a value, behind what only moves or converts it."""
    while value is not None:
        at = value.instruction
        if at.opcode == "parameter" and value.computation.name == module.entry:
            return at.op_name
        if at.opcode in ("copy", "convert", "bitcast", "reshape", "transpose") and at.operands:
            value = Value(value.computation, value.computation.instructions[at.operands[0]])
        else:
            value = source(module, value)
    return ""


def _line_of_reader(module: Module, value: Value) -> str:
    """The line of the nearest reader that has one."""
    todo, seen = deque([value]), {value}
    while todo:
        for use in uses(module, todo.popleft()):
            if isinstance(use, str):
                continue
            line = module.lines.get(use.instruction.frame, "")
            if line:
                return line
            after = Value(use.computation, use.instruction) if isinstance(use, HloUse) else use
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return ""


def unforeseen(sent: Sequence[Sent], planned: Sequence[tuple[Collective, float, float]]) -> list[tuple[Sent, float]]:
    """(a collective that was not planned, how often a step runs it beyond the plan), in order.

    ``planned`` are (kind, wire bytes of one execution, times). A compiled collective and a planned one are the same if they are
    of one kind and send as much.
    """
    left: dict[tuple[Collective, int], float] = {}
    for kind, wire_bytes, times in planned:
        key = kind, round(wire_bytes)
        left[key] = left.get(key, 0.0) + times
    result: list[tuple[Sent, float]] = []
    for one in sent:
        key = one.collective.kind, round(one.collective.wire_bytes)
        met = min(left.get(key, 0.0), one.collective.trips)
        left[key] = left.get(key, 0.0) - met
        if one.collective.trips > met and one.collective.wire_bytes > 0:
            result.append((one, one.collective.trips - met))
    return result
