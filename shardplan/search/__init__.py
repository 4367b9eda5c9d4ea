"""The search: how to cut each op and lay out each tensor for the least predicted time within the memory limit.

A graph is coarsened to variables (`coarsening`), a `problem` prices every choice in tables, `inference` finds the minimum,
`memory` counts the bytes that a device holds, `baselines` are the shardings that people use today, and `strategy` is the whole
search.
"""
