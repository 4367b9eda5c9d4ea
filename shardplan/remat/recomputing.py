"""Rewrites a program to recompute its parts, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shardplan.ir import Program
from shardplan.remat.recomputed import RecomputedPart, changed_at
from shardplan.remat.scans import loop_again
from shardplan.remat.straight_code import block_again


def rematerialised(program: Program, parts: Sequence[RecomputedPart]) -> Program:
    """The program in which the backward pass recomputes these parts."""
    loops = [part for part in parts if part.loop is not None]
    blocks = [part for part in parts if part.loop is None]
    for part in (*loops, *reversed(blocks)):  # in the order of the backward pass
        change = partial(block_again if part.loop is None else loop_again, part=part)
        program = changed_at(program, part.where, change)
    return program
