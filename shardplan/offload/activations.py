"""Activations in host memory between the forward and the backward pass.

A value leaves for host memory where the forward pass makes it, and comes back where the backward pass first reads it. In a scan
over layers, the slices of its stack do.

A step surely stores a value between its passes where the backward pass computes a block again from it (`jax.checkpoint`,
`shardplan.remat`), or where one loop hands it to another as a stack. Other values may be parts of kernels that nothing stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shardplan.ir import HOST_COPY, Op, Program, Where
from shardplan.remat.recomputed import changed_at, free, inner, program_at, readers
from shardplan.remat.scans import ScanOp, handed_over, renamed


@dataclass(frozen=True, slots=True)
class HostedValue:
    """A value of the program at ``where`` that lies in host memory between the passes: tensor ``tensor``.

    ``loop`` is (forward scan, backward scan), by their ids, where it is a stack that one hands to the other. ``source`` is the
    source line of the op that makes it, ``scope`` its name stack.
    """

    where: Where
    tensor: int
    loop: tuple[int, int] | None
    source: str
    scope: str


def activations(program: Program) -> tuple[HostedValue, ...]:
    """The values that may lie in host memory between the passes, in the order in which the forward pass makes them."""
    return tuple(value for where, body in inner(program) for value in _of(body, where))


def _of(program: Program, where: Where) -> Iterator[HostedValue]:
    read, steady = readers(program), free(program)
    for n, op in enumerate(program.ops):
        if op.backward:
            continue
        stacks: Mapping[int, int] = {}
        if op.control == "scan":
            stacks = {
                o: by for local, (by, _) in handed_over(program, ScanOp(op), read).items() for o in ScanOp(op).stacked(local)
            }
        for t in op.outputs:
            tensor = program.tensors[t]
            if t in steady or tensor.hosted or not tensor.shape or tensor.dtype.startswith("key"):
                continue
            if t in stacks:
                yield HostedValue(where, t, (op.id, stacks[t]), str(op.source), op.scope)
            elif op.control != "scan" and _entry(program, n, t, read):
                yield HostedValue(where, t, None, str(op.source), op.scope)


def _entry(program: Program, maker: int, t: int, read: Mapping[int, Sequence[int]]) -> bool:
    """Whether the backward pass computes a block again from a value, and nothing else reads it after that pass has begun."""
    using = [program.ops[r] for r in read.get(t, ())]
    late = [op.backward for op in using]
    again = any(op.again for op in using)
    return again and t not in program.returned and late == sorted(late) and not program.ops[maker].recomputed


def in_host_memory(program: Program, values: Sequence[HostedValue]) -> Program:
    """The program with these values, as `activations` finds them, in host memory between its passes."""
    for value in values:
        change = partial(_straight if value.loop is None else _stacked, value=value)
        program = changed_at(program, value.where, change)
    return program


def _straight(program: Program, value: HostedValue) -> Program:
    """A value of straight-line code leaves behind its op, and comes back before the first backward op that reads it."""
    t = value.tensor
    tensors = list(program.tensors)
    host, back = len(tensors), len(tensors) + 1
    tensors += [replace(tensors[t], id=host, hosted=True), replace(tensors[t], id=back)]
    number = 1 + max(op.id for op in program.ops)
    ops: list[Op] = []
    fetched = False
    for op in program.ops:
        if op.backward and t in op.tensors:
            if not fetched:
                ops.append(_copy(number + 1, host, back, op))
            fetched = True
            op = renamed(op, {t: back})
        ops.append(op)
        if t in op.outputs:
            ops.append(_copy(number, t, host, op))
    assert fetched, "the backward pass reads what it is worth to keep"
    return replace(program, tensors=tuple(tensors), ops=tuple(ops))


def _stacked(program: Program, value: HostedValue) -> Program:
    """The forward loop copies each slice of a stack to host memory, the backward loop copies it back."""
    assert value.loop is not None, "stacks are those of loops"
    t, (forward_id, back_id) = value.tensor, value.loop
    ops = {op.id: op for op in program.ops}
    forward, back = ScanOp(ops[forward_id]), ScanOp(ops[back_id])
    places = [n for n, o in enumerate(forward.op.outputs) if o == t]
    body = _sent(forward.body, places)
    slices = [n for n, i in enumerate(back.op.inputs) if i == t]
    changed = {forward_id: replace(forward.op, bodies=(body,)), back_id: replace(back.op, bodies=(_fetched(back.body, slices),))}
    tensors = [replace(tensor, hosted=True) if tensor.id == t else tensor for tensor in program.tensors]
    return replace(program, tensors=tuple(tensors), ops=tuple(changed.get(op.id, op) for op in program.ops))


def _sent(body: Program, places: Sequence[int]) -> Program:
    """A forward body with the result at these places in host memory."""
    t = body.outputs[places[0]]
    assert isinstance(t, int), "only values are stacked"
    host = len(body.tensors)
    like = next((op for op in body.ops if t in op.outputs), body.ops[0])
    copy = _copy(1 + max(op.id for op in body.ops), t, host, like)
    outputs = tuple(host if n in places else o for n, o in enumerate(body.outputs))
    tensors = (*body.tensors, replace(body.tensors[t], id=host, hosted=True))
    return replace(body, tensors=tensors, ops=(*body.ops, copy), outputs=outputs)


def _fetched(body: Program, slices: Sequence[int]) -> Program:
    """A backward body that reads these of its inputs from host memory."""
    tensors = list(body.tensors)
    number = 1 + max((op.id for op in body.ops), default=-1)
    copies: list[Op] = []
    names: dict[int, int] = {}
    for n in slices:
        t = body.inputs[n]
        names[t] = len(tensors)
        tensors.append(replace(tensors[t], id=names[t]))
        tensors[t] = replace(tensors[t], hosted=True)
        copies.append(_copy(number + len(copies), t, names[t], body.ops[0]))
    outputs = tuple(names.get(o, o) if isinstance(o, int) else o for o in body.outputs)
    return replace(body, tensors=tuple(tensors), ops=(*copies, *(renamed(op, names) for op in body.ops)), outputs=outputs)


def _copy(number: int, source: int, result: int, beside: Op) -> Op:
    """A copy between memories, in the pass of the op ``beside``."""
    return Op(number, HOST_COPY, (source,), (result,), {}, beside.source, beside.scope)


def hosted_tensor(program: Program, value: HostedValue) -> int:
    """The tensor that holds a value in host memory, in the program that `in_host_memory` has made."""
    if value.loop is not None:
        return value.tensor
    body = program_at(program, value.where)
    return next(op.outputs[0] for op in body.ops if op.moves_memory and op.inputs[0] == value.tensor)
