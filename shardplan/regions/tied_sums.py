"""Gradients of a weight that several stages use: each stage adds up its own terms, and these sums are added after the loop."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardplan.ir import Op, Program, Tensor


@dataclass(frozen=True, slots=True)
class SplitSums:
    """A step whose loop adds up the terms of each stage separately, and the groups and chunks of its ops, by id."""

    program: Program
    loop: Op
    outer: Mapping[int, int]
    inner: Mapping[int, int]


def split_sums(step: SplitSums, chunks: Sequence[int]) -> SplitSums:
    """The step in which each group adds up its own terms of a total. ``chunks`` is the group of each chunk.

    In the loop, ``total + (a + b)`` with b of another group becomes two totals, which are added after the loop. Terms are found
    through additions whose sum nothing else reads, but not through a conversion.
    """
    while (other := _split_one(step, chunks)) is not None:
        step = other
    return step


@dataclass(frozen=True, slots=True)
class _Terms:
    """Carry number ``carry`` of the loop: the op that adds to it (``total``), the additions that make the addend, and the terms
    of these: those of one other group (``others``), and the ``rest``.
    """

    carry: int
    total: Op
    additions: tuple[Op, ...]
    others: tuple[int, ...]
    rest: tuple[int, ...]


def _split_one(step: SplitSums, chunks: Sequence[int]) -> SplitSums | None:
    """The step with one total taken apart; None if each has only terms of its own group."""
    body, consts, carries = step.loop.bodies[0], int(step.loop.params["num_consts"]), int(step.loop.params["num_carry"])
    maker = {t: op for op in body.ops for t in op.outputs}
    readers = Counter(body.returned)
    readers.update(t for op in body.ops for t in op.tensors)

    def group(t: int) -> int | None:
        return chunks[step.inner[maker[t].id]] if t in maker and maker[t].id in step.inner else None

    for n, (carry, result) in enumerate(zip(body.inputs[consts : consts + carries], body.outputs[:carries], strict=True)):
        total = maker.get(result) if isinstance(result, int) else None
        if total is None or not total.sums or carry not in total.tensors or len(total.tensors) != 2:
            continue
        additions, terms = _terms([t for t in total.tensors if t != carry], maker, readers)
        own, other = group(total.outputs[0]), [t for t in terms if group(t) not in (group(total.outputs[0]), None)]
        if other and any(group(t) == own for t in terms):
            others = tuple(t for t in terms if group(t) == group(other[0]))
            return _split_at(step, _Terms(n, total, additions, others, tuple(t for t in terms if t not in others)), chunks)
    return None


def _terms(added: Sequence[int], maker: Mapping[int, Op], readers: Mapping[int, int]) -> tuple[tuple[Op, ...], tuple[int, ...]]:
    """(the additions whose sum nothing else reads, their terms), found from the ``added`` values on."""
    additions, terms, waiting = list[Op](), list[int](), list(added)
    while waiting:
        t = waiting.pop()
        op = maker.get(t)
        if op is not None and op.sums and readers[t] == 1 and len(set(op.tensors)) == 2:
            additions.append(op)
            waiting += op.tensors
        else:
            terms.append(t)
    return tuple(additions), tuple(terms)


def _split_at(step: SplitSums, terms: _Terms, chunks: Sequence[int]) -> SplitSums:
    """The step with two totals in place of one: of the group that holds it, and of the group that makes the other terms."""
    program, loop, body, total = step.program, step.loop, step.loop.bodies[0], terms.total
    consts, carries, n = int(loop.params["num_consts"]), int(loop.params["num_carry"]), terms.carry
    carry, result = body.inputs[consts + n], total.outputs[0]
    chunk_of = {t: step.inner[op.id] for op in body.ops if op.id in step.inner for t in op.outputs}
    numbers = itertools.count(1 + max(op.id for part in (program, body) for op in part.ops))
    begun, ended = (_like(body.tensors[t], len(body.tensors) + k) for k, t in enumerate((carry, result)))
    made: list[Tensor] = [begun, ended]
    inner = dict(step.inner)
    place = {t: k for k, op in enumerate(body.ops) for t in op.outputs}
    end = place[result]
    new: dict[int, list[Op]] = {end: []}  # by the place of the op that they follow

    def add_up(start: int, values: Sequence[int], into: int) -> None:
        """Adds these values, each as soon as it is there, and then their sum to ``start``."""
        values = sorted(values, key=lambda t: place.get(t, -1))
        sums = values[0]
        for t in values[1:]:
            made.append(_like(body.tensors[result], len(body.tensors) + len(made)))
            op = replace(total, id=next(numbers), inputs=(sums, t), outputs=(made[-1].id,))
            new.setdefault(place.get(t, end), []).append(op)
            inner[op.id] = chunk_of.get(t, step.inner[total.id])
            sums = made[-1].id
        new[end].append(replace(total, id=next(numbers), inputs=(start, sums), outputs=(into,)))
        inner[new[end][-1].id] = min(chunk_of.get(t, step.inner[total.id]) for t in values)

    add_up(carry, terms.rest, result)
    add_up(begun.id, terms.others, ended.id)
    dropped, at = {total.id, *(op.id for op in terms.additions)}, consts + carries
    changed_body = replace(
        body,
        tensors=(*body.tensors, *made),
        ops=tuple(x for k, op in enumerate(body.ops) for x in (*(() if op.id in dropped else (op,)), *new.get(k, ()))),
        inputs=(*body.inputs[:at], begun.id, *body.inputs[at:]),
        outputs=(*body.outputs[:carries], ended.id, *body.outputs[carries:]),
    )
    changed = replace(
        loop,
        inputs=(*loop.inputs[:at], loop.inputs[consts + n], *loop.inputs[at:]),
        params={**loop.params, "num_carry": carries + 1},
        bodies=(changed_body,),
    )
    return _met(replace(step, loop=changed, inner=inner), loop, replace(total, id=next(numbers)), (n, carries), chunks)


def _met(step: SplitSums, before: Op, total: Op, at: tuple[int, int], chunks: Sequence[int]) -> SplitSums:
    """The step whose program adds up both totals of its loop, which were one in the loop ``before``. ``at`` are their numbers
    among the loop's results.
    """
    program, (n, second) = step.program, at
    sums = tuple(_like(program.tensors[before.outputs[n]], len(program.tensors) + k) for k in range(2))
    outputs = (*before.outputs[:n], sums[0].id, *before.outputs[n + 1 : second], sums[1].id, *before.outputs[second:])
    loop = replace(step.loop, outputs=outputs)
    meet = replace(total, inputs=tuple(t.id for t in sums), outputs=(before.outputs[n],))
    changed = replace(
        program,
        tensors=(*program.tensors, *sums),
        ops=tuple(x for op in program.ops for x in ((loop, meet) if op is before else (op,))),
    )
    made_in = next(step.inner[op.id] for op in loop.bodies[0].ops if loop.bodies[0].outputs[n] in op.outputs)
    return SplitSums(changed, loop, {**step.outer, meet.id: chunks[made_in]}, step.inner)


def _like(tensor: Tensor, number: int) -> Tensor:
    return replace(tensor, id=number)
