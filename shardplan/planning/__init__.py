"""From a traced step to the solution that becomes the plan: candidates from a generator, compared by one price.

`planner` owns the way: the choice of recomputed values (`recomputation`), the search of one program (`searcher`), over which
factors (`factorings`, or `purpose_matrices` for given purposes), at which multiplier of the two sides of overlap (`multiplier`),
and which solution is the fastest as scheduled (`choose`). `host_memory` asks for several plans, each with more arrays in host
memory. `shardplan.search` minimises one problem.
"""
