"""Scans: the backward body recomputes the values that the forward loop stacks up for the backward loop alone.

For this it needs the values that the forward body reads. Constants and slices are available anyway; carried values are stacked up
in place of all others. With the policy "light" the results of contractions are stacked up, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardplan.ir import RECOMPUTED, Op, Operand, Program, Tensor
from shardplan.remat.recomputed import (
    IsHeavy,
    Policy,
    RecomputedPart,
    Where,
    closure,
    made_by,
    readers,
)


@dataclass(frozen=True, slots=True)
class ScanOp:
    """A scan op with its parameters by name."""

    op: Op

    @property
    def body(self) -> Program:
        """The program that runs in each iteration."""
        return self.op.bodies[0]

    @property
    def consts(self) -> int:
        """How many inputs are the same in each iteration: they come first."""
        return int(self.op.params["num_consts"])

    @property
    def carry(self) -> int:
        """How many inputs are carried: they come next, and are the first results."""
        return int(self.op.params["num_carry"])

    @property
    def length(self) -> int:
        """Number of iterations."""
        return int(self.op.params["length"])

    def stacked(self, local: int) -> list[int]:
        """The results that stack up this value of the body."""
        return [o for o, t in zip(self.op.outputs[self.carry :], self.body.outputs[self.carry :], strict=True) if t == local]


def find_loops(program: Program, where: Where, heavy: IsHeavy, policy: Policy) -> list[RecomputedPart]:
    """The scans of a program whose bodies are worth recomputing, because fewer bytes are then stacked up."""
    read, places = readers(program), {op.id: i for i, op in enumerate(program.ops)}
    result: list[RecomputedPart] = []
    for op in program.ops:
        if op.control != "scan" or op.backward:
            continue
        forward = ScanOp(op)
        pairs = handed_over(program, forward, read)
        for reader in sorted({b for b, _ in pairs.values()}, key=lambda b: places[b]):
            stack_bytes = {local: nbytes for local, (b, nbytes) in pairs.items() if b == reader}
            part = _part(forward, reader, stack_bytes, where, heavy, policy)
            if part is not None:
                result.append(part)
                break  # one backward loop each: a second one reads the values that remain on the stacks
    return result


def handed_over(program: Program, forward: ScanOp, read: Mapping[int, list[int]]) -> dict[int, tuple[int, int]]:
    """For each forward body value that only one backward loop reads, slice by slice: (that loop's id, bytes of the stacks)."""
    result: dict[int, tuple[int, int]] = {}
    shared: set[int] = set()
    ends = program.returned
    for outer, local in zip(forward.op.outputs[forward.carry :], forward.body.outputs[forward.carry :], strict=True):
        if not isinstance(local, int):
            continue
        by = [program.ops[i] for i in read.get(outer, [])]
        alone = len(by) == 1 and outer not in ends and _reads_slices(by[0], outer, forward)
        if not alone or (local in result and result[local][0] != by[0].id):
            shared.add(local)
            continue
        result[local] = by[0].id, result.get(local, (0, 0))[1] + program.tensors[outer].nbytes
    return {local: row for local, row in result.items() if local not in shared}


def _reads_slices(op: Op, outer: int, forward: ScanOp) -> bool:
    if op.control != "scan" or not op.backward or ScanOp(op).length != forward.length:
        return False
    other = ScanOp(op)
    return outer not in op.inputs[: other.consts + other.carry]


def _part(
    forward: ScanOp, reader: int, stack_bytes: Mapping[int, int], where: Where, heavy: IsHeavy, policy: Policy
) -> RecomputedPart | None:
    body, inside = forward.body, (*where, (forward.op.id, 0))
    maker = made_by(body)

    def kept(t: int) -> bool:
        op = body.ops[maker[t]] if t in maker else None
        return op is None or not op.repeatable or (policy == "light" and heavy(inside, op.id))

    wanted = [t for t in stack_bytes if not kept(t)]
    if not wanted:
        return None
    places, entries = closure(body, wanted, kept)
    extra = [t for t in _stacked_too(forward, entries) if not forward.stacked(t)]
    saved = sum(stack_bytes[t] for t in wanted) - forward.length * sum(body.tensors[t].nbytes for t in extra)
    return RecomputedPart(where, tuple(body.ops[i].id for i in places), (forward.op.id, reader), saved) if saved > 0 else None


def _stacked_too(forward: ScanOp, entries: frozenset[int]) -> list[int]:
    """The ``entries`` of a recomputation that change between iterations and are not slices, so that they must be stacked up."""
    place = {t: i for i, t in enumerate(forward.body.inputs)}
    steady = {t for t, _ in forward.body.constants}
    lasting = {t for t, i in place.items() if i < forward.consts or i >= forward.consts + forward.carry}
    return sorted(entries - steady - lasting)


def loop_again(program: Program, part: RecomputedPart) -> Program:
    """The program with this part recomputed in its backward loop."""
    assert part.loop is not None
    ops = {op.id: op for op in program.ops}
    forward, back = ScanOp(ops[part.loop[0]]), ScanOp(ops[part.loop[1]])
    recomputed = [op for op in forward.body.ops if op.id in set(part.ops)]
    made = {t for op in recomputed for t in op.outputs}
    entries = frozenset(t for op in recomputed for t in op.tensors) - made
    tensors = list(program.tensors)
    handed = {t for t, (by, _) in handed_over(program, forward, readers(program)).items() if t in made and by == back.op.id}
    slim, stacks = _slim(forward, handed, _stacked_too(forward, entries), tensors)
    fed = _Feeder(forward, back, stacks, recomputed, handed)
    changed = {forward.op.id: slim, back.op.id: fed.op()}
    return replace(program, tensors=tuple(tensors), ops=tuple(changed.get(op.id, op) for op in program.ops))


def _slim(forward: ScanOp, handed: set[int], entries: Sequence[int], tensors: list[Tensor]) -> tuple[Op, dict[int, int]]:
    """(the forward loop without the stacks of ``handed`` values, the stack of each of the ``entries``)."""
    body, op = forward.body, forward.op
    pairs = list(zip(op.outputs, body.outputs, strict=True))
    stays = [(o, t) for i, (o, t) in enumerate(pairs) if i < forward.carry or t not in handed]
    stacks: dict[int, int] = {}
    for t in entries:
        existing = [o for o, local in stays[forward.carry :] if local == t]
        if not existing:
            of = body.tensors[t]
            tensors.append(Tensor(len(tensors), (forward.length, *of.shape), of.dtype, of.itemsize, of.hosted))
            existing = [tensors[-1].id]
            stays.append((existing[0], t))
        stacks[t] = existing[0]
    slim = pruned(replace(body, outputs=tuple(t for _, t in stays)))
    return replace(op, outputs=tuple(o for o, _ in stays), bodies=(slim,)), stacks


class _Feeder:
    """Builds the backward loop, with ops of the forward body before those of its own body."""

    def __init__(
        self, forward: ScanOp, back: ScanOp, stacks: Mapping[int, int], recomputed: Sequence[Op], handed: set[int]
    ) -> None:
        self.forward, self.back, self.stacks, self.recomputed, self.handed = forward, back, stacks, recomputed, handed
        self.tensors = list(back.body.tensors)
        entry, inputs = back.body.inputs, back.op.inputs
        at = back.consts, back.consts + back.carry
        self.consts: list[tuple[int, Operand]] = list(zip(entry[: at[0]], inputs[: at[0]], strict=True))
        self.slices: list[tuple[int, Operand]] = list(zip(entry[at[1] :], inputs[at[1] :], strict=True))
        self.constants = list(back.body.constants)
        self.new: dict[int, int] = {}  # tensors of the forward body in the backward body

    def op(self) -> Op:
        """The backward loop."""
        body, back = self.back.body, self.back
        first = 1 + max((op.id for op in body.ops), default=-1)
        ops: list[Op] = []
        for n, op in enumerate(self.recomputed):
            inputs = tuple(self.of(i) if isinstance(i, int) else i for i in op.inputs)
            outputs = tuple(self.made(t) for t in op.outputs)
            ops.append(replace(op, id=first + n, inputs=inputs, outputs=outputs, scope=f"{RECOMPUTED}/{op.scope}"))
        later = self.replaced()
        kept = [(t, o) for t, o in self.slices if t not in later]
        carried = back.consts, back.consts + back.carry
        new = Program(
            tensors=tuple(self.tensors),
            ops=(*ops, *(renamed(op, later) for op in body.ops)),
            inputs=(*(t for t, _ in self.consts), *body.inputs[carried[0] : carried[1]], *(t for t, _ in kept)),
            outputs=tuple(later.get(t, t) if isinstance(t, int) else t for t in body.outputs),
            constants=tuple(self.constants),
        )
        outer = (*(o for _, o in self.consts), *back.op.inputs[carried[0] : carried[1]], *(o for _, o in kept))
        params = {**back.op.params, "num_consts": len(self.consts)}
        return replace(back.op, inputs=outer, bodies=(new,), params=params)

    def replaced(self) -> dict[int, int]:
        """The recomputed value for each input of the backward body that it replaces."""
        pairs = zip(self.forward.op.outputs[self.forward.carry :], self.forward.body.outputs[self.forward.carry :], strict=True)
        of = {outer: self.new[local] for outer, local in pairs if isinstance(local, int) and local in self.handed}
        return {t: of[o] for t, o in self.slices if isinstance(o, int) and o in of}

    def made(self, local: int) -> int:
        """A new tensor of the backward body for a recomputed one of the forward body."""
        self.new[local] = self.tensor(self.forward.body.tensors[local])
        return self.new[local]

    def of(self, local: int) -> int:
        """The tensor of the backward body for this one of the forward body; a value from outside becomes an input or constant."""
        if local not in self.new:
            self.new[local] = self.entered(local)
        return self.new[local]

    def entered(self, local: int) -> int:
        """The input or constant of the backward body for a value that the forward body reads, or stacks up."""
        forward = self.forward
        value = dict(forward.body.constants).get(local)
        if value is not None:
            t = self.tensor(forward.body.tensors[local])
            self.constants.append((t, value))
            return t
        place = {t: i for i, t in enumerate(forward.body.inputs)}.get(local)
        if local in self.stacks:
            return self.input(self.slices, self.stacks[local], local)
        assert place is not None
        return self.input(self.consts if place < forward.consts else self.slices, forward.op.inputs[place], local)

    def input(self, rows: list[tuple[int, Operand]], outer: Operand, local: int) -> int:
        """The body's input for this operand: an existing one, or a new one."""
        existing = [t for t, o in rows if isinstance(o, int) and o == outer]
        if existing:
            return existing[0]
        rows.append((self.tensor(self.forward.body.tensors[local]), outer))
        return rows[-1][0]

    def tensor(self, like: Tensor) -> int:
        """A new tensor of the backward body."""
        self.tensors.append(replace(like, id=len(self.tensors)))
        return self.tensors[-1].id


def renamed(op: Op, names: Mapping[int, int]) -> Op:
    """The op with operands renamed by ``names``."""
    if not any(t in names for t in op.tensors):
        return op
    return replace(op, inputs=tuple(names.get(i, i) if isinstance(i, int) else i for i in op.inputs))


def pruned(program: Program) -> Program:
    """The program without ops that nothing depends on; those with effects stay."""
    live = {t for t in program.outputs if isinstance(t, int)}
    kept: list[Op] = []
    for op in reversed(program.ops):
        if any(t in live for t in op.outputs) or (op.handle is not None and op.handle.effects):
            kept.append(op)
            live.update(op.tensors)
    kept.reverse()
    return replace(program, ops=tuple(kept), constants=tuple((t, v) for t, v in program.constants if t in live))
