"""Reductions as programs of collectives (P2): their semantics, synthesis, prices and execution.

States and Hoare rules (section 3.2) are in `states`, the language (3.3) in `dsl`, enumeration (3.5) in `synthesis`, prices (5) in
`ranking`, the best program for any number of bytes in `envelope` and best-first search in `best`. `divided` looks for programs
over divisors of a level, too. `reshard` prices moving a tensor between two layouts, over the graph of `layouts`.
`shardplan.collectives.lower` runs programs in `jax.shard_map`. It imports JAX, so import it only where a program is run.
"""

from .best import best_reduction, search
from .dsl import InsideGroup, Instruction, Master, Parallel, Reduction, ReductionError, groups, parse, replay
from .ranking import program_seconds, table
from .synthesis import synthesize

__all__ = [
    "InsideGroup",
    "Instruction",
    "Master",
    "Parallel",
    "Reduction",
    "ReductionError",
    "best_reduction",
    "groups",
    "parse",
    "program_seconds",
    "replay",
    "search",
    "synthesize",
    "table",
]
