"""What of a program may be computed again: loops first, then what is left of straight-line code."""

from __future__ import annotations

from shardplan.ir import Program
from shardplan.remat.blocks import find_blocks
from shardplan.remat.loops import find_loops
from shardplan.remat.parts import IsHeavy, Part, Policy, inner, program_at
from shardplan.remat.rewrite import rematerialised


def find(program: Program, heavy: IsHeavy, policy: Policy = "all") -> tuple[Part, ...]:
    """The parts of a program that are worth computing again, in the order in which `rematerialised` takes them.

    ``heavy`` says of an op of the program whether it is a contraction; with the policy "light" their results are kept.
    """
    loops = [part for where, there in inner(program) for part in find_loops(there, where, heavy, policy)]
    left, saved = rematerialised(program, loops), sum(part.saved_bytes for part in loops)
    blocks = [part for where, _ in inner(program) for part in find_blocks(program_at(left, where), where, heavy, policy, saved)]
    return (*loops, *blocks)
