"""The whole search: over recomputed activations, over factorings of the mesh, and within the memory limit.

`solve` finds the best plan of one factoring: jointly, or by `recursion` (Tofu, section 5.2) and `polish`. `memory_pricing` brings
a plan below the memory limit, with `repair`. `factoring_search` tries `factorings`, `remat_search` recomputes activations.
"""

from shardplan.search.strategy.solve import Outcome, search

__all__ = ["Outcome", "search"]
