"""Proof cases: for each primitive, a generator of calls, as varied as the primitive allows, which verification runs against JAX.

A generator draws shapes (from a small pool, so that compiled ops are reused), dtypes and parameters. A new primitive needs one
function in the file of its family.
"""

from shardplan.tdl.proof import (
    attention,
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
    UnboundCaseError,
    applications,
    prove,
)

assert all((attention, contraction, elementwise, indexing, linalg, movement, randomness, reduction, sorting))

__all__ = [
    "CASES",
    "Case",
    "Draw",
    "Drawn",
    "UnboundCaseError",
    "applications",
    "prove",
]
