"""Dataflow in HLO: forwards from a result to its uses, backwards from a start index to its value on each device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.hlo.text import Computation, HloInstruction, Module

Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Value:
    """The result of an instruction; ``index`` picks an element where the result is a tuple."""

    computation: Computation
    instruction: HloInstruction
    index: int | None = None


@dataclass(frozen=True, slots=True)
class HloUse:
    """An instruction that reads a value at one operand."""

    computation: Computation
    instruction: HloInstruction
    operand: int


ESCAPES = "escapes"
"""In place of a use: the value enters or leaves a loop or a branch, or is the entry's result, and is not followed further."""


def uses(module: Module, value: Value) -> Iterator[Value | HloUse | str]:
    """One step forwards from a value, for each of its readers.

    A `Value` where the same data goes on under another name (tuples, fusions, calls, barriers, the later half of an async
    pair), a `HloUse` where an instruction computes with it, `ESCAPES` where it cannot be followed.
    """
    name = value.instruction.name
    for user in value.computation.users.get(name, ()):
        for number, operand in enumerate(user.operands):
            if operand == name:
                yield from _step(module, value, user, number)
    if value.computation.root is value.instruction:
        yield from _leave(module, value)


def _step(module: Module, value: Value, user: HloInstruction, number: int) -> Iterator[Value | HloUse | str]:
    here = value.computation
    match user.opcode:
        case "get-tuple-element":
            if value.index is None or value.index == int(user.attribute(r"index=(\d+)") or 0):
                yield Value(here, user)
        case "tuple":
            yield Value(here, user, number)
        case "opt-barrier" | "copy-start" | "copy-done" | "async-update" | "async-done":
            yield Value(here, user, value.index)
        case "fusion" | "call" | "async-start":
            inner = module.computations[user.called[0][1]]
            yield Value(inner, inner.parameters[number], value.index)
        case "while" | "conditional":
            yield ESCAPES
        case done if done.endswith("-done"):
            yield Value(here, user, value.index)
        case _:
            yield HloUse(here, user, number)


def _leave(module: Module, value: Value) -> Iterator[Value | str]:
    """The steps from a computation's result to each caller that passes it on; `ESCAPES` if there is none."""
    sites = module.callers.get(value.computation.name, ())
    if not sites:
        yield ESCAPES
    for computation, instruction, _ in sites:
        if instruction.opcode in ("fusion", "call", "async-start"):
            yield Value(computation, instruction, value.index)
        else:
            yield ESCAPES


def source(module: Module, value: Value) -> Value | None:
    """One step backwards: the value that a parameter, a tuple element, a call or a barrier stands for.

    A loop's parameter stands for its initial value only where the loop leaves that element unchanged. None where the
    instruction computes, or where its source is unknown.
    """
    here, at = value.computation, value.instruction
    match at.opcode:
        case "get-tuple-element":
            return Value(here, here.instructions[at.operands[0]], int(at.attribute(r"index=(\d+)") or 0))
        case "tuple" if value.index is not None:
            return Value(here, here.instructions[at.operands[value.index]])
        case "opt-barrier":
            return Value(here, here.instructions[at.operands[0]], value.index)
        case "fusion" | "call":
            inner = module.computations[at.called[0][1]]
            return Value(inner, inner.root, value.index)
        case "while" if value.index is not None and _unchanged(module, at, value.index):
            return Value(here, here.instructions[at.operands[0]], value.index)
        case "parameter":
            return _argument(module, value)
        case _:
            return None


def _argument(module: Module, value: Value) -> Value | None:
    sites = module.callers.get(value.computation.name, ())
    if len(sites) != 1:
        return None
    computation, call, _ = sites[0]
    number = int(value.instruction.inner)
    if call.opcode == "while":
        if value.index is None or not _unchanged(module, call, value.index):
            return None
    elif call.opcode == "conditional":
        number = 1 + [name for _, name in call.called].index(value.computation.name)
    elif call.opcode not in ("fusion", "call"):
        return None
    return Value(computation, computation.instructions[call.operands[number]], value.index)


def _unchanged(module: Module, loop: HloInstruction, index: int) -> bool:
    """Whether the body of a loop returns this element of its state unchanged."""
    body = module.computations[dict(loop.called)["body"]]
    if body.root.opcode != "tuple":
        return False
    back = body.instructions[body.root.operands[index]]
    return (
        back.opcode == "get-tuple-element"
        and back.attribute(r"index=(\d+)") == str(index)
        and body.instructions[back.operands[0]].opcode == "parameter"
    )


class DeviceValues:
    """Integers that depend only on the device: partition-id, tables of constants, and arithmetic on them."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._memo: dict[Value, Array | None] = {}

    def of(self, value: Value) -> Array | None:
        """The value on every device, [devices, *shape]; None where it depends on data, a loop or an unknown instruction."""
        for part in reversed(self._cone(value)):
            if part not in self._memo:
                self._memo[part] = self._compute(part)
        return self._memo[value]

    def varies(self, value: Value) -> bool:
        """Whether a value depends on the device's number, as far as its definition can be followed."""
        return any(part.instruction.opcode in ("partition-id", "replica-id") for part in self._cone(value))

    def _cone(self, value: Value) -> list[Value]:
        """A value and all that it depends on, each before its own inputs; without recursion, because chains may be long."""
        order: list[Value] = []
        todo: list[tuple[Value, bool]] = [(value, False)]
        seen: set[Value] = set()
        while todo:
            part, finished = todo.pop()
            if finished:
                order.append(part)
            elif part not in seen:
                seen.add(part)
                todo.append((part, True))
                todo += [(operand, False) for operand in self._inputs(part)]
        return order[::-1]

    def _inputs(self, value: Value) -> list[Value]:
        before = source(self._module, value)
        here = value.computation
        return [before] if before else [Value(here, here.instructions[name]) for name in value.instruction.operands]

    def _compute(self, value: Value) -> Array | None:
        at = value.instruction
        if (before := source(self._module, value)) is not None:
            return self._memo[before]
        if at.is_tuple or not re.match(r"pred|[su]\d", at.shape.dtype):
            return None
        leaf = self._leaf(at)
        if leaf is not None:
            return leaf
        known = [operand for operand in map(self._memo.get, self._inputs(value)) if operand is not None]
        return _apply(at, known) if known and len(known) == len(at.operands) else None

    def _leaf(self, at: HloInstruction) -> Array | None:
        devices = np.arange(self._module.num_devices)
        match at.opcode:
            case "partition-id":
                return devices % self._module.num_partitions
            case "replica-id":
                return devices // self._module.num_partitions
            case "constant":
                literal = _literal(at)
                return None if literal is None else np.broadcast_to(literal, (len(devices), *literal.shape))
            case _:
                return None


def _literal(at: HloInstruction) -> Array | None:
    """The elements of a constant of integers or booleans; None where the text leaves them out."""
    words = re.findall(r"-?\d+|true|false", at.inner)
    if len(words) != at.shape.size:
        return None
    numbers = [int(word == "true") if word in ("true", "false") else int(word) for word in words]
    return np.array(numbers, dtype=np.int64).reshape(at.shape.dims)


def _apply(at: HloInstruction, operands: list[Array]) -> Array | None:
    """The result of one instruction on all devices; None for an opcode without a rule here."""
    match at.opcode, operands:
        case opcode, [x, y] if opcode in _BINARY:
            return _BINARY[opcode](x, y)
        case "compare", [x, y]:
            relation = _RELATIONS.get(at.attribute(r"direction=(\w+)") or "")
            return None if relation is None else relation(x, y).astype(np.int64)
        case "clamp", [low, x, high]:
            return np.minimum(np.maximum(x, low), high)
        case "select", [which, x, y]:
            return np.where(which, x, y)
        case "negate", [x]:
            return -x
        case "convert" | "copy", [x]:
            return x
        case "reshape" | "bitcast", [x]:
            return _reshaped(at, x)
        case "broadcast", [x]:
            return _broadcast(at, x)
        case "slice", [x]:
            return _slice(at, x)
        case "dynamic-slice", [table, *starts]:
            return _pick(at, table, starts)
        case _:
            return None


def _quotient(x: Array, y: Array) -> Array:
    """Division that rounds towards zero, as in HLO."""
    return (np.abs(x) // np.maximum(np.abs(y), 1)) * np.sign(x) * np.sign(y)


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": _quotient,
    "remainder": lambda x, y: x - _quotient(x, y) * y,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shift-left": np.left_shift,
    "shift-right-logical": np.right_shift,
    "shift-right-arithmetic": np.right_shift,
}

_RELATIONS: dict[str, Callable[[Array, Array], NDArray[np.bool_]]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


def _pick(at: HloInstruction, table: Array, starts: list[Array]) -> Array:
    sizes = at.shape.dims
    rows: list[Array] = []
    for device, row in enumerate(table):
        firsts = [min(max(int(s[device]), 0), full - n) for s, full, n in zip(starts, row.shape, sizes, strict=True)]
        rows.append(row[tuple(slice(b, b + n) for b, n in zip(firsts, sizes, strict=True))])
    return np.stack(rows)


def _reshaped(at: HloInstruction, x: Array) -> Array | None:
    """The elements in the result's shape; None unless both shapes have at most one dim larger than one, since their order may
    change.
    """
    flat = sum(d > 1 for d in x.shape[1:]) <= 1 and sum(d > 1 for d in at.shape.dims) <= 1
    return x.reshape((x.shape[0], *at.shape.dims)) if flat else None


def _broadcast(at: HloInstruction, x: Array) -> Array:
    dims = [int(d) for d in (at.attribute(r"dimensions=\{([\d,]*)\}") or "").split(",") if d]
    shape = [1] * len(at.shape.dims)
    for size, dim in zip(x.shape[1:], dims, strict=True):
        shape[dim] = size
    return np.broadcast_to(x.reshape((x.shape[0], *shape)), (x.shape[0], *at.shape.dims))


def _slice(at: HloInstruction, x: Array) -> Array:
    spans = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", at.attribute(r"slice=\{([^}]*)\}") or "")
    return x[(slice(None), *(slice(int(low), int(high), int(step or 1)) for low, high, step in spans))]
