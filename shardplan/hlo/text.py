"""HLO text as data: a module of computations of instructions, and how often each computation runs.

The parser reads only what the meter needs: names, shapes, opcodes, operands, calls and trip counts. The grammar is that of
``compiled.as_text()``, with or without ``%`` before names and types before operands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shardplan.errors import HloError
from shardplan.hlo.lines import frame_lines

# Bits of one element; the many forms of f8 and f4 are matched by prefix.
_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64,
    "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip
_LEAF = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([\d,]*))?")


def dtype_bits(dtype: str) -> int | None:
    """Bits of one element of an HLO dtype, None for an unknown name."""
    if dtype in _BITS:
        return _BITS[dtype]
    return 8 if dtype.startswith("f8") else 4 if dtype.startswith("f4") else None


@dataclass(frozen=True, slots=True)
class Shape:
    """An array shape. ``layout`` lists the dims from minor to major; None where the text gives none."""

    dtype: str
    dims: tuple[int, ...]
    layout: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes, elements smaller than a byte packed."""
        return (self.size * (dtype_bits(self.dtype) or 0) + 7) // 8

    @property
    def minor_to_major(self) -> tuple[int, ...]:
        """The layout, row-major where none is given."""
        return tuple(reversed(range(len(self.dims)))) if self.layout is None else self.layout


@dataclass(frozen=True, eq=False)
class HloInstruction:
    """One line of a computation. ``inner`` is the text between the opcode's parentheses, ``attributes`` what follows them."""

    name: str
    type_text: str
    opcode: str
    inner: str
    attributes: str
    is_root: bool
    line: int
    text: str

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands; none for a constant or a parameter."""
        if self.opcode in ("constant", "parameter", "iota") or not self.inner.strip():
            return ()
        if "%" in self.inner:
            return tuple(re.findall(r"%([\w.\-]+)", self.inner))
        return tuple(piece.split()[-1] for piece in _split_top(self.inner))

    @cached_property
    def leaves(self) -> tuple[Shape, ...]:
        """The array shapes of the result, tuples flattened."""
        return tuple(self._leaf(m) for m in _LEAF.finditer(self.type_text))

    @property
    def is_tuple(self) -> bool:
        """Whether the result is a tuple."""
        return self.type_text.startswith("(")

    @property
    def shape(self) -> Shape:
        """The shape of an array result."""
        if self.is_tuple or len(self.leaves) != 1:
            raise self.error("expected an array result")
        return self.leaves[0]

    def _leaf(self, match: re.Match[str]) -> Shape:
        dtype, dims, layout = match.groups()
        if dtype_bits(dtype) is None:
            raise self.error(f"unknown element type {dtype!r}")
        sizes = [d.strip().removeprefix("<=") for d in dims.split(",") if d.strip()]
        if not all(d.isdigit() for d in sizes):
            raise self.error("a dim without a static bound")
        order = tuple(int(d) for d in layout.split(",") if d) if layout is not None else None
        return Shape(dtype, tuple(int(d) for d in sizes), order)

    def error(self, message: str) -> HloError:
        """An error that names this line."""
        return HloError(message, line=self.line, text=self.text)

    def attribute(self, pattern: str) -> str | None:
        """The first group of the pattern's first match in the attributes; None without a match."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None

    @property
    def op_name(self) -> str:
        """The name stack of the source operation, empty where there is none."""
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"') or ""

    @property
    def frame(self) -> int:
        """The number of the stack frame that it comes from; 0 for none."""
        return int(self.attribute(r"stack_frame_id=(\d+)") or 0)

    @cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """The (role, computation) of each call; a role is ``calls``, ``to_apply``, ``body``, ``condition`` or ``branch``."""
        if "=%" not in self.attributes and not _CALL.search(self.attributes):
            return ()
        plain = _QUOTED.sub('""', self.attributes)
        result: list[tuple[str, str]] = []
        for role, single, listed in _CALL.findall(plain):
            names = [single] if single else [n.strip().removeprefix("%") for n in listed.split(",") if n.strip()]
            result += [("branch" if "computation" in role else role, name) for name in names]
        return tuple(result)


_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALL = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(?:%?([\w.\-]+)|\{([^}]*)\})"
)


@dataclass(frozen=True, eq=False)
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    instructions: Mapping[str, HloInstruction]

    @cached_property
    def root(self) -> HloInstruction:
        """The instruction whose result is the computation's."""
        return next((i for i in self.instructions.values() if i.is_root), list(self.instructions.values())[-1])

    @cached_property
    def parameters(self) -> dict[int, HloInstruction]:
        """Parameters by number."""
        return {int(i.inner): i for i in self.instructions.values() if i.opcode == "parameter"}

    @cached_property
    def users(self) -> Mapping[str, tuple[HloInstruction, ...]]:
        """The instructions that read each name, each once."""
        result: dict[str, list[HloInstruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                result.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in result.items()}


@dataclass(frozen=True, slots=True)
class RunCount:
    """How often a computation runs in one step; ``known`` is false if an unknown trip count of a loop was taken as one."""

    times: int
    known: bool = True


@dataclass(frozen=True, eq=False)
class Module:
    """A parsed module. ``lines`` are the user's lines of its stack frames, by number: ``file:line (function)``."""

    computations: Mapping[str, Computation]
    entry: str
    num_partitions: int
    replica_count: int
    lines: Mapping[int, str] = field(default_factory=dict[int, str])

    @property
    def num_devices(self) -> int:
        """Devices that run the module."""
        return self.num_partitions * self.replica_count

    @cached_property
    def callers(self) -> Mapping[str, tuple[tuple[Computation, HloInstruction, str], ...]]:
        """The call sites of each computation: (the caller's computation, the instruction, the role)."""
        result: dict[str, list[tuple[Computation, HloInstruction, str]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                # The later halves of an async call repeat the name; the body runs once.
                if instruction.opcode in ("async-update", "async-done"):
                    continue
                for role, name in instruction.called:
                    result.setdefault(name, []).append((computation, instruction, role))
        return {name: tuple(sites) for name, sites in result.items()}

    @cached_property
    def runs(self) -> Mapping[str, RunCount]:
        """How often each computation runs: the product of the trip counts around it, summed over its call sites.

        Every branch of a conditional counts as taken once. A loop of known trip count does not evaluate its condition: the
        runtime for GPUs counts by itself.
        """
        memo: dict[str, RunCount] = {self.entry: RunCount(1)}

        def count(name: str) -> RunCount:
            if name not in memo:
                parts = [_times(count(c.name), i, role) for c, i, role in self.callers.get(name, ())]
                memo[name] = RunCount(sum(p.times for p in parts), all(p.known for p in parts))
            return memo[name]

        for name in self.computations:
            count(name)
        return memo


def trip_count(loop: HloInstruction) -> int | None:
    """How often a while loop runs its body; None where the compiler does not know."""
    text = loop.attribute(r'known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
    return None if text is None else int(text)


def _times(outer: RunCount, call: HloInstruction, role: str) -> RunCount:
    if call.opcode != "while":
        return outer
    trips = trip_count(call)
    if trips is None:
        return RunCount(outer.times, known=False)
    return RunCount(0 if role == "condition" else outer.times * trips, outer.known)


_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_ASSIGNMENT = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")


def parse_module(text: str) -> Module:
    """HLO text -> `Module`. Raises `HloError` on text that is not HLO."""
    computations: dict[str, Computation] = {}
    entry, header = "", ""
    current: dict[str, HloInstruction] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("HloModule"):
            header = line
        elif current is not None and line.startswith("}"):
            current = None
        elif current is not None and (match := _ASSIGNMENT.match(line)):
            instruction = _instruction(match, number, line)
            current[instruction.name] = instruction
        elif current is None and (match := _HEADER.match(line)):
            current = {}
            computations[match.group(2)] = Computation(match.group(2), current)
            entry = match.group(2) if match.group(1) else entry
    if not entry:
        raise HloError("no ENTRY computation: pass the text of compiled.as_text()", line=1, text=text.partition("\n")[0])
    return Module(computations, entry, _count(header, "num_partitions"), _count(header, "replica_count"), frame_lines(text))


def _count(header: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", header)
    return int(match.group(1)) if match else 1


def _instruction(match: re.Match[str], number: int, line: str) -> HloInstruction:
    root, name, definition = match.groups()
    definition = re.sub(r"/\*.*?\*/", "", definition) if "/*" in definition else definition
    end = _closing(definition, 0) + 1 if definition.startswith("(") else definition.find(" ")
    opcode = _OPCODE.match(definition, end) if end > 0 else None
    close = _closing(definition, opcode.end() - 1) if opcode else -1
    if opcode is None or close < 0:
        raise HloError("not an instruction", line=number, text=line)
    inner = definition[opcode.end() : close]
    return HloInstruction(name, definition[:end], opcode.group(1), inner, definition[close + 1 :], bool(root), number, line)


def _closing(text: str, start: int) -> int:
    """The position at which the parenthesis at ``start`` closes; -1 if it does not."""
    depth = 0
    for match in re.compile(r'[()]|"(?:[^"\\]|\\.)*"').finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return -1


def _split_top(text: str) -> Iterator[str]:
    """The pieces between the commas outside all brackets."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]
