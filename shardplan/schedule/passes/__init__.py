"""Passes: from the instructions that `shardplan.schedule.build` makes to those that a device runs.

`barriers` delays what should be later, `dedupe` runs equal instructions once, `extents` pads what does not divide, `prune` leaves
out what nobody reads, `bundles` lets moves travel together, and `fastest` chooses which do. Two of them walk with `renaming`.
"""
