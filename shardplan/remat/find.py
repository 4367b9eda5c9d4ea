"""Finds the parts of a program that are worth recomputing: loops first, then straight-line code."""

from __future__ import annotations

from shardplan.ir import Program
from shardplan.remat.recomputed import IsHeavy, Policy, RecomputedPart, inner, program_at
from shardplan.remat.recomputing import rematerialised
from shardplan.remat.scans import find_loops
from shardplan.remat.straight_code import find_blocks


def find(program: Program, heavy: IsHeavy, policy: Policy = "all") -> tuple[RecomputedPart, ...]:
    """The parts of a program that are worth recomputing, loops before blocks, as `rematerialised` takes them.

    ``heavy`` tells whether an op of the program is a contraction; the policy "light" keeps the results of contractions.
    """
    loops = [part for where, body in inner(program) for part in find_loops(body, where, heavy, policy)]
    left, saved = rematerialised(program, loops), sum(part.saved_bytes for part in loops)
    blocks = [part for where, _ in inner(program) for part in find_blocks(program_at(left, where), where, heavy, policy, saved)]
    return (*loops, *blocks)
