"""Rematerialisation: rewrites a `Program` so that it keeps fewer activations for its backward pass.

`find` lists the parts that are worth recomputing, as `RecomputedPart`s; `rematerialised` rewrites the program accordingly (Chen
et al., "Training Deep Nets with Sublinear Memory Cost"). In a loop, the backward body recomputes values that the forward body
handed over. In straight-line code, the ops between two cuts run again, behind a barrier, before the first backward op that reads
their results. Recomputed ops are part of the program: they are priced, take memory and run like all others.
"""

from shardplan.remat.find import find
from shardplan.remat.recomputed import Policy, RecomputedPart, Remat, Without
from shardplan.remat.recomputing import rematerialised

__all__ = ["Policy", "RecomputedPart", "Remat", "Without", "find", "rematerialised"]
