"""Rewrites a program to recompute its parts, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardplan.ir import Program, Where
from shardplan.remat.recomputed import RecomputedPart
from shardplan.remat.scans import loop_again
from shardplan.remat.straight_code import block_again


def rematerialised(program: Program, parts: Sequence[RecomputedPart]) -> Program:
    """The program in which the backward pass recomputes these parts."""
    loops = [part for part in parts if part.loop is not None]
    blocks = [part for part in parts if part.loop is None]
    for part in (*loops, *reversed(blocks)):  # in the order of the backward pass
        program = _inside(program, part.where, part)
    return program


def _inside(program: Program, where: Where, part: RecomputedPart) -> Program:
    if not where:
        return block_again(program, part) if part.loop is None else loop_again(program, part)
    (op_id, at), *rest = where
    ops = tuple(
        replace(op, bodies=tuple(_inside(b, tuple(rest), part) if n == at else b for n, b in enumerate(op.bodies)))
        if op.id == op_id
        else op
        for op in program.ops
    )
    return replace(program, ops=ops)
