"""Straight-line code: the forward pass is cut where few bytes cross, and the ops between two cuts are recomputed.

A *run* is an unbroken sequence of forward ops. Values that cross one of its cuts are kept. The other values that a *block* (the
ops between two cuts) hands to the backward pass are recomputed, before the first backward op that reads any of them. The last
block of a run is not recomputed: its backward pass comes next. Blocks of many sizes are tried, and the cuts with the least memory
are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.constants import CONSTANTS
from shardplan.ir import RECOMPUTED, Constant, Op, Operand, Program, Tensor
from shardplan.remat.recomputed import (
    IsHeavy,
    Policy,
    RecomputedPart,
    Where,
    closure,
    free,
    made_by,
    readers,
)
from shardplan.remat.scans import renamed

BLOCKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""The numbers of blocks that are tried for each run."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Ops [first, end) of a program, all forward, with the values that they compute.

    Parallel arrays over these ``tensors``: ``nbytes``, ``made`` (the position of the op that computes it), ``last`` (the last op
    of the run that reads it, or ``end`` if it must be kept), and ``handed`` (whether the backward pass reads it).
    """

    first: int
    end: int
    tensors: tuple[int, ...]
    nbytes: NDArray[np.float64]
    made: NDArray[np.int64]
    last: NDArray[np.int64]
    handed: NDArray[np.bool_]


def find_blocks(program: Program, where: Where, heavy: IsHeavy, policy: Policy, elsewhere: int) -> list[RecomputedPart]:
    """The blocks of a program that are worth recomputing; ``elsewhere`` is the number of bytes saved in other places."""
    result: list[RecomputedPart] = []
    free_tensors = free(program)
    runs = _runs(program, free_tensors)
    total = elsewhere + sum(float(run.nbytes[run.handed].sum()) for run in runs)
    for run in runs:
        for cut, end in zip((cuts := [run.first, *_cuts(run)]), cuts[1:], strict=False):
            part = _part(program, run, cut, end, where, heavy, policy, free_tensors)
            if part is not None and part.saved_bytes > CONSTANTS.least_block_share * total:
                result.append(part)
    return result


def _runs(program: Program, free_tensors: frozenset[int]) -> list[_Run]:
    read, outputs = readers(program), program.returned
    spans: list[tuple[int, int]] = []
    for i, op in enumerate(program.ops):
        if op.backward:
            continue
        if spans and spans[-1][1] == i:
            spans[-1] = spans[-1][0], i + 1
        else:
            spans.append((i, i + 1))
    result: list[_Run] = []
    for first, end in spans:
        rows: list[tuple[int, float, int, int, bool]] = []
        for i in range(first, end):
            for t in program.ops[i].outputs:
                positions = read.get(t, [])
                inside = [r for r in positions if r < end]
                later = [program.ops[r].backward for r in positions if r >= end]
                last = end if t in outputs or not all(later) else max(inside, default=i)
                nbytes = 0 if t in free_tensors else program.tensors[t].nbytes
                rows.append((t, nbytes, i, last, any(later)))
        if any(row[4] for row in rows):
            t, nbytes, made, last, handed = zip(*rows, strict=True)
            result.append(_Run(first, end, t, np.array(nbytes, float), np.array(made), np.array(last), np.array(handed)))
    return result


def _cuts(run: _Run) -> list[int]:
    """The positions to cut before, chosen for the least memory."""
    crossing = np.zeros(run.end + 2)
    np.add.at(crossing, run.made + 1, run.nbytes)
    np.add.at(crossing, run.last + 1, -run.nbytes)
    crossing = np.cumsum(crossing)  # before each position: bytes computed earlier and read there or later
    held = np.zeros(run.end + 1)
    np.add.at(held, run.made + 1, np.where(run.handed, run.nbytes, 0.0))
    held = np.cumsum(held)  # before each position: bytes computed earlier for the backward pass
    best: tuple[float, list[int]] = (float(held[run.end]), [])
    for count in BLOCKS:
        cuts = _spread(run, crossing, held, held[run.end] / count)
        peak = _peak(run, cuts)
        if cuts and peak < best[0]:
            best = peak, cuts
    return best[1]


def _spread(run: _Run, crossing: NDArray[np.float64], held: NDArray[np.float64], size: float) -> list[int]:
    """Cuts that leave about ``size`` bytes for the backward pass in each block, each where the fewest bytes cross nearby."""
    cuts: list[int] = []
    start = run.first
    while held[run.end] - held[start] > size:
        low = int(np.searchsorted(held, held[start] + size / 2, side="left"))
        high = int(np.searchsorted(held, held[start] + size, side="right")) - 1
        low, high = max(low, start + 1), max(high, low, start + 1)
        if low >= run.end:
            break
        window = crossing[low : min(high, run.end - 1) + 1]
        start = low + len(window) - 1 - int(np.argmin(window[::-1]))  # the last position where the fewest bytes cross
        cuts.append(start)
    return cuts


def _peak(run: _Run, cuts: Sequence[int]) -> float:
    """The most bytes held for the backward pass while any block runs: those kept up to it, and its own."""
    block = np.searchsorted(np.array(cuts), run.made, side="right")
    kept = block != np.searchsorted(np.array(cuts), run.last, side="right")
    count = len(cuts) + 1
    own = np.bincount(block, np.where(run.handed & ~kept, run.nbytes, 0.0), count)
    return float((np.cumsum(np.bincount(block, np.where(kept, run.nbytes, 0.0), count)) + own).max())


def _part(
    program: Program, run: _Run, first: int, end: int, where: Where, heavy: IsHeavy, policy: Policy, free_tensors: frozenset[int]
) -> RecomputedPart | None:
    """The part of the block [first, end) of a run to recompute; None where that saves nothing."""
    maker = made_by(program)
    crossing = {t for t, made, last in zip(run.tensors, run.made, run.last, strict=True) if first <= made < end and last >= end}

    def kept(t: int) -> bool:
        at = maker.get(t, -1)
        if t in free_tensors:
            return at < 0
        if not first <= at < end or t in crossing:
            return True
        op = program.ops[at]
        return not op.repeatable or (policy == "light" and heavy(where, op.id))

    inside = [i for i, made in enumerate(run.made) if first <= made < end and run.handed[i]]
    wanted = [run.tensors[i] for i in inside if run.tensors[i] not in free_tensors and not kept(run.tensors[i])]
    places, entries = closure(program, wanted, kept)
    # a contraction's result that only the block reads is now kept, in place of the values computed from it
    extra = {t for t in entries if first <= maker.get(t, -1) < end and t not in crossing} - {run.tensors[i] for i in inside}
    nbytes = sum(program.tensors[t].nbytes for t in wanted) - sum(program.tensors[t].nbytes for t in extra)
    return RecomputedPart(where, tuple(program.ops[i].id for i in places), None, nbytes) if wanted and nbytes > 0 else None


def block_again(program: Program, part: RecomputedPart) -> Program:
    """The program with this block recomputed, behind a barrier that values of the backward pass go through as well."""
    recomputed = [op for op in program.ops if op.id in set(part.ops)]
    made = {t for op in recomputed for t in op.outputs}
    last = max(i for i, op in enumerate(program.ops) if op.id in set(part.ops))
    places = [i for i, op in enumerate(program.ops) if i > last and op.backward and made.intersection(op.tensors)]
    read = {t for i in places for t in program.ops[i].tensors}
    free_tensors = free(program)
    wanted = sorted(t for t in made & read if t not in free_tensors)
    tensors = list(program.tensors)
    new: dict[int, int] = {}
    for t in wanted:
        new[t] = len(tensors)
        tensors.append(replace(tensors[t], id=len(tensors)))
    late = _late(program, places[0])
    op = _remat(program, recomputed, wanted, tuple(new.values()), late)
    after = set(places)
    ops = [renamed(old, new) if i in after else old for i, old in enumerate(program.ops)]
    ops.insert(places[0], op)
    return replace(program, tensors=tuple(tensors), ops=tuple(ops))


def _late(program: Program, place: int) -> tuple[int, ...]:
    """Values that the backward pass computed since the last recomputed ops and that are read later.

    Gradients of weights are among them: a compiler that delays these keeps their operands alive, block after block.
    """
    since = max((i + 1 for i, op in enumerate(program.ops[:place]) if op.handle is None), default=0)
    late = {t for op in program.ops[since:place] if op.backward for t in op.outputs}
    read = {t for op in program.ops[place:] for t in op.tensors} | program.returned
    return tuple(sorted(late & read))


def _remat(
    program: Program, recomputed: Sequence[Op], wanted: Sequence[int], results: tuple[int, ...], late: tuple[int, ...]
) -> Op:
    """The remat op whose body is these ops and whose results are the ``wanted`` tensors."""
    made = {t for op in recomputed for t in op.outputs}
    constants = dict(program.constants)
    read = dict.fromkeys(t for op in recomputed for t in op.tensors if t not in made)
    entries = [t for t in read if t not in constants]
    local: dict[int, int] = {}
    tensors: list[Tensor] = []
    for t in (*entries, *late, *(t for t in read if t in constants), *(t for op in recomputed for t in op.outputs)):
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
        for op in recomputed
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
    first = recomputed[0]
    new = 1 + max(op.id for op in program.ops)
    return Op(new, "remat2", outer, results, params, first.source, f"{RECOMPUTED}/{first.scope}", (body,))
