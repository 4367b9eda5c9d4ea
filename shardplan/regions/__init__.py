"""Ops on groups of devices: a step is cut into programs, one for each stretch of ops that a group runs without waiting for others
(FlexFlow's operator dimension, section 4; the regions that `shardplan.placement` finds).

`assignment` says which group runs each op, `segments` cuts the step, `group_programs` makes the programs, `group_plans` plans
those of each group together, and `dispatch` takes the best of several `schedules` of segments and transfers.
"""
