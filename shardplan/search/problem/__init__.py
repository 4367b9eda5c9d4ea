"""The problem: which layouts each variable may have, which strategies each op has, and what every combination costs.

`composite_strategies` lists the ways to cut an op, `compute_prices` their seconds, `pricing` adds resharding, `summands` lists
the parts of the cost, `Problem` holds their tables, a `Solution` is an assignment with its cost, and an `Extractor` turns one
into decisions.
"""

from shardplan.search.problem.extract import Decisions, Extractor
from shardplan.search.problem.pricing import Limits
from shardplan.search.problem.problem import Domain, Problem
from shardplan.search.problem.solution import Peak, Solution

__all__ = ["Decisions", "Domain", "Extractor", "Limits", "Peak", "Problem", "Solution"]
