"""Straight-line code: the forward pass is cut where little crosses, and what lies between two cuts is computed again.

A *run* is a row of ops of the forward pass. What crosses one of its cuts is kept; what else a *block* (the ops between two cuts)
hands to the backward pass is computed again from there, before the first backward op that reads any of it. The last block of a
run is not: its backward pass comes next. The cuts are those with the least memory, of cuts for blocks of many sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.ir import RECOMPUTED, Constant, Op, Operand, Program, Tensor
from shardplan.remat.loops import renamed
from shardplan.remat.parts import (
    IsHeavy,
    Part,
    Policy,
    Where,
    closure,
    free,
    made_by,
    readers,
)

BLOCKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""So many blocks are tried for each run."""

LEAST = 0.02
"""A block that saves a smaller share of what is kept in all is left as it is."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Ops [first, end) of a program, all forward, with what they make.

    Parallel arrays over the values made: ``nbytes``, the place that makes them, the last forward op that reads them (the end for
    what must be kept), and whether the backward pass reads them.
    """

    first: int
    end: int
    tensors: tuple[int, ...]
    nbytes: NDArray[np.float64]
    made: NDArray[np.int64]
    last: NDArray[np.int64]
    handed: NDArray[np.bool_]


def find_blocks(program: Program, where: Where, heavy: IsHeavy, policy: Policy, elsewhere: int) -> list[Part]:
    """The blocks of a program that are worth computing again, where so many bytes are saved ``elsewhere``."""
    found: list[Part] = []
    none = free(program)
    runs = _runs(program, none)
    total = elsewhere + sum(float(run.nbytes[run.handed].sum()) for run in runs)
    for run in runs:
        for cut, end in zip((cuts := [run.first, *_cuts(run)]), cuts[1:], strict=False):
            part = _part(program, run, cut, end, where, heavy, policy, none)
            if part is not None and part.saved_bytes > LEAST * total:
                found.append(part)
    return found


def _runs(program: Program, none: frozenset[int]) -> list[_Run]:
    read, outputs = readers(program), program.returned
    spans: list[tuple[int, int]] = []
    for i, op in enumerate(program.ops):
        if op.backward:
            continue
        if spans and spans[-1][1] == i:
            spans[-1] = spans[-1][0], i + 1
        else:
            spans.append((i, i + 1))
    found: list[_Run] = []
    for first, end in spans:
        rows: list[tuple[int, float, int, int, bool]] = []
        for i in range(first, end):
            for t in program.ops[i].outputs:
                by = read.get(t, [])
                inside = [r for r in by if r < end]
                later = [program.ops[r].backward for r in by if r >= end]
                last = end if t in outputs or not all(later) else max(inside, default=i)
                nbytes = 0 if t in none else program.tensors[t].nbytes
                rows.append((t, nbytes, i, last, any(later)))
        if any(row[4] for row in rows):
            t, nbytes, made, last, handed = zip(*rows, strict=True)
            found.append(_Run(first, end, t, np.array(nbytes, float), np.array(made), np.array(last), np.array(handed)))
    return found


def _cuts(run: _Run) -> list[int]:
    """Places before which to cut, the ones with the least memory."""
    crossing = np.zeros(run.end + 2)
    np.add.at(crossing, run.made + 1, run.nbytes)
    np.add.at(crossing, run.last + 1, -run.nbytes)
    crossing = np.cumsum(crossing)  # before each place: bytes made earlier and read there or later
    held = np.zeros(run.end + 1)
    np.add.at(held, run.made + 1, np.where(run.handed, run.nbytes, 0.0))
    held = np.cumsum(held)  # before each place: bytes for the backward pass
    best: tuple[float, list[int]] = (float(held[run.end]), [])
    for count in BLOCKS:
        cuts = _spread(run, crossing, held, held[run.end] / count)
        peak = _peak(run, cuts)
        if cuts and peak < best[0]:
            best = peak, cuts
    return best[1]


def _spread(run: _Run, crossing: NDArray[np.float64], held: NDArray[np.float64], size: float) -> list[int]:
    """Cuts between which about ``size`` bytes are handed to the backward pass, each where the least crosses nearby."""
    cuts: list[int] = []
    start = run.first
    while held[run.end] - held[start] > size:
        low = int(np.searchsorted(held, held[start] + size / 2, side="left"))
        high = int(np.searchsorted(held, held[start] + size, side="right")) - 1
        low, high = max(low, start + 1), max(high, low, start + 1)
        if low >= run.end:
            break
        window = crossing[low : min(high, run.end - 1) + 1]
        start = low + len(window) - 1 - int(np.argmin(window[::-1]))  # the last of the places where the least crosses
        cuts.append(start)
    return cuts


def _peak(run: _Run, cuts: Sequence[int]) -> float:
    """The most bytes that are held for the backward pass while a block of these is on: what is kept up to it, and its own."""
    block = np.searchsorted(np.array(cuts), run.made, side="right")
    kept = block != np.searchsorted(np.array(cuts), run.last, side="right")
    count = len(cuts) + 1
    own = np.bincount(block, np.where(run.handed & ~kept, run.nbytes, 0.0), count)
    return float((np.cumsum(np.bincount(block, np.where(kept, run.nbytes, 0.0), count)) + own).max())


def _part(
    program: Program, run: _Run, first: int, end: int, where: Where, heavy: IsHeavy, policy: Policy, none: frozenset[int]
) -> Part | None:
    """What is computed again of the ops [first, end) of a run."""
    maker = made_by(program)
    crossing = {t for t, made, last in zip(run.tensors, run.made, run.last, strict=True) if first <= made < end and last >= end}

    def kept(t: int) -> bool:
        at = maker.get(t, -1)
        if t in none:
            return at < 0
        if not first <= at < end or t in crossing:
            return True
        op = program.ops[at]
        return not op.repeatable or (policy == "light" and heavy(where, op.id))

    inside = [i for i, made in enumerate(run.made) if first <= made < end and run.handed[i]]
    wanted = [run.tensors[i] for i in inside if run.tensors[i] not in none and not kept(run.tensors[i])]
    places, entries = closure(program, wanted, kept)
    # a contraction's result that only the block itself read is kept in place of what is made of it
    more = {t for t in entries if first <= maker.get(t, -1) < end and t not in crossing} - {run.tensors[i] for i in inside}
    nbytes = sum(program.tensors[t].nbytes for t in wanted) - sum(program.tensors[t].nbytes for t in more)
    return Part(where, tuple(program.ops[i].id for i in places), None, nbytes) if wanted and nbytes > 0 else None


def block_again(program: Program, part: Part) -> Program:
    """The program with this part computed again, behind a barrier that values of the backward pass go through, too."""
    again = [op for op in program.ops if op.id in set(part.ops)]
    made = {t for op in again for t in op.outputs}
    last = max(i for i, op in enumerate(program.ops) if op.id in set(part.ops))
    places = [i for i, op in enumerate(program.ops) if i > last and op.backward and made.intersection(op.tensors)]
    read = {t for i in places for t in program.ops[i].tensors}
    none = free(program)
    wanted = sorted(t for t in made & read if t not in none)
    tensors = list(program.tensors)
    new: dict[int, int] = {}
    for t in wanted:
        new[t] = len(tensors)
        tensors.append(replace(tensors[t], id=len(tensors)))
    late = _late(program, places[0])
    op = _remat(program, again, wanted, tuple(new.values()), late)
    after = set(places)
    ops = [renamed(old, new) if i in after else old for i, old in enumerate(program.ops)]
    ops.insert(places[0], op)
    return replace(program, tensors=tuple(tensors), ops=tuple(ops))


def _late(program: Program, place: int) -> tuple[int, ...]:
    """Values of the backward pass that were made since the last ops that were computed again, and that are read later.

    All of them, gradients of weights too: a compiler that puts those off keeps what they are made of, block after block.
    """
    since = max((i + 1 for i, op in enumerate(program.ops[:place]) if op.handle is None), default=0)
    late = {t for op in program.ops[since:place] if op.backward for t in op.outputs}
    read = {t for op in program.ops[place:] for t in op.tensors} | program.returned
    return tuple(sorted(late & read))


def _remat(program: Program, again: Sequence[Op], wanted: Sequence[int], results: tuple[int, ...], late: tuple[int, ...]) -> Op:
    """The op whose body are these ops, giving what is wanted."""
    made = {t for op in again for t in op.outputs}
    constants = dict(program.constants)
    read = dict.fromkeys(t for op in again for t in op.tensors if t not in made)
    entries = [t for t in read if t not in constants]
    local: dict[int, int] = {}
    tensors: list[Tensor] = []
    for t in (*entries, *late, *(t for t in read if t in constants), *(t for op in again for t in op.outputs)):
        if t not in local:
            local[t] = len(tensors)
            tensors.append(replace(program.tensors[t], id=len(tensors)))

    def inside(operand: Operand) -> Operand:
        return operand if isinstance(operand, Constant) else local[operand]

    ops = [
        replace(
            op,
            inputs=tuple(map(inside, op.inputs)),
            outputs=tuple(local[t] for t in op.outputs),
            scope=f"{RECOMPUTED}/{op.scope}",
        )
        for op in again
    ]
    outer = tuple(dict.fromkeys((*entries, *late)))
    body = Program(
        tuple(tensors),
        tuple(ops),
        tuple(local[t] for t in outer),
        tuple(local[t] for t in wanted),
        tuple((local[t], constants[t]) for t in read if t in constants),
    )
    params: Mapping[str, object] = {"differentiated": True, "prevent_cse": True, "policy": None}
    first = again[0]
    new = 1 + max(op.id for op in program.ops)
    return Op(new, "remat2", outer, results, params, first.source, f"{RECOMPUTED}/{first.scope}", (body,))
