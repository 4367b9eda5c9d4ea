"""Passes: from the instructions that `shardplan.schedule.build` makes to those that a device runs.

`barriers` delays what should be later, `dedupe` runs equal instructions once, `extents` pads what does not divide, `prune`
leaves out what nobody reads, `transposes` reduces sums as they are stored, and `bundles` lets moves travel together. Two of
them walk with `renaming`.
"""
