"""The proof: for each primitive a generator of calls, as wide as the primitive allows, that verification runs against JAX.

A generator draws shapes (from a small pool, so that compiled ops are reused), dtypes and parameters. A new primitive adds one
function to the file of its family.
"""

from shardplan.tdl.proof import (
    contraction,
    elementwise,
    indexing,
    linalg,
    movement,
    randomness,
    reduction,
    sorting,
)
from shardplan.tdl.proof.case import (
    CASES,
    Case,
    Draw,
    Drawn,
    applications,
    prove,
)

assert all((contraction, elementwise, indexing, linalg, movement, randomness, reduction, sorting))

__all__ = ["CASES", "Case", "Draw", "Drawn", "applications", "prove"]
