"""A sharding planner for JAX: a training step goes in, a verified sharding comes out.

The way of the data: `trace` turns a step into a `Program`; `tdl` describes each op and derives the ways to cut it; `search` picks
one way per op and one layout per tensor, under the costs of `cost`, `mesh` and `collectives`; `emit` runs the plan; `report`
shows it.
"""

__version__ = "0.1.0"
