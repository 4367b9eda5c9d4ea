"""Recognises two transformations of collectives by XLA's CPU compiler, so that the meter can undo them.

It widens types that it has no kernels for: a bfloat16 collective becomes convert, float32 collective, convert. It has no pass
that turns an all-reduce into a reduce-scatter where each device keeps only its own slice. Both change the bytes on the wire, and
neither happens on the accelerators that a plan is for.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from shardplan.hlo.flow import DeviceValues, HloUse, Value, source, uses
from shardplan.hlo.groups import Groups
from shardplan.hlo.text import Computation, HloInstruction, Module, Shape, dtype_bits

# Data movement: an element of the result is an element of the first operand.
_MOVES = ("bitcast", "reshape", "transpose", "copy", "slice", "dynamic-slice", "reverse", "broadcast", "gather")

# One element of the result for one element of each operand, in the same place.
_ELEMENTWISE = frozenset(
    "abs add and atan2 cbrt ceil clamp compare convert copy cosine divide erf exponential exponential-minus-one floor imag "
    "is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt power real reduce-precision remainder "
    "round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sqrt "
    "subtract tan tanh xor".split()
)

# For each dim of a value, the stride of its elements in the all-reduce's operand; None where a reshape has mixed dims.
Strides = tuple[int | None, ...]

# The search for slices gives up after this many values; the collective then counts as an all-reduce.
_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class _Slice:
    """A slice that differs between devices.

    ``cut`` describes it in the coordinates of the all-reduce's operand: for each dim that is cut its stride there (None where a
    reshape has mixed dims), its size and the size kept. ``classes`` has for each device the starts of its slice; None where they
    are unknown. ``ways`` is the number of pieces that the sizes give.
    """

    cut: tuple[tuple[int | None, int, int], ...]
    classes: tuple[tuple[int, ...], ...] | None
    ways: int


class Undo:
    """Answers about the collectives of one module."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._devices = DeviceValues(module)

    def bits(self, computation: Computation, at: HloInstruction, number: int, shape: Shape) -> int:
        """Bits of one element of an operand before the compiler widened it; those of ``shape`` where it did not.

        Names tell the compiler's own conversions from the user's, which are called ``convert_element_type``.
        """
        wide = dtype_bits(shape.dtype) or 0
        if wide <= 8:
            return wide
        result = self._result(computation, at, number)
        back = self._narrowed(result)
        if back is not None and back < wide:
            return back
        operand = Value(computation, computation.instructions[at.operands[number]])
        before = self._widened(operand)
        if before is not None and before < wide:
            return before
        # The pass that promotes reductions marks the reducer's name. A combined collective may mix promoted operands with others,
        # so the mark counts only for a single operand. Where sums were reassociated, a wider sum was intended.
        reduction = at.attribute(r"to_apply=%?([\w.\-]+)") or ""
        promoted = reduction.endswith("_promoted") and not reduction.endswith("_reassoc_promoted")
        return wide // 2 if promoted and len(at.operands) == 1 else wide

    def scattered(self, computation: Computation, at: HloInstruction, number: int, groups: Groups) -> int:
        """The number of pieces that an all-reduce really scatters its result into, in each group; 1 where it does not.

        It does where every path from the result ends in a dynamic-slice that gives the devices of a group different pieces,
        each piece to equally many devices, and all paths slice alike.
        """
        shape = computation.instructions[at.operands[number]].shape
        slices = self._slices(self._result(computation, at, number), shape)
        if not slices or len(set(slices)) > 1:
            return 1
        cut = slices[0]
        size = len(groups[0])
        if any(len(group) != size for group in groups):
            return 1
        if cut.classes is None:
            return cut.ways if size % cut.ways == 0 else 1
        counts = [Counter(cut.classes[device] for device in group) for group in groups]
        ways = len(counts[0])
        even = all(len(c) == ways and set(c.values()) == {size // ways} for c in counts)
        return ways if even and size % ways == 0 else 1

    def cut_again(self, gathered: Value) -> bool:
        """Whether every reader of a gathered value cuts it into pieces that differ between devices."""
        return bool(self._slices(gathered, gathered.instruction.leaves[-1]))

    def _result(self, computation: Computation, at: HloInstruction, number: int) -> Value:
        """The result that belongs to an operand."""
        return Value(computation, at, number if len(at.operands) > 1 else None)

    def _narrowed(self, value: Value) -> int | None:
        """Bits of the narrow type that every reader converts a result back to; None where a reader does not."""
        bits: set[int] = set()
        todo, seen = [value], {value}
        while todo:
            for step in uses(self._module, todo.pop()):
                if isinstance(step, HloUse) and step.instruction.opcode == "convert" and not _is_from_user(step.instruction):
                    bits.add(dtype_bits(step.instruction.shape.dtype) or 0)
                    continue
                if isinstance(step, HloUse) and step.operand == 0 and step.instruction.opcode in _MOVES:
                    step = Value(step.computation, step.instruction)
                if not isinstance(step, Value):
                    return None
                if step not in seen:
                    seen.add(step)
                    todo.append(step)
        return bits.pop() if len(bits) == 1 else None

    def _widened(self, value: Value | None) -> int | None:
        """Bits of the narrow type that an operand was converted from just before."""
        while value is not None:
            at = value.instruction
            if at.opcode == "convert":
                narrow = value.computation.instructions[at.operands[0]].shape
                return dtype_bits(narrow.dtype) if _family(narrow) == _family(at.shape) and not _is_from_user(at) else None
            if at.opcode in _MOVES:
                value = Value(value.computation, value.computation.instructions[at.operands[0]])
            else:
                value = source(self._module, value)
        return None

    def _slices(self, value: Value, shape: Shape) -> list[_Slice] | None:
        """The slices at which all paths from a value end; None where a path ends otherwise."""
        pieces: list[_Slice] = []
        todo: list[tuple[Value, Strides]] = [(value, _row_major(shape.dims))]
        seen: set[tuple[Value, Strides]] = set(todo)
        while todo and len(seen) < _STEPS:
            value, strides = todo.pop()
            for step in uses(self._module, value):
                if isinstance(step, str):
                    return None
                if isinstance(step, HloUse):
                    if step.instruction.opcode == "dynamic-slice" and step.operand == 0:
                        cut = self._slice(step, strides)
                        if cut is None:
                            return None
                        pieces.append(cut)
                        continue
                    moved = _moved(step, strides)
                    if moved is None:
                        return None
                    successor = (Value(step.computation, step.instruction), moved)
                else:
                    successor = (step, strides)
                if successor not in seen:
                    seen.add(successor)
                    todo.append(successor)
        return None if todo else pieces

    def _slice(self, use: HloUse, strides: Strides) -> _Slice | None:
        """The piece that a dynamic-slice keeps on each device; None where it is the same on all devices."""
        here, at = use.computation, use.instruction
        full, kept = here.instructions[at.operands[0]].shape.dims, at.shape.dims
        dims = [d for d in range(len(full)) if kept[d] < full[d]]
        starts = {d: Value(here, here.instructions[at.operands[1 + d]]) for d in dims}
        varying = [d for d in dims if self._devices.varies(starts[d])]
        if not varying:
            return None
        cut = tuple((strides[d], full[d], kept[d]) for d in varying)
        ways = math.prod(full[d] // kept[d] for d in varying)
        columns: list[list[int]] = []
        for d in varying:
            known = self._devices.of(starts[d])
            if known is None:
                return _Slice(cut, None, ways)
            columns.append([min(max(int(start), 0), full[d] - kept[d]) for start in known.ravel()])
        return _Slice(cut, tuple(zip(*columns, strict=True)), ways)


def _family(shape: Shape) -> str:
    return "float" if shape.dtype.startswith(("f", "bf")) else shape.dtype.rstrip("0123456789")


def _is_from_user(convert: HloInstruction) -> bool:
    return convert.op_name.endswith("convert_element_type")


def _row_major(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(dims[d + 1 :]) for d in range(len(dims)))


def _moved(use: HloUse, strides: Strides) -> Strides | None:
    """The strides of a result's dims in the all-reduce's operand; None unless it is elementwise or a known move."""
    at = use.instruction
    if at.opcode in _ELEMENTWISE:
        return strides if at.shape.dims == use.computation.instructions[at.operands[use.operand]].shape.dims else None
    if use.operand:
        return None
    before = use.computation.instructions[at.operands[0]].shape
    match at.opcode:
        case "transpose":
            order = [int(d) for d in (at.attribute(r"dimensions=\{([\d,]*)\}") or "").split(",") if d]
            return tuple(strides[d] for d in order)
        case "pad":
            return strides
        case "reshape":
            return _reshaped(before.dims, strides, at.shape.dims)
        case "bitcast":
            # The bytes stay: a reshape between the two layouts' orders of dims.
            outer_first = tuple(reversed(before.minor_to_major))
            target = tuple(reversed(at.shape.minor_to_major))
            after = _reshaped(
                tuple(before.dims[d] for d in outer_first),
                tuple(strides[d] for d in outer_first),
                tuple(at.shape.dims[d] for d in target),
            )
            return tuple(after[target.index(d)] for d in range(len(target)))
        case _:
            return None


def _reshaped(dims: tuple[int, ...], strides: Strides, target: tuple[int, ...]) -> Strides:
    """The strides after a reshape in row-major order; None for a dim that merges dims whose strides do not fit together."""
    result: list[int | None] = []
    source_at = _row_major(dims)
    for place, size in zip(_row_major(target), target, strict=True):
        # The source dims whose elements this dim runs over.
        inside = [d for d in range(len(dims)) if dims[d] > 1 and source_at[d] < place * size and place < source_at[d] * dims[d]]
        known = [(strides[d], source_at[d]) for d in inside]
        whole = [s * place // at for s, at in known if s is not None and (s * place) % at == 0]
        result.append(whole[0] if whole and len(whole) == len(known) and len(set(whole)) == 1 else None)
    return tuple(result)
