"""The search of one problem, within the memory limit and the pins.

`solve` finds the best plan: jointly, or by `recursion` (Tofu, section 5.2) and `polish`. `memory_pricing` brings a plan below the
memory limit, with `repair`. `purposes` says what the factors of a plan are for.
"""

from shardplan.search.strategy.solve import Outcome, search

__all__ = ["Outcome", "search"]
