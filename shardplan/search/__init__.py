"""The search: which way each op is cut and how each tensor lies, at the least predicted time within the memory limit.

`flatten` lays a program's bodies open, `coarsen` groups its tensors into variables, a `Problem` prices every choice in tables,
`search` finds the cheapest one (Tofu, section 5, made joint) and has the baselines at hand, and an `Extractor` spells the
decisions out.
"""

from shardplan.search.coarsen import Coarse, Variable, coarsen
from shardplan.search.extract import Decisions, Extractor, Use
from shardplan.search.graph import Graph, Node, flatten
from shardplan.search.problem import Domain, Problem
from shardplan.search.solve import Outcome, search
from shardplan.search.solver import Solution

__all__ = [
    "Coarse",
    "Decisions",
    "Domain",
    "Extractor",
    "Graph",
    "Node",
    "Outcome",
    "Problem",
    "Solution",
    "Use",
    "Variable",
    "coarsen",
    "flatten",
    "search",
]
