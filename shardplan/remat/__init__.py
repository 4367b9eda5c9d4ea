"""Rematerialisation: a `Program` goes in, and one that keeps fewer activations for its backward pass comes out.

`find` names what may be computed again, as `Part`s; `rematerialised` rewrites the program accordingly (Chen et al., "Training
Deep Nets with Sublinear Memory Cost"). A loop's backward body computes again what its forward body handed over; in straight-line
code the ops between two cuts run again, behind a barrier, before the first backward op that reads them. What is computed again is
part of the program: it is priced, lives and runs like all else.
"""

from shardplan.remat.find import find
from shardplan.remat.parts import Part, Policy, Remat, Without
from shardplan.remat.rewrite import rematerialised

__all__ = ["Part", "Policy", "Remat", "Without", "find", "rematerialised"]
