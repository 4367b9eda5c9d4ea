"""Gradients of a weight that several stages use: each stage adds up its own terms, and their sums meet once, after the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardplan.ir import Op, Operand, Program, Tensor


@dataclass(frozen=True, slots=True)
class SplitSums:
    """A step whose loop adds up the terms of each stage by themselves, and the groups and chunks of its ops, by id."""

    program: Program
    loop: Op
    outer: Mapping[int, int]
    inner: Mapping[int, int]


def split_sums(found: SplitSums, chunks: Sequence[int]) -> SplitSums:
    """The step in which no total adds up terms of another group in every microbatch. ``chunks`` is the group of each chunk.

    In the loop, ``total + (a + b)`` with b of another group becomes two totals, which are added behind the loop.
    """
    while (other := _split_one(found, chunks)) is not None:
        found = other
    return found


def _split_one(found: SplitSums, chunks: Sequence[int]) -> SplitSums | None:
    body, consts, carries = found.loop.bodies[0], int(found.loop.params["num_consts"]), int(found.loop.params["num_carry"])
    maker = {t: op for op in body.ops for t in op.outputs}
    readers: dict[int, int] = {t: 1 for t in body.outputs if isinstance(t, int)}
    for op in body.ops:
        for t in op.tensors:
            readers[t] = readers.get(t, 0) + 1

    def group(t: Operand) -> int | None:
        return chunks[found.inner[maker[t].id]] if isinstance(t, int) and t in maker and maker[t].id in found.inner else None

    for n, (carry, result) in enumerate(zip(body.inputs[consts : consts + carries], body.outputs[:carries], strict=True)):
        total = maker.get(result) if isinstance(result, int) else None
        if total is None or not total.sums or carry not in total.tensors or len(total.tensors) != 2:
            continue
        (term,) = (t for t in total.tensors if t != carry)
        added = maker.get(term)
        if added is None or not added.sums or readers[term] != 1 or len(set(added.tensors)) != 2:
            continue
        own = [t for t in added.tensors if group(t) == group(result)]
        others = [t for t in added.tensors if group(t) not in (group(result), None)]
        if len(own) == len(others) == 1:
            return _split_at(found, n, (total, added), (own[0], others[0]), chunks)
    return None


def _split_at(found: SplitSums, n: int, ops: tuple[Op, Op], terms: tuple[int, int], chunks: Sequence[int]) -> SplitSums:
    """The step with two totals in place of carry n: of the group that holds it, and of the group that makes the other term."""
    program, loop, body = found.program, found.loop, found.loop.bodies[0]
    consts, carries = int(loop.params["num_consts"]), int(loop.params["num_carry"])
    (total, added), (own, other) = ops, terms
    carry, result = body.inputs[consts + n], total.outputs[0]
    number = 1 + max(op.id for part in (program, body) for op in part.ops)
    inside, outside = len(body.tensors), len(program.tensors)
    begun, ended = _like(body.tensors[carry], inside), _like(body.tensors[result], inside + 1)
    second = replace(total, id=number, inputs=(begun.id, other), outputs=(ended.id,))
    swapped = {total.id: (replace(total, inputs=(carry, own)), second), added.id: ()}
    at = consts + carries
    inner_program = replace(
        body,
        tensors=(*body.tensors, begun, ended),
        ops=tuple(new for op in body.ops for new in swapped.get(op.id, (op,))),
        inputs=(*body.inputs[:at], begun.id, *body.inputs[at:]),
        outputs=(*body.outputs[:carries], ended.id, *body.outputs[carries:]),
    )
    sums = tuple(_like(program.tensors[loop.outputs[n]], outside + k) for k in range(2))
    outputs = (*loop.outputs[:n], sums[0].id, *loop.outputs[n + 1 : carries], sums[1].id, *loop.outputs[carries:])
    changed = replace(
        loop,
        inputs=(*loop.inputs[:at], loop.inputs[consts + n], *loop.inputs[at:]),
        outputs=outputs,
        params={**loop.params, "num_carry": carries + 1},
        bodies=(inner_program,),
    )
    meet = replace(total, id=number + 1, inputs=tuple(t.id for t in sums), outputs=(loop.outputs[n],))
    new = replace(
        program,
        tensors=(*program.tensors, *sums),
        ops=tuple(x for op in program.ops for x in ((changed, meet) if op is loop else (op,))),
    )
    chunk_of = {t: found.inner[op.id] for op in body.ops if op.id in found.inner for t in op.outputs}
    inner = {**found.inner, number: chunk_of[other]}
    outer = {**found.outer, meet.id: chunks[found.inner[total.id]]}
    return SplitSums(new, changed, outer, inner)


def _like(tensor: Tensor, number: int) -> Tensor:
    return replace(tensor, id=number)
