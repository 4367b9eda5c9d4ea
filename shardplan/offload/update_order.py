"""The order in which a step updates arrays that lie in host memory: one array after the other.

As traced, an optimizer makes all first moments, then all second ones, then all updates, so that all of them would be on the
device at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from shardplan.ir import Op, Program
from shardplan.remat.recomputed import made_by


def offloaded(program: Program, arguments: Collection[int]) -> Program:
    """The program with these arguments, by number, and the results that replace them, in host memory.

    The ops of the update, which wait for the backward pass or for such an argument and which no backward op waits for, come last:
    for each result in turn those that it still needs, and for each op first what depends on nothing in host memory. The results
    that stay on the device lead. Ops with effects keep their order. Without arguments, the program is unchanged.
    """
    if not arguments:
        return program
    hosted = {program.inputs[i] for i in arguments}
    places = _update(program, hosted)
    waits = _depends(program, hosted)
    maker = {t: n for t, n in made_by(program).items() if n in places}
    acting = [n for n in places if program.ops[n].acts]
    before = dict(zip(acting[1:], acting, strict=False))
    last = sorted(range(len(program.outputs)), key=lambda n: program.feedback[n] in arguments)
    order: dict[int, None] = {}

    def needed(n: int) -> list[int]:
        """The ops of the update that op ``n`` waits for, first those that need nothing in host memory."""
        own = [maker[t] for t in sorted(program.ops[n].tensors, key=lambda t: t in waits) if t in maker]
        return [*([before[n]] if n in before else []), *own]

    wanted = [maker[o] for n in last if isinstance(o := program.outputs[n], int) and o in maker]
    for root in (*wanted, *sorted(places)):
        _visit(root, needed, order)
    rest = [op for n, op in enumerate(program.ops) if n not in places]
    return replace(program, ops=(*rest, *(program.ops[n] for n in order)), offloaded=frozenset(arguments))


def _visit(root: int, needed: Callable[[int], Sequence[int]], order: dict[int, None]) -> None:
    """Adds an op to the order, behind all that it needs."""
    stack = [(root, iter(needed(root)))]
    while stack:
        n, left = stack[-1]
        following = next((m for m in left if m not in order), None)
        if following is None:
            order.setdefault(n)
            stack.pop()
        else:
            stack.append((following, iter(needed(following))))


def feeds_backward(program: Program) -> Mapping[int, str]:
    """The tensors on which an op of the backward pass depends, each with the source line of an op on the way."""
    found: dict[int, str] = {}
    for op in reversed(program.ops):
        if backward(op) or not set(found).isdisjoint(op.outputs):
            found |= {t: str(op.source) for t in op.tensors}
    return found


def backward(op: Op) -> bool:
    """Whether an op, or one inside it, belongs to the backward pass."""
    return op.backward or any(backward(inner) for body in op.bodies for inner in body.ops)


def _update(program: Program, hosted: Collection[int]) -> set[int]:
    """The places of the ops of the update."""
    before, after = feeds_backward(program), _depends(program, hosted, passes=True)
    return {
        n
        for n, op in enumerate(program.ops)
        if not backward(op) and not set(op.tensors).isdisjoint(after) and set(before).isdisjoint(op.outputs)
    }


def _depends(program: Program, tensors: Collection[int], *, passes: bool = False) -> set[int]:
    """These tensors, and those that depend on them; with ``passes`` also those that a backward op makes."""
    found = set(tensors)
    for op in program.ops:
        if (passes and backward(op)) or not found.isdisjoint(op.tensors):
            found.update(op.outputs)
    return found
