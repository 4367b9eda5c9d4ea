"""The program that each device runs, spelled out: a plan's choices become a list of instructions for every body of the step.

`build` reads the choices and puts a `Move` wherever a value changes its layout, with the collectives that carry it out, and a
`Compute` for every op on a device's share of its operands. The explicit backend runs these instructions, and a plan's figures
are theirs: nothing else moves a byte, except for the collectives of a `jax.shard_map` in the step itself. No JAX here.
"""

from shardplan.schedule.changes import DimChange, later_splits, splits_buffer
from shardplan.schedule.host_copies import with_host_copies
from shardplan.schedule.instructions import (
    Barrier,
    Block,
    Bundle,
    Compute,
    Cond,
    Cut,
    Fill,
    HostCopy,
    Instruction,
    Move,
    Reblock,
    Scan,
    Schedule,
    Source,
    While,
    instructions_of,
)
from shardplan.schedule.movement_windows import windows
from shardplan.schedule.planned import PlannedProgram, planned_program
from shardplan.schedule.sends import issued, sends, unbundled
from shardplan.schedule.spelling import Ends, build

__all__ = [
    "Barrier",
    "Block",
    "Bundle",
    "Compute",
    "Cond",
    "Cut",
    "DimChange",
    "Ends",
    "Fill",
    "HostCopy",
    "Instruction",
    "Move",
    "PlannedProgram",
    "Reblock",
    "Scan",
    "Schedule",
    "Source",
    "While",
    "build",
    "instructions_of",
    "issued",
    "later_splits",
    "planned_program",
    "sends",
    "splits_buffer",
    "unbundled",
    "windows",
    "with_host_copies",
]
