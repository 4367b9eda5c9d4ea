"""The flat graph: every op of a program and of its bodies, with its description and how often it runs.

`flatten` lays bodies open, `loops` finds which nodes repeat, `partials` finds which values may stay partial sums.
"""

from shardplan.graph.flattening import Graph, Link, Node, Signature, flatten

__all__ = ["Graph", "Link", "Node", "Signature", "flatten"]
