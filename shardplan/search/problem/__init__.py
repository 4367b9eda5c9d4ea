"""The problem: which layouts each variable may have, which strategies each op has, and what every combination costs.

`strategies` lists the ways to cut an op, `pricing` and `ops` price them, `Problem` holds the tables of all ops, a `Solution` is
an assignment with its cost, and an `Extractor` turns one into decisions.
"""

from shardplan.search.problem.extract import Decisions, Extractor
from shardplan.search.problem.pricing import Limits
from shardplan.search.problem.problem import Domain, Problem
from shardplan.search.problem.solution import Peak, Solution

__all__ = ["Decisions", "Domain", "Extractor", "Limits", "Peak", "Problem", "Solution"]
