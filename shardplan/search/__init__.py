"""The search: how each op is cut and how each tensor lies, at the least predicted time within the memory limit.

A graph is coarsened to variables (`coarsening`), a `problem` prices every choice in tables, `inference` finds the minimum,
`memory` says what a device holds, `baselines` are what people use today, and `strategy` is the search as a whole.
"""
